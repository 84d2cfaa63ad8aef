"""shmbus, embedded: the consumer reads the ring itself, and groups by instance_id."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.contenders.base import Contender, Received, Sender
from bench.workload import Source, Timed, Workload

__all__ = ["CONTENDER", "link", "measure", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="shmbus",
    title="shmbus, embedded",
    packages=("shmbus", "numpy"),
    per_second=900_000.0,
    copies=1,
    copied="into the ring",
    favour="nothing: it groups, checks headers, and acknowledges, which the others mostly don't",
)

#: Seconds of a put's wait for space: longer than a reader's longest absence.
PUT_S: Final = 60.0


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Create a bus, allocated and touched in full."""
    # Imported late: environments without shmbus read the registry.
    sending = importlib.import_module("bench.sending")
    with sending.temporary_bus(workload.capacity) as name:
        yield name


class _Sender(Sender):
    def __init__(self, producer: Any, workload: Workload) -> None:
        self._put = producer.put
        self._group_size = workload.group_size

    def send(self, instance_id: str, index: int, source: Source) -> None:
        tokens, loss_mask, logprobs = source
        self._put(
            instance_id,
            group_size=self._group_size,
            index=index,
            score=1.0,
            policy_version=3,
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            timeout=PUT_S,
        )


class _Receiver:
    def __init__(self, consumer: Any, workload: Workload) -> None:
        self._consumer = consumer
        self._groups: list[Any] = []

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        self._groups = groups = self._consumer.take(timeout=timeout_s)
        return [
            (group.instance_id, t.index, (t["tokens"], t["loss_mask"], t["logprobs"]))
            for group in groups
            for t in group
        ]

    def done(self) -> None:
        self._consumer.ack(self._groups)
        self._groups = []


@contextlib.contextmanager
def sender(address: str, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    import shmbus

    with shmbus.Producer(address) as producer:
        yield _Sender(producer, workload)


@contextlib.contextmanager
def receiver(address: str, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    import shmbus

    with shmbus.Consumer(address) as consumer:
        yield _Receiver(consumer, workload)


def measure(workload: Workload) -> Timed:
    """Move a workload over its own bus, by the loop of the row to views."""
    timed: Timed = importlib.import_module("bench.rows.throughput").views(workload)
    return timed
