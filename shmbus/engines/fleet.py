"""New weights for several inference servers: no server ever generates with half a model.

The order, for all servers together: prepare (nothing is touched), pause, load, rows agree, resume.
Then the bus's policy version names the new weights.

Invariants:

- A status or a body proves nothing: a server runs a version, and is resumed, when the row of
  each of its ranks names it; a reload without rows relies on the server's own calls.
- The previous version stays leased until the rows agree: a way back while it may be needed.
- A server with a torn model stays paused, and the error names it.
- A server loads nothing unless it reports a pause; the parameters of a shared model change only
  while every server reports one.
- The note names a sleeping server from before its sleep until it serves, with the memory that it
  has: a wake after a death goes on from there.
- One pause at a time, by an internal lock and the note's lock. A begun update always ends: a
  cancelled task waits for it, and a dead process's pause is recovered by its note.

Source of reloads: /collective_rpc, /update_weight_version and /weight_info of vLLM 0.32;
/update_weights_from_disk of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import msgspec

import shmbus
from shmbus.base.arguments import check_choice, check_flag, check_int, check_path
from shmbus.base.closing import ClosedByAsyncWith
from shmbus.engines.engine_server import (
    WAKE,
    EngineServer,
    PauseMode,
    as_engine_error,
    checked_addresses,
    checked_timeout,
    require_awake,
)
from shmbus.engines.pause_note import PauseNote, PauseNotice
from shmbus.engines.results import EngineError, ServerReport, UpdateReport, UpdateRolledBackError
from shmbus.engines.rows import HEARD_S, STALE_S, RankRows, say_version
from shmbus.engines.tasks import OneAtATime, close_all, to_the_end
from shmbus.errors import DamagedError
from shmbus.segment.fleet_note import ASLEEP_REASON, DISCARDED, Sleep
from shmbus.segment.names import check_name
from shmbus.weights.carriers.checkpoint import CheckpointPlace, newest_checkpoints
from shmbus.weights.shared_model import SharedModel
from shmbus.weights.single_copy import shared_state

#: Limit of a policy version; the bus announces it once servers run the weights.
MOST_VERSION: Final = (1 << 63) - 1

#: Kind of `ManagedServer`; a managed server loads weights at the start.
MANAGED: Final = "managed"

Pairs: TypeAlias = list[tuple[EngineServer, ServerReport]]
Step: TypeAlias = Callable[[EngineServer, ServerReport], Awaitable[object]]

#: Seconds between two tries to resume.
RETRY_S = 0.2
#: Final states of servers, beyond any further step.
SETTLED = ("serving", "gone")
PAUSE_MODES = ("keep", "wait", "abort")
#: Prefix of the reason of a fleet's pause of the bus.
HELD = "weights of version "
#: Text for a server named by a note and unknown to the fleet.
_FOREIGN = "it is none of this fleet's; end its pause by: shmbus weights {bus} --resume"


class Publisher(Protocol):
    """Required interface of a `WeightPublisher`."""

    def publish(self, version: int) -> object:
        """Publish the version; return once it is whole."""


class EngineFleet(ClosedByAsyncWith):
    """Bring new weights to inference servers.

    Parameters
    ----------
    servers : sequence of EngineServer
        `VllmServer` and its like.
    bus : str
        Bus of the servers' weights and of their policy version.
    mode : "keep" | "wait" | "abort"
        Treatment of requests in flight: frozen and continued, awaited, or aborted. In the last two
        the bus is paused with a reason, and workers hold their requests.
    clear_cache : bool
        Whether to drop keys and values computed with the old weights. Otherwise requests in
        flight continue with them ("keep"); new requests with a `Request.cache_salt` never get them.
        A version number already announced by the bus clears them anyway.
    timeout : float
        Seconds for each step of an update.
    quorum : int, optional
        Minimum of servers to take a version; default: every server. The rest run the previous
        version, or stay paused, and the report names them.

    Raises
    ------
    ValueError
        The list is empty or names a server twice, the quorum or mode is invalid, or a server lacks
        the mode.
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
        addresses = checked_addresses(servers)
        check_name(bus)
        if not servers or len(set(addresses)) < len(addresses):
            raise ValueError(f"servers: expected one or more, each once, got {addresses}")
        check_choice("mode", mode, PAUSE_MODES)
        for server in servers:
            _require_mode(server, mode)
        check_flag("clear_cache", clear_cache)
        self._quorum = None if quorum is None else check_int("quorum", quorum, 1, len(servers))
        self.servers = list(servers)
        self.bus = bus
        self.mode = mode
        self.clear_cache = clear_cache
        self.timeout = checked_timeout(timeout)
        #: True if this update clears caches: by request, or for a reused number.
        self._clears = clear_cache
        #: True once this fleet changed weights of servers without rows.
        self._has_changed = False
        #: Publication that too few servers took.
        self._refused = ""
        self._busy = OneAtATime()
        #: Error of a failed step, by the server's address.
        self._failures: dict[str, EngineError] = {}
        #: Beginning of a pause, by the server's address.
        self._paused_at: dict[str, float] = {}
        self._rows = RankRows(bus)
        #: The note of the running call.
        self._held_note: PauseNote | None = None

    # -- for users ---------------------------------------------------------------------------------

    @property
    def quorum(self) -> int:
        """How many servers must take a version."""
        return len(self.servers) if self._quorum is None else self._quorum

    async def add(self, server: EngineServer) -> ServerReport | None:
        """Add a running server, with any weights; it joins at the newest version.

        Returns None before the first publication: the first update brings a version.

        Raises
        ------
        EngineError, UpdateRolledBackError
            The server refused the newest version and stays outside of the fleet; or the fleet
            sleeps.
        BlockingIOError
            Another process is updating servers of this bus.
        ValueError
            The server is a member already, or lacks the mode.
        """
        checked_addresses([server])
        _require_mode(server, self.mode)
        async with self._busy:  # a running update does not know the new server
            if server.address in {each.address for each in self.servers}:
                raise ValueError(f"server: {server.address} is in the fleet already")
            report = await to_the_end(self._join("add", [server]), shmbus.ShmbusError)
            self.servers.append(server)
        return None if report is None else report.servers[0]

    async def remove(self, server: EngineServer | str) -> None:
        """Remove a server, by itself or by address; a running update ends first.

        The server keeps its weights. A paused server stays paused, and no fleet resumes it. After
        its process's end an update, or a later `remove`, drops its rows. ValueError: the server is
        unknown, or the last one, or needed by the quorum; EngineError: the server sleeps.
        """
        address = server if isinstance(server, str) else server.address
        async with self._busy:
            left = [each for each in self.servers if each.address != address]
            if len(left) == len(self.servers):
                known = ", ".join(each.address for each in self.servers)
                raise ValueError(f"server: expected one of {known}, got {address}")
            if len(left) < max(1, self._quorum or 0):
                raise ValueError(
                    f"server: without {address} {len(left)} servers remain, below the quorum of "
                    f"{max(1, self._quorum or 0)}; add a server first"
                )
            (removed,) = (each for each in self.servers if each not in left)
            with self._noted():
                try:
                    await self._asleep_still(removed)
                except EngineError:
                    pass  # an ended server may go
                else:
                    require_awake([removed], self._note.asleep, "remove")
                self._note.clear({address})
            self.servers = left
            self._rows.drop_others(left)

    async def catch_up(self) -> UpdateReport | None:
        """Bring the newest version to every outdated server, for example after its restart.

        After an UpdateRolledBackError of this fleet: the version in force.

        An ended `ManagedServer` starts with its last checkpoint. Returns the report of the outdated
        servers; None without any, or before a publication. EngineError: a server stays paused with
        a torn model, or the fleet sleeps; BlockingIOError: another process is updating.
        """
        async with self._busy:
            started = await to_the_end(self._start_ended(), shmbus.ShmbusError)
            servers = [each for each in self.servers if each.kind != MANAGED]
            joining = self._join("catch_up", servers, only_behind=True)
            report = await to_the_end(joining, shmbus.ShmbusError)
            if report is None and started:
                report = UpdateReport(version=self._said(), previous=None, servers=[])
            if report is not None:
                report.servers += started
            return report

    async def _start_ended(self) -> list[ServerReport]:
        """Start ended managed servers with their last checkpoint."""
        pairs = [
            (server, ServerReport(address=server.address, state="unknown", version=self._said()))
            for server in self.servers
            if server.kind == MANAGED and await server.paused(self.timeout)
        ]
        await self._each(pairs, self._resume)
        return [report for _, report in pairs]

    async def update(self, publisher: Publisher, version: int) -> UpdateReport:
        """Publish a version, unless already the newest, and bring it to the servers.

        Parameters
        ----------
        publisher : WeightPublisher
            Of this bus.
        version : int
            0 or more.

        Returns
        -------
        UpdateReport
            At least `quorum` servers run the version.

        Raises
        ------
        UpdateRolledBackError
            Too few servers took the version, and every server runs its previous weights.
        EngineError
            A server could not be prepared or paused, or sleeps, and nothing was touched; or it
            stays paused, because neither the new nor the old version loaded into every rank.
        BlockingIOError
            Another process is updating servers of this bus.
        TypeError, ValueError
            The publisher or the version is invalid.

        Notes
        -----
        A cancelled call waits for the update's end: no server is left halfway.
        """
        version = _checked(publisher, version)
        async with self._busy:
            return await to_the_end(self._update(publisher, version), shmbus.ShmbusError)

    def update_sync(self, publisher: Publisher, version: int) -> UpdateReport:
        """Run `update` without an event loop; raise RuntimeError within a running loop."""
        return self._without_loop(self.update, publisher, version)

    async def sleep(self, level: int = 2) -> UpdateReport:
        """Free the servers' GPU memory for the trainer, until `wake`; idempotent.

        The fleet's mode decides about requests in flight; new requests wait in the servers.

        Parameters
        ----------
        level : 1 | 2
            2 discards the weights: no sample gets a label before `wake` (`VersionUnknownError`).
            1 keeps the weights in the server's host memory.

        Raises
        ------
        EngineError
            A server has no sleep mode, has state that level 2 would lose, or sleeps at another
            level, and nothing was touched; or a server refused, and the awake servers serve on.
        BlockingIOError
            Another process is updating servers of this bus.
        TypeError, ValueError
            The level is neither 1 nor 2.
        """
        level = check_int("level", level, 1, DISCARDED)
        async with self._busy:
            return await to_the_end(self._sleep(level), shmbus.ShmbusError)

    def sleep_sync(self, level: int = 2) -> UpdateReport:
        """Run `sleep` without an event loop; raise RuntimeError within a running loop."""
        return self._without_loop(self.sleep, level)

    async def wake(self, publisher: Publisher, version: int) -> UpdateReport:
        """Wake the servers with a version: the weights' memory, the weights, the cache's memory.

        The weights come whole from the bus's slot; after level 1 only if the version differs. After
        a death of trainer or server a call goes on from the memory that each server has. Awake
        servers at the version stay untouched.

        Parameters
        ----------
        publisher : WeightPublisher
            Of this bus. Publish before the trainer frees its GPU memory, for the lowest peak.
        version : int
            0 or more; published unless already the newest.

        Raises
        ------
        EngineError
            A server stays asleep, for example for lack of GPU memory: free it, and call again.
        UpdateRolledBackError
            Too few servers took the version, and every server runs its previous weights.
        BlockingIOError
            Another process is updating servers of this bus.
        TypeError, ValueError, WeightsError
            The publisher or the version is invalid; every server sleeps on.
        """
        version = _checked(publisher, version)
        async with self._busy:
            waking = self._update(publisher, version, wakes=True)
            return await to_the_end(waking, shmbus.ShmbusError)

    def wake_sync(self, publisher: Publisher, version: int) -> UpdateReport:
        """Run `wake` without an event loop; raise RuntimeError within a running loop."""
        return self._without_loop(self.wake, publisher, version)

    def _without_loop(
        self, call: Callable[..., Coroutine[Any, Any, UpdateReport]], *arguments: Any
    ) -> UpdateReport:
        _require_no_loop(call.__name__)

        async def run() -> UpdateReport:
            try:
                return await call(*arguments)
            finally:
                await self.close()

        return asyncio.run(run())

    async def reload(self, directory: Path | str) -> UpdateReport:
        """Make the servers read a directory's newest checkpoint; errors as for `update`.

        Parameters
        ----------
        directory : path
            Of a publisher with ``carrier="checkpoint"``; the servers see it under the same path.
            WeightsError if the directory holds no version.

        Returns
        -------
        UpdateReport
            At least `quorum` servers report the version.
        """
        check_path("directory", directory)
        async with self._busy:
            return await to_the_end(self._reload(Path(directory)), shmbus.ShmbusError)

    async def step(
        self, shared: SharedModel, action: Callable[[], object], version: int, *, heal: bool = False
    ) -> None:
        """Change the one model copy shared by the servers and this process, between pauses.

        Parameters
        ----------
        shared : SharedModel
            Of this bus, from `share_model`.
        action : callable
            Changes the parameters, for example ``optimizer.step``; called in a thread.
        version : int
            Version after the step.
        heal : bool
            Whether the action reloads every weight and may begin with torn weights.

        Raises
        ------
        EngineError
            A server sleeps or could not be paused, and nothing was changed; or it could not be
            resumed.
        DamagedError
            The action failed, from its error: the servers stay paused with a mixed model. Load
            whole weights with another step, and heal=True.
        BlockingIOError
            Another process is updating servers of this bus.
        TypeError, ValueError
            The version, the model or the action is invalid.
        """
        version = check_int("version", version, 0, MOST_VERSION)
        check_flag("heal", heal)
        if not isinstance(shared, SharedModel):
            raise TypeError(
                f"shared: expected what share_model returned, got {type(shared).__name__}"
            )
        if shared.bus != self.bus:
            raise ValueError(f"shared: expected a model of bus {self.bus!r}, got {shared.bus!r}'s")
        _require_function(action)
        async with self._busy:
            with self._noted("step"):
                await to_the_end(self._step(shared, action, version, heal))

    async def recover(self) -> UpdateReport | None:
        """End a dead process's pause, by the rules of `update`.

        Servers whose ranks agree on a whole version are resumed; the rest first get the newest
        whole version. A server that refuses it stays paused, and is named. Sleeping servers wake.
        Return None if no pause was left; raise BlockingIOError while the pausing process lives.
        """
        async with self._busy:
            with self._noted():
                began = time.monotonic()
                report = await to_the_end(self._recover(wakes=True), shmbus.ShmbusError)
                if report is not None:
                    report.total_s = time.monotonic() - began
                return report

    async def close(self) -> None:
        """Close connections to the servers; idempotent. A cancelled call ends first."""
        await close_all(self.servers)

    # -- an update ---------------------------------------------------------------------------------

    async def _update(
        self, publisher: Publisher, version: int, *, wakes: bool = False
    ) -> UpdateReport:
        began = time.monotonic()
        with self._noted("" if wakes else "update"):
            await self._recover()
            previous = await asyncio.to_thread(self._rows.newest, self.timeout)
            attached = all(self._rows.of(server) for server in self.servers)
            self._clears = wakes or self.clear_cache or self._is_repeated(version, not attached)
            try:
                if previous is None or previous.version != version:
                    await asyncio.to_thread(publisher.publish, version=version)
                    before = None if previous is None else previous.version
                elif getattr(publisher, "version", version) != version:
                    # A number of another life cannot name the way back to the old weights.
                    await asyncio.to_thread(publisher.publish, version=version)
                    before = None
                else:
                    before = version  # servers may run an older version, beyond any lease
                self._rows.drop_others(self.servers)
                runs = await self._up_to_date(version) if wakes else []
                servers = [each for each in self.servers if each not in runs]
                report = self._begin(version, before, servers)
                report.life = self._rows.life(version)
                try:
                    await self._bring(report, servers, max(0, self.quorum - len(runs)))
                except UpdateRolledBackError:
                    self._refused = report.life
                    raise
                if wakes:
                    report.servers += [
                        ServerReport(address=each.address, version=version) for each in runs
                    ]
                    serving = [each for each in report.servers if each.state == "serving"]
                    advice = f"free the trainer's GPU memory, and {WAKE} again"
                    self._require(serving, report, self.quorum, advice)
            finally:
                if previous is not None:
                    previous.close()
        report.total_s = time.monotonic() - began
        return report

    async def _up_to_date(self, version: int) -> list[EngineServer]:
        awake = [each for each in self.servers if self._sleep_of(each) is None]
        behind = await self._behind(awake, version, silent=True)
        return [each for each in awake if each not in behind]

    def _is_first(self) -> bool:
        """Return whether this fleet meets servers without rows for the first time."""
        first, self._has_changed = not self._has_changed, True
        return first

    def _is_repeated(self, version: int, strange: bool) -> bool:
        """Return whether caches may hold entries of older weights under a reused salt.

        `strange`: servers filled caches before this fleet or its pool knew the servers.
        """
        said = self._said()
        # The bus's version falls after a trainer went back; 0 means no announcement yet.
        rows = [row for server in self.servers for row in self._rows.of(server)]
        ran = [row.applied_version or 0 for row in rows if row.applied_sequence]
        return (strange and said > 0) or version <= max([*ran, said if said > 0 else -1])

    async def _join(
        self, step: str, servers: Sequence[EngineServer], *, only_behind: bool = False
    ) -> UpdateReport | None:
        """Bring the version in force to some servers; outdated servers may be gone meanwhile."""
        began = time.monotonic()
        with self._noted(step):
            await self._recover()
            newest = await asyncio.to_thread(
                self._rows.in_force, self._said(), self._refused, self.timeout
            )
            if newest is None:
                return None
            with newest:
                if only_behind:
                    servers = await self._behind(servers, newest.version)
                if not servers:
                    return None
                # The server's cache may come from any weights.
                self._clears = True
                report = self._begin(newest.version, None, servers)
                report.life = self._rows.life(newest.version)
                quorum = 0 if only_behind else 1
                # Other members may run an older version, and the announced number belongs to them.
                await self._bring(report, servers, quorum, says=False)
        report.total_s = time.monotonic() - began
        return report

    async def _behind(
        self, servers: Sequence[EngineServer], version: int, *, silent: bool = False
    ) -> list[EngineServer]:
        """Return the servers that need a version, and the `silent` servers if asked for."""

        async def is_behind(server: EngineServer) -> bool:
            try:
                ranks = await server.ranks(self.timeout)
            except EngineError:
                return silent
            return self._rows.missing(server, ranks, version) is not None

        found = await asyncio.gather(*map(is_behind, servers))
        return [each for each, is_so in zip(servers, found, strict=True) if is_so]

    async def _bring(
        self,
        report: UpdateReport,
        servers: Sequence[EngineServer],
        quorum: int,
        *,
        says: bool = True,
    ) -> None:
        async def restore(behind: Pairs) -> Pairs:
            # A server without a previous version stays unchanged.
            if report.previous is None:
                return []
            return await self._each(
                await self._each(behind, self._await_turn), self._load(report.previous)
            )

        await self._in_order(
            report,
            servers,
            quorum,
            prepare=self._prepare(report.version),
            attach=self._attach(report.version),
            load=self._load(report.version),
            restore=restore,
            says=says,
        )

    # -- turns with the trainer --------------------------------------------------------------------

    @contextlib.contextmanager
    def _noted(self, step: str = "") -> Iterator[None]:
        """Hold the bus's note; refuse a step that sleeping servers cannot take."""
        with PauseNote(self.bus) as note:
            if step:
                require_awake(self.servers, note.asleep, step)
            self._held_note = note
            try:
                yield
            finally:
                self._held_note = None

    @property
    def _note(self) -> PauseNote:
        assert self._held_note is not None
        return self._held_note

    def _sleep_of(self, server: EngineServer) -> Sleep | None:
        """Return a sleeping server's memory; None for an awake server."""
        note = self._held_note
        return None if note is None else note.asleep.get(server.address)

    @contextlib.asynccontextmanager
    async def _moving(
        self, server: EngineServer, before: Sleep, after: Sleep | None
    ) -> AsyncIterator[None]:
        """Note a move of memory around its request; without an answer it stays in doubt."""
        self._note.set_sleep(server.address, msgspec.structs.replace(before, moves=True))
        yield
        self._note.set_sleep(server.address, after)

    async def _sleep(self, level: int) -> UpdateReport:
        began = time.monotonic()
        with self._noted():
            await self._recover()
            report = self._begin(self._said(), None, self.servers)
            pairs = list(zip(self.servers, report.servers, strict=True))
            ready = await self._each(pairs, self._check_sleep(level))
            self._require(ready, report, self._alive(report), "nothing was touched")
            servers = [(server.kind, server.address) for server, _ in ready]
            self._note.write(PauseNotice(os.getpid(), servers, report.version, None))
            async with self._workers_held(ASLEEP_REASON):
                await self._fall_asleep(ready, level)
            self._clear(report)
            slept = [each for each in report.servers if not each.error]
            advice = (
                f"to continue the rest, {WAKE}" if self._note.asleep else "every server serves on"
            )
            self._require(slept, report, self._alive(report), advice)
        report.total_s = time.monotonic() - began
        return report

    def _alive(self, report: UpdateReport) -> int:
        """Return how many servers must sleep: a server that ended holds no memory."""
        return max(self.quorum, sum(each.state != "gone" for each in report.servers))

    def _check_sleep(self, level: int) -> Step:
        async def check(server: EngineServer, report: ServerReport) -> None:
            if not await _ask_if_known(server, "check_sleep", level, self.timeout):
                said = f"a server of kind {server.kind!r} has no sleep"
                raise EngineError(server.address, "sleep", None, said, "leave it out of the fleet")
            sleep = await self._asleep_still(server)
            if sleep is None:
                report.state = "serving" if report.state == "asleep" else report.state
            elif sleep.level != level and not sleep.moves and not sleep.has_weights:
                said = f"it sleeps at level {sleep.level}, not {level}"
                raise EngineError(server.address, "sleep", None, said, f"{WAKE} first")

        return check

    async def _asleep_still(self, server: EngineServer) -> Sleep | None:
        """Return a sleeping server's memory; None also for a server started again since."""
        sleep = self._sleep_of(server)
        if sleep is not None and not await server.paused(self.timeout):
            self._note.set_sleep(server.address, None)
            return None
        return sleep

    async def _fall_asleep(self, pairs: Pairs, level: int) -> None:
        """Pause the awake servers, then free their memory; refusing servers serve on."""
        awake = [pair for pair in pairs if self._sleep_of(pair[0]) is None]
        whole = [pair for pair in awake if pair[1].state != "paused"]
        rest = [pair for pair in pairs if self._sleep_of(pair[0]) not in (None, Sleep(level))]
        self._clears = True
        paused = await self._each(awake, self._pause)
        if any(each.error and each.state != "gone" for _, each in awake):
            await self._each(whole, self._resume)
            return

        async def fall_asleep(server: EngineServer, report: ServerReport) -> None:
            found = self._sleep_of(server) or Sleep(level)
            after = Sleep(max(level, found.level))
            async with self._moving(server, after, after):
                cache = not found.has_weights
                await _ask_if_known(server, "sleep", level, self.timeout, cache=cache)
            report.state = "asleep"

        await self._each(paused + rest, fall_asleep)
        # Without an answer the memory may be gone: such a server stays paused.
        refused = [
            pair
            for pair in paused
            if pair[1].error and self._failures[pair[0].address].status is not None
        ]
        for server, _ in refused:
            self._note.set_sleep(server.address, None)
        await self._each([pair for pair in refused if pair in whole], self._resume)

    async def _rouse(self, server: EngineServer) -> bool:
        """Wake the weights' memory of a sleeping server; return False for an awake server."""
        sleep = await self._asleep_still(server)
        if sleep is None:
            return False
        if not sleep.has_weights:
            async with self._moving(server, sleep, Sleep(sleep.level, has_weights=True)):
                step, in_doubt = "wake_weights", sleep.moves
                await _ask_if_known(server, step, sleep.level, self.timeout, in_doubt=in_doubt)
        return True

    # -- steps at a single server ------------------------------------------------------------------

    def _prepare(self, version: int) -> Step:
        async def prepare(server: EngineServer, report: ServerReport) -> None:
            report.ranks = await server.ranks(self.timeout)
            if await server.prepare(server.bus or self.bus, self.timeout):
                await self._require_attached(server, report, version)
                await self._rows.until_prepared(server, self.timeout)
            elif server.bus is not None and self._rows.are_attached(server, report.ranks):
                await self._rows.until_arrived(server, report.ranks, version, self.timeout)

        return prepare

    def _attach(self, version: int) -> Step:
        async def attach(server: EngineServer, report: ServerReport) -> None:
            if self._rows.are_attached(server, report.ranks):
                return
            if await server.attach(server.bus or self.bus, self.timeout):
                await self._require_attached(server, report, version)

        return attach

    async def _require_attached(
        self, server: EngineServer, report: ServerReport, version: int
    ) -> None:
        if server.bus is not None:
            await self._rows.until_arrived(server, report.ranks, version, self.timeout)
        self._rows.require_attached(server, report.ranks, version)

    def _load(self, version: int) -> Step:
        async def load(server: EngineServer, report: ServerReport) -> None:
            began = time.monotonic()
            error: EngineError | None = None
            sleep = self._sleep_of(server)
            named = self._rows.missing(server, report.ranks, version) is None
            if named and sleep is not None and sleep.level != DISCARDED:
                report.version = version
                return
            clears = self._clears and sleep is None  # a sleeper's cache is gone
            try:
                await self._keep_paused(server, report)
                if self._rows.are_loading(server):
                    await self._settle(server)
                await server.load(version, clears, self.timeout)
            except EngineError as failed:
                if named and sleep is not None:
                    raise  # the rows are of before the sleep
                # Ranks may have loaded all the same: the rows decide.
                error = failed
            report.version = None
            heard_s = 0.0 if server.bus is None else HEARD_S
            await self._rows.require_version(server, report, version, error, self.timeout, heard_s)
            if error is not None:
                # Every rank loaded; now finish the server's open steps before it generates.
                await self._settle(server)
            report.version = version
            if sleep is not None:
                self._note.set_sleep(server.address, Sleep(1, has_weights=True))
            said = ["" if error is None else str(error), getattr(server, "caution", "")]
            report.warning = "; ".join(filter(None, said))
            report.load_s = time.monotonic() - began

        return load

    async def _await_turn(self, server: EngineServer, report: ServerReport) -> None:
        """Wait for the server's earlier work: earlier rows would be stale."""
        del report
        try:
            await server.prepare(server.bus or self.bus, self.timeout)
        except EngineError as error:
            if error.status is None:
                raise

    async def _settle(self, server: EngineServer) -> bool:
        return await server.settle(self._rows.are_loading(server), self.timeout)

    # -- recovery after a dead process ------------------------------------------------------------

    async def _recover(self, *, wakes: bool = False) -> UpdateReport | None:
        """End left pauses; sleeping servers sleep on unless `wakes`."""
        left = self._note.left
        if left is not None and not wakes:
            servers = [each for each in left.servers if each[1] not in left.asleep]
            left = msgspec.structs.replace(left, servers=servers) if servers else None
        if left is None:
            return None
        if not left.updating:  # a finished update's note; now a server changes its weights again
            self._note.write(msgspec.structs.replace(left, updating=True))
        if left.shared:
            return await self._resume_whole(left)
        if left.directory:
            return await self._reload_newest(left)
        newest = await asyncio.to_thread(self._rows.newest, self.timeout)
        version = None if newest is None else newest.version
        report, pairs = self._begin_recovery(left)
        report.version = left.version if version is None else version
        try:
            there = pairs if version is None else await self._each(pairs, self._await_turn)
            if any(server.bus is not None for server, _ in there):
                await asyncio.sleep(STALE_S)
            awake = await self._each(there, lambda server, _: self._rouse(server))
            known = await self._each(awake, self._look)
            untouched = [pair for pair in known if pair[1].version is not None]
            mixed = [pair for pair in known if pair[1].version is None]
            if version is not None:
                prepare, attach = self._prepare(version), self._attach(version)
                for step in (prepare, self._keep_paused, attach, self._load(version)):
                    mixed = await self._each(mixed, step)
                untouched += mixed
            runs = [each.version for _, each in untouched if each.version is not None]
            if runs:
                say_version(self.bus, max(runs))
            await self._each(untouched, self._resume)
        finally:
            if newest is not None:
                newest.close()
        return self._recovered(report)

    async def _look(self, server: EngineServer, report: ServerReport) -> None:
        report.ranks = await server.ranks(self.timeout)
        was_open = await self._settle(server)
        sleep = self._sleep_of(server)
        torn = was_open or (sleep is not None and sleep.level == DISCARDED)
        report.version = None if torn else self._rows.whole_version(server, report.ranks)

    # -- a reload: servers read a checkpoint again, without rows

    async def _reload(self, directory: Path) -> UpdateReport:
        began = time.monotonic()
        with self._noted("reload"):
            await self._recover()
            newest, before = await asyncio.to_thread(newest_checkpoints, directory)
            self._clears = self.clear_cache or self._is_repeated(newest.version, self._is_first())
            known = None if before is None else before.version
            report = self._begin(newest.version, known, self.servers)
            await self._in_order(
                report,
                self.servers,
                self.quorum,
                prepare=self._find,
                load=self._read(newest),
                restore=lambda behind: self._read_before(behind, before),
                directory=str(newest.path.parent.absolute()),
            )
        report.total_s = time.monotonic() - began
        return report

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
        """Check that the server answers; count the ranks if answers may mix."""
        await server.paused(self.timeout)
        await _ask_if_known(server, "check_reload", self.timeout)
        if not server.answers_in_step:
            report.ranks = await server.ranks(self.timeout)

    def _read(self, place: CheckpointPlace) -> Step:
        async def read(server: EngineServer, report: ServerReport) -> None:
            began = time.monotonic()
            report.version = None
            await self._keep_paused(server, report)
            path = str(place.path.absolute())
            await server.reload(path, place.version, self._clears, self.timeout)
            report.version = place.version
            report.warning = getattr(server, "caution", "")
            report.load_s = time.monotonic() - began

        return read

    async def _reload_newest(self, left: PauseNotice) -> UpdateReport:
        """End the pause of a trainer that died in a reload: every server reads the newest."""
        report, pairs = self._begin_recovery(left)
        try:
            newest, _ = await asyncio.to_thread(newest_checkpoints, Path(left.directory))
        except (OSError, shmbus.ShmbusError) as error:
            # Servers stay paused until new weights come.
            for _, each in pairs:
                each.error = str(error)
            return report
        report.version = newest.version
        for step in (self._find, self._read(newest)):
            pairs = await self._each(pairs, step)
        say_version(self.bus, newest.version)
        await self._each(pairs, self._resume)
        return self._recovered(report)

    # -- a step on the model copy shared with the servers -----------------------------------------

    async def _step(
        self, shared: SharedModel, action: Callable[[], object], version: int, heal: bool
    ) -> None:
        self._require_shared(await self._recover())
        self._clears = self.clear_cache or self._is_repeated(version, self._is_first())
        report = self._begin(version, shared.version, self.servers)
        pairs = list(zip(self.servers, report.servers, strict=True))
        everybody, unchanged = len(pairs), "nothing was changed"
        self._require(await self._each(pairs, self._find), report, everybody, unchanged)
        servers = [(server.kind, server.address) for server in self.servers]
        self._note.write(PauseNotice(os.getpid(), servers, version, report.previous, shared=True))
        async with self._workers_held(f"{HELD}{version} are being loaded"):
            paused = await self._each(pairs, self._pause)
            if len(paused) < len(pairs):
                if not shared.torn:
                    await self._each(pairs, self._resume)
                    self._clear(report)
                self._require(paused, report, everybody, unchanged)
            try:
                await asyncio.to_thread(_change, shared, action, version, heal)
            except Exception as error:
                if not shared.torn:  # refused before any change
                    await self._each(pairs, self._resume)
                    self._clear(report)
                    raise
                raise DamagedError(
                    f"the step to version {version} failed, so the model is a mix; "
                    f"{', '.join(server.address for server in self.servers)} stay paused: load "
                    "whole weights in a step with heal=True"
                ) from error
            say_version(self.bus, version)
            resumed = await self._each(await self._each(pairs, self._forget_encoded), self._resume)
        self._clear(report)
        self._require(resumed, report, everybody, unchanged)

    def _require_shared(self, left: UpdateReport | None) -> None:
        """Raise EngineError if unshared weights left a server torn."""
        if left is None or self._note.left is None or self._note.left.shared:
            return
        own = {server.address for server in self.servers}
        for each in left.servers:
            if each.state == "paused" and each.address in own:
                advice = "it stays paused, since its model is not whole; nothing was changed"
                raise EngineError(each.address, "recover", None, each.error, advice)

    async def _forget_encoded(self, server: EngineServer, report: ServerReport) -> None:
        await _ask_if_known(server, "forget_encoded", self.timeout)

    async def _resume_whole(self, left: PauseNotice) -> UpdateReport:
        """End the pause of a trainer that died around a step, but not within it."""
        report, pairs = self._begin_recovery(left)
        state = shared_state(self.bus)
        if state is None or state[1]:
            why = "its memory is gone" if state is None else "the trainer died in a step"
            for _, each in pairs:
                each.error = f"the shared model is no whole one: {why}"
            return report
        report.version = state[0]
        say_version(self.bus, state[0])
        for server, each in await self._each(pairs, self._resume):
            del server
            each.version = state[0]
        return self._recovered(report)

    # -- pause, resume, and steps at every server -------------------------------------------------

    async def _pause(self, server: EngineServer, report: ServerReport) -> None:
        report.state = "unknown" if self._sleep_of(server) is None else "asleep"
        self._paused_at[server.address] = time.monotonic()
        if not await self._rouse(server):
            await server.pause(self.mode, self._clears, self.timeout)
        report.state = "paused"

    async def _keep_paused(self, server: EngineServer, report: ServerReport) -> None:
        """Pause a server again after its restart, or a foreign resume."""
        del report  # counts as paused in any case
        if not await server.paused(self.timeout):
            await server.pause(self.mode, self._clears, self.timeout)

    async def _resume(self, server: EngineServer, report: ServerReport) -> None:
        sleep = self._sleep_of(server)
        if sleep is not None:
            async with self._moving(server, sleep, None):
                await _ask_if_known(server, "wake_cache", self.timeout, in_doubt=sleep.moves)
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                if sleep is not None and not await server.paused(self.timeout):
                    break  # vLLM resumes with its cache
                await server.resume(self.timeout)
                if not await server.paused(self.timeout):
                    break
            except EngineError as error:
                if error.gone or time.monotonic() >= deadline:
                    raise
            if time.monotonic() >= deadline:
                raise EngineError(
                    server.address,
                    "resume",
                    200,
                    "the server still reports a pause",
                    "resume the server by hand",
                )
            await asyncio.sleep(RETRY_S)
        report.state = "serving"
        began = self._paused_at.pop(server.address, None)
        report.paused_s = 0.0 if began is None else time.monotonic() - began

    def _begin(
        self, version: int, previous: int | None, servers: Sequence[EngineServer]
    ) -> UpdateReport:
        """Begin the report of an update; servers left paused before count as paused still."""
        paused = {address for _, address in self._note.named()}
        reports = [ServerReport(address=server.address) for server in servers]
        for each in reports:
            named = "asleep" if each.address in self._note.asleep else "paused"
            each.state = named if each.address in paused else "serving"
        return UpdateReport(version=version, previous=previous, servers=reports)

    def _begin_recovery(self, left: PauseNotice) -> tuple[UpdateReport, Pairs]:
        """Begin the report of a note's servers, with pairs for the fleet's own servers."""
        own = {server.address: server for server in self.servers}
        servers = [ServerReport(address=address, state="paused") for _, address in left.servers]
        for each in servers:
            each.error = "" if each.address in own else _FOREIGN.format(bus=self.bus)
        report = UpdateReport(version=left.version, previous=left.previous, servers=servers)
        return report, [(own[each.address], each) for each in servers if each.address in own]

    def _recovered(self, report: UpdateReport) -> UpdateReport:
        """Withdraw a dead process's note, and release workers if no server stays paused."""
        self._clear(report)
        if self._note.left is None:
            self._release_workers()
        return report

    def _clear(self, report: UpdateReport) -> None:
        """Withdraw the note, except for paused or silent servers."""
        self._note.clear({each.address for each in report.servers if each.state in SETTLED})

    async def _in_order(
        self,
        report: UpdateReport,
        servers: Sequence[EngineServer],
        quorum: int,
        *,
        prepare: Step,
        load: Step,
        restore: Callable[[Pairs], Awaitable[Pairs]],
        attach: Step | None = None,
        directory: str = "",
        says: bool = True,
    ) -> None:
        """Run an update's steps at every server; roll back if too few took it."""
        pairs = list(zip(servers, report.servers, strict=True))
        torn = [pair for pair in pairs if pair[1].state in ("paused", "asleep")]
        kept = "paused and sleeping servers stay so" if torn else "the old weights are in force"
        ready = await self._each(pairs, prepare)
        if not ready and not quorum:
            return
        self._require(ready, report, quorum, f"nothing was touched, {kept}")
        self._note.write(
            PauseNotice(
                pid=os.getpid(),
                servers=[(server.kind, server.address) for server in servers],
                version=report.version,
                previous=report.previous,
                directory=directory,
                buses={each.address: each.bus for each in servers if each.bus is not None},
            )
        )
        async with self._workers_held(f"{HELD}{report.version} are being loaded"):
            paused = await self._each(ready, self._pause)
            untouched = paused if attach is None else await self._each(paused, attach)
            unattached = [each for each in paused if each not in untouched]
            ended = await self._each(unattached, lambda server, _: self._settle(server))
            aside = [each for each in ready if each not in paused] + ended
            aside = [each for each in aside if each not in torn]
            if len(untouched) < quorum:
                whole = [each for each in untouched if each not in torn]
                await self._each(aside + whole, self._resume)
                self._clear(report)
                self._require(untouched, report, quorum, kept)
            loaded = await self._each(untouched, load)
            behind = [pair for pair in untouched if pair not in loaded]
            if len(loaded) < quorum:
                behind, loaded = untouched, []
            restored = await restore(behind)
            if loaded and says:  # before serving: the version salts the cache
                say_version(self.bus, report.version)
            elif restored and says and report.previous is not None:
                # After an earlier refusal, the previous version may be another than the announced.
                say_version(self.bus, report.previous)
            await self._each(aside + loaded + restored, self._resume)
        self._clear(report)
        left = [each for _, each in behind if each.state not in SETTLED]
        self._judge(loaded, left, report, quorum)

    def _judge(
        self, loaded: Pairs, torn: list[ServerReport], report: UpdateReport, quorum: int
    ) -> None:
        first = next((self._failures[each.address] for each in report.servers if each.error), None)
        if torn and (len(loaded) < quorum or not loaded):
            raise EngineError(
                ", ".join(each.address for each in torn),
                "load",
                None,
                "; ".join(each.error for each in torn if each.error),
                "it stays paused, since its model is not whole; repair the cause and update again, "
                "or restart it",
            ) from first
        if len(loaded) < quorum:
            said = {each.address: each.error for each in report.servers if each.error}
            causes = [e if e.startswith(f"{at}: ") else f"{at}: {e}" for at, e in said.items()]
            gone = sum(each.state == "gone" for each in report.servers)
            left = len(report.servers) - gone
            raise UpdateRolledBackError(
                report.version, report.previous, "; ".join(causes), left=left, gone=gone
            ) from first

    def _require(self, found: Sized, report: UpdateReport, quorum: int, advice: str) -> None:
        if len(found) >= quorum:
            return
        address = next(each.address for each in report.servers if each.error)
        raise self._failure(address, advice)

    def _failure(self, address: str, advice: str) -> EngineError:
        """Build the error of a failed server, with its answer and the version in force."""
        failed = self._failures[address]
        advice = f"{failed.advice}; {advice}"
        error = EngineError(
            address, failed.step, failed.status, failed.body, advice, gone=failed.gone
        )
        error.__cause__ = failed.__cause__  # the text repeats the step's error
        return error

    # -- the bus -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _workers_held(self, reason: str) -> AsyncIterator[None]:
        """Pause the bus in modes that end requests in flight: workers begin no new ones."""
        bus = self._open_bus() if self.mode != "keep" else None
        if bus is None:
            yield
            return
        with bus:
            if _is_paused_by_others(bus):
                yield
                return
            reasons = {bus.paused, reason}
            bus.pause(reason)
            try:
                yield
            finally:
                if self._note.asleep and ASLEEP_REASON in reasons:
                    bus.pause(ASLEEP_REASON)
                elif not _is_paused_by_others(bus):
                    bus.resume()

    def _release_workers(self) -> None:
        bus = self._open_bus()
        if bus is not None:
            with bus:
                if not _is_paused_by_others(bus):
                    bus.resume()

    def _said(self) -> int:
        """Return the bus's policy version; 0 for weights without a bus."""
        bus = self._open_bus()
        if bus is None:
            return 0
        with bus:
            return bus.policy_version

    def _open_bus(self) -> shmbus.Bus | None:
        """Open the bus; return None for weights without a bus."""
        try:
            return shmbus.Bus.open(self.bus)
        except shmbus.BusNotFoundError:
            return None

    async def _each(self, pairs: Pairs, step: Step) -> Pairs:
        """Run a step at every server at once; return the successful pairs."""

        async def take(server: EngineServer, report: ServerReport) -> bool:
            try:
                await step(server, report)
            except Exception as error:
                # Any exception: a server's odd failure must not leave the rest paused.
                failed = as_engine_error(server, error)
                self._failures[server.address] = failed
                report.error = str(failed)
                if failed.gone:
                    report.state = "gone"
                return False
            return True

        done = await asyncio.gather(*(take(server, report) for server, report in pairs))
        return [pair for pair, succeeded in zip(pairs, done, strict=True) if succeeded]


