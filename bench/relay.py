"""One hop of trajectories between two Ray nodes of this machine: ``python -m bench.relay``.

The relay beside Ray's own objects, one ``ray.put`` a trajectory. All nodes share the processors of
one machine, so only ratios of a run count. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

# Read when Ray is imported, and by its services.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import numpy as np

import shmbus
from bench import machine, program
from bench.row import Row, skipped

__all__ = ["main"]

#: The nodes: one for each side of a hop. A third has Ray's own services.
SIDES: Final = ("left", "right")
STORE_BYTES: Final = 400 << 20
#: What Ray takes for processors of a node: as many as there are processes that ask for one.
PROCESSES: Final = 4
#: Of a resource that a node has 1 of.
A_LITTLE: Final = 0.001
TOKENS: Final = 2048
#: What a trajectory of 2,048 tokens with mask and logprobs takes on a bus.
RECORD: Final = 18_816
SIZE: Final = 8
CAPACITY: Final = "256MiB"
TURNS: Final = 3
#: Groups of a run, and before it: until each page of both buses and of Ray's stores was touched.
GROUPS, WARM_GROUPS = 8000, 2200
LATENCY_GROUPS: Final = 50
PUTS: Final = 400


@contextmanager
def cluster() -> Iterator[None]:
    """Have a cluster for a while."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": PROCESSES, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for name in SIDES:
        made.add_node(**node, resources={name: 1})
    ray.init(address=made.address, namespace="shmbus", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def on_side(kind: type, side: str, *arguments: Any) -> Any:
    """Start an actor of this class on a side."""
    import ray

    actor = ray.remote(kind).options(num_cpus=0, resources={side: A_LITTLE})
    return actor.remote(*arguments)


def sample_fields() -> dict[str, Any]:
    """Make what a trajectory of 18 kB has."""
    return {
        "tokens": np.zeros(TOKENS, np.int32),
        "mask": np.ones(TOKENS, np.uint8),
        "logprobs": np.zeros(TOKENS, np.float32),
    }


def put_groups(name: str, prefix: str, groups: int) -> None:
    """Put groups as fast as the bus takes them."""
    fields = sample_fields()
    with shmbus.Producer(name) as producer:
        for group in range(groups):
            for index in range(SIZE):
                producer.put(
                    f"{prefix}{group}", group_size=SIZE, index=index, score=float(index),
                    timeout=None, **fields,
                )  # fmt: skip


def take_groups(consumer: shmbus.Consumer, groups: int) -> None:
    """Take and acknowledge so many."""
    taken = 0
    while taken < groups:
        for group in consumer.take(timeout=1.0):
            group.ack()
            taken += 1


def _through(source: str, consumer: shmbus.Consumer, prefix: str, groups: int) -> float:
    """Put groups at one end and take them at the other; return the seconds."""
    thread = threading.Thread(target=put_groups, args=(source, prefix, groups))
    began = time.perf_counter()
    thread.start()
    take_groups(consumer, groups)
    took_s = time.perf_counter() - began
    thread.join()
    return took_s


def hop(groups: int, turns: int) -> tuple[list[float], float]:
    """Return trajectories a second of each turn, and the median milliseconds of a group alone."""
    import shmbus.relay

    names = [f"bench-relay-{os.getpid()}.{each}" for each in ("from", "to")]
    for name in names:
        shmbus.Bus.create(name, CAPACITY).close()
    try:
        relay = shmbus.relay.start(f"{names[0]}@left", [f"{names[1]}@right"])
        with shmbus.Consumer(names[1]) as consumer:
            _through(names[0], consumer, "warm", min(groups, WARM_GROUPS))
            rates = [
                groups * SIZE / _through(names[0], consumer, f"q{turn}.", groups)
                for turn in range(turns)
            ]
            ways = []
            for group in range(LATENCY_GROUPS):
                put_groups(names[0], f"late{group}.", 1)
                began = time.perf_counter()
                take_groups(consumer, 1)
                ways.append(1e3 * (time.perf_counter() - began))
                time.sleep(0.03)
        relay.stop()
    finally:
        for name in names:
            shmbus.unlink(name)
    return rates, statistics.median(ways)


class Sink:
    """Takes references."""

    def take(self, refs: list[Any]) -> int:
        """Return the size of the referenced objects."""
        import ray

        return sum(len(ray.get(each)) for each in refs)


class Source:
    """Sends references."""

    def put(self, sink: Any, count: int) -> float:
        """Put each trajectory; return trajectories per second."""
        import ray

        record = np.zeros(RECORD, np.uint8)
        began = time.perf_counter()
        for _ in range(0, count, SIZE):
            ray.get(sink.take.remote([ray.put(record) for _ in range(SIZE)]))
        return count / (time.perf_counter() - began)


def by_ray(turns: int) -> list[float]:
    """Return trajectories a second of Ray's own objects, one ``ray.put`` a trajectory."""
    import ray

    sink, source = on_side(Sink, "right"), on_side(Source, "left")
    ray.get(source.put.remote(sink, PUTS))  # touches both stores
    rates = [float(ray.get(source.put.remote(sink, PUTS))) for _ in range(turns)]
    for actor in (sink, source):
        ray.kill(actor)
    return rates


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the relay beside Ray."""
    title = "put on one node to acknowledged on the other"
    if why := machine.lacks(cores=2, modules=["ray"]):
        return [skipped("relay", title, why)]
    turns = options.repetitions or (1 if options.tiny else TURNS)
    with cluster():
        puts = by_ray(turns)
        rates, p50_ms = hop(100 if options.tiny else GROUPS, turns)
    return [
        Row(
            name="relay-ray-put", title=title, unit="trajectories/s", values=tuple(rates),
            beside="one ray.put a trajectory", beside_values=tuple(puts),
        ),
        Row(name="relay-latency", title="a group alone, p50", unit="ms", values=(p50_ms,)),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("relay", program.parser_of("relay", __doc__), measure, argv)


if __name__ == "__main__":
    # Actors need classes of a module that their process can import, not of this program.
    from bench import relay

    sys.exit(relay.main())
