"""Retries of failed samples: the source asked for each sample, and the rows read by its producers.

Invariants:

- A request lies with a single source at a time; its next attempt goes to another source, if
  possible. With prompts from the trainers' buses it stays with the source holding its prompt.
- A source gets a whole list, with a growing number: lost or late lists do no harm, and a confirmed
  list needs no repeat.
- A source gets a request after its backoff, and its timeout begins then.
- A bus's table holds the samples of the newest list taken, and an earlier source's samples until
  the first list comes: a claim outlives the source and the coordinator.
- A claim counts as lost only after its producer's death, and after a read of every record the
  producer committed.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable
from typing import TypeAlias

from shmbus.relay.messages import GroupName, MissingSample, Unanswered, Wanted, bus_of
from shmbus.relay.splits import Splits, number_of
from shmbus.stash.failures import Failures, Request
from shmbus.stash.retries import publish_row
from shmbus_ext import _core
from shmbus_ext._core import OriginHead

_At: TypeAlias = tuple[Hashable, int]


class RetryRequests:
    """Spreads the open requests of a stash over sources."""

    def __init__(self, failures: Failures[OriginHead], splits: Splits) -> None:
        self._failures = failures
        self._splits = splits
        #: By request with a source: the request, and the source's bus.
        self._at: dict[_At, tuple[Request, str]] = {}
        self._numbers: Counter[str] = Counter()
        self._buses: tuple[str, ...] = ()
        #: True while requests wait because every source's table is full.
        self._waits = False
        #: True if only the source with the prompt can make a sample.
        self.at_home = False

    @property
    def open(self) -> int:
        """The number of samples asked for now."""
        return len(self._at)

    def update(self, buses: tuple[str, ...], now_s: float) -> set[str]:
        """Ask these sources, in order, for failed samples; return sources with changed lists."""
        same = buses is self._buses or buses == self._buses
        self._failures.look_for_due(now_s)
        if same and not self._failures.dirty and not self._waits:
            return set()
        self._buses = buses
        self._failures.dirty = False
        requests = self._failures.requests
        changed = set()
        for at, (request, bus) in list(self._at.items()):
            if requests.get(at) is not request or bus not in buses:
                del self._at[at]
                changed.add(bus)
                if requests.get(at) is request:
                    self._failures.put_back(request)
        counts = Counter(bus for _, bus in self._at.values())
        open_ = {bus for bus in buses if counts[bus] < _core.RETRY_ENTRIES}
        self._waits = False
        while (due := self._failures.take_ready()) is not None:
            found = self._choose(due, open_)
            if found is None:
                self._failures.put_back(due)
                self._waits = True
                break  # the next ended request, or the next source, makes room
            self._at[due.key, due.index] = (due, found)
            self._failures.publish(due, now_s)
            changed.add(found)
            counts[found] += 1
            if counts[found] >= _core.RETRY_ENTRIES:
                open_.discard(found)
        self._numbers.update(changed)
        return changed

    def _choose(self, request: Request, open_: set[str]) -> str | None:
        """Return a source with room: from the group's home, whose worker holds the prompt, on."""
        count = len(self._buses)
        start = self._buses.index(home) if (home := self._home(request)) in self._buses else None
        attempt = 1 if self.at_home and start is not None else request.attempt
        if start is None:
            start = zlib.crc32(str(request.key).encode("utf-8", "replace"))
        for step in range(count):
            bus = self._buses[(start + attempt - 1 + step) % count]
            if bus in open_:
                return bus
        return None

    def _home(self, request: Request) -> str:
        group = self._failures.groups.get(request.key)
        if group is None:
            return ""
        failed = group.failed.get(request.index)
        if failed is not None and failed.report is not None:
            return bus_of(failed.report.origin)
        return next((bus_of(sample.origin) for sample in group.samples), "")

    def find(self, bus: str, sample: MissingSample) -> Request | None:
        """Return a source's request; None if another source holds the request."""
        at = (self._splits.key(sample.group), sample.index)
        request, asked = self._at.get(at, (None, ""))
        same = request is not None and asked == bus and request.attempt == sample.attempt
        return request if same else None

    def wanted(self, bus: str, term: int) -> Wanted:
        """Return the full list for a source's producers."""
        samples = tuple(self._sample(request) for request, at in self._at.values() if at == bus)
        return Wanted(bus, term, self._numbers[bus], samples)

    def number(self, bus: str) -> int:
        """Return the number of a source's newest list."""
        return self._numbers[bus]

    def _sample(self, request: Request) -> MissingSample:
        return MissingSample(
            self._splits.name(request.key), request.group_size, request.need, request.index,
            request.attempt, request.reason,
        )  # fmt: skip


