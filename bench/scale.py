"""How the cost of a unit grows with the size of a run: ``python -m bench.scale``.

A row measures a unit of work, such as a taken group, at growing sizes of the run. The value of the
row: exponent k of cost = c * size^k, fitted over all sizes. A cost is processor time, the least of
several tries, each size in a fresh process.
"""

import argparse
import contextlib
import ctypes
import itertools
import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import shmbus
from bench import machine, program
from bench.processes import MeasurementError, processor_s, run_alone, sleeps, use_template
from bench.row import Row, number, skipped

__all__ = ["SCALES", "exponent", "main"]

TRIES: Final = 5
#: Seconds of observation of working or waiting processes: longer than a sweep's interval.
SPAN_S: Final = 1.5
#: Bytes of the ring for each small record.
RECORD_BYTES: Final = 512
LEAST_BYTES: Final = 64 << 20
X: Final = np.zeros(1, np.int8)
#: Half of a group.
OPEN: Final = {"group_size": 2, "x": X}
GROUPS_A_STEP: Final = 8
PR_SET_PDEATHSIG: Final = 1


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Fit k of cost = c * size^k by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def least(call: Callable[[], object], units: int = 1) -> float:
    """Return the processor seconds of a call for each of its units, the least of several tries."""
    found = math.inf
    for _ in range(TRIES):
        began = time.process_time()
        call()
        found = min(found, time.process_time() - began)
    return found / units


@contextmanager
def bus(samples: int = 0, producers: int = 1, **options: Any) -> Iterator[str]:
    """Create a bus with room for a number of small samples; yield the name."""
    name = f"bench-scale-{os.getpid()}"
    capacity = max(LEAST_BYTES, RECORD_BYTES * (samples + 128 * producers))
    with shmbus.Bus.create(name, capacity, max_producers=producers + 1, **options):
        yield name


# -- producers and workers ---------------------------------------------------------------------


@contextmanager
def attached(size: int) -> Iterator[tuple[shmbus.Producer, shmbus.Consumer]]:
    """Attach producers and a consumer; yield the first producer and the consumer."""
    with bus(producers=size) as name, ExitStack() as stack:
        producers = [stack.enter_context(shmbus.Producer(name)) for _ in range(size)]
        yield producers[0], stack.enter_context(shmbus.Consumer(name))


def take(size: int) -> float:
    """Put, take and acknowledge groups beside attached producers, sweeps included."""
    with attached(size) as (producer, consumer):
        samples = [{"instance_id": f"g{g}", "index": i, **OPEN} for g in range(64) for i in (0, 1)]
        began, ends, groups = time.process_time(), time.monotonic() + SPAN_S, 0
        while time.monotonic() < ends:
            producer.put_many(samples)
            consumer.ack(consumer.take(64, timeout=0))
            groups += 64
        return (time.process_time() - began) / groups


def stats(size: int) -> float:
    """Read the ledger beside attached producers: seconds a producer's row."""
    with attached(size) as (_, consumer):
        return least(consumer.stats, size)


def workers(size: int) -> float:
    """Let workers wait on an empty request lane: processor seconds of a worker each second."""
    with (
        bus(producers=size) as name,
        shmbus.Consumer(name) as consumer,
        working(size, name, consumer, lambda producer: producer.requests.next(600)) as pids,
    ):
        time.sleep(0.5)
        before = sum(map(processor_s, pids))
        time.sleep(SPAN_S)
        return (sum(map(processor_s, pids)) - before) / size / SPAN_S


def admitted(size: int) -> float:
    """Take groups from workers that wait to begin the next: processor seconds of all a group."""

    def put(producer: shmbus.Producer) -> None:
        producer.put(f"{os.getpid()}", group_size=1, index=0, x=X)

    with (
        bus(producers=size, max_lead=8) as name,
        shmbus.Consumer(name) as consumer,
        working(size, name, consumer, put) as pids,
    ):
        consumer.ack(consumer.take(64, timeout=10))
        before = sum(map(processor_s, pids)) + time.process_time()
        ends, groups = time.monotonic() + SPAN_S, 0
        while time.monotonic() < ends:
            taken = consumer.take(64, timeout=1)
            consumer.ack(taken)
            groups += len(taken)
        return (sum(map(processor_s, pids)) + time.process_time() - before) / groups


