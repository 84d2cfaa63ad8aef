"""Sharding: disjoint, balanced within the stated bounds, and a function of nothing else."""

import random
from functools import partial

from counted_work import instructions

from shmbus.daemon.steps import balanced, balanced_counts, plan_step


def loads(weights: list[int], shards: list[list[int]]) -> list[int]:
    return [sum(weights[i] for i in shard) for shard in shards]


def is_a_partition_of(shards: list[list[int]], count: int) -> bool:
    return sorted(i for shard in shards for i in shard) == list(range(count))


def test_ranks_differ_by_the_heaviest_group_at_most(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        ranks = rng.randint(1, 9)
        weights = [rng.randint(1, 10 ** rng.randint(1, 5)) for _ in range(rng.randint(ranks, 60))]
        shards = balanced(weights, ranks)
        assert is_a_partition_of(shards, len(weights))
        assert all(shards)
        assert max(loads(weights, shards)) - min(loads(weights, shards)) <= max(weights)


def test_with_equal_counts_they_differ_by_the_spread_of_the_groups_at_most(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        ranks = rng.randint(1, 9)
        weights = [
            rng.randint(1, 10 ** rng.randint(1, 5)) for _ in range(ranks * rng.randint(1, 12))
        ]
        shards = balanced_counts(weights, ranks)
        assert is_a_partition_of(shards, len(weights))
        assert len({len(shard) for shard in shards}) == 1
        spread = max(loads(weights, shards)) - min(loads(weights, shards))
        assert spread <= max(weights) - min(weights)


def test_a_step_keeps_to_the_budget_of_each_rank_and_takes_a_prefix(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        ranks = rng.randint(1, 6)
        tokens = rng.randint(50, 500)
        weights = [rng.randint(1, 200) for _ in range(rng.randint(0, 60))]
        shards = plan_step(weights, ranks, tokens=tokens, hurry=True)
        if len(weights) < ranks:
            assert shards is None
            continue
        assert shards is not None and all(shards)
        assert is_a_partition_of(shards, sum(map(len, shards)))
        for shard, load in zip(shards, loads(weights, shards), strict=True):
            assert load <= tokens or len(shard) == 1
        assert shards == plan_step(list(weights), ranks, tokens=tokens, hurry=True)


def test_without_hurry_a_step_waits_until_it_is_full() -> None:
    assert plan_step([10, 10, 10], 2, tokens=20) is None
    assert plan_step([10, 10, 10, 10], 2, tokens=20) == [[0, 2], [1, 3]]
    assert plan_step([10, 10, 10], 2, groups=2) is None
    assert plan_step([10, 10, 10], 2, groups=2, hurry=True) == [[0], [1]]
    assert plan_step([10, 10, 10, 10, 10], 2, groups=2) == [[0, 2], [1, 3]]


def test_each_rank_gets_a_group_or_nobody_does() -> None:
    assert plan_step([5], 2, tokens=100, hurry=True) is None
    assert plan_step([5], 2, groups=1, hurry=True) is None
    assert plan_step([500, 1], 2, tokens=100, hurry=True) == [[0], [1]]


def test_a_step_by_tokens_has_room_for_no_further_group(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        ranks, tokens = rng.randint(1, 16), rng.randint(50, 3000)
        weights = [rng.randint(1, 200) for _ in range(rng.randint(ranks, 300))]
        shards = plan_step(weights, ranks, tokens=tokens, hurry=True)
        assert shards is not None
        count = sum(map(len, shards))
        if count < len(weights) and sum(weights[: count + 1]) <= tokens * ranks:
            longer = balanced(weights[: count + 1], ranks)
            assert any(
                len(shard) > 1 and load > tokens
                for shard, load in zip(longer, loads(weights, longer), strict=True)
            )


def test_a_step_by_tokens_of_1024_ranks_costs_a_group_what_64_ranks_cost(seed: int) -> None:
    rng = random.Random(seed)
    costs = []
    for ranks in (64, 1024):
        weights = [rng.randint(500, 8_000) for _ in range(ranks * 9)]
        found = instructions(partial(plan_step, weights, ranks, tokens=32_768))
        costs.append(found / len(weights))
    # The search by halves looks at four more counts.
    assert costs[1] <= 1.8 * costs[0]
