"""Ranks with shards ready: the same shards, each trained once, through any death in between."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, Spawner, keys_of, train_next, wait_until
from test_prefetch import fill, ready

from shmbus import BusBusyError, Producer
from trainer_adapter import Batch, OnlineDataHandler

Served = Callable[..., Daemon]


def put(name: str, groups: range) -> list[str]:
    with Producer(name) as producer:
        for group in groups:
            for index in range(2):
                producer.put(
                    f"g{group}", group_size=2, index=index, score=index, timeout=10,
                    tokens=np.full(10 + group % 7, group, np.int32),
                )  # fmt: skip
    return [f"g{group}" for group in groups]


def join(name: str, rank: int, **options: Any) -> OnlineDataHandler:
    """Attach as a rank, as soon as the daemon knows its predecessor's end."""

    def attempt() -> OnlineDataHandler | None:
        try:
            return OnlineDataHandler(name, rank=rank, world_size=2, **options)
        except BusBusyError:
            return None

    handler = wait_until(attempt, what=f"rank {rank}'s place to be free")
    assert isinstance(handler, OnlineDataHandler)
    return handler


@pytest.mark.parametrize("restart", [False, True])
def test_prefetching_ranks_train_each_once(daemon: Served, bus_name: str, restart: bool) -> None:
    served = daemon("--capacity", "8MiB")
    keys = put(bus_name, range(48))
    # The ranks ask differently far ahead, down to no request ahead.
    handlers = [join(bus_name, rank, groups_per_batch=4, prefetch=1 + rank) for rank in range(2)]
    trained: list[str] = []
    for step in range(6):
        batches = [handler.next_batch(20) for handler in handlers]
        for batch in batches:
            assert len(batch.groups) == 4
            trained += keys_of(batch)
        if step < 3:
            fill(handlers[0], 1)
            fill(handlers[1], 2)
        if step == 2 and restart:
            served.restart()
        for handler, batch in zip(handlers, batches, strict=True):
            handler.ack(batch)
    assert sorted(trained) == sorted(keys)
    assert wait_until(lambda: handlers[0].stats().acknowledged == 96)
    assert handlers[0].stats().balanced
    for handler in handlers:
        handler.close()


@pytest.mark.parametrize("acks", ["some", "all"])
def test_a_state_taken_at_any_point_neither_repeats_nor_skips_a_shard(
    daemon: Served, bus_name: str, seed: int, acks: str
) -> None:
    rng = random.Random(seed)
    daemon("--capacity", "8MiB")
    keys = put(bus_name, range(60))
    trained: list[list[str]] = [[], []]
    states: list[Any] = [None, None]
    left = [10, 10]
    while any(left):
        rank = rng.choice([rank for rank in range(2) if left[rank]])
        with join(bus_name, rank, groups_per_batch=3, prefetch=2) as handler:
            if states[rank] is not None:
                handler.load_state_dict(states[rank])
            out: list[Batch] = []
            for _ in range(min(left[rank], rng.randrange(1, 4))):
                out.append(handler.next_batch(20))
                trained[rank] += keys_of(out[-1])
                left[rank] -= 1
            states[rank] = json.loads(json.dumps(handler.state_dict()))
            for batch in out:
                if acks == "all" or rng.random() < 0.5:
                    handler.ack(batch)
    assert sorted(trained[0] + trained[1]) == sorted(keys)


DOOMED = """
import sys, time
from trainer_adapter import OnlineDataHandler
handler = OnlineDataHandler(
    sys.argv[1], groups_per_batch=2, rank=1, world_size=2, prefetch=2
)
handler.ack(handler.next_batch(20))
batch = handler.next_batch(20)
while handler._prefetcher.ready < 2:
    time.sleep(0.01)
shards = [batch, *(made.batch for made in handler._planner.ready)]
print("|".join(",".join(group.instance_id for group in shard.groups) for shard in shards))
time.sleep(600)
"""


