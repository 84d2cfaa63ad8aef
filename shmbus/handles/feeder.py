"""Feeder: what offers prompts to workers, through the same segment as their samples come back.

The lane lies in the segment, so a feeder needs no collector and no daemon to offer, and workers
need no feeder to take.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import (
    TRAIN,
    check_count,
    check_instance_id,
    check_int,
    check_round,
    check_timeout,
)
from shmbus.base.closing import ClosedByAnyWith
from shmbus.data.prompts import encode_prompt
from shmbus.data.schema import Schema, mapping_of, parse
from shmbus.handles.stall import OnStall, Watch
from shmbus.segment import lifecycle
from shmbus.segment.explain import requests_full_error
from shmbus.segment.names import check_name
from shmbus_ext import _core

#: A feeder's wait, as named in a stall report.
_WAITS_FOR = "room in the request lane"
#: Seconds between two attempts while another feeder works: its turn takes microseconds.
_HELD_POLL_S = 0.0005


#: A request as the core takes it: id, round, number of the split, group_size, need, level, prompt.
Offer = tuple[bytes, "int | None", int, int, int, int, bytes]


def check_offer(
    segment: _core.Segment,
    instance_id: str | int,
    group_size: int,
    need: int | None,
    round: int | None,
    split: str,
    priority: int,
    prompt: bytes,
) -> Offer:
    """Check a request's description of its group."""
    size = check_int("group_size", group_size, 1, _core.MAX_GROUP_SIZE)
    wanted = size if need is None else check_count("need", need, 1)
    if wanted > size:
        raise ValueError(f"need: expected 1 to group_size={size}, got {wanted}")
    if wanted < size and round is None:
        raise ValueError(
            f"need: {wanted} of {size} needs a round, which tells late samples from those of the "
            "prompt's next round; give round=, such as the number of the pass over the data"
        )
    level = check_int("priority", priority, 0, _core.REQUEST_LEVELS - 1)
    return (
        check_instance_id(instance_id).encode(),
        check_round(round),
        _core.split_number(segment, split),
        size,
        wanted,
        level,
        prompt,
    )


