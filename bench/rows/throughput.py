"""The throughput rows: the workload, the path and the target of each.

Repetitions go round by round, each round one run of every case, so that a slow minute of the
machine does not fall on one case alone. A figure is the median of its runs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.rows import hop, packed
from bench.rows.row import Row, Target
from bench.sizes import Sizes
from bench.workload import BYTES_PER_TOKEN, Measure, Timed, Workload

__all__ = ["Case", "cases", "repeat", "rows"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a workload, the function that measures it, and the target.

    `reference` names the case whose rate this one's is compared with; without it, bytes a second
    are compared with memcpy. `moved_bytes_per_token`, of a row that keeps two cores at memory, are
    those that it reads and writes: what both cores can move bounds it. A case without a target is
    there to put another one into proportion.
    """

    name: str
    title: str
    measure: Measure
    workload: Workload
    target: float | None = None
    bytes_per_token: int = BYTES_PER_TOKEN
    reference: str = ""
    moved_bytes_per_token: int | None = None


def cases(sizes: Sizes, capacity: str) -> list[Case]:
    """All throughput rows, in the order of the table."""
    short = Workload(trajectories=sizes.hop_2048, tokens=2048, capacity=capacity)
    long = Workload(trajectories=sizes.hop_16384, tokens=16_384, capacity=capacity)
    return [
        Case(
            name="hop-2048",
            title="put to views, 2,048 tokens",
            measure=hop.measure,
            workload=short,
            target=0.9,
        ),
        Case(
            name="hop-2048-cold",
            title="put to views, 2,048 tokens, sources cold",
            measure=hop.measure,
            workload=dataclasses.replace(short, cold=True),
        ),
        Case(
            name="hop-16384",
            title="put to views, 16,384 tokens",
            measure=hop.measure,
            workload=long,
            target=0.9,
        ),
        Case(
            name="hop-16384-cold",
            title="put to views, 16,384 tokens, sources cold",
            measure=hop.measure,
            workload=dataclasses.replace(long, cold=True),
        ),
        Case(
            name="hop-256",
            title="put_many of 64 to views, 256 tokens",
            measure=hop.measure,
            workload=Workload(trajectories=sizes.hop_256, tokens=256, batch=64, capacity=capacity),
            target=0.15,
        ),
        Case(
            name="packed",
            title="put to packed torch batches, 2,048 tokens",
            measure=packed.measure,
            workload=Workload(trajectories=sizes.packed, tokens=2048, capacity=capacity),
            target=0.9,
            bytes_per_token=packed.PACKED_BYTES_PER_TOKEN,
            moved_bytes_per_token=packed.MOVED_BYTES_PER_TOKEN,
        ),
        Case(
            name="four-producers",
            title="four producers, put to views, 2,048 tokens",
            measure=hop.measure,
            workload=dataclasses.replace(short, producers=4),
            target=0.8,
            reference="hop-2048",
        ),
    ]


def repeat(
    chosen: Iterable[Case], repetitions: int, say: Callable[[str], None]
) -> dict[str, list[Timed]]:
    """Run each case so many times, round by round."""
    chosen = list(chosen)
    runs: dict[str, list[Timed]] = {case.name: [] for case in chosen}
    for number in range(repetitions):
        for case in chosen:
            say(f"{case.title} ({number + 1} of {repetitions})")
            runs[case.name].append(case.measure(case.workload))
    return runs


def rows(
    chosen: Sequence[Case],
    runs: dict[str, list[Timed]],
    memcpy: float,
    both_cores: float | None = None,
) -> list[Row]:
    """Turn runs into rows; memcpy in bytes a second, and those that two cores read and write."""
    return [_row(case, runs, memcpy, both_cores) for case in chosen]


def _bound(case: Case, rate: float, both_cores: float | None) -> tuple[str, dict[str, float]]:
    """Say how near a rate is to what the memory gives two cores; nothing where it is no bound."""
    if case.moved_bytes_per_token is None or both_cores is None:
        return "", {}
    moved = case.moved_bytes_per_token * case.workload.tokens
    bound = both_cores / moved
    text = f"; {rate / bound:.2f} of its bound, {bound:,.0f}"
    return text, {
        "moved_bytes_per_trajectory": moved,
        "both_cores_bytes_per_s": both_cores,
        "bound_trajectories_per_s": bound,
        "of_bound": rate / bound,
    }


def _row(case: Case, runs: dict[str, list[Timed]], memcpy: float, both_cores: float | None) -> Row:
    timed = runs[case.name]
    tokens = case.workload.tokens
    bytes_each = tokens * case.bytes_per_token
    rates = [one.rate for one in timed]
    rate = statistics.median(rates)
    if case.reference:
        unit, whole = "of one producer", statistics.median(r.rate for r in runs[case.reference])
    else:
        unit, whole = "of memcpy", memcpy / bytes_each
    bound, of_bound = _bound(case, rate, both_cores)
    return Row(
        name=case.name,
        title=case.title,
        measured=f"{rate:,.0f} trajectories/s, {rate * tokens / 1e6:,.0f} M tokens/s, "
        f"{rate * bytes_each / 1e9:.2f} GB/s{bound}",
        value=rate / whole,
        spread=(min(rates) / whole, max(rates) / whole),
        target=None if case.target is None else Target("at least", case.target, unit),
        figures={
            "trajectories_per_s": rate,
            "tokens_per_s": rate * tokens,
            "bytes_per_s": rate * bytes_each,
            "memcpy_ratio": rate * bytes_each / memcpy,
            **of_bound,
            "bytes_per_trajectory": bytes_each,
            "trajectories": case.workload.trajectories,
            "producers": case.workload.producers,
            "batch": case.workload.batch,
            "cold": case.workload.cold,
            "capacity": case.workload.capacity,
            "runs": [
                {
                    "seconds": one.seconds,
                    "trajectories_per_s": one.rate,
                    "consumer_cpu_us_per_trajectory": one.consumer_cpu_s / one.trajectories * 1e6,
                    "producer_cpu_us_per_trajectory": one.producer_cpu_s / one.trajectories * 1e6,
                }
                for one in timed
            ],
        },
    )
