"""Steps of a trainer that has one copy of the model with its servers: pause, step, resume.

Invariants:

- The parameters change only while every server says that it is paused; there is no quorum, since
  all of them have the same memory.
- A step that failed leaves the servers paused: the model is a mix.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable

from shmbus._arguments import check_flag, check_int
from shmbus.engines.errors import EngineError
from shmbus.engines.pause_note import PauseNote, PauseNotice
from shmbus.engines.pauses import Pairs, Pauses, uninterrupted
from shmbus.engines.report import ServerReport, UpdateReport
from shmbus.engines.server import EngineServer
from shmbus.errors import DamagedError
from shmbus.weights.shared import SharedModel
from shmbus.weights.shared_file import shared_state

__all__ = ["SharedSteps"]


class SharedSteps(Pauses):
    """The verb `step` of a fleet."""

    async def step(
        self,
        shared: SharedModel,
        action: Callable[[], object],
        version: int,
        *,
        heal: bool = False,
    ) -> None:
        """Change the one copy of a model that the servers and this process share, between pauses.

        Parameters
        ----------
        shared : SharedModel
            Of this bus, as `share` made it.
        action : callable
            Changes the parameters, such as ``optimizer.step``; it is called in a thread.
        version : int
            What the weights are after it.
        heal : bool
            Whether the action loads all weights anew, so that it may begin with torn ones.

        Raises
        ------
        EngineError
            A server could not be paused, and nothing was changed; or it could not be resumed.
        DamagedError
            The action failed, from its error: the servers stay paused, since the model is a mix.
            Load whole weights with another step, and heal=True.
        BlockingIOError
            Another process is updating servers of this bus.
        TypeError, ValueError
            The version is no int of 0 or more, the model none of this bus, or the action none that
            ends when it returns.
        """
        version = check_int("version", version, 0, (1 << 63) - 1)
        check_flag("heal", heal)
        if not isinstance(shared, SharedModel):
            raise TypeError(f"shared: expected what share returned, got {type(shared).__name__}")
        if shared.bus != self.bus:
            raise ValueError(f"shared: expected a model of bus {self.bus!r}, got {shared.bus!r}'s")
        _require_function(action)
        async with self._busy:
            with PauseNote(self.bus) as note:
                task = asyncio.ensure_future(self._step(note, shared, action, version, heal))
                try:
                    await asyncio.shield(task)
                except asyncio.CancelledError:
                    await uninterrupted(task)
                    raise

    async def _step(
        self,
        note: PauseNote,
        shared: SharedModel,
        action: Callable[[], object],
        version: int,
        heal: bool,
    ) -> None:
        if note.left is not None:
            self._require_shared(note, await self._recover(note))
        report = self._begin(note, version, shared.version)
        reports = report.servers
        pairs = list(zip(self.servers, reports, strict=True))
        await self._all(await self._each(pairs, self._ask), reports)
        servers = [(server.kind, server.address) for server in self.servers]
        note.write(PauseNotice(os.getpid(), servers, version, report.previous, shared=True))
        async with self._workers_held(version):
            paused = await self._each(pairs, self._pause)
            if len(paused) < len(pairs):
                if not shared.torn:
                    await self._each(pairs, self._resume)
                    self._clear(note, report)
                await self._all(paused, reports)
            try:
                await asyncio.to_thread(_change, shared, action, version, heal)
            except Exception as error:
                if not shared.torn:  # it was refused before anything was changed
                    await self._each(pairs, self._resume)
                    self._clear(note, report)
                    raise
                raise DamagedError(
                    f"the step to version {version} failed, so the model is a mix; "
                    f"{', '.join(server.address for server in self.servers)} stay paused: load "
                    "whole weights in a step with heal=True"
                ) from error
            resumed = await self._each(pairs, self._resume)
        self._clear(note, report)
        self._say(version)
        await self._all(resumed, reports)

    def _require_shared(self, note: PauseNote, left: UpdateReport | None) -> None:
        """Raise EngineError where other weights than shared ones have left a server torn."""
        if left is None or note.left is None or note.left.shared:
            return
        own = {server.address for server in self.servers}
        for each in left.servers:
            if each.state == "paused" and each.address in own:
                advice = "it stays paused, since its model is not whole; nothing was changed"
                raise EngineError(each.address, "recover", None, each.error, advice)

    async def _ask(self, server: EngineServer, report: ServerReport) -> None:
        """Find out that it is there before anybody is paused."""
        await server.paused(self.timeout)

    async def _all(self, pairs: Pairs, reports: list[ServerReport]) -> None:
        if len(pairs) < len(reports):
            address = next(each.address for each in reports if each.error)
            raise self._failure(address, "nothing was changed")

    async def _resume_whole(self, note: PauseNote, left: PauseNotice) -> UpdateReport:
        """End the pause of a trainer that died around a step, unless it died in it."""
        report, pairs = self._begin_recovery(left)
        state = shared_state(self.bus)
        if state is None or state[1]:
            why = "its memory is gone" if state is None else "the trainer died in a step"
            for _, each in pairs:
                each.error = f"the shared model is no whole one: {why}"
            return report
        report.version = state[0]
        for server, each in await self._each(pairs, self._resume):
            del server
            each.version = state[0]
        self._clear(note, report)
        if note.left is None:
            self._release_workers()
        return report


def _require_function(action: object) -> None:
    """Raise TypeError for what would be found out in the step, which leaves the model torn."""
    if not callable(action) or inspect.iscoroutinefunction(action):
        raise TypeError(
            "action: expected a function that changes the parameters, such as optimizer.step, got "
            f"{type(action).__name__} {action!r}"
        )


def _change(shared: SharedModel, action: Callable[[], object], version: int, heal: bool) -> None:
    # The servers are paused, which is the guard; none of them holds a lock meanwhile.
    with shared.stepping(version, guard="none", heal=heal):
        action()
