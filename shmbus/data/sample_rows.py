"""Samples of several rows: branches of a conversation, sub-agents, compacted contexts.

A sample consists of a score and rows. In its record each field of the rows is a single array, row
behind row, and a field of the core marks the end of every row.

Invariants:

- Fields of the rows lie behind the row lengths in the record, fields of the whole sample before
  them. So their place tells them apart, without a name.
- All rows of a sample share the same fields, and all fields of a row share the row's length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shmbus.base.arguments import check_int
from shmbus.data.encoding import as_array
from shmbus.data.fields import is_argument
from shmbus_ext import _core

#: A row's optional key beside its fields: the number of elements shared with another row.
PREFIX: Final = "prefix_length"
#: Name prefix of fields the first sample stores for its group.
SHARED_PREFIX: Final = _core.SHARED_PREFIX


class _Fields(Protocol):
    """A trajectory, or a copy."""

    @property
    def instance_id(self) -> str: ...
    @property
    def index(self) -> Any: ...
    @property
    def producer_id(self) -> int: ...
    def keys(self) -> tuple[str, ...]: ...
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...
    def __contains__(self, name: object, /) -> bool: ...
    def shape(self, name: str, /) -> tuple[int, ...]: ...


class Row(Mapping[str, NDArray[Any]]):
    """One row of a sample: its fields by name, each a part of the sample's array."""

    __slots__ = ("_fields", "prefix_length")

    def __init__(self, fields: dict[str, NDArray[Any]], prefix_length: int) -> None:
        self._fields = fields
        self.prefix_length = prefix_length

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"{name!r}: this row has the fields {tuple(self._fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in self._fields.items())
        return f"<Row {shapes} prefix_length={self.prefix_length}>"


# ---- For producers


def join_rows(rows: object, others: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Make the fields of a record of a sample's rows."""
    listed = _listed(rows)
    names = [name for name in listed[0] if name != PREFIX]
    lengths = np.zeros((len(listed), 2), np.int64)
    values: dict[str, list[Any]] = {name: [] for name in names}
    for number, row in enumerate(listed):
        _check_names(number, row, names, others)
        taken = {name: _sequence(number, name, row[name]) for name in names}
        lengths[number] = _row_length(number, taken), 0
        lengths[number, 1] = _prefix(number, row, int(lengths[number, 0]))
        for name, value in taken.items():
            values[name].append(value)
    return [(_core.ROW_LENGTHS, lengths), *((name, _joined(name, values[name])) for name in names)]


def _listed(rows: object) -> list[Mapping[str, Any]]:
    # No iterator: a put that waits for space reads the rows again.
    if not isinstance(rows, (list, tuple)):
        raise TypeError(
            f"rows: expected a list of mappings, one a row, got {type(rows).__name__}; pass "
            "rows=[{'tokens': ...}, {'tokens': ...}]"
        )
    listed = list(rows)
    if not listed:
        raise ValueError("rows: expected at least one, got none; leave rows= out, or give one")
    for number, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise TypeError(
                f"rows: row {number}: expected a mapping of names to arrays, got "
                f"{type(row).__name__}"
            )
    return listed


def _check_names(
    number: int, row: Mapping[str, Any], names: list[str], others: tuple[str, ...]
) -> None:
    given = [name for name in row if name != PREFIX]
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"rows: row {number}: expected str names, got {name!r}")
        if is_argument(name):
            raise ValueError(
                f"rows: row {number}: {name!r} belongs to the sample, not to a row; pass it beside "
                "rows="
            )
        if name in others:
            raise ValueError(
                f"rows: row {number}: {name!r} is a field of the sample, too; give it in the rows "
                "or beside rows=, not both"
            )
    if not given:
        raise ValueError(f"rows: row {number}: expected at least one field, got none")
    missing = [name for name in names if name not in row]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        raise ValueError(
            f"rows: row {number}: expected the fields of row 0, {', '.join(names)}, got "
            f"{', '.join(given)}; give each row the same fields"
        )


def _sequence(number: int, name: str, value: Any) -> Any:
    """Return a list, or an array of at least one dimension."""
    if isinstance(value, (list, tuple)):
        return value
    try:
        array = value if type(value) is np.ndarray else as_array(name, value)
    except TypeError as error:
        raise TypeError(f"rows: row {number}: {error}") from error
    if array.ndim == 0:
        raise ValueError(
            f"rows: row {number}: {name}: expected an element a token, got a single number; what "
            "the whole sample has goes beside rows="
        )
    return array


