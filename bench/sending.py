"""The sending side of all rows over shmbus: a bus for one measurement, and its producer process."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import shmbus
from bench.processes import STALL_S, MeasurementError
from bench.workload import GROUP_SIZE, Workload

__all__ = ["Sent", "check_ledger", "produce", "temporary_bus"]

_POLICY_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one producer used: processor time while sending, and how often it found no space."""

    cpu_s: float
    full_waits: int


@contextmanager
def temporary_bus(capacity: str) -> Iterator[str]:
    """Create a bus, all of it allocated and touched; yield its name, and remove it."""
    name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    with shmbus.Bus.create(name, capacity):
        yield name


def produce(start: Callable[[], None], name: str, workload: Workload, number: int) -> Sent:
    """Send one producer's share, as fast as the bus takes it."""
    with shmbus.Producer(name) as producer:
        start()
        began = time.process_time()
        if workload.batch:
            _put_batches(producer, workload, number)
        else:
            _put_each(producer, workload, number)
        cpu_s = time.process_time() - began
        return Sent(cpu_s=cpu_s, full_waits=producer.stats().full_waits)


def _put_each(producer: shmbus.Producer, workload: Workload, number: int) -> None:
    arrays = workload.arrays()
    tokens, loss_mask, logprobs = arrays["tokens"], arrays["loss_mask"], arrays["logprobs"]
    put = producer.put
    for instance_id, index in workload.identities(number):
        put(
            instance_id,
            group_size=GROUP_SIZE,
            index=index,
            score=1.0,
            policy_version=_POLICY_VERSION,
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            timeout=STALL_S,
        )


def _put_batches(producer: shmbus.Producer, workload: Workload, number: int) -> None:
    """Build each batch's dicts within the loop, as a producer of fresh trajectories has to."""
    arrays = workload.arrays()
    tokens, loss_mask, logprobs = arrays["tokens"], arrays["loss_mask"], arrays["logprobs"]
    identities = workload.identities(number)
    for _ in range(workload.share // workload.batch):
        items = [
            {
                "instance_id": instance_id,
                "group_size": GROUP_SIZE,
                "index": index,
                "score": 1.0,
                "policy_version": _POLICY_VERSION,
                "tokens": tokens,
                "loss_mask": loss_mask,
                "logprobs": logprobs,
            }
            for instance_id, index in itertools.islice(identities, workload.batch)
        ]
        producer.put_many(items, timeout=STALL_S)


def check_ledger(ledger: shmbus.Ledger, workload: Workload) -> None:
    """Refuse a run in which not every trajectory arrived and was acknowledged exactly once."""
    if not ledger.balanced or ledger.acknowledged != workload.trajectories or ledger.dropped:
        raise MeasurementError(
            f"expected {workload.trajectories} trajectories acknowledged, got this ledger: {ledger}"
        )
