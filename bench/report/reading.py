"""Reports and folded reports as files hold them, read whole or refused.

Such files are kept for months, copied between machines and mended by hand. A figure that is no
number, or a report of another form, would go into medians and tables as if it had been measured.

Invariant: what is returned has every key that a report or a fold asks for, each of its own type,
and each number of a row is finite.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from bench.contest.run import SERIES
from bench.rows.targets import Target

__all__ = ["FOLDED_FORMAT", "FORMAT", "RESULTS", "CannotRead", "folded", "result"]

#: Of results.json, and of a file of folded reports.
FORMAT: Final = 3
FOLDED_FORMAT: Final = 1
#: In a directory that ``shmbus bench`` writes.
RESULTS: Final = "results.json"

_When = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d")]


class CannotRead(Exception):
    """A file is missing, or is not what it should be; the message says what to do."""


class _Bound(msgspec.Struct):
    name: str
    share: float

    def __post_init__(self) -> None:
        _finite(share=self.share)


class _NearBound(_Bound):
    median: float
    unit: str
    share_interval: tuple[float, float]


class _KeptRow(msgspec.Struct):
    title: str
    measured: str
    value: float | None
    target: str | None
    skipped: str | None
    not_quiet: str | None = None
    bound: _Bound | None = None
    best: float | None = None

    def __post_init__(self) -> None:
        _finite(value=self.value, best=self.best)
        if self.target is not None:
            Target.parse(self.target)


class _Row(_KeptRow, kw_only=True):
    name: str
    spread: tuple[float, float] | None
    met: bool | None
    bound: _NearBound | None = None
    took_s: float = 0.0


class _Machine(msgspec.Struct):
    cpu: str
    cores: int
    machine: str


class _Facts(_Machine):
    date_utc: _When
    commit: str | None
    load_average: tuple[float, float, float]


class _Contender(msgspec.Struct):
    title: str
    groups: str
    copies: int
    copied: str
    favour: str
    skipped: str | None
    python: str | None
    versions: dict[str, str]


class _Measured(msgspec.Struct):
    contender: str
    point: str | int


class _Result(msgspec.Struct):
    machine: _Facts
    level: str
    memcpy_bytes_per_s: float
    rows: list[_Row]
    contest: dict[str, Any]
    open_groups: list[dict[str, Any]]
    notes: list[str] = []

    def __post_init__(self) -> None:
        _finite(memcpy_bytes_per_s=self.memcpy_bytes_per_s)
        if not self.contest:
            return
        _as(self.contest.get("contenders"), dict[str, _Contender], "contest.contenders")
        for series in SERIES:
            _as(self.contest.get(series), list[_Measured], f"contest.{series}")


class _Kept(msgspec.Struct):
    date_utc: _When
    commit: str | None
    load_average: float
    rows: dict[str, _KeptRow]


class _Folded(msgspec.Struct):
    machine: _Machine
    reports: list[_Kept]


_T = TypeVar("_T")


def _finite(**figures: float | None) -> None:
    for name, value in figures.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"expected a finite number as {name}, got {value}")


def _as(found: Any, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} of {where}") from error


def result(directory: Path) -> dict[str, Any]:
    """Read the report of a directory.

    Raises
    ------
    CannotRead
        There is none, it is damaged, or it is of another form than this version's.
    """
    path = directory / RESULTS
    if not path.exists():
        raise CannotRead(
            f"there is no {path}; expected a directory that `shmbus bench --output` wrote"
        )
    return _checked(path, FORMAT, _Result)


def folded(path: Path) -> dict[str, Any]:
    """Read a file of folded reports.

    Raises
    ------
    CannotRead
        It is damaged, or of another form than this version's.
    """
    return _checked(path, FOLDED_FORMAT, _Folded)


def _checked(path: Path, form: int, kind: type[msgspec.Struct]) -> dict[str, Any]:
    what = "a report" if kind is _Result else "folded reports"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotRead(
            f"{path}: expected {what}, got what cannot be read: {error}; take it from where it "
            "was kept, or measure again"
        ) from error
    if not isinstance(found, dict) or "format" not in found:
        raise CannotRead(f"{path}: expected {what}, got JSON of something else")
    if found["format"] != form:
        raise CannotRead(
            f"{path}: expected {what} of format {form}, got format {found['format']!r}; read it "
            "with the version of shmbus that wrote it, or measure again"
        )
    try:
        msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise CannotRead(f"{path}: expected {what}, got a damaged one: {error}") from error
    return found
