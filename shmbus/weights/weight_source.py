"""Where published weights come from: a module, plain or sharded, or anything with four methods.

Invariant: every rank names the same tensors, in the same order, with the same dtypes and whole
shapes; together their pieces are each tensor exactly once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch

from shmbus.base.arguments import check_choice, check_flag
from shmbus.errors import WeightsError
from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.tensors.views import TensorPlace, has_memory, is_sharded
from shmbus.weights.errors import ManifestError
from shmbus.weights.manifest import ParamMeta, Slice, require_slices
from shmbus.weights.rounding import DROPPED_BITS, ROUNDINGS, Rounding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_OTHER_MODEL: Final = "the model is not the one of this publisher's start; make a new publisher"


class LocalPiece:
    """Part of a tensor written by this rank.

    Parameters
    ----------
    name : str
        The tensor.
    start : tuple of int
        First index of the part in each dimension of the whole.
    tensor : Tensor
        The part, of any dtype and strides; cast during the copy.
    lasting : bool
        Whether the source reuses this object, to keep the results of earlier checks.
    rounding : "nearest" | "stochastic"
        Of a cast from float32 or float64 to a 16-bit dtype.

    Raises
    ------
    TypeError
        The value is no tensor, or the start is no tuple of ints.
    """

    __slots__ = ("lasting", "name", "rounding", "start", "tensor")

    def __init__(
        self,
        name: str,
        start: tuple[int, ...],
        tensor: torch.Tensor,
        *,
        lasting: bool = False,
        rounding: Rounding = "nearest",
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r}: expected a torch.Tensor, got {type(tensor).__name__}")
        if type(start) is not tuple or any(type(at) is not int for at in start):
            start = _checked_start(name, start)
        self.name = name
        self.start = start
        self.tensor = tensor
        self.lasting = lasting
        self.rounding = rounding


@runtime_checkable
class WeightSource(Protocol):
    """Interface of a publisher's source, with the names of vLLM's weight transfer."""

    def params(self) -> list[ParamMeta]:
        """Return all tensors of the whole model, in the order of the layers."""

    def aliases(self) -> Mapping[str, str]:
        """Return aliases of tied tensors: alias -> name."""
        return {}

    def slices(self) -> Mapping[str, Slice]:
        """Return names for parts of tensors."""
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield this rank's pieces; called for each version.

        Parameters
        ----------
        rank, world_size : int
            Of the publisher.

        Yields
        ------
        LocalPiece

        Raises
        ------
        ManifestError, WeightsError
            The tensors differ from `params`, or a shard cuts a block.
        """


