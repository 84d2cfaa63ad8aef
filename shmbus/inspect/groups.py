"""Incomplete groups of a bus, sample by sample: from its daemon, or from the records.

Invariants:

- The daemon comes first, in a single message; its stash keeps the groups sorted. Without a daemon
  the records are walked, up to a number of them, and omissions are reported.
- Texts are escaped here, before they enter a struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shmbus.base import limits
from shmbus.base.format import printable
from shmbus.control.ask import ask_groups
from shmbus.data.status_types import GroupCells, SampleCell, WantedStatus
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.tables import read_wanted, with_begun
from shmbus.inspect.undelivered import OpenGroups, counters
from shmbus.segment.names import check_name

#: Undelivered trajectories up to which the records are walked: some 0.2 s of work.
WALK_RECORDS = 20_000


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Incomplete groups."""

    #: Source of the list; none: too many records to sort from outside.
    source: Literal["daemon", "records", "none"]
    #: The oldest first.
    groups: list[GroupCells]
    #: Incomplete groups missing from the list, as far as known.
    omitted: int = 0
    #: Reason for an empty or short list; "" without an obstacle.
    problem: str = ""


def read_groups(
    name: str,
    count: int = 40,
    *,
    cells: int = limits.MAX_CELLS_SHOWN,
    walk_records: int = WALK_RECORDS,
    ask: bool = True,
) -> Groups:
    """Read the oldest incomplete groups of a bus."""
    count = min(count, limits.MAX_GROUPS_SHOWN)
    with SegmentFile(check_name(name)) as file:
        file.require()
        reply = ask_groups(name, count, cells) if ask else None
        if reply is not None and not isinstance(reply, str):
            return Groups(source="daemon", groups=joined(file, reply.groups), omitted=reply.omitted)
        problem = "" if reply is None else printable(reply)
        released, committed, _ = counters(file)
        undelivered = max(0, sum(committed) - sum(released))
        if undelivered > walk_records:
            return Groups(
                source="none",
                groups=[],
                problem=problem
                or f"{undelivered:,} undelivered trajectories are more than the {walk_records:,} "
                "that are sorted from outside; a daemon can say it: `shmbus serve`",
            )
        found, omitted = OpenGroups(file, undelivered).cells(count)
        return Groups(
            source="records", groups=joined(file, found), omitted=omitted, problem=problem
        )


def joined(file: SegmentFile, groups: Sequence[GroupCells]) -> list[GroupCells]:
    """Add what the segment says of the samples of groups, and escape their texts."""
    escaped = [_escaped(group) for group in with_begun(file, groups)]
    return _with_requests(escaped, read_wanted(file))


def _escaped(group: GroupCells) -> GroupCells:
    cells = [
        msgspec.structs.replace(cell, reason=printable(cell.reason)) if cell.reason else cell
        for cell in group.cells
    ]
    return msgspec.structs.replace(
        group, instance_id=printable(group.instance_id), split=printable(group.split), cells=cells
    )


def _with_requests(groups: list[GroupCells], wanted: list[WantedStatus]) -> list[GroupCells]:
    """Add the retry table's claims: the producers that make failed samples again."""
    if not wanted:
        return groups
    requests = {(each.instance_id, each.round, each.split, each.index): each for each in wanted}

    def with_request(group: GroupCells, cell: SampleCell) -> SampleCell:
        request = requests.get((group.instance_id, group.round, group.split, cell.index))
        if cell.state in ("there", "begun") or request is None:
            return cell
        return msgspec.structs.replace(cell, state="asked", taken_by=request.taken_by)

    return [
        msgspec.structs.replace(group, cells=[with_request(group, cell) for cell in group.cells])
        for group in groups
    ]
