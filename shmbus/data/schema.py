"""Declared schemas: fields of samples, in the form of users and in the form of a segment.

Invariants:

- An accepted schema has a single encoding, regardless of its spelling: two schemas of equal fields
  agree.
- The core reads the encoding back within its own bounds (``ring/declared_schema.c``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from shmbus import errors
from shmbus.data.encoding import dtype_name, encode_dtype, parse_dtype
from shmbus.data.fields import is_argument
from shmbus_ext import _core

if TYPE_CHECKING:
    from types import EllipsisType


#: A size, the name of a dimension, or None for an arbitrary size.
Dimension: TypeAlias = int | str | None
Shape: TypeAlias = "Dimension | tuple[Dimension, ...] | EllipsisType"
#: A schema as users declare it.
Schema: TypeAlias = "Mapping[str, DTypeLike | tuple[DTypeLike, Shape]]"

#: After a name: samples may lack the field.
_OPTIONAL: Final = "?"
#: The default dimension of fields with a value for every token.
_TOKENS: Final = ("T",)
_HEAD: Final = struct.Struct("<HH")
_ENTRY: Final = struct.Struct("<HHIBBxx")


class SchemaField(msgspec.Struct, frozen=True):
    """One field of a declared schema.

    Attributes
    ----------
    name : str
        The field.
    dtype : str
        Its dtype, as NumPy reads it; "bfloat16" too.
    shape : tuple of (int, str or None), optional
        For each dimension its size, a name with the same size in all fields of a sample, or None
        for an arbitrary size; None for a field of arbitrary shape.
    required : bool
        If every sample must contain the field.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    required: bool

    def __str__(self) -> str:
        shape = "any shape" if self.shape is None else str(self.shape)
        return f"{self.dtype} {shape}{'' if self.required else ', optional'}"


def parse(schema: Schema) -> _core.DeclaredSchema:
    """Check and encode a user's declaration."""
    if not isinstance(schema, Mapping):
        raise TypeError(
            f"schema: expected a mapping of names to dtypes or (dtype, shape), got "
            f"{type(schema).__name__}"
        )
    return encode([_parse_field(name, spec) for name, spec in schema.items()])


def encode(fields: Iterable[SchemaField]) -> _core.DeclaredSchema:
    """Encode fields for a segment; ValueError for more fields than a segment keeps."""
    fields = list(fields)
    names = [field.name for field in fields]
    if not 1 <= len(fields) <= _core.MAX_FIELDS:
        raise ValueError(f"schema: expected 1 to {_core.MAX_FIELDS} fields, got {len(fields)}")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"schema: expected each field once, got {sorted(twice)} twice")
    dimensions: dict[str, int] = {}
    for field in fields:
        for size in field.shape or ():
            if isinstance(size, str):
                dimensions.setdefault(size, len(dimensions))
    if len(dimensions) > _core.MAX_DIMENSION_NAMES:
        raise ValueError(
            f"schema: expected at most {_core.MAX_DIMENSION_NAMES} names of dimensions, got "
            f"{len(dimensions)}"
        )
    parts = [_HEAD.pack(len(fields), len(dimensions))]
    for name in dimensions:
        text = name.encode()
        parts += [bytes([len(text)]), text]
    parts += [_encode_field(field, dimensions) for field in fields]
    encoded = b"".join(parts)
    if len(encoded) > _core.MAX_DECLARED_BYTES:
        raise ValueError(
            f"schema: expected at most {_core.MAX_DECLARED_BYTES} bytes of names, dtypes and "
            f"shapes, got {len(encoded)}; declare fewer fields, or shorter names"
        )
    return _core.DeclaredSchema(encoded)


def _encode_field(field: SchemaField, dimensions: dict[str, int]) -> bytes:
    dtype = parse_dtype(f"schema: {field.name}", field.dtype)
    name, described = field.name.encode(), encode_dtype(field.name, dtype)
    flags = 0 if field.required else _core.DECLARED_OPTIONAL
    if field.shape is None:
        flags |= _core.DECLARED_ANY_SHAPE
    sizes = [
        _core.DIMENSION_FREE
        if size is None
        else _core.DIMENSION_NAMED - dimensions[size]
        if isinstance(size, str)
        else size
        for size in field.shape or ()
    ]
    head = _ENTRY.pack(len(name), len(described), dtype.itemsize, len(sizes), flags)
    return b"".join([head, name, described, struct.pack(f"<{len(sizes)}q", *sizes)])