def test_a_dead_ranks_ready_shards_return(daemon: Served, bus_name: str, spawn: Spawner) -> None:
    daemon("--capacity", "8MiB")
    keys = put(bus_name, range(20))
    child = spawn.script(DOOMED, bus_name)
    wait_until(lambda: "\n" in child.output(), what="shards of the rank that will die")
    lost = [shard.split(",") for shard in child.output().split()[0].split("|")]
    assert len(lost) == 3
    with join(bus_name, 0, groups_per_batch=2) as zero:
        others = [*train_next(zero), *train_next(zero)]
        child.kill()
        # Rank 0 has no claim on them, at any distance.
        for _ in range(3):
            others += train_next(zero)
        with join(bus_name, 1, groups_per_batch=2, prefetch=2) as one:
            again = [train_next(one) for _ in range(4)]
            assert again[:3] == lost
            found = sorted([key for shard in again for key in shard] + others)
            assert len(found) == len(set(found)) == 18 and set(found) < set(keys)
            assert wait_until(lambda: one.stats().acknowledged == 40)
            assert one.stats().balanced


def test_shards_that_go_back_keep_their_borders(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    # Steps of a group a rank: a batch would hold many.
    options = {"tokens_per_batch": 10_000, "max_wait": 0.0}
    with join(bus_name, 0, prefetch=2, **options) as zero, join(bus_name, 1, **options) as one:
        first: list[list[str]] = []
        batches: list[Batch] = []
        for step in range(3):
            put(bus_name, range(2 * step, 2 * step + 2))
            batches.append(zero.next_batch(20))
            first.append(keys_of(batches[-1]))
            assert len(first[-1]) == 1
            one.ack(one.next_batch(20))
        for batch in reversed(batches):
            zero.give_back(batch)
        assert [keys_of(zero.next_batch(20)) for _ in range(3)] == first


def test_only_a_full_step_is_formed_without_demand(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    options = {"groups_per_batch": 2, "max_wait": 0.0}
    with join(bus_name, 0, prefetch=1, **options) as zero, join(bus_name, 1, **options) as one:
        put(bus_name, range(4))
        wait_until(lambda: zero.stats().in_ring == 0, what="the daemon to have read them")
        assert len(zero.next_batch(20).groups) == len(one.next_batch(20).groups) == 2
        put(bus_name, range(4, 6))
        time.sleep(0.3)
        assert ready(zero) == 0
        put(bus_name, range(6, 8))
        fill(zero, 1)
        assert len(zero.next_batch(20).groups) == 2
        put(bus_name, range(8, 10))
        assert len(zero.next_batch(20).groups) == 1


def test_a_malformed_group_costs_its_shard_that_group_alone(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer:
        for key, logprobs in (("good", np.zeros(4)), ("bad", np.full(4, np.nan))):
            for other in range(2):
                producer.put(f"{key}{other}", group_size=1, index=0, tokens=np.arange(4),
                             logprobs=logprobs.astype(np.float32))  # fmt: skip
    with (
        join(bus_name, 0, groups_per_batch=2, prefetch=1) as zero,
        join(bus_name, 1, groups_per_batch=2, prefetch=1) as one,
    ):
        for handler in (zero, one):
            with pytest.raises(ValueError, match=r"'bad\d'\[0\].*'logprobs'.*got nan"):
                handler.next_batch(20)
            (key,) = train_next(handler)
            assert key.startswith("good")
        assert wait_until(lambda: zero.stats().acknowledged == 2)
        assert zero.stats().dropped == {"malformed": 2}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_step_that_cannot_be_formed_says_what_it_lacks(
    daemon: Served, bus_name: str, prefetch: int
) -> None:
    daemon("--capacity", "4MiB")
    put(bus_name, range(1))
    with join(bus_name, 0, prefetch=prefetch, groups_per_batch=1) as handler:
        wait_until(lambda: handler.stats().in_ring == 0)
        with pytest.raises(TimeoutError, match=r"no step within 0\.3 s") as caught:
            handler.next_batch(0.3)
        assert handler._planner.step_requirement(2) in str(caught.value)
