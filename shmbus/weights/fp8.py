"""Block-wise fp8 weights, quantised at publication: half the bytes, and a scale per block.

The form of DeepSeek-V3's checkpoints: a matrix in float8_e4m3fn, and ``NAME_scale_inv`` in
float32 with the multiplier of each block of 128 x 128 elements.

Invariants:

- A scale and its elements share one version, and therefore always fit.
- The rank with the whole block quantises it: a shard boundary within a block is an error.

Source: ``weight_dequant`` in inference/kernel.py of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

from shmbus.errors import WeightsError
from shmbus.weights.manifest import ParamMeta, Slice
from shmbus.weights.weight_source import LocalPiece, WeightSource, require_source

#: Elements of a block's side.
BLOCK: Final = 128
#: Suffix of a tensor's scales, after the tensor's name.
SUFFIX: Final = "_scale_inv"
#: The largest number of float8_e4m3fn.
LARGEST: Final = 448.0


def quantize_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix by blocks of 128 x 128."""
    rows, columns = matrix.shape
    across, along = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = matrix.new_zeros((across * BLOCK, along * BLOCK), dtype=torch.float32)
    padded[:rows, :columns] = matrix
    blocks = padded.view(across, BLOCK, along, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
    scaled = torch.where(scale.isfinite()[:, None, :, None], scaled, scaled.new_tensor(torch.nan))
    elements = scaled.view(across * BLOCK, along * BLOCK)[:rows, :columns]
    return elements.to(torch.float8_e4m3fn).contiguous(), scale


class Fp8BlockSource(WeightSource):
    """A wrapped source's matrices in fp8, with their scales.

    Parameters
    ----------
    source : WeightSource
        For example a `ModuleSource`. Its cast applies only to the unquantised tensors: matrices are
        quantised from the source's own values.
    only : callable, optional
        Selects matrices by name; every floating-point matrix by default. Servers keep embeddings,
        the head and routers in their own dtype: leave those out.

    Raises
    ------
    TypeError
        An argument is invalid.
    """

    def __init__(self, source: WeightSource, *, only: Callable[[str], bool] | None = None) -> None:
        require_source(source)
        if only is not None and not callable(only):
            raise TypeError(f"only: expected a function, got {type(only).__name__}")
        self._source = source
        self._chosen: Final = {
            param.name: param.shape
            for param in source.params()
            if len(param.shape) == 2
            and getattr(torch, param.dtype).is_floating_point
            and getattr(torch, param.dtype).itemsize > 1  # an fp8 matrix comes with its scales
            and (only is None or only(param.name))
        }

    def params(self) -> list[ParamMeta]:
        """Return every tensor, a matrix's scales right after it."""
        found = []
        for param in self._source.params():
            if param.name not in self._chosen:
                found.append(param)
                continue
            across, along = (-(-size // BLOCK) for size in param.shape)
            found.append(ParamMeta(param.name, "float8_e4m3fn", param.shape))
            found.append(ParamMeta(param.name + SUFFIX, "float32", (across, along)))
        return found

    def aliases(self) -> Mapping[str, str]:
        """Return the aliases of tied tensors, and of their scales."""
        found = dict(self._source.aliases())
        scales = {name + SUFFIX: of + SUFFIX for name, of in found.items() if of in self._chosen}
        return found | scales

    def slices(self) -> Mapping[str, Slice]:
        """Return names for parts, and for the scales of parts.

        Raises
        ------
        WeightsError
            A slice cuts a block.
        """
        found = dict(self._source.slices())
        for name, part in list(found.items()):
            if part.of not in self._chosen:
                continue
            end = part.start + part.length
            ends = end % BLOCK == 0 or end == self._chosen[part.of][part.dim]
            if part.start % BLOCK or not ends or part.drop_dim:
                raise WeightsError(
                    f"slice {name!r}: expected whole blocks of {BLOCK} of {part.of!r}, got {part}; "
                    "leave that tensor out by only=..."
                )
            first = part.start // BLOCK
            found[name + SUFFIX] = Slice(
                part.of + SUFFIX, part.dim, first, -(-end // BLOCK) - first
            )
        return found

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield this rank's pieces, as `WeightSource.iter_local` does."""
        for piece in self._source.iter_local(rank, world_size):
            shape = self._chosen.get(piece.name)
            if shape is None:
                yield piece
                continue
            sizes = tuple(piece.tensor.shape)
            for at, size, whole in zip(piece.start, sizes, shape, strict=True):
                if (at % BLOCK and size) or ((at + size) % BLOCK and at + size != whole):
                    raise WeightsError(
                        f"{piece.name!r}: a shard of shape {list(sizes)} at {list(piece.start)} "
                        f"cuts a block of {BLOCK}; leave it out by only=..., or redistribute() it. "
                        "The weights that were published stay in force"
                    )
            elements, scale = quantize_blocks(piece.tensor)
            yield LocalPiece(piece.name, piece.start, elements)
            start = tuple(at // BLOCK for at in piece.start)
            yield LocalPiece(piece.name + SUFFIX, start, scale)
