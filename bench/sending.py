"""The sending side of all rows over shmbus: the bus of a measurement, and its producers."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import shmbus
from bench.failures import MeasurementError
from bench.processes import STALL_S
from bench.workload import Item, Workload
from shmbus._arguments import parse_size

__all__ = ["bus_bytes", "check_ledger", "produce", "put_batches", "put_each", "temporary_bus"]

_POLICY_VERSION = 3


def bus_bytes(capacity: str) -> int:
    """Return what a bus takes of /dev/shm at most: its ring, and tables that grow with it."""
    ring = parse_size(capacity)
    return ring + ring // 16 + (1 << 20)


@contextmanager
def temporary_bus(capacity: str, request_capacity: int | None = None) -> Iterator[str]:
    """Create a bus, all of it allocated and touched; yield its name, and remove it."""
    name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    with shmbus.Bus.create(name, capacity, request_capacity=request_capacity):
        yield name


def produce(
    start: Callable[[], None], name: str, workload: Workload, number: int, per_s: float = 0.0
) -> float:
    """Send one producer's share; return the processor seconds.

    As fast as the bus takes it, or so many trajectories a second, by whole groups.
    """
    items = workload.items(number)
    if per_s:
        items = _paced(items, per_s, workload.group_size)
    with shmbus.Producer(name) as producer:
        start()
        began = time.process_time()
        if workload.batch:
            put_batches(producer.put_many, items, workload)
        else:
            put_each(producer, items, workload.group_size)
        return time.process_time() - began


def _paced(items: Iterator[Item], per_s: float, group_size: int) -> Iterator[Item]:
    began = time.monotonic()
    for number, item in enumerate(items):
        if number % group_size == 0:
            time.sleep(max(began + number / per_s - time.monotonic(), 0.0))
        yield item


def put_each(producer: shmbus.Producer, items: Iterator[Item], group_size: int) -> None:
    """Put one trajectory after the other, each as soon as there is space for it."""
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
    """Build each batch's dicts within the loop, as a producer of fresh trajectories has to."""
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
    """Refuse a run in which not every trajectory arrived and was acknowledged exactly once."""
    if not ledger.balanced or ledger.acknowledged != workload.trajectories or ledger.dropped:
        raise MeasurementError(
            f"expected {workload.trajectories} trajectories acknowledged, got this ledger: {ledger}"
        )
