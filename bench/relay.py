"""One hop of 18 kB trajectories between two Ray nodes of this machine: the relay beside its bounds.

`python -m bench.relay` prints JSON: Ray alone with blocks of the relay's size, one ray.put a
trajectory, loopback TCP, the relay, and its latency from put to take at a low rate. All of one run,
so that ratios count; both nodes share this machine's processors. Needs the extra `ray`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import numpy as np
import ray
from ray.cluster_utils import Cluster

import shmbus
import shmbus.relay

BLOCK = 16 << 20
#: What a trajectory of 2,048 tokens with mask and logprobs takes on a bus.
RECORD = 18_816
TOKENS = 2048
GROUPS, SIZE = 2500, 8
LATENCY_GROUPS = 150
STORE = 400 << 20


class Sink:
    """Takes blocks, or references."""

    def take(self, block: Any) -> int:
        """Return a block's size."""
        return len(block)

    def take_each(self, refs: list[Any]) -> int:
        """Return the size of what these refer to."""
        return sum(len(ray.get(each)) for each in refs)


class Source:
    """Sends blocks, or references."""

    def send(self, sink: Any, count: int) -> float:
        """Send blocks, two at a time; return bytes per second."""
        block = np.zeros(BLOCK, np.uint8)
        began, under_way = time.perf_counter(), []
        for _ in range(count):
            under_way.append(sink.take.remote(block))
            if len(under_way) == 2:
                ray.get(under_way.pop(0))
        ray.get(under_way)
        return count * BLOCK / (time.perf_counter() - began)

    def put_each(self, sink: Any, count: int) -> float:
        """Put each trajectory; return how many per second."""
        record = np.zeros(RECORD, np.uint8)
        began = time.perf_counter()
        for _ in range(0, count, SIZE):
            ray.get(sink.take_each.remote([ray.put(record) for _ in range(SIZE)]))
        return count / (time.perf_counter() - began)


def tcp(total: int = 1 << 30) -> float:
    """Return bytes per second through a socket of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            chunk = bytes(1 << 20)
            for _ in range(total >> 20):
                connection.sendall(chunk)

    thread = threading.Thread(target=send)
    began = time.perf_counter()
    thread.start()
    connection, _ = listener.accept()
    room, got = bytearray(1 << 20), 0
    while count := connection.recv_into(room):
        got += count
    thread.join()
    connection.close()
    listener.close()
    return got / (time.perf_counter() - began)


def put_groups(name: str, prefix: str, groups: int) -> None:
    """Put groups as fast as the bus takes them."""
    fields: dict[str, Any] = {
        "tokens": np.zeros(TOKENS, np.int32),
        "mask": np.ones(TOKENS, np.uint8),
        "logprobs": np.zeros(TOKENS, np.float32),
    }
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


def relayed(source: str, trainer: str) -> dict[str, float]:
    """Trajectories per second, and latency, with a relay that runs."""
    with shmbus.Consumer(trainer) as consumer:
        put_groups(source, "warm", 1)
        take_groups(consumer, 1)
        thread = threading.Thread(target=put_groups, args=(source, "q", GROUPS))
        began = time.perf_counter()
        thread.start()
        take_groups(consumer, GROUPS)
        took_s = time.perf_counter() - began
        thread.join()
        latencies = []
        for group in range(LATENCY_GROUPS):
            put_groups(source, f"late{group}.", 1)
            began = time.perf_counter()
            take_groups(consumer, 1)
            latencies.append(time.perf_counter() - began)
            time.sleep(0.03)
    return {
        "relay_per_s": GROUPS * SIZE / took_s,
        "relay_gb_per_s": GROUPS * SIZE * RECORD / took_s / 1e9,
        "latency_p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "latency_p99_ms": float(np.percentile(latencies, 99)) * 1e3,
    }


def main() -> None:
    """Measure all, and print it."""
    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for name in ("left", "right"):
        cluster.add_node(**node, resources={name: 1})
    ray.init(address=cluster.address, namespace="shmbus", log_to_driver=False)
    sink = ray.remote(Sink).options(num_cpus=0, resources={"right": 0.01}).remote()
    source = ray.remote(Source).options(num_cpus=0, resources={"left": 0.01}).remote()
    ray.get(source.send.remote(sink, 2))
    said = {
        "ray_blocks_gb_per_s": ray.get(source.send.remote(sink, 24)) / 1e9,
        "ray_put_each_per_s": ray.get(source.put_each.remote(sink, 400)),
        "tcp_gb_per_s": tcp() / 1e9,
    }
    buses = [f"bench-relay-{os.getpid()}.{each}" for each in ("from", "to")]
    for name in buses:
        shmbus.Bus.create(name, "256MiB").close()
    try:
        relay = shmbus.relay.start(f"{buses[0]}@left", [f"{buses[1]}@right"])
        said |= relayed(*buses)
        relay.stop()
    finally:
        for name in buses:
            shmbus.unlink(name)
    said["load_before"] = os.getloadavg()[0]
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in said.items()}) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