@contextmanager
def working(
    size: int, name: str, consumer: shmbus.Consumer, work: Callable[[shmbus.Producer], object]
) -> Iterator[list[int]]:
    """Fork workers, attach each, repeat their work; yield their process ids once all sleep."""
    import shmbus.pool.server_rows  # noqa: F401  (each worker would load the module)

    pids = [worker(name, work) for _ in range(size)]
    try:
        ends = time.monotonic() + 120
        while consumer.stats().producers < size or not all(map(sleeps, pids)):
            if time.monotonic() > ends:
                raise MeasurementError(f"not all of {size} workers have attached in 120 s")
            time.sleep(0.05)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def worker(name: str, work: Callable[[shmbus.Producer], object]) -> int:
    """Fork a worker, which ends with the parent process."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(BaseException), shmbus.Producer(name) as producer:
            while True:
                work(producer)
        os._exit(0)
    return pid


# -- groups and samples ------------------------------------------------------------------------


def groups(size: int) -> float:
    """Complete, take and acknowledge a group beside open ones."""
    return beside_open(size, score=1.0, expected=1)


def dropped(size: int) -> float:
    """Complete and drop a group without variance, after the request lane was used."""
    return beside_open(size, score=0.0, expected=0, skip_zero_variance=True)


def beside_open(size: int, score: float, expected: int, **policy: Any) -> float:
    """Measure the second sample of some of many open groups, up to the end of the group."""
    with (
        bus(samples=size) as name,
        shmbus.Producer(name) as producer,
        shmbus.Consumer(name, group_timeout=None, **policy) as consumer,
    ):
        consumer.request("asked", group_size=1, prompt=X)
        request = producer.requests.next(timeout=10)
        assert request is not None
        producer.requests.answer(request, x=X)
        consumer.ack(consumer.take(1, timeout=10))
        for first in range(0, size, 4096):
            numbers = range(first, min(first + 4096, size))
            producer.put_many([{"instance_id": f"g{g}", "index": 0, **OPEN} for g in numbers])
            consumer.take(1, timeout=0)
        waiting = iter(random.Random(1).sample(range(size), TRIES * 16))

        def end_some() -> None:
            for _ in range(16):
                producer.put(f"g{next(waiting)}", group_size=2, index=1, score=score, x=X)
                found = consumer.take(1, timeout=0)
                if len(found) != expected:
                    raise MeasurementError(f"expected {expected} groups, got {len(found)}")
                consumer.ack(found)

        return least(end_some, 16)


def retries(size: int) -> float:
    """Read the report of a failure beside samples before their retry."""
    from shmbus.stash.collector import Collector
    from shmbus.stash.stash import StashPolicy

    policy = StashPolicy(sample_retries=1, retry_backoff_s=(600.0, 600.0))
    with bus(samples=size) as name, shmbus.Producer(name) as producer:
        collector = Collector(name, policy)
        names = (f"g{g}" for g in range(size + TRIES * 16))

        def fail(count: int) -> None:
            for _ in range(count):
                producer.fail(next(names), 0, "flaky", group_size=2)
                collector.pump_once(0.0)

        fail(size)
        found = least(partial(fail, 16), 16)
        collector.close()
    return found


def prompts(size: int) -> float:
    """Offer a prompt beside open prompts, and count the open prompts."""
    with bus(request_capacity=8192 * (size + 64)) as name, shmbus.Consumer(name) as consumer:
        rounds = itertools.count()

        def offer() -> int:
            round_ = next(rounds)
            consumer.request("prompt", group_size=1, round=round_, prompt=X, timeout=1)
            return consumer.count_open_requests()

        while offer() < size:
            pass
        return least(lambda: [offer() for _ in range(16)], 16)


# -- trainers, agents, weights, nodes ----------------------------------------------------------


def ranks(size: int) -> float:
    """Complete groups one by one while ranks wait: the daemon's work, with the answers."""
    from shmbus.control import messages
    from shmbus.daemon.service import Service
    from shmbus.stash.collector import Collector
    from shmbus.stash.stash import StashPolicy
    from shmbus_ext import _core

    with bus() as name, shmbus.Producer(name) as producer:
        collector = Collector(name, StashPolicy())
        service = Service(collector, {})
        sessions: list[Any] = [
            service.hello(
                messages.Hello(version=messages.VERSION, bus=name, rank=rank, world_size=size),
                lambda *replies: None,
            )
            for rank in range(size)
        ]

        def step() -> None:
            for rank, session in enumerate(sessions):
                service.handle(session, messages.TakeStep(id=rank, groups=GROUPS_A_STEP))
            for group in range(size * GROUPS_A_STEP):
                producer.put(f"g{group}", group_size=1, index=0, x=X)
                now_s = time.monotonic()
                service.pump(now_s)
                service.next_tick_s(now_s)
            for session in sessions:
                if len(session.leases) != GROUPS_A_STEP:
                    raise MeasurementError(f"a rank was granted {len(session.leases)} groups")
                ended = messages.End(numbers=list(session.leases), reason=_core.ACKED)
                service.handle(session, ended)

        found = least(step, size * GROUPS_A_STEP)
        collector.close()
    return found


