"""Many producers and one reader: how the rate grows with producers, where it bends, and on what.

``python -m bench.cores --output FILE``. For a machine with many cores.

- *Alone*: producers fill a bus and end, then one reader empties it: groups alone, and with a view
  of each field. No rate with producers beside it can be higher; that is the bound of the others.
- *Beside*: 1 to 64 producers put 256 tokens each, one by one and 64 a call, to the same two
  readers.

Each line has the reader's processor time a second, so that it shows who waits: a reader at 1 is
what the rate bends on, below that it waits for producers. Producers that wait for space sleep,
and have less than a processor each.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import shmbus
from bench import command, fitness, machine
from bench.contest import usage
from bench.failures import MeasurementError
from bench.fitness import TWO, Need
from bench.processes import STALL_S, Role, run_together, use_template
from bench.sending import bus_bytes, check_ledger, put_batches, put_each, temporary_bus
from bench.workload import BYTES_PER_TOKEN, Workload

__all__ = ["Line", "bend", "main", "table"]

TOKENS: Final = 256
BATCH: Final = 64
PRODUCERS: Final = (1, 2, 4, 8, 16, 32, 64)
CAPACITY: Final = "256MiB"
#: Holds all records that a reader empties by itself.
FULL_CAPACITY: Final = "1GiB"
ALONE: Final = 250_000
#: Trajectories a second and producer, and of all, to expect: they size the runs, and decide
#: nothing else.
EXPECTED_EACH: Final = 600_000
EXPECTED_MOST: Final = 2_500_000
#: The rate has bent where twice the producers bring less than this many times the rate.
GROWTH: Final = 1.25


@dataclass(frozen=True, kw_only=True)
class Line:
    """One point.

    Attributes
    ----------
    producers : int
        That put while it was read; 0 for a bus that was filled before.
    batch : int
        Trajectories a call; 1 for `put`.
    views : bool
        Whether the reader made a view of each field.
    rate : float
        Trajectories a second, from the first delivery to the last acknowledgement.
    rates : tuple of float
        Of each run; `rate` is their median.
    reader_busy : float
        Processor seconds of the reader a second.
    reader_us, producers_us : float
        Processor microseconds a trajectory, of the reader and of all producers.
    kernel_us : float
        Those of the producers in the kernel.
    switches : float
        Of all processes, a trajectory.
    a_take : float
        Trajectories that a take returned.
    """

    producers: int
    batch: int
    views: bool
    rate: float
    rates: tuple[float, ...]
    reader_busy: float
    reader_us: float
    producers_us: float
    kernel_us: float
    switches: float
    a_take: float

    @property
    def how(self) -> str:
        """The calls that put."""
        return "put" if self.batch == 1 else f"put_many of {self.batch}"


@command.orderly("cores")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    options = _parser().parse_args(argv)
    if options.forked or options.tiny:
        use_template("bench.contest.usage", "bench.sending")
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    here = fitness.here()
    for note in fitness.notes(here):
        print(note, end="", flush=True)
    lines: list[Line] = []
    for wanted in _points(options):
        if why := fitness.why_not(wanted.need, here):
            print(f"{wanted}: cannot be measured here: {why}", flush=True)
            continue
        lines.append(_measure(wanted, options.runs))
        print(table(lines[-1:], heads=len(lines) == 1), flush=True)
    if not lines:
        return command.nothing("cores")
    print(fitness.TINY if options.tiny else _bends(lines))
    result = {"machine": facts, "tokens": TOKENS, "lines": [asdict(line) for line in lines]}
    return command.keep(options.output, result, "cores")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cores",
        description="Measure one reader beside 1 to 64 producers of 256 tokens.",
        epilog="example: python -m bench.cores --producers 1 --producers 16 --seconds 2",
    )
    parser.add_argument(
        "--producers", type=command.at_least_one, action="append", metavar="N",
        help="this many; may be repeated (default 1, 2, 4 ... 64)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=command.positive, default=1.0, help="that a run is to take (default 1)"
    )
    parser.add_argument(
        "--runs", type=command.at_least_one, default=3, help="of each point (default 3)"
    )
    parser.add_argument(
        "--forked", action="store_true",
        help="fork processes from one that has imported everything, where beginning takes long",
    )  # fmt: skip
    command.add_usual(parser, CAPACITY)
    return parser


@dataclass(frozen=True)
class _Point:
    workload: Workload
    views: bool
    alone: bool

    @property
    def need(self) -> Need:
        """Two processors, but where a full ring is read with nobody beside."""
        ring = bus_bytes(self.workload.capacity)
        # What is filled before it is read has a size of its own.
        less = "" if self.alone else "--capacity"
        return Need(processors=1.0 if self.alone else TWO, shm_bytes=ring, less=less)

    def __str__(self) -> str:
        how = "views" if self.views else "groups"
        if self.alone:
            return f"a full ring to {how}"
        return f"{self.workload.producers} producers, {self.workload.batch} a call, to {how}"


def _points(options: argparse.Namespace) -> list[_Point]:
    seconds = 0.002 if options.tiny else options.seconds
    counts = options.producers or ((1, 2) if options.tiny else PRODUCERS)
    alone = 4096 if options.tiny else ALONE
    full = Workload(
        trajectories=alone // BATCH * BATCH,
        tokens=TOKENS,
        batch=BATCH,
        capacity="64MiB" if options.tiny else FULL_CAPACITY,
    )
    points = [_Point(full, views, alone=True) for views in (False, True)]
    for batch in (1, BATCH):
        for views in (False, True):
            for producers in counts:
                unit = producers * BATCH
                wanted = seconds * min(EXPECTED_EACH * producers, EXPECTED_MOST)
                workload = Workload(
                    trajectories=max(2, round(wanted / unit)) * unit,
                    tokens=TOKENS,
                    producers=producers,
                    batch=batch,
                    capacity=options.capacity,
                )
                points.append(_Point(workload, views, alone=False))
    return points


def _measure(point: _Point, runs: int) -> Line:
    """Run a point so often; what stands for it is the run with the median rate."""
    found = [_run(point) for _ in range(runs)]
    rates = [line.rate for line in found]
    middle = statistics.median_low(rates)
    stands = next(line for line in found if line.rate == middle)
    return Line(**{**asdict(stands), "rates": tuple(rates)})


def _run(point: _Point) -> Line:
    workload = point.workload
    with temporary_bus(workload.capacity) as name:
        consumer = Role(_consume, (name, workload, point.views))
        producers = [Role(_produce, (name, workload, i)) for i in range(workload.producers)]
        if point.alone:
            sent = run_together(producers)
            (seconds, counted, takes, read) = run_together([consumer])[0]
        else:
            (seconds, counted, takes, read), *sent = run_together([consumer, *producers])
    count = workload.trajectories
    return Line(
        producers=0 if point.alone else workload.producers,
        batch=workload.batch,
        views=point.views,
        rate=counted / seconds,
        rates=(),
        reader_busy=read.cpu_s / seconds,
        reader_us=read.cpu_s / counted * 1e6,
        producers_us=sum(one.cpu_s for one in sent) / count * 1e6,
        kernel_us=sum(one.kernel_s for one in sent) / count * 1e6,
        switches=(read.switches + sum(one.switches for one in sent)) / count,
        a_take=count / takes,
    )


def _produce(start: Callable[[], None], name: str, workload: Workload, number: int) -> usage.Spent:
    """Send one producer's share, as fast as the bus takes it."""
    items = workload.items(number)
    with shmbus.Producer(name) as producer:
        start()
        before = usage.own()
        if workload.batch > 1:
            put_batches(producer.put_many, items, workload)
            return usage.own() - before
        put_each(producer, items, workload.group_size)
        return usage.own() - before


