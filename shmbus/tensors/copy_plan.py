"""Copies of many tensors: small ones of a device together, large ones by themselves.

On a device a copy costs some microseconds of the host whatever its size, so a thousand small ones
take longer than the model's bytes; one launch for all of them is slower by the byte, so large ones
go alone. Between host memory and a device, neighbours cross in one piece, into or out of a chunk on
the device, where one launch puts them in their places while the next chunk crosses: 64-KiB tensors
one by one reach a sixth of the rate of PCIe. Rows of larger tensors the kernel itself reads, where
the memory is registered. Pure decisions are in `split` and `plan`, which batches execute.

Invariants: a run has no byte of a tensor that is not copied with it; a chunk is written again only
when the device has done with it; `settle` returns when every byte is where it belongs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Final, NamedTuple

import torch

from shmbus.pool import copy_bytes
from shmbus.tensors.copy_table import (
    ADDRESS_BYTES,
    LARGE_BYTES,
    CopyTable,
    Pair,
    is_alike,
    may_cut,
    spans_of,
)
from shmbus.tensors.views import ALIGNMENT, byte_view, copy_tensor, count_writes, is_plain_copy

#: Bytes of a chunk: 0.6 ms of PCIe, beside which what a launch costs is nothing.
CHUNK_BYTES: Final = 32 << 20

#: While one crosses, another one is unpacked; reading them takes what comparing 4,096 tensors does.
CHUNKS: Final = 4


class Part(NamedTuple):
    """A span, or a part of one: which, from which byte of the memory, to which."""

    which: int
    start: int
    end: int


class Run(NamedTuple):
    """Neighbours in host memory: which, from which byte, to which."""

    members: list[Part]
    start: int
    end: int


def plan(
    spans: Sequence[tuple[int, int]],
    most: int = CHUNK_BYTES,
    *,
    whole: frozenset[int] = frozenset(),
) -> list[Run]:
    """Put neighbours together."""
    runs: list[Run] = []
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        while start < end:
            last = runs[-1] if runs else None
            near = last is not None and 0 <= start - last.end < ALIGNMENT
            room = last.start + most - start if near and last is not None else 0
            if last is None or room < (end - start if index in whole else 1):
                last = Run([], start // ALIGNMENT * ALIGNMENT, start)
                runs.append(last)
                room = last.start + most - start
            until = min(end, start + room)
            last.members.append(Part(index, start, until))
            runs[-1] = last._replace(end=until)
            start = until
    return runs


class HostTransfers:
    """The way between host memory and one device: a stream and some chunks; one for a process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(False):  # else they could not be written in any other mode
            self.chunks = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(CHUNKS)
            ]
        #: What a chunk's last use has to do before the next.
        self.free: list[torch.cuda.Event | None] = [None] * CHUNKS
        self._first = torch.cuda.current_stream(device).record_event()  # the memory was torch's
        self.stream.wait_event(self._first)

    def settle(self) -> None:
        """Wait until every byte is there."""
        self.stream.synchronize()
        torch.cuda.current_stream(self.device).synchronize()


@functools.cache
def transfers_of(device: torch.device) -> HostTransfers:
    """Return the way between host memory and a CUDA device."""
    return HostTransfers(device)


class _Step(NamedTuple):
    """A run, made ready: which chunk it takes, its bytes on both sides, and what is in it."""

    turn: int
    memory: torch.Tensor
    chunk: torch.Tensor
    table: CopyTable | None
    outside: list[torch.Tensor]
    inside: list[torch.Tensor]

    def copy(self, *, to_device: bool) -> None:
        """Copy between the chunk and the tensors, on the device's current stream."""
        if self.table is not None:
            self.table.begin()
        if self.outside and to_device:
            torch._foreach_copy_(self.outside, self.inside)
        elif self.outside:
            torch._foreach_copy_(self.inside, self.outside)


