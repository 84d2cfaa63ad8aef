"""Weights of any layout: each rank names its shards, with their place in the whole model.

A shard is a part of a checkpoint tensor, as a view of this rank's memory; ranks exchange their
shards once, names and boxes only, and every rank writes its own in place.

Invariants: no rank gathers a tensor; the ranks' shards cover a tensor exactly once, apart from
replicated shards, written by one rank; a hole or an overlap is refused by name before a byte is
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch

from shmbus.base.arguments import check_choice
from shmbus.data.encoding import decodable
from shmbus.weights.errors import ManifestError
from shmbus.weights.manifest import ParamMeta, Slice
from shmbus.weights.rounding import ROUNDINGS, Rounding
from shmbus.weights.weight_source import EvenShares, LocalPiece, WeightSource, dtype_name

#: Exchange of a message: from this rank's bytes to every rank's, in rank order.
Exchange: TypeAlias = Callable[[bytes], Sequence[bytes]]


class Shard:
    """A part of a tensor of the whole model; a tied tensor is one shard, or two.

    Parameters
    ----------
    name : str
        As in the checkpoint.
    shape, start : tuple of int
        Of the whole tensor, and the part's first index in each dimension.
    tensor : Tensor
        The part: a view of this rank's memory, of any strides.
    dtype : torch.dtype, optional
        Published dtype, cast during the copy; the tensor's own by default.
    """

    __slots__ = ("dtype", "name", "shape", "start", "tensor")

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        start: Sequence[int],
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.start = tuple(start)
        self.tensor = tensor.detach()
        self.dtype = dtype or tensor.dtype

    def __repr__(self) -> str:
        return f"<Shard {self.name!r} {list(self.tensor.shape)} at {list(self.start)}>"


@decodable
class _Box(msgspec.Struct, frozen=True, array_like=True):
    """A shard as known to every rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.start, self.sizes

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def overlaps(self, other: _Box) -> bool:
        sides = zip(self.start, self.sizes, other.start, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in sides)


class ShardedSource(WeightSource):
    """A source of named shards, a part of them per rank.

    Parameters
    ----------
    shards : callable
        Returns this rank's shards; called for every version, because a trainer may move its memory.
    exchange : callable, optional
        From this rank's bytes to every rank's, in the order of ranks; called once. By default ranks
        of ``torch.distributed`` gather them; otherwise a single rank is assumed.
    slices : mapping of Slice, optional
        Names for parts.
    rounding : "nearest" | "stochastic"
        Of casts to a 16-bit dtype, as for `ModuleSource`.

    Raises
    ------
    ManifestError
        Shards leave a hole, overlap, or disagree about a tensor; every fault is named.
    TypeError
        An argument is no function.

    Examples
    --------
    >>> source = ShardedSource(shards_of_this_rank)
    >>> publisher = WeightPublisher("run1", source, rank=rank, world_size=world_size)
    """

    def __init__(
        self,
        shards: Callable[[], Iterable[Shard]],
        *,
        exchange: Exchange | None = None,
        slices: Mapping[str, Slice] | None = None,
        rounding: Rounding = "nearest",
    ) -> None:
        check_choice("rounding", rounding, ROUNDINGS)
        if not callable(shards):
            raise TypeError(
                f"shards: expected a function that returns them, got {type(shards).__name__}"
            )
        self._shards = shards
        self._rounding: Final = rounding
        self._slices: Final = dict(slices or {})
        mine = [_box_of(shard) for shard in shards()]
        said = (exchange or _gather)(msgspec.msgpack.encode(mine))
        boxes = [msgspec.msgpack.decode(each, type=list[_Box]) for each in said]
        self._params: Final = _checked(boxes)
        self._writers: Final = _writers(boxes)
        self._mine: Final = frozenset(mine)
        self._pieces: dict[_Box, tuple[object, LocalPiece]] = {}

    def params(self) -> list[ParamMeta]:
        """Return every tensor of the whole model, in the order of the ranks' names."""
        return self._params

    def slices(self) -> Mapping[str, Slice]:
        """Return names for parts, as given."""
        return self._slices

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield the shards written by this rank, as `WeightSource.iter_local` does."""
        ranks = {each for writers in self._writers.values() for each in writers}
        if ranks and max(ranks) >= world_size:
            raise ManifestError(
                f"the publisher has {world_size} ranks",
                [f"rank {max(ranks)} has shards; give the publisher as many ranks as said theirs"],
            )
        seen = set()
        for shard in self._shards():
            box = _box_of(shard)
            seen.add(box)
            if box in self._mine and self._writers[box][0] == rank:
                yield self._piece(box, shard)
        if seen != self._mine:
            faults = [f"{box.name!r} at {list(box.start)} is new" for box in seen - self._mine]
            faults += [f"{box.name!r} at {list(box.start)} is gone" for box in self._mine - seen]
            raise ManifestError(f"rank {rank} has other shards than when it was made", faults)

    def _piece(self, box: _Box, shard: Shard) -> LocalPiece:
        """Return the previous piece if the shard's memory is unchanged."""
        tensor = shard.tensor
        look = tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device
        lazy = tensor.is_conj() or tensor.is_neg()
        known = self._pieces.get(box)
        if known is None or known[0] != look or lazy:
            piece = LocalPiece(
                shard.name, shard.start, tensor, lasting=not lazy, rounding=self._rounding
            )
            known = self._pieces[box] = look, piece
        return known[1]


