"""Ends of the rows over shmbus: the bus of a measurement, its daemon, and its producers."""

import itertools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import shmbus
from bench.processes import STALL_S, MeasurementError
from bench.workload import Item, Workload
from shmbus.base.arguments import parse_size
from shmbus.segment.names import socket_path

__all__ = ["bus_bytes", "check_ledger", "produce", "put_batches", "put_each", "serving",
           "temporary_bus"]  # fmt: skip

_POLICY_VERSION = 3


def bus_bytes(capacity: str) -> int:
    """Return a bus's largest use of /dev/shm: its ring, and tables proportional to the ring."""
    ring = parse_size(capacity)
    return ring + ring // 16 + (1 << 20)


@contextmanager
def temporary_bus(capacity: str, **options: Any) -> Iterator[str]:
    """Create a bus, allocated and touched in full; yield its name, and remove the bus."""
    name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    with shmbus.Bus.create(name, capacity, **options):
        yield name


@contextmanager
def serving(name: str) -> Iterator[int]:
    """Run a daemon on a bus; yield its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shmbus", "serve", name, "--log-level", "warning"]
    )
    try:
        deadline = time.monotonic() + STALL_S
        while not os.path.exists(socket_path(name)):
            if time.monotonic() > deadline or process.poll() is not None:
                raise MeasurementError("the daemon did not begin to serve")
            time.sleep(0.01)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STALL_S)
        finally:
            process.kill()
            process.wait()


def produce(start: Callable[[], None], name: str, workload: Workload, number: int) -> float:
    """Send a producer's share at the speed of the bus; return the processor seconds."""
    items = workload.items(number)
    with shmbus.Producer(name) as producer:
        start()
        began = time.process_time()
        if workload.batch:
            put_batches(producer.put_many, items, workload)
        else:
            put_each(producer, items, workload.group_size)
        return time.process_time() - began


def put_each(producer: shmbus.Producer, items: Iterator[Item], group_size: int) -> None:
    """Put trajectories one by one, as soon as space permits."""
    put = producer.put
    for (instance_id, index), (tokens, loss_mask, logprobs) in items:
        put(
            instance_id,
            group_size=group_size,
            index=index,
            score=1.0,
            policy_version=_POLICY_VERSION,
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            timeout=STALL_S,
        )


def put_batches(put_many: Callable[..., Any], items: Iterator[Item], workload: Workload) -> None:
    """Build each batch's dicts within the loop, like a producer of fresh trajectories."""
    while batch := [
        {
            "instance_id": instance_id,
            "group_size": workload.group_size,
            "index": index,
            "score": 1.0,
            "policy_version": _POLICY_VERSION,
            "tokens": tokens,
            "loss_mask": loss_mask,
            "logprobs": logprobs,
        }
        for (instance_id, index), (tokens, loss_mask, logprobs) in itertools.islice(
            items, workload.batch
        )
    ]:
        put_many(batch, timeout=STALL_S)


def check_ledger(ledger: shmbus.Ledger, workload: Workload) -> None:
    """Refuse a run without exactly one arrival and acknowledgement for every trajectory."""
    if not ledger.balanced or ledger.acknowledged != workload.trajectories or ledger.dropped:
        raise MeasurementError(
            f"expected {workload.trajectories} trajectories acknowledged, got this ledger: {ledger}"
        )
