"""The demo over two nodes: rollout workers on the first, the trainer on the second, and a relay.

    pip install 'shmbus[demo,ray]'                                 # on both nodes
    ray start --head --resources '{"trainer": 1}'                # on the trainer's
    ray start --address HEAD:6379 --resources '{"rollout": 1}'   # on the workers'
    python examples/demo_on_two_nodes.py                         # on either node

Each node owns a bus. The trainer offers prompts on its bus; workers take prompts from their bus and
put samples there, as on a single node. Complete groups cross to free room; their outcomes come
back. New weights cross by the same relay, into a pool beside the workers' bus. The script prints
the summary of the run in the form of `shmbus demo`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

import shmbus
import shmbus.relay
from shmbus.inspect.status import read_status
from shmbus.pool import read_pool, unlink_pool
from trainer_adapter.demo import run as one_node
from trainer_adapter.demo.sampler import PolicyConfig
from trainer_adapter.demo.view import Summary, ledger_text
from trainer_adapter.demo.worker import Supervisor, WeightsChannel, WorkerConfig

#: Seconds between two restarts of dead workers.
TEND_S = 0.05
#: Share of a node's single resource.
A_LITTLE = 0.001


class RolloutNode:
    """An actor on the workers' node: their bus, and the workers.

    Parameters
    ----------
    bus : str
        The bus to create.
    config : DemoConfig
        As of the demo on one node.
    """

    def __init__(self, bus: str, config: one_node.DemoConfig) -> None:
        self.config = config
        self.bus = shmbus.Bus.create(bus, one_node.CAPACITY, max_producers=4 * config.workers + 8)
        self.supervisor: Supervisor | None = None
        self.error: Exception | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._tend)
        self.thread.start()

    def _tend(self) -> None:
        try:
            while not self.over.wait(TEND_S) and not self._has_weights():
                pass
            template = WorkerConfig(self.bus.name, self.config.seed, os.getpid())
            self.supervisor = Supervisor(template, self.config.workers, chaos=self.config.chaos)
            while not self.over.wait(TEND_S):
                self.supervisor.tend()
        except Exception as error:
            self.error = error  # the next `state` tells

    def _has_weights(self) -> bool:
        """Whether the relay brought the first weights."""
        try:
            return read_pool(self.bus.name, "weights").version is not None
        except (shmbus.BusNotFoundError, shmbus.LayoutMismatchError):
            return False  # the pool is missing or unfinished

    def state(self) -> tuple[int, int, int]:
        """Return the counts of living, killed and restarted workers."""
        if self.error is not None:
            raise self.error
        found = self.supervisor
        return (0, 0, 0) if found is None else (found.alive, found.kills, found.restarts)

    def ledger(self) -> shmbus.Ledger:
        """Return the ledger of the workers' bus."""
        return read_status(self.bus.name).ledger

    def stop(self) -> None:
        """End the workers; their samples stay until `close`."""
        self.over.set()
        self.thread.join()
        if self.supervisor is not None:
            self.supervisor.stop()

    def close(self) -> None:
        """Remove the bus and the weights."""
        self.bus.close()
        with contextlib.suppress(shmbus.BusNotFoundError):  # no weights came
            unlink_pool(self.bus.name, "weights")
        shmbus.unlink(self.bus.name)


class FarWorkers:
    """The workers, as the trainer of the demo sees them.

    Parameters
    ----------
    node : actor
        The RolloutNode.
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        self.kills = self.restarts = 0

    def tend(self) -> None:
        """Their node looks after them."""

    @property
    def alive(self) -> int:
        """How many of them live."""
        alive, self.kills, self.restarts = ray.get(self.node.state.remote())
        return int(alive)


class TwoNodes(one_node.Demo):
    """The demo's trainer, with distant workers."""

    def train_on(self, bus: str, workers: FarWorkers) -> Summary:
        """Train from the groups on this node's bus."""
        channel = WeightsChannel(bus, PolicyConfig().num_parameters, create=True)
        with contextlib.closing(channel), self.handler(bus) as handler:
            handler.set_policy_version(0)
            channel.publish(self.learner.policy.export_weights(), 0)
            self.train(channel, handler, workers)  # type: ignore[arg-type]
            return self.summary(handler, workers)  # type: ignore[arg-type]


