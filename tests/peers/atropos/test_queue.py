"""Which groups make a batch is decided as atroposlib decides it, for any queue."""

import random
from typing import Any

from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)

from shmbus.peers.atropos_queue import Waiting, choose, choose_with_minimums, fitting

QUEUES = 20_000
MIXES = ([1, 2, 4, 8], [2, 4], [3, 6, 2], [1, 5, 8])


def numbers(batch: Any) -> list[int] | None:
    return None if batch is None else [group["number"] for group in batch]


def test_random_queues_give_the_same_batches(seed: int) -> None:
    dice = random.Random(seed)
    batches = 0
    for _ in range(QUEUES):
        sizes = [dice.choice(dice.choice(MIXES)) for _ in range(dice.randint(0, 14))]
        queue = [
            {"tokens": [[0]] * size, "env_id": dice.choice([0, 1, 2, None]), "number": number}
            for number, size in enumerate(sizes)
        ]
        waiting = [Waiting(len(g["tokens"]), g["env_id"], g["number"]) for g in queue]
        target, batch_size = dice.randint(1, 16), dice.choice([4, 6, 8, 16])
        assert fitting(sizes, target) == find_groups_summing_to_target(queue, target)
        theirs, _rest = grab_exact_from_heterogeneous_queue(queue, batch_size)
        ours = choose(waiting, batch_size)
        assert numbers(theirs) == (ours and [each.group for each in ours])
        shares = {
            env: dice.choice([0.01, 0.25, 0.5, 0.7])
            for env in dice.sample([0, 1, 2], dice.randint(0, 3))
        }
        environments = [
            {"connected": True, "min_batch_allocation": share, "registered_id": env}
            for env, share in shares.items()
        ]
        theirs, _rest = grab_batch_with_minimum_allocations(queue, batch_size, environments)
        ours = choose_with_minimums(waiting, batch_size, shares)
        assert numbers(theirs) == (ours and [each.group for each in ours])
        batches += ours is not None
    assert batches > QUEUES // 20