def batches(size: int) -> float:
    """Divide sequences into micro-batches of at most 16,384 tokens."""
    from trainer_adapter.balance import by_budget

    made = random.Random(size)
    lengths = [min(16_384, int(made.lognormvariate(7.3, 0.9)) + 1) for _ in range(size)]
    return least(partial(by_budget, lengths, 16_384), size)


def sessions(size: int) -> float:
    """Look at the open sessions of a recorder, as twice a second: seconds a checked session."""
    from shmbus.recorder.recorder import Recorder
    from shmbus.recorder.sessions import Place
    from shmbus.recorder.settings import SWEEP_SESSIONS, Settings

    with bus() as name, shmbus.Feeder(name) as feeder:
        recorder = Recorder(Settings(bus=name, engines=("http://127.0.0.1:9",), sessions=size))
        for opened in range(size):
            if opened % 64 == 0:
                feeder.request(f"q{opened}", group_size=64, prompt=X)
            request = recorder.producer.requests.next(timeout=10)
            assert request is not None
            place = Place(request.instance_id, request.index, 64)
            recorder.sessions.open(place, request, True, time.monotonic())
        checked = min(size, SWEEP_SESSIONS)
        found = least(lambda: recorder._check_some(time.monotonic()), checked)
        if len(recorder.sessions) != size:
            raise MeasurementError(f"expected {size} sessions, {len(recorder.sessions)} are open")
        recorder._file.close()
        recorder.producer.close()
    return found


def tensors(size: int) -> float:
    """Publish a model of small tensors: seconds a tensor."""
    return publish(size, 0) / size


def subscribers(size: int) -> float:
    """Publish a small model beside attached subscribers."""
    return publish(16, size)


def publish(tensors: int, subscribers: int) -> float:
    """Publish versions of a model with a number of tensors."""
    import torch

    from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

    name = f"bench-scale-{os.getpid()}"
    model = torch.nn.ParameterList(torch.zeros(64) for _ in range(tensors))
    versions = iter(range(1, 2 + TRIES))
    with contextlib.closing(WeightPublisher(name, ModuleSource(model))) as publisher:
        publisher.publish(next(versions))
        with ExitStack() as stack:
            for _ in range(subscribers):
                stack.enter_context(WeightSubscriber(name))
            return least(lambda: publisher.publish(next(versions)))


def nodes(size: int) -> float:
    """Take a hello of a simulated node at the relay's coordinator."""
    from shmbus.relay import messages
    from shmbus.relay.coordinator_party import CoordinatorParty

    class Box:
        address = "coordinator"

        def send(self, address: str, message: object) -> None:
            """Lose the message."""

    addresses = ["sink", *(f"node{node}" for node in range(size))]
    party = CoordinatorParty(Box(), addresses[1:], addresses[:1])  # type: ignore[arg-type]

    def hello() -> None:
        for at, address in enumerate(addresses):
            values = dict.fromkeys(messages.Hello._fields, 0) | messages.Hello._field_defaults
            own: Any = {
                "address": address, "is_sink": at == 0, "name": "bus", "bus": f"{at:032x}",
                "paused": None, "coordinator": "coordinator", "clock_ns": time.time_ns(),
            }  # fmt: skip
            party.take(messages.Envelope(address, messages.Hello(**{**values, **own})))

    hello()
    return least(hello, size + 1)


