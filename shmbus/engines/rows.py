"""Rows of servers' ranks: the reader rows of a bus's weights.

Invariant: a server runs a version when the row of each of its ranks names it. A rank in the middle
of a load, or after refusing a newer version, is not whole, whatever it ran before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from shmbus import Bus, BusNotFoundError, WaitTimeoutError
from shmbus.engines.engine_server import Addressed
from shmbus.engines.results import EngineError, ServerReport
from shmbus.pool.pool_status import ARRIVED_CODE, LOADING_CODE, PoolStatus, ReaderStatus, read_pool
from shmbus.pool.reader import PoolReader, VersionLease
from shmbus.pool.server_rows import WEIGHTS, drop_dead_rows, row_name, rows_of_server, was_published
from shmbus.segment.cache_salt import life_name
from shmbus.weights.errors import MANIFEST_CODE

#: Seconds between two looks at the readers' rows.
POLL_S = 0.01
#: Seconds until a relay has copied the rows of a remote node.
HEARD_S = 0.2
#: Seconds until rows of a silent node count as gone.
STALE_S = 3.5


def say_version(bus: str, version: int) -> None:
    """Set the bus's policy version; ignore weights without a bus."""
    with contextlib.suppress(BusNotFoundError), Bus.open(bus) as opened:
        opened.policy_version = version


def is_whole(row: ReaderStatus) -> bool:
    """Return whether a rank holds exactly its reported version."""
    return row.error_code in (0, ARRIVED_CODE)


def _newest_of(pool: PoolStatus | None, version: int) -> int:
    """Return the sequence of a number's last publication; 0 if no slot holds the number."""
    slots = () if pool is None else pool.slots
    there = (slot.sequence for slot in slots if slot.state == "ready" and slot.version == version)
    return max(there, default=0)


def _are_of_newest(rows: list[ReaderStatus], version: int, pool: PoolStatus | None) -> bool:
    """Return whether ranks run a number's last publication, not an older life's."""
    newest = _newest_of(pool, version)
    return newest == 0 or all(row.applied_sequence == newest for row in rows)


class Missing(NamedTuple):
    """Obstacle to a server's version."""

    said: str
    final: bool


