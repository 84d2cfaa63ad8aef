"""Copies of many tensors: small ones of a device together, large ones by themselves.

On a device a copy costs some microseconds of the host whatever its size, so a thousand small ones
take longer than the model's bytes; one launch for all of them is slower by the byte, so large ones
go alone. Pure decisions are in `split`; what it returns is executed by `Batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Final

import torch

from shmbus.pool import copy_bytes
from shmbus.tensors.copy_table import LARGE_BYTES, CopyTable, Pair, is_alike, may_cut
from shmbus.tensors.host_transfer import HostBatch, transfers_of
from shmbus.tensors.views import byte_view, copy_tensor, is_plain_copy

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
        self.devices = {target.device for target, _ in pairs}
        self.nbytes = self._rest.nbytes + sum(batch.nbytes for _, batch in self.crossing)

    def begin(self) -> None:
        """Copy; what stays on a device is only ordered on its current stream."""
        with ExitStack() as stack:
            for way, batch in self.crossing:
                stack.enter_context(way.lock)
                stack.callback(way.settle)
                batch.begin()
            self._rest.begin()

    def copy(self) -> None:
        """Copy; when it returns, every byte is there."""
        self.begin()
        for device in self._busy:
            torch.cuda.current_stream(device).synchronize()


def settle_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the current streams of the devices that these tensors are on."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
