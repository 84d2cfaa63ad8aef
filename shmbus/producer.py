"""Producer: what a rollout worker writes trajectories with.

`put` and `put_many` are C from end to end (shmbus_ext/python). What needs no speed is beside them:
reservations by field names here, the verbs of the request lane in `ProducerRequests`, every other
verb in a base class (shmbus/put).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import msgspec

from shmbus import limits
from shmbus._arguments import (
    check_choice,
    check_flag,
    check_int,
    check_label,
    check_timeout,
    names_options,
)
from shmbus._fields import FieldSpec, check_sizes
from shmbus._schema import Schema, mapping_of
from shmbus.put.attached import Attach
from shmbus.put.groups import GroupPuts
from shmbus.put.requests import ProducerRequests, RequestState
from shmbus.put.retries import RetryPuts
from shmbus.segment.names import check_name
from shmbus.stall import OnStall, Watch
from shmbus_ext import _core

__all__ = ["Producer", "ProducerStats"]


class ProducerStats(msgspec.Struct, frozen=True):
    """What a Producer has done since it attached.

    Attributes
    ----------
    producer_id : int
        Its number, unique on the bus.
    committed : int
        Trajectories committed.
    aborted : int
        Reservations ended without a commit.
    bytes : int
        Ring bytes of what was committed, headers and padding included.
    full_waits : int
        How often it found the bus full.
    """

    producer_id: int
    committed: int
    aborted: int
    bytes: int
    full_waits: int


class Producer(GroupPuts, RetryPuts):
    """Writes trajectories into a bus. Safe from several threads; one handle a process.

    `put` copies one trajectory, `put_many` a list, `reserve` has its arrays filled in place, `aput`
    waits without blocking an event loop, and `fail` reports that a sample will not come.
    `next_round` gives a number of its own to each round of a prompt that is sampled again.
    `requests.next` takes a prompt to sample, and `requests.answer` answers it.

    A handle pickles by name, so it can be sent to a spawned process or a Ray actor, where it
    attaches again. After a fork the child's copy raises BusClosedError; make a new one there.

    Parameters
    ----------
    name : str
        The bus.
    checksum : bool
        Also protect the payload by a CRC-32C, which the consumer verifies; the header always is.
    label : str, optional
        How messages of other processes name this one; the script's name by default.
    on_stall : "log" | "raise" | callable | None
        What happens each time that nothing has moved on the bus for `stall_timeout` seconds while
        `put`, `put_many`, `reserve`, `aput` or `wait_ready` waits for space, as for `Consumer`.
    stall_timeout : float
        Those seconds.
    attach : "same" | "successor"
        What happens once the bus was removed: every put raises BusRemovedError; or `put`,
        `put_many`, `reserve`, `fail` and `aput` wait, up to their timeout, for a new bus of that
        name, and go on in it. Open reservations are aborted then; what was committed into the old
        bus stays there, for the Consumer that holds it.
    wait : float, optional
        Seconds to wait for the bus where there is none yet: None waits for ever, 0 does not wait.
        `awaited` does so without blocking an event loop.
    schema : mapping of str to dtype or (dtype, shape), optional
        The fields of each sample, as for `Bus.create`; by default what the bus declares.

    Raises
    ------
    ValueError
        The schema is not the one that the bus declares; the message names the field.
    BusNotFoundError
        There is no such bus, also after `wait` seconds.
    BusBusyError
        All producer slots are taken.
    LayoutMismatchError
        The segment is of another layout, or damaged.
    """

    @names_options
    def __init__(
        self,
        name: str,
        *,
        checksum: bool = False,
        label: str | None = None,
        on_stall: OnStall = "log",
        stall_timeout: float = limits.STALL_TIMEOUT_S,
        attach: Attach = "same",
        wait: float | None = 0.0,
        schema: Schema | None = None,
    ) -> None:
        self.name = check_name(name)
        self._wait = check_timeout(wait, "wait")
        check_choice("attach", attach, ("same", "successor"))
        self._attach = attach
        self._watch = Watch(name, on_stall, stall_timeout)
        self._checksum = check_flag("checksum", checksum)
        self._label = label
        shown = check_label(label)
        self._begin_schema(schema)
        self._begin_retries()
        self._begin_waits()
        self._request_state = RequestState()
        self._open(shown, self._checksum)

    def reserve(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        index: int,
        fields: Mapping[str, FieldSpec],
        score: float | None = 0.0,
        policy_version: int | tuple[int, int] = 0,
        round: int | None = None,
        split: str | None = None,
        need: int | None = None,
        meta: Any = None,
        meta_room: int = limits.META_ROOM_BYTES,
        timeout: float | None = None,
    ) -> _core.Reservation:
        """Reserve a record whose arrays are filled in place, for as long as that takes.

        Nobody waits for an open reservation: not this producer's other records, nor anybody
        else's. Leaving the ``with`` block commits; an exception aborts.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `put`.
        group_size : int
            Samples in a complete group, 1 to 16384.
        index : int
            Which sample of its group this is, 0 to group_size - 1.
        fields : mapping of str to (dtype, shape)
            The arrays; shape is an int or a tuple of int, and enough alone where a schema declares
            the dtype. Their content starts uninitialised.
            ``slot.resize(name, n)`` cuts the first dimension to what was really written.
        score : float or None, default 0.0
            The reward, finite; ``slot.score = ...`` sets it later. None, as for `put`.
        policy_version : int or tuple of (int, int), default 0
            As for `put`; ``slot.policy_version = ...`` sets it later.
        round : int, optional
            Which round of the prompt this is, as for `put`.
        split : str, optional
            Who the group is for, as for `put`.
        need : int, optional
            Samples that complete the group, as for `put`.
        meta : object, optional
            As for `put`; ``slot.meta = ...`` sets it later.
        meta_room : int, default 1024
            Bytes kept for a meta that is set later: 0 to 2 GiB.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Returns
        -------
        Reservation
            ``slot[name]`` is a writable view of the ring, until the commit.

        Raises
        ------
        TypeError
            `fields` is no mapping of str to (dtype, shape), a dtype holds Python objects, or as for
            `put`.
        ValueError
            A size is negative, a field has the name of an argument, or as for `put`.
        RecordTooLargeError
            The fields need more than `record_limit`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`.

        Notes
        -----
        This blocks for space only, as `put` does. After an exception nothing is reserved. A
        reservation that is not ended ends with the producer or its last reference, as an abort.
        """
        head = {
            "instance_id": instance_id,
            "group_size": group_size,
            "index": index,
            "score": score,
            "policy_version": policy_version,
            "round": round,
            "split": split,
            "need": need,
            "meta": meta,
            "timeout": timeout,
        }
        parsed = self._parse_fields(fields)
        meta_room = check_int("meta_room", meta_room)
        if not 0 <= meta_room < 2**31:
            raise ValueError(f"meta_room: expected 0 to 2 GiB, got {meta_room}")
        check_sizes(self.name, self.record_limit, parsed)
        return self._reserve(
            head,
            tuple(parsed),
            tuple(dtype for dtype, _ in parsed.values()),
            tuple(shape for _, shape in parsed.values()),
            meta_room,
        )

    def _successor(self) -> _core.Segment | None:
        segment = super()._successor()
        if segment is not None:
            self._request_state.forget()  # its numbers begin anew
        return segment

    @property
    def requests(self) -> ProducerRequests:
        """The samples that this worker is asked for: `next`, `answer`, `fail` and `release`."""
        # Made at each use: kept, it and the Producer would hold each other.
        return ProducerRequests(self, self._request_state)

    @property
    def paused(self) -> str | None:
        """Why producers shall wait, maybe empty; None where the bus is not paused."""
        pause = self._here().paused()
        return None if pause is None else pause[0]

    @property
    def policy_version(self) -> int:
        """The trainer's current policy version; a read of shared memory, no call to anybody."""
        return self._here().policy_version

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record that this bus takes, header and padding included."""
        return self._here().record_limit

    def stats(self) -> ProducerStats:
        """Return what this Producer has done since it attached.

        Returns
        -------
        ProducerStats
            Its own counts; `Bus.stats` has those of all producers. Where it went on in a successor
            they go on, and `producer_id` is that of the present bus.
        """
        return ProducerStats(self.producer_id, *self._counts())

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In this thread: it waits for nobody, and no cancellation can come before it.
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Producer], tuple[Any, ...]]:
        return _rebuild, (
            type(self), self.name, self._checksum, self._label, self._watch.options, self._attach,
            self._wait, None if self._own_schema is None else mapping_of(self._own_schema),
        )  # fmt: skip

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"producer_id={self.producer_id}"
        return f"<Producer {self.name!r} {state}>"


def _rebuild(
    cls: type[Producer],
    name: str,
    checksum: bool,
    label: str | None,
    stall: tuple[OnStall, float],
    attach: Attach,
    wait: float | None = 0.0,
    schema: Schema | None = None,
) -> Producer:
    return cls(
        name,
        checksum=checksum,
        label=label,
        on_stall=stall[0],
        stall_timeout=stall[1],
        attach=attach,
        wait=wait,
        schema=schema,
    )
