"""Runs the contest: every installed contender, every series of the level.

What comes out is plain data, for JSON: ``contenders`` says what each one is and which versions
were measured, or why it was skipped; each series is a list of points, each with its contender.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.bounds import NARROW, width
from bench.contenders import contenders
from bench.contenders.base import Contender
from bench.contest import environments
from bench.contest.child import NO_TURN
from bench.contest.plan import USUAL, Level, Planned, plan, sizes
from bench.failures import MeasurementError

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
#: Of the sizes; the last of them has what did not agree in those before.
LEAST_ROUNDS: Final = 3
#: Those of which a point may have several runs.
REPEATED = ("size", "producers", "capacity")


@dataclass(frozen=True)
class _Turn:
    """What one process of a contender is asked, and what that is for."""

    contender: Contender
    wanted: list[Planned]
    text: str
    #: Of a round of sizes, from 1.
    number: int = 0

    @property
    def expected_s(self) -> float:
        return self.contender.begin_s + sum(one.expected_s for one in self.wanted)


def run(
    names: Sequence[str],
    level: Level,
    series: Sequence[str],
    say: Callable[[str], None],
    seconds: float,
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
    seconds : float
        For all of it. Each turn gets a part of what is left, by what is expected of it and of those
        that follow; what has no turn within its part is a point that ``failed``.
    """
    deadline = time.monotonic() + seconds
    known = contenders()
    described: dict[str, dict[str, Any]] = {}
    here: list[Contender] = []
    for name in known:
        if name in names:
            described[name], there = _describe(known[name])
            here += [known[name]] if there else []
    result: dict[str, Any] = {"contenders": described, "level": level.name}
    result |= {one: [] for one in SERIES}
    turns = list(_turns(here, level, series))
    expected_s = sum(turn.expected_s for turn in turns)
    say(f"the contest: about {expected_s:.0f} s, {seconds:.0f} s at most")
    took: dict[str, float] = dict.fromkeys(described, 0.0)
    for turn in turns:
        left_s = max(0.0, deadline - time.monotonic())
        share_s = left_s * turn.expected_s / expected_s
        expected_s -= turn.expected_s
        turn = _without_narrow(turn, result["size"], level)
        if not turn.wanted:
            continue
        began = time.monotonic()
        say(f"{turn.contender.title}: {turn.text}; {share_s:.0f} s at most")
        for point in _ask(turn, share_s, level.patience_s):
            result[point.pop("series")].append(point)
        took[turn.contender.name] += time.monotonic() - began
    result["took_s"] = took
    result |= {one: _medians(result[one]) for one in REPEATED}
    return result


def _turns(here: Sequence[Contender], level: Level, series: Sequence[str]) -> Iterator[_Turn]:
    rounds = level.repetitions if "size" in series else 0
    # Round by round, so that a slow minute of the machine does not fall on one contender alone. One
    # that takes long to begin does all of its repetitions in one go, those of the usual size only.
    apart = [contender for contender in here if rounds > 1 and not contender.environment]
    for number in range(rounds):
        for contender in apart:
            text = f"size, {number + 1} of {rounds}"
            yield _Turn(contender, sizes(contender, level), text, number + 1)
    for number, contender in enumerate(here):
        wanted = [one for one in plan(contender, level, number == 0) if one.series in series]
        if contender not in apart and rounds:
            each = sizes(contender, level)
            usual = [one for one in each if one.point == USUAL]
            wanted = each + usual * (rounds - 1) + wanted
        if wanted:
            text = ", ".join(dict.fromkeys(one.series for one in wanted))
            yield _Turn(contender, wanted, text)


def _without_narrow(turn: _Turn, found: Sequence[dict[str, Any]], level: Level) -> _Turn:
    """Leave out of a round of sizes those whose runs so far agree, but for the one that is judged.

    The last of at least three rounds only: two runs may agree by chance.
    """
    if turn.number < max(level.repetitions, LEAST_ROUNDS):
        return turn
    rates: dict[str | int, list[float]] = {}
    for one in found:
        if one["contender"] == turn.contender.name and "failed" not in one:
            rates.setdefault(one["point"], []).append(one["rate"])
    wanted = [
        planned
        for planned in turn.wanted
        if planned.point == USUAL
        or len(rates.get(planned.point, ())) < LEAST_ROUNDS - 1
        or width(rates[planned.point]) > NARROW
    ]
    return replace(turn, wanted=wanted)


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


def _ask(turn: _Turn, share_s: float, patience_s: float) -> list[dict[str, Any]]:
    """Send all requests to one process; after one that does not end, continue with the next."""
    points: list[dict[str, Any]] = []
    deadline = time.monotonic() + share_s
    while len(points) < len(turn.wanted):
        rest = turn.wanted[len(points) :]
        left_s = deadline - time.monotonic()
        if points and left_s <= 0:
            answers = [{"failed": f"{NO_TURN}: {share_s:.0f} s"}] * len(rest)
        else:
            requests = [planned.limited for planned in rest]
            answers = environments.ask(turn.contender, requests, max(0.0, left_s), patience_s)
        for planned, answer in zip(rest, answers, strict=False):
            asked = {key: value for key, value in planned.request.items() if key != "what"}
            about = {"series": planned.series, "point": planned.point}
            points.append({**about, "contender": turn.contender.name, **asked, **answer})
    return points


def _medians(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let the run with the median rate stand for all of a contender's runs of a point."""
    runs: dict[tuple[str, str | int], list[dict[str, Any]]] = {}
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