async def _ask_if_known(
    server: EngineServer, verb: str, *arguments: float, **options: bool
) -> bool:
    """Run a step unknown to some server classes; return False for such a class."""
    step = getattr(server, verb, None)
    if step is not None:
        await step(*arguments, **options)
    return step is not None


def _checked(publisher: object, version: int) -> int:
    if not callable(getattr(publisher, "publish", None)):
        raise TypeError(f"publisher: expected a WeightPublisher, got {type(publisher).__name__}")
    return check_int("version", version, 0, MOST_VERSION)


def _require_mode(server: EngineServer, mode: str) -> None:
    if mode not in server.modes:
        raise ValueError(
            f"mode: {server.address} ({type(server).__name__}) has no {mode!r}; it has "
            f"{', '.join(server.modes)}"
        )


def _is_paused_by_others(bus: shmbus.Bus) -> bool:
    """Return whether a foreign process, like an operator, paused the bus and must end the pause."""
    reason = bus.paused
    return reason is not None and not reason.startswith((HELD, ASLEEP_REASON))


def _require_function(action: object) -> None:
    """Raise TypeError now: within the step the error would leave the model torn."""
    if not callable(action) or inspect.iscoroutinefunction(action):
        raise TypeError(
            "action: expected a function that changes the parameters, such as optimizer.step, got "
            f"{type(action).__name__} {action!r}"
        )


def _change(shared: SharedModel, action: Callable[[], object], version: int, heal: bool) -> None:
    # The servers' pause guards the step; no server holds a lock meanwhile.
    with shared.stepping(version, guard="none", heal=heal):
        action()


def _require_no_loop(verb: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"{verb}_sync: an event loop runs in this thread, which it would stop; await {verb}() there"
    )
