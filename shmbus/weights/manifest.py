"""Manifest: names and places of a version's tensors.

The manifest is MessagePack, decoded into typed structs; nothing read is ever unpickled. It is
checked whole, against itself and against the model, before a byte of either is touched.

Invariants of a checked manifest: names are unique; every tensor lies inside the payload,
aligned, with the bytes of its shape; no two overlap; each alias and slice leads to a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import torch

from shmbus.base.arguments import check_text
from shmbus.base.near_names import UnknownNameError
from shmbus.data.encoding import decodable
from shmbus.tensors.views import ALIGNMENT, DTYPE_BYTES, TensorPlace
from shmbus.weights.errors import ManifestError

#: Format number; a reader refuses a different format.
FORMAT: Final = 1

#: Slices of slices: expert i of a stack, then its gate half. A deeper chain is a circle.
_MAX_DEPTH: Final = 4


class ParamMeta(msgspec.Struct, frozen=True):
    """A tensor of the whole model, known to every rank.

    Attributes
    ----------
    name, dtype : str
        As in the checkpoint; torch's name of the published dtype, for example "bfloat16".
    shape : tuple of int
        Of the whole tensor, independent of this rank's part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name for a part of a tensor, for example q of a fused qkv or expert 7 of a stack.

    Attributes
    ----------
    of : str
        The tensor, or another slice.
    dim, start, length : int
        Dimension of the cut, first index and length of the part.
    drop_dim : bool
        Whether a part of length 1 loses the dimension.
    """

    of: str
    dim: int
    start: int
    length: int
    drop_dim: bool = False


@decodable
class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors of a version."""

    format: int = FORMAT
    model: str = ""
    total: int = 0
    tensors: list[TensorPlace] = []
    aliases: dict[str, str] = {}
    slices: dict[str, Slice] = {}

    @classmethod
    def plan(
        cls,
        params: Sequence[ParamMeta],
        *,
        aliases: Mapping[str, str] | None = None,
        slices: Mapping[str, Slice] | None = None,
        model: str = "",
    ) -> Manifest:
        """Assign consecutive places to tensors."""
        tensors = []
        end = 0
        require_slices(slices)
        if aliases is not None and not isinstance(aliases, Mapping):
            raise TypeError(f"aliases: expected names by name, got {type(aliases).__name__}")
        check_text("model", model)
        _require_params(params)
        for param in params:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            size = math.prod(param.shape) * DTYPE_BYTES.get(param.dtype, 0)
            tensors.append(TensorPlace(param.name, param.dtype, param.shape, offset, size))
            end = offset + size
        planned = cls(
            model=model,
            total=-(-max(end, 1) // ALIGNMENT) * ALIGNMENT,
            tensors=tensors,
            aliases=dict(aliases or {}),
            slices=dict(slices or {}),
        )
        planned.check("what is to be published contradicts itself")
        return planned

    def encode(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes, payload_bytes: int) -> Manifest:
        """Decode a manifest and check it whole."""
        what = "the manifest of these weights cannot be used, and nothing was read of them"
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ManifestError(what, [str(error)]) from error
        if found.total != payload_bytes:
            raise ManifestError(what, [f"it says {found.total} bytes, {payload_bytes} are there"])
        found.check(what)
        return found

    def check(self, what: str) -> None:
        """Check the manifest against itself."""
        faults = [] if self.format == FORMAT else [f"format {self.format}, expected {FORMAT}"]
        names: dict[str, TensorPlace] = {}
        for tensor in self.tensors:
            if tensor.name in names:
                faults.append(f"{tensor.name!r} is there twice")
            names[tensor.name] = tensor
            faults += self._faults_of(tensor)
        ordered = sorted(self.tensors, key=lambda tensor: (tensor.offset, tensor.size))
        for before, after in pairwise(ordered):
            if before.offset + before.size > after.offset and after.size:
                faults.append(f"{before.name!r} and {after.name!r} overlap")
        for alias, name in self.aliases.items():
            if alias in names:
                faults.append(f"alias {alias!r} is a tensor too")
            if name not in names:
                faults.append(f"alias {alias!r} of {name!r}, which is no tensor")
        if not faults:
            places = self.by_name()
            for name in self.slices:
                try:
                    self.shape_of(name, places)
                except ValueError as error:
                    faults.append(str(error))
                if name in names or name in self.aliases:
                    faults.append(f"slice {name!r} is a tensor or an alias too")
        if faults:
            raise ManifestError(what, faults)

    def _faults_of(self, tensor: TensorPlace) -> list[str]:
        faults = []
        width = DTYPE_BYTES.get(tensor.dtype)
        if not tensor.name:
            faults.append("a tensor has no name")
        if width is None:
            faults.append(f"{tensor.name!r}: dtype {tensor.dtype!r} is unknown")
        if any(size < 0 for size in tensor.shape) or tensor.size >= 1 << 63:
            faults.append(f"{tensor.name!r}: shape {list(tensor.shape)}")
        elif width is not None and tensor.size != math.prod(tensor.shape) * width:
            faults.append(
                f"{tensor.name!r}: {tensor.size} bytes for {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.offset % ALIGNMENT or tensor.offset < 0:
            faults.append(f"{tensor.name!r}: offset {tensor.offset}, no multiple of {ALIGNMENT}")
        elif tensor.offset + max(tensor.size, 0) > self.total:
            faults.append(
                f"{tensor.name!r} ends at {tensor.offset + tensor.size} of {self.total} bytes"
            )
        return faults

    def names(self) -> list[str]:
        """Return every name: tensors, aliases, slices."""
        return [tensor.name for tensor in self.tensors] + [*self.aliases, *self.slices]

    def root(self, name: str) -> str:
        """Return the tensor behind a name."""
        while name in self.slices:
            name = self.slices[name].of
        return self.aliases.get(name, name)

    def by_name(self) -> dict[str, TensorPlace]:
        """Return the tensors by name, aliases included."""
        found = {tensor.name: tensor for tensor in self.tensors}
        return found | {alias: found[name] for alias, name in self.aliases.items()}

    def shape_of(self, name: str, places: Mapping[str, TensorPlace]) -> tuple[str, tuple[int, ...]]:
        """Look up a tensor, alias or slice."""
        chain: list[Slice] = []
        at = name
        while at in self.slices:
            chain.append(self.slices[at])
            at = chain[-1].of
            if len(chain) > _MAX_DEPTH:
                raise ValueError(f"slice {name!r}: more than {_MAX_DEPTH} slices of slices")
        tensor = places.get(at)
        if tensor is None:
            raise ValueError(f"slice {name!r} of {at!r}, which is no tensor")
        shape = list(tensor.shape)
        for part in reversed(chain):
            if not 0 <= part.dim < len(shape):
                raise ValueError(f"slice {name!r}: dimension {part.dim} of {shape}")
            if part.start < 0 or part.length < 0 or part.start + part.length > shape[part.dim]:
                raise ValueError(
                    f"slice {name!r}: {part.start} to {part.start + part.length} of dimension "
                    f"{part.dim} of {shape}"
                )
            if part.drop_dim and part.length != 1:
                raise ValueError(f"slice {name!r}: drops a dimension of {part.length}")
            shape[part.dim : part.dim + 1] = [] if part.drop_dim else [part.length]
        return tensor.dtype, tuple(shape)


def require_slices(slices: object) -> None:
    """Raise TypeError unless the value maps names to Slices, or is None."""
    if slices is not None and not isinstance(slices, Mapping):
        raise TypeError(f"slices: expected Slices by name, got {type(slices).__name__}")
    for name, part in (slices or {}).items():
        if not isinstance(part, Slice):
            raise TypeError(f"slices: {name!r}: expected a Slice, got {type(part).__name__}")
        if any(type(number) is not int for number in (part.dim, part.start, part.length)):
            raise TypeError(f"slices: {name!r}: dim, start, length: expected ints, got {part}")


def _require_params(params: Sequence[object]) -> None:
    for param in params:
        if not isinstance(param, ParamMeta):
            raise TypeError(f"params: expected ParamMetas, got {type(param).__name__}")
        # msgspec checks structs on decoding, not on construction.
        name: object = param.name
        shape: object = param.shape
        if not isinstance(name, str):
            raise TypeError(f"params: expected texts as names, got {name!r}")
        if not isinstance(shape, (tuple, list)) or any(not isinstance(n, int) for n in shape):
            raise TypeError(f"params: {name!r}: expected a tuple of ints, got {shape!r}")


def view_of(
    tensors: dict[str, torch.Tensor], manifest: Manifest, name: str, what: str = "weights"
) -> torch.Tensor:
    """Look up a tensor, an alias or a slice."""
    part = manifest.slices.get(name)
    if part is None:
        found = tensors.get(manifest.aliases.get(name, name))
        if found is None:
            raise UnknownNameError(what, name, manifest.names())
        return found
    view = view_of(tensors, manifest, part.of).narrow(part.dim, part.start, part.length)
    return view.squeeze(part.dim) if part.drop_dim else view
