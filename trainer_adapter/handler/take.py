"""Taking groups from the bus, for the thread asking for a batch and for the prefetching thread.

Invariant: a `Take` refers to the Consumer alone. A waiting thread holds a `Take`, and would keep
the handler alive through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.handler.group_calls import WORK_SLICE_S, GroupAnnotation, GroupScoring
from trainer_adapter.handler.planner import BatchPlanner

#: Groups taken from the bus in one call.
TAKE_GROUPS: Final = 64
#: Seconds between two notes in the log while no complete group is delivered.
QUIET_NOTE_S: Final = 30.0

#: Waits some seconds for groups. The flag is true while the trainer waits for a batch; if false,
#: groups are wanted for a full batch only.
Take: TypeAlias = Callable[[float, bool], "list[shmbus.Group]"]

#: Called before each wait of the trainer's thread: with True if the bus was asked and gave nothing,
#: and with the deadline of the trainer's wait. It offers prompts, raises if no batch can come any
#: more, and returns the seconds until its next call; None for never.
Look: TypeAlias = Callable[[bool, "float | None"], "float | None"]


def take_from(consumer: shmbus.Consumer, step: dict[str, Any] | None) -> Take:
    """Return a `Take` of any complete groups, or of this rank's shard of its next step."""

    def take(seconds: float, awaited: bool) -> list[shmbus.Group]:
        if step is None:
            return consumer.take(TAKE_GROUPS, seconds)
        return consumer.take_shard(**step, timeout=seconds, only_full=not awaited)

    return take


class WorkedOn:
    """A `Take` with work on its groups; unfinished groups wait for the next call."""

    def __init__(
        self, take: Take, works: Sequence[GroupScoring | GroupAnnotation], *, whole: bool
    ) -> None:
        self._take = take
        self._works = works
        #: True if the groups of a take stay together, like a shard of a step.
        self._whole = whole
        self._waiting: list[shmbus.Group] = []
        #: True if the caller of a batch waits for a limited time.
        self.bounded = False

    def __call__(self, seconds: float, awaited: bool) -> list[shmbus.Group]:
        """Take groups, and return the finished groups."""
        began_s = time.monotonic()
        room = len(self._waiting) < TAKE_GROUPS and not (self._whole and self._waiting)
        if room:
            self._waiting += self._take(0.0 if self._waiting else seconds, awaited)
        rest = self._waiting
        for work in self._works:
            left_s = max(0.0, began_s + seconds - time.monotonic())
            left_s = left_s if self._whole else min(left_s, WORK_SLICE_S)
            work.run(rest, left_s if self.bounded or work.is_async else None)
            rest = [group for group in rest if work.is_done(group)]
        if self._whole and len(rest) < len(self._waiting):
            return []
        done = {id(group) for group in rest}
        self._waiting = [group for group in self._waiting if id(group) not in done]
        return [group for group in rest if group.state == "leased"]

    def describe(self) -> str:
        """Describe the longest-running work on a group; empty without any."""
        texts = (calls.describe() for work in self._works for calls in work.calls)
        return next(filter(None, texts), "")


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
        # Not since the waiting groups were taken: the bus may hold enough for a full batch.
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
            # Another thread waiting for a batch admitted the rest.
            planner.adopt(inbox)
        if came:
            admit()
        now_s = time.monotonic()
        if came:
            noted_s = now_s
        elif now_s >= noted_s + QUIET_NOTE_S:
            noted_s = now_s
            note()