class HostBatch:
    """Copies between host memory and a device that are begun together, again and again."""

    def __init__(self, transfers: HostTransfers, pairs: Sequence[Pair]) -> None:
        self._transfers = transfers
        self._to_device = bool(pairs) and pairs[0][0].is_cuda
        self._alone: list[Pair] = []
        self._odd: list[Pair] = []
        rows: list[Pair] = []
        together = []
        host = 1 if self._to_device else 0
        for pair in pairs:
            target, source = pair
            plain = pair[host].is_contiguous() and target.numel() > 0
            if plain and (_size(pair[host]) < LARGE_BYTES or _may_be_cut(pair, host)):
                together.append(pair)
            elif plain and source.is_contiguous() and _is_one_of_bytes(pair):
                self._alone.append(pair)
            elif self._may_read(pair):
                rows.append(pair)
            else:
                self._odd.append(pair)
        self._steps: list[_Step] = []
        for run, members in _runs(together, host):
            which, start, end = run.members[0]
            lone = members[which]
            is_whole = len(run.members) == 1 and end - start == _size(lone[0])
            # By itself a small one would cost a transfer and a launch.
            if is_whole and end - start < LARGE_BYTES and self._may_read(lone):
                rows.append(lone)
            else:
                self._steps.append(self._ready(len(self._steps) % CHUNKS, run, members, host))
        self._rows = CopyTable(rows) if rows else None
        self.nbytes = sum(_size(target) for target, _ in pairs)

    def _may_read(self, pair: Pair) -> bool:
        """Whether the kernel can read a source where it is."""
        return self._to_device and may_cut() and pair[1].is_pinned() and spans_of(*pair) is not None

    def _ready(self, turn: int, run: Run, pairs: Sequence[Pair], host: int) -> _Step:
        chunk = self._transfers.chunks[turn][: run.end - run.start]
        cut: list[Pair] = []
        outside, inside = [], []
        for index, start, end in run.members:
            pair = pairs[index]
            place = chunk[start - run.start : end - run.start]
            if _may_be_cut(pair, host):
                first = start - _offset(pair[host])
                part = _flat(pair[1 - host])[first : first + end - start]
                cut.append((part, place) if self._to_device else (place, part))
            else:
                outside.append(pair[1 - host])
                inside.append(place.view(pair[host].dtype).view(pair[host].shape))
        memory = _bytes(pairs[run.members[0].which][host], run)
        table = CopyTable(cut) if cut else None
        return _Step(turn, memory, chunk, table, outside, inside)

    def begin(self) -> None:
        """Begin to copy, after what the device's current stream was asked to do before."""
        way = self._transfers
        current = torch.cuda.current_stream(way.device)
        if self._rows is not None:
            self._rows.begin()
        if self._to_device:
            for step in self._steps[:CHUNKS]:
                way.free[step.turn] = self._read(step)
            # The next run is asked for as soon as its chunk is: PCIe never waits for this loop.
            for number, step in enumerate(self._steps):
                self._unpack(step, current)
                for follows in self._steps[number + CHUNKS : number + CHUNKS + 1]:
                    way.free[follows.turn] = self._read(follows)
        else:
            for step in self._steps:
                self._write(step, current)
        way.stream.wait_stream(current)
        with torch.cuda.stream(way.stream):
            for target, source in self._alone:
                target.copy_(source, non_blocking=True)
        for target, source in self._odd:
            copy_tensor(target, source)

    def _read(self, step: _Step) -> torch.cuda.Event:
        """Bring a run into its chunk; returns what says that it is there."""
        way = self._transfers
        if (free := way.free[step.turn]) is not None:
            way.stream.wait_event(free)
        with torch.cuda.stream(way.stream):
            step.chunk.copy_(step.memory, non_blocking=True)
        arrived: torch.cuda.Event = way.stream.record_event()
        return arrived

    def _unpack(self, step: _Step, current: torch.cuda.Stream) -> None:
        """Put a run that was asked for into its tensors."""
        arrived = self._transfers.free[step.turn]
        assert arrived is not None
        current.wait_event(arrived)
        step.copy(to_device=True)
        self._transfers.free[step.turn] = current.record_event()

    def _write(self, step: _Step, current: torch.cuda.Stream) -> None:
        """Gather a run in its chunk, and bring it to host memory."""
        way = self._transfers
        if (free := way.free[step.turn]) is not None:
            current.wait_event(free)
        step.copy(to_device=False)
        way.stream.wait_event(current.record_event())
        with torch.cuda.stream(way.stream):
            step.memory.copy_(step.chunk, non_blocking=True)
        way.free[step.turn] = way.stream.record_event()


def _runs(pairs: Sequence[Pair], host: int) -> Iterator[tuple[Run, list[Pair]]]:
    """Yield runs of neighbours in the same memory, and what their members are numbers of."""
    memories: dict[int, list[Pair]] = {}
    for pair in pairs:
        memories.setdefault(pair[host].untyped_storage().data_ptr(), []).append(pair)
    for members in memories.values():
        spans = [(_offset(pair[host]), _offset(pair[host]) + _size(pair[host])) for pair in members]
        whole = frozenset(n for n, pair in enumerate(members) if not _may_be_cut(pair, host))
        for run in plan(spans, whole=whole):
            yield run, members