class TrainerNode:
    """An actor on the trainer's node, with its bus.

    Parameters
    ----------
    bus : str
        The bus to create.
    """

    def __init__(self, bus: str) -> None:
        self.bus = shmbus.Bus.create(bus, one_node.CAPACITY)

    def train(self, config: one_node.DemoConfig, workers: Any) -> bytes:
        """Train, and return the summary as JSON."""
        demo = TwoNodes(config)
        return msgspec.json.encode(demo.train_on(self.bus.name, FarWorkers(workers)))

    def close(self) -> None:
        """Remove bus and channel."""
        self.bus.close()
        shmbus.unlink(self.bus.name)


def _actor(kind: type, node: str) -> Any:
    return ray.remote(kind).options(num_cpus=0, max_concurrency=2, resources={node: A_LITTLE})


def run(config: one_node.DemoConfig) -> tuple[Summary, shmbus.Ledger]:
    """Run the demo in the cluster of this process.

    Returns
    -------
    Summary, Ledger
        The trainer's summary with its bus's ledger; the ledger of the drained workers' bus.
    """
    name = f"two-nodes-{os.getpid()}-{secrets.token_hex(2)}"
    rollout = _actor(RolloutNode, "rollout").remote(f"{name}.rollout", config)
    trainer = _actor(TrainerNode, "trainer").remote(f"{name}.trainer")
    with contextlib.ExitStack() as stack:
        for actor in (rollout, trainer):
            ray.get(actor.__ray_ready__.remote())
            stack.callback(lambda actor=actor: ray.get(actor.close.remote()))
        relay = shmbus.relay.start(
            f"{name}.rollout@rollout", [f"{name}.trainer@trainer"], weights=True,
            max_policy_lag=one_node.MAX_POLICY_LAG,
            group_timeout=one_node.GROUP_TIMEOUT_S, on_timeout="drop",
        )  # fmt: skip
        stack.callback(relay.stop)
        stack.callback(lambda: ray.get(rollout.stop.remote()))
        said = ray.get(trainer.train.remote(config, rollout))
        ray.get(rollout.stop.remote())
        summary = msgspec.json.decode(said, type=Summary)
        for _ in itertools.repeat(None, 50):
            ledger = ray.get(rollout.ledger.remote())
            if ledger.acknowledged >= summary.trajectories:
                break
            time.sleep(0.1)  # the last groups' ends are on their way back
    return summary, ledger


def main() -> int:
    """Run the command line; return 0 for two balanced ledgers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the summary goes, as JSON")
    given = parser.parse_args()
    try:
        ray.init(address=given.address, namespace="shmbus", log_to_driver=True)
    except ConnectionError as error:
        parser.error(f"no Ray cluster at {given.address!r}; start both nodes as above: {error}")
    config = one_node.DemoConfig(workers=given.workers, seed=given.seed, steps=given.steps)
    summary, ledger = run(config)
    print(
        f"held-out reward {summary.reward_start:.3f} -> {summary.reward_end:.3f} in "
        f"{summary.seconds:.0f} s: {summary.steps} steps, {summary.groups:,} groups; "
        f"{one_node.REWARD_TARGET:g} after {summary.seconds_to_target} s"
    )
    for where, each in (("workers' node", ledger), ("trainer's node", summary.ledger)):
        print(f"\nLedger of the {where}, in trajectories:\n{ledger_text(each)}")
    if given.output is not None:
        given.output.write_bytes(msgspec.json.encode(summary))
    return 0 if ledger.balanced and summary.ledger_balanced else 1


if __name__ == "__main__":
    sys.exit(main())