class EvenShares:
    """Division of replicated tensors among ranks; equal calls give equal answers on every rank."""

    def __init__(self, world_size: int) -> None:
        self._written = [0] * world_size

    def next(self, nbytes: int) -> int:
        """Return the rank that writes the next tensor."""
        lightest = self._written.index(min(self._written))
        self._written[lightest] += nbytes
        return lightest


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def local_part(name: str, tensor: DTensor) -> tuple[tuple[int, ...], torch.Tensor, bool]:
    """Return a rank's part of a DTensor."""
    # Already loaded: the caller holds a DTensor.
    from torch.distributed.tensor import Replicate, Shard

    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise WeightsError(
                f"{name!r}: placement {placement} has no place in the whole tensor; call "
                "redistribute() to Shard or Replicate before publishing. The weights that were "
                "published stay in force"
            )
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank lies outside of the mesh
        return (0,) * tensor.dim(), tensor.to_local(), False
    start = [0] * tensor.dim()
    sizes = list(tensor.shape)
    first = True
    for mesh_dim, placement in enumerate(tensor.placements):
        at = coordinate[mesh_dim]
        if isinstance(placement, Shard):
            # torch.chunk's rule: equal parts, rounded up, until nothing is left.
            chunk = -(-sizes[placement.dim] // tensor.device_mesh.size(mesh_dim))
            begin = min(at * chunk, sizes[placement.dim])
            start[placement.dim] += begin
            sizes[placement.dim] = min(chunk, sizes[placement.dim] - begin)
        else:
            first = first and at == 0
    local = tensor.to_local()
    if tuple(local.shape) != tuple(sizes):
        raise WeightsError(
            f"{name!r}: its shard has shape {list(local.shape)}, {sizes} was expected of "
            f"{list(tensor.shape)} by {tensor.placements}; publish it through a WeightSource of "
            "your own. The weights that were published stay in force"
        )
    return tuple(start), local, first


class ModuleSource(WeightSource):
    """Parameters and persistent buffers of a module.

    Tied tensors are published once, with aliases. A DTensor, as made by FSDP2 and tensor
    parallelism, is published in whole-model coordinates: each rank writes its own shard. Replicated
    tensors are divided among the ranks.

    Parameters
    ----------
    model : torch.nn.Module
        Read anew for each version.
    dtype : torch.dtype, optional
        Published dtype of floating-point tensors, for example torch.bfloat16 for float32 masters;
        their own by default.
    rounding : "nearest" | "stochastic"
        Of casts to a 16-bit dtype. "stochastic" lets updates smaller than half a step of the
        bfloat16 grid reach an engine in the mean; the version number seeds the random bits.
    rename : callable, optional
        From the module's names to the checkpoint's.
    slices : mapping of Slice, optional
        Names for parts, in the checkpoint's names.
    buffers : bool
        Whether persistent buffers are published too.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, for example a dtype without fractions.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
        rename: Callable[[str], str] | None = None,
        slices: Mapping[str, Slice] | None = None,
        buffers: bool = True,
    ) -> None:
        if not callable(getattr(model, "state_dict", None)):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if rename is not None and not callable(rename):
            raise TypeError(f"rename: expected a function, got {type(rename).__name__}")
        check_flag("buffers", buffers)
        require_slices(slices)
        self._model = model
        self._dtype = _checked_dtype(dtype)
        known = ROUNDINGS if self._dtype in DROPPED_BITS else ROUNDINGS[:1]
        check_choice("rounding", rounding, known, "'stochastic' rounds to dtype=torch.bfloat16")
        self._rounding: Final = rounding
        self._rename = rename
        self._slices: Final = dict(slices or {})
        self._buffers = buffers
        self._seen: SeenTensors | None = None
        self._found: tuple[dict[str, torch.Tensor], dict[str, str]] = {}, {}
        #: Shape by name, or name by alias, as of the last `params`.
        self._promised: dict[str, object] | None = None
        self._pieces: dict[tuple[int, int], list[LocalPiece]] = {}

    def _named(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return tensors by name, and aliases. One object under two names counts as tied."""
        state = self._model.state_dict(keep_vars=True)
        if self._seen is None or not self._seen.still(state):
            self._seen = None  # an unreadable model leaves no cache
            self._pieces = {}
            self._found = self._read(state)
            self._seen = SeenTensors(state)
        return self._found

    def _read(self, state: Mapping[str, object]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        kept = None
        if not self._buffers:  # under each name of a shared module
            kept = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        found: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[object, str] = {}
        taken: list[str] = []
        for own_name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or (kept is not None and own_name in kept):
                continue
            name = own_name if self._rename is None else self._rename(own_name)
            _require_bytes(name, tensor)
            if name in found or name in aliases:
                taken.append(f"{name!r} is what rename gives {own_name!r} and another tensor")
            known = first.setdefault(_identity(tensor), name)
            if known == name:
                found[name] = tensor
            else:
                aliases[name] = known
        if taken:
            raise ManifestError("each tensor needs a name of its own", taken)
        return found, aliases

    def _published_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype

    def params(self) -> list[ParamMeta]:
        """Return every tensor of the whole model."""
        named, aliases = self._named()
        self._promised = _shapes_of(named) | aliases
        return [
            ParamMeta(name, dtype_name(self._published_dtype(tensor)), tuple(tensor.shape))
            for name, tensor in named.items()
        ]

    def aliases(self) -> Mapping[str, str]:
        """Return the aliases of tied tensors."""
        return self._named()[1]

    def slices(self) -> Mapping[str, Slice]:
        """Return names for parts, as given."""
        return self._slices

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield this rank's pieces, as `WeightSource.iter_local` does."""
        named, aliases = self._named()
        pieces = self._pieces.get((rank, world_size))
        if pieces is None:
            self._require_promised(_shapes_of(named) | aliases)
            pieces = list(self._local(named, rank, world_size))
            if self._seen is not None and self._seen.can_tell:
                self._pieces[rank, world_size] = pieces
                for piece in pieces:
                    piece.lasting = True
        yield from pieces

    def _require_promised(self, found: dict[str, object]) -> None:
        """Raise ManifestError for a change since `params`: another rank sees no missing tensor."""
        promised = found if self._promised is None else self._promised
        faults = [
            f"{name!r}: expected {promised.get(name)}, got {found.get(name)}"
            for name in sorted(dict(promised.items() ^ found.items()))
        ]
        if faults:
            raise ManifestError(_OTHER_MODEL, faults)

    def _local(
        self, named: Mapping[str, torch.Tensor], rank: int, world_size: int
    ) -> Iterator[LocalPiece]:
        shares = EvenShares(world_size)
        for name, tensor in named.items():
            detached = tensor.detach()
            if is_sharded(detached):
                start, local, first = local_part(name, detached)
                if first:
                    yield LocalPiece(name, start, local, rounding=self._rounding)
                continue
            # Equal on every rank: every rank computes the same division.
            if shares.next(detached.numel() * detached.element_size()) == rank:
                start = (0,) * detached.dim()
                yield LocalPiece(name, start, detached, rounding=self._rounding)


def target_of_piece(
    place: TensorPlace | None, whole: torch.Tensor | None, piece: LocalPiece
) -> torch.Tensor:
    """Return a piece's part of a published tensor."""
    if place is None or whole is None:
        raise ManifestError(_OTHER_MODEL, [f"{piece.name!r} is not in the manifest"])
    shape = piece.tensor.shape
    if len(piece.start) != whole.dim() or any(
        start < 0 or start + size > room
        for start, size, room in zip(piece.start, shape, whole.shape, strict=False)
    ):
        outside = f"a piece of shape {list(shape)} at {list(piece.start)} is not inside"
        raise ManifestError(_OTHER_MODEL, [f"{piece.name!r}: {outside} {list(whole.shape)}"])
    for dim, (start, size) in enumerate(zip(piece.start, shape, strict=True)):
        if size != whole.shape[dim]:
            whole = whole.narrow(dim, start, size)
    return whole


def require_source(source: object) -> None:
    """Raise TypeError for a value without the WeightSource interface."""
    if not isinstance(source, WeightSource):
        raise TypeError(
            "source: expected a WeightSource, such as ModuleSource(model), got "
            f"{type(source).__name__}"
        )


def _shapes_of(named: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def _identity(tensor: torch.Tensor) -> object:
    """Return a key, equal for tensors with the same elements and layout."""
    local = tensor.to_local() if is_sharded(tensor) else tensor
    if local.numel() == 0 or is_sharded(tensor):
        return id(tensor)
    at = (local.data_ptr(), local.device, local.dtype)
    return (*at, tuple(local.shape), local.stride(), local.is_conj(), local.is_neg())


def _checked_start(name: str, start: object) -> tuple[int, ...]:
    try:
        return tuple(operator.index(at) for at in start)  # type: ignore[attr-defined]
    except TypeError:
        raise TypeError(f"{name!r}: start: expected a tuple of ints, got {start!r}") from None


def _checked_dtype(dtype: object) -> torch.dtype | None:
    """Return the published dtype of floating-point tensors; refuse lossy integers."""
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is None:
        return None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    if not found.is_floating_point or found == getattr(torch, "float8_e8m0fnu", None):
        raise ValueError(f"dtype: expected signed floating-point, such as bfloat16, got {found}")
    return found


def _require_bytes(name: str, tensor: torch.Tensor) -> None:
    problem = ""
    if torch.nn.parameter.is_lazy(tensor):
        problem = "has no shape before the model's first forward pass; make that"
    elif tensor.is_meta:
        problem = "is on the meta device and has no bytes; load the model"
    elif tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}, expected torch.strided; call to_dense()"
    elif not has_memory(tensor.to_local() if is_sharded(tensor) else tensor):
        problem = "has no memory, as FSDP frees it between forward passes; gather it"
    if problem:
        raise WeightsError(
            f"{name!r} {problem} before its publication. The published weights stay in force"
        )
