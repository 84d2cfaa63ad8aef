"""Several ranks behind one daemon: ``python -m bench.ranks --output FILE``.

For a machine with many cores. Producers put trajectories of 2,048 tokens, as many producers as
there are ranks; a daemon forms steps of a batch for each rank, and each rank packs its own. One
rank, with one producer, is measured in turns with several. Where the rate does not grow with the
ranks, the processor seconds a second say who has no time left: the daemon, the ranks, or nobody,
which is memory's bandwidth. With ``--prefetch N`` each is also measured with so many batches made
ahead: a rank asks for a step while it has the one before.
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

from bench import command, fitness, machine
from bench.failures import MeasurementError
from bench.fitness import Need
from bench.processes import STALL_S, Role, run_together, use_template
from bench.rows.daemon import processor_s, serving
from bench.rows.packed import MOVED_BYTES_PER_TOKEN, TOKENS_PER_BATCH
from bench.sending import bus_bytes, check_ledger, produce, temporary_bus
from bench.workload import Workload

__all__ = ["Line", "main", "table"]

TOKENS: Final = 2048
RANKS: Final = (1, 2, 4, 8)
CAPACITY: Final = "512MiB"
#: Trajectories a second and rank to expect: it sizes the runs, and decides nothing else.
EXPECTED_EACH: Final = 100_000
PER_BATCH: Final = TOKENS_PER_BATCH // TOKENS
HEADS: Final = (
    "ranks", "ahead", "a second", "lowest, highest", "of one", "GB/s", "a rank", "daemon",
    "producer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Line:
    """So many ranks.

    Attributes
    ----------
    ranks : int
        And as many producers.
    prefetch : int
        Batches that each rank makes ahead.
    rate : float
        Trajectories a second of all ranks together, from the last rank's first batch to the end of
        the last rank: the median of the turns.
    rates : tuple of float
        Of each turn.
    of_one : float
        Times the rate of one rank that makes none ahead: the median of the turns' ratios.
    rank_busy, daemon_busy, producer_busy : float
        Processor seconds a second, of one rank, of the daemon, and of one producer.
    """

    ranks: int
    prefetch: int
    rate: float
    rates: tuple[float, ...]
    of_one: float
    rank_busy: float
    daemon_busy: float
    producer_busy: float


@dataclass(frozen=True)
class _Run:
    rate: float
    rank_busy: float
    daemon_busy: float
    producer_busy: float


@command.orderly("ranks")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; exit status 1 where nothing can be measured."""
    options = _parser().parse_args(argv)
    ring = bus_bytes(options.capacity)
    if command.lacks(["torch"], "ranks", command.TRAIN):
        return 1
    asked = sorted({1, *(options.ranks or (RANKS[:2] if options.tiny else RANKS))})
    here = fitness.here()
    # One rank beside its producer; of several, who shares a processor shows in the busy columns.
    if command.refused(Need(processors=fitness.TWO, shm_bytes=ring, less="--capacity"), "ranks"):
        return 1
    if options.tiny:
        use_template("bench.sending", "trainer_adapter")
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    for count in asked:
        if 2 * count + 1 > here.processors:
            named = "1 rank" if count == 1 else f"{count} ranks"
            print(f"NOTE: {named}, as many producers and a daemon share {here.processors:g} "
                  "processors; such a rate says little of more of them.")  # fmt: skip
    ahead = sorted({0, options.prefetch})
    runs: dict[tuple[int, int], list[_Run]] = {key: [] for key in itertools.product(asked, ahead)}
    seconds = 0.01 if options.tiny else options.seconds
    for _ in range(1 if options.tiny else options.turns):
        for (count, prefetch), found in runs.items():
            found.append(_run(count, prefetch, seconds, options.capacity))
    lines = [_line(*key, found, runs[1, 0]) for key, found in runs.items()]
    print(table(lines))
    if options.tiny:
        print(fitness.TINY)
    result = {"machine": facts, "tokens": TOKENS, "lines": [asdict(line) for line in lines]}
    return command.keep(options.output, result, "ranks")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ranks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--ranks", type=command.at_least_one, action="append", metavar="N",
        help="so many, beside one; may be repeated (1, 2, 4, 8)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=command.positive, default=2.0, help="that a run is to take (2)"
    )
    parser.add_argument("--turns", type=command.at_least_one, default=5, help="of each (5)")
    parser.add_argument(
        "--prefetch", type=command.at_least_one, default=0, metavar="N",
        help="measure each also with so many batches made ahead",
    )  # fmt: skip
    command.add_usual(parser, CAPACITY)
    return parser


