"""Dead and cut-off nodes of a relay; SHMBUS_TEST_NODES=1 runs the long form, as root."""

import os
import sys
from pathlib import Path

import pytest
from relay import hub, relay_nodes

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(hub.unavailable()), reason=hub.unavailable()),
]
LONG = os.environ.get("SHMBUS_TEST_NODES") == "1"
long = pytest.mark.skipif(not LONG, reason="SHMBUS_TEST_NODES=1 runs it: it takes minutes")


@pytest.fixture(autouse=True)
def _children_find_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are programs of their own."""
    here = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), *sys.path]))


def test_what_a_dead_rollout_node_had_is_counted_and_asked_for_elsewhere(seed: int) -> None:
    print(relay_nodes.a_rollout_node_dies(seed, 400 if LONG else 20))


@long
def test_a_dead_trainers_node_loses_only_acknowledged_groups(seed: int) -> None:
    print(relay_nodes.a_trainers_node_dies(seed, 400))


@long
def test_a_dead_trainers_node_loses_what_its_status_had_announced_under_put(seed: int) -> None:
    print(relay_nodes.a_trainers_node_dies_under_put(seed, 400))


@long
def test_after_partitions_of_a_lossy_network_it_recovers(seed: int) -> None:
    print(relay_nodes.a_partition(seed, 1500, cut_s=60.0, delay_s=0.05, loss=0.01))
