"""The verdicts of shmbus against the contenders: each claim is a row with its target.

Every row is a ratio, or a figure, of one run. A contender that was not measured leaves its row
without a value, and says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.bounds import Beside
from bench.rows.row import Row, Target
from bench.yardsticks import MEMCPY

__all__ = ["GROWTH", "OURS", "USUAL", "find", "open_groups", "percentile", "rows"]

#: The contender that the others are compared with.
OURS: Final = "shmbus"
#: How many times faster than each, at 2,048 tokens.
TIMES: Final = {
    "iceoryx2": 5.0,
    "faster-fifo": 15.0,
    "pyzmq": 15.0,
    "multiprocessing.Queue": 25.0,
    "TransferQueue": 400.0,
    "atropos": 5000.0,
}
USUAL: Final = 2048
#: No cost a trajectory may grow by more than this.
GROWTH: Final = 1.3


def find(
    contest: dict[str, Any], series: str, contender: str, point: str | int = ""
) -> dict[str, Any] | None:
    """Return one measured point of a series; None where there is none, or where it failed."""
    for one in contest[series]:
        if one["contender"] == contender and one["point"] == point and "failed" not in one:
            found: dict[str, Any] = one
            return found
    return None


def rows(contest: dict[str, Any], memcpy_gb_per_s: tuple[float, float]) -> list[Row]:
    """Judge a contest, and memcpy before and behind it: if that moved, nothing timed is judged."""
    around = Beside(bound=MEMCPY, values=(memcpy_gb_per_s[0],), bounds=(memcpy_gb_per_s,))
    timed = [*_throughput(contest, memcpy_gb_per_s), *_latency(contest), *_growth(contest)]
    return [
        *(dataclasses.replace(row, reference=around) for row in timed),
        *_survival(contest),
    ]


def open_groups(points: Sequence[dict[str, Any]]) -> list[Row]:
    """Judge how the stash's cost grows with the number of open groups, by its worse order."""
    worst: list[tuple[float, Row]] = []
    for order in dict.fromkeys(one["order"] for one in points):
        same = [one for one in points if one["order"] == order]
        few, many = same[0]["open_groups"], same[-1]["open_groups"]
        row = _growth_row(
            "open-groups",
            f"processor time of the stash, {many:,} open groups against {few:,}",
            f"arrivals {order.replace('-', ' ')}",
            [one["open_groups"] for one in same],
            [one["ns"] / 1000 for one in same],
        )
        worst.append((row.value or 0.0, row))
    return [max(worst, key=lambda pair: pair[0])[1]] if worst else []


def _skipped(contest: dict[str, Any], contender: str) -> str:
    return contest["contenders"].get(contender, {}).get("skipped") or "not measured in this run"


def _throughput(contest: dict[str, Any], memcpy: tuple[float, float]) -> Iterator[Row]:
    ours = find(contest, "size", OURS, USUAL)
    if ours is None:
        return
    for name, times in TIMES.items():
        if name not in contest["contenders"]:
            continue
        title = f"put to views, 2,048 tokens, against {contest['contenders'][name]['title']}"
        theirs = find(contest, "size", name, USUAL)
        target = Target("at least", times, "times as many")
        if theirs is None:
            yield Row(
                name=f"against-{name}",
                title=title,
                measured="",
                target=target,
                skipped=_skipped(contest, name),
            )
            continue
        yield Row(
            name=f"against-{name}",
            title=title,
            measured=f"{ours['rate']:,.0f} trajectories/s, {theirs['rate']:,.0f} there",
            value=ours["rate"] / theirs["rate"],
            spread=(ours["lowest"] / theirs["highest"], ours["highest"] / theirs["lowest"]),
            target=target,
            bound=Beside(
                bound=MEMCPY,
                values=(ours["rate"] * ours["bytes_each"] / 1e9,),
                bounds=(memcpy,),
            ),
            figures={"ours_per_s": ours["rate"], "theirs_per_s": theirs["rate"]},
        )