def _run(ranks: int, prefetch: int, seconds: float, capacity: str) -> _Run:
    steps = max(2, round(seconds * EXPECTED_EACH / PER_BATCH))
    workload = Workload(
        trajectories=steps * ranks * PER_BATCH, tokens=TOKENS, producers=ranks, capacity=capacity
    )
    with temporary_bus(capacity) as name, serving(name) as pid:
        shared = (name, workload, ranks, prefetch, steps)
        roles = [Role(_train, (rank, *shared)) for rank in range(ranks)]
        roles += [Role(produce, (name, workload, number)) for number in range(ranks)]
        before = processor_s(pid)
        found = run_together(roles)
        daemon_s = processor_s(pid) - before
    trained, produced = found[:ranks], found[ranks:]
    first, last = max(one[0] for one in trained), max(one[1] for one in trained)
    span = last - first
    done = (steps - 1) * ranks * PER_BATCH
    return _Run(
        rate=done / span,
        rank_busy=statistics.mean(one[2] for one in trained) / span,
        # With what attaching took, which is little beside seconds of work.
        daemon_busy=daemon_s / span,
        producer_busy=statistics.mean(produced) / span,
    )


def _train(
    start: Callable[[], None],
    rank: int,
    name: str,
    workload: Workload,
    ranks: int,
    prefetch: int,
    steps: int,
) -> tuple[float, float, float]:
    """Take and acknowledge a rank's batches; its first batch, its end, processor seconds between.

    Times are of the clock that all processes share.
    """
    # Only this process needs torch.
    from trainer_adapter import OnlineDataHandler

    with OnlineDataHandler(
        name, tokens_per_batch=TOKENS_PER_BATCH, max_wait=None, rank=rank, world_size=ranks,
        prefetch=prefetch,
    ) as handler:  # fmt: skip
        start()
        sequences = 0
        for step in range(steps):
            batch = handler.next_batch(STALL_S)
            if not step:
                began, began_cpu = time.monotonic(), time.process_time()
            sequences += batch.sequences
            handler.ack(batch)
        ended, cpu_s = time.monotonic(), time.process_time() - began_cpu
        if sequences != steps * PER_BATCH:
            raise MeasurementError(f"rank {rank}: expected {steps * PER_BATCH}, got {sequences}")
        if ranks == 1:
            check_ledger(handler.stats(), workload)
    return began, ended, cpu_s


def _line(count: int, prefetch: int, runs: Sequence[_Run], ones: Sequence[_Run]) -> Line:
    return Line(
        ranks=count,
        prefetch=prefetch,
        rate=statistics.median(run.rate for run in runs),
        rates=tuple(run.rate for run in runs),
        of_one=statistics.median(run.rate / one.rate for run, one in zip(runs, ones, strict=True)),
        rank_busy=statistics.median(run.rank_busy for run in runs),
        daemon_busy=statistics.median(run.daemon_busy for run in runs),
        producer_busy=statistics.median(run.producer_busy for run in runs),
    )


def table(lines: Sequence[Line]) -> str:
    """Lay lines out as plain text, in columns of fixed width."""
    form = "{:>5}  {:>5}  {:>9}  {:>19}  {:>7}  {:>6}  {:>6}  {:>6}  {:>8}"
    told = [form.format(*HEADS)]
    for one in lines:
        told.append(
            form.format(
                one.ranks, one.prefetch, f"{one.rate:,.0f}",
                f"{min(one.rates):,.0f}, {max(one.rates):,.0f}",
                f"{one.of_one:.2f}", f"{one.rate * TOKENS * MOVED_BYTES_PER_TOKEN / 1e9:.1f}",
                f"{one.rank_busy:.2f}", f"{one.daemon_busy:.2f}", f"{one.producer_busy:.2f}",
            )
        )  # fmt: skip
    return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main())
