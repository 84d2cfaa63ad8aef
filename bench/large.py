"""Large payloads: 64 KiB to 16 MiB a sample in groups of 1, 8 and 64, beside iceoryx2.

``python -m bench.large --output FILE``. Both hold the same bytes: shmbus until a group is whole and
acknowledged, and the reader of iceoryx2 keeps its samples as long. The two take turns with their
bound: one core copies a payload to one place after the other of as much shared memory as a group
and the sample behind it take.

Targets: at least as fast where that fits the last-level cache, at most 1.1 times slower where it
does not. The clock starts when every place between the processes has been written once.

A quiet hour is seldom long enough for all points: those of a run are added to the file, which keeps
the others of this machine. `bench.report` makes the table of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import command, fitness, machine, yardsticks
from bench.bounds import Beside, turns
from bench.contenders import contenders, module
from bench.contest import environments, moving
from bench.failures import MeasurementError
from bench.fitness import TWO, Need
from bench.processes import use_template
from bench.report.fold import MACHINE
from bench.rows.row import Row, table
from bench.rows.targets import HARDLY_SLOWER, NO_SLOWER, Target
from bench.workload import PAYLOADS, Workload

__all__ = ["GROUPS", "Point", "last_level_cache", "main", "points"]

GROUPS: Final = (1, 8, 64)
OTHER: Final = "iceoryx2"
#: Beside the payload, so little that it counts for nothing.
TOKENS: Final = 64
#: Of the bus at least; where a group takes more than half of that, so many groups.
LEAST_MIB: Final = 256
GROUPS_IN_A_BUS: Final = 2.25
TINY_MIB: Final = 16
#: Bytes and trajectories a second to expect: they size the runs, and decide nothing else.
EXPECTED_BYTES: Final = 8e9
EXPECTED: Final = 60_000
CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Point:
    """A size of a payload, by its name in `PAYLOADS`, and samples a group."""

    payload: str
    group_size: int

    @property
    def name(self) -> str:
        """What `Row` and the command line call it."""
        return f"{self.payload}, groups of {self.group_size}"

    @property
    def alive_bytes(self) -> int:
        """What is held at once: a group, and the sample that is written meanwhile."""
        return (self.group_size + 1) * PAYLOADS[self.payload]

    def workload(self, seconds: float, least_mib: int = LEAST_MIB) -> Workload:
        """Make the workload of a run that takes about so long, of either."""
        group_mib = self.group_size * PAYLOADS[self.payload] / (1 << 20)
        capacity = max(least_mib, math.ceil(group_mib * GROUPS_IN_A_BUS))
        about = Workload(
            trajectories=self.group_size,
            tokens=TOKENS,
            group_size=self.group_size,
            side=self.payload,
            capacity=f"{capacity}MiB",
            keep=True,
        )
        warm_up = about.room + self.group_size
        timed = seconds * min(EXPECTED, EXPECTED_BYTES / about.bytes_each)
        # A full bus may come in one call, and is then behind the warm-up or begins within it.
        wanted = warm_up + max(timed, about.room + self.group_size)
        groups = math.ceil(wanted / self.group_size)
        return Workload(
            **{
                **about.as_parameters(),
                "trajectories": groups * self.group_size,
                "warm_up": warm_up,
            }
        )

    def target(self, cache_bytes: int) -> Target:
        """Say what the ratio has to be on a machine with such a cache."""
        return NO_SLOWER if self.alive_bytes <= cache_bytes else HARDLY_SLOWER


def points(payloads: Sequence[str], groups: Sequence[int]) -> list[Point]:
    """List the points of a table, group size after group size."""
    return [Point(payload, group) for group in groups for payload in payloads]


def last_level_cache(caches: Path = CACHES) -> int:
    """Return the bytes of the largest cache that the first processor has; 0 where nothing says."""
    units = {"K": 10, "M": 20, "G": 30}
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max((int(text[:-1]) << units[text[-1]] for text in sizes), default=0)


@command.orderly("large")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.tiny:
        use_template("bench.contest.child")
    facts = machine.describe()
    try:
        kept = _kept(options, facts)
    except (OSError, ValueError) as error:
        parser.error(f"--output: {error}; name another file")
    print(machine.summary(facts), flush=True)
    chosen = points(options.payload or list(PAYLOADS), options.group or GROUPS)
    cache = last_level_cache()
    here = fitness.here()
    print("".join(f"{note}" for note in fitness.notes(here)), end="")
    print(f"last-level cache: {cache >> 20} MiB", flush=True)
    other = _why_no_other()
    rows = []
    for point in chosen:
        size = (0.001, TINY_MIB) if options.tiny else (options.seconds,)
        workload = point.workload(*size)
        why = fitness.why_not(_need(point, workload), here)
        if why:
            rows.append(Row(name=point.name, title=point.name, measured="", skipped=why))
            continue
        try:
            rows.append(_measure(point, workload, options, cache, other))
        except MeasurementError as error:
            raise MeasurementError(f"{point.name}: {error}") from error
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if options.output:
            # Point by point, so that a run that is cut short keeps those that it has measured.
            result = {"machine": facts, "cache_bytes": cache, "rows": _joined(kept, rows, facts)}
            if status := command.keep(options.output, result, "large"):
                return status
    print(f"\n{table(rows)}")
    if options.tiny:
        print(fitness.TINY)
    return command.nothing("large") if all(row.skipped for row in rows) else 0


def _kept(options: argparse.Namespace, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the points that the file has already; ValueError if these here cannot join them."""
    path: Path | None = options.output
    if path is None or not path.exists():
        return []
    if options.tiny:
        raise ValueError(f"{path} is there, and figures of --tiny belong to none that is kept")
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not {"machine", "cache_bytes", "rows"} <= set(found):
        raise ValueError(f"{path} is there, and not of this command")
    there, here = ({what: one.get(what) for what in MACHINE} for one in (found["machine"], facts))
    if there != here:
        raise ValueError(f"{path} has points of {there}, and this machine is {here}")
    kept: list[dict[str, Any]] = found["rows"]
    return kept


