"""The declared schema of a segment's file, for operators.

Invariant: texts are escaped here, and a damaged schema is a text and no exception: whoever reads
the bus goes on without it.
"""

from __future__ import annotations

import msgspec

from shmbus import errors
from shmbus._format import printable, table
from shmbus._schema import SchemaField, fields_of
from shmbus.inspect.segment_file import SegmentFile

__all__ = ["read_schema", "schema_text"]


def read_schema(file: SegmentFile) -> tuple[list[SchemaField] | None, str]:
    """Read the fields that a bus declares, None for no schema; and why they cannot be read."""
    try:
        declared = file.schema()
        fields = () if declared is None else fields_of(declared)
    except (errors.LayoutMismatchError, TypeError) as error:
        return None, printable(str(error))
    if declared is None:
        return None, ""
    return [
        msgspec.structs.replace(field, name=printable(field.name), dtype=printable(field.dtype))
        for field in fields
    ], ""


def schema_text(fields: list[SchemaField] | None, problem: str) -> str:
    """Lay out a schema as a block of text; "" for none."""
    if problem:
        return f"schema  cannot be read: {problem}"
    if fields is None:
        return ""
    rows = [
        (
            field.name,
            field.dtype,
            "any" if field.shape is None else _shape_text(field.shape),
            "" if field.required else "may be missing",
        )
        for field in fields
    ]
    return f"schema\n{table(('field', 'dtype', 'shape', ''), rows)}"


def _shape_text(shape: tuple[int | str | None, ...]) -> str:
    return f"[{', '.join('*' if size is None else printable(str(size)) for size in shape)}]"
