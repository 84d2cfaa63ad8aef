"""Weights versions of inference servers, by the rows of their ranks in the pool of weights.

Invariants:

- A version is known while each rank with a row lives and names a published version. Otherwise the
  version is unknown, with a reason.
- A server without a loaded version counts as version 0 until the trainer's version rises.
- The fleet's note names sleeping servers; without weights a sleeper's version is unknown.
- A row outlives the rank's process, until the rank comes back or a fleet without the server drops
  the row (`drop_dead_rows`): every process knows that a restarted server lacks weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from shmbus.errors import BusNotFoundError, LayoutMismatchError, ShmbusError, VersionUnknownError
from shmbus.pool.pool_file import identity_of, open_pool, pool_path
from shmbus.pool.pool_status import (
    ARRIVED_CODE,
    LOADING_CODE,
    PoolStatus,
    ReaderStatus,
    read_pool,
    status_of_pool,
)
from shmbus.pool.reader import PoolReader
from shmbus.segment.fleet_note import DISCARDED, FleetNote, read_fleet_note
from shmbus.segment.names import leads_to
from shmbus_ext import _core

#: Pool of the weights.
WEIGHTS: Final = "weights"
#: Bytes of a row's label, 48, minus those of " rank 99999".
MOST_NAME_BYTES: Final = 37
#: Hexadecimal digits that distinguish addresses of a common prefix.
DIGITS: Final = 8
#: Seconds for which rows count as fresh: a restart of a server takes longer.
FRESH_S: Final = 0.05
_RANK: Final = " rank "
_ENDED: Final = "has ended"
#: Reason of the unknown version of a server without rows.
NO_ROW: Final = "none of its ranks has a row in the bus's weights"

#: Reason for no answer of a sleeping server.
ASLEEP: Final = "asleep until EngineFleet.wake"

ServerState = Literal["serving", "behind", "loading", "unknown", "asleep", "waking"]


def row_name(address: str) -> str:
    """Return the name of a server in rows: the address, cut to the room of a row."""
    encoded = address.encode()
    if len(encoded) <= MOST_NAME_BYTES:
        return address
    digest = hashlib.sha256(encoded).hexdigest()[:DIGITS]
    return f"{encoded[: MOST_NAME_BYTES - DIGITS - 1].decode(errors='ignore')}~{digest}"


def engine_address(url: str) -> str:
    """Return the address of a server, also from the base URL of its OpenAI routes."""
    return url.rstrip("/").removesuffix("/v1")


def server_of_label(label: str) -> str:
    """Return the server of a rank's row; "" for any reader besides ranks of servers."""
    name, _, rank = label.rpartition(_RANK)
    return name if "://" in name and rank.isdecimal() else ""


def rows_of_server(bus: str, address: str) -> tuple[list[ReaderStatus], PoolStatus | None]:
    """Return the rows of a server's living ranks, and the pool; the cost of a row of its own."""
    try:
        pool = read_pool(bus, WEIGHTS, f"{row_name(address)}{_RANK}")
    except (BusNotFoundError, LayoutMismatchError):  # the pool is still under construction
        return [], None
    return [row for row in pool.readers if row.state == "alive"], pool


def drop_dead_rows(bus: str, drops: Callable[[str], bool]) -> None:
    """Empty the rows of dead ranks, by the row names of servers."""
    try:
        readers = read_pool(bus, WEIGHTS).readers
    except (BusNotFoundError, LayoutMismatchError):
        return
    for row in readers:
        name = server_of_label(row.label)
        if row.state == "dead" and name and drops(name):
            # A claim takes the dead row of the same label; a regular end empties the row.
            with contextlib.suppress(ShmbusError):
                PoolReader(bus, WEIGHTS, label=row.label).close()


class ServerVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The weights version of one server, or the reason of an unknown version."""

    name: str
    state: ServerState
    ranks: int
    #: The oldest and the newest version of the ranks; None for an unknown version.
    oldest: int | None = None
    newest: int | None = None
    why: str = ""
    #: Row and pid of every rank; a server's restart changes them.
    processes: tuple[tuple[int, int], ...] = ()
    #: Publication running on all ranks, as in salts of requests; "" without a common publication.
    life: str = ""
    #: Time of the version's publication; None after the reuse of the version's slot.
    published_unix_ns: int | None = None
    #: True while a sleeping server has no weights; `oldest` and `newest` ran before the sleep.
    discarded: bool = False
    #: Time of the begin of its sleep.
    asleep_unix_ns: int | None = None

    @property
    def version(self) -> int | None:
        """The version of a sample that begins now; None for an unknown version."""
        return None if self.discarded else self.oldest

    @property
    def sleeps(self) -> bool:
        """Return whether the server sleeps, and answers no request before a wake."""
        return self.state in ("asleep", "waking")


def server_versions(bus: str, pool: PoolStatus | None, trainers: int) -> dict[str, ServerVersion]:
    """Return the servers of a bus by their row name; `trainers` is the trainer's version."""
    found = {} if pool is None else _by_rows(pool, trainers)
    note = read_fleet_note(bus) or FleetNote()
    for address, sleep in note.asleep.items():
        name = row_name(address)
        known = found.get(name)
        if known is None:
            known = ServerVersion(name=name, state="unknown", ranks=0)
        elif _ENDED in known.why:
            continue  # a restarted server is awake
        found[name] = msgspec.structs.replace(
            known,
            state="waking" if sleep.has_weights else "asleep",
            discarded=sleep.level == DISCARDED,
            asleep_unix_ns=note.asleep_unix_ns,
            why=ASLEEP,
        )
    return found


def _by_rows(pool: PoolStatus, trainers: int) -> dict[str, ServerVersion]:
    ranks: dict[str, dict[str, ReaderStatus]] = {}
    for row in pool.readers:
        name = server_of_label(row.label)
        if name:
            rows = ranks.setdefault(name, {})
            # A dead row is obsolete after its rank came back in a second row.
            if row.label not in rows or row.state == "alive":
                rows[row.label] = row
    return {
        name: _server(name, list(rows.values()), pool, trainers) for name, rows in ranks.items()
    }


def _server(name: str, rows: list[ReaderStatus], pool: PoolStatus, trainers: int) -> ServerVersion:
    processes = tuple(sorted((row.reader, row.pid) for row in rows))
    why = "; ".join(filter(None, (_unknown(row, pool, trainers) for row in rows)))
    if why:
        return ServerVersion(
            name=name, state="unknown", ranks=len(rows), why=why, processes=processes
        )
    versions = [_runs(row) for row in rows]
    loading = any(row.error_code == LOADING_CODE for row in rows)
    newest = max((slot.sequence for slot in pool.slots if slot.newest), default=0)
    behind = any((row.applied_sequence or 0) < newest for row in rows)
    times = {slot.sequence: slot.published_unix_ns for slot in pool.slots}
    lives = {row.applied_life for row in rows}
    published = [times.get(row.applied_sequence or 0) for row in rows]
    return ServerVersion(
        name=name,
        state="loading" if loading else "behind" if behind else "serving",
        ranks=len(rows),
        oldest=min(versions),
        newest=max(versions),
        why="; ".join(sorted({row.error for row in rows if row.has_refused})),
        processes=processes,
        life=lives.pop() or "" if len(lives) == 1 else "",
        published_unix_ns=None if None in published else min(filter(None, published), default=None),
    )


def _runs(row: ReaderStatus) -> int:
    version = row.refused_version if row.error_code == LOADING_CODE else row.applied_version
    return version or 0


def _unknown(row: ReaderStatus, pool: PoolStatus, trainers: int) -> str:
    """Give the reason of a rank's unknown version; "" for a known version."""
    rank = f"rank {row.label.rpartition(_RANK)[2]}"
    if row.state == "dead":
        ran = "" if row.applied_version is None else f" with version {row.applied_version}"
        return f"the process of {rank} (pid {row.pid}) {_ENDED}{ran}, or reads another bus"
    if row.error_code == LOADING_CODE and row.refused_version is not None:
        return ""
    if row.applied_version is None:
        is_start = trainers == 0 and row.error_code in (0, ARRIVED_CODE)
        said = f": {row.error}" if row.error else ""
        return "" if is_start else f"{rank} has loaded no version{said}"
    if not was_published(row, pool):
        return f"{rank} reports version {row.applied_version}, which was never published"
    return ""


