"""Trainers of 1, 2 and 4 ranks in every layout, against readers that are sharded otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import Spawner
from weight_models import bits

from shmbus.pool import unlink_pool
from trainer_adapter.weights import WeightSubscriber

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def run(spawn: Spawner, role: str, bus: str, directory: Path, *wanted: tuple[str, int]) -> None:
    """Run the ranks of each layout and world size in turn; each says that it is done."""
    named = [f"{world}:{layout}" for layout, world in wanted]
    child = spawn.module("rank_child", role, bus, directory, *named, env=ENV)
    said = child.finish(timeout=200)
    done = "published" if role == "publish" else "read"
    for _, world in wanted:
        for rank in range(world):
            assert f"rank {rank} of {world} {done}" in said


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "world"),
    [("rows", 1), ("rows", 2), ("columns", 2), ("fsdp", 2), ("replicated", 2), ("columns", 4),
     ("fsdp", 4)],
)  # fmt: skip
def test_a_model_of_many_ranks_is_one_model_for_every_reader(
    layout: str, world: int, bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    run(spawn, "publish", bus_name, tmp_path, (layout, world))
    from rank_child import VERSIONS, whole_model

    with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=5) as weights:
        assert weights.version == VERSIONS[-1]
        for name, value in whole_model().state_dict().items():
            assert bits(weights[name]) == bits((value + weights.version).bfloat16())
    if (layout, world) in (("rows", 2), ("columns", 4)):
        run(spawn, "read", bus_name, tmp_path, ("rows", 1), ("columns", 2), ("rows", 4))
    unlink_pool(bus_name, "weights")
