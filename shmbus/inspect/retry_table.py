"""The retry table of a segment's file, for operators.

Invariant: a row counts only if its checksum holds, so a row that changes while it is read is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from shmbus._format import printable
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.types import WantedStatus
from shmbus.ledger import LanePauseStatus
from shmbus_ext import _core

__all__ = ["read_lane_pause", "read_wanted"]

_LAYOUT: Final = _core.layout()["retry_entry"]
_ROW: Final[np.dtype[Any]] = np.dtype(dict(_LAYOUT))  # type: ignore[call-overload]
_CRC_AT: Final = _LAYOUT["offsets"][_LAYOUT["names"].index("crc")]
_NUMBER_AT: Final = _LAYOUT["offsets"][_LAYOUT["names"].index("number")]
_TEXT_AT: Final = _LAYOUT["offsets"][_LAYOUT["names"].index("id")]


def read_lane_pause(file: SegmentFile) -> LanePauseStatus | None:
    """Read why the request lane is paused; None where it is open."""
    for entry, row in _rows(file):
        if int(row["attempt"]) == _core.RETRY_PAUSE:
            reason = _text(entry, _ID_ROOM, int(row["reason_bytes"]))
            return LanePauseStatus(reason=reason, since_unix_s=int(row["round"]) / 1e9)
    return None


def _rows(file: SegmentFile) -> Iterator[tuple[bytes, Any]]:
    """Yield the rows that count: their bytes, and their fields."""
    if not int(file.header["retries_open"]):
        return
    raw = file.retry_table()
    for at in range(0, len(raw), _ROW.itemsize):
        entry = raw[at : at + _ROW.itemsize]
        row = np.frombuffer(entry, _ROW)[0]
        covered = entry[_NUMBER_AT:_CRC_AT] + entry[_TEXT_AT:]
        if (
            int(row["claim"]) != _core.RETRY_BUSY
            and int(row["number"])
            and _core.crc32c(covered) == int(row["crc"])
        ):
            yield entry, row


def read_wanted(file: SegmentFile) -> list[WantedStatus]:
    """Read the open retry requests, in the order in which they were published."""
    now_ns = _core.monotonic_ns()
    found = []
    for entry, row in _rows(file):
        if int(row["attempt"]) == _core.RETRY_PAUSE:
            continue
        claim = int(row["claim"])
        round = int(row["round"])
        wanted = WantedStatus(
            instance_id=_text(entry, 0, int(row["id_bytes"])),
            round=None if round == _core.NO_ROUND else round,
            split=printable(file.split_label(int(row["split"]))),
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
