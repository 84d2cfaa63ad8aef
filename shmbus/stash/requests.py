"""The collector's side of the request lane: which request has ended, and with what.

The lane lies in the segment (shmbus_ext/ring/requests.h). Feeders and workers need nobody to offer
and to take. Only the end of a request is the collector's to say: it alone knows what became of the
group.

Invariants
----------
- A request stays open until its group was acknowledged, dropped or given up. So what is open is
  what was offered and not trained, and a prompt can be offered again with any of its samples.
- Nothing more is handed out of a group that was delivered.
- A key whose group has ended may be offered again, by a trainer that went back to a checkpoint: its
  samples begin the group anew. What was offered twice before that is one group.
- A request that an earlier collector left open, though its group has ended, ends once everything
  that was committed before has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from shmbus._keys import make_key
from shmbus_ext import _core


class Requests:
    """Ends the requests of a bus as their groups end."""

    def __init__(
        self, segment: _core.Segment, recent: dict[Hashable, int | None] | None = None
    ) -> None:
        self._segment = segment
        self._recent: dict[Hashable, int | None] = {} if recent is None else recent
        #: Up to which number `_open` knows of every request that was open.
        self._number = 0
        #: Rows and numbers of open requests by the key of their group, oldest first.
        self._open: dict[Hashable, list[tuple[int, int]]] = {}
        #: Groups whose requests are in doubt; None for all groups.
        self._doubtful: set[Hashable] | None = None
        #: Of those the open requests with answers when `begin_check` looked.
        self._begun: list[tuple[int, int]] | None = None

    @property
    def used(self) -> bool:
        """Whether anything was ever offered; a read of one word."""
        return _core.request_number(self._segment) != 0

    def is_open(self, key: Hashable) -> bool:
        """Whether a group was offered through the lane, and has not ended."""
        return self.used and self._find(key) is not None

    def has_open(self) -> bool:
        """Whether there are samples that nobody has taken yet."""
        return _core.request_totals(self._segment)[1] > 0

    def _key(self, id_: str, round: int | None, split: str) -> Hashable:
        return make_key(id_, round, _core.split_number(self._segment, split))

    def _find(self, key: Hashable) -> tuple[int, int] | None:
        found = self._open.get(key)
        if found is None:
            self._learn()
            found = self._open.get(key)
        return found[0] if found else None

    def _learn(self) -> None:
        """Learn of requests that were offered since."""
        # One feeder at a time opens rows, in the order of their numbers. So all before the number
        # that was the last when the look began are open by then; that one may still be written, and
        # newer ones may lie in rows that the look has passed.
        last = _core.request_number(self._segment)
        if last == self._number:
            return
        whole = last - 1
        for row, number, id_, round, split in sorted(
            _core.request_since(self._segment, self._number), key=lambda row: row[1]
        ):
            if number > last:
                break
            self._open.setdefault(self._key(id_, round, split), []).append((row, number))
            whole = max(whole, number)
        self._number = max(self._number, whole)

    def delivered(self, groups: list[_core.GroupEntry[_core.Trajectory]]) -> None:
        """Hand out nothing more of groups that were delivered."""
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
        """Note that a group has ended: what is offered of it from now on begins it anew."""
        if key in self._recent:
            self._recent[key] = _core.request_number(self._segment)

    def offered_again(self, key: Hashable) -> bool:
        """Whether a request is open that was offered after the group of this key had ended."""
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

    # -- after a death, and for groups that the stash gave up --------------------------------------

    def doubt(self, keys: Iterable[Hashable] | None = None) -> None:
        """Check soon the requests of groups that lost samples, or all after a death."""
        if keys is None:
            self._doubtful = None
        elif self._doubtful is not None and self.used:
            self._doubtful.update(keys)

    def begin_check(self) -> None:
        """Note which requests in doubt have answers; these are in the ring by now, or have left."""
        doubtful = self._doubtful
        if doubtful == set() or self._begun is not None or not self.used:
            return
        self._doubtful = set()
        if doubtful is None:
            self._begun = [
                (row, number)
                for row, number, _, _, _, done in _core.request_rows(self._segment)
                if done
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
        """Whether a check has begun that `end_check` ends."""
        return self._begun is not None

    def end_check(self, is_present: Callable[[Hashable], bool]) -> None:
        """End requests whose answers are on the bus no more, once the ring was read to its end."""
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
        """Yield the keys of groups of which a worker has had a sample."""
        for row, number, admitted, *_ in _core.request_rows(self._segment) if self.used else ():
            text = _core.request_text(self._segment, row, number) if admitted else None
            if text is not None:
                yield self._key(*text[:3])
