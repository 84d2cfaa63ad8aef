"""Which groups make the next batch, and when: a pure state machine, as the stash is.

No clock (time is an argument), no thread, no lock, no socket, no torch. The handler takes groups
from the bus and packs them; `Prefetcher` does so in a thread. Both decide by this planner, and
keep their groups here. A group moves through three places, each a field of `BatchPlanner`::

    waiting --made--> ready --hand_out--> out --acknowledged-->
       ^                |                  |
       +----recall------+----give_back-----+

Invariants:

- A group is in exactly one of these places until it ends. While its batch is being packed it still
  waits, so a failure in between needs nothing undone.
- A batch is the first groups that wait, and whole: up to a budget of tokens, a number of groups,
  or one shard.
- A shard, which is a rank's part of a step, is never cut and never joined with another, however
  often its groups go and return: all ranks make as many batches.
- The time of `max_wait` runs exactly while a group waits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import shmbus

__all__ = ["BatchPlanner", "MadeBatch", "PlannedGroup"]

BatchT = TypeVar("BatchT")


class PlannedGroup(NamedTuple):
    """A group with its tokens, all samples together, and the number of its shard."""

    group: shmbus.Group
    tokens: int
    shard: int


@dataclass(slots=True)
class MadeBatch(Generic[BatchT]):
    """A packed batch with the groups that it was made of."""

    batch: BatchT
    planned: list[PlannedGroup]


class BatchPlanner(Generic[BatchT]):
    """Groups and batches of one handler, from the bus to their acknowledgement.

    Parameters
    ----------
    tokens_per_batch, groups_per_batch : int or None
        The budget of a batch; one of them. A group larger than `tokens_per_batch` comes alone.
    max_wait_s : float or None
        Seconds after which a batch is due though it is not full; None until it is full.
    world_size : int
        With several ranks a batch is one shard: the groups of one `add`. The daemon has formed it
        by the budget and `max_wait_s`.

    Attributes
    ----------
    waiting : deque of PlannedGroup
        Groups that are in no batch yet, in their order.
    ready : deque of MadeBatch or BaseException
        Batches that were packed and not handed out, and errors in the place of their batches.
    out : dict of int to MadeBatch
        Batches that the trainer has, by their step, until it acknowledges them.
    """

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
        self._since_s: float | None = None
        self.waiting: deque[PlannedGroup] = deque()
        self.ready: deque[MadeBatch[BatchT] | BaseException] = deque()
        self.out: dict[int, MadeBatch[BatchT]] = {}

    # -- groups that wait -----------------------------------------------------------------------

    @property
    def groups(self) -> list[shmbus.Group]:
        """The groups that wait, in their order."""
        return [planned.group for planned in self.waiting]

    def add(self, groups: Iterable[tuple[shmbus.Group, int]], now_s: float) -> None:
        """Have groups wait, behind all others.

        Parameters
        ----------
        groups : iterable of (shmbus.Group, int)
            Each with its tokens; together they are a shard.
        now_s : float
        """
        shard = next(self._shards)
        self.waiting.extend(PlannedGroup(group, tokens, shard) for group, tokens in groups)
        self._wait_on(now_s)

    def keep(self, keeps: Callable[[shmbus.Group], bool]) -> None:
        """Forget waiting groups, which the caller ends.

        Parameters
        ----------
        keeps : callable
            False for a group to forget.
        """
        self.waiting = deque(planned for planned in self.waiting if keeps(planned.group))
        if not self.waiting:
            self._since_s = None

    # -- when a batch is due --------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether no other group could go into the next batch."""
        if self._world_size != 1:
            return bool(self.waiting)
        if self._groups is not None:
            return len(self.waiting) >= self._groups
        return bool(self.waiting) and (
            self._count() < len(self.waiting)
            or sum(planned.tokens for planned in self.waiting) >= (self._tokens or 0)
        )

    def due(self, now_s: float, *, awaited: bool = True) -> bool:
        """Whether to make a batch: a full one, or an awaited one that has waited long enough.

        Parameters
        ----------
        now_s : float
        awaited : bool
            Whether the trainer waits for it. If not, a batch can wait until it is full.

        Returns
        -------
        bool
        """
        if self.full:
            return True
        left_s = self.left_s(now_s) if awaited else None
        return left_s is not None and left_s <= 0

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until `max_wait_s` is over.

        Parameters
        ----------
        now_s : float

        Returns
        -------
        float or None
            None if no group waits, or if `max_wait_s` is None.
        """
        if self._max_wait_s is None or self._since_s is None:
            return None
        return self._since_s + self._max_wait_s - now_s

    def restart_wait(self, now_s: float) -> None:
        """Count `max_wait_s` from now on, if a group waits."""
        self._since_s = now_s if self.waiting else None

    def _wait_on(self, now_s: float) -> None:
        if self._since_s is None and self.waiting:
            self._since_s = now_s

    # -- batches --------------------------------------------------------------------------------

    def next_groups(self) -> list[PlannedGroup]:
        """Return the groups of the next batch, which still wait until it is `made`.

        Returns
        -------
        list[PlannedGroup]
            Empty if no group waits.
        """
        return list(itertools.islice(self.waiting, self._count()))

    def made(self, planned: list[PlannedGroup], batch: BatchT) -> None:
        """Move groups from those that wait to a batch that is ready.

        Parameters
        ----------
        planned : list[PlannedGroup]
            From `next_groups`.
        batch : BatchT
            Packed from them.

        Raises
        ------
        RuntimeError
            They do not wait any more: another thread made a batch of them.
        """
        if not self.waiting or self.waiting[0] is not planned[0]:
            raise RuntimeError(
                "OnlineDataHandler: expected one thread at a time in next_batch, got two that made "
                "one batch; let them take turns"
            )
        for _ in planned:
            self.waiting.popleft()
        if not self.waiting:
            self._since_s = None
        self.ready.append(MadeBatch(batch, planned))

    def hand_out(self, step: int) -> BatchT:
        """Move the first batch that is ready to those that are out.

        Parameters
        ----------
        step : int
            Its key there.

        Returns
        -------
        BatchT

        Raises
        ------
        BaseException
            The error in the place of the batch, once.
        """
        first = self.ready.popleft()
        if isinstance(first, BaseException):
            raise first
        self.out[step] = first
        return first.batch

    def is_out(self, step: int, batch: BatchT) -> bool:
        """Whether this batch was handed out as this step, and is neither acknowledged nor back."""
        made = self.out.get(step)
        return made is not None and made.batch is batch

    def acknowledged(self, step: int) -> None:
        """Forget a batch that was out."""
        del self.out[step]

    def give_back(self, step: int, now_s: float) -> None:
        """Have the groups of a batch that was out wait again, before all others.

        Ready batches are recalled, since they are behind it in order.

        Parameters
        ----------
        step : int
        now_s : float
        """
        self.recall(now_s)
        self._put_first(self.out[step], now_s)
        del self.out[step]

    def recall(self, now_s: float) -> None:
        """Have the groups of all ready batches wait again, in their order; errors stay.

        Parameters
        ----------
        now_s : float
        """
        ready, self.ready = self.ready, deque()
        for made in reversed(ready):
            if isinstance(made, BaseException):
                self.ready.appendleft(made)
            else:
                self._put_first(made, now_s)

    def _put_first(self, made: MadeBatch[BatchT], now_s: float) -> None:
        self.waiting.extendleft(reversed(made.planned))
        self._wait_on(now_s)

    def _count(self) -> int:
        """Count the groups of the next batch."""
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
        """Return this budget as options of `Consumer.take_step`.

        Returns
        -------
        dict
            groups, tokens and max_wait.
        """
        return {"groups": self._groups, "tokens": self._tokens, "max_wait": self._max_wait_s}

    def step_requirement(self, trajectories: int) -> str:
        """Describe for a message the groups that a step of several ranks needs.

        Parameters
        ----------
        trajectories : int
            Trajectories in complete groups that are not acknowledged.

        Returns
        -------
        str
            Empty for one rank.
        """
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
