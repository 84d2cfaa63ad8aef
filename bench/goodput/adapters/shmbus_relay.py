"""shmbus between two Ray nodes of this machine: the workers' node and the trainer's."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.goodput.adapters import About, Link, kill_one
from bench.goodput.adapters.shmbus_embedded import RETRIES, SHMBUS_FAIRNESS, bus, train, work
from bench.goodput.scenario import Scenario

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="shmbus, through the relay", packages=("shmbus", "ray", "numpy"), offers=True,
    fairness=f"{SHMBUS_FAIRNESS}; a killed node is a raylet with its actors: the buses stay",
)  # fmt: skip
STORE_BYTES: Final = 100 << 20
SIDES: Final = ("workers", "trainer")


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Run a cluster of three nodes, and the relay."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray.cluster_utils import Cluster

    import shmbus.relay

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    with bus(".from") as source, bus(".to") as sink:
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            nodes = {side: cluster.add_node(**node, resources={side: 1}) for side in SIDES}
            ray.init(address=cluster.address, namespace="shmbus", log_to_driver=False)
            relay = shmbus.relay.start(
                f"{source}@workers", [f"{sink}@trainer"], sample_retries=RETRIES
            )
            turns = iter(SIDES * scenario.rounds)

            def kill_actor(_: int) -> None:
                kill_one(b"ray::RelayActor")

            def kill_node(_: int) -> None:
                side = next(turns)
                cluster.remove_node(nodes[side], allow_graceful=False)
                nodes[side] = cluster.add_node(**node, resources={side: 1})

            yield Link((source, sink, False), {"transport": kill_actor, "node": kill_node})
            relay.stop()
        finally:
            ray.shutdown()
            cluster.shutdown()
