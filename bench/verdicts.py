"""What shmbus has to show against the contenders: each claim a row with its target.

Every row is a ratio, or a figure, of one run. A contender that was not measured leaves its row
without a value, and says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bench.rows import Row, Target

__all__ = ["OURS", "USUAL", "find", "percentile", "rows"]

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


def rows(contest: dict[str, Any]) -> list[Row]:
    """Judge a contest."""
    return [*_throughput(contest), *_latency(contest), *_growth(contest), *_survival(contest)]


def _skipped(contest: dict[str, Any], contender: str) -> str:
    return contest["contenders"].get(contender, {}).get("skipped") or "not measured in this run"


def _throughput(contest: dict[str, Any]) -> Iterator[Row]:
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
            figures={"ours_per_s": ours["rate"], "theirs_per_s": theirs["rate"]},
        )


def _latency(contest: dict[str, Any]) -> Iterator[Row]:
    ours = find(contest, "latency", OURS, "under load")
    theirs = find(contest, "latency", "faster-fifo", "under load")
    if ours and theirs:
        p99, p50 = percentile(ours, 99), percentile(theirs, 50)
        yield Row(
            name="load-p99",
            title="one way under load, p99, against the p50 of faster-fifo",
            measured=f"{p99:.1f} us; faster-fifo p50 {p50:.1f} us",
            value=p99 / p50,
            target=Target("at most", 1.0, "of its p50"),
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
        # The processor time of a run is that of its processes, so that waiting for a core is none.
        last = points[-1]["point"]
        yield Row(
            name=f"growth-{series}",
            title=f"processor time a trajectory, {last} {what} against {points[0]['point']}",
            measured=f"{costs[-1]:.2f} us against {costs[0]:.2f}; at worst {max(costs):.2f}",
            value=max(costs) / costs[0],
            target=Target("at most", GROWTH, "times"),
            figures={"points": [one["point"] for one in points], "cpu_us": costs},
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
