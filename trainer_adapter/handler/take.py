"""Taking groups from the bus, for the thread that asks for a batch and for the one that prefetches.

Invariant: a `Take` refers to the Consumer alone. A waiting thread holds one, and would keep the
handler alive if that were part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.handler.planner import BatchPlanner

__all__ = [
    "QUIET_NOTE_S",
    "Look",
    "Take",
    "take_groups",
    "take_shard",
    "take_until_due",
    "take_with",
]

#: Groups taken from the bus in one call.
TAKE_GROUPS: Final = 64
#: Seconds between two notes in the log while no complete group is delivered.
QUIET_NOTE_S: Final = 30.0

#: Waits so many seconds for groups. The flag says whether the trainer waits for a batch; if not,
#: groups are wanted for a full one only.
Take: TypeAlias = Callable[[float, bool], "list[shmbus.Group]"]

#: Called before each wait of the trainer's thread: whether the bus was asked and gave nothing, and
#: until when the trainer waits. It offers prompts, raises where nothing can come any more, and
#: returns the seconds until it wants to be called again; None for never.
Look: TypeAlias = Callable[[bool, "float | None"], "float | None"]


def take_groups(consumer: shmbus.Consumer) -> Take:
    """Return a `Take` of any complete groups."""

    def take(seconds: float, awaited: bool) -> list[shmbus.Group]:
        return consumer.take(TAKE_GROUPS, seconds)

    return take


def take_shard(consumer: shmbus.Consumer, options: dict[str, Any]) -> Take:
    """Return a `Take` of this rank's shard of its next step."""

    def take(seconds: float, awaited: bool) -> list[shmbus.Group]:
        return consumer.take_shard(**options, timeout=seconds, only_full=not awaited)

    return take


def take_with(take: Take, work: Callable[[list[shmbus.Group]], list[shmbus.Group]]) -> Take:
    """Return a `Take` whose groups are worked on; where that fails, they wait for the next call."""
    waiting: list[shmbus.Group] = []

    def take_worked_on(seconds: float, awaited: bool) -> list[shmbus.Group]:
        nonlocal waiting
        waiting = waiting or take(seconds, awaited)
        done = work(waiting)
        waiting = []
        return done

    return take_worked_on


def take_until_due(
    planner: BatchPlanner[Batch],
    take: Take,
    admit: Callable[[], None],
    timeout: float | None,
    note: Callable[[], None],
    look: Look,
) -> bool:
    """Take groups until a batch is due, in the calling thread."""
    began_s = noted_s = now_s = time.monotonic()
    deadline_s = None if timeout is None else began_s + timeout
    if not planner.interrupted:
        # Not from when the groups that wait were taken: the bus may hold enough for a full batch.
        planner.restart_wait(began_s)
    planner.interrupted = True
    asked = came = False
    while True:
        look_s = look(asked and not came, deadline_s)
        now_s = time.monotonic()
        if planner.due(now_s, awaited=asked):
            planner.interrupted = False
            return True
        if asked and not came and deadline_s is not None and now_s >= deadline_s:
            return False
        waits_s = [noted_s + QUIET_NOTE_S - now_s]
        if deadline_s is not None:
            waits_s.append(deadline_s - now_s)
        if (left_s := planner.left_s(now_s)) is not None:
            waits_s.append(left_s)
        if look_s is not None:
            waits_s.append(look_s)
        inbox = planner.inbox
        # From one call of C to the other: an exception of a signal's handler in between finds the
        # groups in the inbox, or their leases go back.
        inbox.extend(take(max(min(waits_s), 0.0), True))
        asked = True
        came = bool(inbox)
        if inbox is not planner.inbox:
            # Another thread that waits for a batch has admitted the others.
            planner.adopt(inbox)
        if came:
            admit()
        now_s = time.monotonic()
        if came:
            noted_s = now_s
        elif now_s >= noted_s + QUIET_NOTE_S:
            noted_s = now_s
            note()
