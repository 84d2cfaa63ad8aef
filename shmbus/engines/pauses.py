"""Inference servers that are paused and resumed together, and the bus that says so to workers.

Invariants:

- One pause at a time: in this process by a lock, among processes by the note's.
- Servers are resumed until they say so, or their deadline has passed; the note is taken back only
  when nobody that was paused is left so.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import shmbus
from shmbus._arguments import check_choice, check_flag, check_int, check_seconds
from shmbus.engines.errors import EngineError, UpdateRolledBackError
from shmbus.engines.one_at_a_time import OneAtATime
from shmbus.engines.pause_note import PauseNote, PauseNotice
from shmbus.engines.report import ServerReport, UpdateReport
from shmbus.engines.rows import Addressed
from shmbus.engines.server import EngineServer, PauseMode
from shmbus.segment.names import check_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "SETTLED",
    "Pairs",
    "Pauses",
    "Step",
    "as_engine_error",
    "checked_addresses",
    "checked_timeout",
    "close_all",
    "uninterrupted",
]

Pairs: TypeAlias = list[tuple[EngineServer, ServerReport]]
Step: TypeAlias = Callable[[EngineServer, ServerReport], Awaitable[None]]

#: Seconds between two tries to resume.
RETRY_S = 0.2
#: States of servers of which nobody has to think any more.
SETTLED = ("serving", "gone")
PAUSE_MODES = ("keep", "wait", "abort")
#: How the reason begins with which a fleet pauses the bus.
HELD = "weights of version "
#: What is said of a server that a note names and a fleet does not know.
_FOREIGN = "it is none of this fleet's; end its pause by: shmbus weights {bus} --resume"


class Pauses:
    """What every kind of update shares; its parameters are those of `EngineFleet`."""

    def __init__(
        self,
        servers: Sequence[EngineServer],
        *,
        bus: str,
        mode: PauseMode,
        clear_cache: bool,
        timeout: float,
        quorum: int | None,
    ) -> None:
        addresses = checked_addresses(servers)
        check_name(bus)
        if not servers or len(set(addresses)) < len(addresses):
            raise ValueError(f"servers: expected one or more, each once, got {addresses}")
        check_choice("mode", mode, PAUSE_MODES)
        for server in servers:
            if mode not in server.modes:
                raise ValueError(
                    f"mode: {server.address} ({type(server).__name__}) has no {mode!r}; it has "
                    f"{', '.join(server.modes)}"
                )
        check_flag("clear_cache", clear_cache)
        most = len(servers)
        self.quorum = most if quorum is None else check_int("quorum", quorum, 1, most)
        self.servers = list(servers)
        self.bus = bus
        self.mode = mode
        self.clear_cache = clear_cache
        self.timeout = checked_timeout(timeout)
        self._busy = OneAtATime()
        #: Why a step failed at a server, by its address.
        self._failures: dict[str, EngineError] = {}

    async def close(self) -> None:
        """Let go of connections to the servers; may be called twice. Cancelled, it ends first."""
        await close_all(self.servers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _pause(self, server: EngineServer, report: ServerReport) -> None:
        report.state = "unknown"
        report.paused_s = -time.monotonic()
        await server.pause(self.mode, self.clear_cache, self.timeout)
        report.state = "paused"

    async def _keep_paused(self, server: EngineServer, report: ServerReport) -> None:
        """Pause a server that generates after all: it was started anew, or others resumed it."""
        del report  # it counts as paused, whatever comes of this
        if not await server.paused(self.timeout):
            await server.pause(self.mode, self.clear_cache, self.timeout)

    async def _resume(self, server: EngineServer, report: ServerReport) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                await server.resume(self.timeout)
                if not await server.paused(self.timeout):
                    break
            except EngineError as error:
                if error.gone or time.monotonic() >= deadline:
                    raise
            if time.monotonic() >= deadline:
                raise EngineError(
                    server.address, "resume", 200, "it says that it is paused", "resume it by hand"
                )
            await asyncio.sleep(RETRY_S)
        report.state = "serving"
        if report.paused_s < 0:
            report.paused_s += time.monotonic()

    async def _recover(self, note: PauseNote) -> UpdateReport | None:
        """End what a dead process has left; `EngineFleet` knows each kind of update."""
        raise NotImplementedError

    async def _end(self, server: EngineServer, report: ServerReport) -> None:
        """End what a failed `attach` may have left open; `EngineFleet` knows what that is."""
        raise NotImplementedError

    def _begin(self, note: PauseNote, version: int, previous: int | None) -> UpdateReport:
        """Begin the report of an update; who could not be resumed before is paused still."""
        paused = {address for _, address in note.named()}
        servers = [ServerReport(address=server.address) for server in self.servers]
        for each in servers:
            each.state = "paused" if each.address in paused else "serving"
        return UpdateReport(version=version, previous=previous, servers=servers)

    def _begin_recovery(self, left: PauseNotice) -> tuple[UpdateReport, Pairs]:
        """Begin the report of what a note names, with pairs of those that are of this fleet."""
        own = {server.address: server for server in self.servers}
        servers = [ServerReport(address=address, state="paused") for _, address in left.servers]
        for each in servers:
            each.error = "" if each.address in own else _FOREIGN.format(bus=self.bus)
        report = UpdateReport(version=left.version, previous=left.previous, servers=servers)
        return report, [(own[each.address], each) for each in servers if each.address in own]

    def _clear(self, note: PauseNote, report: UpdateReport) -> None:
        """Take the note back, but for those that are paused still, or say nothing."""
        note.clear({each.address for each in report.servers if each.state in SETTLED})

    async def _in_order(
        self,
        note: PauseNote,
        report: UpdateReport,
        *,
        prepare: Step,
        load: Step,
        restore: Callable[[Pairs], Awaitable[Pairs]],
        attach: Step | None = None,
        directory: str = "",
    ) -> None:
        """Take the steps of an update at all servers together, and go back where too few took it.

        Parameters
        ----------
        note, report : PauseNote, UpdateReport
            Of this update.
        prepare, attach, load : callable
            Before the pause, in it, and what brings the version. Without `attach`, there is none.
        restore : callable
            Brings what ran before to servers that are behind; returns those that have it.
        directory : str
            For the note, as `PauseNotice` has it.
        """
        pairs = list(zip(self.servers, report.servers, strict=True))
        torn = [pair for pair in pairs if pair[1].state == "paused"]
        ready = await self._each(pairs, prepare)
        self._require(ready, report, "nothing was touched, and the old weights are in force")
        note.write(
            PauseNotice(
                pid=os.getpid(),
                servers=[(server.kind, server.address) for server in self.servers],
                version=report.version,
                previous=report.previous,
                directory=directory,
            )
        )
        async with self._workers_held(report.version):
            paused = await self._each(ready, self._pause)
            untouched = paused if attach is None else await self._each(paused, attach)
            ended = await self._each([each for each in paused if each not in untouched], self._end)
            aside = [each for each in ready if each not in paused] + ended
            aside = [each for each in aside if each not in torn]
            if len(untouched) < self.quorum:
                whole = [each for each in untouched if each not in torn]
                await self._each(aside + whole, self._resume)
                self._clear(note, report)
                self._require(untouched, report, "the old weights are in force")
            loaded = await self._each(untouched, load)
            behind = [pair for pair in untouched if pair not in loaded]
            if len(loaded) < self.quorum:
                behind, loaded = untouched, []
            restored = await restore(behind)
            await self._each(aside + loaded + restored, self._resume)
        self._clear(note, report)
        left = [each for _, each in behind if each.state not in SETTLED]
        self._judge(loaded, left, report)

    def _judge(self, loaded: Pairs, torn: list[ServerReport], report: UpdateReport) -> None:
        first = next((self._failures[each.address] for each in report.servers if each.error), None)
        if torn and (len(loaded) < self.quorum or not loaded):
            raise EngineError(
                ", ".join(each.address for each in torn),
                "load",
                None,
                "; ".join(each.error for each in torn if each.error),
                "it stays paused, since its model is not whole; repair the cause and update again, "
                "or restart it",
            ) from first
        if len(loaded) < self.quorum:
            causes = [f"{each.address}: {each.error}" for each in report.servers if each.error]
            raise UpdateRolledBackError(
                report.version, report.previous, "; ".join(causes)
            ) from first

    def _require(self, pairs: Pairs, report: UpdateReport, advice: str) -> None:
        if len(pairs) >= self.quorum:
            return
        address = next(each.address for each in report.servers if each.error)
        raise self._failure(address, advice)

    def _failure(self, address: str, advice: str) -> EngineError:
        """Make the error of a server whose step failed, with what it said and what is in force."""
        failed = self._failures[address]
        advice = f"{failed.advice}; {advice}"
        error = EngineError(
            address, failed.step, failed.status, failed.body, advice, gone=failed.gone
        )
        error.__cause__ = failed
        return error

    # -- the bus ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _workers_held(self, version: int) -> AsyncIterator[None]:
        """Pause the bus where requests in flight end, so that workers begin no new ones."""
        bus = self._open_bus() if self.mode != "keep" else None
        if bus is None:
            yield
            return
        with bus:
            if _is_paused_by_others(bus):
                yield
                return
            bus.pause(f"{HELD}{version} are being loaded")
            try:
                yield
            finally:
                if not _is_paused_by_others(bus):
                    bus.resume()

    def _release_workers(self) -> None:
        bus = self._open_bus()
        if bus is not None:
            with bus:
                if not _is_paused_by_others(bus):
                    bus.resume()

    def _say(self, version: int) -> None:
        bus = self._open_bus()
        if bus is not None:
            with bus:
                bus.policy_version = version

    def _open_bus(self) -> shmbus.Bus | None:
        """Open the bus; None where weights are all that is shared under that name."""
        try:
            return shmbus.Bus.open(self.bus)
        except shmbus.BusNotFoundError:
            return None

    async def _each(self, pairs: Pairs, step: Step) -> Pairs:
        """Take a step at all servers at once; return those where it succeeded."""

        async def take(server: EngineServer, report: ServerReport) -> bool:
            try:
                await step(server, report)
            except Exception as error:
                # Whatever it is: servers that are paused are not left so by one that failed oddly.
                failed = as_engine_error(server, error)
                self._failures[server.address] = failed
                report.error = str(failed)
                if failed.gone:
                    report.state = "gone"
                return False
            return True

        done = await asyncio.gather(*(take(server, report) for server, report in pairs))
        return [pair for pair, succeeded in zip(pairs, done, strict=True) if succeeded]


def checked_addresses(servers: Sequence[Addressed]) -> list[str]:
    """Return the addresses of servers; TypeError where something is none."""
    if isinstance(servers, (str, Mapping)) or not isinstance(servers, Sequence):
        raise TypeError(f"servers: expected a list of servers, got {type(servers).__name__}")
    for server in servers:
        if not isinstance(getattr(server, "address", None), str):
            raise TypeError(
                f"servers: expected servers such as VllmServer(url), got {type(server).__name__}"
            )
    return [server.address for server in servers]


def checked_timeout(timeout: float) -> float:
    """Return a deadline in a float of its own, since a server may be told it in JSON.

    It has to have an end: a server that hangs would stop all others.
    """
    check_seconds("timeout", timeout)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected more than 0 seconds, and an end, got {timeout}")
    return float(timeout)


def as_engine_error(server: Addressed, error: Exception) -> EngineError:
    """Return what a server, or its class, raised as what the fleet takes for its failure."""
    if isinstance(error, EngineError):
        return error
    found = EngineError(
        server.address,
        "update",
        None,
        f"{type(error).__name__}: {error}",
        "look at this error's cause",
    )
    found.__cause__ = error
    return found


def _is_paused_by_others(bus: shmbus.Bus) -> bool:
    """Whether somebody else has paused the bus, such as an operator: that is theirs to end."""
    reason = bus.paused
    return reason is not None and not reason.startswith(HELD)


async def uninterrupted(task: asyncio.Future[Any]) -> None:
    """Wait for a task's end, whoever cancels this one."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


class Closing(Protocol):
    """A server as far as it is closed."""

    async def close(self) -> None:
        """Let go of connections."""


async def close_all(servers: Sequence[Closing]) -> None:
    """Close every server, whoever cancels this meanwhile."""
    closing = asyncio.gather(*(server.close() for server in servers))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await uninterrupted(closing)
        raise
