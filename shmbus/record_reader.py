"""RecordReader: a bus's records one by one, for a relay. It stands in the collector's place.

Where a Consumer groups samples and leases groups, this hands out the head of each record, keeps the
record in the ring, and releases it when it is told to. So what was not released is there for
whoever reads the bus next, and nothing else has to outlive a process.

Invariants
----------
- A record that was polled is held until it is released; closing or dying gives all of them back.
- A release ends all records that it names, or none, though this process die in the midst of it.
- A group that this reader has no record of any more holds no producer back: neither a row of the
  bound on how far producers are ahead, nor a request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from types import TracebackType
from typing import TypeAlias

import msgspec

from shmbus import errors, limits
from shmbus._arguments import check_count, check_timeout, check_wait
from shmbus._keys import split_key
from shmbus.ledger import REASONS, Ledger
from shmbus.segment import lifecycle
from shmbus.segment.explain import RELAY_LABEL
from shmbus.segment.names import check_name
from shmbus.stash.lead import Lead
from shmbus.stash.requests import Requests
from shmbus_ext import _core

__all__ = ["RecordHead", "RecordId", "RecordReader"]

#: A record's identity on its bus: producer id and sequence.
RecordId: TypeAlias = tuple[int, int]

#: Stragglers are moved when less than this fraction of the extents is free ...
_EVACUATE_FREE_FRACTION = 0.125
#: ... and at most this often, in seconds, since each attempt walks all held records.
_EVACUATE_INTERVAL_S = 0.05


class RecordHead(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a record without its payload: enough to group it, and to tell it again.

    Attributes
    ----------
    producer_id, sequence : int
        Its identity on its bus.
    instance_id : str
        The prompt's key.
    epoch : int or None
        The round of the prompt, where its producer gave one.
    group_size, index : int
        Its place in its group; a failure may not know the size, which is 0 then.
    score : float
        The reward.
    policy_version : int
        The oldest policy version that sampled it.
    nbytes : int
        Bytes that it takes in the ring, header and padding included; in a block likewise.
    committed_ns : int
        CLOCK_MONOTONIC of its machine when it was committed.
    check : int
        Checksum of all that its header and tables say, in any ring.
    need : int
        How many samples complete its group.
    reason : str or None
        Of a report that the sample failed: why.
    split : str
        Who its group is for.
    """

    producer_id: int
    sequence: int
    instance_id: str
    epoch: int | None
    group_size: int
    index: int
    score: float
    policy_version: int
    nbytes: int
    committed_ns: int
    check: int
    need: int
    reason: str | None = None
    split: str = "train"

    @property
    def id(self) -> RecordId:
        """Its identity on its bus."""
        return (self.producer_id, self.sequence)

    @property
    def failed(self) -> bool:
        """Whether it reports that its sample failed."""
        return self.reason is not None

    @property
    def key(self) -> str | tuple[str, int]:
        """What its group is known by."""
        return self.instance_id if self.epoch is None else (self.instance_id, self.epoch)


