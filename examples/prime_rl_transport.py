"""prime-rl on shared memory: its batch sender and receiver over a channel for each trainer process.

    import prime_rl_transport
    prime_rl_transport.install("run1")   # in the orchestrator and each trainer, before they start

prime-rl's factory chooses its transport by name, without a hook: `install` replaces the factory;
with the patch in ``docs/adapters/upstream/prime-rl.diff`` a module's name suffices. Both sets of
names work: ``transports.rollouts`` with MicroBatchSender, and ``transports.batch`` with
BatchSender. prime-rl installs with CUDA only: the tests run against the interfaces of two of its
commits (docs/adapters/prime-rl.md).

- Received micro batches equal sent ones, value for value and type for type; lists as long as the
  tokens come as read-only arrays, routed experts as bytes in place.
- Asking for the next step acknowledges a step: a restarted trainer gets the unacknowledged step
  again. A step refused by a single rank goes again to the same rank alone.
- A trainer without matching sender gets an error; it never waits.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect
import numpy as np

from shmbus import BusNotFoundError, WaitTimeoutError
from shmbus.channel import ChannelReceiver, ChannelSender
from shmbus.channel.endpoint import living_statement

TESTED = "prime-rl 559b447 (MicroBatchSender) and 0f59b24 (BatchSender), by their interfaces"
#: Places of the interface, newest first: package, and the middle of the factories' names.
PLACES = (("prime_rl.transports.batch", "batch"), ("prime_rl.transports.rollouts", "micro_batch"))

_LOG = logging.getLogger("shmbus.prime_rl")
#: Steps the orchestrator may be ahead; seconds of its wait for a trainer: longer than a step and a
#: checkpoint.
_SLOTS = 2
STEP_TIMEOUT_S = 3600.0
#: Seconds between two checks for Ctrl-C, and between two lines of the log.
_LOOK_S = 1.0
_NOTE_S = 60.0
#: Lists that stay lists even at the length of the tokens: not tensors.
_LISTS = frozenset({"sequence_lengths", "seq_lens", "branch_indices", "lora_num_tokens"})
#: Smaller arrays travel among the small values.
_LEAST_BYTES = 1024
_ALIGN = 64
_DTYPES = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}


# -- the factories -------------------------------------------------------------------------------


def install(name: str, *, readers_per_rank: int = 1) -> str:
    """Have prime-rl's factories return these senders and receivers; return their package.

    `readers_per_rank` trainer processes share a data rank: context times pipeline parallelism.
    """
    tried = []
    for package, middle in PLACES:
        wanted = (f"setup_{middle}_sender", f"setup_{middle}_receiver", "MicroBatch")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not package.startswith(error.name):
                raise
            tried.append(f"{package} is not there")
            continue
        missing = [each for each in wanted if not hasattr(module, each)]
        if missing:
            tried.append(f"{package} has no {', '.join(missing)}")
            continue
        ours = _factories(name, readers_per_rank, module.MicroBatch)
        for attribute, factory in zip(wanted, ours, strict=False):
            _replace(getattr(module, attribute), attribute, factory)
        return package
    raise ImportError(
        f"the prime-rl adapter needs its batch transport: {'; '.join(tried)}; written for {TESTED}"
    )


def setup_batch_sender(
    output_dir: Path, data_world_size: int, current_step: int, transport: Any
) -> Any:
    """Make the sender of a transport chosen by this module's name; `options` carries `bus`."""
    return _of(transport)[0](output_dir, data_world_size, current_step, transport)


def setup_batch_receiver(
    output_dir: Path, data_rank: int, current_step: int, transport: Any
) -> Any:
    """Make the receiver of a transport chosen by this module's name."""
    return _of(transport)[1](output_dir, data_rank, current_step, transport)


def _of(transport: Any) -> tuple[Any, Any]:
    micro_batch = importlib.import_module(PLACES[0][0]).MicroBatch
    options = transport.options
    return _factories(options["bus"], options.get("readers_per_rank", 1), micro_batch)


