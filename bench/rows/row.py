"""A row of the result: what was measured, its target, and whether that is met; and the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bench.bounds import Beside

__all__ = ["OTHER_WORK", "Row", "Target", "table"]

#: Processors that other work may take while a row is measured: a twentieth of two.
OTHER_WORK: Final = 0.1


@dataclass(frozen=True)
class Target:
    """A bound for a row's value, such as ``at least 0.9 of memcpy``."""

    sense: Literal["at least", "at most"]
    bound: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Make a target of its text, as a report keeps it."""
        sense: Literal["at least", "at most"] = (
            "at least" if text.startswith("at least ") else "at most"
        )
        bound, _, unit = text.removeprefix(f"{sense} ").partition(" ")
        return cls(sense, float(bound), unit)

    def met_by(self, value: float) -> bool:
        """Whether a measured value meets the bound."""
        return value >= self.bound if self.sense == "at least" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g} {self.unit}"


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
        The lowest and the highest value of the repetitions.
    target : Target, optional
    skipped : str
        Why there is no value, where there is none.
    bound : Beside, optional
        What it is near, beside its runs.
    reference : Beside, optional
        What its value is a ratio to, where that is not its bound.
    others : float
        Processors that other work took meanwhile.
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
    others: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def not_quiet(self) -> str:
        """Why the machine's state allows no verdict; nothing if it does."""
        told = [one.not_quiet for one in (self.bound, self.reference) if one is not None]
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
    def verdict(self) -> str:
        """The verdict in words."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.target is not None and self.not_quiet:
            return f"machine not quiet: {self.not_quiet}"
        return {None: "", True: "met", False: "NOT met"}[self.met]

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
            "skipped": self.skipped or None,
            "bound": self.bound.as_json() if self.bound else None,
            "reference": self.reference.as_json() if self.reference else None,
            "others": self.others,
            "not_quiet": self.not_quiet or None,
            "figures": self.figures,
        }


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