class RankRows:
    """Reader rows of a bus's weights."""

    def __init__(self, bus: str) -> None:
        self._bus = bus

    def of(self, server: Addressed) -> list[ReaderStatus]:
        """Return the rows of a server's living ranks; empty before a publication."""
        return self._look(server)[0]

    def _look(self, server: Addressed) -> tuple[list[ReaderStatus], PoolStatus | None]:
        return rows_of_server(self._bus, server.address)

    def are_loading(self, server: Addressed) -> bool:
        """Return whether a rank reports an unfinished load."""
        return any(row.error_code == LOADING_CODE for row in self.of(server))

    async def until_prepared(self, server: Addressed, timeout: float) -> None:
        """Wait until no rank holds a lease for its preparation; continue after the timeout."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not any(row.holds and row.error_code != LOADING_CODE for row in self.of(server)):
                return
            await asyncio.sleep(POLL_S)

    async def until_arrived(
        self, server: Addressed, ranks: int, version: int, timeout: float
    ) -> None:
        """Wait until each remote rank can load a version, by the relay's rows."""
        deadline = time.monotonic() + timeout
        await asyncio.sleep(HEARD_S)
        while True:
            rows, pool = self._look(server)
            there = [
                row
                for row in rows
                if row.refused_version == version
                or (row.applied_version == version and _are_of_newest([row], version, pool))
            ]
            if len(there) >= ranks:
                return
            if time.monotonic() >= deadline:
                raise EngineError(
                    server.address,
                    "prepare",
                    None,
                    f"version {version} came to {len(there)} of {ranks} ranks in {timeout:g} s",
                    "see its node's missing parts in: shmbus relay BUS --status; no rank changed",
                )
            await asyncio.sleep(POLL_S)

    def newest(self, timeout: float) -> VersionLease | None:
        """Lease the newest whole version; return None without a version."""
        try:
            reader = PoolReader(self._bus, WEIGHTS, label="fleet")
        except BusNotFoundError:
            return None
        if reader.newest:
            return reader.latest(timeout=timeout)
        reader.close()
        return None

    def in_force(self, version: int, refused: str, timeout: float) -> VersionLease | None:
        """Lease the newest version; after a refusal of its publication, another by number."""
        newest = self.newest(timeout)
        if newest is None or not refused or self.life(newest.version) != refused:
            return newest
        reader = PoolReader(self._bus, WEIGHTS, label="fleet")
        try:
            found = reader.at(version)
        except WaitTimeoutError:  # a later publication took the slot
            reader.close()
            return newest
        newest.close()
        return found

    def drop_others(self, servers: Sequence[Addressed]) -> None:
        """Drop the rows of dead servers outside this list: no fleet brings weights to them."""
        names = {row_name(server.address) for server in servers}
        drop_dead_rows(self._bus, lambda name: name not in names)

    def are_attached(self, server: Addressed, ranks: int) -> bool:
        """Return whether every rank reads the weights."""
        return len(self.of(server)) >= ranks

    def require_attached(self, server: Addressed, ranks: int, version: int) -> None:
        """Raise EngineError for a missing rank, or a rank unfit for the version."""
        rows = self.of(server)
        if len(rows) < ranks:
            raise EngineError(
                server.address,
                "prepare",
                None,
                f"{len(rows)} of {ranks} ranks read the weights of bus {self._bus!r}",
                "is the server on this machine, with /dev/shm shared?",
            )
        # A failed load may succeed now; an unfit manifest stays unfit.
        unfit = [
            row.error
            for row in rows
            if row.refused_version == version and row.error_code == MANIFEST_CODE
        ]
        if unfit:
            raise EngineError(
                server.address, "prepare", None, "; ".join(unfit), "nothing was touched"
            )

    def whole_version(self, server: Addressed, ranks: int) -> int | None:
        """Return the version common to every whole rank; None for mixed or torn ranks."""
        rows, pool = self._look(server)
        versions = {(row.applied_sequence, row.applied_version) for row in rows}
        whole = len(rows) >= ranks and all(
            is_whole(row) and (pool is None or was_published(row, pool)) for row in rows
        )
        return versions.pop()[1] if whole and len(versions) == 1 else None

    async def require_version(
        self,
        server: Addressed,
        report: ServerReport,
        version: int,
        error: EngineError | None,
        timeout: float,
        heard_s: float = 0.0,
    ) -> None:
        """Wait until each rank runs a version; rows lag by `heard_s` seconds."""
        heard = time.monotonic() + heard_s
        deadline = time.monotonic() + (timeout if error is None else heard_s + 2 * POLL_S)
        while True:
            missing = self.missing(server, report.ranks, version)
            if missing is None:
                return
            final = missing.final and time.monotonic() >= heard
            if final or time.monotonic() >= deadline:
                raise EngineError(
                    server.address,
                    "load",
                    None if error is None else error.status,
                    missing.said + ("" if error is None else f" ({error.body})"),
                    f"expected each rank to run version {version}",
                )
            await asyncio.sleep(POLL_S)

    def life(self, version: int) -> str:
        """Name a number's last publication; empty without a slot for the number."""
        try:
            pool = read_pool(self._bus, WEIGHTS)
        except BusNotFoundError:
            return ""
        sequence = _newest_of(pool, version)
        return life_name(pool.life, sequence) if sequence else ""

    def missing(self, server: Addressed, ranks: int, version: int) -> Missing | None:
        """Return the obstacle to a version on every rank; None without an obstacle."""
        rows, pool = self._look(server)
        true = [row for row in rows if pool is None or was_published(row, pool)]
        runs = [row for row in true if is_whole(row) and row.applied_version == version]
        if len(rows) >= ranks and len(runs) == len(rows) and _are_of_newest(runs, version, pool):
            return None
        refused = [
            f"{row.label}: {row.error}"
            for row in rows
            if row.refused_version == version and row.has_refused
        ]
        said = "; ".join(refused) or "; ".join(
            f"{row.label} runs "
            + (f"{row.applied_version}" if is_whole(row) else "no whole version")
            + (", which was never published" if row not in true else "")
            for row in rows
        )
        return Missing(
            said=f"{len(rows)} of {ranks} ranks are there: {said}",
            final=bool(refused) or len(rows) < ranks,
        )
