"""A reader's upkeep of its bus: sweeps dead producers, makes space, and ends requests.

The request lane lies in the segment (shmbus_ext/ring/requests.h). Feeders and workers offer and
take without the collector. Only the collector ends a request: it alone knows the group's outcome.
Upkeep also frees rows of the bound on the lead.

Invariants
----------
- A row or a request of a group is freed without the group's end, for example after an earlier
  collector's death, only after a read of every commit older than the check.
- A request stays open until its group was acknowledged, dropped or given up. So the open requests
  were offered and not trained, and a prompt can be offered again with every sample.
- No more samples of a delivered group are handed out.
- A key whose group ended may be offered again, by a trainer that went back to a checkpoint: its
  samples begin the group anew. Two offers before the end form a single group.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

from shmbus.base import limits
from shmbus.data.keys import make_key, split_key
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


#: Free fraction of the extents below which stragglers are moved ...
_EVACUATE_FREE_FRACTION = 0.125
#: ... from run to run, a share of so many records at once: at once again after freeing a run,
#: else after so many seconds.
_EVACUATE_RECORDS = 2048
_EVACUATE_INTERVAL_S = 0.05
#: Living producers checked per sweep if space is short, at that interval.
_SHORT_SWEEP = 64

#: Id, round, split and origin of a record that holds a run nearly alone.
Straggler: TypeAlias = "tuple[str, int | None, int, bytes]"
#: Finds the possible samples of stragglers.
Find: TypeAlias = "Callable[[list[Straggler]], list[_core.Trajectory]]"


class Lead:
    """The collector's side of the bound on the lead: frees rows claimed by puts."""

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        limit, _, _, max_versions, _ = _core.lead_state(segment)
        #: True if the bus bounds the lead.
        self.bounded = limit > 0
        #: True for a bound in policy versions, dependent on the trained groups.
        self.in_versions = max_versions >= 0
        #: Vanished groups that may hold rows; None for every group, for example after another
        #: collector's death.
        self._doubtful: set[Hashable] | None = None if self.bounded else set()
        #: Rows without claimant at the time of `begin_check`, with the group of a known row.
        self._settled: list[tuple[int, int, Hashable | None]] = []

    def delivered(
        self, groups: list[_core.GroupEntry[_core.Trajectory]], leased_groups: int
    ) -> None:
        """Admit new groups in the place of these groups."""
        for group in groups:
            sample = group.samples[0]
            _core.lead_leave(self._segment, *split_key(sample.key))
        self.follow(leased_groups)

    def follow(self, leased_groups: int, ended_groups: int = 0) -> None:
        """Let a bound in versions follow the policy version, and the groups trained under it."""
        if self.in_versions:
            _core.lead_follow(self._segment, leased_groups, ended_groups)

    def doubt(self, keys: Iterable[Hashable] | None = None) -> None:
        """Check rows soon: of groups that lost samples, or all after a death."""
        if keys is None:
            self._doubtful = None if self.bounded else set()
        elif self._doubtful is not None and self.bounded:
            self._doubtful.update(keys)

    def begin_check(self) -> None:
        """Note doubtful rows; by now the ring holds all commits for them."""
        keys = self._doubtful
        if keys == set() or self._settled:
            return
        self._doubtful = set()
        if keys is None:
            rows = _core.lead_settled(self._segment)
            self._settled = [(row, word, None) for row, word in rows.items()]
            return
        for key in keys:
            rows = _core.lead_settled(self._segment, *split_key(key))
            self._settled += [(row, word, key) for row, word in rows.items()]

    @property
    def checks(self) -> bool:
        """True between `begin_check` and `end_check`."""
        return bool(self._settled)

    def end_check(
        self, waiting: Callable[[], Iterable[Hashable]], waits: Callable[[Hashable], bool]
    ) -> None:
        """Free rows in doubt, after a full read of the ring."""
        settled, self._settled = self._settled, []
        kept: set[int] = set()
        if any(key is None for _, _, key in settled):
            kept = {_core.lead_key(self._segment, *split_key(key)) for key in waiting()}
        for row, word, key in settled:
            if word not in kept and (key is None or not waits(key)):
                _core.lead_free(self._segment, row, word)


class Upkeep:
    """Keeps a bus in order for its only reader."""

    def __init__(
        self,
        segment: _core.Segment,
        reader: _core.Reader,
        recent: dict[Hashable, int | None] | None = None,
    ) -> None:
        self._segment = segment
        self._reader = reader
        self.lead = Lead(segment)
        self.requests = Requests(segment, recent)
        #: Number of attached producers reaped here.
        self.deaths = 0
        self.next_sweep_s = 0.0
        self._swept_s = 0.0
        self.next_evacuation_s = 0.0
        self._attach_epoch = segment.attach_epoch

    def sweep(self, now: float) -> None:
        """Reap dead producers, unless swept within the last second."""
        if now - self._swept_s >= limits.SWEEP_INTERVAL_S:
            self._swept_s = now
            self.deaths += self._reader.sweep()

    def sweep_all(self) -> None:
        """Reap all dead producers now."""
        self.deaths += self._reader.sweep(self._segment.max_producers)

    def run(self, now: float, find: Find, leased_groups: int) -> bool:
        """Sweep, and move waiting samples to make space, at intervals; True after a sweep."""
        sweeps = now >= self.next_sweep_s
        if sweeps:
            self.next_sweep_s = now + limits.SWEEP_INTERVAL_S
            self.sweep(now)
            if self._segment.attach_epoch != self._attach_epoch:
                # Another producer may have reaped a dead producer.
                self._attach_epoch = self._segment.attach_epoch
                self.doubt()
            self.lead.follow(leased_groups)
        if now >= self.next_evacuation_s:
            self.next_evacuation_s = now + _EVACUATE_INTERVAL_S
            self._free_space(find)
        return sweeps

    def _free_space(self, find: Find) -> None:
        """Free space: reuse empty runs, and move stragglers if space is short."""
        self._reader.tidy()
        few = self._segment.extent_count * _EVACUATE_FREE_FRACTION
        if self._segment.space_wanted() or self._segment.free_extents() < few:
            self.deaths += self._reader.sweep(_SHORT_SWEEP)
            stragglers = self._reader.stragglers(_EVACUATE_RECORDS)
            if stragglers and self._reader.evacuate(find(stragglers)):
                self.next_evacuation_s = 0.0

    # -- vanished groups ------------------------------------------------------------------------

    def doubt(self, keys: Iterable[Hashable] | None = None) -> None:
        """Check rows and requests soon: of groups that lost samples, or all after a death."""
        keys = keys if keys is None else [*keys]
        self.lead.doubt(keys)
        self.requests.doubt(keys)

    def begin_checks(self) -> None:
        """Note doubtful rows and requests, before a portion of the ring is read."""
        self.lead.begin_check()
        self.requests.begin_check()

    @property
    def checks(self) -> bool:
        """True between `begin_checks` and `end_checks`."""
        return self.lead.checks or self.requests.checks

    def end_checks(
        self,
        waiting: Callable[[], Iterable[Hashable]],
        waits: Callable[[Hashable], bool],
        is_present: Callable[[Hashable], bool],
    ) -> None:
        """Free doubtful rows and requests after a full read of the ring; rows of `waiting` stay."""
        requests = self.requests
        if requests.checks:
            # First: an ended request holds no place for its group.
            requests.end_check(is_present)
        if self.lead.checks:
            self.lead.end_check(
                lambda: [*waiting(), *requests.handed_out()],
                lambda key: waits(key) or requests.is_open(key),
            )