def _may_be_cut(pair: Pair, host: int) -> bool:
    """Whether a copy is one of bytes, at addresses that suit the kernel in a chunk too."""
    there = pair[1 - host]
    return (
        may_cut()
        and there.dtype == pair[host].dtype
        and there.is_contiguous()
        and not (there.is_conj() or there.is_neg())
        and (there.data_ptr() | _offset(pair[host])) % ADDRESS_BYTES == 0
    )


def _is_one_of_bytes(pair: Pair) -> bool:
    """Whether a contiguous copy is one of bytes: torch would resolve a lazy one too early."""
    target, source = pair
    lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in pair)
    return target.dtype == source.dtype and not lazy


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes."""
    # Not `view`: one element is contiguous whatever its stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _bytes(first: torch.Tensor, run: Run) -> torch.Tensor:
    """View a run in the memory of one of its members."""
    made = torch.empty(0, dtype=torch.uint8)
    return made.set_(first.untyped_storage(), run.start, (run.end - run.start,), (1,))


#: Bytes from which a copy of its own is faster than a launch that cuts tensors into pieces.
HUGE_BYTES: Final = 64 << 20


def split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[list[Pair]]]:
    """Say which copies go alone, and which together."""
    alone: list[Pair] = []
    together: dict[torch.device, list[Pair]] = {}
    for target, source in pairs:
        if target.is_cuda and target.device == source.device and _is_small(target, source):
            together.setdefault(target.device, []).append((target, source))
        else:
            alone.append((target, source))
    return alone, list(together.values())


def _is_small(target: torch.Tensor, source: torch.Tensor) -> bool:
    size = target.numel() * target.element_size()
    return size < LARGE_BYTES or (size < HUGE_BYTES and may_cut() and is_alike(target, source))


class Batch:
    """Copies that are begun together, again and again: sorted once."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        alone, together = split(pairs)
        plain = [pair for pair in alone if is_plain_copy(*pair)]
        # Looking at two tensors takes ten times as long as to begin to copy their bytes.
        self._plain = [(byte_view(target), byte_view(source)) for target, source in plain]
        self._alone = [pair for pair in alone if not is_plain_copy(*pair)] if plain else alone
        self._tables: list[CopyTable] = []
        self._together: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for group in together:
            alike = [pair for pair in group if may_cut() and is_alike(*pair)]
            if alike:
                self._tables.append(CopyTable(alike))
            others = [pair for pair in group if not (may_cut() and is_alike(*pair))]
            if others:
                targets, sources = zip(*others, strict=True)
                self._together.append((list(targets), list(sources)))
        self.nbytes = sum(target.numel() * target.element_size() for target, _ in pairs)

    def begin(self) -> None:
        """Copy each source into its target; on a device, only ordered on its current stream."""
        for table in self._tables:
            table.begin()
        for to, of in self._plain:
            copy_bytes(to, of)
        for target, source in self._alone:
            copy_tensor(target, source)
        for targets, sources in self._together:
            torch._foreach_copy_(targets, sources)


class CopyPlan:
    """Copies that are made again and again; those between host and device in transfers."""

    def __init__(self, pairs: Sequence[Pair], *, whole: Sequence[bool] | None = None) -> None:
        crossing: dict[torch.device, list[Pair]] = {}
        rest: list[Pair] = []
        for pair, is_whole in zip(pairs, whole or repeat(False), strict=False):
            target, source = pair
            if target.is_cuda and not source.is_cuda:
                crossing.setdefault(target.device, []).append(pair)
            elif source.is_cuda and not target.is_cuda and is_whole:
                crossing.setdefault(source.device, []).append(pair)
            else:
                rest.append(pair)
        # In one order everywhere, since the ways are locked together.
        self.crossing = [
            (way, HostBatch(way, crossing[way.device]))
            for way in map(transfers_of, sorted(crossing, key=str))
        ]
        self._rest = Batch(rest)
        self._busy = {each.device for pair in rest for each in pair if each.is_cuda}
        self._targets = [target for target, _ in pairs]
        self.devices = {target.device for target in self._targets}
        self.nbytes = self._rest.nbytes + sum(batch.nbytes for _, batch in self.crossing)

    def begin(self) -> None:
        """Copy; what stays on a device is only ordered on its current stream."""
        with ExitStack() as stack:
            for way, batch in self.crossing:
                stack.enter_context(way.lock)
                stack.callback(way.settle)
                batch.begin()
            self._rest.begin()
        count_writes(self._targets)

    def copy(self) -> None:
        """Copy; when it returns, every byte is there."""
        self.begin()
        for device in self._busy:
            torch.cuda.current_stream(device).synchronize()


def settle_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the current streams of the devices that these tensors are on."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
