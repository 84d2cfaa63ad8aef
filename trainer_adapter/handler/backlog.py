"""Groups that wait to become batches, in their order: what a handler holds, and where it cuts.

Invariants:

- A batch is the first groups of the backlog, and whole: up to a budget of tokens, so many groups,
  or one shard.
- A shard, which is a rank's part of a step, is never cut and never joined with another, however
  often its groups go and come back: all ranks make as many batches.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import shmbus

__all__ = ["Backlog", "Held"]


class Held(NamedTuple):
    """A group with its tokens, and the number of its shard."""

    group: shmbus.Group
    tokens: int
    shard: int


class Backlog:
    """Groups for the next batches.

    Parameters
    ----------
    tokens, groups : int or None
        Of a batch; one of them. A larger group comes alone.
    sharded : bool
        A batch is what one `add` brought.
    """

    def __init__(self, tokens: int | None, groups: int | None, *, sharded: bool) -> None:
        self._tokens = tokens
        self._groups = groups
        self._sharded = sharded
        self._held: deque[Held] = deque()
        self._shards = itertools.count()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def groups(self) -> list[shmbus.Group]:
        """Those that are held, in their order."""
        return [held.group for held in self._held]

    def add(self, groups: Iterable[tuple[shmbus.Group, int]]) -> None:
        """Hold groups with their tokens, behind all others."""
        shard = next(self._shards)
        self._held.extend(Held(group, tokens, shard) for group, tokens in groups)

    def put_first(self, groups: Iterable[tuple[shmbus.Group, int]]) -> None:
        """Hold the groups of a batch again, before all others."""
        shard = next(self._shards)
        self.put_back([Held(group, tokens, shard) for group, tokens in groups])

    def put_back(self, held: list[Held]) -> None:
        """Undo a `cut`, or what is left of it."""
        self._held.extendleft(reversed(held))

    def keep(self, keeps: Callable[[shmbus.Group], bool]) -> None:
        """Let go of all groups but those that `keeps` says."""
        self._held = deque(held for held in self._held if keeps(held.group))

    @property
    def full(self) -> bool:
        """Whether no other group could go into the next batch."""
        if self._sharded:
            return bool(self._held)
        if self._groups is not None:
            return len(self._held) >= self._groups
        return bool(self._held) and (
            self._count() < len(self._held)
            or sum(held.tokens for held in self._held) >= (self._tokens or 0)
        )

    def cut(self) -> list[Held]:
        """Take out the groups of the next batch."""
        return [self._held.popleft() for _ in range(self._count())]

    def _count(self) -> int:
        """How many of the groups held make the next batch."""
        if self._sharded:
            return sum(held.shard == self._held[0].shard for held in self._held)
        if self._groups is not None:
            return min(len(self._held), self._groups)
        assert self._tokens is not None
        total = 0
        for count, held in enumerate(self._held):
            total += held.tokens
            if total > self._tokens:
                return max(count, 1)
        return len(self._held)
