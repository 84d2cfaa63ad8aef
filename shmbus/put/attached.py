"""A writer that is attached to a bus by name, watched while it waits, and moves to a successor.

Every verb of a Producer is a base class upon this one. Each keeps what it needs in attributes of
its own, and makes them in a method ``_begin_...`` that the Producer's constructor calls before it
attaches.

Invariants:

- Nothing that is given to the core refers to the writer, which so ends with its last reference.
- The core checks each record by the schema that was agreed on when the writer attached. A successor
  of the bus is gone on in only under that schema.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, TypedDict

import numpy as np

from shmbus import errors
from shmbus._fields import FieldSpec, parse_field
from shmbus._schema import Schema, agreed_schema, mapping_of, parse, require_same_schema
from shmbus.segment import lifecycle
from shmbus.stall import OnStall, Watch
from shmbus_ext import _core

__all__ = ["WAITS_FOR_SPACE", "Attach", "AttachedWriter", "ProducerOptions"]

#: What a writer waits for, in a report of a stall.
WAITS_FOR_SPACE: Final = "space in the ring"

#: What a writer does once its bus was removed: stay there, or wait for the next of that name.
Attach: TypeAlias = Literal["same", "successor"]


class ProducerOptions(TypedDict, total=False):
    """Keyword arguments of `Producer`, which documents them; each may be left out."""

    checksum: bool
    label: str | None
    on_stall: OnStall
    stall_timeout: float
    attach: Attach
    schema: Schema | None


class AttachedWriter(_core.Writer):
    """A writer of the core with the name of its bus, and the watch over its waits."""

    name: str
    _attach: Attach
    _wait: float | None
    _watch: Watch
    _own_schema: _core.DeclaredSchema | None

    def _open(self, label: str, checksum: bool) -> None:
        """Attach to the bus of that name, once there is one."""
        lifecycle.wait_for_bus(self.name, self._wait)
        segment = lifecycle.open_segment(self.name)
        try:
            declared = agreed_schema(segment, self._own_schema)
            _core.Writer.__init__(self, segment, label, checksum)
        except BaseException:
            segment.close()
            raise
        self._declare(declared)
        self._watch_space(segment)
        if self._attach == "successor":
            self._follow()

    def _watch_space(self, segment: _core.Segment) -> None:
        if self._watch.slice_s is not None:
            check = functools.partial(self._watch.check, segment, WAITS_FOR_SPACE)
            self._watch_waits(check, self._watch.slice_s)

    def _successor(self) -> _core.Segment | None:
        """Open the bus that has taken the place of the removed one; C moves there."""
        segment = lifecycle.open_if_there(self.name)
        if segment is not None:
            try:
                require_same_schema(segment, self._own_schema, self._declared)
            except BaseException:
                segment.close()
                raise
            self._watch_space(segment)
        return segment

    def _here(self) -> _core.Segment:
        """Return the segment to read: the successor's, where there is one and this may follow."""
        if self._attach == "successor" and self._segment.removed:
            with contextlib.suppress(errors.BusRemovedError):
                self._go_on(0)
        return self._segment

    def _begin_schema(self, schema: Schema | None) -> None:
        self._own_schema = None if schema is None else parse(schema)

    @property
    def schema(self) -> dict[str, tuple[str, Any]] | None:
        """By name the (dtype, shape) that each `put` is checked by; None without a schema.

        The bus's, or this producer's own; ``Producer(name, schema=...)`` takes it again.
        """
        return None if self._declared is None else mapping_of(self._declared)

    def _parse_fields(
        self, fields: Mapping[str, FieldSpec]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Check the fields of a reservation; the schema has the dtypes that are not given."""
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"fields: expected a mapping of names to (dtype, shape), got "
                f"{type(fields).__name__}"
            )
        return {name: parse_field(name, spec, self._dtype(name)) for name, spec in fields.items()}

    def _dtype(self, name: str) -> np.dtype[Any] | None:
        if self._declared is not None:
            return self._declared.dtype(name)
        return _core.STANDARD_DTYPES.get(name)
