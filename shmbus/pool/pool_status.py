"""Status of a slot pool: contents, readers and slot holders, seen from outside without a write.

Rows come from processes that may be dead or hostile: they are displayed and decide nothing.
Unreadable pools beside buses are omitted: `shmbus gc` lists every file.
"""

from __future__ import annotations

import os
from typing import Any, Final, Literal

import msgspec

from shmbus import errors
from shmbus.base.format import printable, several, show_size
from shmbus.pool.pool_file import open_pool, pool_path
from shmbus.segment.cache_salt import life_name
from shmbus.segment.names import SHM_DIRECTORY, parse_companion
from shmbus_ext import _core

#: First bytes of a pool's file; the files of different companions begin differently.
_MAGIC: Final = b"SHBPOOL1"
#: Row code during a load: the reader runs no whole version.
LOADING_CODE: Final = 4
#: Row code by a relay for a reader on a remote node: a version arrived but is not loaded.
ARRIVED_CODE: Final = 5
#: Code of a restarted server's rank, until the rank has loaded a version.
RESTARTED_CODE: Final = 6
_LIVES: dict[int, Literal["alive", "dead"]] = {_core.ROW_ALIVE: "alive", _core.ROW_DEAD: "dead"}


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One slot."""

    slot: int
    state: str
    newest: bool
    version: int
    text: str
    sequence: int
    size: int
    meta_size: int
    digests: int
    ranks: int
    published_unix_ns: int
    patch_from: int | None
    held_by: list[str]


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Writing process."""

    rank: int
    state: Literal["alive", "dead"]
    pid: int
    label: str
    done: int
    error: str


class ReaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Reading process."""

    reader: int
    state: Literal["alive", "dead"]
    pid: int
    label: str
    device: str
    applied_version: int | None
    applied_sequence: int | None
    #: Name of the running publication, unique among pools, as in salts; None before the first.
    applied_life: str | None = None
    refused_version: int | None
    error_code: int
    error: str
    holds: list[int]

    @property
    def has_refused(self) -> bool:
        """Return whether the reader rejected a version, as opposed to a pending load."""
        waits = self.error_code in (LOADING_CODE, ARRIVED_CODE, RESTARTED_CODE)
        return self.refused_version is not None and not waits


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A whole pool."""

    bus: str
    kind: str
    path: str
    life: int = 0
    size: int
    slot_size: int
    slots_open: int
    max_slots: int
    published: int
    skipped: int
    version: int | None
    slots: list[SlotStatus]
    ranks: list[RankStatus]
    readers: list[ReaderStatus]


def read_pool(bus: str, kind: str, begins: str = "") -> PoolStatus:
    """Read the status of a pool, with the readers whose label begins so."""
    pool = open_pool(bus, kind, read_only=True, wait_s=0)
    try:
        return status_of_pool(bus, kind, pool, begins)
    finally:
        pool.close()


def status_of_pool(bus: str, kind: str, pool: _core.SlotPool, begins: str = "") -> PoolStatus:
    """Describe an open pool, with the readers whose label begins so."""
    rows = _core.pool_rows(pool, begins)
    life = rows["life"]
    readers = [_reader(row, life) for row in rows["readers"]]
    slots = [_slot(row, readers) for row in rows["slots"]]
    newest = [slot.version for slot in slots if slot.newest and slot.state == "ready"]
    return PoolStatus(
        bus=printable(bus),
        kind=kind,
        path=printable(pool_path(bus, kind)),
        life=life,
        size=pool.slot_stride * min(rows["slots_open"], pool.max_slots),
        slot_size=pool.slot_bytes,
        slots_open=rows["slots_open"],
        max_slots=pool.max_slots,
        published=rows["published"],
        skipped=rows["skipped"],
        version=newest[0] if newest else None,
        slots=slots,
        ranks=[_rank(row) for row in rows["ranks"]],
        readers=readers,
    )


