"""Feeder: what offers prompts to workers, through the same segment as their samples come back.

The lane lies in the segment, so a feeder needs no collector and no daemon to offer, and workers
need no feeder to take.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from shmbus import errors, limits
from shmbus._arguments import check_count, check_int, check_timeout
from shmbus._loop_waits import LoopWaits
from shmbus._prompts import encode_prompt
from shmbus.segment import lifecycle
from shmbus.segment.explain import requests_full_error
from shmbus.segment.names import check_name
from shmbus.stall import OnStall, Watch
from shmbus_ext import _core

__all__ = ["SPLIT_TRAIN", "Feeder"]

#: The split of a request that was given none: what is trained on.
SPLIT_TRAIN = "train"

#: What a feeder waits for, in a report of a stall.
_WAITS_FOR = "room in the request lane"
#: Seconds between two attempts while another feeder is at work: its turn takes microseconds.
_HELD_POLL_S = 0.0005


class Offer(NamedTuple):
    """A request as the core takes it."""

    instance_id: bytes
    epoch: int | None
    split: bytes
    group_size: int
    need: int
    level: int
    prompt: bytes


def check_offer(
    instance_id: str,
    group_size: int,
    need: int | None,
    epoch: int | None,
    split: str,
    priority: int,
    prompt: bytes,
) -> Offer:
    """Check what a request says of its group."""
    size = check_count("group_size", group_size, 1)
    if size > _core.MAX_GROUP_SIZE:
        raise ValueError(f"group_size: expected 1 to {_core.MAX_GROUP_SIZE}, got {size}")
    wanted = size if need is None else check_count("need", need, 1)
    if wanted > size:
        raise ValueError(f"need: expected 1 to group_size={size}, got {wanted}")
    level = check_int("priority", priority)
    if not 0 <= level < _core.REQUEST_LEVELS:
        raise ValueError(
            f"priority: expected 0 to {_core.REQUEST_LEVELS - 1}, which is taken first, got {level}"
        )
    return Offer(
        _text("instance_id", instance_id),
        None if epoch is None else check_count("epoch", epoch, 0),
        _text("split", split),
        size,
        wanted,
        level,
        prompt,
    )


def _text(name: str, value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    encoded = value.encode("utf-8", "surrogatepass")
    if not 1 <= len(encoded) <= _core.MAX_ID_BYTES:
        raise ValueError(
            f"{name}: expected 1 to {_core.MAX_ID_BYTES} bytes of UTF-8, got {len(encoded)}"
        )
    return value.encode()


class Feeder:
    """Offers prompts to the workers of a bus. Several may feed one bus, from any process.

    A request is one group: its prompt is stored once, and workers take its samples one at a time
    (`Producer.next_request`). It stays in the lane until its group was acknowledged or has ended
    otherwise. A handle pickles by name; after a fork the child makes its own.

    Parameters
    ----------
    name : str
        The bus.
    on_stall : "log" | "raise" | callable | None
        What happens each time that nothing has moved on the bus for `stall_timeout` seconds while
        `request` waits for room, as for `Consumer`.
    stall_timeout : float
        Those seconds.

    Raises
    ------
    BusNotFoundError, LayoutMismatchError
        There is no such bus, or it is of another layout.

    Examples
    --------
    A data set, in order, as fast as the lane takes it::

        with shmbus.Feeder("run1") as feeder:
            for number, prompt in enumerate(prompts):
                feeder.request(f"q{number}", group_size=8, epoch=0, prompt=prompt)
    """

    def __init__(
        self,
        name: str,
        *,
        on_stall: OnStall = "log",
        stall_timeout: float = limits.STALL_TIMEOUT_S,
    ) -> None:
        self.name = check_name(name)
        self._watch = Watch(name, on_stall, stall_timeout)
        self._room = LoopWaits()
        self._segment = lifecycle.open_segment(name)

    def request(
        self,
        instance_id: str,
        *,
        group_size: int,
        need: int | None = None,
        epoch: int | None = None,
        split: str = SPLIT_TRAIN,
        priority: int = 0,
        meta: Any = None,
        timeout: float | None = None,
        **prompt: Any,
    ) -> int:
        """Offer one group; a full lane makes this wait, as a full bus does `put`.

        Parameters
        ----------
        instance_id : str
            The prompt's key, as for `Producer.put`.
        group_size : int
            Samples to make, 1 to 16384.
        need : int, optional
            How many of them make the group complete; all by default.
        epoch : int, optional
            Which repetition of the prompt this is, 0 or more. Give it where prompts come again.
        split : str, default "train"
            What the group is for.
        priority : int, default 0
            0 to 7; workers take the highest first, and within it what was offered first.
        meta : object, optional
            Whatever msgspec can encode as MessagePack; workers read it as ``request.meta``.
        timeout : float, optional
            Seconds to wait for room: None waits for ever, 0 does not wait.
        **prompt : array
            The prompt: any fields, of any shape and any dtype of fixed size; workers read them as
            ``request[name]``.

        Returns
        -------
        int
            The request's number: 1 for the first that was ever offered on the bus.

        Raises
        ------
        TypeError, ValueError
            An argument is of a wrong type or out of range, or a field is no array.
        RecordTooLargeError
            It would not fit into an empty lane; also a ValueError.
        BusFullError
            There was no room within the timeout; the message says who serves the lane.
        BusClosedError, BusRemovedError, StallError
            As for `Producer.put`.
        """
        check_timeout(timeout)
        offer = check_offer(
            instance_id, group_size, need, epoch, split, priority, encode_prompt(prompt, meta)
        )
        return self._offer(offer, timeout)

    def _offer(self, offer: Offer, timeout: float | None) -> int:
        began = time.monotonic()
        wait_s = self._watch.slice_s
        while True:
            number, ticket = self._attempt(offer)
            if number > 0:
                return number
            left_s = self._left_s(offer, began, timeout)
            if ticket is None:
                time.sleep(_HELD_POLL_S)
            else:
                _core.request_await(self._segment, True, ticket, left_s)
            self._segment.require_name()
            if wait_s is not None:
                self._watch.check(self._segment, _WAITS_FOR, time.monotonic() - began)

    def _attempt(self, offer: Offer) -> tuple[int, int | None]:
        """Return the number, or 0 and the ticket to sleep on; None while another feeder works."""
        ticket: int | None = None
        for last in (False, True):
            if last:
                # Announced before: room that is made in between is not slept through.
                ticket = _core.request_want(self._segment, True)
            number = _core.request_offer(self._segment, *offer)
            if number == -2:
                self._refuse(offer)
            if number > 0:
                return number, None
            if number < 0:
                return 0, None
        return 0, ticket

    def _left_s(self, offer: Offer, began: float, timeout: float | None) -> float:
        waited_s = time.monotonic() - began
        if timeout is not None and waited_s >= timeout:
            raise requests_full_error(self._segment, len(offer.prompt), waited_s)
        return (
            limits.SPACE_WAIT_S if timeout is None else min(limits.SPACE_WAIT_S, timeout - waited_s)
        )

    def _refuse(self, offer: Offer) -> None:
        room = _core.request_totals(self._segment)[8]
        raise errors.RecordTooLargeError(
            f"bus {self.name!r}: the request lane has {room} bytes for prompts, and this request "
            f"of {offer.group_size} samples needs {len(offer.prompt)} bytes and a cell for each "
            "sample; create the bus with a larger request_capacity, or send the prompt by reference"
        )

    async def arequest(
        self, instance_id: str, *, timeout: float | None = None, **arguments: Any
    ) -> int:
        """Offer one group without blocking the event loop: while the lane is full, other tasks run.

        Parameters
        ----------
        instance_id : str
            The prompt's key, as for `request`.
        timeout : float, optional
            Seconds to wait for room: None waits for ever, 0 does not wait.
        **arguments
            All others of `request`, fields too.

        Returns
        -------
        int
            As for `request`.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError, BusFullError
            As for `request`.
        BusClosedError, BusRemovedError, StallError
            As for `request`.
        """
        check_timeout(timeout)
        began = time.monotonic()
        while True:
            ticket = _core.request_want(self._segment, True)
            try:
                return self.request(instance_id, timeout=0, **arguments)
            except errors.BusFullError:
                waited_s = time.monotonic() - began
                if timeout is not None and waited_s >= timeout:
                    raise
            left_s = limits.SPACE_WAIT_S
            if timeout is not None:
                left_s = min(left_s, timeout - waited_s)
            await self._room.wait(functools.partial(self._await_room, ticket, left_s), left_s)
            await asyncio.to_thread(self._watch.check, self._segment, _WAITS_FOR, waited_s)

    def _await_room(self, ticket: int, wait_s: float) -> None:
        _core.request_await(self._segment, True, ticket, wait_s)

    @property
    def closed(self) -> bool:
        """Whether close() was called, or this is a copy after a fork."""
        return self._segment.closed

    def close(self) -> None:
        """Leave the bus; what was offered stays."""
        self._segment.close()

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Feeder], tuple[Any, ...]]:
        return _rebuild, (type(self), self.name, self._watch.options)

    def __repr__(self) -> str:
        return f"<Feeder {self.name!r}{' closed' if self.closed else ''}>"


def _rebuild(cls: type[Feeder], name: str, stall: tuple[OnStall, float]) -> Feeder:
    return cls(name, on_stall=stall[0], stall_timeout=stall[1])
