"""Between host memory and a device: one transfer for many small tensors that lie side by side.

A transfer over PCIe costs some microseconds whatever its size, so that 64-KiB tensors one by one
reach a sixth of its rate. They are gathered: a run of neighbours crosses in one piece, into or out
of a chunk on the device, where one launch puts them in their places. Runs are planned by `plan`,
which is pure.

Invariants: a run has no byte of a tensor that is not copied with it; a chunk is written again only
when the device has done with it; `settle` returns when every byte is where it belongs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from trainer_adapter.weights.copies import LARGE_BYTES, Pair
from trainer_adapter.weights.manifest import ALIGNMENT
from trainer_adapter.weights.memory import copy_tensor

__all__ = ["CHUNK_BYTES", "HostBatch", "HostTransfers", "Run", "plan", "transfers_of"]

#: Bytes of a chunk: a millisecond of PCIe, beside which what a launch costs is nothing.
CHUNK_BYTES: Final = 64 << 20

#: While one crosses, the other one is unpacked.
CHUNKS: Final = 2


class Run(NamedTuple):
    """Neighbours in host memory: which, from which byte, to which."""

    members: list[int]
    start: int
    end: int


def plan(spans: Sequence[tuple[int, int]], most: int = CHUNK_BYTES) -> list[Run]:
    """Put neighbours together.

    Parameters
    ----------
    spans : sequence of (start, end)
        Bytes of one memory, in any order.
    most : int
        Bytes of a run; a longer span is a run of its own.

    Returns
    -------
    list of Run
        Each span in one of them. Tensors begin at multiples of 256 bytes, so a gap that is smaller
        is padding, where the spans are whole tensors. A run begins at such a multiple, so that each
        member is aligned in a chunk as it is in memory.
    """
    runs: list[Run] = []
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        last = runs[-1] if runs else None
        near = last is not None and 0 <= start - last.end < ALIGNMENT
        if last is not None and near and end - last.start <= most:
            last.members.append(index)
            runs[-1] = last._replace(end=end)
        else:
            runs.append(Run([index], start // ALIGNMENT * ALIGNMENT, end))
    return runs


class HostTransfers:
    """The way between host memory and one device: a stream and two chunks; one for a process.

    Attributes
    ----------
    lock : RLock
        To be held from the first `HostBatch.begin` to `settle`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.chunks = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(CHUNKS)
        ]
        #: What a chunk's last use has to do before the next.
        self.free: list[torch.cuda.Event | None] = [None] * CHUNKS
        self._first = torch.cuda.current_stream(device).record_event()  # the memory was torch's
        self.stream.wait_event(self._first)

    def settle(self) -> None:
        """Wait until every byte is there.

        Raises
        ------
        RuntimeError
            A copy has failed.
        """
        self.stream.synchronize()
        torch.cuda.current_stream(self.device).synchronize()


@functools.cache
def transfers_of(device: torch.device) -> HostTransfers:
    """Return the way between host memory and a CUDA device.

    Parameters
    ----------
    device : torch.device
        With its number.

    Returns
    -------
    HostTransfers
    """
    return HostTransfers(device)


class _Step(NamedTuple):
    """A run, made ready: which chunk it takes, its bytes on both sides, and what is in it."""

    turn: int
    memory: torch.Tensor
    chunk: torch.Tensor
    outside: list[torch.Tensor]
    inside: list[torch.Tensor]


class HostBatch:
    """Copies between host memory and a device that are begun together, again and again.

    Parameters
    ----------
    transfers : HostTransfers
        The way.
    pairs : sequence of (target, source)
        All in one direction. What is in host memory, which is registered for speed, is contiguous;
        where it is written, it is whole tensors of a payload: what pads them is written too.

    Attributes
    ----------
    nbytes : int
        Of all targets.
    """

    def __init__(self, transfers: HostTransfers, pairs: Sequence[Pair]) -> None:
        self._transfers = transfers
        self._to_device = bool(pairs) and pairs[0][0].is_cuda
        self._alone: list[Pair] = []
        self._odd: list[Pair] = []
        small = []
        host = 1 if self._to_device else 0
        for pair in pairs:
            target, source = pair
            plain = pair[host].is_contiguous() and target.numel() > 0
            if plain and _size(pair[host]) < LARGE_BYTES:
                small.append(pair)
            elif plain and source.is_contiguous() and target.dtype == source.dtype:
                self._alone.append(pair)
            else:
                self._odd.append(pair)
        self._steps = [
            self._ready(index % CHUNKS, run, members, host)
            for index, (run, members) in enumerate(_runs(small, host))
        ]
        self.nbytes = sum(_size(target) for target, _ in pairs)

    def _ready(self, turn: int, run: Run, members: list[Pair], host: int) -> _Step:
        chunk = self._transfers.chunks[turn][: run.end - run.start]
        return _Step(
            turn,
            _bytes(members[0][host], run),
            chunk,
            [pair[1 - host] for pair in members],
            [_in_chunk(chunk, pair[host], run) for pair in members],
        )

    def begin(self) -> None:
        """Begin to copy, after what the device's current stream was asked to do before."""
        way = self._transfers
        current = torch.cuda.current_stream(way.device)
        way.stream.wait_stream(current)
        with torch.cuda.stream(way.stream):
            for target, source in self._alone:
                target.copy_(source, non_blocking=True)
        for step in self._steps:
            if self._to_device:
                self._into_device(step, current)
            else:
                self._out_of(step, current)
        for target, source in self._odd:
            copy_tensor(target, source)

    def _into_device(self, step: _Step, current: torch.cuda.Stream) -> None:
        way = self._transfers
        if (free := way.free[step.turn]) is not None:
            way.stream.wait_event(free)
        with torch.cuda.stream(way.stream):
            step.chunk.copy_(step.memory, non_blocking=True)
        current.wait_event(way.stream.record_event())
        torch._foreach_copy_(step.outside, step.inside)
        way.free[step.turn] = current.record_event()

    def _out_of(self, step: _Step, current: torch.cuda.Stream) -> None:
        way = self._transfers
        if (free := way.free[step.turn]) is not None:
            current.wait_event(free)
        torch._foreach_copy_(step.inside, step.outside)
        way.stream.wait_event(current.record_event())
        with torch.cuda.stream(way.stream):
            step.memory.copy_(step.chunk, non_blocking=True)
        way.free[step.turn] = way.stream.record_event()


def _runs(pairs: Sequence[Pair], host: int) -> Iterator[tuple[Run, list[Pair]]]:
    """Yield runs of neighbours in the same memory, and what they are of."""
    memories: dict[int, list[Pair]] = {}
    for pair in pairs:
        memories.setdefault(pair[host].untyped_storage().data_ptr(), []).append(pair)
    for members in memories.values():
        spans = [(_offset(pair[host]), _offset(pair[host]) + _size(pair[host])) for pair in members]
        for run in plan(spans):
            yield run, [members[index] for index in run.members]


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(first: torch.Tensor, run: Run) -> torch.Tensor:
    """View a run in the memory of its first member."""
    made = torch.empty(0, dtype=torch.uint8)
    return made.set_(first.untyped_storage(), run.start, (run.end - run.start,), (1,))


def _in_chunk(chunk: torch.Tensor, tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """View a member's place in the chunk that has its run."""
    offset = _offset(tensor) - run.start
    return chunk[offset : offset + _size(tensor)].view(tensor.dtype).view(tensor.shape)
