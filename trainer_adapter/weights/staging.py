"""Between host memory and a device: one transfer for many small tensors that lie side by side.

A transfer over PCIe costs some microseconds whatever its size, so that 64-KiB tensors one by one
reach a sixth of its rate. They are gathered: a run of neighbours crosses in one piece, into or out
of a chunk on the device, where one launch puts them in their places. Runs are planned by `plan`,
which is pure.

Invariants: a run has no byte of a tensor that is not copied with it; a chunk is written again only
when the device has done with it; `settle` returns when every byte is where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from trainer_adapter.weights.copies import LARGE_BYTES, Pair
from trainer_adapter.weights.manifest import ALIGNMENT
from trainer_adapter.weights.memory import copy_tensor

__all__ = ["CHUNK_BYTES", "HostTransfers", "Run", "plan"]

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
    """Copies between host memory and one device, ordered after its current stream.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._chunks: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event | None] = [None] * CHUNKS
        self._turn = 0

    def to_device(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy tensors of the host to the device.

        Parameters
        ----------
        pairs : sequence of (target, source)
            Targets on the device; sources contiguous, in host memory, which is registered for
            speed. They must stay until `settle`.
        """
        self._begin()
        current = torch.cuda.current_stream(self._device)
        for run, members in _runs(self._alone(pairs, host=1), host=1):
            turn, chunk = self._next_chunk(run)
            with torch.cuda.stream(self._stream):
                chunk.copy_(_bytes(members[0][1], run), non_blocking=True)
            current.wait_stream(self._stream)
            torch._foreach_copy_(
                [target for target, _ in members],
                [_in_chunk(chunk, source, run) for _, source in members],
            )
            self._free[turn] = current.record_event()

    def to_host(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy tensors of the device to the host.

        Parameters
        ----------
        pairs : sequence of (target, source)
            Sources on the device; targets whole tensors of a payload in host memory: what pads
            them is written too. Cast on the device.
        """
        self._begin()
        current = torch.cuda.current_stream(self._device)
        for run, members in _runs(self._alone(pairs, host=0), host=0):
            turn, chunk = self._next_chunk(run)
            if (free := self._free[turn]) is not None:
                current.wait_event(free)
            torch._foreach_copy_(
                [_in_chunk(chunk, target, run) for target, _ in members],
                [source for _, source in members],
            )
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                _bytes(members[0][0], run).copy_(chunk, non_blocking=True)
                self._free[turn] = self._stream.record_event()

    def settle(self) -> None:
        """Wait until every byte is there.

        Raises
        ------
        RuntimeError
            A copy has failed.
        """
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def _begin(self) -> None:
        # What was asked of the device before, such as the optimizer's step, comes first.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _alone(self, pairs: Sequence[Pair], host: int) -> list[Pair]:
        """Begin what crosses by itself; returns the rest."""
        small = []
        for pair in pairs:
            target, source = pair
            plain = pair[host].is_contiguous() and target.numel() > 0
            if plain and _size(pair[host]) < LARGE_BYTES:
                small.append(pair)
            elif plain and source.is_contiguous() and target.dtype == source.dtype:
                with torch.cuda.stream(self._stream):
                    target.copy_(source, non_blocking=True)
            else:
                copy_tensor(target, source)
        return small

    def _next_chunk(self, run: Run) -> tuple[int, torch.Tensor]:
        if not self._chunks:
            self._chunks = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self._device)
                for _ in range(CHUNKS)
            ]
            self._begin()  # the memory may have been torch's a moment ago
        turn, self._turn = self._turn, (self._turn + 1) % CHUNKS
        if (free := self._free[turn]) is not None:
            self._stream.wait_event(free)
        return turn, self._chunks[turn][: run.end - run.start]


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
