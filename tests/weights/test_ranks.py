"""Trainers of 1, 2 and 4 ranks in every layout, against readers that are sharded otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import RUN_PREFIX, Child, Spawner
from weight_models import bits

from shmbus.pool import unlink_pool
from shmbus.pool.lifecycle import pool_path
from shmbus.weights import WeightSubscriber

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
PUBLISHED = [
    ("rows", 1), ("rows", 2), ("columns", 2), ("fsdp", 2), ("replicated", 2), ("columns", 4),
    ("fsdp", 4),
]  # fmt: skip
#: What is read by ranks too, and in which layouts.
READ = [("rows", 2), ("columns", 4)]
READERS = [("rows", 1), ("columns", 2), ("rows", 4)]


def bus_of(layout: str, world: int) -> str:
    return f"{RUN_PREFIX}ranks-{layout}-{world}"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """All ranks, one behind the other: what takes the longest is to import torch for them."""
    tasks = [f"publish:{bus_of(*how)}:{how[1]}:{how[0]}" for how in PUBLISHED]
    tasks += [f"read:{bus_of(*how)}:{world}:{layout}" for how in READ for layout, world in READERS]
    directory = tmp_path_factory.mktemp("ranks")
    spawner = Spawner(directory)
    try:
        yield spawner.module("rank_child", directory, *tasks, env=ENV)
    finally:
        spawner.end_all()
        for how in PUBLISHED:
            if os.path.exists(pool_path(bus_of(*how), "weights")):
                unlink_pool(bus_of(*how), "weights")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("layout", "world"), PUBLISHED)
def test_a_model_of_many_ranks_is_one_model_for_every_reader(
    layout: str, world: int, ranks: Child
) -> None:
    from rank_child import VERSIONS, whole_model

    bus = bus_of(layout, world)
    for rank in range(world):
        ranks.expect(f"rank {rank} of {world}: published {bus}", timeout=200)
    with WeightSubscriber(bus) as subscriber, subscriber.latest(timeout=5) as weights:
        assert weights.version == VERSIONS[-1]
        for name, value in whole_model().state_dict().items():
            assert bits(weights[name]) == bits((value + weights.version).bfloat16())


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("layout", "world"), READ)
def test_ranks_of_every_layout_read_what_ranks_of_another_published(
    layout: str, world: int, ranks: Child
) -> None:
    said = ranks.finish(timeout=200)
    for _, readers in READERS:
        for rank in range(readers):
            assert f"rank {rank} of {readers}: read {bus_of(layout, world)}" in said
