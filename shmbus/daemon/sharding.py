"""Which rank gets which group of a step: pure functions of the groups' weights, in their order.

The daemon calls them once a step, so all ranks agree, whichever asks first. They depend on nothing
else, so the same groups in the same order are always split the same way.

Bounds, each by an exchange argument:

- `balanced` gives each group, heaviest first, to the rank with the least so far. The heaviest and
  the lightest rank then differ by at most the heaviest group.
- `balanced_counts` deals rounds of one group a rank, heaviest first, the heaviest of a round to the
  lightest rank. A round turns a difference d into at most max(d, its heaviest - its lightest), so
  ranks differ by at most the heaviest group less the lightest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["balanced", "balanced_counts", "plan_step"]

Shards = list[list[int]]


def _heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: (-weights[i], i))


def _in_order(shards: Shards) -> Shards:
    for shard in shards:
        shard.sort()
    return shards


def balanced(weights: Sequence[int], ranks: int) -> Shards:
    """Split groups over ranks by weight; each rank gets at least one if there are enough."""
    shards: Shards = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in _heaviest_first(weights):
        load, rank = heapq.heappop(loads)
        shards[rank].append(i)
        heapq.heappush(loads, (load + weights[i], rank))
    return _in_order(shards)


def balanced_counts(weights: Sequence[int], ranks: int) -> Shards:
    """Split groups over ranks by weight, the same number to each."""
    shards: Shards = [[] for _ in range(ranks)]
    loads = [0] * ranks
    order = _heaviest_first(weights)
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for i, rank in zip(order[start : start + ranks], lightest_first, strict=True):
            shards[rank].append(i)
            loads[rank] += weights[i]
    return _in_order(shards)


def plan_step(
    weights: Sequence[int],
    ranks: int,
    *,
    groups: int | None = None,
    tokens: int | None = None,
    hurry: bool = False,
) -> Shards | None:
    """Form a step of the first groups, or return None while there are too few."""
    ready = len(weights)
    if ready < ranks:
        return None
    if groups is not None:
        count = min(groups, ready // ranks)
        if count < groups and not hurry:
            return None
        return balanced_counts(weights[: count * ranks], ranks)
    assert tokens is not None
    total, most = 0, 0
    for most, weight in enumerate(weights):  # noqa: B007
        total += weight
        if total > tokens * ranks:
            break
    else:
        most = ready
    if most == ready and total < tokens * ranks and not hurry:
        return None
    for count in range(max(most, ranks), ranks, -1):
        shards = balanced(weights[:count], ranks)
        if all(len(s) == 1 or sum(weights[i] for i in s) <= tokens for s in shards):
            return shards
    return balanced(weights[:ranks], ranks)
