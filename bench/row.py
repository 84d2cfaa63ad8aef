"""Form of a result: a row with its values, the values beside them, and its target.

Invariants:

- The value of a row is the median of its repetitions, beside the lowest and the highest.
- Each repetition of a row ran beside a measurement of its yardstick, in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.targets import TARGETS

__all__ = ["Row", "cells", "skipped", "table"]

HEADS = ("what", "measured", "lowest-highest (of)", "beside", "times that", "target")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table, an object of the JSON; `bench.targets` maps names to targets."""

    name: str
    title: str
    #: Of the values and of the yardstick: "trajectories/s", "us".
    unit: str = ""
    #: A value a repetition.
    values: tuple[float, ...] = ()
    #: Yardstick, such as "memcpy", or "". A value a repetition, or a single value.
    beside: str = ""
    beside_values: tuple[float, ...] = ()
    #: The reason of a row without a value.
    skipped: str = ""
    #: A remark for the table, and further numbers for the JSON.
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The median of the repetitions."""
        return statistics.median(self.values) if self.values else None

    @property
    def ratio(self) -> float | None:
        """The median of the repetitions' ratios to their yardstick."""
        if not self.values or not self.beside_values:
            return None
        if len(self.values) == len(self.beside_values):
            pairs = zip(self.values, self.beside_values, strict=True)
            return statistics.median(mine / other for mine, other in pairs)
        return statistics.median(self.values) / statistics.median(self.beside_values)

    @property
    def met(self) -> bool | None:
        """Whether the value meets the target; None without a target or a value."""
        target = TARGETS.get(self.name)
        judged = None if target is None else self.ratio if target.of_beside else self.value
        return None if target is None or judged is None else target.met_by(judged)

    def as_json(self) -> dict[str, Any]:
        """Return the row in json's types; `from_json` reverses the conversion."""
        target = TARGETS.get(self.name)
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "value": self.value,
            "values": self.values,
            "beside": self.beside,
            "beside_values": self.beside_values,
            "ratio": self.ratio,
            "target": str(target) if target else "",
            "skipped": self.skipped,
            "note": self.note,
            "figures": self.figures,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Row:
        """Make a row from the result of `as_json`."""
        return cls(
            name=found["name"],
            title=found["title"],
            unit=found["unit"],
            values=tuple(found["values"]),
            beside=found["beside"],
            beside_values=tuple(found["beside_values"]),
            skipped=found["skipped"],
            note=found["note"],
            figures=found["figures"],
        )


def skipped(name: str, title: str, why: str) -> Row:
    """Make the row of an impossible measurement."""
    return Row(name=name, title=title, skipped=why)


def number(value: float) -> str:
    """Write a value with three significant digits; a large value in full."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cells(row: Row) -> list[str]:
    """Return the cells of a row, in the order of `HEADS`."""
    target = TARGETS.get(row.name)
    wanted = str(target) if target else ""
    if row.met is False:
        wanted += ", missed"
    if row.skipped or row.value is None:
        return [row.title, f"skipped: {row.skipped}", "", "", "", str(target or "")]
    beside = f"{row.beside} {number(statistics.median(row.beside_values))}" if row.beside else ""
    spread = f"{number(min(row.values))}-{number(max(row.values))} ({len(row.values)})"
    return [
        row.title,
        f"{number(row.value)} {row.unit}".rstrip() + (f"; {row.note}" if row.note else ""),
        spread if len(row.values) > 1 else "",
        beside,
        "" if row.ratio is None else number(row.ratio),
        wanted,
    ]


def table(rows: Iterable[Row]) -> str:
    """Lay rows out as plain text, each column as wide as its widest cell."""
    lines: list[Sequence[str]] = [HEADS, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
