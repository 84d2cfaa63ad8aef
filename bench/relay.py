"""One hop of trajectories between two Ray nodes of this machine: ``python -m bench.relay``.

The relay beside Ray's own objects, one ``ray.put`` a trajectory, and TransferQueue through its
storage units at the receiver. All nodes share this machine's processors, so that only ratios of one
run count. Needs the extra ``ray``.
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
#: Bytes of a block of Ray's own objects, how many, and how many are under way.
BLOCK, BLOCKS, BLOCKS_AT_ONCE = 16 << 20, 40, 3
PUTS: Final = 400
#: Of TransferQueue: trajectories of one call, batches, batches under way, units at the receiver.
BATCH, BATCHES, BATCHES_AT_ONCE, UNITS = 256, 40, 3, 2
PARTITION: Final = "train"


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
    """Takes blocks, or references."""

    def take(self, block: Any) -> int:
        """Return a block's size."""
        return len(block)

    def take_each(self, refs: list[Any]) -> int:
        """Return the size of what these refer to."""
        import ray

        return sum(len(ray.get(each)) for each in refs)


class Source:
    """Sends blocks, or references."""

    def send(self, sink: Any, count: int, at_once: int) -> float:
        """Send blocks, so many at a time; return bytes per second."""
        import ray

        block = np.zeros(BLOCK, np.uint8)
        began, under_way = time.perf_counter(), []
        for _ in range(count):
            under_way.append(sink.take.remote(block))
            if len(under_way) == at_once:
                ray.get(under_way.pop(0))
        ray.get(under_way)
        return count * BLOCK / (time.perf_counter() - began)

    def put_each(self, sink: Any, count: int) -> float:
        """Put each trajectory; return how many per second."""
        import ray

        record = np.zeros(RECORD, np.uint8)
        began = time.perf_counter()
        for _ in range(0, count, SIZE):
            ray.get(sink.take_each.remote([ray.put(record) for _ in range(SIZE)]))
        return count / (time.perf_counter() - began)


def by_ray(turns: int) -> tuple[list[float], list[float]]:
    """Return trajectories a second of Ray alone: in blocks of 16 MiB, and put one by one."""
    import ray

    sink, source = on_side(Sink, "right"), on_side(Source, "left")
    ray.get(source.send.remote(sink, BLOCKS, BLOCKS_AT_ONCE))  # touches both stores
    blocks, each = [], []
    for _ in range(turns):
        blocks.append(ray.get(source.send.remote(sink, BLOCKS, BLOCKS_AT_ONCE)) / RECORD)
        each.append(ray.get(source.put_each.remote(sink, PUTS)))
    for actor in (sink, source):
        ray.kill(actor)
    return blocks, each


def _client() -> Any:
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    import transfer_queue as found

    found.init()
    return found


class QueueReceiver:
    """Gets batches, and clears them."""

    def __init__(self) -> None:
        self._queue = _client()

    def take(self, meta: Any) -> int:
        """Get what was put under this; return how many trajectories they are."""
        batch = self._queue.kv_batch_get_by_meta(meta)
        count = len(meta.keys)
        for name in ("tokens", "mask", "logprobs"):
            rows = batch[name].unbind(0)  # which may be one tensor, or one of each
            assert len(rows) == count and rows[-1].numel() == TOKENS
        self._queue.kv_clear(meta.keys, PARTITION)
        return count


class QueueSender:
    """Puts batches, and has the other side get them."""

    def __init__(self) -> None:
        self._queue = _client()
        import tensordict
        import torch

        fields = {
            "tokens": torch.zeros(BATCH, TOKENS, dtype=torch.int32),
            "mask": torch.ones(BATCH, TOKENS, dtype=torch.uint8),
            "logprobs": torch.zeros(BATCH, TOKENS),
        }
        self._batch = tensordict.TensorDict(fields, batch_size=BATCH)
        self._tags = [{"score": 1.0, "policy_version": 3}] * BATCH
        self._number = 0

    def send(self, receiver: Any, batches: int) -> float:
        """Put so many batches; return the seconds until the last one was got and cleared."""
        import ray

        began, under_way = time.perf_counter(), []
        for _ in range(batches):
            keys = [f"{self._number}/{index}" for index in range(BATCH)]
            self._number += 1
            meta = self._queue.kv_batch_put(keys, PARTITION, self._batch, self._tags)
            under_way.append(receiver.take.remote(meta))
            if len(under_way) == BATCHES_AT_ONCE:
                assert ray.get(under_way.pop(0)) == BATCH
        assert ray.get(under_way) == [BATCH] * len(under_way)
        return time.perf_counter() - began


def by_transfer_queue(turns: int) -> list[float]:
    """Return trajectories a second of TransferQueue, whose storage units are at the receiver."""
    import ray
    import transfer_queue as found

    storage = {"num_data_storage_units": UNITS, "required_node_resource": SIDES[1]}
    found.init({"backend": {"SimpleStorage": storage}})
    try:
        receiver, sender = on_side(QueueReceiver, "right"), on_side(QueueSender, "left")
        ray.get(sender.send.remote(receiver, 4))
        count = BATCHES * BATCH
        return [count / float(ray.get(sender.send.remote(receiver, BATCHES))) for _ in range(turns)]
    finally:
        found.close()


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the relay and what it stands beside."""
    title = "put on one node to acknowledged on the other"
    if why := machine.lacks(cores=2, modules=["ray"]):
        return [skipped("relay", title, why)]
    turns = options.repetitions or (1 if options.tiny else TURNS)
    rows = []
    with cluster():
        blocks, each = by_ray(turns)
        without = machine.lacks(modules=["transfer_queue"])
        queued = [] if without else by_transfer_queue(turns)
        rates, p50_ms = hop(100 if options.tiny else GROUPS, turns)
        others = {
            "ray-blocks": ("Ray's objects of 16 MiB", blocks),
            "ray-put": ("one ray.put a trajectory", each),
            "transfer-queue": ("TransferQueue", queued),
        }
        for name, (other, found) in others.items():
            row = f"relay-{name}"
            if not found:
                rows.append(skipped(row, title, without))
                continue
            rows.append(
                Row(
                    name=row, title=title, unit="trajectories/s",
                    values=tuple(rates), beside=other, beside_values=tuple(found),
                )
            )  # fmt: skip
        rows.append(
            Row(
                name="relay-latency", title="a group alone, p50",
                unit="ms", values=(p50_ms,),
            )
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("relay", program.parser_of("relay", __doc__), measure, argv)


if __name__ == "__main__":
    # Actors need classes of a module that their process can import, not of this program.
    from bench import relay

    sys.exit(relay.main())
