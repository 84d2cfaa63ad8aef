"""Copies of many tensors: small device tensors together, large tensors by themselves.

A device copy costs the host some microseconds at any size, and a thousand small copies take longer
than the model's bytes; one launch for all is slower by the byte, and large tensors go alone.
Between host memory and a device, neighbours cross in one piece, into or out of a chunk on the
device, where one launch scatters them while the next chunk crosses: single 64-KiB tensors reach a
sixth of the rate of PCIe. The kernel itself reads rows of larger tensors from registered memory.
Pure decisions live in `split` and `plan`; batches execute them.

Invariants: a run contains only bytes of its copied tensors; a chunk is rewritten only after the
device finished with it; `settle` returns after every byte reached its target.
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

#: Bytes of a chunk: 0.6 ms of PCIe, against which the cost of a launch vanishes.
CHUNK_BYTES: Final = 32 << 20

#: A chunk crosses while another unpacks; reading all four takes as long as comparing 4,096 tensors.
CHUNKS: Final = 4


class Part(NamedTuple):
    """A span or its part: the span's number, first byte in the memory, end."""

    which: int
    start: int
    end: int


class Run(NamedTuple):
    """Neighbours in host memory: their numbers, first byte and end."""

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
    """Stream and chunks between host memory and one device; a process shares one instance."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # tensors of inference mode are read-only in every other mode
        with torch.inference_mode(False):
            self.chunks = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(CHUNKS)
            ]
        #: Pending work of a chunk's last use, awaited before the next use.
        self.free: list[torch.cuda.Event | None] = [None] * CHUNKS
        # torch owned the memory before
        self._first = torch.cuda.current_stream(device).record_event()
        self.stream.wait_event(self._first)

    def settle(self) -> None:
        """Wait until every byte arrived."""
        self.stream.synchronize()
        torch.cuda.current_stream(self.device).synchronize()


#: The way between host memory and a CUDA device.
transfers_of = functools.cache(HostTransfers)


class _Step(NamedTuple):
    """A prepared run: chunk, bytes on both sides, members."""

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
    """Repeatable batch of copies between host memory and a device."""

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
            # A small copy by itself would cost a transfer and a launch.
            if is_whole and end - start < LARGE_BYTES and self._may_read(lone):
                rows.append(lone)
            else:
                self._steps.append(self._ready(len(self._steps) % CHUNKS, run, members, host))
        self._rows = CopyTable(rows) if rows else None
        self.nbytes = sum(_size(target) for target, _ in pairs)

    def _may_read(self, pair: Pair) -> bool:
        """Return whether the kernel can read a source in place."""
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
        """Begin to copy, after the work already queued on the device's current stream."""
        way = self._transfers
        current = torch.cuda.current_stream(way.device)
        if self._rows is not None:
            self._rows.begin()
        if self._to_device:
            for step in self._steps[:CHUNKS]:
                way.free[step.turn] = self._read(step)
            # A free chunk gets the next run at once: PCIe never waits for this loop.
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
        """Bring a run into its chunk; return the arrival event."""
        way = self._transfers
        if (free := way.free[step.turn]) is not None:
            way.stream.wait_event(free)
        with torch.cuda.stream(way.stream):
            step.chunk.copy_(step.memory, non_blocking=True)
        arrived: torch.cuda.Event = way.stream.record_event()
        return arrived

    def _unpack(self, step: _Step, current: torch.cuda.Stream) -> None:
        arrived = self._transfers.free[step.turn]
        assert arrived is not None
        current.wait_event(arrived)
        step.copy(to_device=True)
        self._transfers.free[step.turn] = current.record_event()

    def _write(self, step: _Step, current: torch.cuda.Stream) -> None:
        """Gather a run in its chunk for the transfer to host memory."""
        way = self._transfers
        if (free := way.free[step.turn]) is not None:
            current.wait_event(free)
        step.copy(to_device=False)
        way.stream.wait_event(current.record_event())
        with torch.cuda.stream(way.stream):
            step.memory.copy_(step.chunk, non_blocking=True)
        way.free[step.turn] = way.stream.record_event()


def _runs(pairs: Sequence[Pair], host: int) -> Iterator[tuple[Run, list[Pair]]]:
    """Yield runs of neighbours in the same memory, with the pairs behind their members' numbers."""
    memories: dict[int, list[Pair]] = {}
    for pair in pairs:
        memories.setdefault(pair[host].untyped_storage().data_ptr(), []).append(pair)
    for members in memories.values():
        spans = [(_offset(pair[host]), _offset(pair[host]) + _size(pair[host])) for pair in members]
        whole = frozenset(n for n, pair in enumerate(members) if not _may_be_cut(pair, host))
        for run in plan(spans, whole=whole):
            yield run, members


def _may_be_cut(pair: Pair, host: int) -> bool:
    """Return whether a copy moves plain bytes at kernel-aligned addresses, also within a chunk."""
    there = pair[1 - host]
    return (
        may_cut()
        and there.dtype == pair[host].dtype
        and there.is_contiguous()
        and not (there.is_conj() or there.is_neg())
        and (there.data_ptr() | _offset(pair[host])) % ADDRESS_BYTES == 0
    )


def _is_one_of_bytes(pair: Pair) -> bool:
    """Return whether a contiguous copy moves plain bytes: no lazy tensor for torch to resolve."""
    target, source = pair
    lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in pair)
    return target.dtype == source.dtype and not lazy


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # Not `view`: a single element counts as contiguous at any stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _bytes(first: torch.Tensor, run: Run) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=first.device)
    return made.set_(first.untyped_storage(), run.start, (run.end - run.start,), (1,))


#: Size from which a separate copy beats a launch that cuts tensors into pieces.
HUGE_BYTES: Final = 64 << 20


def split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[list[Pair]]]:
    """Separate lone copies from copies batched together."""
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
    """Repeatable batch of copies, sorted once."""

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
        """Copy every source into its target; a device copy is only queued on its stream."""
        for table in self._tables:
            table.begin()
        for to, of in self._plain:
            copy_bytes(to, of)
        for target, source in self._alone:
            copy_tensor(target, source)
        for targets, sources in self._together:
            torch._foreach_copy_(targets, sources)


class CopyPlan:
    """Repeatable copies; copies between host and device run as transfers."""

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
        # A fixed order: a plan holds the locks of several transfers at the same time.
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
        """Begin the copies; device copies are only queued on the current stream."""
        with ExitStack() as stack:
            for way, batch in self.crossing:
                stack.enter_context(way.lock)
                stack.callback(way.settle)
                batch.begin()
            self._rest.begin()
        count_writes(self._targets)

    def copy(self) -> None:
        """Copy, and return after every byte arrived."""
        self.begin()
        for device in self._busy:
            torch.cuda.current_stream(device).synchronize()


def settle_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the current streams of the tensors' devices."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
