"""Many reports as one: the median of each row, its spread, and a verdict that rests on both.

``python -m bench.report fold FILE DIR...`` adds full reports to a file that keeps, of each, what
its rows came to. One report shows the bus together with the machine's weather of that half hour;
a verdict needs `REPORTS` of them, of `DAYS` days.

Invariants:

- All reports of a file are of one kind of machine, and none is there twice.
- A row that a report could not measure, or for which its machine was not quiet, counts for nothing.
- Values are comparable: those in another unit than the target's, or of another workload, are left
  out.
- A row is judged by its present target, whatever it was when a report was made.
- What is said of a row follows from the file and from the targets alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import command
from bench.report import reading
from bench.rows.row import out_of_reach
from bench.rows.targets import TARGETS, Target

__all__ = [
    "DAYS",
    "REPORTS",
    "CannotFold",
    "FoldedRow",
    "add",
    "check",
    "cores_of",
    "fold",
    "main",
    "named",
]

#: Quiet values that a verdict rests on: with five, both ends of the spread may be chance.
REPORTS: Final = 5
#: Different days of them: a virtual machine's neighbours stay for hours.
DAYS: Final = 2
#: Said in the place of figures of a row that the newest report has not.
GONE: Final = "not in the newest run"
#: Of a machine: what has to be the same in all reports of a file.
MACHINE: Final = ("cpu", "cores", "machine")


class CannotFold(Exception):
    """A report does not belong to the others; the message says why."""


@dataclass(frozen=True, kw_only=True)
class FoldedRow:
    """One row over all reports.

    Attributes
    ----------
    name, title : str
    measured : str
        The figures of the newest report in words.
    values : tuple of float
        Of the reports that measured it in quiet, oldest first.
    days : int
        Different days of these.
    restless : int
        Reports that measured it while their machine was not quiet.
    target : Target, optional
    bound : str
        What it is near, and its median share of that; nothing where no report says it.
    best : float, optional
        The median of what the values would have been if the runs were their bound.
    """

    name: str
    title: str
    measured: str
    values: tuple[float, ...]
    days: int
    restless: int
    target: Target | None
    bound: str
    best: float | None = None

    @property
    def reports(self) -> str:
        """How many reports the median is of, their days, and how many more were not quiet."""
        if not self.values:
            return ""
        days = f"{self.days} day" + ("s" if self.days > 1 else "")
        restless = f"; {self.restless} not quiet" if self.restless else ""
        return f"{len(self.values)}, of {days}{restless}"

    @property
    def median(self) -> float | None:
        """The median value; None where no report has one."""
        return statistics.median(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """Whether the median meets the target, and whether there is enough to say so."""
        if self.target is None:
            return ""
        if self.median is None:
            return "machine never quiet" if self.restless else "not measured"
        met = self.target.met_by(self.median)
        if not met and self.best is not None and (why := out_of_reach(self.target, self.best)):
            return f"{self._so_far('**not met**')}; {why}"
        return self._so_far("met" if met else "**not met**")

    def _so_far(self, word: str) -> str:
        if len(self.values) < REPORTS:
            return f"{word} so far, by {len(self.values)} of {REPORTS} reports"
        if self.days < DAYS:
            return f"{word} so far, on {self.days} of {DAYS} days"
        return word


def add(folded: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return what is folded with one report more.

    Parameters
    ----------
    folded : dict
        What a file holds; empty for a new one.
    result : dict
        A report's ``results.json``.

    Raises
    ------
    CannotFold
        It is not a full report or a part of one, is of another machine, or is there already.
    """
    reports: list[dict[str, Any]] = folded.get("reports", [])
    facts = result["machine"]
    when = facts["date_utc"]
    partial = bool(result.get("partial"))
    check(folded or {"reports": []}, facts, result["level"], partial=partial)
    if any(one["date_utc"] == when for one in reports):
        raise CannotFold(f"{when}: this report is there already")
    rows = {row["name"]: _kept(row) for row in result["rows"]}
    more = {
        "date_utc": when,
        "commit": facts["commit"],
        "load_average": facts["load_average"][0],
        "rows": rows,
    }
    return {
        "format": reading.FOLDED_FORMAT,
        "machine": _machine(facts),
        "reports": sorted([*reports, more], key=lambda one: str(one["date_utc"])),
    }


def check(
    folded: dict[str, Any], facts: dict[str, Any], level: str, *, partial: bool = False
) -> None:
    """Refuse a run whose report could not be added, before it is made.

    Parameters
    ----------
    folded : dict
        What a file holds.
    facts : dict
        What `bench.machine.describe` says of this machine.
    level : str
    partial : bool
        Whether only some rows or contenders were asked for.

    Raises
    ------
    CannotFold
        The run is less than a full one, or this is another machine.
    """
    if level != "full":
        raise CannotFold(f"expected a report of --full, got --{level}")
    if partial:
        raise CannotFold("expected a report of all rows and contenders, got a part of them")
    machine = _machine(facts)
    if folded["reports"] and machine != folded["machine"]:
        raise CannotFold(
            f"expected a report of {folded['machine']}, got {machine}; keep another file for "
            "another machine"
        )


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    return {what: facts[what] for what in MACHINE}


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    bound = row.get("bound")
    return {
        "title": row["title"],
        "measured": row["measured"],
        "value": row["value"],
        "target": row["target"],
        "best": row.get("best"),
        "bound": {what: bound[what] for what in ("name", "share")} if bound else None,
        "not_quiet": row.get("not_quiet"),
        "skipped": row["skipped"],
    }


