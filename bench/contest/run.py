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
    if "size" in series:
        result["size"] = _sizes(here, level, say)
    for number, contender in enumerate(here):
        wanted = [one for one in plan(contender, level, number == 0) if one.series in series]
        if not wanted:
            continue
        say(f"{contender.title}: {', '.join(dict.fromkeys(one.series for one in wanted))}")
        for planned, answer in _answers(contender, wanted, level):
            result[planned.series].append(_point(contender, planned, answer))
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


def _sizes(here: Sequence[Contender], level: Level, say: Callable[[str], None]) -> list[Any]:
    """Measure the sizes, round by round, so that a slow minute does not fall on one alone."""
    points: dict[tuple[str, int], dict[str, Any]] = {}
    for repetition in range(level.repetitions):
        for contender in here:
            # One that starts a cluster does all its repetitions in one go.
            rounds = level.repetitions if contender.environment else 1
            if repetition and contender.environment:
                continue
            say(f"{contender.title}: size, {repetition + 1} of {level.repetitions}")
            wanted = [
                Planned(
                    series="size",
                    point=tokens,
                    request={
                        "what": "throughput",
                        "workload": sized(contender, level, tokens=tokens),
                    },
                )
                for tokens in level.sizes
            ] * rounds
            for planned, answer in _answers(contender, wanted, level):
                point = _point(contender, planned, answer)
                key = contender.name, int(planned.point)
                points.setdefault(key, {**point, "runs": []})["runs"].append(answer)
    return [_median(point) for point in points.values()]


def _answers(
    contender: Contender, wanted: Sequence[Planned], level: Level
) -> list[tuple[Planned, dict[str, Any]]]:
    """Ask for all in one process; after one that came to no end, go on with the next."""
    pairs: list[tuple[Planned, dict[str, Any]]] = []
    while len(pairs) < len(wanted):
        rest = wanted[len(pairs) :]
        requests = [planned.request for planned in rest]
        answers = environments.ask(contender, requests, level.deadline_s)
        pairs += zip(rest, answers, strict=False)
    return pairs


def _point(contender: Contender, planned: Planned, answer: dict[str, Any]) -> dict[str, Any]:
    asked = {key: value for key, value in planned.request.items() if key != "what"}
    return {"contender": contender.name, "point": planned.point, **asked, **answer}


def _median(point: dict[str, Any]) -> dict[str, Any]:
    """Let the run with the median rate stand for all of a size."""
    good = [one for one in point["runs"] if "failed" not in one]
    if not good:
        return point
    rates = [one["rate"] for one in good]
    middle = statistics.median_low(rates)
    chosen = next(one for one in good if one["rate"] == middle)
    spread = {"lowest": min(rates), "highest": max(rates)}
    without = {key: value for key, value in point.items() if key != "failed"}
    return {**without, **chosen, **spread}