def _latency(contest: dict[str, Any]) -> Iterator[Row]:
    ours = find(contest, "latency", OURS, "under load")
    if ours is None or "faster-fifo" not in contest["contenders"]:
        return
    theirs = find(contest, "latency", "faster-fifo", "under load")
    p99 = percentile(ours, 99)
    p50 = percentile(theirs, 50) if theirs else None
    yield Row(
        name="load-p99",
        title="one way under load, p99, against the p50 of faster-fifo",
        measured=f"{p99:.1f} us" + (f"; faster-fifo p50 {p50:.1f} us" if p50 else ""),
        value=p99 / p50 if p50 else None,
        target=Target("at most", 1.0, "of its p50"),
        skipped="" if p50 else _skipped(contest, "faster-fifo"),
        figures={"p99_us": p99, "their_p50_us": p50},
    )


def percentile(point: dict[str, Any], percent: float) -> float:
    """Microseconds at a percentile that the point holds."""
    us: float = point["us"][point["percents"].index(percent)]
    return us


def _growth(contest: dict[str, Any]) -> Iterator[Row]:
    for series, what in (("producers", "producers"), ("capacity", "of ring")):
        points = [
            one for one in contest[series] if one["contender"] == OURS and "failed" not in one
        ]
        if len(points) < 2:
            continue
        costs = [one["cpu_s"] / one["trajectories"] * 1e6 for one in points]
        last = points[-1]["point"]
        # The processor time of a run is that of its processes, so that waiting for a core is none.
        yield _growth_row(
            series,
            f"processor time a trajectory, {last} {what} against {points[0]['point']}",
            _scheduling(points) if series == "producers" else "",
            [one["point"] for one in points],
            costs,
        )


def _scheduling(points: Sequence[dict[str, Any]]) -> str:
    """Split the time into producers, kernel and switches between processes."""
    first, last = (
        {
            "producers": one["producer_cpu_s"] / one["trajectories"] * 1e6,
            "kernel": (one["figures"]["producer_kernel_s"] + one["figures"]["consumer_kernel_s"])
            / one["trajectories"]
            * 1e6,
            "switches": one["figures"]["switches"] / one["trajectories"],
        }
        for one in (points[0], points[-1])
    )
    return (
        f"of it producers {last['producers']:.2f} against {first['producers']:.2f}, "
        f"in the kernel {last['kernel']:.2f} against {first['kernel']:.2f}, "
        f"{last['switches']:.3f} switches against {first['switches']:.3f}"
    )


def _growth_row(
    name: str, title: str, of: str, points: Sequence[Any], costs: Sequence[float]
) -> Row:
    """Judge the dearest point of a curve by its first one; costs in microseconds."""
    dearest = max(costs)
    where = points[costs.index(dearest)]
    return Row(
        name=f"growth-{name}",
        title=title,
        measured=f"{costs[-1]:.2f} us against {costs[0]:.2f}; at worst {dearest:.2f}, at {where}"
        + (f"; {of}" if of else ""),
        value=dearest / costs[0],
        target=Target("at most", GROWTH, "times, at any point"),
        figures={"points": list(points), "cpu_us": list(costs)},
    )


def _survival(contest: dict[str, Any]) -> Iterator[Row]:
    ours = find(contest, "survival", OURS)
    if ours:
        harm = ours["lost"] + ours["torn"] + ours["doubled"]
        yield Row(
            name="survival",
            title=f"runs on after kill -9 of a writer, {ours['kills']} times",
            measured=f"{ours['in_send']} kills within a put; {ours['lost']} lost, "
            f"{ours['torn']} torn, {ours['doubled']} doubled",
            value=float(not ours["goes_on"]) + harm,
            target=Target("at most", 0.0, "runs stopped or trajectories harmed"),
            figures=ours,
        )
