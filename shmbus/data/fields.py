"""Array fields of a reservation, as given to `Producer.reserve`."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from shmbus import errors
from shmbus.base.arguments import check_int
from shmbus.data.encoding import parse_dtype
from shmbus_ext import _core

#: A dtype and sizes; or only sizes, for a field of a known dtype.
FieldSpec: TypeAlias = "tuple[DTypeLike, int | tuple[int, ...]] | int | tuple[int, ...]"

_RESERVED = frozenset({
    "instance_id", "group_size", "index", "score", "policy_version", "round", "meta", "timeout",
    "split", "need", "rows", _core.ROW_LENGTHS,
})  # fmt: skip

# Bytes beyond C's count: 2^48 exceeds every record's largest field.
_MOST_BYTES = 1 << 48


def is_argument(name: str) -> bool:
    """Tell if a name belongs to an argument of put, and so cannot name a field."""
    return name in _RESERVED


def _is_size(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, np.ndarray)


def parse_field(
    name: str, spec: FieldSpec, known: np.dtype[Any] | None = None
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Check a field, and return its dtype and sizes; a known dtype may be omitted."""
    if not isinstance(name, str):
        raise TypeError(f"fields: expected str names, got {type(name).__name__}")
    if is_argument(name):
        raise ValueError(f"fields: {name!r} is an argument's name; call the array something else")
    pair: Any = spec
    if type(pair) is not tuple or len(pair) != 2 or _is_size(pair[0]):
        pair = _complete(name, pair, known)
    dtype = parse_dtype(f"field {name!r}", pair[0])
    sizes = pair[1] if isinstance(pair[1], (tuple, list)) else (pair[1],)
    return dtype, tuple(check_int(f"field {name!r}: size", size, 0) for size in sizes)


def _complete(name: str, spec: Any, known: np.dtype[Any] | None) -> Any:
    """Return the pair of a dtype and sizes that a field's spec stands for."""
    if _is_size(spec) or (isinstance(spec, (tuple, list)) and all(_is_size(n) for n in spec)):
        if known is None:
            raise TypeError(
                f"field {name!r}: expected (dtype, shape), got {spec!r}: no schema says its dtype; "
                f"declare it, as in Producer(..., schema={{{name!r}: 'int32'}})"
            )
        return known, spec
    if not isinstance(spec, (tuple, list)) or len(spec) != 2:
        raise TypeError(f"field {name!r}: expected (dtype, shape), got {spec!r}")
    return spec


def check_sizes(
    bus: str, limit: int, fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
) -> None:
    """Report the needed size, in Python's integers, which no product overflows."""
    total = longest = 0
    for dtype, shape in fields.values():
        total += dtype.itemsize * math.prod(shape)
        # A shape with a 0 needs no bytes, regardless of its further dimensions.
        longest = max((longest, *shape))
    if total > limit or longest > _MOST_BYTES:
        largest = max(
            fields,
            key=lambda name: (
                fields[name][0].itemsize * math.prod(fields[name][1]),
                max(fields[name][1], default=0),
            ),
        )
        raise errors.RecordTooLargeError(
            f"bus {bus!r}: a record takes at most {limit} bytes, this one needs {total} for its "
            f"fields alone, most of them for {largest!r} of shape {fields[largest][1]}; create the "
            "bus with a larger capacity (a record may take a quarter of it) or reserve less"
        )