def _parse_field(given: str, spec: object) -> SchemaField:
    if not isinstance(given, str):
        raise TypeError(f"schema: expected str names, got {type(given).__name__}")
    name = given.removesuffix(_OPTIONAL)
    if not 1 <= len(name.encode("utf-8", "replace")) <= 255:
        raise ValueError(f"schema: expected names of 1 to 255 bytes of UTF-8, got {given!r}")
    if is_argument(name):
        raise ValueError(f"schema: {name!r} is an argument's name; call the array something else")
    if isinstance(spec, tuple):
        if len(spec) != 2:
            raise TypeError(f"schema: {name}: expected a dtype or (dtype, shape), got {spec!r}")
        dtype, shape = parse_dtype(f"schema: {name}", spec[0]), _parse_shape(name, spec[1])
    else:
        dtype = parse_dtype(f"schema: {name}", spec)
        shape = _TOKENS if name in _core.STANDARD_DTYPES else None
    return SchemaField(name, dtype_name(dtype), shape, not given.endswith(_OPTIONAL))


def _parse_shape(name: str, shape: object) -> tuple[int | str | None, ...] | None:
    if shape is ...:
        return None
    sizes = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    if len(sizes) > _core.MAX_NDIM:
        raise ValueError(
            f"schema: {name}: expected at most {_core.MAX_NDIM} dimensions, got {len(sizes)}"
        )
    return tuple(_parse_dimension(name, size) for size in sizes)


def _parse_dimension(name: str, size: object) -> int | str | None:
    if size is None:
        return None
    if isinstance(size, str):
        if not size.isidentifier() or len(size.encode()) > 255:
            raise ValueError(
                f"schema: {name}: expected the name of a dimension such as 'T', got {size!r}"
            )
        return size
    if isinstance(size, (bool, np.bool_, type)) or not hasattr(size, "__index__"):
        raise TypeError(
            f"schema: {name}: expected a size, the name of a dimension, or None for any, got "
            f"{size!r}"
        )
    number = int(size.__index__())
    if not 0 <= number < 2**63:
        raise ValueError(f"schema: {name}: expected sizes of 0 or more, got {number}")
    return number


def fields_of(declared: _core.DeclaredSchema) -> tuple[SchemaField, ...]:
    """Return the fields of a schema, in the order of their declaration."""
    return tuple(
        SchemaField(name, dtype_name(dtype), shape, required)
        for name, dtype, shape, required in declared.fields()
    )


def mapping_of(declared: _core.DeclaredSchema) -> dict[str, tuple[str, Any]]:
    """Return a schema as users declare it: `parse` turns the result into the same schema."""
    return {
        field.name + ("" if field.required else _OPTIONAL): (
            field.dtype,
            ... if field.shape is None else field.shape,
        )
        for field in fields_of(declared)
    }


def difference(
    ours: _core.DeclaredSchema, theirs: _core.DeclaredSchema, our_name: str, their_name: str
) -> str | None:
    """Name the first field in which two schemas differ; None for equal fields in either order."""
    left = {field.name: field for field in fields_of(ours)}
    right = {field.name: field for field in fields_of(theirs)}
    for name in [*left, *(name for name in right if name not in left)]:
        if left.get(name) != right.get(name):
            return (
                f"field {name!r}: {our_name} has {left.get(name, 'no such field')}, "
                f"{their_name} has {right.get(name, 'no such field')}"
            )
    return None


# -- of a segment ---------------------------------------------------------------------------------


def declared_schema(segment: _core.Segment) -> _core.DeclaredSchema | None:
    """Read the schema of a segment; None without a declaration."""
    return decode_part(segment.name, segment)


def decode_part(name: str, source: _core.Segment | bytes) -> _core.DeclaredSchema | None:
    """Read the schema of a mapped segment, or of its part read from the file."""
    try:
        encoded = _core.declared_bytes(source)
        return None if encoded is None else _core.DeclaredSchema(encoded)
    except ValueError as error:
        raise errors.LayoutMismatchError(
            f"bus {name!r}: damaged declared schema ({error}); take the remaining groups, then "
            f"remove the bus with shmbus.unlink({name!r})"
        ) from error


def agreed_schema(
    segment: _core.Segment, own: _core.DeclaredSchema | None
) -> _core.DeclaredSchema | None:
    """Return the schema for puts: the segment's if declared, else the producer's own."""
    declared = declared_schema(segment)
    if declared is None or own is None:
        return own if declared is None else declared
    differs = difference(own, declared, "schema=", "the bus")
    if differs is not None:
        raise ValueError(
            f"bus {segment.name!r}: its schema is not the one given: {differs}; declare the same, "
            "or leave schema= out to take the bus's"
        )
    return declared


def require_same_schema(
    segment: _core.Segment, own: _core.DeclaredSchema | None, before: _core.DeclaredSchema | None
) -> None:
    """Refuse a successor whose schema differs from the removed bus's, by ValueError."""
    now = agreed_schema(segment, own)
    differs = None
    if now is None or before is None:
        differs = None if now is before else "one of them declares none"
    else:
        differs = difference(before, now, "the removed bus", "the new one")
    if differs is not None:
        raise ValueError(
            f"bus {segment.name!r}: the new bus of this name declares a different schema: "
            f"{differs}; make a new Producer"
        )
