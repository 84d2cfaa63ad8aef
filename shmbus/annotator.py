"""Columns that processes of their own add to complete groups: annotators, and who asks them.

A trainer's `Columns` offers each group to the annotators of its columns, with the arrays that they
need, and waits for their answer; an `Annotator` takes such groups and writes their columns. They
meet on a bus of their own, ``NAME.columns.COLUMN+COLUMN``: its request lane hands a group to one
annotator at a time, and again after a death; its ledger says who waits for whom. Several ranks
share it, each by a split of its own.

Invariants:

- A group is called by its bus's identity and its first sample's there. So what was written for it
  is never another's, and a trainer that starts again finds what was written for the one before.
- A column is committed once, as a whole group's, with dtype and shape as the bus declares them.
- A group that one annotator keeps beyond `claim_timeout` is offered to the others, whose answer
  counts; a group that no annotator can be sent or can write is dropped, and nothing waits for it.
- What was written stays in the ring until its group has ended, so a trainer's death loses none; the
  next life ends what was left of groups that had ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmbus import errors
from shmbus._arguments import TRAIN, check_rank, check_timeout
from shmbus._closing import ClosedByWith
from shmbus._encoding import parse_dtype
from shmbus._prompts import Request
from shmbus.consumer import Consumer
from shmbus.group import Group
from shmbus.inspect.segment_file import SegmentFile
from shmbus.producer import Producer
from shmbus.segment.bus import Bus
from shmbus.segment.names import COLUMNS_INFIX, check_name
from shmbus_ext import _core

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


logger = logging.getLogger(__name__)

#: Where each sample's rows begin in a column, and in what an annotator is given.
_BORDERS: Final = "borders"
#: Seconds that one task waits for answers while the others wait for it.
_SLICE_S: Final = 0.1
#: Seconds between two looks whether a group is asked for still.
_OPEN_S: Final = 1.0


def _columns(writes: object) -> dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]]:
    """Return by name the dtype and the shape of a token's part; None for any shape."""
    if not isinstance(writes, Mapping) or not writes:
        raise TypeError(
            f"writes: expected a mapping of columns to dtypes, got {writes!r}; "
            "writes={'ref_logprobs': 'float32'}"
        )
    for name in writes:
        if not isinstance(name, str) or not name.isidentifier() or name == _BORDERS:
            raise ValueError(f"writes: expected names of columns, got {name!r}")
    found = {}
    for name in sorted(writes):
        given: Any = writes[name]
        shape: tuple[int, ...] | None = None
        if isinstance(given, tuple) and len(given) == 2:
            given, shape = given[0], np.empty(0, (np.int8, given[1])).shape[1:]
        found[name] = parse_dtype(f"writes: {name!r}", given), shape
    return found


def _schema(columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...] | None]]) -> dict[str, Any]:
    return {
        name: (dtype, ... if shape is None else (None, *shape))
        for name, (dtype, shape) in columns.items()
    }


def _bus_of(bus: str, columns: Mapping[str, object]) -> str:
    return check_name(f"{check_name(bus)}{COLUMNS_INFIX}{'+'.join(columns)}")


class UnannotatedGroup(Sequence[Mapping[str, "NDArray[Any]"]]):
    """A group that lacks columns: of each sample the arrays that its trainer sent.

    Parameters
    ----------
    annotator : Annotator
        Who took it, and makes this.
    request : Request
        What the trainer offered.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int or None
        The producers' round.
    written : bool
        Whether its columns were written.
    """

    def __init__(self, annotator: Annotator, request: Request) -> None:
        self._annotator = annotator
        self._request = request
        meta = request.meta
        self.instance_id: str = meta["instance_id"]
        self.round: int | None = meta["round"]
        fields = request.fields
        self.written = False
        self._borders = fields.pop(_BORDERS)
        cuts = self._borders[1:-1]
        parts = {name: np.split(values, cuts) for name, values in fields.items()}
        self._samples = [
            {name: values[at] for name, values in parts.items()}
            for at in range(len(self._borders) - 1)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]

    def __repr__(self) -> str:
        return f"<UnannotatedGroup {self.instance_id!r} of {len(self)}>"

    def write(self, **columns: Any) -> bool:
        """Write the columns of the group, all of them at once, once.

        Parameters
        ----------
        **columns
            By name a list of an array a sample, with a row for each of its tokens and the dtype
            that was said.

        Returns
        -------
        bool
            False where nobody waits for them any more.

        Raises
        ------
        TypeError, ValueError
            Columns are missing or unknown, or an array is of another length or dtype; the message
            names group, sample and column. The group is still this annotator's.
        ProtocolError
            It was written before.
        BusFullError, BusClosedError, BusRemovedError
            As for `Producer.put`.
        """
        return self._annotator._write(self, columns)


