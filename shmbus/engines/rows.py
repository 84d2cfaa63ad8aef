"""What the ranks of servers say of themselves: the readers' rows of a bus's weights.

Invariant: a server has a version when the row of each of its ranks says so. A rank that has begun
to load, or refused something newer, is not whole, whatever it ran before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from shmbus import Bus, BusNotFoundError
from shmbus.engines.errors import EngineError
from shmbus.engines.report import ServerReport
from shmbus.engines.server import Addressed
from shmbus.pool.reader import PoolReader, VersionLease
from shmbus.pool.server_rows import WEIGHTS, drop_dead_rows, row_name, rows_of_server, was_published
from shmbus.pool.status import (
    ARRIVED_CODE,
    LOADING_CODE,
    PoolStatus,
    ReaderStatus,
    read_pool,
)
from shmbus.segment.cache_salt import life_name
from shmbus.weights.errors import MANIFEST_CODE

#: Seconds between two looks at the readers' rows.
POLL_S = 0.01
#: Seconds after which a relay has said what the rows of another node were.
HEARD_S = 0.2
#: Seconds after which rows of a node that says nothing are no more.
STALE_S = 3.5


def say_version(bus: str, version: int) -> None:
    """Make it the bus's policy version; weights may be all that is shared under that name."""
    with contextlib.suppress(BusNotFoundError), Bus.open(bus) as opened:
        opened.policy_version = version


def is_whole(row: ReaderStatus) -> bool:
    """Whether a rank has no part of another version than it says."""
    return row.error_code in (0, ARRIVED_CODE)


def _newest_of(pool: PoolStatus | None, version: int) -> int:
    """Return the sequence of the last publication of a number; 0 where no slot has the number."""
    slots = () if pool is None else pool.slots
    there = (slot.sequence for slot in slots if slot.state == "ready" and slot.version == version)
    return max(there, default=0)


def _are_of_newest(rows: list[ReaderStatus], version: int, pool: PoolStatus | None) -> bool:
    """Tell whether ranks run the last publication of a number, rather than an older life's."""
    newest = _newest_of(pool, version)
    return newest == 0 or all(row.applied_sequence == newest for row in rows)


class Missing(NamedTuple):
    """What keeps a server from running a version."""

    said: str
    final: bool


class RankRows:
    """The rows of one bus's weights."""

    def __init__(self, bus: str) -> None:
        self._bus = bus

    def of(self, server: Addressed) -> list[ReaderStatus]:
        """Return the rows of a server's living ranks; none where no weights are published."""
        return rows_of_server(self._bus, server.address)

    def are_loading(self, server: Addressed) -> bool:
        """Whether a rank says that it has begun to load something, and not that this has ended."""
        return any(row.error_code == LOADING_CODE for row in self.of(server))

    async def until_prepared(self, server: Addressed, timeout: float) -> None:
        """Wait until no rank has a lease any more, in which it looks up what comes; or go on."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not any(row.holds and row.error_code != LOADING_CODE for row in self.of(server)):
                return
            await asyncio.sleep(POLL_S)

    async def until_arrived(
        self, server: Addressed, ranks: int, version: int, timeout: float
    ) -> None:
        """Wait until each rank on another node can load a version, as the relay's rows say."""
        deadline = time.monotonic() + timeout
        await asyncio.sleep(HEARD_S)
        while True:
            rows, pool = self.of(server), self._pool()
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
                    "what its node lacks is in: shmbus relay BUS --status; nothing was touched",
                )
            await asyncio.sleep(POLL_S)

    def newest(self, timeout: float) -> VersionLease | None:
        """Lease the newest whole version; None where there is none."""
        try:
            reader = PoolReader(self._bus, WEIGHTS, label="fleet")
        except BusNotFoundError:
            return None
        if reader.newest:
            return reader.latest(timeout=timeout)
        reader.close()
        return None

    def drop_others(self, servers: Sequence[Addressed]) -> None:
        """Empty the rows of dead servers outside this list, to which no fleet brings weights."""
        names = {row_name(server.address) for server in servers}
        drop_dead_rows(self._bus, lambda name: name not in names)

    def are_attached(self, server: Addressed, ranks: int) -> bool:
        """Whether each rank reads these weights."""
        return len(self.of(server)) >= ranks

    def require_attached(self, server: Addressed, ranks: int, version: int) -> None:
        """Raise EngineError where a rank is not there, or can never load that version."""
        rows = self.of(server)
        if len(rows) < ranks:
            raise EngineError(
                server.address,
                "prepare",
                None,
                f"{len(rows)} of {ranks} ranks read the weights of bus {self._bus!r}",
                "is the server on this machine, with /dev/shm shared?",
            )
        # What a rank could not load once may load now; a manifest stays as it is.
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
        """Return what all ranks run; None where they differ, or one may have a part of another."""
        rows = self.of(server)
        pool = self._pool()
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
        """Wait until each rank runs a version; rows say what was so many seconds ago."""
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
        """Name the last publication of a number; empty where the pool has none."""
        pool = self._pool()
        sequence = _newest_of(pool, version)
        return "" if pool is None or sequence == 0 else life_name(pool.life, sequence)

    def _pool(self) -> PoolStatus | None:
        try:
            return read_pool(self._bus, WEIGHTS)
        except BusNotFoundError:
            return None

    def missing(self, server: Addressed, ranks: int, version: int) -> Missing | None:
        """Say what keeps a server's ranks from all running a version; None where they do."""
        rows = self.of(server)
        pool = self._pool()
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
