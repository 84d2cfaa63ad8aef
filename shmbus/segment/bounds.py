"""A bus's limits beside its space: room for requests, and the producers' lead."""

from __future__ import annotations

from typing import NamedTuple

from shmbus.base.arguments import check_int, parse_size
from shmbus.base.format import show_size
from shmbus_ext import _core


class Bounds(NamedTuple):
    """The bounds in the core's form; 0 for the core's own choice, or for no bound."""

    request_bytes: int = 0
    max_lead: int = 0
    #: `max_lead_versions` plus 1.
    max_versions: int = 0

    def misfits(self, segment: _core.Segment) -> list[str]:
        """Name the differences between an existing bus and the requested bounds."""
        wrong = []
        _, _, max_lead, versions, _ = _core.lead_state(segment)
        if self.max_lead and max_lead != self.max_lead:
            wrong.append(f"max_lead: expected {self.max_lead}, got {max_lead or None}")
        if self.max_versions and versions + 1 != self.max_versions:
            got = versions if versions >= 0 else None
            wrong.append(f"max_lead_versions: expected {self.max_versions - 1}, got {got}")
        room = _core.request_bytes(segment)
        if room < self.request_bytes:
            wrong.append(
                f"request_capacity: expected {show_size(self.request_bytes)}, got {show_size(room)}"
            )
        return wrong


#: The core's choices.
NO_BOUNDS = Bounds()


def check_bounds(
    request_capacity: int | str | None = None,
    max_lead: int | None = None,
    max_lead_versions: int | None = None,
) -> Bounds:
    """Check arguments of `Bus.create` with these names."""
    requests = 0
    if request_capacity is not None:
        requests = parse_size(request_capacity, "request_capacity")
        if not _core.REQUEST_MIN_BYTES <= requests <= _core.REQUEST_MAX_BYTES:
            raise ValueError(
                f"request_capacity: expected {_core.REQUEST_MIN_BYTES} (64 KiB) to "
                f"{_core.REQUEST_MAX_BYTES} (4 GiB) bytes, got {requests}; leave it out for a 32nd "
                "of the capacity"
            )
    groups = 0 if max_lead is None else check_int("max_lead", max_lead, 1, _core.LEAD_ROWS)
    if max_lead_versions is None:
        return Bounds(requests, groups)
    versions = check_int("max_lead_versions", max_lead_versions, 0, _core.LEAD_ROWS - 1)
    return Bounds(requests, groups, versions + 1)
