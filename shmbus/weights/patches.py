"""Patches of weights: where pieces of tensors lie, how large patches may grow, when to try one.

All of it is arithmetic; `carriers.shm` and `loading` move the bytes.

Invariant: a box of a tensor gives the same pieces in the same order each time, so that a piece's
patch is found again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from shmbus.pool import Piece
from shmbus.tensors.views import DTYPE_BYTES
from shmbus.weights.manifest import Manifest, TensorPlace

__all__ = [
    "DEFAULT_SHARE",
    "PatchPolicy",
    "element_width",
    "patch_capacity",
    "patch_share",
    "pieces_of",
]

#: Share of elements from which on a patch is not worth its memory: applying one of a tenth costs
#: as much as a copy.
DEFAULT_SHARE: Final = 0.05

#: Elements whose changes share a byte of a patch (`shmbus_ext/pool/patch_code.h`).
_SPAN: Final = 256

#: Bytes of a patch that a tensor or a rank takes beside its changes.
_BYTES_A_TENSOR: Final = 80
_BYTES_A_RANK: Final = 4096

#: Ranks write pieces of uneven sizes into even shares of a patch.
_UNEVEN: Final = 1.25

#: Versions that go out without an attempt after one whose patch did not fit, at most.
_LONGEST_PAUSE: Final = 16


def patch_share(patches: bool | float) -> float:
    """Read the option `patches`.

    Parameters
    ----------
    patches : bool | float
        Whether there are any, or the share of elements up to which there are.

    Returns
    -------
    float
        0.0 for none.

    Raises
    ------
    TypeError, ValueError
        It is none of these.
    """
    if isinstance(patches, bool):
        return DEFAULT_SHARE if patches else 0.0
    if not isinstance(patches, int | float):
        raise TypeError(f"patches: expected a bool or a share, got {type(patches).__name__}")
    if not 0 <= patches <= 1:
        raise ValueError(f"patches: expected a share of elements from 0 to 1, got {patches}")
    return float(patches)


def element_width(dtype: str) -> int:
    """Return the bytes in which elements of a dtype are compared: 1, 2 or 4."""
    return min(DTYPE_BYTES[dtype], 4)


def patch_capacity(manifest: Manifest, share: float, ranks: int) -> int:
    """Compute the bytes of a slot that patches take.

    Parameters
    ----------
    manifest : Manifest
        Of the weights.
    share : float
        Of elements that may change.
    ranks : int
        That write a version together.

    Returns
    -------
    int
        0 for a share of 0.
    """
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
    """Rows of a tensor, in elements."""

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
    """Cut a part of a tensor into pieces of its version, in C order.

    Parameters
    ----------
    place : TensorPlace
        The tensor.
    start, sizes : sequence of int
        The part, in each dimension.

    Yields
    ------
    Piece
        None where the part is empty.
    """
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
    """When a version is compared with the one before: always, but for a while after a failure.

    Comparing costs as much as a copy, for nothing where more changed than a patch may have. After
    each such version twice as many go out without an attempt.
    """

    def __init__(self) -> None:
        self._pause = 0
        self._left = 0

    def wants(self) -> bool:
        """Whether the next version is to have a patch.

        Returns
        -------
        bool
        """
        if self._left:
            self._left -= 1
            return False
        return True

    def ended(self, *, begun: bool, made: bool) -> None:
        """Learn what became of an attempt.

        Parameters
        ----------
        begun : bool
            Whether there was anything to compare with.
        made : bool
            Whether the version has a patch.
        """
        if made:
            self._pause = 0
        elif begun:
            self._pause = min(max(1, 2 * self._pause), _LONGEST_PAUSE)
            self._left = self._pause