def fold(folded: dict[str, Any]) -> list[FoldedRow]:
    """Fold all reports, row by row, in the order of the newest one; what it lacks is last."""
    reports = folded["reports"]
    if not reports:
        return []
    newest = reports[-1]["rows"]
    # What has a target is told though the newest report is without it: nothing may leave a table
    # because a contender was not there that day.
    gone = [name for one in reversed(reports) for name in one["rows"] if name not in newest]
    names = dict.fromkeys([*newest, *(name for name in gone if name in TARGETS)])
    rows = [_fold(name, reports) for name in names]
    # A row that has neither value nor target says something about the others of its report.
    return [row for row in rows if row.values or row.target]


def _fold(name: str, reports: Sequence[dict[str, Any]]) -> FoldedRow:
    newest = next(one["rows"][name] for one in reversed(reports) if name in one["rows"])
    target = TARGETS.get(name) or (Target.parse(newest["target"]) if newest["target"] else None)
    same = [
        (one["date_utc"], row)
        for one in reports
        if (row := one["rows"].get(name)) is not None
        and row["value"] is not None
        and _comparable(row, newest, target)
    ]
    quiet = [(when, row) for when, row in same if not row["not_quiet"]]
    shares = [row["bound"]["share"] for _, row in quiet if row["bound"]]
    bests = [row["best"] for _, row in quiet if row.get("best") is not None]
    bound = f"{statistics.median(shares):.2g} of {newest['bound']['name']}" if shares else ""
    return FoldedRow(
        name=name,
        title=newest["title"],
        measured=newest["measured"] if name in reports[-1]["rows"] else GONE,
        values=tuple(row["value"] for _, row in quiet),
        days=len({when[:10] for when, _ in quiet}),
        restless=len(same) - len(quiet),
        target=target,
        bound=bound,
        best=statistics.median(bests) if bests else None,
    )


def _comparable(row: dict[str, Any], newest: dict[str, Any], target: Target | None) -> bool:
    """Whether a value is of what is judged now: a target may have come, or moved, since then."""
    of_target = row["target"] is None or (
        target is not None and Target.parse(row["target"]).unit == target.unit
    )
    bounds = [one["bound"]["name"] if one["bound"] else None for one in (row, newest)]
    return (
        row["title"] == newest["title"] and of_target and (None in bounds or bounds[0] == bounds[1])
    )


def cores_of(machine: dict[str, Any]) -> str:
    """Say of which processor a machine has how many cores."""
    # Prose of a page has no calls in it, which "Xeon(R) " looks like.
    return f"{machine['cores']} cores of an {machine['cpu'].replace('(R)', '')}"


def named(folded: dict[str, Any]) -> str:
    """Say what was folded."""
    reports, machine = folded["reports"], folded["machine"]
    days = len({one["date_utc"][:10] for one in reports})
    commits = len({one["commit"] for one in reports})
    of = f"of {commits} commit{'s' if commits > 1 else ''}"
    on = f"on {days} day{'s' if days > 1 else ''}"
    return (
        f"Medians, lowest and highest of {len(reports)} runs of `shmbus bench --full` {on}, {of},\n"
        f"on {cores_of(machine)}."
    )


def main(argv: Sequence[str]) -> int:
    """Add reports to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report fold",
        description="Add full reports to a file of folded ones, and say what they come to.",
        epilog="example: python -m bench.report fold bench/results/two-cores/folded.json "
        "shmbus-bench",
    )
    parser.add_argument("file", type=Path, help="that is made, or added to")
    parser.add_argument("directories", type=Path, nargs="*", help="that hold a results.json each")
    options = parser.parse_args(argv)
    try:
        folded = reading.folded(options.file) if options.file.exists() else {"reports": []}
        for directory in options.directories:
            try:
                folded = add(folded, reading.result(directory))
            except CannotFold as error:
                parser.exit(1, f"fold: {directory}: {error}; nothing was written\n")
    except reading.CannotRead as error:
        parser.exit(1, f"fold: {error}; nothing was written\n")
    if not folded["reports"]:
        parser.exit(1, f"fold: {options.file} holds no report, and none was named\n")
    if options.directories:
        try:
            command.write(options.file, json.dumps(folded, indent=1) + "\n")
        except OSError as error:
            parser.exit(1, f"fold: cannot write {options.file}: {error}; it is as it was\n")
    print(named(folded))
    for row in fold(folded):
        median = "" if row.median is None else f"{row.median:.3g}"
        spread = f" ({min(row.values):.3g} to {max(row.values):.3g})" if row.values else ""
        print(" ".join(filter(None, (f"{row.title}:", median + spread, row.reports, row.verdict))))
    return 0