#: The key of a requested sample, equal to MissingSample.id.
_Id: TypeAlias = tuple[GroupName, int, int]
_Row: TypeAlias = tuple[int, int, int, str, int | None, int, int, int, int, int, str, int]


class RetryRows:
    """Publishes a bus's list for its producers."""

    def __init__(self, segment: _core.Segment, identity: str) -> None:
        self._segment = segment
        self._bus = identity
        #: Term and number of the newest list.
        self.mark = (0, 0)
        self._rows: dict[_Id, int] = {}
        #: Requests with a dead claimant, whose records may not all be read.
        self._dead: dict[_Id, int] = {}
        for row, _, _, id_, round, split, _, _, index, attempt, _, _ in self._read():
            group = (id_, round, _core.split_label(segment, split))
            self._rows[group, index, attempt] = row
        taken = set(self._rows.values())
        self._free = [row for row in range(_core.RETRY_ENTRIES - 1, -1, -1) if row not in taken]
        for row in self._free:
            _core.retry_withdraw(segment, row)
        self._note()

    def _read(self) -> list[_Row]:
        return _core.retry_requests(self._segment)

    def _note(self) -> None:
        _, failed = _core.retry_noted(self._segment)
        _core.retry_note(self._segment, len(self._rows), failed)

    def take(self, message: Wanted) -> None:
        """Replace the list for producers; ignore an older list."""
        mark = (message.term, message.number)
        if mark < self.mark:
            return
        self.mark = mark
        new = {sample.id: sample for sample in message.samples}
        for id_ in self._rows.keys() - new.keys():
            row = self._rows.pop(id_)
            _core.retry_withdraw(self._segment, row)
            self._free.append(row)
        for id_, sample in new.items():
            split = number_of(self._segment, sample.group[2])
            if id_ not in self._rows and self._free and split < _core.MAX_SPLITS:
                self._rows[id_] = self._publish(sample, split)
        self._note()

    def _publish(self, sample: MissingSample, split: int) -> int:
        row = self._free.pop()
        publish_row(self._segment, row, (*sample.group[:2], split), sample)
        return row

    def check_claimants(self) -> None:
        """Note claims of dead producers. Call it after a sweep, and `lost` after the next read."""
        if not self._rows:
            self._dead = {}
            return
        claims = {row: claimant - 1 for row, _, claimant, *_ in self._read() if claimant}
        alive = {row[2] for row in self._segment.producers() if row[1] == _core.SLOT_ACTIVE}
        self._dead = {
            id_: claims[row]
            for id_, row in self._rows.items()
            if row in claims and claims[row] not in alive
        }

    def lost(self) -> list[Unanswered]:
        """Return dead producers' samples, until another attempt is asked for."""
        if not self._dead:
            return []
        said = []
        for _, _, claimant, id_, round, split, size, need, index, attempt, _, _ in self._read():
            group = (id_, round, _core.split_label(self._segment, split))
            if claimant and self._dead.get((group, index, attempt)) == claimant - 1:
                why = f"producer {claimant - 1} died while it had it"
                sample = MissingSample(group, size, need, index, attempt, why)
                said.append(Unanswered(self._bus, sample))
        return said
