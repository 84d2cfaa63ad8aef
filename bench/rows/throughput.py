"""The throughput rows: the workload, the path, the bound and the target of each.

Repetitions go round by round, each round one run of every case, so that a slow minute of the
machine does not fall on one case alone. Right before and behind each run stands what it is compared
with. A case has further runs until its interval is narrow or time is over. A figure is the median
of its runs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench import yardsticks
from bench.bounds import Beside, Bound, interval, turns
from bench.fitness import MEMORY, TWO, Need, Watch
from bench.rows import hop, packed
from bench.rows.row import Row
from bench.rows.targets import TARGETS, Target
from bench.sending import bus_bytes
from bench.sizes import Sizes
from bench.workload import BYTES_PER_TOKEN, COLD_BYTES, Measure, Timed, Workload
from bench.yardsticks import Yardstick

__all__ = ["Against", "Case", "Runs", "cases", "repeat", "rows"]


@dataclass(frozen=True)
class Against:
    """A yardstick, and what one trajectory is in its unit."""

    yardstick: Yardstick
    each: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a workload, the function that measures it, what it is compared with, the target.

    The value is a ratio to `reference`. `bound` is what the row is near, where that is another
    yardstick. `of_bound` names a second row, the share of the bound, with a target of its own.
    `part` is what a part of the work would be alone, and `of_part` names the row of that share.
    """

    name: str
    title: str
    measure: Measure
    workload: Workload
    reference: Against
    bound: Against | None = None
    target: Target | None = None
    of_bound: str = ""
    part: Against | None = None
    of_part: str = ""
    bytes_per_token: int = BYTES_PER_TOKEN

    @property
    def against(self) -> tuple[Against, ...]:
        """What stands around each run."""
        return tuple(one for one in (self.reference, self.bound, self.part) if one is not None)

    @property
    def need(self) -> Need:
        """What a machine has to have for it."""
        cold = COLD_BYTES if self.workload.cold else 0
        return Need(
            processors=TWO,
            shm_bytes=bus_bytes(self.workload.capacity),
            memory_bytes=MEMORY + cold * self.workload.producers,
            less="--capacity",
        )


