"""Rates of a bus: the difference of two polls over the time between them.

Invariants: a poll stays cheap on a full bus (no walk over many records); a bus created again under
its name starts anew.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

import msgspec

from shmbus.base import limits
from shmbus.control.ask import ask_status
from shmbus.data.status_types import BusEvent, BusStatus
from shmbus.inspect.groups import Groups, read_groups
from shmbus.inspect.history import read_events
from shmbus.inspect.processes import ProducerChecks
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import join, status_of
from shmbus.inspect.verdict import judge

#: Undelivered trajectories up to which a poll also walks and groups them: some 0.2 s of work.
_WALK_RECORDS = 20_000
#: Samples per group a poll requests from a daemon: more than every display shows singly, and all
#: samples of a group of usual size, enough to identify the missing producer.
_CELLS = 1024
#: Processes of producers checked by a poll: some 10 ms of work. More producers take turns.
_CHECKS = 256
#: Seconds of summed waiting between two notes, and the longest gap between polls of a watched bus:
#: older waits do not belong to the last minute.
_WAITS_OVER_S = 60.0
_WAITS_EVERY_S = 5.0
_UNWATCHED_S = 10.0
#: Runs, and records of each, behind the mean size of a trajectory.
_SAMPLE_RUNS = 8
_SAMPLE_RECORDS = 8


class Rates(msgspec.Struct, frozen=True):
    """Rates between two polls."""

    committed: float = 0.0
    acknowledged: float = 0.0
    dropped: float = 0.0
    #: Committed per second, by the mean of recent records; 0 if unreadable.
    bytes: float = 0.0
    tokens: float = 0.0


class Watcher:
    """Polls a bus repeatedly."""

    def __init__(self, name: str, *, groups: int = 0, events: int = 0, share: float = 1.0) -> None:
        self.name = name
        self._events = events
        self._groups = groups
        self._share = share
        self.status: BusStatus
        self._forget(0)

    def _forget(self, created: int) -> None:
        #: Creation time of the bus; a new number means a new bus of the name.
        self.created_unix_ns = created
        #: The oldest incomplete groups of the last poll with a read.
        self.groups = Groups(source="none", groups=[])
        #: Age of the groups, in seconds.
        self.groups_age_s = 0.0
        self._groups_at_s = 0.0
        #: The daemon's newest events, oldest first; empty without a daemon.
        self.events: list[BusEvent] = []
        #: Incomplete and complete groups of the last poll with a walk; None before the first.
        self.sorted: tuple[int | None, int | None] = (None, None)
        #: Seconds since the last commit seen by a poll, by producer number.
        self.idle_s: dict[int, float] = {}
        #: Seconds without movement in the polls.
        self.still_s = 0.0
        self._active_s: dict[int, tuple[int, float]] = {}
        self._moved: tuple[object, float] = (None, 0.0)
        self._next_walk_s = 0.0
        #: Seconds of waiting in the last minute, or since a later first poll, by producer number.
        #: Never more than the period.
        self.waited_s: dict[int, float] = {}
        #: The same sum over all trainers: at most the period times the number of trainers.
        self.trainers_waited_s = 0.0
        self._checks = ProducerChecks(_CHECKS)
        #: Times, each slot's waiting, and the trainers' waiting.
        self._waits: deque[tuple[float, dict[int, float], float]] = deque()
        self._at_s = 0.0
        self._before: BusStatus | None = None
        self._mean = (0.0, 0.0)
        self.rates = Rates()
        #: Trajectories a second, by producer number.
        self.producer_rates: dict[int, float] = {}

    def poll(self) -> None:
        """Poll once."""
        with SegmentFile(self.name) as file:
            file.require()
            created = int(file.header["created_unix_ns"])
            if created != self.created_unix_ns:
                self._forget(created)
            status = status_of(file, walk=False, checks=self._checks)
            began_s = time.monotonic()
            walks = status.ledger.undelivered <= _WALK_RECORDS and began_s >= self._next_walk_s
            if walks:
                status = status_of(file, checks=self._checks)
            now = time.monotonic()
            self._sample(file)
        self._note_activity(status, now)
        joined = join(status, ask_status(self.name))
        if not walks:  # counted by the last walk
            joined = msgspec.structs.replace(joined, groups_complete=self.sorted[1])
        self._note_waits(joined, now)
        answers = joined.daemon is not None and joined.daemon.answers
        self._read_groups(walks=walks, ask=answers)
        if self._events:
            found = read_events(self.name, limit=self._events, groups=False) if answers else None
            self.events = [] if found is None else found.events
        if walks:
            self.sorted = status.groups_incomplete, status.groups_complete
            self._next_walk_s = now + (time.monotonic() - began_s) * (1 / self._share - 1)
        groups = self.groups
        verdict = judge(joined, groups.groups, omitted=groups.omitted, still_s=self.still_s)
        oldest = groups.groups[: limits.STATUS_GROUPS]
        self.status = msgspec.structs.replace(joined, verdict=verdict, oldest_incomplete=oldest)
        self._compare(status, now)
        self._before, self._at_s = status, now

    def _read_groups(self, *, walks: bool, ask: bool) -> None:
        count = self._groups or limits.STATUS_GROUPS
        records = _WALK_RECORDS if walks else 0
        found = read_groups(self.name, count, cells=_CELLS, walk_records=records, ask=ask)
        if found.source != "none" or walks or not self.groups.groups:
            self.groups = found
            self._groups_at_s = time.monotonic()
        self.groups_age_s = time.monotonic() - self._groups_at_s

    def _note_activity(self, status: BusStatus, now_s: float) -> None:
        """Note since when each producer, and the bus as a whole, stands still."""
        idle_s = {}
        active_s = {}
        for producer in status.producers:
            number = producer.producer_id
            count, since_s = self._active_s.get(number, (producer.committed, now_s))
            if count != producer.committed:
                count, since_s = producer.committed, now_s
            active_s[number] = count, since_s
            idle_s[number] = max(now_s - since_s, producer.idle_s or 0.0)
        self._active_s, self.idle_s = active_s, idle_s
        ledger = status.ledger
        moved = (ledger.committed, ledger.acknowledged, ledger.dropped, ledger.leased)
        if moved != self._moved[0]:
            self._moved = moved, now_s
        self.still_s = now_s - self._moved[1]

    def _note_waits(self, status: BusStatus, now_s: float) -> None:
        by_slot = {producer.slot: producer.waited_s for producer in status.producers}
        trainers_s = status.waited.trainers_s
        notes = self._waits
        if now_s - self._at_s > _UNWATCHED_S:
            notes.clear()
        if not notes or now_s - notes[-1][0] >= _WAITS_EVERY_S:
            notes.append((now_s, by_slot, trainers_s))
        while now_s - notes[0][0] > _WAITS_OVER_S:
            notes.popleft()
        since_s, before, trainers_before_s = notes[0]
        # A wait counts at its end, and may have begun before.
        most_s = now_s - since_s
        self.waited_s = {
            producer.producer_id: _within(
                producer.waited_s - before.get(producer.slot, 0.0), most_s
            )
            for producer in status.producers
        }
        trainers = 1 if status.daemon is None else max(1, len(status.daemon.leases))
        self.trainers_waited_s = _within(trainers_s - trainers_before_s, most_s * trainers)

    def _sample(self, file: SegmentFile) -> None:
        """Take mean bytes and tokens of some recent records, delivered or not."""
        sizes = []
        tokens = []
        for run in file.runs()[-_SAMPLE_RUNS:]:
            for row in itertools.islice(file.read_records(run), _SAMPLE_RECORDS):
                if not row.intact:
                    continue
                fields = {field.name: field for field in row.fields()}
                sizes.append(row.payload_bytes)
                if "tokens" in fields and fields["tokens"].shape:
                    tokens.append(fields["tokens"].shape[0])
        if sizes:
            self._mean = (sum(sizes) / len(sizes), sum(tokens) / len(sizes))

    def _compare(self, status: BusStatus, now_s: float) -> None:
        before = self._before
        if before is None:
            return
        elapsed = max(1e-6, now_s - self._at_s)

        def rate(new: int, old: int) -> float:
            return max(0, new - old) / elapsed

        committed = rate(status.ledger.committed, before.ledger.committed)
        self.rates = Rates(
            committed=committed,
            acknowledged=rate(status.ledger.acknowledged, before.ledger.acknowledged),
            dropped=rate(sum(status.ledger.dropped.values()), sum(before.ledger.dropped.values())),
            bytes=committed * self._mean[0],
            tokens=committed * self._mean[1],
        )
        # A slot keeps its count when its next owner attaches.
        earlier = {producer.slot: producer.committed for producer in before.producers}
        self.producer_rates = {
            producer.producer_id: rate(producer.committed, earlier.get(producer.slot, 0))
            for producer in status.producers
        }


def _within(value: float, most: float) -> float:
    return min(max(0.0, value), most)