class Annotator(ClosedByWith):
    """Adds columns to complete groups, in a process of its own: takes, computes, writes once.

    Any number of them share the work. A group of one that dies goes to another.

    Parameters
    ----------
    bus : str
        The bus of the groups.
    writes : mapping of str to dtype or (dtype, shape)
        The columns that this one writes, as the trainer's `Columns` has them; the shape is that of
        a token's part, () for a number.
    wait : float, optional
        Seconds to wait for the trainer's `Columns`: None waits for ever, 0 does not wait.
    label : str, optional
        How messages of other processes name this one.

    Raises
    ------
    TypeError, ValueError
        `writes` is no mapping of names to dtypes, or the trainer's `Columns` has another dtype or
        shape; the message names column and both.
    BusNotFoundError
        No trainer has asked for these columns, also after `wait` seconds.

    Examples
    --------
    ::

        with shmbus.Annotator("run1", writes={"ref_logprobs": "float32"}) as annotator:
            for group in annotator:
                group.write(ref_logprobs=[logprobs(model, sample["tokens"]) for sample in group])
    """

    def __init__(
        self,
        bus: str,
        writes: Mapping[str, DTypeLike],
        *,
        wait: float | None = 60.0,
        label: str | None = None,
    ) -> None:
        self._columns = _columns(writes)
        self.name = _bus_of(bus, self._columns)
        self._producer = Producer(
            self.name,
            wait=wait,
            label=label,
            attach="successor",
            schema=_schema(self._columns),
        )

    def take(self, timeout: float | None = None) -> UnannotatedGroup | None:
        """Take the next group to annotate.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait: None waits for ever, 0 does not wait.

        Returns
        -------
        UnannotatedGroup or None
            None where none came in time.

        Raises
        ------
        TypeError, ValueError, BusClosedError, StallError
            As for `ProducerRequests.next`.
        """
        check_timeout(timeout)
        # typing has no overload for a float that may be None.
        next_: Any = self._producer.requests.next
        request = next_(timeout)
        return None if request is None else UnannotatedGroup(self, request)

    def __iter__(self) -> Iterator[UnannotatedGroup]:
        """Take groups for ever."""
        while True:
            group = self.take()
            if group is not None:
                yield group

    def give_back(self, group: UnannotatedGroup) -> bool:
        """Give a group back to the others; this one gets none for a while.

        Parameters
        ----------
        group : UnannotatedGroup
            What `take` gave.

        Returns
        -------
        bool
            False where it was not this annotator's any more.
        """
        return self._producer.requests.release(group._request)

    def _write(self, group: UnannotatedGroup, given: Mapping[str, Any]) -> bool:
        what = f"write: group {group.instance_id!r}"
        if given.keys() != self._columns.keys():
            raise ValueError(
                f"{what}: expected the columns {', '.join(self._columns)}, got "
                f"{', '.join(sorted(given)) or 'none'}"
            )
        lengths = np.diff(group._borders).tolist()
        arrays: dict[str, Any] = {}
        for name, (dtype, shape) in self._columns.items():
            values = list(given[name])
            if len(values) != len(lengths):
                raise ValueError(
                    f"{what}: column {name!r}: expected {len(lengths)} arrays, one a sample, got "
                    f"{len(values)}"
                )
            for sample, (one, length) in enumerate(zip(values, lengths, strict=True)):
                array = values[sample] = np.asarray(one)
                if array.dtype != dtype:
                    raise TypeError(
                        f"{what}, sample {sample}: column {name!r}: expected {dtype}, got "
                        f"{array.dtype}; convert it, or say so in writes="
                    )
                expected = values[0].shape[1:] if shape is None else shape
                if array.shape[:1] != (length,) or array.shape[1:] != expected:
                    raise ValueError(
                        f"{what}, sample {sample}: column {name!r}: expected {length} rows, one a "
                        f"token, as the others are, got shape {array.shape}"
                    )
            arrays[name] = np.concatenate(values)
        if group.written:
            raise errors.ProtocolError(f"{what}: it was written before; each group is written once")
        group.written = True
        try:
            return self._producer.requests.answer(group._request, **arrays)
        except errors.RecordTooLargeError as error:
            # No other annotator can write it either.
            self._producer.requests.fail(group._request, str(error))
            raise
        except BaseException:
            group.written = self._producer.requests.is_wanted(group._request) is False
            raise

    def close(self) -> None:
        """Leave; a group that was taken and not written goes to another annotator."""
        self._producer.close()