def _slot(row: dict[str, Any], readers: list[ReaderStatus]) -> SlotStatus:
    ready = row["state"] == "ready"
    return SlotStatus(
        slot=row["slot"],
        state=row["state"],
        newest=row["newest"],
        version=row["version"],
        text=printable(row["text"]),
        sequence=row["sequence"],
        size=row["bytes"],
        meta_size=row["meta_bytes"],
        digests=row["digests"],
        ranks=row["ranks"],
        published_unix_ns=row["published_unix_ns"],
        patch_from=row["base_version"] if row["base_sequence"] and ready else None,
        held_by=[
            f"{reader.label} (pid {reader.pid})"
            for reader in readers
            if reader.state == "alive" and row["slot"] in reader.holds
        ],
    )


def _rank(row: dict[str, Any]) -> RankStatus:
    return RankStatus(
        rank=row["rank"],
        state=_LIVES[row["life"]],
        pid=row["pid"],
        label=printable(row["label"]),
        done=row["done"],
        error=printable(row["error"]),
    )


def _reader(row: dict[str, Any], life: int) -> ReaderStatus:
    refused = row["refused"] > row["applied"]
    return ReaderStatus(
        reader=row["reader"],
        state=_LIVES[row["life"]],
        pid=row["pid"],
        label=printable(row["label"]),
        device=printable(row["device"]),
        applied_version=row["applied_version"] if row["applied"] else None,
        applied_sequence=row["applied"] or None,
        applied_life=life_name(life, row["applied"]) if row["applied"] else None,
        refused_version=row["refused_version"] if refused else None,
        error_code=row["error_code"] if refused else 0,
        error=printable(row["error"]) if refused else "",
        holds=[slot for slot in range(_core.POOL_MAX_SLOTS) if row["holds"] >> slot & 1],
    )


def describe_holders(status: PoolStatus) -> str:
    """Name the holders of the slots that blocked a publisher."""
    parts = [
        f"slot {slot.slot} (version {slot.version}) by {', '.join(slot.held_by)}"
        for slot in status.slots
        if slot.held_by and not slot.newest
    ]
    parts += [
        f"rank {rank.rank} (pid {rank.pid}) still writes"
        for rank in status.ranks
        if rank.rank and rank.state == "alive" and not parts
    ]
    return "; ".join(parts) or "by a process that has said nothing of itself"


def find_pools(bus: str | None = None) -> list[tuple[str, str]]:
    """Find pools by their names and first bytes."""
    found = []
    for entry in os.scandir(SHM_DIRECTORY):
        named = parse_companion(entry.name)
        if named is None or (bus is not None and named[1] != bus):
            continue
        if _first_bytes(entry.path) == _MAGIC:
            found.append((named[1], named[0]))
    return sorted(found)


def _first_bytes(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile, a foreign user's, or no file
        return b""
    try:
        return os.read(fd, len(_MAGIC))
    except OSError:
        return b""
    finally:
        os.close(fd)


def read_pools(bus: str | None = None) -> list[PoolStatus]:
    """Read the status of every readable pool."""
    found = []
    for name, kind in find_pools(bus):
        try:
            found.append(read_pool(name, kind))
        except (errors.ShmbusError, PermissionError):  # gone, a foreign user's, or damaged
            continue
    return found


def describe_pool(status: PoolStatus) -> str:
    """Summarize a pool in a line: version, publisher, and readers of older versions."""
    newest = "no version yet" if status.version is None else f"version {status.version}"
    publisher = next((rank for rank in status.ranks if rank.rank == 0), None)
    who = "no publisher"
    if publisher is not None:
        who = f"publisher pid {publisher.pid}"
        who += "" if publisher.state == "alive" else " (died)"
    readers = [reader for reader in status.readers if reader.state == "alive"]
    read = several(len(readers), "reader") if readers else "no readers"
    parts = [f"{status.kind}: {newest}, {show_size(status.size)}", who, read]
    behind = sum(reader.applied_version != status.version for reader in readers)
    if readers and status.version is not None:
        parts[-1] += f", {behind} without that version" if behind else ", all run it"
    parts += [
        f"{reader.label} refused version {reader.refused_version}"
        for reader in readers
        if reader.has_refused
    ]
    return "; ".join(parts)