def _joined(
    kept: Sequence[dict[str, Any]], rows: Sequence[Row], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Put measured points among those kept, each with its time and commit, in the table's order."""
    when = {what: facts[what] for what in ("date_utc", "commit")}
    known = {row["name"]: row for row in kept} | {row.name: row.as_json() | when for row in rows}
    order = [point.name for point in points(list(PAYLOADS), GROUPS)]
    return [known[name] for name in order if name in known]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.large",
        description="Move large payloads by shmbus and by iceoryx2, beside copies of one core.",
        epilog="example: python -m bench.large --payload '16 MiB' --group 64",
    )
    parser.add_argument(
        "--output", type=command.file, metavar="PATH",
        help="write the figures as JSON; a file that is there keeps its other points",
    )  # fmt: skip
    parser.add_argument(
        "--payload", action="append", choices=list(PAYLOADS), metavar="SIZE",
        help=f"only this size; may be repeated: {', '.join(PAYLOADS)}",
    )  # fmt: skip
    parser.add_argument(
        "--group", type=int, choices=GROUPS, action="append", metavar="N",
        help=f"only groups of so many; may be repeated: {', '.join(map(str, GROUPS))}",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=command.positive, default=1.0, help="that a run is to take"
    )
    parser.add_argument(
        "--rounds", type=command.at_least_one, default=3, help="turns of each point at least"
    )
    parser.add_argument(
        "--most", type=command.at_least_one, default=9, help="and at most, until it is narrow"
    )
    parser.add_argument(
        "--time", type=command.positive, default=20.0,
        help="seconds after which a point has no more turns",
    )  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true", help="only see that it runs; its figures mean nothing"
    )
    return parser


def _need(point: Point, workload: Workload) -> Need:
    # The pages of both, which never exist at the same time; iceoryx2 has places for what its reader
    # may hold beside those of the queue.
    bytes_each = PAYLOADS[point.payload]
    room = 2 * workload.room + 2 * point.group_size + 64
    return Need(processors=TWO, shm_bytes=room * bytes_each, less="a smaller --payload or --group")


def _why_no_other() -> str:
    """Say why there is nothing to compare with; nothing if there is."""
    try:
        environments.versions(contenders()[OTHER])
    except MeasurementError as error:
        return str(error)
    return ""


def _rate(name: str, workload: Workload) -> float:
    return moving.measure(module(name).__name__, workload).rate


def _measure(
    point: Point, workload: Workload, options: argparse.Namespace, cache: int, why_no_other: str
) -> Row:
    item = PAYLOADS[point.payload]
    stick = yardsticks.over(item, point.alive_bytes, 3)
    gb = item / 1e9
    ours: list[float] = []
    theirs: list[float] = []
    around: list[tuple[float, float]] = []
    before = stick.measure()

    def narrow() -> bool:
        return Beside(bound=stick.bound, values=tuple(ours), bounds=tuple(around)).narrow

    rounds = 1 if options.tiny else options.rounds
    with fitness.Watch() as watch:
        for number in turns(rounds, 1 if options.tiny else options.most, options.time, narrow):
            # Who goes first changes from turn to turn.
            names = ("shmbus", OTHER) if number % 2 else (OTHER, "shmbus")
            for name in names:
                if name == OTHER and why_no_other:
                    continue
                (ours if name == "shmbus" else theirs).append(_rate(name, workload) * gb)
            after = stick.measure()
            around.append((before, after))
            before = after
    beside = Beside(bound=stick.bound, values=tuple(ours), bounds=tuple(around))
    ratios = [one / other for one, other in zip(ours, theirs, strict=False)]
    said = f"{statistics.median(ours) / gb:,.0f} a second, {statistics.median(ours):.2f} GB/s"
    if theirs:
        said += f"; {OTHER} {statistics.median(theirs) / gb:,.0f}"
    else:
        said += f"; no {OTHER}: {why_no_other}"
    figures: dict[str, Any] = {
        "gb_per_s": ours,
        f"{OTHER}_gb_per_s": theirs,
        "capacity": workload.capacity,
        "trajectories": workload.trajectories,
        "payload_bytes": item,
        "group_size": point.group_size,
    }
    return Row(
        name=point.name,
        title=point.name,
        measured=said,
        value=statistics.median(ratios) if ratios else None,
        spread=(min(ratios), max(ratios)) if ratios else None,
        target=point.target(cache) if ratios else None,
        bound=beside,
        others=watch.others,
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
