"""A row of the result: what was measured, its target, and whether that is met; and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from bench.bounds import Beside
from bench.rows.targets import Target

__all__ = ["OTHER_WORK", "Row", "out_of_reach", "table"]

#: Processors that other work may take while a row is measured: a twentieth of two.
OTHER_WORK: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table, one object of the JSON.

    Attributes
    ----------
    name, title : str
        For programs, and for people.
    measured : str
        The figures in words.
    value : float, optional
        What the target is about.
    spread : (float, float), optional
        The interval of the value.
    target : Target, optional
        Of `bench.rows.targets.TARGETS`.
    skipped : str
        Why there is no value, where there is none.
    bound : Beside, optional
        What it is near, beside its runs.
    reference : Beside, optional
        What its value is a ratio to, where that is not its bound.
    difference : bool
        Whether the value is what a run takes more than its bound, and no multiple of it.
    soft : bool
        Whether a run may come to more than its bound, so that nothing follows from it for the best.
    others : float
        Processors that other work took meanwhile.
    took_s : float
        Seconds that it took with its bounds, and with the rows that were measured with it.
    figures : dict
        Every number, for the JSON.
    """

    name: str
    title: str
    measured: str
    value: float | None = None
    spread: tuple[float, float] | None = None
    target: Target | None = None
    skipped: str = ""
    bound: Beside | None = None
    reference: Beside | None = None
    difference: bool = False
    soft: bool = False
    others: float = 0.0
    took_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def not_quiet(self) -> str:
        """Why the machine's state allows no verdict; nothing if it does."""
        told = []
        if not self.difference or self.spread is None:
            told += [one.not_quiet for one in (self.bound, self.reference) if one is not None]
        elif self.target is not None and len({*map(self.target.met_by, self.spread)}) > 1:
            # Whatever moved both is not in their difference, and what moved one is in its interval.
            low, high = self.spread
            told.append(f"from {low:.3g} to {high:.3g}, on both sides of the target")
        if self.others > OTHER_WORK:
            told.append(f"others took {self.others:.2f} of a processor meanwhile")
        return "; ".join(dict.fromkeys(filter(None, told)))

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is no target, no value or no quiet."""
        if self.target is None or self.value is None or self.not_quiet:
            return None
        return self.target.met_by(self.value)

    @property
    def best(self) -> float | None:
        """What the value would be if a run were its bound; None where that does not follow."""
        if self.value is None or self.bound is None or self.target is None:
            return None
        if self.difference or self.soft:
            return None
        share = statistics.median(self.bound.shares)
        if not 0 < share <= 1:
            return None
        return self.value / share if self.target.sense == "at least" else self.value * share

    @property
    def out_of_reach(self) -> str:
        """Why nothing could meet the target on this machine; nothing if something could."""
        if self.target is None or self.best is None or self.met is not False:
            return ""
        return out_of_reach(self.target, self.best)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.target is not None and self.not_quiet:
            return f"machine not quiet: {self.not_quiet}"
        word = {None: "", True: "met", False: "NOT met"}[self.met]
        return "; ".join(filter(None, (word, self.out_of_reach)))

    def as_json(self) -> dict[str, Any]:
        """Return the row as what json can write."""
        return {
            "name": self.name,
            "title": self.title,
            "measured": self.measured,
            "value": self.value,
            "spread": self.spread,
            "target": str(self.target) if self.target else None,
            "met": self.met,
            "best": self.best,
            "out_of_reach": self.out_of_reach or None,
            "skipped": self.skipped or None,
            "bound": self.bound.as_json() if self.bound else None,
            "reference": self.reference.as_json() if self.reference else None,
            "others": self.others,
            "took_s": self.took_s,
            "not_quiet": self.not_quiet or None,
            "figures": self.figures,
        }


def out_of_reach(target: Target, best: float) -> str:
    """Say that a target cannot be met where the bound alone comes to `best`; nothing if it can."""
    if target.met_by(best):
        return ""
    return f"out of reach here, where its bound alone comes to {best:.3g}"


def table(rows: Iterable[Row]) -> str:
    """Lay rows out as plain text, each column as wide as its widest cell."""
    cells = [["what", "measured", "value", "lowest, highest", "bound", "target", "verdict"]]
    for row in rows:
        value = "" if row.value is None else f"{row.value:.3g}"
        spread = "" if row.spread is None else f"{row.spread[0]:.3g}, {row.spread[1]:.3g}"
        target = "none" if row.target is None else str(row.target)
        bound = "" if row.bound is None else str(row.bound)
        cells.append([row.title, row.measured, value, spread, bound, target, row.verdict])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # A reason for a skipped row may be long; the rule below the heads need not be.
    widths[-1] = len(cells[0][-1])
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
