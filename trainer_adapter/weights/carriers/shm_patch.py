"""Patches of the carrier ``shm``: pieces as they are compared, and a patch by tensors.

Invariant: a piece is cut the same way each time, whatever it is cast from.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Final

import torch

from shmbus.pool import PatchRun, VersionLease, VersionPatch, same_bytes
from trainer_adapter.weights.manifest import Manifest
from trainer_adapter.weights.memory import byte_view
from trainer_adapter.weights.source import LocalPiece

__all__ = ["ShmPatch", "contiguous_parts"]

#: Bytes that are cast at once before they are compared: they stay in a cache.
_SCRATCH_BYTES: Final = 1 << 20


def contiguous_parts(
    dtype: torch.dtype, piece: LocalPiece, scratch_of: Callable[[int], torch.Tensor]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a piece into contiguous parts of the published dtype, in host memory.

    Parameters
    ----------
    dtype : torch.dtype
        Of what is published.
    piece : LocalPiece
        Of any dtype and strides, on any device.
    scratch_of : callable
        Gives so many bytes, for parts that are no plain memory; each part is gone with the next.

    Yields
    ------
    (tuple of int, Tensor)
        Where the part begins in the whole tensor, and its elements.
    """
    tensor = piece.tensor
    if tensor.numel() == 0:
        return
    plain = tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
    if plain and not (tensor.is_conj() or tensor.is_neg()):
        yield piece.start, tensor
        return
    row = tensor[:1].numel() if tensor.dim() else 1
    rows = max(1, _SCRATCH_BYTES // (row * dtype.itemsize))
    scratch = scratch_of(min(rows * row, tensor.numel()) * dtype.itemsize).view(dtype)
    for first in range(0, tensor.shape[0] if tensor.dim() else 1, rows):
        source = tensor[first : first + rows] if tensor.dim() else tensor
        part = scratch[: source.numel()].view(source.shape)
        part.copy_(source)
        yield (piece.start[0] + first, *piece.start[1:]) if tensor.dim() else (), part


class ShmPatch:
    """A patch, by tensors.

    Parameters
    ----------
    patch : VersionPatch
        Of a leased version.
    manifest : Manifest
        Of that version.
    lease : VersionLease
        Of it.
    """

    def __init__(self, patch: VersionPatch, manifest: Manifest, lease: VersionLease) -> None:
        self._patch, self._lease = patch, lease
        self.base_sequence = patch.base_sequence
        self.base_version = patch.base_version
        self.changes = patch.changes
        self.size = patch.size
        self._places = manifest.by_name()
        self._runs = _runs_by_offset(patch.runs, manifest)

    def changed(self, name: str) -> bool:
        """Whether anything of a tensor changed."""
        place = self._places[name]
        return place.size > 0 and any(run.changes for run in self._runs[place.offset])

    def apply(self, name: str, target: torch.Tensor) -> bool:
        """Change a contiguous CPU tensor that has the base's elements; False where it did not."""
        place = self._places[name]
        memory = byte_view(target)
        return all(
            self._patch.apply(run, memory, place.offset)
            for run in self._runs[place.offset]
            if run.changes
        )

    def same(self, name: str, target: torch.Tensor) -> bool:
        """Compare a contiguous CPU tensor with what was published."""
        place = self._places[name]
        published = memoryview(self._lease.buffer)
        return same_bytes(published[place.offset : place.offset + place.size], byte_view(target))


def _runs_by_offset(runs: list[PatchRun], manifest: Manifest) -> dict[int, list[PatchRun]]:
    """Sort runs by the offsets of their tensors."""
    places = sorted((place.offset, place.size) for place in manifest.tensors if place.size)
    starts = [offset for offset, _ in places]
    found: dict[int, list[PatchRun]] = {place.offset: [] for place in manifest.tensors}
    for run in runs:
        found[starts[bisect.bisect_right(starts, run.piece.offset) - 1]].append(run)
    return found