@dataclass
class Runs:
    """What the runs of a case came to, and what stood around each of them."""

    timed: list[Timed] = field(default_factory=list)
    around: list[dict[Bound, tuple[float, float]]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    took_s: float = 0.0

    def beside(self, against: Against) -> Beside:
        """Set the runs beside one of the case's yardsticks."""
        bound = against.yardstick.bound
        return Beside(
            bound=bound,
            values=tuple(one.rate * against.each for one in self.timed),
            bounds=tuple(around[bound] for around in self.around),
        )

    def of(self, bound: Bound) -> list[float]:
        """Return everything that was measured of a bound around the runs."""
        return [one for around in self.around for one in around.get(bound, ())]


def cases(sizes: Sizes, capacity: str) -> list[Case]:
    """All throughput rows, in the order of the table."""
    short = Workload(trajectories=sizes.hop_2048, tokens=2048, capacity=capacity)
    long = Workload(trajectories=sizes.hop_16384, tokens=16_384, capacity=capacity)
    small = Workload(trajectories=sizes.hop_256, tokens=256, batch=64, capacity=capacity)
    packing = Workload(trajectories=sizes.packed, tokens=2048, capacity=capacity)
    size, times = sizes.memcpy_bytes, sizes.memcpy_repetitions
    copied = yardsticks.memcpy(size, times)
    one_core = yardsticks.columns(size, times)
    hops = [("hop-2048", short), ("hop-16384", long)]
    from_cache = {
        name: yardsticks.from_cache(workload.bytes_each, times) for name, workload in hops
    }
    one_producer = Yardstick(
        Bound(name="one producer", unit="trajectories/s"),
        partial(lambda workload: hop.measure(workload).rate, short),
    )
    return [
        *(
            case
            for name, workload in hops
            for case in _warm_and_cold(
                name,
                workload,
                copied,
                from_cache[name],
                yardsticks.from_memory(workload.tokens, size, times),
            )
        ),
        Case(
            name="hop-256",
            title="put_many of 64 to views, 256 tokens",
            measure=hop.measure,
            workload=small,
            reference=_of(copied, small),
            bound=Against(yardsticks.python_calls(small), 1.0),
            target=TARGETS["hop-256"],
        ),
        Case(
            name="packed",
            title="put to packed torch batches, 2,048 tokens",
            measure=packed.measure,
            workload=packing,
            reference=_of(copied, packing, packed.PACKED_BYTES_PER_TOKEN),
            bound=_of(yardsticks.both_cores(size, times), packing, packed.MOVED_BYTES_PER_TOKEN),
            target=TARGETS["packed"],
            of_bound="packed-of-bound",
            part=_of(one_core, packing, packed.PACKING_BYTES_PER_TOKEN),
            of_part="packed-of-one-core",
            bytes_per_token=packed.PACKED_BYTES_PER_TOKEN,
        ),
        Case(
            name="packed-cold",
            title="put to packed torch batches, 2,048 tokens, sources cold",
            measure=packed.measure,
            workload=dataclasses.replace(packing, cold=True),
            reference=_of(copied, packing, packed.PACKED_BYTES_PER_TOKEN),
            bound=_of(one_core, packing, packed.PACKING_BYTES_PER_TOKEN),
            bytes_per_token=packed.PACKED_BYTES_PER_TOKEN,
        ),
        Case(
            name="four-producers",
            title="four producers, put to views, 2,048 tokens",
            measure=hop.measure,
            workload=dataclasses.replace(short, producers=4),
            reference=Against(one_producer, 1.0),
            target=TARGETS["four-producers"],
        ),
    ]


def _of(stick: Yardstick, workload: Workload, bytes_per_token: int = BYTES_PER_TOKEN) -> Against:
    """Compare the bytes of a workload with a yardstick in GB/s."""
    return Against(stick, workload.tokens * bytes_per_token / 1e9)


def _warm_and_cold(
    name: str,
    workload: Workload,
    copied: Yardstick,
    from_cache: Yardstick,
    from_memory: Yardstick,
) -> tuple[Case, Case]:
    title = f"put to views, {workload.tokens:,} tokens"
    reference = _of(copied, workload)
    warm = Case(
        name=name,
        title=title,
        measure=hop.measure,
        workload=workload,
        reference=reference,
        bound=_of(from_cache, workload),
        target=TARGETS[name],
    )
    cold = Case(
        name=f"{name}-cold",
        title=f"{title}, sources cold",
        measure=hop.measure,
        workload=dataclasses.replace(workload, cold=True),
        reference=reference,
        bound=_of(from_memory, workload),
        target=TARGETS[f"{name}-cold"],
    )
    return warm, cold


def repeat(
    chosen: Iterable[Case],
    sizes: Sizes,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Runs]:
    """Run each case, round by round, between two measurements of what it is compared with.

    Each case has `sizes.repetitions` runs, and then more until it is narrow, as long as
    `sizes.rows_s` seconds have not passed.
    """
    chosen = list(chosen)
    found = {case.name: Runs() for case in chosen}
    latest: dict[Bound, float] = {}

    def measure(stick: Yardstick, *, again: bool) -> float:
        # What was measured right behind a run stands right before the next one.
        if again or stick.bound not in latest:
            latest[stick.bound] = stick.measure()
        return latest[stick.bound]

    def narrow(case: Case) -> bool:
        runs = found[case.name]
        return all(runs.beside(against).narrow for against in case.against)

    most = sizes.most_repetitions
    rounds = turns(sizes.repetitions, most, sizes.rows_s, lambda: all(map(narrow, chosen)), clock)
    for number in rounds:
        for case in chosen:
            if number > sizes.repetitions and narrow(case):
                continue
            say(f"{case.title} ({number} of {sizes.repetitions} to {most})")
            runs = found[case.name]
            began = time.monotonic()
            sticks = [against.yardstick for against in case.against]
            before = {stick.bound: measure(stick, again=False) for stick in sticks}
            with Watch() as watch:
                runs.timed.append(case.measure(case.workload))
            latest.clear()
            after = {stick.bound: measure(stick, again=True) for stick in sticks}
            runs.around.append({bound: (before[bound], after[bound]) for bound in before})
            runs.others.append(watch.others)
            runs.took_s += time.monotonic() - began
    return found


def rows(chosen: Sequence[Case], found: dict[str, Runs]) -> list[Row]:
    """Turn runs into rows."""
    made = []
    for case in chosen:
        runs = found[case.name]
        made.append(_row(case, runs))
        if case.bound is not None and case.of_bound:
            made.append(_share(case, runs, case.bound, case.of_bound))
        if case.part is not None:
            made.append(_share(case, runs, case.part, case.of_part))
    return made


def _share(case: Case, runs: Runs, against: Against, name: str) -> Row:
    beside = runs.beside(against)
    shares = beside.shares
    rate = statistics.median(beside.values)
    return Row(
        name=name,
        title=f"{case.title}, of {beside.bound.name}",
        measured=f"{rate:.2f} {beside.bound.unit} of {statistics.median(beside.measured):.2f}",
        value=statistics.median(shares),
        spread=interval(shares),
        target=TARGETS.get(name),
        bound=beside,
        others=statistics.median(runs.others),
        figures={"shares": shares},
    )


def _row(case: Case, runs: Runs) -> Row:
    tokens = case.workload.tokens
    bytes_each = tokens * case.bytes_per_token
    rate = statistics.median(one.rate for one in runs.timed)
    reference = runs.beside(case.reference)
    bound = reference if case.bound is None else runs.beside(case.bound)
    ratios = reference.ratios
    return Row(
        name=case.name,
        title=case.title,
        measured=f"{rate:,.0f} trajectories/s, {rate * tokens / 1e6:,.0f} M tokens/s, "
        f"{rate * bytes_each / 1e9:.2f} GB/s",
        value=statistics.median(ratios),
        spread=interval(ratios),
        target=case.target,
        bound=bound,
        reference=reference,
        others=statistics.median(runs.others),
        took_s=runs.took_s,
        figures={
            "trajectories_per_s": rate,
            "tokens_per_s": rate * tokens,
            "bytes_per_s": rate * bytes_each,
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
                for one in runs.timed
            ],
        },
    )