class Columns(ClosedByWith):
    """What annotators write, for ``OnlineDataHandler(annotate_group=...)``.

    Parameters
    ----------
    bus : str
        The bus of the groups.
    writes : mapping of str to dtype or (dtype, shape)
        The columns, as the annotators write them; the shape is that of a token's part.
    fields : tuple of str
        The fields of samples, and columns of earlier passes, that annotators are sent: arrays with
        a row a token.
    tokens : str
        The field that says how many tokens a sample has.
    timeout : float, optional
        Seconds to wait for a group; None waits for ever.
    claim_timeout : float, optional
        Seconds that an annotator may keep a group, twice as many each time: then the group goes to
        another annotator, and a late `write` of the first returns False. None waits for ever.
    capacity, request_capacity : int or str
        Of the bus of the columns: for what was written and not trained yet, and for the groups that
        wait for annotators. Of several ranks the daemon decides.
    rank, world_size : int
        Those of the handler. Several ranks need a daemon on the bus of the columns, which gives
        each what was written for it: ``shmbus serve run1.columns.ref_logprobs``.

    Raises
    ------
    TypeError, ValueError
        `writes` is no mapping of names to dtypes, or `rank` is none of `world_size`.
    BusExistsError, BusBusyError
        The bus of the columns is another, or has other dtypes or shapes, or another process asks
        for them.
    BusNotFoundError, DaemonUnavailableError
        There is no such bus, or nobody serves that of the columns of several ranks.
    """

    def __init__(
        self,
        bus: str,
        writes: Mapping[str, DTypeLike],
        *,
        fields: tuple[str, ...] = ("tokens",),
        tokens: str = "tokens",
        timeout: float | None = None,
        claim_timeout: float | None = 600.0,
        capacity: int | str = "256MiB",
        request_capacity: int | str = "64MiB",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        rank, world_size = check_rank(rank, world_size)
        self._columns = _columns(writes)
        self._fields, self._tokens = tuple(fields), tokens
        self._timeout = check_timeout(timeout)
        self._claim_timeout = check_timeout(claim_timeout, "claim_timeout")
        self.name = _bus_of(bus, self._columns)
        if world_size == 1:
            Bus.ensure(
                self.name,
                capacity,
                request_capacity=request_capacity,
                schema=_schema(self._columns),
            ).close()
        self._split = f"rank{rank}" if rank else TRAIN
        self._consumer = Consumer(
            self.name, daemon=world_size > 1 or None, split=self._split, on_stall=None
        )
        #: What was written, by the group's name, and not asked for yet.
        self._written: dict[str, Group] = {}
        #: Groups that have their columns, each with what these lie in.
        self._used: list[tuple[Group, str, Group]] = []
        self._pulling = False
        self._came = asyncio.Event()
        self._lane = Bus.open(self.name)
        try:
            with SegmentFile(bus) as file:
                self._bus = file.header["identity"].tobytes().hex()
                self._end_left(file)
        except BaseException:
            self._lane.close()
            self._consumer.close()
            raise

    def _end_left(self, file: SegmentFile) -> None:
        """Take what was written for the lives before; end it where its group has ended."""
        while written := self._consumer.take(64, timeout=0):
            self._written.update((group.instance_id, group) for group in written)
        below = [*file.slots()["committed"][:-1].tolist(), 0]
        scans = [file.scan(run, below[run.slot]) for run in file.runs()] if self._written else []
        if any(scan.changed for scan in scans):
            return  # a record was moved, or released: the next life finds out
        keys = np.frombuffer(b"".join(scan.keys for scan in scans), "<u8").reshape(-1, 2)
        for name in self._written.keys() - {self._name(*key) for key in keys.tolist()}:
            self._written.pop(name).ack()

    def _name(self, producer_id: int, sequence: int) -> str:
        return f"{self._bus}.{producer_id}.{sequence}"

    async def __call__(self, group: Group) -> dict[str, list[NDArray[Any]]]:
        """Have a group annotated; call it by a handler.

        Parameters
        ----------
        group : Group
            Under lease.

        Returns
        -------
        dict of str to list of array
            By column an array of each sample.

        Raises
        ------
        TimeoutError
            No annotator has written it in time. It is asked for still: the next call waits on.
        UnservedGroupError
            No annotator can have it: the group is larger than the lane of requests, or its columns
            are larger than a record. A handler drops it, counted as "filtered".
        """
        self._end_used()
        first = group.trajectories[0]
        name = self._name(first.producer_id, first.sequence)
        began_s = claimed_s = time.monotonic()
        patience_s = math.inf if self._claim_timeout is None else self._claim_timeout
        offered = False
        while name not in self._written:
            try:
                offered = offered or self._offer(name, group)
            except errors.RecordTooLargeError as error:
                raise errors.UnservedGroupError(
                    f"columns {', '.join(self._columns)}: {error}; give Columns a larger "
                    "request_capacity, or send fewer fields="
                ) from error
            now_s = time.monotonic()
            if offered and not self._is_open(name):
                raise errors.UnservedGroupError(
                    f"columns {', '.join(self._columns)}: an annotator could not write them, as "
                    "its error says; give Columns a larger capacity"
                )
            if now_s >= claimed_s + patience_s:
                self._revoke(name)
                claimed_s, patience_s = now_s, 2 * patience_s
            wait_s = min(_OPEN_S if offered else _SLICE_S, claimed_s + patience_s - now_s)
            if self._timeout is not None:
                rest_s = began_s + self._timeout - time.monotonic()
                if rest_s <= 0:
                    raise TimeoutError(self._overdue(group))
                wait_s = min(wait_s, rest_s)
            await self._news(wait_s)
        written = self._written.pop(name)
        self._used.append((group, name, written))
        borders = self._borders(group)[1:-1]
        return {column: np.split(written[0][column], borders) for column in self._columns}

    def explain(self, group: Group) -> str:
        """Return what a group waits for, for messages.

        Parameters
        ----------
        group : Group
            A group whose columns are missing.

        Returns
        -------
        str
        """
        stats = self._consumer.stats()
        return (
            f"columns {', '.join(self._columns)}: {stats.producers} annotators are attached, "
            f"{stats.requests.open} groups wait for one and {stats.requests.claimed} are in work: "
            f"start shmbus.Annotator, or see `shmbus status {self.name}`"
        )

    def _place(self, name: str) -> tuple[_core.Segment, str, None, int]:
        segment = self._lane._segment
        return segment, name, None, _core.split_number(segment, self._split)

    def _is_open(self, name: str) -> bool:
        return _core.request_find(*self._place(name)) is not None

    def _revoke(self, name: str) -> None:
        if _core.request_revoke(*self._place(name)):
            logger.warning(
                "bus %r: an annotator has kept a group for %g s or longer; another one may take it",
                self.name, self._claim_timeout,
            )  # fmt: skip

    def _borders(self, group: Group) -> NDArray[np.int64]:
        lengths = [t.shape(self._tokens)[0] for t in group.trajectories]
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def _offer(self, name: str, group: Group) -> bool:
        """Offer a group to annotators, unless it is; False where there is no room."""
        if (name, None, self._split) in self._consumer.open_requests():
            return True
        sent: dict[str, Any] = {_BORDERS: self._borders(group)}
        for field in self._fields:
            own = group.columns.get(field) or [t[field] for t in group.trajectories]
            sent[field] = np.concatenate(own)
        meta = {"instance_id": group.instance_id, "round": group.round}
        try:
            self._consumer.request(
                name, group_size=1, meta=meta, split=self._split, timeout=0, **sent
            )
        except errors.BusFullError:
            return False
        return True

    async def _news(self, wait_s: float | None) -> None:
        """Wait until something was written, or for so long; one task takes it for all."""
        if self._pulling:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._came.wait(), wait_s)
            return
        self._pulling = True
        try:
            for written in await self._consumer.atake(64, wait_s):
                self._written[written.instance_id] = written
        finally:
            # Another one takes the next, where this one has what it waits for.
            self._pulling = False
            came, self._came = self._came, asyncio.Event()
            came.set()

    def _end_used(self) -> None:
        """End what was written for groups that have ended; keep it for those that come again."""
        for group, name, written in self._used:
            if group.state == "given_back":
                self._written[name] = written
            elif group.state != "leased":
                written.ack()
        self._used = [one for one in self._used if one[0].state == "leased"]

    def _overdue(self, group: Group) -> str:
        return (
            f"group {group.instance_id!r}: expected within {self._timeout:g} s, got none; "
            f"{self.explain(group)}"
        )

    def close(self) -> None:
        """Leave; what was written for groups that have not ended comes to the next trainer."""
        if not self._consumer.closed:
            self._end_used()
            self._consumer.close()
            self._lane.close()