def _row_length(number: int, fields: dict[str, Any]) -> int:
    first, length = next((name, len(value)) for name, value in fields.items())
    for name, value in fields.items():
        if len(value) != length:
            raise ValueError(
                f"rows: row {number}: {name}: expected {length} elements, as in {first}, got "
                f"{len(value)}; give every field of a row the same length, and pass fields of the "
                "whole sample beside rows="
            )
    if length == 0:
        raise ValueError(f"rows: row {number}: {first}: expected at least one element, got none")
    return length


def _prefix(number: int, row: Mapping[str, Any], length: int) -> int:
    prefix = row.get(PREFIX)
    if prefix is None:
        return 0
    return check_int(f"rows: row {number}: {PREFIX}", prefix, 0, length)


def _joined(name: str, values: list[Any]) -> Any:
    """Join the rows' arrays into an array, or their lists into a list."""
    first = values[0]
    of_lists = not isinstance(first, np.ndarray)
    for number, value in enumerate(values):
        if isinstance(value, np.ndarray) == of_lists:
            raise TypeError(
                f"rows: row {number}: {name}: expected {'a list' if of_lists else 'an array'}, as "
                f"row 0 has, got {'an array' if of_lists else 'a list'}; give all rows the same"
            )
        if not of_lists and (value.dtype != first.dtype or value.shape[1:] != first.shape[1:]):
            raise ValueError(
                f"rows: row {number}: {name}: expected {first.dtype} elements of shape "
                f"{first.shape[1:]}, as row 0 has, got {value.dtype} of shape {value.shape[1:]}"
            )
    if of_lists:
        return list(itertools.chain.from_iterable(values))
    return np.concatenate(values, dtype=first.dtype)  # with a stand-in's name


# ---- For consumers


def row_fields(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of row fields among those of a record."""
    if _core.ROW_LENGTHS not in names:
        return names
    return names[names.index(_core.ROW_LENGTHS) + 1 :]


def row_lengths(trajectory: _Fields) -> NDArray[np.int64] | None:
    """Return length and prefix length of each row of a sample, after their check."""
    if _core.ROW_LENGTHS not in trajectory:
        return None
    lengths = trajectory[_core.ROW_LENGTHS]
    if lengths.dtype != np.int64 or lengths.ndim != 2 or lengths.shape[1] != 2:
        raise _damaged(trajectory, f"{lengths.dtype} {list(lengths.shape)}")
    rows = lengths[:, 0]
    fields = row_fields(trajectory.keys())
    # The maximum before the sum, which might overflow int64.
    total = trajectory.shape(fields[0])[:1] if fields else ()
    good = (
        len(rows) > 0
        and len(total) == 1
        and all(trajectory.shape(name)[:1] == total for name in fields)
        and bool((rows > 0).all() and (rows <= total[0]).all())
        and int(rows.sum(dtype=object)) == total[0]
        and bool((lengths[:, 1] >= 0).all() and (lengths[:, 1] <= rows).all())
    )
    if not good:
        raise _damaged(trajectory, "others")
    return lengths


def _damaged(trajectory: _Fields, got: str) -> ValueError:
    return ValueError(
        f"trajectory {trajectory.instance_id!r}[{trajectory.index}] of producer "
        f"{trajectory.producer_id}: field {_core.ROW_LENGTHS!r}: expected int64 [rows, 2] that add "
        f"up to the fields behind it, got {got}; its producer wrote past put's checks"
    )


def rows_of(trajectory: _Fields) -> list[Row]:
    """Cut a sample into its rows."""
    lengths = row_lengths(trajectory)
    names = row_fields(trajectory.keys())
    fields = {name: trajectory[name] for name in names}
    if lengths is None:
        return [Row(fields, 0)]
    rows = []
    end = 0
    for length, prefix in lengths.tolist():
        start, end = end, end + length
        rows.append(Row({name: value[start:end] for name, value in fields.items()}, prefix))
    return rows


def put_rows(trajectory: _Fields) -> dict[str, Any]:
    """Return the keywords of `put` for a sample's fields."""
    names = trajectory.keys()
    if _core.ROW_LENGTHS not in names:
        return {name: trajectory[name] for name in names}
    whole = names[: names.index(_core.ROW_LENGTHS)]
    rows = [{**row, PREFIX: row.prefix_length} for row in rows_of(trajectory)]
    return {**{name: trajectory[name] for name in whole}, "rows": rows}
