"""Stochastic rounding of published weights to 16 bits.

A pretrained checkpoint lies on the bfloat16 grid, and an optimizer step smaller than half a grid
step rounds back to the same value: the engine never sees the update. Stochastic rounding picks the
upper neighbour with a probability equal to the distance from the lower one, so the mean of a
published tensor equals the mean of the master weights.

Invariants:

- A published value is one of the two neighbours of the master value on the grid.
- A version, a tensor name and a start give the same bits on each publication.
- A finite value stays finite; infinities and NaN stay as they are.

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import torch

from shmbus.weights.errors import ManifestError

#: How a float32 or float64 tensor is cast to a 16-bit dtype.
Rounding: TypeAlias = Literal["nearest", "stochastic"]
ROUNDINGS: Final = ("nearest", "stochastic")
#: Elements rounded at a time, with the same random words in each turn: unbiased for each element,
#: and drawing a word per element would cost ten times the cast on a CPU. A chunk of a CPU fits its
#: cache; a chunk of a device outweighs a kernel launch.
HOST_CHUNK_ELEMENTS: Final = 1 << 20
DEVICE_CHUNK_ELEMENTS: Final = 1 << 24
#: Low bits of a float32 missing from each 16-bit dtype.
DROPPED_BITS: Final = {torch.bfloat16: 16, torch.float16: 13}
#: Below the smallest normal float16 the grid is even, with step 2**-24.
HALF_NORMAL: Final = 2.0**-14
HALF_STEPS: Final = 2.0**24


def round_stochastically(
    tensor: torch.Tensor, dtype: torch.dtype, version: int, name: str, start: tuple[int, ...]
) -> torch.Tensor:
    """Return a copy on the tensor's device, cast with random bits of (version, name, start)."""
    digest = hashlib.blake2b(repr((version, name, start)).encode(), digest_size=8).digest()
    random = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    chunk = HOST_CHUNK_ELEMENTS if tensor.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    noise = torch.empty(min(tensor.numel(), chunk), dtype=torch.int32, device=tensor.device)
    noise.random_(0, 1 << DROPPED_BITS[dtype], generator=random)
    rounded = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    source, target = tensor.reshape(-1), rounded.view(-1)
    for at in range(0, source.numel(), chunk):
        part = source[at : at + chunk].to(torch.float32).resolve_neg()
        target[at : at + chunk] = _rounded(part, dtype, noise[: part.numel()])
    return rounded


def loses_bits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast drops bits open to stochastic rounding."""
    return dtype in DROPPED_BITS and tensor.dtype in (torch.float32, torch.float64)


def peak_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the largest finite magnitude, or None for a cast without overflow."""
    if not (tensor.is_floating_point() and dtype.is_floating_point and tensor.numel()):
        return None
    # Bfloat16 ends half a step below float32: no trained weight lies between.
    if torch.finfo(tensor.dtype).max <= 2 * torch.finfo(dtype).max:
        return None
    wide = tensor if tensor.itemsize > 1 else tensor.float()
    return torch.stack(torch.aminmax(wide.nan_to_num(0.0, 0.0, 0.0))).abs().amax()


def require_range(peaks: Sequence[tuple[str, torch.dtype, torch.Tensor | None]]) -> None:
    """Raise ManifestError if the largest magnitude of a piece exceeds its dtype's range."""
    over = [
        f"{name!r} has {float(peak):g}, and {dtype} ends at {torch.finfo(dtype).max:g}"
        for name, dtype, peak in peaks
        if peak is not None and float(peak) > torch.finfo(dtype).max
    ]
    if over:
        raise ManifestError(
            f"overflow of {len(over)} casts: expected magnitudes in the target dtype's range; take "
            "bfloat16, or scale these tensors. The weights in force stay",
            over,
        )


def _rounded(values: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor) -> torch.Tensor:
    """Return float32 values representable exactly in the dtype."""
    dropped = DROPPED_BITS[dtype]
    found = (values.view(torch.int32) + noise).bitwise_and_(-1 << dropped).view(torch.float32)
    if dtype == torch.float16:
        even = torch.floor(values * HALF_STEPS + noise / (1 << dropped)) / HALF_STEPS
        found = torch.where((values.abs() < HALF_NORMAL) & (values != 0), even, found)
    # A carry out of the largest number would give infinity.
    largest = torch.finfo(dtype).max
    return torch.where(values.isfinite(), found.clamp_(-largest, largest), values)