def _box_of(shard: Shard) -> _Box:
    start, shape, sizes = shard.start, shard.shape, tuple(shard.tensor.shape)
    inside = len(start) == len(shape) == len(sizes) and all(
        at >= 0 and at + size <= room for at, size, room in zip(start, sizes, shape, strict=True)
    )
    if not inside:
        raise ManifestError(
            "a shard is no part of its tensor",
            [f"{shard.name!r}: {list(sizes)} at {list(start)} of {list(shape)}"],
        )
    return _Box(shard.name, dtype_name(shard.dtype), shape, start, sizes)


def _checked(boxes: Sequence[Sequence[_Box]]) -> list[ParamMeta]:
    """Return the tensors formed by every rank's shards; refuse holes and overlaps."""
    tensors: dict[str, dict[Any, tuple[_Box, int]]] = {}
    params: dict[str, ParamMeta] = {}
    faults = []
    for rank, said in enumerate(boxes):
        for box in said:
            meta = ParamMeta(box.name, box.dtype, box.shape)
            known = params.setdefault(box.name, meta)
            if known != meta:
                faults.append(
                    f"{box.name!r}: rank {rank} has {box.dtype} {list(box.shape)}, another rank "
                    f"{known.dtype} {list(known.shape)}"
                )
            tensors.setdefault(box.name, {}).setdefault(box.place, (box, rank))
    for name, found in tensors.items():
        parts = [each for each in found.values() if each[0].volume]
        faults += [
            f"{name!r}: {list(box.sizes)} at {list(box.start)} of rank {rank} and "
            f"{list(other.sizes)} at {list(other.start)} of rank {other_rank} overlap"
            for at, (box, rank) in enumerate(parts)
            for other, other_rank in parts[:at]
            if len(box.start) == len(other.start) and box.overlaps(other)
        ]
        total, there = math.prod(params[name].shape), sum(box.volume for box, _ in parts)
        if there < total:
            faults.append(f"{name!r}: {total - there} of {total} elements are in no rank's shard")
    if faults:
        raise ManifestError("the shards of all ranks do not make up a model", faults)
    return list(params.values())


def _writers(boxes: Sequence[Sequence[_Box]]) -> dict[_Box, tuple[int, ...]]:
    """Map every shard to its holders, its writer first: the least loaded."""
    having: dict[_Box, list[int]] = {}
    for rank, said in enumerate(boxes):
        for box in dict.fromkeys(said):
            having.setdefault(box, []).append(rank)
    load = [0] * len(boxes)
    found = {}
    for box, ranks in having.items():
        ranks.sort(key=lambda rank: (load[rank], rank))
        load[ranks[0]] += box.volume
        found[box] = tuple(ranks)
    return found


def _gather(said: bytes) -> Sequence[bytes]:
    """Gather the ranks' messages as bytes, without pickle."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [said]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    mine = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device)
    world_size = torch.distributed.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    torch.distributed.all_gather(sizes, torch.tensor([len(said)], device=device))
    most = max(int(size) for size in sizes)
    room = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in sizes]
    torch.distributed.all_gather(room, torch.nn.functional.pad(mine, (0, most - len(said))))
    return [bytes(part[: int(size)].cpu().numpy()) for part, size in zip(room, sizes, strict=True)]


class ExportedSource(WeightSource):
    """Whole tensors exported by a trainer, one after the other, on every rank in lockstep.

    Megatron-Bridge exports in this way. Each rank writes its share of them, and keeps none. Every
    rank iterates over every tensor. Tied tensors are exported once, or twice.

    Parameters
    ----------
    export : callable
        Returns an iterator of names and tensors, the same on every rank; called for each version,
        and once more to list the tensors.

    Raises
    ------
    TypeError
        The argument is no function.
    """

    def __init__(self, export: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        if not callable(export):
            raise TypeError(
                f"export: expected a function that returns pairs, got {type(export).__name__}"
            )
        self._export = export
        self._params: list[ParamMeta] | None = None

    def params(self) -> list[ParamMeta]:
        """Return the exported tensors, listed once."""
        if self._params is None:
            self._params = [_meta_of(name, tensor) for name, tensor in self._export()]
        return self._params

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """Yield this rank's share, as `WeightSource.iter_local` does."""
        known = iter(self.params())
        shares = EvenShares(world_size)
        for name, tensor in self._export():
            meta = _meta_of(name, tensor)
            if next(known, None) != meta:
                raise ManifestError(
                    "something else is exported than at first",
                    [f"{name!r}: {meta.dtype} {list(meta.shape)} was not expected here"],
                )
            if shares.next(tensor.nbytes) == rank:
                yield LocalPiece(name, (0,) * tensor.dim(), tensor.detach())
        left = [f"{meta.name!r} is missing" for meta in known]
        if left:
            raise ManifestError("something else is exported than at first", left)


def _meta_of(name: str, tensor: torch.Tensor) -> ParamMeta:
    return ParamMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape))
