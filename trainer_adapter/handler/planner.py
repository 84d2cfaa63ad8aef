"""Contents and time of the next batch: a pure state machine, like the stash.

No clock (time is an argument), no thread, no lock, no socket, no torch. The handler takes groups
from the bus and packs them; `Prefetcher` repeats this in a thread. Both decide by this planner, and
keep their groups here. A group moves through three places, each a field of `BatchPlanner`::

    waiting --made--> ready --hand_out--> out --acknowledged-->
       ^                |                  |
       +----recall------+----give_back-----+

Invariants:

- A group is in exactly one place until its end. While its batch is being packed the group still
  waits, so a failure in between needs no undo.
- A batch takes the first waiting groups, whole: up to a budget of tokens, a number of groups, or
  one shard.
- A shard, a rank's part of a step, is never cut and never joined with another, however often its
  groups go and return: every rank makes the same number of batches.
- The time of `max_wait` runs exactly while a group waits.
- Each change is one assignment: of a new `_Places`, or of one attribute. So an exception of a
  signal handler between any two steps finds every group in its old place or every group in its new
  place.
- Threads change places under a shared lock; `acknowledged` needs no lock.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import shmbus

BatchT = TypeVar("BatchT")

#: Groups for the mean of tokens per group, and the assumed number of groups per batch before the
#: first group.
RECENT_GROUPS: Final = 64
FIRST_GROUPS: Final = 8


class PlannedGroup(NamedTuple):
    """A group with the tokens of its samples together, and the number of its shard."""

    group: shmbus.Group
    tokens: int
    shard: int


@dataclass(slots=True)
class MadeBatch(Generic[BatchT]):
    """A packed batch with its groups, its packing seconds, and its acknowledgement."""

    batch: BatchT
    planned: list[PlannedGroup]
    packed_s: float = 0.0
    ended: bool = False


class _Places(NamedTuple):
    """Places of the groups at one instant; never changed, only replaced."""

    inbox: list[shmbus.Group]
    waiting: tuple[PlannedGroup, ...] = ()
    ready: tuple[MadeBatch[Any] | BaseException, ...] = ()
    out: dict[int, MadeBatch[Any]] = {}  # noqa: RUF012 (never changed)
    since_s: float | None = None
    step: int = 0

    def with_waiting(
        self, waiting: Iterable[PlannedGroup], now_s: float | None, **changes: Any
    ) -> _Places:
        """Return the places with new waiting groups; the wait's time runs while a group waits."""
        waiting = tuple(waiting)
        since_s = self.since_s if self.waiting and self.since_s is not None else now_s
        return self._replace(waiting=waiting, since_s=since_s if waiting else None, **changes)