def _factories(name: str, readers: int, micro_batch: type[Any]) -> tuple[Any, Any]:
    def sender(output_dir: Path, data_world_size: int, current_step: int, transport: Any) -> Any:
        return ShmbusBatchSender(
            name, data_world_size, current_step, readers_per_rank=readers, micro_batch=micro_batch
        )

    def receiver(output_dir: Path, data_rank: int, current_step: int, transport: Any) -> Any:
        reader = int(os.environ.get("RANK", "0")) % readers
        return ShmbusBatchReceiver(
            name, data_rank, current_step, micro_batch=micro_batch, reader=reader
        )

    return sender, receiver


def _replace(theirs: Any, attribute: str, ours: Any) -> None:
    """Replace prime-rl's factory in every module under its name."""
    for loaded, module in list(sys.modules.items()):
        if loaded.startswith("prime_rl.") and getattr(module, attribute, None) is theirs:
            setattr(module, attribute, ours)


# -- micro batches as bytes: arrays at their places, the rest as MessagePack -----------------------


class Piece(msgspec.Struct, array_like=True):
    """Place of an array of a micro batch: batch number, path of names, dtype, offset."""

    batch: int
    path: list[str | int]
    dtype: str
    begin: int
    nbytes: int


class _Head(msgspec.Struct, array_like=True):
    batches: list[msgspec.Raw]
    pieces: list[Piece]


class _Parts(NamedTuple):
    pieces: list[Piece]
    arrays: list[Any]