class RecordReader:
    """Reads a bus record by record, in the collector's place: the source of a relay.

    A bus has one reader, so there is no Consumer and no daemon beside it. `shmbus status` names it
    as the relay. Its methods may be called from several threads; a child of a fork makes its own.

    Parameters
    ----------
    name : str
        The bus.
    wait : float, optional
        Seconds to wait for the bus where there is none yet; None waits for ever.

    Raises
    ------
    BusNotFoundError, LayoutMismatchError
        There is no such bus, or it is of another layout.
    BusBusyError
        Another process reads it; the message names it.
    TypeError, ValueError
        A bad name or time.
    """

    def __init__(self, name: str, *, wait: float | None = 0.0) -> None:
        self.name: str = check_name(name)
        lifecycle.wait_for_bus(name, check_wait(wait))
        self._lock = threading.RLock()
        self._held: dict[RecordId, _core.Trajectory] = {}
        self._heads: dict[RecordId, RecordHead] = {}
        #: How many records of each group are held.
        self._of_group: Counter[Hashable] = Counter()
        self._note: _core.GroupTable[_core.Trajectory] = _core.GroupTable()
        self._next_sweep_s = 0.0
        self._next_evacuation_s = 0.0
        self._segment = lifecycle.open_segment(name)
        try:
            self._reader = _core.Reader(self._segment, RELAY_LABEL)
        except BaseException:
            self._segment.close()
            raise
        self._attach_epoch = self._segment.attach_epoch
        #: Greater than that of any earlier RecordReader of this bus.
        self.incarnation: int = _core.relay_next_source(self._segment)
        self._lead = Lead(self._segment)
        self._requests = Requests(self._segment)

    @property
    def identity(self) -> str:
        """The identity of its bus, as `Bus.identity` says it."""
        return self._segment.identity

    @property
    def policy_version(self) -> int:
        """The policy version that the producers of its bus read; settable."""
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._segment.policy_version = version
        self._lead.follow(0)

    def _require_open(self) -> None:
        if not self._reader.attached or self._segment.closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this RecordReader is closed, or was made before a fork; make "
                "a new one"
            )

    # -- from the ring --------------------------------------------------------------------------

    def poll(
        self, max_records: int = limits.POLL_RECORDS, timeout: float | None = 0.0
    ) -> list[RecordHead]:
        """Return the heads of records that were not polled yet, each producer's in its order.

        Parameters
        ----------
        max_records : int
            At most so many.
        timeout : float, optional
            Seconds to wait for the first one: None waits for ever, 0 does not wait.

        Returns
        -------
        list[RecordHead]
            Empty where nothing came.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        TypeError, ValueError
            A bad number or time.
        """
        check_count("max_records", max_records, 1)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            with self._lock:
                self._require_open()
                self._run_maintenance(now)
                heads = self._poll_once(max_records)
            left = limits.SWEEP_INTERVAL_S if deadline is None else deadline - now
            if heads or left <= 0:
                return heads
            self._reader.wait(min(left, max(1e-4, self._next_sweep_s - now)))

    def _poll_once(self, max_records: int) -> list[RecordHead]:
        self._lead.begin_check()
        self._requests.begin_check()
        found = self._reader.poll(max_records)
        for t in found:
            self._held[t.producer_id, t.sequence] = t
            self._of_group[t.key] += 1
        heads = [_head(*each) for each in zip(found, _core.record_checks(found), strict=True)]
        self._heads.update((head.id, head) for head in heads)
        if found:
            self._note_held()
        if len(found) < max_records:
            self._end_checks()
        return heads

    def _end_checks(self) -> None:
        """Clear up after deaths, with all that was committed before in hand."""
        if self._lead.checks:
            self._lead.end_check([*self._of_group, *self._requests.handed_out()])
        if self._requests.checks:
            self._requests.end_check(lambda key: key in self._of_group)

    def heads(self) -> list[RecordHead]:
        """Return the heads of all records that are held, in the order in which they were polled.

        Returns
        -------
        list[RecordHead]
            What was polled and not released.
        """
        with self._lock:
            return list(self._heads.values())

    def export(
        self, ids: Iterable[RecordId], into: bytearray | memoryview | None = None
    ) -> bytes | memoryview:
        """Copy records into a block, for another bus. They stay where they are.

        Parameters
        ----------
        ids : iterable of (int, int)
            Producer id and sequence of records that are held, 1 to 16384.
        into : bytearray or memoryview, optional
            Room for the block, to be used again and again; a new one each time costs as much as
            the copy.

        Returns
        -------
        bytes or memoryview
            The block; of `into`, where that is given.

        Raises
        ------
        KeyError
            A record is not held.
        ValueError
            There are too few or too many, they do not fit `into`, or one is damaged in the ring.
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            records = self._find(ids)
            if into is not None:
                return memoryview(into)[: _core.export_block(records, into)]
            room = bytearray(_core.BLOCK_HEADER_BYTES + sum(t.nbytes for t in records))
            _core.export_block(records, room)
            return bytes(room)

    def _find(self, ids: Iterable[RecordId]) -> list[_core.Trajectory]:
        found = []
        for id_ in ids:
            t = self._held.get(id_)
            if t is None:
                raise KeyError(
                    f"bus {self.name!r}: record {id_!r} is not held: it was released, or never "
                    "polled; heads() says which are"
                )
            found.append(t)
        return found

    # -- its end --------------------------------------------------------------------------------

    def release(self, ids: Sequence[RecordId], reason: str = "acknowledged") -> None:
        """End records: their space is the producers' again.

        Parameters
        ----------
        ids : sequence of (int, int)
            Producer id and sequence of records that are held, at most 16384.
        reason : str
            Under which reason of the ledger they are counted.

        Raises
        ------
        KeyError
            A record is not held; then none is released.
        ValueError
            There is no such reason, or an id is named twice.
        BusClosedError
            It is closed, or was made before a fork.
        """
        if reason not in REASONS:
            raise ValueError(f"reason: expected one of {', '.join(REASONS)}, got {reason!r}")
        if len(set(ids)) != len(ids):
            raise ValueError("release: expected each record once")
        with self._lock:
            self._require_open()
            _core.uninterrupted(self._release, self._find(ids), REASONS.index(reason))

    def _release(self, records: list[_core.Trajectory], reason: int) -> None:
        self._reader.release(records, reason)
        ended = 0
        for t in records:
            del self._held[t.producer_id, t.sequence]
            self._heads.pop((t.producer_id, t.sequence), None)
            self._of_group[t.key] -= 1
            if not self._of_group[t.key]:
                del self._of_group[t.key]
                ended += 1
                if self._lead.bounded:
                    _core.lead_leave(self._segment, *split_key(t.key))
                self._requests.ended([t])
        self._lead.follow(0, ended)
        self._note_held()

    # -- maintenance and state ------------------------------------------------------------------

    def require_bus(self) -> None:
        """Make sure that the bus still has its name.

        Raises
        ------
        BusRemovedError
            It was removed; what is held can still be exported.
        BusClosedError
            This is closed.
        """
        with self._lock:
            self._require_open()
            self._segment.require_name()

    def note(self, figures: tuple[int, ...]) -> None:
        """Write what `shmbus status` says of a relay.

        Parameters
        ----------
        figures : tuple of int
            At most 8 counts.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            _core.relay_note(self._segment, 0, time.monotonic_ns(), figures)

    def _note_held(self) -> None:
        """Publish what this process holds, for messages of others."""
        self._note.failing_cells = len(self._held)
        self._reader.note(self._note)

    def _run_maintenance(self, now: float) -> None:
        """Sweep for dead producers and free space, each at its interval."""
        reader, segment = self._reader, self._segment
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + limits.SWEEP_INTERVAL_S
            reader.sweep()
            self._lead.follow(0)
            if segment.attach_epoch != self._attach_epoch:
                self._attach_epoch = segment.attach_epoch
                self._lead.doubt()
                self._requests.doubt()
        if now >= self._next_evacuation_s:
            self._next_evacuation_s = now + _EVACUATE_INTERVAL_S
            reader.tidy()
            few = segment.extent_count * _EVACUATE_FREE_FRACTION
            if segment.space_wanted() or segment.free_extents() < few:
                reader.sweep()
                reader.evacuate(list(self._held.values()))

    def stats(self) -> Ledger:
        """Return the ledger of its bus: what this holds counts as stashed.

        Returns
        -------
        Ledger
            As of one instant.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            self._reader.sweep()
            committed, in_ring = self._reader.count_unread()
            segment = self._segment
            return Ledger.from_counts(
                segment.released(),
                committed=committed,
                in_ring=in_ring,
                leased=0,
                stashed=len(self._held),
                moved=self._reader.moves,
                policy_version=segment.policy_version,
                producers=sum(row[1] == _core.SLOT_ACTIVE for row in segment.producers()),
                capacity=segment.capacity,
                free=segment.free_extents() * segment.extent_bytes,
            )

    def close(self) -> None:
        """Leave the bus. What was not released stays for whoever reads it next."""
        self._reader.wake()
        with self._lock:
            # The reader first: a record whose holder is gone under it would give its space away.
            self._reader.close()
            self._held.clear()
            self._heads.clear()
            self._of_group.clear()

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _head(t: _core.Trajectory, check: int) -> RecordHead:
    return RecordHead(
        t.producer_id,
        t.sequence,
        t.instance_id,
        t.epoch,
        t.group_size,
        t.index,
        t.score if t.scored else math.nan,
        t.policy_version,
        t.nbytes,
        t.committed_ns,
        check,
        t.need,
        _reason(t) if t.failed else None,
        t.split,
    )


def _reason(report: _core.Trajectory) -> str:
    try:
        return str(report.meta)[: limits.STATUS_REASON_BYTES]
    except ValueError:
        return "a reason that cannot be read"
