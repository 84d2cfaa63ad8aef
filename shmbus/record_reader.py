"""RecordReader: a bus's records one by one, in the collector's place, each told by a head.

`OriginReader` does the work; here are the heads, and ids in place of origins.

Invariant: a head is made of what the ring says of a record at the time when it is asked for.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from shmbus import errors, limits
from shmbus._arguments import check_int, check_timeout, clamp_request
from shmbus.origin_reader import OriginReader
from shmbus_ext import _core

__all__ = ["RecordHead", "RecordId", "RecordReader"]

#: A record's identity on its bus: producer id and sequence.
RecordId: TypeAlias = tuple[int, int]

_ID: Final = struct.Struct(">QQ")


class RecordHead(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a record without its payload: enough to group it, and to tell it again.

    Attributes
    ----------
    producer_id, sequence : int
        Its identity on its bus.
    instance_id : str
        The prompt's key.
    round : int or None
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
    round: int | None
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
        return self.instance_id if self.round is None else (self.instance_id, self.round)


class RecordReader(OriginReader):
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
        BusRemovedError
            The bus was removed; what is held can still be exported.
        TypeError, ValueError
            A bad number or time.
        """
        max_records = clamp_request("max_records", max_records)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            with self._lock:
                heads = _heads(self.poll_records(max_records)[1])
            left = limits.SWEEP_INTERVAL_S if deadline is None else deadline - now
            if heads or left <= 0:
                return heads
            self.require_bus()
            try:
                self._reader.wait(min(left, max(1e-4, self._next_sweep_s - now)))
            except errors.BusClosedError:
                self._require_open()  # it was closed by another thread; this says of what kind
                raise

    def heads(self) -> list[RecordHead]:
        """Return the heads of all records that are held, in the order in which they were polled.

        Returns
        -------
        list[RecordHead]
            What was polled and not released.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            return _heads(list(self._held.values()))

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
            the copy. Contiguous and writable.

        Returns
        -------
        bytes or memoryview
            The block; of `into`, where that is given.

        Raises
        ------
        KeyError
            A record is not held.
        ValueError
            There are too few or too many, they do not fit `into`, or one is damaged in the ring;
            or an id that no record has.
        TypeError
            An id is no pair of ints, or `into` is no room for bytes.
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            origins = self._origins(ids)
            if into is not None:
                return self.export_records(origins, _check_room(into))
            size = sum(t.nbytes for t in self._find(origins))
            room = bytearray(_core.BLOCK_HEADER_BYTES + size)
            return bytes(self.export_records(origins, room))

    def _origins(self, ids: Iterable[RecordId]) -> list[bytes]:
        identity = bytes.fromhex(self.identity)
        given: object = ids
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise TypeError(f"ids: expected pairs of ints, got {type(given).__name__}")
        return [identity + _pack_id(id_) for id_ in given]

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
            There is no such reason, an id is named twice, or no record has it.
        TypeError
            An id is no pair of ints.
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            origins = self._origins(ids)
            if len(set(origins)) != len(origins):
                raise ValueError(
                    f"release: expected each record once, got {len(origins)} ids of "
                    f"{len(set(origins))} records"
                )
            self.release_records(origins, reason)


def _pack_id(id_: Any) -> bytes:
    """Return the second half of an origin; `poll` and `heads` tell ids."""
    try:
        producer_id, sequence = id_
    except (TypeError, ValueError) as error:
        raise TypeError(f"id: expected producer id and sequence, got {id_!r}") from error
    numbers = check_int("producer id", producer_id), check_int("sequence", sequence)
    try:
        return _ID.pack(*numbers)
    except struct.error as error:
        raise ValueError(f"id: expected two numbers of 0 to 2**64 - 1, got {numbers}") from error


def _check_room(into: object) -> memoryview:
    """Return room for a block as bytes, whatever kind of numbers it had."""
    try:
        view = memoryview(into)  # type: ignore[arg-type]
        if "O" in view.format:
            raise TypeError("it holds references to objects")
        room = view.cast("B")
    except TypeError as error:
        raise TypeError(
            f"into: expected a contiguous bytearray or memoryview, got {type(into).__name__}: "
            f"{error}"
        ) from error
    if room.readonly:
        raise TypeError(f"into: expected room that can be written, got {type(into).__name__}")
    return room


def _heads(found: list[_core.Trajectory]) -> list[RecordHead]:
    return [_head(*each) for each in zip(found, _core.record_checks(found), strict=True)]


def _head(t: _core.Trajectory, check: int) -> RecordHead:
    return RecordHead(
        t.producer_id,
        t.sequence,
        t.instance_id,
        t.round,
        t.group_size,
        t.index,
        t.score if t.scored else math.nan,
        t.policy_version,
        t.nbytes,
        t.committed_ns,
        check,
        t.need,
        reason_of(t) if t.failed else None,
        t.split,
    )


def reason_of(report: _core.Trajectory) -> str:
    """Return why a sample failed, as the report of it says."""
    try:
        return str(report.meta)[: limits.STATUS_REASON_BYTES]
    except ValueError:
        return "a reason that cannot be read"
