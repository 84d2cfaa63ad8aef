"""The history of one group, for the page that asks for it.

Invariant: an answer is bounded, and says what it leaves out; an unreadable bus is an answer too.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from shmbus import errors
from shmbus._format import printable, unprinted
from shmbus.inspect.history import read_group
from shmbus.web import settings
from shmbus_ext import _core

__all__ = ["CANNOT", "GroupName", "fits", "read_history"]

#: What a bus raises that cannot be read now; anything else is a mistake of ours.
CANNOT: Final = (errors.ShmbusError, OSError, ValueError)


class GroupName(msgspec.Struct, frozen=True):
    """Which group."""

    instance_id: str
    round: int | None
    split: str


def fits(about: GroupName) -> bool:
    """Whether a group can have this name, or one that is shown so."""
    try:
        size = len(unprinted(about.instance_id).encode())
        label = len(unprinted(about.split).encode())
    except UnicodeEncodeError:
        return False
    round = about.round or 0
    return (
        1 <= size <= _core.MAX_ID_BYTES
        and 1 <= label <= _core.SPLIT_LABEL_BYTES
        and -(2**63) < round < 2**63
    )


def read_history(name: str, about: GroupName) -> dict[str, Any]:
    """Read where a group is and what happened to it."""
    try:
        found = read_group(name, about.instance_id, round=about.round, split=about.split)
    except CANNOT as error:
        return {"state": "unknown", "events": [], "problem": printable(str(error))}
    if found.group is not None:
        cells = found.group.cells
        shown = [cell for cell in cells if cell.index < settings.CELLS]
        omitted = found.group.cells_omitted + len(cells) - len(shown)
        group = msgspec.structs.replace(found.group, cells=shown, cells_omitted=omitted)
        found = msgspec.structs.replace(found, group=group)
    told: dict[str, Any] = msgspec.to_builtins(found)
    return {**told, "now": time.time()}
