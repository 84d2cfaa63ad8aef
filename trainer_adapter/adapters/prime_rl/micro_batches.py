"""prime-rl's micro batches as bytes: arrays at their places, the rest as MessagePack.

Invariants:

- What is decoded equals what was encoded, value for value and type for type, but that what is as
  long as the tokens is an array.
- Any struct of msgspec will do: fields are found by what they hold, not by their names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import msgspec.inspect
import numpy as np
from numpy.typing import NDArray

__all__ = ["Parted", "Piece", "decode", "encode"]

#: Lists that stay lists, also where they happen to be as long as the tokens: they are no tensors.
_LISTS: Final = frozenset({"sequence_lengths", "seq_lens", "branch_indices", "lora_num_tokens"})
#: Bytes below which they travel among the small values.
_LEAST_BYTES: Final = 1024
_ALIGN: Final = 64
_DTYPES: Final = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}


class Piece(msgspec.Struct, array_like=True):
    """Where an array of a micro batch is: batch number, path of names within it, place."""

    batch: int
    #: Names, keys and positions from the batch to the array.
    path: list[str | int]
    #: As numpy writes it, or "bytes".
    dtype: str
    begin: int
    nbytes: int


class _Head(msgspec.Struct, array_like=True):
    batches: list[msgspec.Raw]
    pieces: list[Piece]


class Parted(NamedTuple):
    """Arrays taken out of micro batches."""

    pieces: list[Piece]
    #: list of array. In the order of the pieces.
    arrays: list[NDArray[Any]]
    #: What all of them need, with their alignment.
    nbytes: int


def encode(batches: Sequence[Any]) -> tuple[bytes, Parted]:
    """Part micro batches into small values and arrays with their places."""
    out = Parted([], [], 0)
    small = []
    for number, batch in enumerate(batches):
        ids: Any = getattr(batch, "input_ids", None)
        if not isinstance(batch, msgspec.Struct) or not hasattr(ids, "__len__"):
            raise TypeError(
                f"send: micro batch {number}: expected prime-rl's MicroBatch with input_ids, got "
                f"{type(batch).__name__}; send what its packer made"
            )
        tokens = len(ids)
        rest = _without(batch, tokens, number, [], out)
        small.append(msgspec.Raw(msgspec.msgpack.encode(rest)))
    begin = 0
    for piece in out.pieces:
        piece.begin = begin
        begin += -(-piece.nbytes // _ALIGN) * _ALIGN
    return msgspec.msgpack.encode(_Head(small, out.pieces)), out._replace(nbytes=begin)


@functools.cache
def _float_lists(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields that are lists of floats: what reads them makes floats of ints."""
    found: Any = msgspec.inspect.type_info(kind)
    return frozenset(
        field.name
        for field in found.fields
        for each in getattr(field.type, "types", (field.type,))
        if isinstance(each, msgspec.inspect.ListType)
        and isinstance(each.item_type, msgspec.inspect.FloatType)
    )


def _without(
    value: Any,
    tokens: int,
    number: int,
    path: list[str | int],
    out: Parted,
    *,
    as_float: bool = False,
) -> Any:
    """Return a value with empty ones where arrays were taken out; what is sent stays as it is."""
    if isinstance(value, msgspec.Struct):
        if type(value).__struct_config__.frozen:
            return value
        floats = _float_lists(type(value))
        changed = {
            name: _without(
                getattr(value, name), tokens, number, [*path, name], out, as_float=name in floats
            )
            for name in value.__struct_fields__
        }
        return type(value)(**changed)
    array = _array_of(value, tokens, path, as_float)
    if array is not None:
        out.arrays.append(array)
        kind = "bytes" if isinstance(value, bytes) else array.dtype.str
        out.pieces.append(Piece(number, path, kind, 0, array.nbytes))
        return b"" if isinstance(value, bytes) else []
    if isinstance(value, dict):
        return {k: _without(v, tokens, number, [*path, k], out) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        return [_without(v, tokens, number, [*path, i], out) for i, v in enumerate(value)]
    return value


def _array_of(
    value: Any, tokens: int, path: list[str | int], as_float: bool
) -> NDArray[Any] | None:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8) if len(value) >= _LEAST_BYTES else None
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    if not isinstance(value, list) or len(value) != tokens or not tokens or path[-1] in _LISTS:
        return None
    kinds = set(map(type, value))
    dtype = _DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    if as_float and dtype.kind == "i":
        dtype = _DTYPES[float]
    try:
        return np.array(value, dtype)
    except OverflowError:
        return None  # MessagePack knows unsigned numbers of 64 bits


def decode(meta: bytes, view: NDArray[np.uint8], decoder: Any) -> list[Any]:
    """Make micro batches of what `encode` made."""
    head = msgspec.msgpack.decode(meta, type=_Head)
    batches = [decoder.decode(raw) for raw in head.batches]
    for piece in head.pieces:
        part = view[piece.begin : piece.begin + piece.nbytes]
        owner = batches[piece.batch]
        for step in piece.path[:-1]:
            owner = getattr(owner, str(step)) if isinstance(owner, msgspec.Struct) else owner[step]
        value = part if piece.dtype == "bytes" else part.view(piece.dtype)
        if isinstance(owner, msgspec.Struct):
            setattr(owner, str(piece.path[-1]), value)
        else:
            owner[piece.path[-1]] = value
    return batches
