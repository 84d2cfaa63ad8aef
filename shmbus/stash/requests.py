"""The collector's side of the request lane: ends of requests.

The lane lies in the segment (shmbus_ext/ring/requests.h). Feeders and workers offer and take
without the collector. Only the collector ends a request: it alone knows the group's outcome.

Invariants
----------
- A request stays open until its group was acknowledged, dropped or given up. So the open requests
  were offered and not trained, and a prompt can be offered again with every sample.
- No more samples of a delivered group are handed out.
- A key whose group ended may be offered again, by a trainer that went back to a checkpoint: its
  samples begin the group anew. Two offers before the end form a single group.
- A request left open by an earlier collector, despite its group's end, ends after a read of all
  earlier commits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable

from shmbus.data.keys import make_key
from shmbus_ext import _core


class Requests:
    """Ends the requests of a bus as their groups end."""

    def __init__(
        self, segment: _core.Segment, recent: dict[Hashable, int | None] | None = None
    ) -> None:
        self._segment = segment
        self._recent: dict[Hashable, int | None] = {} if recent is None else recent
        #: Changes of every chunk of rows, and the request of every row, as `_open` knows them.
        self._seen = b""
        self._numbers = array("Q", bytes(8 * _core.request_row_count(segment)))
        #: Rows and numbers of open requests by the key of their group, oldest first.
        self._open: dict[Hashable, list[tuple[int, int]]] = {}
        #: Groups with doubtful requests; None for every group.
        self._doubtful: set[Hashable] | None = None
        #: Their open requests with answers at the time of `begin_check`.
        self._begun: list[tuple[int, int]] | None = None

    @property
    def used(self) -> bool:
        """True after the first offer on the bus; a read of a single word."""
        return _core.request_number(self._segment) != 0

    def is_open(self, key: Hashable) -> bool:
        """Tell if a group was offered through the lane, and still runs."""
        return self.used and self._find(key) is not None

    def has_open(self) -> bool:
        """Tell if the lane holds untaken samples."""
        return _core.request_totals(self._segment)[1] > 0

    def _key(self, id_: str, round: int | None, split: str) -> Hashable:
        return make_key(id_, round, _core.split_number(self._segment, split))

    def _find(self, key: Hashable) -> tuple[int, int] | None:
        if key not in self._open:
            self._learn()
        found = self._open.get(key)
        return found[0] if found else None

    def _learn(self) -> None:
        """Read new requests: always all rows up to a number, for the oldest of a key."""
        # Rows before the last are open; newer rows may lie in places that the look has passed.
        last = _core.request_number(self._segment)
        seen, changed = _core.request_changes(self._segment, self._seen, self._numbers)
        for row, number in sorted(changed, key=lambda change: change[1]):
            if number > last:
                return
            text = _core.request_text(self._segment, row, number) if number else None
            if text is not None:  # else the request has ended
                self._open.setdefault(self._key(*text[:3]), []).append((row, number))
            self._numbers[row] = number
        self._seen = seen

    def delivered(self, groups: list[_core.GroupEntry[_core.Trajectory]]) -> None:
        """Stop handing out samples of delivered groups."""
        if self.used:
            for group in groups:
                at = self._find(group.samples[0].key)
                if at is not None:
                    _core.request_close(self._segment, *at)

    def ended(self, samples: list[_core.Trajectory]) -> None:
        """End the request of a group that was acknowledged or dropped."""
        if samples and self.used:
            self.end(samples[0].key)
            self.note_end(samples[0].key)

    def note_end(self, key: Hashable) -> None:
        """Note a group's end: later offers begin the group anew."""
        if key in self._recent:
            self._recent[key] = _core.request_number(self._segment)

    def offered_again(self, key: Hashable) -> bool:
        """Tell if an open request was offered after the end of this key's group."""
        ended_at = self._recent.get(key)
        if ended_at is None or _core.request_number(self._segment) == ended_at:
            return False
        self._learn()
        return any(number > ended_at for _, number in self._open.get(key, ()))

    def end(self, key: Hashable) -> None:
        """End the oldest request of a group."""
        at = self._find(key)
        if at is not None:
            _core.request_end(self._segment, *at)
            rest = self._open[key]
            del rest[0]
            if not rest:
                del self._open[key]

    # -- after a death, and for groups given up by the stash ---------------------------------------

    def doubt(self, keys: Iterable[Hashable] | None = None) -> None:
        """Check soon the requests of groups that lost samples, or all after a death."""
        if keys is None:
            self._doubtful = None
        elif self._doubtful is not None and self.used:
            self._doubtful.update(keys)

    def begin_check(self) -> None:
        """Note doubtful requests with answers; by now the answers are in the ring, or left."""
        doubtful = self._doubtful
        if doubtful == set() or self._begun is not None or not self.used:
            return
        self._doubtful = set()
        if doubtful is None:
            self._begun = [
                (row, number)
                for row, number, _, open_, claimed, done in _core.request_rows(self._segment)
                if done or not open_ + claimed
            ]
            return
        self._learn()
        self._begun = [
            at
            for key in doubtful
            for at in self._open.get(key, ())
            if _core.request_answered(self._segment, *at)
        ]

    @property
    def checks(self) -> bool:
        """True between `begin_check` and `end_check`."""
        return self._begun is not None

    def end_check(self, is_present: Callable[[Hashable], bool]) -> None:
        """End requests whose answers left the bus, after a full read of the ring."""
        begun, self._begun = self._begun or [], None
        for row, number in begun:
            text = _core.request_text(self._segment, row, number)
            if text is None:
                continue
            key = self._key(*text[:3])
            if not is_present(key):
                self._find(key)
                if (row, number) in self._open.get(key, ()):
                    self._open[key].remove((row, number))
                    if not self._open[key]:
                        del self._open[key]
                _core.request_end(self._segment, row, number)
                self.note_end(key)

    def handed_out(self) -> Iterable[Hashable]:
        """Yield the keys of groups with a sample handed to a worker."""
        for row, number, admitted, *_ in _core.request_rows(self._segment) if self.used else ():
            text = _core.request_text(self._segment, row, number) if admitted else None
            if text is not None:
                yield self._key(*text[:3])