class Feeder(ClosedByAnyWith):
    """Offers prompts to a bus's workers. Feeders in several processes may share a bus.

    A request stands for one group: its prompt is stored once, and workers take its samples singly
    (`Producer.requests.next`). The request stays in the lane until its group was acknowledged or
    ended otherwise. A handle pickles by name; after a fork the child makes its own.

    Parameters
    ----------
    name : str
        The bus.
    schema : mapping of str to dtype or (dtype, shape), optional
        The fields of a prompt, as `Bus.create` takes those of a sample. With a schema, lists are
        welcome, and a missing, misnamed or misshapen field raises at the offer.
    on_stall : "log" | "raise" | callable | None
        Action after every `stall_timeout` seconds without movement on the bus while `request` waits
        for room, as for `Consumer`.
    stall_timeout : float, optional
        Those seconds; None means 60.

    Raises
    ------
    BusNotFoundError, LayoutMismatchError
        The bus is missing, or has another layout.

    Examples
    --------
    A data set, in order, as fast as the lane takes it::

        with shmbus.Feeder("run1") as feeder:
            for number, prompt in enumerate(prompts):
                feeder.request(f"q{number}", group_size=8, round=0, prompt=prompt)
    """

    def __init__(
        self,
        name: str,
        *,
        schema: Schema | None = None,
        on_stall: OnStall = "log",
        stall_timeout: float | None = None,
    ) -> None:
        self.name = check_name(name)
        self._watch = Watch(name, on_stall, stall_timeout)
        self._declared = None if schema is None else parse(schema)
        self._segment = lifecycle.open_segment(name)

    def request(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        need: int | None = None,
        round: int | None = None,
        split: str = TRAIN,
        priority: int = 0,
        meta: Any = None,
        timeout: float | None = None,
        **prompt: Any,
    ) -> int:
        """Offer a group; block while the lane is full, like `put` for a full bus.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `Producer.put`.
        group_size : int
            Samples to make, 1 to 16384.
        need : int, optional
            Samples that complete the group; all by default.
        round : int, optional
            Number of this repetition of the prompt, 0 or more. Give it if prompts repeat.
        split : str, default "train"
            Purpose of the group.
        priority : int, default 0
            0 to 7; workers take the highest first, and within a priority the oldest offer.
        meta : object, optional
            A value msgspec can encode as MessagePack; workers read it as ``request.meta``.
        timeout : float, optional
            Seconds to wait for room: None waits for ever, 0 does not wait.
        **prompt : array
            The prompt: fields of arbitrary shape and dtypes of fixed size; lists for ``prompt``
            (int32), for `put`'s standard fields, and for fields a schema declares. Workers read
            them as ``request[name]``. Text goes into `meta`.

        Returns
        -------
        int
            The request's number: 1 for the first ever offered on the bus.

        Raises
        ------
        TypeError, ValueError
            An argument has a wrong type or is out of range, or a field is no array.
        RecordTooLargeError
            The request would not fit into an empty lane; also a ValueError.
        BusFullError
            The lane stayed full for the timeout; the message names the lane's workers.
        BusClosedError, BusRemovedError, StallError
            As for `Producer.put`.
        """
        check_timeout(timeout)
        offer = self._checked(instance_id, group_size, need, round, split, priority, meta, **prompt)
        return self._offer([offer], timeout)[0]

    def request_many(
        self, requests: Iterable[Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[int]:
        """Offer many groups, in order: a single turn of the lane and a single wake-up for many.

        Parameters
        ----------
        requests : iterable of mapping
            Mappings with the arguments of `request` by name, instance_id and fields too.
        timeout : float, optional
            Seconds to wait for room, for all together: None waits for ever, 0 does not wait.

        Returns
        -------
        list of int
            The requests' numbers.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `request`; the message names the item, and nothing was offered.
        BusFullError
            Room for all was missing within the timeout. Its `accepted` counts the offered requests,
            from the first on; the rest can be offered again.
        BusClosedError, BusRemovedError, StallError
            As for `request`.
        """
        check_timeout(timeout)
        return self._offer(self._checked_many(requests), timeout)

    def _checked(
        self,
        instance_id: str | int,
        group_size: int,
        need: int | None = None,
        round: int | None = None,
        split: str = TRAIN,
        priority: int = 0,
        meta: Any = None,
        **prompt: Any,
    ) -> Offer:
        encoded = encode_prompt(prompt, meta, self._declared)
        return check_offer(
            self._segment, instance_id, group_size, need, round, split, priority, encoded
        )

    def _checked_many(self, requests: Iterable[Mapping[str, Any]]) -> list[Offer]:
        if not isinstance(requests, Iterable):
            raise TypeError(
                f"requests: expected an iterable of mappings, got {type(requests).__name__}"
            )
        offers = []
        for number, each in enumerate(requests):
            if not isinstance(each, Mapping):
                raise TypeError(f"item {number}: expected a mapping, got {type(each).__name__}")
            missing = {"instance_id", "group_size"} - each.keys()
            if missing:
                raise TypeError(f"item {number}: missing the argument {sorted(missing)[0]!r}")
            try:
                offers.append(self._checked(**each))
            except (TypeError, ValueError) as error:
                raise type(error)(f"item {number}: {error}") from error
        return offers

    def _offer(self, offers: list[Offer], timeout: float | None) -> list[int]:
        """Offer all, waiting for room; `accepted` of an exception counts the offered requests."""
        began = time.monotonic()
        wait_s = self._watch.slice_s
        numbers: list[int] = []
        try:
            while len(numbers) < len(offers):
                self._segment.require_name()
                ticket = self._attempt(offers, numbers)
                if len(numbers) == len(offers):
                    break
                left_s = self._left_s(offers[len(numbers)], began, timeout)
                if ticket is None:
                    time.sleep(_HELD_POLL_S)
                else:
                    _core.request_await(self._segment, True, ticket, left_s)
                if wait_s is not None:
                    self._watch.check(self._segment, _WAITS_FOR, time.monotonic() - began)
        except BaseException as error:
            error.accepted = len(numbers)  # type: ignore[attr-defined]
            raise
        return numbers

    def _attempt(self, offers: list[Offer], numbers: list[int]) -> int | None:
        """Offer as many as fit; return a ticket to sleep on, or None while another feeder works."""
        ticket: int | None = None
        while True:
            done, number = _core.request_offer(self._segment, offers, len(numbers))
            numbers.extend(range(number - done + 1, number + 1))
            if len(numbers) == len(offers) or number == -1:
                return None
            if number == -2:
                self._refuse(offers[len(numbers) :])
            if done:
                ticket = None
            elif ticket is not None:
                return ticket
            else:
                # Announced before the next look: room made in between ends the sleep.
                ticket = _core.request_want(self._segment, True)

    def _left_s(self, offer: Offer, began: float, timeout: float | None) -> float:
        waited_s = time.monotonic() - began
        if timeout is not None and waited_s >= timeout:
            raise requests_full_error(self._segment, len(offer[-1]), waited_s)
        return (
            limits.SPACE_WAIT_S if timeout is None else min(limits.SPACE_WAIT_S, timeout - waited_s)
        )

    def _refuse(self, offers: list[Offer]) -> None:
        """Raise for an offer too large for an empty lane."""
        room = _core.request_totals(self._segment)[8]
        largest = max(offers, key=lambda offer: (len(offer[-1]) > room, offer[3]))
        raise errors.RecordTooLargeError(
            f"bus {self.name!r}: the request lane has {room} bytes for prompts, and the request "
            f"{largest[0].decode()!r} of {largest[3]} samples needs {len(largest[-1])} bytes and a "
            "cell for each sample; create the bus with a larger request_capacity, or send the "
            "prompt by reference"
        )

    @property
    def closed(self) -> bool:
        """True after close(), or for a copy after a fork."""
        return self._segment.closed

    def close(self) -> None:
        """Leave the bus; offered requests stay."""
        self._segment.close()

    def __reduce__(self) -> tuple[Callable[[], Feeder], tuple[()]]:
        schema = None if self._declared is None else mapping_of(self._declared)
        on_stall, stall_timeout = self._watch.options
        again = functools.partial(
            type(self), self.name, schema=schema, on_stall=on_stall, stall_timeout=stall_timeout
        )
        return again, ()

    def __repr__(self) -> str:
        return f"<Feeder {self.name!r}{' closed' if self.closed else ''}>"
