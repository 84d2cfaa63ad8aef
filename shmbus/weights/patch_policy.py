"""Patches of weights: places of pieces, limits of a patch's size, the policy of attempts.

Invariants: a box of a tensor always yields the same pieces in the same order, to find a piece's
patch again; a piece is cut the same way for every source dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shmbus.base.arguments import check_number
from shmbus.pool import Piece
from shmbus.tensors.views import DTYPE_BYTES, TensorPlace, byte_view
from shmbus.weights.manifest import Manifest
from shmbus.weights.weight_source import LocalPiece

#: Place of elements in a version, and the elements.
PlacedBytes: TypeAlias = tuple[Piece, npt.NDArray[np.uint8]]

#: Bytes cast at once before a comparison: small enough to stay in a cache.
_SCRATCH_BYTES: Final = 1 << 20


def contiguous_parts(
    dtype: torch.dtype, piece: LocalPiece, scratch_of: Callable[[int], torch.Tensor]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a piece into contiguous parts of the published dtype, in host memory."""
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
    """Return whether a tensor's memory equals the published bytes."""
    plain = tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not (tensor.is_conj() or tensor.is_neg())


def placed_bytes(
    place: TensorPlace, start: tuple[int, ...], part: torch.Tensor
) -> Iterator[PlacedBytes]:
    """Cut a contiguous part of a tensor by the places of its rows in a version."""
    flat, at = byte_view(part), 0
    for where in pieces_of(place, start, part.shape):
        end = at + where.rows * where.row_bytes
        yield where, flat[at:end]
        at = end


class ComparedPieces:
    """Reusable pieces of a source, cut once."""

    def __init__(self, pieces: Sequence[LocalPiece], places: Mapping[str, TensorPlace]) -> None:
        self.pieces: Final = pieces
        #: None for pieces to be cast or joined anew for each version.
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


#: Share of elements above which a patch wastes memory: at a tenth it costs as much as a copy.
DEFAULT_SHARE: Final = 0.05

#: Elements whose changes share a byte of a patch (`shmbus_ext/pool/patch_code.h`).
_SPAN: Final = 256

#: Patch bytes per tensor or rank, beside the changes.
_BYTES_A_TENSOR: Final = 80
_BYTES_A_RANK: Final = 4096

#: Ranks write pieces of uneven sizes into even shares of a patch.
_UNEVEN: Final = 1.25

#: Limit of versions published without an attempt after an oversized patch.
_LONGEST_PAUSE: Final = 16


def patch_share(patches: bool | float) -> float:
    """Read the option `patches`."""
    if isinstance(patches, bool):
        return DEFAULT_SHARE if patches else 0.0
    share = check_number("patches", patches, "a bool or a share")
    if not 0 <= share <= 1:
        raise ValueError(f"patches: expected a share of elements from 0 to 1, got {patches}")
    return share


def element_width(dtype: str) -> int:
    """Return the bytes per compared element of a dtype: 1, 2 or 4."""
    return min(DTYPE_BYTES[dtype], 4)


def patch_capacity(manifest: Manifest, share: float, ranks: int) -> int:
    """Compute a slot's bytes for patches."""
    if share == 0:
        return 0
    total = 0.0
    for place in manifest.tensors:
        width = element_width(place.dtype)
        elements = place.size // width
        rows = math.prod(place.shape[:-1]) if ranks > 1 else 1
        total += _BYTES_A_TENSOR * ranks + elements / _SPAN + rows * ranks
        total += elements * share * (1 + width)
    return int(total * (_UNEVEN if ranks > 1 else 1.0)) + ranks * _BYTES_A_RANK


class _Box(NamedTuple):
    offset: int
    rows: int
    length: int
    stride: int


def _boxes(shape: Sequence[int], start: Sequence[int], sizes: Sequence[int]) -> Iterator[_Box]:
    """Cut a part of a tensor into sets of evenly spaced rows, in C order."""
    cut = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :])
    if not cut or last == 0:
        length = (sizes[0] if sizes else 1) * inner
        yield _Box(start[0] * inner if start else 0, 1, length, length)
        return
    below = math.prod(shape[1:])
    if any(0 < dim < last for dim in cut):
        for index in range(sizes[0]):
            for box in _boxes(shape[1:], start[1:], sizes[1:]):
                yield box._replace(offset=box.offset + (start[0] + index) * below)
        return
    stride = shape[last] * inner
    offset = start[0] * below + start[last] * inner
    yield _Box(offset, math.prod(sizes[:last]), sizes[last] * inner, stride)


def pieces_of(place: TensorPlace, start: Sequence[int], sizes: Sequence[int]) -> Iterator[Piece]:
    """Cut a part of a tensor into pieces of its version, in C order."""
    if math.prod(sizes) == 0:
        return
    itemsize = DTYPE_BYTES[place.dtype]
    for box in _boxes(place.shape, start, sizes):
        yield Piece(
            place.offset + box.offset * itemsize,
            box.rows,
            box.length * itemsize,
            box.stride * itemsize,
            element_width(place.dtype),
        )


class PatchPolicy:
    """Policy of comparisons with the previous version: always, but paused after a failure."""

    def __init__(self) -> None:
        self._pause = 0
        self._left = 0

    def wants(self) -> bool:
        """Return whether the next version should get a patch."""
        if self._left:
            self._left -= 1
            return False
        return True

    def ended(self, *, begun: bool, made: bool) -> None:
        """Record the outcome of an attempt."""
        if made:
            self._pause = 0
        elif begun:
            self._pause = min(max(1, 2 * self._pause), _LONGEST_PAUSE)
            self._left = self._pause
