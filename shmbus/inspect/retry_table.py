"""The table of wanted samples as it lies in a segment's file, for operators.

Invariant: a row counts only with its checksum, so one that changes while it is read is left out.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from shmbus._format import printable
from shmbus.inspect.segment_file import SegmentFile
from shmbus_ext import _core

__all__ = ["WantedStatus", "read_wanted"]

_LAYOUT: Final = _core.layout()["wanted_row"]
_ROW: Final[np.dtype[Any]] = np.dtype(dict(_LAYOUT))  # type: ignore[call-overload]
_CRC_AT: Final = _LAYOUT["offsets"][_LAYOUT["names"].index("crc")]
_NUMBER_AT: Final = _LAYOUT["offsets"][_LAYOUT["names"].index("number")]
_TEXT_AT: Final = _LAYOUT["offsets"][_LAYOUT["names"].index("id")]


class WantedStatus(msgspec.Struct, frozen=True):
    """A sample that is asked for again.

    Attributes
    ----------
    instance_id, epoch, index : str, int | None, int
        Which one.
    attempt : int
        1 for the first time that it is asked for.
    reason : str
        Why it is.
    asked_s : float
        Seconds since it was asked for.
    taken_by : int | None
        The producer that has taken it.
    """

    instance_id: str
    epoch: int | None
    index: int
    attempt: int
    reason: str
    asked_s: float
    taken_by: int | None


def read_wanted(file: SegmentFile) -> list[WantedStatus]:
    """Read what is asked for, in the order of asking."""
    if not int(file.header["wanted_open"]):
        return []
    raw = file.wanted_table()
    now_ns = _core.monotonic_ns()
    found = []
    for at in range(0, len(raw), _ROW.itemsize):
        entry = raw[at : at + _ROW.itemsize]
        row = np.frombuffer(entry, _ROW)[0]
        claim = int(row["claim"])
        covered = entry[_NUMBER_AT:_CRC_AT] + entry[_TEXT_AT:]
        if (
            claim == _core.WANTED_BUSY
            or not int(row["number"])
            or _core.crc32c(covered) != int(row["crc"])
        ):
            continue
        epoch = int(row["epoch"])
        wanted = WantedStatus(
            instance_id=_text(entry, 0, int(row["id_bytes"])),
            epoch=None if epoch == _core.NO_EPOCH else epoch,
            index=int(row["index"]),
            attempt=int(row["attempt"]),
            reason=_text(entry, _ID_ROOM, int(row["reason_bytes"])),
            asked_s=max(0.0, (now_ns - int(row["asked_ns"])) / 1e9),
            taken_by=claim - 1 if claim else None,
        )
        found.append((int(row["number"]), wanted))
    return [wanted for _, wanted in sorted(found, key=lambda pair: pair[0])]


_ID_ROOM: Final = _ROW.fields["reason"][1] - _TEXT_AT  # type: ignore[index]


def _text(entry: bytes, at: int, size: int) -> str:
    start = _TEXT_AT + at
    return printable(entry[start : start + size].decode("utf-8", "backslashreplace"))