def _consume(
    start: Callable[[], None], name: str, workload: Workload, views: bool
) -> tuple[float, int, int, usage.Spent]:
    """Take and acknowledge everything; return seconds, what they count, takes and the cost."""
    wanted, done, first, takes = workload.trajectories, 0, 0, 0
    began = before = None
    with shmbus.Consumer(name) as consumer:
        start()
        while done < wanted:
            groups = consumer.take(timeout=STALL_S)
            if not groups:
                raise MeasurementError(f"no group within {STALL_S:g} s: {consumer.stats()}")
            takes += 1
            if views:
                for group in groups:
                    for trajectory in group:
                        trajectory["tokens"]
                        trajectory["loss_mask"]
                        trajectory["logprobs"]
            done += len(groups) * workload.group_size
            consumer.ack(groups)
            if began is None or before is None:
                first, began, before = done, time.perf_counter(), usage.own()
        assert began is not None and before is not None
        seconds, spent = time.perf_counter() - began, usage.own() - before
        check_ledger(consumer.stats(), workload)
    return seconds, wanted - first, takes, spent


def _bends(lines: Sequence[Line]) -> str:
    ways = ((1, False), (1, True), (BATCH, False), (BATCH, True))
    same = ([one for one in lines if (one.batch, one.views) == way] for way in ways)
    return "\n".join(filter(None, map(bend, same)))


def bend(lines: Sequence[Line]) -> str:
    """Say from how many producers on the rate of one way to put and to read grows no more.

    Parameters
    ----------
    lines : sequence of Line
        That differ by their producers alone, each twice as many as the one before.
    """
    beside = [line for line in lines if line.producers]
    if len(beside) < 2:
        return ""
    best = max(beside, key=lambda line: line.rate)
    last = next(
        (
            before
            for before, after in itertools.pairwise(beside)
            if after.rate < GROWTH * before.rate
        ),
        beside[-1],
    )
    bound = "its reader has no time left" if last.reader_busy > 0.9 else "its reader waits"
    views = "views" if best.views else "groups"
    return (
        f"{best.how} to {views}: bends at {last.producers} producers ({last.rate / 1e6:.2f} M/s, "
        f"{bound}); best {best.rate / 1e6:.2f} M/s with {best.producers}"
    )


def table(lines: Sequence[Line], *, heads: bool = True) -> str:
    """Lay lines out as plain text, in columns of fixed width."""
    form = "{:>9}  {:<14}  {:<6}  {:>8}  {:>15}  {:>6}  {:>9}  {:>12}  {:>9}  {:>8}  {:>7}  {:>6}"
    told = []
    if heads:
        told.append(
            form.format(
                "producers", "by", "reader", "M/s", "lowest, highest", "GB/s", "reader us",
                "producers us", "in kernel", "switches", "reader", "a take",
            )
        )  # fmt: skip
    for one in lines:
        cells = (
            str(one.producers) if one.producers else "(filled)",
            one.how,
            "views" if one.views else "groups",
            f"{one.rate / 1e6:.3f}",
            f"{min(one.rates, default=0) / 1e6:.3f}, {max(one.rates, default=0) / 1e6:.3f}",
            f"{one.rate * TOKENS * BYTES_PER_TOKEN / 1e9:.2f}",
            f"{one.reader_us:.3f}",
            f"{one.producers_us:.3f}",
            f"{one.kernel_us:.3f}",
            f"{one.switches:.4f}",
            f"{one.reader_busy:.2f}",
            f"{one.a_take:.0f}",
        )
        told.append(form.format(*cells))
    return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main())
