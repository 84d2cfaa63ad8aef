"""Servers that read a checkpoint again: pause, reload by a path, resume.

Nothing of ours runs inside these servers, so there are no rows: a server has a version when its own
calls say so, which is less than `EngineFleet.update` asks.

Invariants:

- A directory that a server is told to read was written whole and synced before.
- A server whose reload failed is told to read the checkpoint before; one that cannot, or whose
  answers can no longer be told apart, stays paused, and is named.

Source: /collective_rpc, /update_weight_version and /weight_info of vLLM 0.32;
/update_weights_from_disk of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import shmbus
from shmbus.engines.pause_note import PauseNote, PauseNotice
from shmbus.engines.pauses import Pairs, Pauses, Step, uninterrupted
from shmbus.engines.report import ServerReport, UpdateReport
from shmbus.engines.server import EngineServer
from shmbus.errors import ShmbusError
from shmbus.weights.carriers.checkpoint import CheckpointPlace, newest_checkpoints

__all__ = ["Reloads"]


class Reloads(Pauses):
    """The verb `reload` of a fleet."""

    async def reload(self, directory: Path | str) -> UpdateReport:
        """Have the servers read the newest checkpoint of a directory.

        Parameters
        ----------
        directory : path
            Of a publisher with ``carrier="checkpoint"``, which has published; the servers see it
            under the same path.

        Returns
        -------
        UpdateReport
            At least `quorum` servers say that they have the version.

        Raises
        ------
        UpdateRolledBackError
            Too few took it, and every server reads the one before again.
        EngineError
            A server could not be paused, and nothing was touched; or it stays paused, since it
            could read neither.
        WeightsError
            There is no checkpoint in the directory.
        BlockingIOError
            Another process is updating servers of this bus.

        Notes
        -----
        Cancelling waits for the end, as in `EngineFleet.update`.
        """
        async with self._busy:
            task = asyncio.ensure_future(self._reload(Path(directory)))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                with contextlib.suppress(shmbus.ShmbusError):
                    await uninterrupted(task)
                raise

    async def _reload(self, directory: Path) -> UpdateReport:
        began = time.monotonic()
        with PauseNote(self.bus) as note:
            if note.left is not None:
                await self._recover(note)
            newest, before = await asyncio.to_thread(newest_checkpoints, directory)
            report = self._begin(note, newest.version, None if before is None else before.version)
            await self._bring_files(note, report, newest, before)
        self._say(newest.version)
        report.total_s = time.monotonic() - began
        return report

    async def _bring_files(
        self,
        note: PauseNote,
        report: UpdateReport,
        newest: CheckpointPlace,
        before: CheckpointPlace | None,
    ) -> None:
        await self._in_order(
            note,
            report,
            prepare=self._find,
            load=self._read(newest),
            restore=lambda behind: self._read_before(behind, before),
            directory=str(newest.path.parent.absolute()),
        )

    async def _read_before(self, behind: Pairs, before: CheckpointPlace | None) -> Pairs:
        if before is None:
            return []
        known = [
            (server, report)
            for server, report in behind
            if not report.error or server.answers_in_step or report.ranks <= 1
        ]
        return await self._each(known, self._read(before))

    async def _find(self, server: EngineServer, report: ServerReport) -> None:
        """Find out that it is there, and how many may answer at once where that counts."""
        await server.paused(self.timeout)
        if not server.answers_in_step:
            report.ranks = await server.ranks(self.timeout)

    def _read(self, place: CheckpointPlace) -> Step:
        async def read(server: EngineServer, report: ServerReport) -> None:
            began = time.monotonic()
            report.version = None
            await self._keep_paused(server, report)
            path = str(place.path.absolute())
            await server.reload(path, place.version, self.clear_cache, self.timeout)
            report.version = place.version
            report.load_s = time.monotonic() - began

        return read

    async def _reload_newest(self, note: PauseNote, left: PauseNotice) -> UpdateReport:
        """End the pause of a trainer that died in a reload: all read the newest."""
        report, pairs = self._begin_recovery(left)
        try:
            newest, _ = await asyncio.to_thread(newest_checkpoints, Path(left.directory))
        except (OSError, ShmbusError) as error:  # they stay paused, until they get other weights
            for _, each in pairs:
                each.error = str(error)
            return report
        report.version = newest.version
        for step in (self._find, self._read(newest), self._resume):
            pairs = await self._each(pairs, step)
        self._clear(note, report)
        if note.left is None:
            self._release_workers()
        return report