def was_published(row: ReaderStatus, pool: PoolStatus) -> bool:
    """Return whether a pool published the version of a row; relayed rows may lack a sequence."""
    if row.applied_sequence is None:
        return True
    there = {slot.sequence: slot.version for slot in pool.slots if slot.state == "ready"}
    version = there.get(row.applied_sequence, row.applied_version)
    return row.applied_sequence <= max(there, default=0) and version == row.applied_version


class ServerRows:
    """The servers of one bus, for many reads; safe from several threads.

    Rows of a removed pool count until the next pool opens or the last rank ends. From then on the
    removed pool's servers are unknown, until a server reads the weights of the next pool.
    """

    def __init__(self, bus: str) -> None:
        self._bus = bus
        self._path = pool_path(bus, WEIGHTS)
        self._lock = threading.Lock()
        self._pool: _core.SlotPool | None = None
        self._identity: os.stat_result | None = None
        self._read_s = -math.inf
        self._servers: dict[str, ServerVersion] = {}
        #: Unknown servers of a removed pool.
        self._lost: dict[str, ServerVersion] = {}

    def read(self, trainers: int, *, afresh: bool = False) -> dict[str, ServerVersion]:
        """Return the servers by row name, at most `FRESH_S` old, given the trainer's version."""
        with self._lock:
            now_s = time.monotonic()
            if afresh or now_s - self._read_s >= FRESH_S:
                self._servers = self._read(trainers)
                self._read_s = now_s
            return self._servers

    def _read(self, trainers: int) -> dict[str, ServerVersion]:
        removed = self._identity is None or not leads_to(self._path, self._identity)
        opened = removed and self._open_next()
        if opened:
            self._lose()
        if self._pool is None:
            return server_versions(self._bus, None, trainers) or self._lost
        status = status_of_pool(self._bus, WEIGHTS, self._pool)
        found = server_versions(self._bus, status, trainers)
        if removed and not opened and not any(row.state == "alive" for row in status.readers):
            self._lose()
            self._close()  # frees the memory of the removed pool
            return self._lost
        if found:
            self._lost = {}
        return found or self._lost

    def _lose(self) -> None:
        self._lost = {
            name: ServerVersion(
                name=name, state="unknown", ranks=each.ranks, why="the pool of its rows was removed"
            )
            for name, each in (self._servers or self._lost).items()
        }

    def _open_next(self) -> bool:
        try:
            found = open_pool(self._bus, WEIGHTS, read_only=True, wait_s=0)
        except (BusNotFoundError, LayoutMismatchError, PermissionError):
            return False  # no pool, half a pool, or a foreign user's
        self._close()
        self._pool, self._identity = found, identity_of(self._path)
        return True

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = self._identity = None

    def version_of(self, address: str, trainers: int) -> int:
        """Return the oldest version of a server's ranks now, or raise VersionUnknownError."""
        server = self.read(trainers, afresh=True).get(row_name(engine_address(address)))
        if server is None:
            if trainers == 0:
                return 0
            raise _unknown_error(self._bus, {address: NO_ROW})
        if server.version is None:
            raise _unknown_error(self._bus, {address: server.why})
        return server.version

    def oldest(self, trainers: int) -> int:
        """Return all servers' oldest version; on a bus without servers, the trainer's."""
        found, unknown = [], {}
        for name, server in self.read(trainers).items():
            if server.version is None:
                unknown[name] = server.why
            else:
                found.append(server.version)
        if unknown:
            raise _unknown_error(self._bus, unknown)
        return min(found, default=trainers)

    def all_unknown(self, trainers: int) -> bool:
        """Return whether the bus has servers and knows no server's version."""
        servers = self.read(trainers)
        return bool(servers) and all(each.version is None for each in servers.values())

    def close(self) -> None:
        """Close the pool."""
        with self._lock:
            self._close()


def _unknown_error(bus: str, why: dict[str, str]) -> VersionUnknownError:
    said = "; ".join(f"{name}: {each}" for name, each in why.items())
    return VersionUnknownError(
        f"bus {bus!r}: the weights version of {said}. Label no sample of that server: give its "
        "request back, and go on after EngineFleet.catch_up(), update() or wake(). A fleet without "
        "the server drops the server",
        list(why),
    )
