"""A writer that is attached to a bus by name, watched while it waits, and moves to a successor.

Every verb of a Producer is a base class upon this one. Each keeps what it needs in attributes of
its own, and makes them in a method ``_begin_...`` that the Producer's constructor calls before it
attaches.

Invariant: nothing that is given to the core refers to the writer, which so ends with its last
reference.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Final, Literal, TypeAlias, TypedDict

from shmbus import errors
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


class AttachedWriter(_core.Writer):
    """A writer of the core with the name of its bus, and the watch over its waits."""

    name: str
    _attach: Attach
    _wait: float | None
    _watch: Watch

    def _open(self, label: str, checksum: bool) -> None:
        """Attach to the bus of that name, once there is one."""
        lifecycle.wait_for_bus(self.name, self._wait)
        segment = lifecycle.open_segment(self.name)
        try:
            _core.Writer.__init__(self, segment, label, checksum)
        except BaseException:
            segment.close()
            raise
        self._watch_space(segment)
        if self._attach == "successor":
            self._follow()

    def _watch_space(self, segment: _core.Segment) -> None:
        if self._watch.slice_s is not None:
            look = functools.partial(self._watch.check, segment, WAITS_FOR_SPACE)
            self._watch_waits(look, self._watch.slice_s)

    def _successor(self) -> _core.Segment | None:
        """Open the bus that has taken the place of the removed one; C moves there."""
        segment = lifecycle.open_if_there(self.name)
        if segment is not None:
            self._watch_space(segment)
        return segment

    def _here(self) -> _core.Segment:
        """Return the segment to read: the successor's, where there is one and this may follow."""
        if self._attach == "successor" and self._segment.removed:
            with contextlib.suppress(errors.BusRemovedError):
                self._go_on(0)
        return self._segment
