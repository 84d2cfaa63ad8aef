"""Installation of exception types, error texts and encodings into the C extension.

`shmbus` imports this module, to give its other modules a ready extension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmbus import errors
from shmbus.data import encoding
from shmbus.segment import explain
from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus.data.copies import TrajectoryCopy


def _copy_trajectory(arguments: tuple[Any, ...]) -> TrajectoryCopy:
    # Imported late: a producer makes no copies.
    from shmbus.data.copies import TrajectoryCopy

    raw_meta, fields = arguments[-2:]
    meta = encoding.decode_meta(raw_meta) if raw_meta else None
    make: Callable[..., TrajectoryCopy] = TrajectoryCopy
    return make(*arguments[:-2], meta, fields)


def _join_rows(rows: object, others: tuple[str, ...]) -> list[tuple[str, Any]]:
    # Not at the top: most samples consist of a single row.
    from shmbus.data.sample_rows import join_rows

    return join_rows(rows, others)


def _rows_of(trajectory: Any) -> list[Any]:
    from shmbus.data.sample_rows import rows_of

    return rows_of(trajectory)


_core.install(
    closed_error=errors.BusClosedError,
    unscored_error=errors.UnscoredError,
    too_large_error=errors.RecordTooLargeError,
    full_error=explain.full_error,
    busy_error=explain.busy_error,
    removed_error=explain.removed_error,
    layout_error=explain.layout_error,
    space_error=explain.space_error,
    memory_error=explain.memory_error,
    encode_meta=encoding.encode_meta,
    decode_meta=encoding.decode_meta,
    encode_dtype=encoding.encode_dtype,
    decode_dtype=encoding.decode_dtype,
    as_array=encoding.as_array,
    copy_trajectory=_copy_trajectory,
    unknown_field=encoding.unknown_field,
    join_rows=_join_rows,
    rows_of=_rows_of,
)
