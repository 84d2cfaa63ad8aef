"""Producer: a rollout worker's handle for writing trajectories.

`put` and `put_many` run in C from end to end (shmbus_ext/python). The slower calls are here;
requested samples have a class of their own, `ProducerRequests`.

Invariants:

- A cancelled wait put nothing. A group enters the ring with all its samples or none, even if its
  process dies.
- Objects given to the core never refer to the Producer, which so ends with its last reference.
- The core checks every record by the schema agreed on when the Producer attached. A Producer moves
  to a successor of the bus only under that schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

import msgspec
import numpy as np

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import (
    TRAIN,
    check_choice,
    check_count,
    check_flag,
    check_int,
    check_label,
    check_number,
    check_split,
    check_text,
    check_timeout,
    names_options,
)
from shmbus.base.closing import ClosedByAnyWith
from shmbus.base.loop_waits import LoopWaits
from shmbus.data.fields import FieldSpec, check_sizes, parse_field
from shmbus.data.keys import make_key
from shmbus.data.prompts import check_request, shared_fields
from shmbus.data.schema import Schema, agreed_schema, mapping_of, parse, require_same_schema
from shmbus.handles.producer_requests import ProducerRequests, RequestState, checked_reason
from shmbus.handles.stall import OnStall, Watch
from shmbus.segment import lifecycle
from shmbus.segment.cache_salt import cache_salt
from shmbus.segment.names import check_name
from shmbus_ext import _core

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from shmbus.data.prompts import Request
    from shmbus.handles.session import Session
    from shmbus.pool.server_rows import ServerRows
    from shmbus_ext._core import FieldValue, SupportsItem


#: A Producer's wait, as named in a stall report.
_WAITS_FOR_SPACE: Final = "space in the ring"
#: Seconds between two polls of `aput` for the successor of a removed bus.
_SUCCESSOR_POLL_S: Final = 0.02
#: Arguments of the whole group, refused in a sample.
_OF_THE_GROUP: Final = (
    "instance_id", "group_size", "index", "round", "split", "need", "timeout",
)  # fmt: skip

#: A Producer's behaviour after the removal of its bus: stay, or wait for the next bus of that name.
Attach: TypeAlias = Literal["same", "successor"]


class ProducerStats(msgspec.Struct, frozen=True):
    """Counts of a Producer since it attached.

    Attributes
    ----------
    producer_id : int
        Its number, unique on the bus.
    committed : int
        Trajectories committed.
    aborted : int
        Reservations ended without a commit.
    bytes : int
        Ring bytes of committed records, headers and padding included.
    full_waits : int
        How often the Producer found the bus full.
    """

    producer_id: int
    committed: int
    aborted: int
    bytes: int
    full_waits: int


class ProducerOptions(TypedDict, total=False):
    """Optional keyword arguments of `Producer`, which documents them."""

    checksum: bool
    label: str | None
    on_stall: OnStall
    stall_timeout: float | None
    attach: Attach
    schema: Schema | None


class Producer(_core.Writer, ClosedByAnyWith):
    """Writes trajectories into a bus. Thread-safe; one handle per process.

    `put` copies a trajectory, `put_many` a list, `reserve` lets the caller fill arrays in place,
    `aput` waits without blocking an event loop, and `fail` reports a sample that will not come.
    `next_round` numbers each round of a repeated prompt. `requests.next` takes a prompt to sample,
    and `requests.answer` answers it.

    A handle pickles by name. A spawned process or a Ray actor that receives the handle attaches
    again. After a fork the child's copy raises BusClosedError; make a new handle there.

    Parameters
    ----------
    name : str
        The bus.
    checksum : bool
        Also protect the payload by a CRC-32C, verified by the consumer; the header always carries a
        CRC.
    label : str, optional
        Name of this producer in messages of other processes; the script's name by default.
    on_stall : "log" | "raise" | callable | None
        Action after every `stall_timeout` seconds without movement on the bus while `put`,
        `put_many`, `reserve`, `aput` or `wait_ready` waits for space, as for `Consumer`.
    stall_timeout : float, optional
        Those seconds; None means 60.
    attach : "same" | "successor"
        Behaviour after the bus's removal. "same": every put raises BusRemovedError. "successor":
        `put`, `put_many`, `reserve`, `fail` and `aput` wait, up to their timeout, for a new bus of
        that name, and go on in it. Open reservations are aborted then; records committed into the
        old bus stay there, for the Consumer that holds it.
    wait : float, optional
        Seconds to wait for a missing bus: None waits for ever, 0 does not wait. `awaited` waits
        without blocking an event loop.
    schema : mapping of str to dtype or (dtype, shape), optional
        The fields of each sample, as for `Bus.create`; by default the bus's declaration.

    Raises
    ------
    ValueError
        The schema differs from the bus's declaration; the message names the field.
    BusNotFoundError
        The bus is missing after `wait` seconds.
    BusBusyError
        All producer slots are taken.
    LayoutMismatchError
        The segment has another layout, or is damaged.
    """

    # -- attaching ---------------------------------------------------------------------------------

    @names_options
    def __init__(
        self,
        name: str,
        *,
        checksum: bool = False,
        label: str | None = None,
        on_stall: OnStall = "log",
        stall_timeout: float | None = None,
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
        self._own_schema = None if schema is None else parse(schema)
        self._request_state = RequestState()
        self._space = LoopWaits()
        self._open(shown, self._checksum)

    @classmethod
    async def awaited(
        cls, name: str, *, wait: float | None = 60.0, **options: Unpack[ProducerOptions]
    ) -> Self:
        """Make a Producer once the bus exists, without blocking the event loop.

        Parameters
        ----------
        name : str
            The bus.
        wait : float, optional
            Seconds to wait for the bus: None waits for ever, 0 does not wait.
        **options
            The remaining options of `Producer`.

        Returns
        -------
        Producer

        Raises
        ------
        BusNotFoundError, BusBusyError, LayoutMismatchError, TypeError, ValueError
            As for `Producer`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing is attached.
        """
        wait = check_timeout(wait, "wait")
        for rest_s in lifecycle.until_there(check_name(name), wait):
            await asyncio.sleep(rest_s)
        made: Callable[..., Self] = cls
        return made(name, **options)

    def _open(self, label: str, checksum: bool) -> None:
        lifecycle.wait_for_bus(self.name, self._wait)
        segment = lifecycle.open_segment(self.name)
        try:
            declared = agreed_schema(segment, self._own_schema)
            _core.Writer.__init__(self, segment, label, checksum)
        except BaseException:
            segment.close()
            raise
        self._declare(declared)
        self._watch_space(segment)
        if self._attach == "successor":
            self._follow()

    def _watch_space(self, segment: _core.Segment) -> None:
        if self._watch.slice_s is not None:
            check = functools.partial(self._watch.check, segment, _WAITS_FOR_SPACE)
            self._watch_waits(check, self._watch.slice_s)

    def _successor(self) -> _core.Segment | None:
        """Open the successor of the removed bus; C moves there."""
        segment = lifecycle.open_if_there(self.name)
        if segment is not None:
            try:
                require_same_schema(segment, self._own_schema, self._declared)
            except BaseException:
                segment.close()
                raise
            self._watch_space(segment)
            self._request_state.forget()  # its samples belonged to the removed bus
        return segment

    def _here(self) -> _core.Segment:
        """Return the segment to read: the successor's, if present and allowed."""
        if self._attach == "successor" and self._segment.removed:
            with contextlib.suppress(errors.BusRemovedError):
                self._go_on(0)
        return self._segment

    @property
    def schema(self) -> dict[str, tuple[str, Any]] | None:
        """By name the (dtype, shape) checked by each `put`; None without a schema.

        The bus's, or this producer's own; ``Producer(name, schema=...)`` takes it again.
        """
        return None if self._declared is None else mapping_of(self._declared)

    # -- putting -----------------------------------------------------------------------------------

    #: In C from end to end (shmbus_ext/python/put/writer_object.c, put_many.c), with the
    #: documentation of shmbus_ext/_public_put.pyi.
    put = _core.Writer.put
    put_many = _core.Writer.put_many
    cancelled = _core.Writer.cancelled

    async def aput(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        index: int,
        score: float | SupportsItem | None = 0.0,
        policy_version: int | tuple[int, int] = 0,
        round: int | None = None,
        split: str | None = None,
        need: int | None = None,
        meta: Any = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arrays: FieldValue,
    ) -> None:
        """Put as `put` does, without blocking the event loop.

        The arrays must not change before this returns. A task cancelled during the wait
        (CancelledError) put nothing.
        """
        check_timeout(timeout)
        put = functools.partial(
            self.put,
            instance_id,
            group_size=group_size,
            index=index,
            score=score,
            policy_version=policy_version,
            round=round,
            split=split,
            need=need,
            meta=meta,
            rows=rows,
            timeout=0,
            **arrays,
        )
        await self._retry(put, timeout)

    async def aput_many(
        self, items: Iterable[dict[str, Any]], *, timeout: float | None = None
    ) -> int:
        """Put a list as `put_many` does, without blocking the event loop.

        The arrays must not change before this returns. A CancelledError carries `accepted`, too.
        """
        check_timeout(timeout)
        if not isinstance(items, Iterable):
            raise TypeError(f"items: expected an iterable of dicts, got {type(items).__name__}")
        rest = list(items)
        accepted = 0

        def put_rest() -> None:
            nonlocal accepted
            try:
                accepted += self.put_many(rest, timeout=0)
            except BaseException as error:
                done = getattr(error, "accepted", 0)
                accepted += done
                del rest[:done]
                raise

        try:
            await self._retry(put_rest, timeout)
        except BaseException as error:
            error.accepted = accepted  # type: ignore[attr-defined]
            raise
        return accepted

    def put_group(
        self,
        instance_id: str | int,
        samples: Iterable[Mapping[str, Any]],
        *,
        meta: object = None,
        split: str | None = None,
        round: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        need: int | None = None,
        shared: Mapping[str, FieldValue] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Put all samples of a prompt in a single call: either all enter the ring, or none.

        The guarantee holds for a full bus, an exception, and SIGKILL. The group gets a round of its
        own, so the same prompt can be put again later.

        Parameters
        ----------
        instance_id, split, need : object
            As for `put`.
        samples : iterable of mapping
            The group, in the order of its indices: each sample's score, arrays, and further
            arguments of `put` for a sample (meta, policy_version).
        meta, policy_version : object, optional
            For samples without their own, as for `put`.
        round : int, optional
            Number of this round of the prompt; None takes `next_round()`.
        shared : mapping of str to array, optional
            Arrays shared by all samples, such as an image: stored once in the ring, and read from
            `Group.shared`; in a batch by ``extra_fields={...: "group"}``. A schema declares such
            a field as optional, ``"pixel_values?"``.
        timeout : float, optional
            Seconds to wait for space for the group: None waits for ever, 0 does not wait.

        Returns
        -------
        int
            The group's round.

        Raises
        ------
        TypeError, ValueError
            No sample is given, a sample is no mapping, or as for `put`; the message names the
            sample.
        RecordTooLargeError
            The group is larger than `record_limit`, a quarter of the bus.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`; the ring holds no part of the group.

        Notes
        -----
        While the call copies, other threads of this process wait for the interpreter lock; a group
        of 16 MiB takes some milliseconds.

        Examples
        --------
        A prompt and its completions::

            producer.put_group("q1", [{"score": 1.0, "tokens": first}, {"tokens": second}])
        """
        items, round = self._group_items(
            instance_id, samples, meta, split, round, policy_version, need, shared
        )
        self._put_group(items, timeout)
        return round

    async def aput_group(
        self,
        instance_id: str | int,
        samples: Iterable[Mapping[str, Any]],
        *,
        meta: object = None,
        split: str | None = None,
        round: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        need: int | None = None,
        shared: Mapping[str, FieldValue] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Put a whole group as `put_group` does, without blocking the event loop.

        The arrays must not change before this returns. A task cancelled during the wait
        (CancelledError) put no part of the group.
        """
        check_timeout(timeout)
        items, round = self._group_items(
            instance_id, samples, meta, split, round, policy_version, need, shared
        )
        await self._retry(lambda: self._put_group(items, 0), timeout)
        return round

    def check_group(
        self, instance_id: str | int, samples: Iterable[Mapping[str, Any]], *, round: int
    ) -> None:
        """Raise what `put_group` would raise for these samples, and put nothing.

        For a sender of several groups that must arrive together. BusFullError stays possible.

        Parameters
        ----------
        instance_id, samples, round
            Of `put_group`.
        """
        items, _ = self._group_items(instance_id, samples, None, None, round, None, None, None)
        self._put_group(items, 0, True)

    def _group_items(
        self,
        instance_id: str | int,
        samples: Iterable[Mapping[str, Any]],
        meta: object,
        split: str | None,
        round: int | None,
        policy_version: int | tuple[int, int] | None,
        need: int | None,
        shared: Mapping[str, FieldValue] | None,
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the arguments of `put` for each sample, and the group's round."""
        if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
            raise TypeError(
                f"samples: expected an iterable of mappings, one a sample, got "
                f"{type(samples).__name__}"
            )
        in_common = {} if shared is None else shared_fields(shared, self._declared)
        listed = list(samples)
        if not listed:
            raise ValueError("samples: expected at least one, got an empty iterable")
        if round is None:
            round = self.next_round()
        common: dict[str, Any] = {"instance_id": instance_id, "group_size": len(listed)}
        common |= {"round": round, "split": split, "need": need, "meta": meta}
        if policy_version is not None:
            common["policy_version"] = policy_version
        items = []
        for index, sample in enumerate(listed):
            if not isinstance(sample, Mapping):
                raise TypeError(
                    f"put_group: sample {index}: expected a mapping of put's arguments, got "
                    f"{type(sample).__name__}"
                )
            own = [name for name in _OF_THE_GROUP if name in sample]
            if own:
                raise ValueError(
                    f"put_group: sample {index}: {own[0]!r} belongs to the group; pass it to "
                    "put_group, which numbers the samples in their order"
                )
            twice = [name for name in shared or () if name in sample]
            if twice:
                raise ValueError(
                    f"put_group: sample {index}: {twice[0]!r} is in shared=, too; give it once"
                )
            items.append({**common, **sample, "index": index})
        items[0].update(in_common)
        return items, round

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
        """Reserve a record for arrays filled in place, over an arbitrary time.

        An open reservation delays no process: neither this producer's other records, nor other
        producers. Leaving the ``with`` block commits; an exception aborts.

        Parameters
        ----------
        instance_id, group_size, index, round, split, need, timeout : object
            As for `put`.
        fields : mapping of str to (dtype, shape)
            The arrays; shape is an int or a tuple of int, and enough alone if a schema declares
            the dtype. Their content starts uninitialised.
            ``slot.resize(name, n)`` cuts the first dimension to the written length.
        score : float or None, default 0.0
            The reward, within 1e38; ``slot.score = ...`` sets it later. None, as for `put`.
        policy_version : int or tuple of (int, int), default 0
            As for `put`; ``slot.policy_version = ...`` sets it later.
        meta : object, optional
            As for `put`; ``slot.meta = ...`` sets it later.
        meta_room : int, default 1024
            Bytes kept for a meta set later: 0 to 2 GiB.

        Returns
        -------
        Reservation
            ``slot[name]`` returns a writable view of the ring, until the commit.

        Raises
        ------
        TypeError
            `fields` is no mapping of str to (dtype, shape), a dtype holds Python objects, or as for
            `put`.
        ValueError
            A size is negative, a field carries the name of an argument, or as for `put`.
        RecordTooLargeError
            The fields need more than `record_limit`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`.

        Notes
        -----
        Blocks for space only, as `put` does. After an exception nothing stays reserved. An unended
        reservation ends with the producer or its last reference, as an abort.
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
        meta_room = check_int("meta_room", meta_room, 0, 2**31 - 1)
        check_sizes(self.name, self.record_limit, parsed)
        return self._reserve(
            head,
            tuple(parsed),
            tuple(dtype for dtype, _ in parsed.values()),
            tuple(shape for _, shape in parsed.values()),
            meta_room,
        )

    def _parse_fields(
        self, fields: Mapping[str, FieldSpec]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Check the fields of a reservation; the schema supplies missing dtypes."""
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"fields: expected a mapping of names to (dtype, shape), got "
                f"{type(fields).__name__}"
            )
        return {name: parse_field(name, spec, self._dtype(name)) for name, spec in fields.items()}

    def _dtype(self, name: str) -> np.dtype[Any] | None:
        if self._declared is not None:
            return self._declared.dtype(name)
        return _core.STANDARD_DTYPES.get(name)

    # -- before sampling ---------------------------------------------------------------------------

    def next_round(self) -> int:
        """Return a number unique on this bus, for the `round` of a group.

        Ask once per sampling of a prompt, and pass the number as `round=` with all samples of that
        round: they form a group of their own, even while another round of the same prompt
        runs. If several workers sample a round, one worker asks and tells the others.

        Returns
        -------
        int
            Greater than all numbers handed out before, in every process, through deaths, snapshots
            and a successor of a removed bus. A number of 16 digits: the first number is the time of
            the bus's creation, in microseconds.

        Raises
        ------
        BusClosedError, BusRemovedError
            This Producer is closed; or its bus was removed, and the Producer may not go on in a
            successor.

        Notes
        -----
        A single atomic addition in shared memory: the call never waits.
        """
        segment = self._here()
        segment.require_name()
        return _core.next_round(segment)

    @property
    def groups_dropped(self) -> int:
        """Training groups dropped whole, for every reason, since the bus was created.

        A trainer with a fixed number of groups per step needs as many more as this count grows by.
        """
        return _core.groups_dropped(self._here())

    # -- requested samples -------------------------------------------------------------------------

    @property
    def requests(self) -> ProducerRequests:
        """The samples requested of this worker: `next`, `answer`, `fail` and `release`."""
        # Made at each use: a kept object and the Producer would hold each other.
        return ProducerRequests(self, self._request_state)

    def fail(
        self,
        instance_id: str | int,
        index: int,
        reason: str,
        *,
        group_size: int | None = None,
        need: int | None = None,
        split: str | None = None,
        round: int | None = None,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Report a failed sample, to spare its group a wait in vain.

        The report is a small record of the ring, in order with this producer's puts, and as safe
        from death. The consumer asks for the sample again (`requests`) as often as its
        `sample_retries` allows, and then gives the group up, following its `on_failure`. The ledger
        counts reports as committed, and in the end as dropped with the reason "failed".

        Parameters
        ----------
        instance_id, index, need, split, round, timeout : object
            As for `put`.
        reason : str
            Message to operators and to the next producer of the sample; its first 500 characters.
        group_size : int, optional
            Samples in its group; None if unknown to this producer.
        policy_version : int, default 0
            Version of the policy meant to sample it.

        Raises
        ------
        TypeError, ValueError
            The reason is no str, the index is no int of 0 or more, or as for `put`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`, which also documents when this blocks.
        """
        reason = checked_reason(reason)
        index = check_count("index", index, 0)
        number = _core.SPLIT_TRAIN
        if split is not None:
            number = _core.split_number(self._here(), check_split(split))
        request = self._request_state.taken.get((make_key(str(instance_id), round, number), index))
        if group_size is None and request is not None and request.group_size:
            group_size, need = request.group_size, request.need
        self._answer(
            None,
            _core.FLAG_FAILED | (_core.FLAG_NO_SIZE if group_size is None else 0),
            instance_id,
            group_size=index + 1 if group_size is None else group_size,
            need=need,
            split=split,
            index=index,
            score=0.0 if request is None else float(request.attempt),
            policy_version=policy_version,
            round=round,
            meta=reason,
            timeout=timeout,
        )

    # -- waiting for space -------------------------------------------------------------------------

    async def _retry(self, attempt: Callable[[], Any], timeout: float | None) -> None:
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        ticket: int | None = None
        while True:
            try:
                attempt()
                return
            except errors.BusFullError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            except errors.BusRemovedError:
                if self._attach == "same" or (deadline is not None and time.monotonic() > deadline):
                    raise
                await asyncio.sleep(_SUCCESSOR_POLL_S)
                continue
            if ticket is None:
                # Announced first and tried again: space freed in between ends the sleep.
                ticket = self._want_space()
                continue
            await self._space_freed(ticket, deadline)
            await self._check_stall(began)
            ticket = None

    async def _space_freed(self, ticket: int, deadline: float | None) -> None:
        """Wait, with all tasks of this loop, for a single thread that sleeps on the ring."""
        wait_s = limits.SPACE_WAIT_S
        if deadline is not None:
            wait_s = min(wait_s, max(0.0, deadline - time.monotonic()))
        await self._space.wait(functools.partial(self._await_space, ticket, wait_s), wait_s)

    async def _check_stall(self, began: float, waits_for: str = _WAITS_FOR_SPACE) -> None:
        """Run the watchdog in a thread: a report takes longer than a loop may rest."""
        waited_s = time.monotonic() - began
        await asyncio.to_thread(self._watch.check, self._segment, waits_for, waited_s)

    def pressure(self) -> float:
        """Backpressure of the bus: 0 for empty, 1 for full or paused.

        A read of shared memory, a word for each extent: cheap beside a rollout, not beside a put.

        Returns
        -------
        float
            The held part of the bus's extents, or 1.0 while the bus is paused, or while no group
            may begin (`max_lead`).
        """
        return self._pressure(None)

    def _pressure(self, group: tuple[str, int | None, int] | None) -> float:
        segment = self._here()
        if segment.paused() is not None:
            return 1.0
        limit, held, *_ = _core.lead_state(segment)
        if limit and held >= limit and not (group and _core.lead_knows(segment, *group)):
            return 1.0
        return 1.0 - segment.free_extents() / segment.extent_count

    async def wait_ready(
        self,
        below: float = limits.READY_PRESSURE,
        *,
        timeout: float | None = None,
        instance_id: str | None = None,
        round: int | None = None,
        split: str = TRAIN,
    ) -> bool:
        """Wait, with all tasks of the loop, until the pressure falls below a bound.

        Ask before starting a rollout, to avoid samples for a full or paused bus, or for a group not
        admitted yet.

        Parameters
        ----------
        below : float
            Above 0, at most 1.
        timeout : float, optional
            Seconds to wait: None waits for ever.
        instance_id : str, optional
            The prompt to sample. Give it if workers share groups: a sample of a group begun by
            another worker need not wait for the bound on groups.
        round : int, optional
            Its round, as for `put`.
        split : str, default "train"
            Its split, as for `put`.

        Returns
        -------
        bool
            False at the timeout.

        Raises
        ------
        TypeError, ValueError
            `below` or `timeout` is no number, or out of its range.
        BusRemovedError, StallError
            As for `put`.
        """
        check_timeout(timeout)
        if not 0 < check_number("below", below) <= 1:
            raise ValueError(f"below: expected more than 0, at most 1, got {below!r}")
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        number = _core.split_number(self._here(), check_split(split))
        group = None if instance_id is None else (instance_id, round, number)
        while self._pressure(group) >= below:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            ticket = self._want_space()
            if self._pressure(group) >= below:
                await self._space_freed(ticket, deadline)
                await self._check_stall(began)
                if self._attach == "same":
                    self._segment.require_name()
        return True

    # -- agents ------------------------------------------------------------------------------------

    def session(
        self, request: Request, *, url: str | None = None, wait: float | None = 0.0
    ) -> Session:
        """Have an agent make a sample by calls through a recorder (`shmbus proxy`).

        Parameters
        ----------
        request : Request
            A request from `requests.next`; the session ends it.
        url : str, optional
            The recorder's address; by default the bus's recorder with the fewest sessions.
        wait : float, optional
            Seconds to wait for a recorder with room: None waits for ever, 0 does not wait.

        Returns
        -------
        Session
            For a ``with`` or ``async with`` block. An exception of the agent fails the sample and
            propagates, unless the recorder had ended the session before.

        Raises
        ------
        RecorderUnavailableError
            No recorder takes the session; the request was given back.
        TypeError, ValueError
            `request` is no request, or `wait` no number of 0 or more.

        Examples
        --------
        ::

            with producer.session(request) as session:
                answer = run_agent(request.meta, session.base_url, session.api_key)
                session.finish(score_of(answer))
        """
        from shmbus.handles.session import Session

        return Session._open(self, check_request(request), url, wait)

    # -- state and end -----------------------------------------------------------------------------

    @property
    def paused(self) -> str | None:
        """Reason for the pause of producers, maybe empty; None without a pause."""
        pause = self._here().paused()
        return None if pause is None else pause[0]

    @functools.cached_property
    def _servers(self) -> ServerRows:
        # A producer loads few modules; the room of pools comes with the first look.
        from shmbus.pool.server_rows import ServerRows

        return ServerRows(self.name)

    @property
    def policy_version(self) -> int:
        """The weights version for samples that begin now; a read of shared memory.

        The oldest version of the inference servers that read weights from this machine's pool
        (`EngineFleet`), by the rows of their ranks; on a bus without servers, the trainer's
        version. A server without known weights, such as a restarted server, raises
        VersionUnknownError. While all servers lack known weights, `requests.next` hands out
        nothing.
        """
        return self._servers.oldest(self._here().policy_version)

    def version_of(self, server: str) -> int:
        """Return the weights version of an inference server, by the rows of its ranks.

        Parameters
        ----------
        server : str
            The fleet's address of the server, such as ``http://127.0.0.1:8000``.

        Returns
        -------
        int
            During an update the older version; 0 before the first version of server and trainer.

        Raises
        ------
        VersionUnknownError
            The server restarted, holds no version yet, or reads no weights here.
        BusClosedError, TypeError
            The Producer is closed or from before a fork; or the address is no str.
        """
        check_text("server", server)
        return self._servers.version_of(server, self._here().policy_version)

    @property
    def cache_salt(self) -> str:
        """Prefix-cache salt of the current weights version, for a request sent now.

        vLLM takes it as ``cache_salt``, SGLang as ``extra_key``. While `EngineFleet` updates
        servers, no two salts are alike.
        """
        return cache_salt(self.name, self._here().policy_version)

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record this bus takes, header and padding included."""
        return self._here().record_limit

    def stats(self) -> ProducerStats:
        """Return this Producer's counts since it attached.

        Returns
        -------
        ProducerStats
            Its own counts; `Bus.stats` counts all producers. In a successor the counts go on, and
            `producer_id` belongs to the present bus.
        """
        return ProducerStats(self.producer_id, *self._counts())

    def close(self) -> None:
        """Abort open reservations and leave the bus; committed records stay."""
        if not self.closed:
            self.requests._return_failed()
            if "_servers" in self.__dict__:
                self._servers.close()
        super().close()

    @_core.finalizer
    def __del__(self) -> None:
        state = getattr(self, "_request_state", None)
        if state is not None and state.taken:
            self.close()

    def __reduce__(self) -> tuple[Callable[[], Producer], tuple[()]]:
        on_stall, stall_timeout = self._watch.options
        schema = None if self._own_schema is None else mapping_of(self._own_schema)
        again = functools.partial(
            type(self), self.name, checksum=self._checksum, label=self._label, on_stall=on_stall,
            stall_timeout=stall_timeout, attach=self._attach, wait=self._wait, schema=schema,
        )  # fmt: skip
        return again, ()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"producer_id={self.producer_id}"
        return f"<Producer {self.name!r} {state}>"
