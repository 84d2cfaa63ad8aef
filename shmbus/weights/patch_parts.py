"""Patches: pieces as they are compared while they are written, and a patch as it is read.

Invariant: a piece is cut the same way each time, whatever it is cast from, and pieces come in the
same order, so that what a slot has of them is found where it is looked for first.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shmbus.pool import PatchRun, Piece, VersionLease, VersionPatch, same_bytes
from shmbus.tensors.views import byte_view
from shmbus.weights.manifest import Manifest, TensorPlace
from shmbus.weights.patches import pieces_of
from shmbus.weights.source import LocalPiece

__all__ = ["ComparedPieces", "PlacedBytes", "VersionChanges", "contiguous_parts", "placed_bytes"]

#: Where elements lie in a version, and those elements.
PlacedBytes: TypeAlias = tuple[Piece, npt.NDArray[np.uint8]]

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
    if _is_plain(dtype, tensor):
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


def _is_plain(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is what is published of it."""
    plain = tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.is_conj() or tensor.is_neg())


def placed_bytes(
    place: TensorPlace, start: tuple[int, ...], part: torch.Tensor
) -> Iterator[PlacedBytes]:
    """Cut a contiguous part of a tensor by where its rows lie in a version.

    Parameters
    ----------
    place : TensorPlace
        Of the whole tensor.
    start : tuple of int
        Where the part begins in it.
    part : Tensor
        In host memory, of the published dtype.

    Yields
    ------
    (Piece, uint8 [bytes])
        A place, and what belongs there.
    """
    flat, at = byte_view(part), 0
    for where in pieces_of(place, start, part.shape):
        end = at + where.rows * where.row_bytes
        yield where, flat[at:end]
        at = end


class ComparedPieces:
    """Pieces that a source gives again, cut once: that takes longer than to begin to compare them.

    Parameters
    ----------
    pieces : sequence of LocalPiece
        Kept, so that no other ones are the same objects. Each is inside its place.
    places : mapping of TensorPlace
        By name.
    """

    def __init__(self, pieces: Sequence[LocalPiece], places: Mapping[str, TensorPlace]) -> None:
        self.pieces: Final = pieces
        #: None for those that have to be cast or put together anew for each version.
        self.parts: Final[list[list[PlacedBytes] | None]] = []
        self.nbytes = 0
        for piece in pieces:
            place = places[piece.name]
            own: torch.dtype = getattr(torch, place.dtype)
            tensor = piece.tensor
            self.nbytes += tensor.numel() * own.itemsize
            if tensor.numel() == 0:
                self.parts.append([])
            elif _is_plain(own, tensor):
                self.parts.append([*placed_bytes(place, piece.start, tensor)])
            else:
                self.parts.append(None)


class VersionChanges:
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

    def apply(self, name: str, memory: npt.NDArray[np.uint8]) -> bool:
        """Change a tensor's bytes, which are the base's; False where they were not."""
        offset = self._places[name].offset
        return all(
            self._patch.apply(run, memory, offset) for run in self._runs[offset] if run.changes
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
