"""Rates of a bus: the difference of two polls over the time between them, with a short history.

Invariants: a poll is cheap however full the bus is (no walk over many records); a bus that was
removed and created again under its name starts a new history.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

import msgspec

from shmbus.control.ask import ask_status
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import join, status_of
from shmbus.inspect.types import BusStatus

__all__ = ["Rates", "Watcher"]

#: Values that the history keeps: wider than any terminal.
_HISTORY = 512
#: Undelivered trajectories up to which a poll also walks and groups them: some 0.2 s of work.
_WALK_RECORDS = 20_000
#: Runs, and records of each, from which a poll takes the mean size of a trajectory.
_SAMPLE_RUNS = 8
_SAMPLE_RECORDS = 8


class Rates(msgspec.Struct, frozen=True):
    """Rates between two polls.

    Attributes
    ----------
    committed, acknowledged, dropped : float
        Trajectories a second.
    bytes, tokens : float
        Committed per second, by the mean of recent records; 0 where none could be read.
    """

    committed: float = 0.0
    acknowledged: float = 0.0
    dropped: float = 0.0
    bytes: float = 0.0
    tokens: float = 0.0


class Watcher:
    """Polls a bus repeatedly.

    Parameters
    ----------
    name : str
        The bus.

    Attributes
    ----------
    status : BusStatus
        Of the last poll.
    rates : Rates
        Between the last two polls.
    producer_rates : dict[int, float]
        Trajectories a second, by producer number.
    history : deque[float]
        Committed trajectories a second, the newest last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: BusStatus
        self._forget(0)

    def _forget(self, created: int) -> None:
        self._created = created
        self._at_s = 0.0
        self._before: BusStatus | None = None
        self._mean = (0.0, 0.0)
        self.rates = Rates()
        self.producer_rates: dict[int, float] = {}
        self.history: deque[float] = deque(maxlen=_HISTORY)

    def poll(self) -> None:
        """Poll once.

        Raises
        ------
        BusNotFoundError, LayoutMismatchError, PermissionError
            As `shmbus.inspect.status.read_status`.
        """
        with SegmentFile(self.name) as file:
            file.require()
            created = int(file.header["created_unix_ns"])
            if created != self._created:
                self._forget(created)
            status = status_of(file, walk=False)
            if status.ledger.undelivered <= _WALK_RECORDS:
                status = status_of(file)
            now = time.monotonic()
            self._sample(file)
        self.status = join(status, ask_status(self.name))
        self._compare(status, now)
        self._before, self._at_s = status, now

    def _sample(self, file: SegmentFile) -> None:
        """Take mean bytes and tokens of some recent records, delivered or not."""
        sizes = []
        tokens = []
        for run in file.runs()[-_SAMPLE_RUNS:]:
            for row in itertools.islice(file.read_records(run), _SAMPLE_RECORDS):
                if row.state not in ("committed", "released") or row.verdict != "ok":
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
        self.history.append(committed)
