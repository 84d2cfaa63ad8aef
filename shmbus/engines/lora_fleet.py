"""A new adapter at several servers, under a name unique to its publication.

No server pauses: requests in flight continue with their requested name, and new requests ask for
the new name once the bus's policy version announces it.

Invariants:

- The policy version is announced only after enough servers list the new name with its path; a
  success answer proves nothing, and a refused load is an error whatever the list shows.
- Any exception of a server's class is a failure of the server.
- Servers unload a version taken by too few of them; the previous version stays loaded until `keep`
  newer versions are.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Sequence

import msgspec

from shmbus.base.arguments import check_int
from shmbus.base.closing import ClosedByAsyncWith
from shmbus.engines.engine_server import (
    InferenceServer,
    as_engine_error,
    checked_addresses,
    checked_timeout,
    require_awake,
)
from shmbus.engines.results import EngineError, ServerReport, UpdateReport, UpdateRolledBackError
from shmbus.engines.rows import say_version
from shmbus.engines.tasks import OneAtATime, close_all, to_the_end
from shmbus.errors import ShmbusError
from shmbus.segment.fleet_note import read_fleet_note
from shmbus.segment.names import check_name
from shmbus.weights.adapters import ENDING, LoraVersion, past_keeping


class LoraFleet(ClosedByAsyncWith):
    """Bring versions of an adapter to inference servers.

    Parameters
    ----------
    servers : sequence of InferenceServer
        `VllmServer` and `SglangServer`.
    bus : str
        Bus whose policy version announces the version in force.
    timeout : float
        Seconds for each request.
    quorum : int, optional
        Minimum of servers to take a version; default: every server.
    keep : int
        Versions that stay loaded, for requests in flight.

    Raises
    ------
    ValueError
        The list is empty or names a server twice, or a number is invalid.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        bus: str,
        timeout: float = 120.0,
        quorum: int | None = None,
        keep: int = 2,
    ) -> None:
        addresses = checked_addresses(servers)
        if not servers or len(set(addresses)) < len(addresses):
            raise ValueError(f"servers: expected one or more, each once, got {addresses}")
        check_name(bus)
        most = len(servers)
        self.servers = list(servers)
        self.bus = bus
        self.timeout = checked_timeout(timeout)
        self.quorum = most if quorum is None else check_int("quorum", quorum, 1, most)
        self.keep = check_int("keep", keep, 1, sys.maxsize)
        self._busy = OneAtATime()

    async def update(self, adapter: LoraVersion) -> UpdateReport:
        """Load a version at every server, announce it, and unload old versions.

        Parameters
        ----------
        adapter : LoraVersion
            From `LoraFiles.publish`.

        Returns
        -------
        UpdateReport
            At least `quorum` servers took the version; `warning` names failed unloads.

        Raises
        ------
        EngineError
            A server sleeps; nothing was loaded.
        UpdateRolledBackError
            Too few servers took the version: a load was refused, or a foreign adapter holds the
            name. The version was unloaded again, and its predecessor stays in force.

        Notes
        -----
        A cancelled call waits for the update's end.
        """
        if not isinstance(adapter, LoraVersion):
            raise TypeError(
                f"adapter: expected what LoraFiles.publish returned, got {type(adapter).__name__}"
            )
        async with self._busy:
            return await to_the_end(self._update(adapter), ShmbusError)

    async def _update(self, adapter: LoraVersion) -> UpdateReport:
        note = read_fleet_note(self.bus)
        require_awake(self.servers, () if note is None else note.asleep, "load adapter")
        began = time.monotonic()
        before = await asyncio.gather(*(self._loaded(each, adapter) for each in self.servers))
        others = [n for each in before for n, name in each if name != adapter.name]
        older = [n for n in others if n < adapter.version]
        previous = max(older or others, default=None)
        reports = [ServerReport(address=server.address, ranks=1) for server in self.servers]
        report = UpdateReport(
            version=adapter.version, previous=previous, servers=reports, life=adapter.name
        )
        pairs = list(zip(self.servers, reports, strict=True))
        loaded = await asyncio.gather(*(self._load(*pair, adapter) for pair in pairs))
        if sum(loaded) < self.quorum:
            await asyncio.gather(*(self._unload(*pair, adapter) for pair in pairs))
            causes = [f"{each.address}: {each.error}" for each in reports if each.error]
            raise UpdateRolledBackError(adapter.version, previous, "; ".join(causes))
        say_version(self.bus, adapter.version)
        await asyncio.gather(*(self._unload_old(*pair, adapter) for pair in pairs))
        report.total_s = time.monotonic() - began
        return report

    async def _load(
        self, server: InferenceServer, report: ServerReport, adapter: LoraVersion
    ) -> bool:
        began = time.monotonic()
        error: EngineError | None = None
        try:
            await self._free_name(server, adapter)
            await server.load_adapter(adapter.name, adapter.path, self.timeout)
        except Exception as failed:  # any exception of a server's class
            error = as_engine_error(server, failed)
        try:
            there = await server.adapters(self.timeout)
        except Exception as found:
            unlisted = as_engine_error(server, found)
            report.error = str(error or unlisted)
            report.state = "gone" if unlisted.gone else "unknown"
            return False
        # A list vouches for a load with a lost answer, but not for a refused load.
        refused = error is not None and error.status is not None
        if refused or there.get(adapter.name) != adapter.path:
            report.error = str(error or f"it does not list {adapter.name!r} with {adapter.path}")
            return False
        report.version = adapter.version
        report.warning = "" if error is None else str(error)
        report.load_s = time.monotonic() - began
        return True

    async def _free_name(self, server: InferenceServer, adapter: LoraVersion) -> None:
        """Unload an adapter of the same name and path; EngineError for the name of another path."""
        path = (await server.adapters(self.timeout)).get(adapter.name)
        if path == adapter.path:
            await server.unload_adapter(adapter.name, self.timeout)
        elif path is not None:
            raise EngineError(
                server.address,
                "adapter name",
                None,
                f"{adapter.name!r} is in use for {path or 'the base'}, expected a free name "
                f"for {adapter.path}",
                "unload that adapter, or publish under another name; nothing was loaded",
            )

    async def _unload(
        self, server: InferenceServer, report: ServerReport, adapter: LoraVersion
    ) -> None:
        """Unload an adapter by name and path; an empty path matches any path."""
        try:
            path = (await server.adapters(self.timeout)).get(adapter.name)
            if path is not None and adapter.path in ("", path):
                await server.unload_adapter(adapter.name, self.timeout)
        except Exception as error:
            report.warning = str(as_engine_error(server, error))

    async def _unload_old(
        self, server: InferenceServer, report: ServerReport, adapter: LoraVersion
    ) -> None:
        there = [name for _, name in await self._loaded(server, adapter)]
        for old in past_keeping(there, adapter.name, self.keep):
            await self._unload(server, report, msgspec.structs.replace(adapter, name=old, path=""))

    async def _loaded(self, server: InferenceServer, adapter: LoraVersion) -> list[tuple[int, str]]:
        """List version and name of every loaded publication of this adapter, from any process."""
        ends = re.compile(re.escape(_stem(adapter)) + ENDING)
        try:
            found = [ends.fullmatch(name) for name in await server.adapters(self.timeout)]
        except Exception:  # loading says why
            return []
        return sorted((int(match[1]), match[0]) for match in found if match)

    async def close(self) -> None:
        """Close connections to the servers; idempotent. A cancelled call ends first."""
        await close_all(self.servers)


def _stem(adapter: LoraVersion) -> str:
    """Return the common name prefix of the adapter's publications."""
    found = re.fullmatch(rf"(.*?){adapter.version}(?:-[0-9a-f]{{16}})?", adapter.name)
    return found[1] if found else adapter.name
