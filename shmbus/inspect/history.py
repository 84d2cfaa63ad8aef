"""History of a bus, and of a single group: from its daemon, and from the records.

Invariants: texts are escaped here, before they enter a struct; unknown facts are reported as
unknown.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

import msgspec

from shmbus.base import limits
from shmbus.base.format import printable, unprinted
from shmbus.control.ask import ask_events, ask_group
from shmbus.data.status_types import BusEvent, GroupCells, GroupState
from shmbus.inspect.groups import WALK_RECORDS, joined
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.undelivered import OpenGroups, counters
from shmbus.segment.names import check_name
from shmbus_ext import _core

_NO_DAEMON = "events are kept by a daemon, and none serves this bus: `shmbus serve`"


class EventList(msgspec.Struct, frozen=True, kw_only=True):
    """Events, oldest first."""

    #: The newest.
    events: list[BusEvent]
    #: The number to go on from.
    newest: int = 0
    #: Events after the requested number that are missing from the list.
    missed: int = 0
    #: Reason for an empty list; "" without an obstacle.
    problem: str = ""


class GroupHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Place and events of a group."""

    #: Source of the history; none: too many records to sort from outside.
    source: Literal["daemon", "records", "none"]
    #: "gone" also for a group that never reached the bus.
    state: GroupState
    #: Its samples: commits, failures, claims. None for an absent group.
    group: GroupCells | None = None
    #: The trainer that leases the group.
    holder: str = ""
    held_s: float = 0.0
    #: A daemon's memory of the group, oldest first.
    events: list[BusEvent] = []
    #: Unknown facts, with reasons.
    problem: str = ""


def read_events(
    name: str, *, after: int = 0, limit: int = 100, groups: bool = True, trace: bool = False
) -> EventList:
    """Read what happened on a bus: the newest, or for a trace the oldest, with their samples."""
    with SegmentFile(check_name(name)) as file:
        file.require()
    limit = min(limit, limits.MAX_EVENTS_SHOWN)
    reply = ask_events(name, after, limit, groups=groups, trace=trace)
    if reply is None or isinstance(reply, str):
        return EventList(events=[], newest=after, problem=printable(reply or _NO_DAEMON))
    return EventList(
        events=[_escaped(each) for each in reply.events], newest=reply.newest, missed=reply.missed
    )


def read_group(
    name: str, instance_id: str, *, round: int | None = None, split: str = "train"
) -> GroupHistory:
    """Read the history of one group."""
    ids = (instance_id, unprinted(instance_id))
    for key, label in dict.fromkeys(product(ids, (split, unprinted(split)))):
        # A name with escapes may exceed the longest name.
        if len(key.encode()) <= _core.MAX_ID_BYTES or key == ids[1]:
            found = _read_group(name, key, label, round)
            if found.state != "gone" or found.events:
                break
    return found


def _read_group(name: str, instance_id: str, split: str, round: int | None) -> GroupHistory:
    with SegmentFile(check_name(name)) as file:
        file.require()
        reply = ask_group(name, instance_id, round, split)
        if reply is not None and not isinstance(reply, str):
            return GroupHistory(
                source="daemon",
                state=reply.state,
                group=None if reply.group is None else joined(file, [reply.group])[0],
                holder=printable(reply.holder),
                held_s=reply.held_s,
                events=[_escaped(each) for each in reply.events],
            )
        problem = printable(reply or _NO_DAEMON)
        released, committed, _ = counters(file)
        undelivered = max(0, sum(committed) - sum(released))
        if undelivered > WALK_RECORDS:
            return GroupHistory(source="none", state="gone", problem=problem)
        found = OpenGroups(file, undelivered).find(instance_id, round, split)
        if found is None:
            return GroupHistory(source="records", state="gone", problem=problem)
        shown = joined(file, [found])[0]
        return GroupHistory(source="records", state="open", group=shown, problem=problem)


def _escaped(event: BusEvent) -> BusEvent:
    return msgspec.structs.replace(
        event,
        who=printable(event.who),
        text=printable(event.text),
        instance_id=printable(event.instance_id),
        split=printable(event.split),
    )
