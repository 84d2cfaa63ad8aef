"""Columns for complete groups: annotator processes write them, a trainer's `Columns` asks for them.

`Columns` offers every group to the annotators of its columns, with the arrays they need, and waits
for the answer. An `Annotator` takes such groups and writes their columns. The two sides meet on a
bus of their own, ``NAME.columns.COLUMN+COLUMN``. The bus's request lane hands a group to a single
annotator at a time, and again after a death. The bus's ledger shows who waits for whom. Several
ranks share the bus, each with a split of its own.

Invariants:

- A group's name consists of its bus's identity and its first sample's identity there. Columns never
  reach another group, and a restarted trainer finds the columns written for its predecessor.
- A column is committed once, for the whole group, with dtype and shape as the bus declares them.
- After `claim_timeout` a claimed group is offered to further annotators, and their answer counts. A
  group that cannot be sent to or written by an annotator is dropped, and never waited for.
- Written columns stay in the ring until their group has ended. A trainer's death loses no column;
  the next life ends the remaining columns of ended groups.
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
from shmbus.base.arguments import TRAIN, check_rank, check_timeout
from shmbus.base.closing import ClosedByWith
from shmbus.data.encoding import as_array, dtype_name, parse_dtype
from shmbus.data.prompts import Request
from shmbus.handles.consumer import Consumer
from shmbus.handles.group import Group
from shmbus.handles.producer import Producer
from shmbus.inspect.segment_file import SegmentFile
from shmbus.segment.bus import Bus
from shmbus.segment.names import COLUMNS_INFIX, check_name
from shmbus_ext import _core

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


logger = logging.getLogger("shmbus.annotator")

#: Field with the start of each sample's rows, in a column and in an annotator's input.
_BORDERS: Final = "borders"
#: Seconds a task waits for answers on behalf of all waiting tasks.
_SLICE_S: Final = 0.1
#: Seconds between two checks whether a group's request still stands.
_OPEN_S: Final = 1.0


def _columns(writes: object) -> dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]]:
    """Return by name the dtype and the shape of a token's part; None for an arbitrary shape."""
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
    """A group without its columns: for each sample the arrays sent by its trainer.

    Parameters
    ----------
    annotator : Annotator
        The annotator that took the group, and makes this.
    request : Request
        The trainer's offer.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int or None
        The producers' round.
    written : bool
        True once the columns are written.
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
        """Write all columns of the group together, once.

        Parameters
        ----------
        **columns
            By name a list with an array per sample. An array holds a row per token, in the declared
            dtype.

        Returns
        -------
        bool
            False if the trainer no longer waits for the columns.

        Raises
        ------
        TypeError, ValueError
            Columns are missing or unknown, or an array's length or dtype is wrong; the message
            names group, sample and column. The annotator keeps the group.
        ProtocolError
            The group was written before.
        BusFullError, BusClosedError, BusRemovedError
            As for `Producer.put`.
        """
        return self._annotator._write(self, columns)


class Annotator(ClosedByWith):
    """Adds columns to complete groups, in a process of its own: takes, computes, writes once.

    Several annotators share the work. After an annotator's death its group goes to another
    annotator.

    Parameters
    ----------
    bus : str
        The bus of the groups.
    writes : mapping of str to dtype or (dtype, shape)
        The columns of this annotator, as in the trainer's `Columns`; the shape covers a token's
        part, () for a number.
    wait : float, optional
        Seconds to wait for the trainer's `Columns`: None waits for ever, 0 does not wait.
    label : str, optional
        Name of this annotator in messages of other processes.

    Raises
    ------
    TypeError, ValueError
        `writes` is no mapping of names to dtypes, or the trainer's `Columns` declares another dtype
        or shape; the message names the column and both declarations.
    BusNotFoundError
        No trainer asked for these columns within `wait` seconds.

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
            None at the timeout.

        Raises
        ------
        TypeError, ValueError, BusClosedError, StallError
            As for `ProducerRequests.next`.
        """
        check_timeout(timeout)
        # typing lacks an overload for an optional float.
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
        """Give a group back to the other annotators, and back off for a while.

        Parameters
        ----------
        group : UnannotatedGroup
            A group from `take`.

        Returns
        -------
        bool
            False if the group no longer belonged to this annotator.
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
            values = [np.asarray(v) if isinstance(v, (list, tuple)) else v for v in given[name]]
            if len(values) != len(lengths):
                raise ValueError(
                    f"{what}: column {name!r}: expected {len(lengths)} arrays, one a sample, got "
                    f"{len(values)}"
                )
            for sample, (one, length) in enumerate(zip(values, lengths, strict=True)):
                where = f"{what}, sample {sample}: column {name!r}"
                array = values[sample] = as_array(where, one)
                if array.dtype != dtype:
                    raise TypeError(
                        f"{where}: expected {dtype_name(dtype)}, got {dtype_name(array.dtype)}; "
                        "convert it, or say so in writes="
                    )
                expected = values[0].shape[1:] if shape is None else shape
                if array.shape[:1] != (length,) or array.shape[1:] != expected:
                    raise ValueError(
                        f"{where}: expected {length} rows, one per token, got shape {array.shape}"
                    )
            arrays[name] = np.concatenate(values, dtype=dtype)  # with a stand-in's name
        if group.written:
            raise errors.ProtocolError(f"{what}: it was written before; each group is written once")
        group.written = True
        try:
            return self._producer.requests.answer(group._request, **arrays)
        except errors.RecordTooLargeError as error:
            # Other annotators would fail alike.
            self._producer.requests.fail(group._request, str(error))
            raise
        except BaseException:
            group.written = self._producer.requests.is_wanted(group._request) is False
            raise

    def close(self) -> None:
        """Leave the bus; a group taken but not written goes to another annotator."""
        self._producer.close()