class BatchPlanner(Generic[BatchT]):
    """Groups and batches of one handler, from the bus to their acknowledgement."""

    def __init__(
        self,
        tokens_per_batch: int | None,
        groups_per_batch: int | None,
        max_wait_s: float | None,
        world_size: int = 1,
    ) -> None:
        self._tokens = tokens_per_batch
        self._groups = groups_per_batch
        self._max_wait_s = max_wait_s
        self._world_size = world_size
        self._shards = itertools.count()
        self._places = _Places([])
        self._recent: deque[int] = deque(maxlen=RECENT_GROUPS)
        self.unsettled = False
        self.last = False
        self.interrupted = False

    # -- places ---------------------------------------------------------------------------------

    @property
    def inbox(self) -> list[shmbus.Group]:
        """Groups taken and not yet admitted; extended by the result of a take."""
        return self._places.inbox

    @property
    def waiting(self) -> tuple[PlannedGroup, ...]:
        """Groups outside of batches, in their order."""
        return self._places.waiting

    @property
    def ready(self) -> tuple[MadeBatch[BatchT] | BaseException, ...]:
        """Batches packed and not handed out, and errors in the place of their batches."""
        return self._places.ready

    @property
    def out(self) -> dict[int, MadeBatch[BatchT]]:
        """Batches at the trainer, by step, until their acknowledgement."""
        return {step: made for step, made in self._places.out.items() if not made.ended}

    @property
    def last_out(self) -> MadeBatch[BatchT] | None:
        """The last batch handed out, if still out."""
        made = self._places.out.get(self._places.step - 1)
        return None if made is None or made.ended else made

    @property
    def step(self) -> int:
        """The step of the next batch."""
        return self._places.step

    # -- waiting groups -------------------------------------------------------------------------

    @property
    def groups(self) -> list[shmbus.Group]:
        """The waiting groups, in their order."""
        return [planned.group for planned in self.waiting]

    def add(self, groups: Iterable[tuple[shmbus.Group, int]], now_s: float) -> None:
        """Append groups of the inbox to the waiting groups, and empty the inbox."""
        shard = next(self._shards)
        places = self._places
        new = [PlannedGroup(group, tokens, shard) for group, tokens in groups]
        self._recent.extend([planned.tokens for planned in new])
        self._places = places.with_waiting([*places.waiting, *new], now_s, inbox=[])

    def adopt(self, groups: list[shmbus.Group]) -> None:
        """Put groups found nowhere else into the inbox."""
        places = self._places
        made = [one for one in (*places.ready, *places.out.values()) if isinstance(one, MadeBatch)]
        known = {id(group) for group in places.inbox}
        for planned in (places.waiting, *(one.planned for one in made)):
            known |= {id(one.group) for one in planned}
        places.inbox.extend([group for group in groups if id(group) not in known])

    def keep(self, keeps: Callable[[shmbus.Group], bool]) -> None:
        """Forget waiting groups; the caller ends them."""
        places = self._places
        kept = [planned for planned in places.waiting if keeps(planned.group)]
        self._places = places.with_waiting(kept, None)

    def keep_leased(self) -> None:
        """Forget the waiting groups with an ended lease."""
        self.keep(lambda group: group.state == "leased")
        self.unsettled = False

    # -- due batches ----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """True if no further group fits into the next batch."""
        if self._world_size != 1:
            return bool(self.waiting)
        if self._groups is not None:
            return len(self.waiting) >= self._groups
        return bool(self.waiting) and (
            self._count() < len(self.waiting)
            or sum(planned.tokens for planned in self.waiting) >= (self._tokens or 0)
        )

    def due(self, now_s: float, *, awaited: bool = True) -> bool:
        """Return True for a full batch, or an awaited batch after its longest wait."""
        if self.full or (self.last and self.waiting):
            return True
        left_s = self.left_s(now_s) if awaited else None
        return left_s is not None and left_s <= 0

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until `max_wait_s` is over."""
        since_s = self._places.since_s
        if self._max_wait_s is None or since_s is None:
            return None
        return since_s + self._max_wait_s - now_s

    def restart_wait(self, now_s: float) -> None:
        """Count `max_wait_s` from now on, if a group waits."""
        places = self._places
        if places.waiting:
            self._places = places._replace(since_s=now_s)

    @property
    def wanted_text(self) -> str:
        """How many groups a batch needs, for a message: " of 16"; empty for a budget of tokens."""
        return f" of {self._groups}" if self._groups is not None and self._world_size == 1 else ""

    @property
    def missing_text(self) -> str:
        """What the next batch needs still, for a message: "2 more groups"; empty if unknown."""
        if self._groups is None or self._world_size > 1:
            return ""
        missing = max(1, self._groups - len(self.waiting))
        return f"{missing} more group{'s' * (missing > 1)}"

    @property
    def batch_groups(self) -> int:
        """Groups in one batch of every rank together; estimated from their tokens."""
        # A budget of tokens is divided by the mean of the last 64 groups; before the first group
        # the estimate is 8.
        if self._groups is not None:
            return self._groups * self._world_size
        mean = sum(self._recent) / len(self._recent) if self._recent else 0
        each = math.ceil((self._tokens or 0) / mean) if mean else FIRST_GROUPS
        return max(each, 1) * self._world_size

    # -- batches --------------------------------------------------------------------------------

    def next_groups(self) -> list[PlannedGroup]:
        """Return the groups of the next batch, still waiting until `made`."""
        return list(itertools.islice(self.waiting, self._count()))

    def made(self, planned: list[PlannedGroup], batch: BatchT, packed_s: float = 0.0) -> None:
        """Move waiting groups to a ready batch."""
        places = self._places
        if not places.waiting or places.waiting[0] is not planned[0]:
            raise RuntimeError(
                "OnlineDataHandler: expected one thread at a time in next_batch, got two that made "
                "one batch; let them take turns"
            )
        ready = (*places.ready, MadeBatch(batch, planned, packed_s))
        self._places = places.with_waiting(places.waiting[len(planned) :], None, ready=ready)

    def add_error(self, error: BaseException) -> None:
        """Put an error into the place of a batch, behind the ready batches."""
        places = self._places
        self._places = places._replace(ready=(*places.ready, error))

    def hand_out(self, step: int) -> BatchT:
        """Move the first ready batch to the batches out."""
        places = self._places
        first, *ready = places.ready
        if isinstance(first, BaseException):
            self._places = places._replace(ready=tuple(ready))
            raise first
        made: MadeBatch[BatchT] = first
        out = {**self.out, step: made}
        self._places = places._replace(ready=tuple(ready), out=out, step=step + 1)
        return made.batch

    def take_back(self) -> None:
        """Make the last batch handed out the first ready batch again."""
        places = self._places
        step = places.step - 1
        out = self.out
        ready = (out.pop(step), *places.ready)
        self._places = places._replace(ready=ready, out=out, step=step)

    def out_as(self, step: int) -> BatchT | None:
        """Return the batch handed out as this step; None after its end or return."""
        made = self._places.out.get(step)
        return None if made is None or made.ended else made.batch

    def acknowledged(self, step: int) -> None:
        """Forget a batch after its acknowledgement."""
        made = self._places.out[step]
        made.ended = True
        # The next batch reuses its memory.
        made.batch, made.planned = cast("BatchT", None), []

    def give_back(self, step: int, now_s: float) -> None:
        """Put the groups of an out batch before the waiting groups."""
        # Ready batches follow in order, so they are recalled too.
        places = self._recalled(now_s)
        out = self.out
        made = out.pop(step)
        self._places = places.with_waiting([*made.planned, *places.waiting], now_s, out=out)

    def recall(self, now_s: float) -> None:
        """Put the groups of every ready batch back to the waiting groups, in order; errors stay."""
        self._places = self._recalled(now_s)

    def begin_at(self, step: int, now_s: float) -> None:
        """Recall the ready batches, and count steps from this number on."""
        self._places = self._recalled(now_s)._replace(step=step)

    def _recalled(self, now_s: float) -> _Places:
        places = self._places
        made = [one for one in places.ready if isinstance(one, MadeBatch)]
        errors = tuple(one for one in places.ready if isinstance(one, BaseException))
        waiting = [*itertools.chain.from_iterable(one.planned for one in made), *places.waiting]
        return places.with_waiting(waiting, now_s, ready=errors)

    def _count(self) -> int:
        if self._world_size != 1:
            return sum(planned.shard == self.waiting[0].shard for planned in self.waiting)
        if self._groups is not None:
            return min(len(self.waiting), self._groups)
        assert self._tokens is not None
        total = 0
        for count, planned in enumerate(self.waiting):
            total += planned.tokens
            if total > self._tokens:
                return max(count, 1)
        return len(self.waiting)

    # -- steps of several ranks -----------------------------------------------------------------

    def step_options(self) -> dict[str, Any]:
        """Return this budget as options of `Consumer.take_shard`."""
        return {"groups": self._groups, "tokens": self._tokens, "max_wait": self._max_wait_s}

    @property
    def least_groups(self) -> int:
        """Minimum of groups for a step; on a single rank, for the last batch."""
        if self._world_size > 1 and self._max_wait_s is None and self._groups is not None:
            return self._groups * self._world_size
        return self._world_size

    def step_requirement(self, trajectories: int) -> str:
        """Describe for a message the groups that a step of several ranks needs."""
        if self._world_size == 1:
            return ""
        if self._max_wait_s is not None:
            least = f"{self._world_size} complete groups or more, one for each rank"
        elif self._groups is not None:
            least = (
                f"{self._groups * self._world_size} complete groups, "
                f"groups_per_batch={self._groups} for each rank"
            )
        else:
            least = f"complete groups of tokens_per_batch={self._tokens} tokens for each rank"
        return (
            f"a step of world_size={self._world_size}: expected {least}, got {trajectories} "
            "trajectories in complete groups that are not acknowledged; put more groups, or lower "
            "one of these, or set max_wait"
        )
