"""Runs the contest: every contender that is here, every series that the level asks for.

What comes out is plain data, for JSON: ``contenders`` says what each one is and which versions
were measured, or why it was skipped; each series is a list of points, each with its contender.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.contenders import contenders
from bench.contenders.base import Contender
from bench.contest import environments
from bench.contest.plan import Level, Planned, plan, sized
from bench.processes import MeasurementError

__all__ = ["SERIES", "run"]

SERIES = (
    "size",
    "read",
    "packed",
    "kind",
    "producers",
    "capacity",
    "watched",
    "latency",
    "paced",
    "survival",
)


def run(
    names: Sequence[str], level: Level, series: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the contenders of these names.

    Parameters
    ----------
    names : sequence of str
        Of `bench.contenders.contenders`; the first of those is always there, to be compared with.
    level : Level
    series : sequence of str
        Of `SERIES`.
    say : callable
        Told what is measured next.
    """
    known = contenders()
    described: dict[str, dict[str, Any]] = {}
    here: list[Contender] = []
    for name in known:
        if name in names:
            described[name], there = _describe(known[name])
            here += [known[name]] if there else []
    result: dict[str, Any] = {"contenders": described, "level": level.name}
    result |= {one: [] for one in SERIES}
    light = [contender for contender in here if not contender.environment]
    points: list[dict[str, Any]] = []
    # Round by round, so that a slow minute of the machine does not fall on one contender alone.
    for repetition in range(level.repetitions if "size" in series else 0):
        for contender in light:
            say(f"{contender.title}: size, {repetition + 1} of {level.repetitions}")
            points += _ask(contender, _sizes(contender, level), level)
    for number, contender in enumerate(here):
        wanted = [one for one in plan(contender, level, number == 0) if one.series in series]
        if contender.environment and "size" in series:
            # One that takes long to begin does all of its repetitions in one go.
            wanted = _sizes(contender, level) * level.repetitions + wanted
        if not wanted:
            continue
        say(f"{contender.title}: {', '.join(dict.fromkeys(one.series for one in wanted))}")
        for point in _ask(contender, wanted, level):
            one = point.pop("series")
            points.append(point) if one == "size" else result[one].append(point)
    result["size"] = _medians(points)
    return result


def _describe(contender: Contender) -> tuple[dict[str, Any], bool]:
    """Say what a contender is, with its versions, or why it cannot be measured here."""
    facts = {
        "title": contender.title,
        "groups": contender.groups,
        "copies": contender.copies,
        "copied": contender.copied,
        "favour": contender.favour,
        "environment": contender.environment,
    }
    try:
        answer = environments.versions(contender)
    except MeasurementError as error:
        answer = {"failed": str(error)}
    facts["skipped"] = answer.get("failed")
    facts["python"] = answer.get("python")
    facts["versions"] = answer.get("packages", {})
    return facts, "failed" not in answer


def _sizes(contender: Contender, level: Level) -> list[Planned]:
    """Plan one repetition of all sizes."""
    return [
        Planned(
            series="size",
            point=tokens,
            request={"what": "throughput", "workload": sized(contender, level, tokens=tokens)},
        )
        for tokens in level.sizes
    ]


def _ask(contender: Contender, wanted: Sequence[Planned], level: Level) -> list[dict[str, Any]]:
    """Ask for all in one process; after one that came to no end, go on with the next."""
    points: list[dict[str, Any]] = []
    while len(points) < len(wanted):
        rest = wanted[len(points) :]
        requests = [planned.request for planned in rest]
        answers = environments.ask(contender, requests, level.deadline_s)
        for planned, answer in zip(rest, answers, strict=False):
            asked = {key: value for key, value in planned.request.items() if key != "what"}
            about = {"series": planned.series, "contender": contender.name, "point": planned.point}
            points.append({**about, **asked, **answer})
    return points


def _medians(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let the run with the median rate stand for all of a contender's runs of a size."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in points:
        runs.setdefault((point["contender"], point["point"]), []).append(point)
    chosen = []
    for same in runs.values():
        good = [one for one in same if "failed" not in one]
        if not good:
            chosen.append(same[0])
            continue
        rates = [one["rate"] for one in good]
        middle = statistics.median_low(rates)
        stands = next(one for one in good if one["rate"] == middle)
        chosen.append({**stands, "lowest": min(rates), "highest": max(rates), "rates": rates})
    return chosen
