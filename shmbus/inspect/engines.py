"""Inference servers of a bus, by rows of the weights and notes of recorders.

Invariant: rows decide about a version; a recorder's note adds calls and health.
"""

from __future__ import annotations

import time

import msgspec

from shmbus import errors
from shmbus.base.format import printable
from shmbus.data.status_types import EngineStatus
from shmbus.pool.pool_status import PoolStatus, read_pool
from shmbus.pool.server_rows import WEIGHTS, row_name, server_versions
from shmbus.segment.recorder_files import EngineNote, read_recorders


def read_engines(name: str, trainers: int) -> list[EngineStatus]:
    """Read the inference servers of a bus, by address; `trainers` is the trainer's version."""
    try:
        pool = read_pool(name, WEIGHTS)
    except (errors.ShmbusError, PermissionError):  # no readable pool now
        pool = None
    found = _by_rows(name, pool, trainers, time.time())
    for note in (engine for each in read_recorders(name) for engine in each.engines):
        at = printable(row_name(note.url))
        known = found.get(at) or _by_note(at, note)
        calls = (known.calls or 0) + note.calls
        found[at] = msgspec.structs.replace(known, calls=calls, answers=note.state)
    return [found[at] for at in sorted(found)]


def _by_rows(
    bus: str, pool: PoolStatus | None, trainers: int, now_s: float
) -> dict[str, EngineStatus]:
    slots = () if pool is None else pool.slots
    newest = max((slot.published_unix_ns for slot in slots if slot.newest), default=0)
    return {
        name: EngineStatus(
            address=name,
            state=server.state,
            version=server.version,
            life=server.life,
            why=server.why,
            ranks=server.ranks,
            updated_s=_since(server.published_unix_ns or 0, now_s),
            behind_s=_since(newest, now_s) if server.state == "behind" else None,
            asleep_s=_since(server.asleep_unix_ns or 0, now_s),
        )
        for name, server in server_versions(bus, pool, trainers).items()
    }


def _since(unix_ns: int, now_s: float) -> float | None:
    return max(0.0, now_s - unix_ns / 1e9) if unix_ns else None


def _by_note(address: str, note: EngineNote) -> EngineStatus:
    """Show a server without rows, by a recorder's note."""
    return EngineStatus(
        address=address,
        state="unknown"
        if note.version is None
        else "assumed" if note.version_by == "trainer" else "serving",
        version=note.version,
        why=printable(note.why),
    )  # fmt: skip
