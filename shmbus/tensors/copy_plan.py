"""Copies of many tensors: small ones of a device together, large ones by themselves.

On a device a copy costs some microseconds of the host whatever its size, so a thousand small ones
take longer than the model's bytes; one launch for all of them is slower by the byte, so large ones
go alone. Pure decisions are in `split`; what it returns is executed by `Batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch

from shmbus.pool import copy_bytes
from shmbus.tensors.copy_table import CopyTable, is_alike, may_cut
from shmbus.tensors.views import byte_view, copy_tensor, is_plain_copy

__all__ = [
    "LARGE_BYTES",
    "Batch",
    "Pair",
    "from_host_to_device",
    "settle_devices",
    "split",
]

#: A tensor to write, and what is written into it.
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

#: Bytes from which a copy of its own is faster: 2 us on a device of 2 TB/s, what a launch costs.
LARGE_BYTES: Final = 4 << 20

#: The same beside a launch that cuts tensors into pieces.
HUGE_BYTES: Final = 64 << 20


def split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[list[Pair]]]:
    """Say which copies go alone, and which together.

    Parameters
    ----------
    pairs : iterable of (target, source)

    Returns
    -------
    (list of pairs, list of lists of pairs)
        Those that go alone; and for each device those that go together.
    """
    alone: list[Pair] = []
    together: dict[torch.device, list[Pair]] = {}
    for target, source in pairs:
        if target.is_cuda and target.device == source.device and _is_small(target, source):
            together.setdefault(target.device, []).append((target, source))
        else:
            alone.append((target, source))
    return alone, list(together.values())


def from_host_to_device(
    pairs: Iterable[Pair],
) -> tuple[dict[torch.device, list[Pair]], list[Pair]]:
    """Say which copies cross from the host to which CUDA device.

    Parameters
    ----------
    pairs : iterable of (target, source)

    Returns
    -------
    (dict of lists of pairs, list of pairs)
        Those, and the rest.
    """
    crossing: dict[torch.device, list[Pair]] = {}
    rest: list[Pair] = []
    for target, source in pairs:
        if target.is_cuda and not source.is_cuda:
            crossing.setdefault(target.device, []).append((target, source))
        else:
            rest.append((target, source))
    return crossing, rest


def _is_small(target: torch.Tensor, source: torch.Tensor) -> bool:
    size = target.numel() * target.element_size()
    return size < LARGE_BYTES or (size < HUGE_BYTES and may_cut() and is_alike(target, source))


class Batch:
    """Copies that are begun together, again and again: sorted once.

    Parameters
    ----------
    pairs : sequence of (target, source)
        Of equal shapes, of any dtypes and strides.

    Attributes
    ----------
    nbytes : int
        Of all targets.
    """

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


def settle_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the current streams of the devices that these tensors are on.

    Raises
    ------
    RuntimeError
        A copy that was begun before has failed.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
