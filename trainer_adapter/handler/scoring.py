"""Scores of samples that were put without one, given before their groups go into a batch.

Invariants:

- A group leaves here with all of its samples scored, or it ends here, or it waits here, leased, for
  the next attempt.
- What was scored is not scored again in this process. After a death the group is delivered again as
  its producers put it, and scored anew: a score is never lost apart from its group.
- Nothing here refers to the handler, which a waiting thread would keep alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import shmbus
from trainer_adapter.handler.group_calls import GroupCalls

__all__ = ["GroupScoring", "ScoreGroup", "group_scoring"]

#: Scores a group: a number for each sample, or None to drop it. It may be a coroutine function.
ScoreGroup: TypeAlias = Callable[[shmbus.Group], Any]


class GroupScoring:
    """Has a callable score what producers left open."""

    def __init__(
        self,
        score_group: ScoreGroup,
        drop: Callable[[list[shmbus.Group]], None] | None,
        *,
        drop_equal: bool,
    ) -> None:
        self._calls = GroupCalls("score_group", score_group)
        self._drop = drop
        self._drop_equal = drop_equal and drop is not None

    def score(self, groups: list[shmbus.Group], *, trained: bool = True) -> list[shmbus.Group]:
        """Score the samples of groups that have no score yet."""
        leased = [group for group in groups if group.state == "leased"]
        unscored = [g for g in leased if not all([t.scored for t in g.trajectories])]
        if not unscored:
            return leased
        self._calls.run(unscored, lambda group, given: self._settle(group, given, trained))
        return [group for group in leased if group.state == "leased"]

    def _settle(self, group: shmbus.Group, given: Any, trained: bool) -> None:
        """Give a group its scores, or end it."""
        if given is None and self._drop is not None:
            self._drop([group])
            return
        scores = _checked(group, given)
        for trajectory, score in zip(group.trajectories, scores.tolist(), strict=True):
            if not trajectory.scored:
                trajectory.score = score
        if self._drop_equal and trained and np.ptp(group.scores) == 0 and self._drop is not None:
            self._drop([group])

    def close(self) -> None:
        """End what is under way; who waits for scores gets BusClosedError."""
        self._calls.close()


def group_scoring(
    score_group: ScoreGroup | None, consumer: shmbus.Consumer, world_size: int, *, drop_equal: bool
) -> GroupScoring | None:
    """Return what scores groups by a callable; None for None, TypeError for what is neither."""
    if score_group is None:
        return None
    drop = functools.partial(consumer.drop, reason="filtered")
    return GroupScoring(score_group, drop if world_size == 1 else None, drop_equal=drop_equal)


def _checked(group: shmbus.Group, given: Any) -> NDArray[np.float64]:
    count = len(group.trajectories)
    # A tensor may have a graph, or lie on a device.
    host = given.detach().cpu() if hasattr(given, "detach") else given
    try:
        scores = np.asarray(host, np.float64)
    except (TypeError, ValueError):
        scores = np.empty(0)
    if scores.shape != (count,) or not np.isfinite(scores).all():
        raise ValueError(
            f"score_group: expected {count} finite numbers for group {group.instance_id!r}, one a "
            f"sample, got {given!r}; with one rank, None drops a group that cannot be scored"
        )
    return scores
