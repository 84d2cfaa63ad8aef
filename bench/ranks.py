"""Several ranks behind a daemon: ``python -m bench.ranks``, for a machine with many cores.

As many producers as ranks put trajectories of 2,048 tokens; the daemon forms steps of a batch for
each rank, and each rank packs its own. A single rank with a single producer takes turns with
several. Where the rate fails to grow with the ranks, the processor seconds a second name the
bottleneck: the daemon, the ranks, or else memory bandwidth. ``--producers N`` measures N producers
against an embedded reader instead: views, packed, iceoryx2, and ``multiprocessing.Queue``.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from bench import machine, program
from bench.contest import moving
from bench.contest.run import versions
from bench.processes import STALL_S, MeasurementError, Role, processor_s, run_together, use_template
from bench.row import Row, skipped
from bench.rows.throughput import PACKED_BYTES_PER_TOKEN, TOKENS_PER_BATCH, to_batches, views
from bench.sending import bus_bytes, produce, serving, temporary_bus
from bench.workload import BYTES_PER_TOKEN, Workload
from bench.yardsticks import memcpy

__all__ = ["main"]

TOKENS: Final = 2048
RANKS: Final = (1, 2, 4, 8)
CAPACITY: Final = "512MiB"
TURNS: Final = 5
#: Steps of a run: about two seconds.
STEPS: Final = 6000
PER_BATCH: Final = TOKENS_PER_BATCH // TOKENS
#: Bytes of a memcpy, far beyond the caches; trajectories of a run with many producers.
COPIED_BYTES: Final = 256 << 20
CROWD_TRAJECTORIES: Final = 1 << 19
#: Contenders beside them, with as many trajectories as a run of seconds needs.
OTHERS: Final = {"iceoryx2": 1 << 18, "mp_queue": 1 << 14}


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure each number of ranks, by turns."""
    asked = sorted({1, *(options.ranks or RANKS)})
    why = machine.lacks(cores=2, shm_bytes=bus_bytes(options.capacity), modules=["torch"])
    if why:
        return [skipped("ranks", "ranks behind one daemon", why)]
    if options.tiny:
        use_template("bench.sending", "trainer_adapter")
    turns = options.repetitions or (1 if options.tiny else TURNS)
    if options.producers:
        return [row for count in options.producers for row in _crowd(count, turns, options)]
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in asked}
    for _ in range(turns):
        for count, found in runs.items():
            found.append(_run(count, 2 if options.tiny else STEPS // count, options.capacity))
    rates = {count: tuple(run["rate"] for run in found) for count, found in runs.items()}
    rows = []
    for count, found in runs.items():
        busy = {key: statistics.median(run[key] for run in found) for key in found[0]}
        note = (
            f"busy: a rank {busy['rank']:.2f}, the daemon {busy['daemon']:.2f}, a producer "
            f"{busy['producer']:.2f}"
        )
        rows.append(
            Row(
                name=f"ranks-{count}", title=f"{count} ranks, {count} producers, one daemon",
                unit="trajectories/s", values=rates[count],
                beside="one rank" if count > 1 else "",
                beside_values=rates[1] if count > 1 else (), note=note,
            )
        )  # fmt: skip
    return rows


def _crowd(producers: int, turns: int, options: argparse.Namespace) -> list[Row]:
    """Measure an embedded reader behind many producers, beside copies by a single core."""
    workload = Workload(
        trajectories=PER_BATCH * producers * 8 if options.tiny else CROWD_TRAJECTORIES,
        tokens=TOKENS, producers=producers, capacity=options.capacity,
    )  # fmt: skip
    copied = memcpy(COPIED_BYTES >> (6 if options.tiny else 0), 5)
    kinds = {"views": (views, BYTES_PER_TOKEN), "packed": (to_batches, PACKED_BYTES_PER_TOKEN)}
    rows = [
        Row(
            name=f"crowd-{kind}-{producers}", title=f"{producers} producers, one reader, {kind}",
            unit="trajectories/s",
            values=tuple(run(workload).rate for _ in range(turns)),
            beside="memcpy", beside_values=(copied / (TOKENS * width),),
        )
        for kind, (run, width) in kinds.items()
    ]  # fmt: skip
    for module, trajectories in OTHERS.items():
        path = f"bench.contenders.{module}"
        contender = importlib.import_module(path).CONTENDER
        name, title = f"crowd-{module}-{producers}", f"{producers} producers, {contender.title}"
        try:
            versions(contender)
        except MeasurementError as error:
            rows.append(skipped(name, title, str(error)))
            continue
        fewer = replace(workload, trajectories=min(workload.trajectories, trajectories))
        found = [moving.measure(path, fewer).rate for _ in range(turns)]
        rows.append(Row(name=name, title=title, unit="trajectories/s", values=tuple(found)))
    return rows


def _run(ranks: int, steps: int, capacity: str) -> dict[str, float]:
    workload = Workload(
        trajectories=steps * ranks * PER_BATCH, tokens=TOKENS, producers=ranks, capacity=capacity
    )
    with temporary_bus(capacity) as name, serving(name) as pid:
        roles = [Role(_train, (rank, name, ranks, steps)) for rank in range(ranks)]
        roles += [Role(produce, (name, workload, number)) for number in range(ranks)]
        before = processor_s(pid)
        found: list[Any] = run_together(roles)
        daemon_s = processor_s(pid) - before
    trained, produced = found[:ranks], found[ranks:]
    span = max(one[1] for one in trained) - max(one[0] for one in trained)
    return {
        "rate": (steps - 1) * ranks * PER_BATCH / span,
        "rank": statistics.mean(one[2] for one in trained) / span,
        # Includes attaching: little beside seconds of work.
        "daemon": daemon_s / span,
        "producer": statistics.mean(produced) / span,
    }


def _train(
    start: Callable[[], None], rank: int, name: str, ranks: int, steps: int
) -> tuple[float, float, float]:
    """Take and acknowledge a rank's batches; its first batch, its end, processor seconds between.

    Times come from the system-wide clock.
    """
    # Imported late: only this process needs torch.
    from trainer_adapter import OnlineDataHandler

    with OnlineDataHandler(
        name, tokens_per_batch=TOKENS_PER_BATCH, max_wait=None, rank=rank, world_size=ranks
    ) as handler:
        start()
        sequences = 0
        for step in range(steps):
            batch = handler.next_batch(STALL_S)
            if not step:
                began, began_cpu = time.monotonic(), time.process_time()
            sequences += batch.num_sequences
            handler.ack(batch)
        ended, cpu_s = time.monotonic(), time.process_time() - began_cpu
        if sequences != steps * PER_BATCH:
            raise MeasurementError(f"rank {rank}: expected {steps * PER_BATCH}, got {sequences}")
    return began, ended, cpu_s


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("ranks", __doc__)
    made.add_argument(
        "--ranks", type=program.at_least_one, action="append", metavar="N",
        help="so many, beside one; may be repeated (1, 2, 4, 8)",
    )  # fmt: skip
    made.add_argument(
        "--producers", type=program.at_least_one, action="append", metavar="N",
        help="so many producers and one embedded reader; may be repeated",
    )  # fmt: skip
    made.add_argument(
        "--capacity", type=program.capacity, default=CAPACITY, help=f"of the bus ({CAPACITY})"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("ranks", parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
