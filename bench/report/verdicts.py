"""The verdicts of shmbus against the contenders: each claim is a row with its target.

Every row is a ratio, or a figure, of one run. A contender that was not measured leaves its row
without a value, and says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.bounds import Beside
from bench.contest.plan import OURS
from bench.rows.row import Row
from bench.rows.targets import AGAINST, TARGETS
from bench.yardsticks import MEMCPY

__all__ = ["GROWTH", "OURS", "USUAL", "find", "open_groups", "percentile", "rows"]

USUAL: Final = 2048
#: Who lends memory to its reader too, and the kinds of trajectories that are compared with it.
LENDER: Final = "iceoryx2"
LARGE: Final = {
    "large-routed-experts-1": "routed experts, groups of 1",
    "large-image-1": "an image, groups of 1",
    "large-routed-experts-8": "routed experts, groups kept",
    "large-top-64-logits-8": "top-64 logits, groups kept",
    "large-image-8": "an image, groups kept",
}
#: No cost a trajectory may grow by more than this.
GROWTH: Final = TARGETS["growth-producers"].bound


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
    timed = [
        *_throughput(contest, memcpy_gb_per_s),
        *_large(contest),
        *_latency(contest),
        *_growth(contest),
    ]
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
    for row, target in TARGETS.items():
        name = row.removeprefix(AGAINST)
        if name == row or name not in contest["contenders"]:
            continue
        title = f"put to views, 2,048 tokens, against {contest['contenders'][name]['title']}"
        theirs = find(contest, "size", name, USUAL)
        if theirs is None:
            yield Row(
                name=row,
                title=title,
                measured="",
                target=target,
                skipped=_skipped(contest, name),
            )
            continue
        yield Row(
            name=row,
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
            # What is sent again lies in a cache, and memcpy's source does not.
            soft=True,
            figures={"ours_per_s": ours["rate"], "theirs_per_s": theirs["rate"]},
        )


def _large(contest: dict[str, Any]) -> Iterator[Row]:
    """Set payloads beside the tokens beside iceoryx2, where both hold the same bytes."""
    for name, kind in LARGE.items():
        ours, theirs = (find(contest, "kind", who, kind) for who in (OURS, LENDER))
        if ours is None or LENDER not in contest["contenders"]:
            continue
        yield Row(
            name=name,
            title=f"{kind}, against {contest['contenders'][LENDER]['title']}",
            measured=f"{ours['rate']:,.0f} trajectories/s"
            + (f", {theirs['rate']:,.0f} there" if theirs else "")
            + _readers(ours, theirs),
            value=ours["rate"] / theirs["rate"] if theirs else None,
            target=TARGETS[name],
            skipped="" if theirs else _skipped(contest, LENDER),
            figures={"ours_per_s": ours["rate"], "theirs_per_s": theirs and theirs["rate"]},
        )


def _readers(ours: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    """Say what the readers spent: one sleeps between records, and the other never does."""
    us = [
        one["consumer_cpu_s"] / one["trajectories"] * 1e6
        for one in (ours, theirs)
        if one is not None
    ]
    return f"; the reader's processor time {', there '.join(f'{each:.0f} us' for each in us)}"


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
        target=TARGETS["load-p99"],
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
        target=TARGETS[f"growth-{name}"],
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
            target=TARGETS["survival"],
            figures=ours,
        )
