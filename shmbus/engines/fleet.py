"""New weights into several inference servers, so that none ever generates with half a model.

The order, for all servers together: prepare (nothing is touched), pause, load, rows agree, resume.
Then the bus's policy version says so.

Invariants:

- Neither a status nor a body is believed: a server has a version when the row of each of its ranks
  says that it applied it. Only such a server is resumed.
- What ran before stays leased until the rows agree, so there is a way back for as long as it may be
  needed.
- A server that is not whole stays paused, and the error names it.
- Nothing is loaded into a server that does not say that it is paused.
- An update that was begun is ended, by its deadlines at the latest: a cancelled task waits for it,
  and what a dead process leaves is recovered by its note.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final, Protocol

import shmbus
from shmbus._arguments import check_int
from shmbus.engines.errors import EngineError
from shmbus.engines.pause_note import PauseNote
from shmbus.engines.pauses import Pairs, Step, uninterrupted
from shmbus.engines.reloads import Reloads
from shmbus.engines.report import ServerReport, UpdateReport
from shmbus.engines.rows import RankRows
from shmbus.engines.server import EngineServer, PauseMode
from shmbus.engines.shared_steps import SharedSteps

__all__ = ["EngineFleet"]

#: Of a policy version, which the bus says once servers have it.
MOST_VERSION: Final = (1 << 63) - 1


class Publisher(Protocol):
    """What the fleet needs of a `WeightPublisher`."""

    def publish(self, version: int) -> object:
        """Publish that version; return once it is whole."""


class EngineFleet(SharedSteps, Reloads):
    """Brings new weights to inference servers.

    Parameters
    ----------
    servers : sequence of EngineServer
        `VllmServer` and its like.
    bus : str
        The bus whose weights they read, and whose policy version they follow.
    mode : "keep" | "wait" | "abort"
        What happens to requests in flight: they are frozen and go on, are awaited, or are aborted.
        In the last two the bus is paused with a reason, so that workers hold their requests.
    clear_cache : bool
        Whether keys and values that the old weights made are thrown away. Without it, requests in
        flight go on with them ("keep"), and a prefix cache may serve them to new requests.
    timeout : float
        Seconds for each step of an update.
    quorum : int, optional
        How many servers must take a version; all by default. Those that did not run the one before,
        or stay paused, and are named in the report.

    Raises
    ------
    ValueError
        There is no server, one is there twice, the quorum or mode is none, or a server has no such
        mode.
    """

    def __init__(
        self,
        servers: Sequence[EngineServer],
        *,
        bus: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        timeout: float = 120.0,
        quorum: int | None = None,
    ) -> None:
        super().__init__(
            servers, bus=bus, mode=mode, clear_cache=clear_cache, timeout=timeout, quorum=quorum
        )
        self._rows = RankRows(bus)

    # -- for users ------------------------------------------------------------------------------

    async def update(self, publisher: Publisher, version: int) -> UpdateReport:
        """Publish a version, unless it is the newest already, and bring it to the servers.

        Parameters
        ----------
        publisher : WeightPublisher
            Of this bus.
        version : int
            0 or more; 0 is a version as any other.

        Returns
        -------
        UpdateReport
            At least `quorum` servers run the version.

        Raises
        ------
        UpdateRolledBackError
            Too few took it, and every server runs what it ran before.
        EngineError
            A server could not be prepared or paused, and nothing was touched; or it stays paused,
            since neither the new nor the old version could be loaded into all of its ranks.
        BlockingIOError
            Another process is updating servers of this bus.
        TypeError, ValueError
            The publisher or the version is none.

        Notes
        -----
        Cancelling waits for the update's end: a server must not be left in the middle.
        """
        if not callable(getattr(publisher, "publish", None)):
            raise TypeError(
                f"publisher: expected a WeightPublisher, got {type(publisher).__name__}"
            )
        version = check_int("version", version, 0, MOST_VERSION)
        async with self._busy:
            task = asyncio.ensure_future(self._update(publisher, version))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                with contextlib.suppress(shmbus.ShmbusError):
                    await uninterrupted(task)
                raise

    def update_sync(self, publisher: Publisher, version: int) -> UpdateReport:
        """Do what `update` does, where no event loop runs.

        Parameters
        ----------
        publisher, version
            As for `update`.

        Returns
        -------
        UpdateReport

        Raises
        ------
        RuntimeError
            An event loop runs in this thread: await `update` there.
        """
        _require_no_loop()

        async def run() -> UpdateReport:
            try:
                return await self.update(publisher, version)
            finally:
                await self.close()

        return asyncio.run(run())

    async def recover(self) -> UpdateReport | None:
        """End the pause that a dead process has left, by the rules of `update`.

        Servers whose ranks agree on a whole version are resumed. Others get the newest whole one
        first. One that cannot take it stays paused, and is named.

        Returns
        -------
        UpdateReport or None
            None where nothing was left paused.

        Raises
        ------
        BlockingIOError
            The process that paused them lives.
        """
        async with self._busy:
            with PauseNote(self.bus) as note:
                return await self._recover(note)

    # -- an update ------------------------------------------------------------------------------

    async def _update(self, publisher: Publisher, version: int) -> UpdateReport:
        began = time.monotonic()
        with PauseNote(self.bus) as note:
            if note.left is not None:
                await self._recover(note)
            previous = await asyncio.to_thread(self._rows.newest, self.timeout)
            try:
                if previous is None or previous.version != version:
                    await asyncio.to_thread(publisher.publish, version=version)
                    before = None if previous is None else previous.version
                elif getattr(publisher, "version", version) != version:
                    # A number of another life: by it, there is no way back to what it was.
                    await asyncio.to_thread(publisher.publish, version=version)
                    before = None
                else:
                    before = version  # the servers may run an older one; nothing older is leased
                report = self._begin(note, version, before)
                await self._bring(note, report)
            finally:
                if previous is not None:
                    previous.close()
        self._say(version)
        report.total_s = time.monotonic() - began
        return report

    async def _bring(self, note: PauseNote, report: UpdateReport) -> None:
        async def restore(behind: Pairs) -> Pairs:
            # A server that has no version from before stays as it is.
            if report.previous is None:
                return []
            return await self._each(
                await self._each(behind, self._await_turn), self._load(report.previous)
            )

        await self._in_order(
            note,
            report,
            prepare=self._prepare(report.version),
            attach=self._attach(report.version),
            load=self._load(report.version),
            restore=restore,
        )

    # -- one step at one server -------------------------------------------------------------------

    def _prepare(self, version: int) -> Step:
        async def prepare(server: EngineServer, report: ServerReport) -> None:
            report.ranks = await server.ranks(self.timeout)
            if await server.prepare(self.bus, self.timeout):
                self._rows.require_attached(server, report.ranks, version)

        return prepare

    def _attach(self, version: int) -> Step:
        async def attach(server: EngineServer, report: ServerReport) -> None:
            if self._rows.are_attached(server, report.ranks):
                return
            if await server.attach(self.bus, self.timeout):
                self._rows.require_attached(server, report.ranks, version)

        return attach

    async def _end(self, server: EngineServer, report: ServerReport) -> None:
        del report  # it says already why no rank was attached
        await self._settle(server)

    def _load(self, version: int) -> Step:
        async def load(server: EngineServer, report: ServerReport) -> None:
            began = time.monotonic()
            error: EngineError | None = None
            try:
                await self._keep_paused(server, report)
                if self._rows.are_loading(server):
                    await self._settle(server)
                await server.load(version, self.clear_cache, self.timeout)
            except EngineError as failed:
                # Its ranks may have loaded all the same: their rows decide.
                error = failed
            report.version = None
            await self._rows.require_version(server, report, version, error, self.timeout)
            if error is not None:
                # All ranks have it; what the server has not finished must be, before it generates.
                await self._settle(server)
            report.version = version
            report.warning = "" if error is None else str(error)
            report.load_s = time.monotonic() - began

        return load

    async def _await_turn(self, server: EngineServer, report: ServerReport) -> None:
        """Wait until it has done what it was asked before, since its rows speak of that only then.

        Whoever asked may have died, or given up. Servers do one thing after another, so any answer
        to what changes nothing is one.
        """
        del report
        try:
            await server.prepare(self.bus, self.timeout)
        except EngineError as error:
            if error.status is None:
                raise

    async def _settle(self, server: EngineServer) -> bool:
        return await server.settle(self._rows.are_loading(server), self.timeout)

    # -- what a dead process has left -------------------------------------------------------------

    async def _recover(self, note: PauseNote) -> UpdateReport | None:
        left = note.left
        if left is None:
            return None
        if left.shared:
            return await self._resume_whole(note, left)
        if left.directory:
            return await self._reload_newest(note, left)
        newest = await asyncio.to_thread(self._rows.newest, self.timeout)
        version = None if newest is None else newest.version
        report, pairs = self._begin_recovery(left)
        report.version = left.version if version is None else version
        try:
            there = pairs if version is None else await self._each(pairs, self._await_turn)
            known = await self._each(there, self._look)
            untouched = [pair for pair in known if pair[1].version is not None]
            mixed = [pair for pair in known if pair[1].version is None]
            if version is not None:
                prepare, attach = self._prepare(version), self._attach(version)
                for step in (prepare, self._keep_paused, attach, self._load(version)):
                    mixed = await self._each(mixed, step)
                untouched += mixed
            await self._each(untouched, self._resume)
        finally:
            if newest is not None:
                newest.close()
        self._clear(note, report)
        if note.left is None:
            self._release_workers()
        return report

    async def _look(self, server: EngineServer, report: ServerReport) -> None:
        report.ranks = await server.ranks(self.timeout)
        was_open = await self._settle(server)
        report.version = None if was_open else self._rows.whole_version(server, report.ranks)


def _require_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "update_sync: an event loop runs in this thread, which it would stop; await update() there"
    )