class Scale(NamedTuple):
    """A row: unit, measurement of a size, sizes of the whole and of the short form."""

    title: str
    measure: Callable[[int], float]
    sizes: tuple[int, ...]
    quick: tuple[int, ...]


SCALES: Final = {
    "producers": Scale("producers: take a group", take, (16, 256, 1000, 4000), (4, 64)),
    "stats": Scale("producers: stats(), a row", stats, (16, 256, 1000, 4000), (4, 64)),
    "workers": Scale("waiting workers: one, a second", workers, (8, 64, 256, 1000), (4, 16)),
    "admitted": Scale("waiting to begin: a group", admitted, (8, 64, 256, 1000), (4, 16)),
    "groups": Scale("open groups: complete one", groups, (10**3, 10**4, 10**5, 10**6), (100, 1000)),
    "dropped": Scale("open groups: drop one", dropped, (10**3, 10**4, 10**5, 10**6), (100, 1000)),
    "ranks": Scale("waiting ranks: a group", ranks, (2, 8, 32, 128), (2, 16)),
    "prompts": Scale("open prompts: offer one", prompts, (128, 1024, 8192), (16, 128)),
    "retries": Scale("failed samples: one more", retries, (1000, 8000, 32_000), (200, 1000)),
    "batches": Scale("sequences: place one", batches, (3000, 10**4, 30_000, 10**5), (300, 3000)),
    "sessions": Scale("sessions: check one", sessions, (64, 512, 4096), (16, 128)),
    "tensors": Scale("tensors: publish one", tensors, (100, 1000, 10**4), (10, 100)),
    "subscribers": Scale("subscribers: publish", subscribers, (1, 8, 32, 128), (1, 4)),
    "nodes": Scale("nodes: a hello", nodes, (4, 64, 256, 1000), (4, 32)),
}
OF_TORCH: Final = ("batches", "tensors", "subscribers")


def cost(start: Callable[[], None], name: str, size: int) -> float:
    """Measure a size of a row, in a fresh process."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the bus
    start()
    return SCALES[name].measure(size)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure each row at all of its sizes, by turns."""
    short = options.quick or options.tiny
    if short:
        use_template("torch", "trainer_adapter", "shmbus.weights", "bench.row")
    rows = []
    for name in options.only or SCALES:
        scale = SCALES[name]
        sizes = scale.quick if short else scale.sizes
        samples = sizes[-1] if name in ("groups", "dropped") else 0
        why = machine.lacks(
            shm_bytes=2 * max(LEAST_BYTES, RECORD_BYTES * samples),
            modules=["torch"] if name in OF_TORCH else [],
        )
        turns: list[list[float]] = []
        print(name, file=sys.stderr, flush=True)
        try:
            for _ in range(0 if why else options.repetitions or 1):
                turns.append([1e6 * run_alone(cost, name, size) for size in sizes])
        except MeasurementError as error:
            why = f"it failed: {error}"
        if why:
            rows.append(skipped(f"scale-{name}", scale.title, why))
            continue
        costs = [number(min(found)) for found in zip(*turns, strict=True)]
        rows.append(
            Row(
                name=f"scale-{name}", title=scale.title, unit="exponent",
                values=tuple(exponent(sizes, found) for found in turns),
                note=f"{' '.join(costs)} us at {' '.join(f'{size:,}' for size in sizes)}",
                figures={"sizes": sizes, "us": turns},
            )
        )  # fmt: skip
    return rows


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("scale", __doc__)
    made.add_argument("--quick", action="store_true", help="small sizes, in half a minute")
    made.add_argument(
        "--only", action="append", choices=list(SCALES), metavar="ROW", default=[],
        help=f"may be repeated: {', '.join(SCALES)}",
    )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("scale", parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