def encode(batches: Sequence[Any]) -> tuple[bytes, _Parts, int]:
    """Split micro batches into small values and placed arrays; return them with the total bytes."""
    out = _Parts([], [])
    small = []
    for number, batch in enumerate(batches):
        ids: Any = getattr(batch, "input_ids", None)
        if not isinstance(batch, msgspec.Struct) or not hasattr(ids, "__len__"):
            raise TypeError(
                f"send: micro batch {number}: expected prime-rl's MicroBatch with input_ids, got "
                f"{type(batch).__name__}; send what its packer made"
            )
        rest = _without(batch, len(ids), number, [], out)
        small.append(msgspec.Raw(msgspec.msgpack.encode(rest)))
    begin = 0
    for piece in out.pieces:
        piece.begin = begin
        begin += -(-piece.nbytes // _ALIGN) * _ALIGN
    return msgspec.msgpack.encode(_Head(small, out.pieces)), out, begin


@functools.cache
def _float_lists(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of float lists: their readers turn ints into floats."""
    found: Any = msgspec.inspect.type_info(kind)
    return frozenset(
        field.name
        for field in found.fields
        for each in getattr(field.type, "types", (field.type,))
        if isinstance(each, msgspec.inspect.ListType)
        and isinstance(each.item_type, msgspec.inspect.FloatType)
    )


def _without(
    value: Any, tokens: int, number: int, path: list[str | int], out: _Parts, as_float: bool = False
) -> Any:
    """Return a copy of a value with empty placeholders for extracted arrays."""
    if isinstance(value, msgspec.Struct):
        if type(value).__struct_config__.frozen:
            return value
        floats = _float_lists(type(value))
        return type(value)(**{
            name: _without(
                getattr(value, name), tokens, number, [*path, name], out, name in floats
            )
            for name in value.__struct_fields__
        })  # fmt: skip
    array = _array_of(value, tokens, path, as_float)
    if array is not None:
        out.arrays.append(array)
        kind = "bytes" if isinstance(value, bytes) else array.dtype.str
        out.pieces.append(Piece(number, path, kind, 0, array.nbytes))
        return b"" if isinstance(value, bytes) else []
    if isinstance(value, dict):
        return {k: _without(v, tokens, number, [*path, k], out) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return [_without(v, tokens, number, [*path, i], out) for i, v in enumerate(value)]
    return value


def _array_of(value: Any, tokens: int, path: list[str | int], as_float: bool) -> Any:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8) if len(value) >= _LEAST_BYTES else None
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    if not isinstance(value, list) or len(value) != tokens or not tokens or path[-1] in _LISTS:
        return None
    kinds = set(map(type, value))
    dtype = _DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    try:
        return np.array(value, _DTYPES[float] if as_float and dtype.kind == "i" else dtype)
    except OverflowError:
        return None  # MessagePack knows unsigned numbers of 64 bits


def decode(meta: bytes, view: Any, decoder: Any) -> list[Any]:
    """Make micro batches from the result of `encode`."""
    head = msgspec.msgpack.decode(meta, type=_Head)
    batches = [decoder.decode(raw) for raw in head.batches]
    for piece in head.pieces:
        part = view[piece.begin : piece.begin + piece.nbytes]
        owner = batches[piece.batch]
        for step in piece.path[:-1]:
            owner = getattr(owner, str(step)) if isinstance(owner, msgspec.Struct) else owner[step]
        value = part if piece.dtype == "bytes" else part.view(piece.dtype)
        if isinstance(owner, msgspec.Struct):
            setattr(owner, str(piece.path[-1]), value)
        else:
            owner[piece.path[-1]] = value
    return batches


# -- the orchestrator's statement, and its check --------------------------------------------------


class _Sent(msgspec.Struct):
    """Statement of a channel: data ranks, trainer processes a rank, fields of the MicroBatch."""

    ranks: int
    readers: int
    fields: list[str] = []


def _fields_of(micro_batch: object) -> list[str]:
    if not isinstance(micro_batch, type) or not issubclass(micro_batch, msgspec.Struct):
        raise TypeError(
            f"micro_batch: expected prime-rl's MicroBatch, a msgspec.Struct, got {micro_batch!r}"
        )
    return list(micro_batch.__struct_fields__)


def _channel_name(run: str, rank: int, reader: int) -> str:
    return f"{run}.rank{rank}.{reader}"


def _check_slice(run: str, rank: int, reader: int, own: list[str]) -> None:
    """Refuse a trainer outside the slices of the run's living orchestrator."""
    stated = living_statement(_channel_name(run, 0, 0))
    if not stated:
        return
    sent = msgspec.msgpack.decode(stated, type=_Sent)
    if rank >= sent.ranks or reader >= sent.readers:
        raise ValueError(
            f"run {run!r}: this trainer asks for reader {reader} of data rank {rank}, and the "
            f"orchestrator sends to {sent.ranks} data ranks with {sent.readers} readers each, "
            "counted from 0; give both the same data-parallel size, and install(..., "
            "readers_per_rank=) the same number in all processes. Nothing was received"
        )
    if sent.fields and sent.fields != own:
        other = sorted(set(sent.fields) ^ set(own))
        what = f"only one of the two has {', '.join(other)}" if other else "their order differs"
        raise ValueError(
            f"run {run!r}: the orchestrator's MicroBatch is not the trainer's: {what}; run both "
            "from one version of prime-rl. Nothing was received"
        )


# -- the two ends ---------------------------------------------------------------------------------


class _CancelledError(Exception):
    """The waiting call of this send ended."""


class ShmbusBatchSender:
    """Sends each step's micro batches: prime-rl's BatchSender, or MicroBatchSender."""

    def __init__(
        self,
        name: str,
        data_world_size: int,
        current_step: int = 0,
        *,
        readers_per_rank: int = 1,
        micro_batch: type[Any] | None = None,
        timeout: float = STEP_TIMEOUT_S,
    ) -> None:
        self.data_world_size, self.current_step = data_world_size, current_step
        fields = [] if micro_batch is None else _fields_of(micro_batch)
        sent = msgspec.msgpack.encode(_Sent(data_world_size, readers_per_rank, fields))
        self._channels: list[list[ChannelSender]] = [[] for _ in range(data_world_size)]
        try:
            for rank, of_rank in enumerate(self._channels):
                for reader in range(readers_per_rank):
                    channel = _channel_name(name, rank, reader)
                    of_rank.append(ChannelSender(channel, slots=_SLOTS, timeout=timeout))
            for each in self._all():
                each.resume_after(current_step - 1)
                each.state(sent)
        except BaseException:
            self.close()
            raise

    def _all(self) -> Iterator[ChannelSender]:
        return (channel for of_rank in self._channels for channel in of_rank)

    async def send(self, micro_batch_grid: list[list[Any]]) -> None:
        """Send a step: equally many micro batches for every data rank.

        After a cancellation, as by Ctrl-C, some ranks may hold the step: send the same step again.
        """
        lengths = [len(row) for row in micro_batch_grid]
        if len(lengths) != self.data_world_size or len(set(lengths)) > 1:
            raise ValueError(
                f"send: expected {self.data_world_size} ranks with equally many micro batches, got "
                f"{lengths}; nothing was sent"
            )
        cancelled = threading.Event()
        sending = asyncio.ensure_future(asyncio.to_thread(self._send, micro_batch_grid, cancelled))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # A thread in wait for a trainer would delay the end of the process, for an hour.
            cancelled.set()
            await asyncio.wait({sending})
            sending.exception()  # the caller gets the cancellation instead
            raise
        self.current_step += 1

    def _send(self, grid: list[list[Any]], cancelled: threading.Event) -> None:
        def check() -> None:
            if cancelled.is_set():
                raise _CancelledError

        for channels, batches in zip(self._channels, grid, strict=True):
            meta, out, size = encode(batches)
            for channel in channels:
                if channel.next_step > self.current_step:
                    continue  # repeat a send broken by a different rank
                channel.on_wake = check
                view = np.frombuffer(memoryview(channel.begin(size, len(meta))), np.uint8)
                for piece, array in zip(out.pieces, out.arrays, strict=True):
                    view[piece.begin : piece.begin + piece.nbytes] = array.view(np.uint8)
                del view
                channel.commit(meta)

    def close(self) -> None:
        """End: trainers get the sent steps, then an error about the end."""
        for channel in self._all():
            channel.close()


class ShmbusBatchReceiver:
    """Receives a data rank's micro batches: prime-rl's BatchReceiver, or MicroBatchReceiver."""

    def __init__(
        self,
        name: str,
        data_rank: int,
        current_step: int = 0,
        *,
        micro_batch: type[Any],
        reader: int = 0,
    ) -> None:
        if data_rank < 0 or reader < 0:
            raise ValueError(
                f"data_rank, reader: expected 0 or more, got {data_rank} and {reader}; give the "
                "position of this process among those that train on other data"
            )
        self.data_rank, self.current_step = data_rank, current_step
        self._place = name, data_rank, reader, _fields_of(micro_batch)
        self._name = _channel_name(name, data_rank, reader)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(micro_batch)
        self._channel: ChannelReceiver | None = None
        self._held: Any = None
        self._used = False
        self._check_at_s = 0.0

    def _look(self, seconds: float) -> bool:
        if self._held is not None:
            return True
        if time.monotonic() >= self._check_at_s:
            _check_slice(*self._place)
            self._check_at_s = time.monotonic() + _LOOK_S
        try:
            if self._channel is None:
                self._channel = ChannelReceiver(self._name, wait=seconds)
                self._channel.resume_after(self.current_step - 1)
            if self._used:
                self._channel.ack()
                self._used = False
            self._held = self._channel.receive(timeout=seconds)
        except (BusNotFoundError, WaitTimeoutError):
            return False
        return True

    def wait(self) -> None:
        """Wait for the next step without limit, with a log line a minute."""
        note_at_s = time.monotonic() + _NOTE_S
        while not self._look(_LOOK_S):
            if time.monotonic() >= note_at_s:
                note_at_s += _NOTE_S
                where = "is there" if self._channel is not None else "is not there yet"
                _LOG.warning(
                    "step %d of data rank %d has not come: its channel %r %s; look whether the "
                    "orchestrator of this run works, on this machine",
                    self.current_step, self.data_rank, self._name, where,
                )  # fmt: skip

    def can_receive(self) -> bool:
        """Return whether the next step is ready; errors as in `wait`."""
        return self._look(0.0)

    def receive(self) -> list[Any]:
        """Return the next step's micro batches; acknowledge the previous step."""
        self.wait()
        message, self._held = self._held, None
        view = np.frombuffer(memoryview(message.memory), np.uint8)
        found = decode(message.meta, view, self._decoder)
        self._used = True
        self.current_step += 1
        return found

    def close(self) -> None:
        """Leave. The next trainer gets an unacknowledged step again."""
        if self._channel is not None:
            self._channel.close()


if __name__ == "__main__":
    print(__doc__)
