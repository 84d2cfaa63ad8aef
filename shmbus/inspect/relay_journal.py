"""What a relay says of itself in a bus: the reader of a source, or the sink's journal.

Invariant: all that is read may change meanwhile, so each number is only shown.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.types import RelayStatus
from shmbus_ext import _core

__all__ = ["read_relay"]

_TYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(dict(note))  # type: ignore[call-overload]
    for name, note in _core.request_layout().items()
}
_STATE, _SOURCE_SHIFT = np.uint64(15), np.uint64(48)
_IDENTITY_BYTES: Final = 16


def read_relay(file: SegmentFile) -> RelayStatus | None:
    """Read it; None where no relay was ever at this bus."""
    kind, entry = _TYPES["relay_journal"], _TYPES["relay_entry"]
    head = np.frombuffer(file.read(kind.itemsize, file.relay_offset), kind)[0]
    is_sink = bool(head["incarnation"])
    if not is_sink and not head["source_incarnation"]:
        return None
    figures = np.frombuffer(head["figures"].tobytes(), "<u8").tolist()
    seen_ns = int(head["seen_ns"])
    at = file.relay_offset + kind.itemsize
    size = file.requests_offset - at
    entries = np.frombuffer(file.read(size - size % entry.itemsize, at), entry)
    words = entries["word"]
    settled = words[(words & _STATE) == np.uint64(_core.RELAY_SETTLED)] >> _SOURCE_SHIFT
    owed = words[(words & _STATE) != np.uint64(0)]
    sources = head["sources"].tobytes()
    held_for: dict[str, int] = {}
    for number, count in zip(*np.unique(settled, return_counts=True), strict=True):
        start = int(number) * _IDENTITY_BYTES
        held_for[sources[start : start + _IDENTITY_BYTES].hex()] = int(count)
    return RelayStatus(
        is_sink=is_sink,
        seen_s=max(0.0, time.monotonic() - seen_ns / 1e9) if seen_ns else None,
        begun=int(head["incarnation"] if is_sink else head["source_incarnation"]),
        entries=len(entries),
        held=figures[0] if not is_sink else 0,
        kept=figures[1] if not is_sink else 0,
        released=figures[2] if not is_sink else 0,
        moving=figures[0] if is_sink else 0,
        put=figures[2] if is_sink else 0,
        refused=figures[3] if is_sink else 0,
        settled=len(settled),
        intended=len(owed) - len(settled),
        held_for=held_for,
    )