class Columns(ClosedByWith):
    """Columns from annotators, for ``OnlineDataHandler(annotate_group=...)``.

    Parameters
    ----------
    bus : str
        The bus of the groups.
    writes : mapping of str to dtype or (dtype, shape)
        The columns, as the annotators write them; the shape covers a token's part.
    fields : tuple of str
        Fields of samples, and columns of earlier passes, to send to annotators: arrays with a row
        per token.
    tokens : str
        The field whose length counts a sample's tokens.
    timeout : float, optional
        Seconds to wait for a group; None waits for ever.
    claim_timeout : float, optional
        Seconds an annotator may keep a group, doubled every time. After that the group goes to
        another annotator, and a late `write` of the first returns False. None waits for ever.
    capacity, request_capacity : int or str
        Sizes of the columns' bus: for columns written and not trained yet, and for groups that wait
        for annotators. With several ranks the daemon decides.
    rank, world_size : int
        Those of the handler. Several ranks need a daemon on the columns' bus, which gives each rank
        its own columns: ``shmbus serve run1.columns.ref_logprobs``.

    Raises
    ------
    TypeError, ValueError
        `writes` is no mapping of names to dtypes, or `rank` lies outside of `world_size`.
    BusExistsError, BusBusyError
        The existing bus of the columns does not fit, declares other dtypes or shapes, or serves
        another trainer.
    BusNotFoundError, DaemonUnavailableError
        The bus does not exist, or the columns' bus of several ranks lacks a daemon.
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
        with SegmentFile(bus) as file:  # first, to leave no columns of an unknown bus
            self._bus = file.header["identity"].tobytes().hex()
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
        #: Written columns by the group's name, not requested yet.
        self._written: dict[str, Group] = {}
        #: Groups with their columns, and the groups of the columns' bus that hold them.
        self._used: list[tuple[Group, str, Group]] = []
        self._pulling = False
        self._came = asyncio.Event()
        self._lane = Bus.open(self.name)
        try:
            with SegmentFile(bus) as file:
                self._end_left(file)
        except BaseException:
            self._lane.close()
            self._consumer.close()
            raise

    def _end_left(self, file: SegmentFile) -> None:
        """Take columns written for earlier lives; end them for ended groups."""
        while written := self._consumer.take(64, timeout=0):
            self._written.update((group.instance_id, group) for group in written)
        below = [*file.slots()["committed"][:-1].tolist(), 0]
        scans = [file.scan(run, below[run.slot]) for run in file.runs()] if self._written else []
        if any(scan.changed for scan in scans):
            return  # record moved or released: the next life finds out
        keys = np.frombuffer(b"".join(scan.keys for scan in scans), "<u8").reshape(-1, 2)
        for name in self._written.keys() - {self._name(*key) for key in keys.tolist()}:
            self._written.pop(name).ack()

    def _name(self, producer_id: int, sequence: int) -> str:
        return f"{self._bus}.{producer_id}.{sequence}"

    async def __call__(self, group: Group) -> dict[str, list[NDArray[Any]]]:
        """Have a group annotated; called by a handler.

        Parameters
        ----------
        group : Group
            Under lease.

        Returns
        -------
        dict of str to list of array
            By column an array per sample.

        Raises
        ------
        TimeoutError
            No annotator wrote the group in time. The request stands: the next call waits on.
        UnservedGroupError
            No annotator can take the group: the group exceeds the lane of requests, or its columns
            exceed a record. A handler drops the group, counted as "filtered".
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
            if offered and _core.request_find(*self._place(name)) is None:
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
                    raise TimeoutError(
                        f"group {group.instance_id!r}: expected within {self._timeout:g} s, got "
                        f"none; {self.explain(group)}"
                    )
                wait_s = min(wait_s, rest_s)
            await self._news(wait_s)
        written = self._written.pop(name)
        self._used.append((group, name, written))
        borders = self._borders(group)[1:-1]
        return {column: np.split(written[0][column], borders) for column in self._columns}

    def explain(self, group: Group) -> str:
        """Return the reason why a group waits, for messages.

        Parameters
        ----------
        group : Group
            A group without its columns.

        Returns
        -------
        str
        """
        try:
            stats = self._consumer.stats(_OPEN_S)
        except errors.DaemonUnavailableError as error:
            return str(error)
        return (
            f"columns {', '.join(self._columns)}: {stats.producers} annotators are attached, "
            f"{stats.requests.open} groups wait for one and {stats.requests.claimed} are in work: "
            f"start shmbus.Annotator, or see `shmbus status {self.name}`"
        )

    def _place(self, name: str) -> tuple[_core.Segment, str, None, int]:
        segment = self._lane._segment
        return segment, name, None, _core.split_number(segment, self._split)

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
        """Offer a group to annotators unless already offered; False without room."""
        if (name, None, self._split) in self._consumer.open_requests():
            return True
        sent: dict[str, Any] = {_BORDERS: self._borders(group)}
        for field in self._fields:
            own = group.columns.get(field) or [t[field] for t in group.trajectories]
            sent[field] = np.concatenate(own, dtype=own[0].dtype)
        meta = {"instance_id": group.instance_id, "round": group.round}
        try:
            self._consumer.request(
                name, group_size=1, meta=meta, split=self._split, timeout=0, **sent
            )
        except errors.BusFullError:
            return False
        return True

    async def _news(self, wait_s: float | None) -> None:
        """Wait until columns arrive, or for `wait_s`; a single task pulls them for all tasks."""
        if self._pulling:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._came.wait(), wait_s)
            return
        self._pulling = True
        try:
            for written in await self._consumer.atake(64, wait_s):
                self._written[written.instance_id] = written
        finally:
            # Wakes another task to pull next: this task may already own its columns.
            self._pulling = False
            came, self._came = self._came, asyncio.Event()
            came.set()

    def _end_used(self) -> None:
        """End the columns of ended groups; keep those of groups given back."""
        for group, name, written in self._used:
            if group.state == "given_back":
                self._written[name] = written
            elif group.state != "leased":
                written.ack()
        self._used = [one for one in self._used if one[0].state == "leased"]

    def close(self) -> None:
        """Leave the bus; columns of open groups go to the next trainer."""
        if not self._consumer.closed:
            self._end_used()
            self._consumer.close()
            self._lane.close()
