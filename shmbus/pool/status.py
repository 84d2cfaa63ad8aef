"""What a slot pool holds, who reads it, and who holds what: seen from outside, nothing is written.

Rows come from processes that may be dead or hostile: they are shown, and decide nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shmbus._format import printable
from shmbus.pool.lifecycle import open_pool, pool_path
from shmbus_ext import _core

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
    """A process that writes."""

    rank: int
    state: Literal["alive", "dead"]
    pid: int
    label: str
    done: int
    error: str


class ReaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process that reads."""

    reader: int
    state: Literal["alive", "dead"]
    pid: int
    label: str
    device: str
    applied_version: int | None
    applied_sequence: int | None
    refused_version: int | None
    error_code: int
    error: str
    holds: list[int]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A whole pool."""

    bus: str
    kind: str
    path: str
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


def read_pool(bus: str, kind: str) -> PoolStatus:
    """Read the status of a pool."""
    pool = open_pool(bus, kind, read_only=True, wait_s=0)
    try:
        return status_of_pool(bus, kind, pool)
    finally:
        pool.close()


def status_of_pool(bus: str, kind: str, pool: _core.SlotPool) -> PoolStatus:
    """Describe a pool that is open."""
    rows = _core.pool_rows(pool)
    readers = [_reader(row) for row in rows["readers"]]
    slots = [_slot(row, readers) for row in rows["slots"]]
    newest = [slot.version for slot in slots if slot.newest and slot.state == "ready"]
    return PoolStatus(
        bus=printable(bus),
        kind=kind,
        path=printable(pool_path(bus, kind)),
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


def _reader(row: dict[str, Any]) -> ReaderStatus:
    refused = row["refused"] > row["applied"]
    return ReaderStatus(
        reader=row["reader"],
        state=_LIVES[row["life"]],
        pid=row["pid"],
        label=printable(row["label"]),
        device=printable(row["device"]),
        applied_version=row["applied_version"] if row["applied"] else None,
        applied_sequence=row["applied"] or None,
        refused_version=row["refused_version"] if refused else None,
        error_code=row["error_code"] if refused else 0,
        error=printable(row["error"]) if refused else "",
        holds=[slot for slot in range(_core.POOL_MAX_SLOTS) if row["holds"] >> slot & 1],
    )


def describe_holders(status: PoolStatus) -> str:
    """Say who keeps the slots that a publisher could not take."""
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
