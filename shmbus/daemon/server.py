"""The daemon's process: event loop, ring thread, listening socket, shutdown.

Invariants:

- Only the holder of the collector's lock binds the socket, so an existing socket file is its own or
  stale. The socket is put in place by a rename, and removed at a clean exit.
- After each wake-up by the ring comes a pause: a flood of records costs a bounded number of
  wake-ups. An idle daemon runs only one check a second for dead producers.
- A daemon with a removed bus leaves its name to a successor, grants its groups, and ends.
- The thread woken by the ring leases groups, not the loop: a second thread's wake-up costs a
  waiting client as much as the whole rest. A thread in the service holds the server's lock; timers,
  transports and the end belong to the loop.
- An error in our own code ends the daemon: its state is in the segment, and the next daemon
  recovers it.
- The daemon knows neither engines nor HTTP: a separate program resumes the inference servers that a
  dead trainer left paused. No program starts while the trainer lives and holds its note's lock; one
  runs at a time, and rests after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
import uvloop

from shmbus import errors
from shmbus.base import limits
from shmbus.base.throttle import LimitedLog
from shmbus.control import messages, socket_path
from shmbus.daemon.connection import Connection
from shmbus.daemon.leases import Session
from shmbus.daemon.service import Service
from shmbus.inspect.processes import servers_left
from shmbus.segment import names
from shmbus.segment.explain import DAEMON_LABEL
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus.store import snapshot

logger = logging.getLogger(__name__)

#: Seconds between two looks at the note: a pause costs rollouts, a look some microseconds.
CHECK_S: Final = 2.0
#: Seconds of rest after a program that left servers paused.
REST_S: Final = 60.0


class PausedServers:
    """Watches the note of a bus, and runs `resume` after its writer's death."""

    def __init__(self, name: str, resume: Sequence[str]) -> None:
        self._name = name
        self._resume_command = resume
        self._last_look = self._last_failure = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def check(self, now: float) -> None:
        """Check the note, and have the servers resumed after its writer's death."""
        running = self._task is not None and not self._task.done()
        if running or now - self._last_look < CHECK_S or now - self._last_failure < REST_S:
            return
        self._last_look = now
        if servers_left(self._name):
            self._task = asyncio.get_running_loop().create_task(self._resume(now))

    async def _resume(self, now: float) -> None:
        logger.warning(
            "bus %r: a trainer ended while inference servers were paused; they are resumed with "
            "whole weights",
            self._name,
        )
        process = await asyncio.create_subprocess_exec(
            *self._resume_command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        said = output.decode("utf-8", "replace").strip().splitlines()
        if process.returncode == 0:
            logger.info("bus %r: %s", self._name, "; ".join(said))
            return
        self._last_failure = now
        logger.error(
            "bus %r: inference servers stay paused: %s; end it by hand: shmbus weights %s --resume",
            self._name,
            said[-1] if said else f"the program ended with {process.returncode}",
            self._name,
        )

    async def close(self) -> None:
        """End the running program."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


#: Seconds to let records accumulate after a poll without a complete group for a waiting client:
#: bounds wake-ups, and delays a group by no more.
_COALESCE_S = 0.0002
#: The same without waiting clients: nothing is late then, and the ring keeps the records.
_REST_S = 0.01
#: Seconds between two bells for the ending thread.
_WAKE_AGAIN_S = 0.005


class Server:
    """Serves a bus until told to stop."""

    def __init__(
        self,
        collector: Collector,
        policy: dict[str, Any],
        *,
        drain_timeout_s: float,
        resume: Sequence[str],
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self.service = Service(collector, policy)
        #: Held by the thread in the service.
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.connections: set[Connection] = set()
        #: For warnings at a rate decided by clients.
        self.limited_log = LimitedLog(logger, limits.LOG_INTERVAL_S)
        self.path = names.socket_path(collector.segment.name)
        self._collector = collector
        self._drain_timeout_s = drain_timeout_s
        self._on_stop = on_stop
        self._paused_servers = PausedServers(collector.segment.name, resume)
        self._failure: BaseException | None = None
        #: Set after the loop read the ring: the watcher thread may sleep on the ring again.
        self._ring_read = threading.Event()
        #: Set while a request waits for groups: cuts the pause after a wake-up short.
        self._hurry = threading.Event()
        self._stopping = False
        self._unbound = False
        self._snapshot: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0

    # -- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain."""
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        server = await self._loop.create_unix_server(
            lambda: Connection(self), sock=self._listen(), backlog=limits.MAX_CLIENTS
        )
        watcher = threading.Thread(target=self._watch, name="shmbus-ring", daemon=True)
        watcher.start()
        self._tick()
        notify("READY=1")
        logger.info("serving", extra={"bus": self._collector.segment.name, "socket": self.path})
        try:
            await self._stop.wait()
            notify("STOPPING=1")
            if self._on_stop is not None:
                self._on_stop()
            if self._failure is None:
                await self._drain()
            if self._snapshot is not None:
                # The snapshot reads the bus as its collector.
                await self._snapshot
        finally:
            self._stopping = True
            await self._paused_servers.close()
            server.close()
            self._unbind()
            with self.lock:
                for connection in list(self.connections):
                    connection.close()
            # A turn of the loop, to write queued bytes.
            await asyncio.sleep(0)
            self._ring_read.set()
            self._hurry.set()
            while watcher.is_alive():
                # Repeated: a thread about to sleep misses a bell.
                self._collector.reader.wake()
                await asyncio.sleep(_WAKE_AGAIN_S)
            if self._timer is not None:
                self._timer.cancel()
            self._collector.close()
            self.limited_log.sum_up(math.inf)
        if self._failure is not None:
            raise self._failure

    def _listen(self) -> socket.socket:
        """Bind the socket under a temporary name, and rename it once it listens."""
        socket_path.require_place(self._collector.segment.name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fresh = f"/dev/shm/shmbus-new-{os.getpid()}-{time.monotonic_ns()}.sock"
        before = os.umask(0o177)
        try:
            listener.bind(fresh)
        finally:
            os.umask(before)
        try:
            os.chmod(fresh, stat.S_IRUSR | stat.S_IWUSR)
            listener.listen(limits.MAX_CLIENTS)
            listener.setblocking(False)
            os.rename(fresh, self.path)
        except BaseException:
            os.unlink(fresh)
            listener.close()
            raise
        return listener

    def _unbind(self) -> None:
        """Remove the socket, once: another daemon may own the name later."""
        if not self._unbound:
            self._unbound = True
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _note_removal(self) -> None:
        """End after the bus loses its name."""
        segment = self._collector.segment
        service = self.service
        if service.removed or not segment.note_removal():
            return
        service.removed = True
        logger.error(
            "bus %r was removed: this daemon grants what is complete, and ends; the rest is lost "
            "with the bus. Create the bus again, and start a daemon for it",
            segment.name,
            extra={"leased_groups": service.leased_groups},
        )
        self._unbind()
        self._loop.call_soon_threadsafe(self._stop.set)
        self.guard(lambda: service.serve(time.monotonic()))

    async def _drain(self) -> None:
        """Grant no more leases, and wait for the end of held leases."""
        service = self.service
        with self.lock:
            service.draining = not service.removed
        logger.info("draining", extra={"leased_groups": service.leased_groups})
        deadline = time.monotonic() + self._drain_timeout_s
        while not service.is_empty and (left := deadline - time.monotonic()) > 0:
            self._idle.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), left)
        logger.info("stopping", extra={"leased_groups": service.leased_groups})

    def guard(self, work: Callable[[], None]) -> None:
        """Run a step of the service; an error in our own code ends the daemon, with traceback."""
        with self.lock:
            try:
                work()
            except errors.ProtocolError:
                raise
            except BaseException as error:
                logger.critical("the daemon ends: %r", error)
                self._failure = error
                self._loop.call_soon_threadsafe(self._stop.set)

    def snapshot(self, session: Session, request: messages.TakeSnapshot) -> None:
        """Write the bus to disk in a thread; until then the service defers releases and moves."""
        if not os.path.isabs(request.directory):
            what = f"directory: expected an absolute path, got {request.directory!r}"
            session.send(messages.Refused(kind="value", message=what, id=request.id))
            return
        busy = self.service.freeze()
        if busy is not None:
            session.send(messages.Refused(kind="busy", message=busy, id=request.id))
            return
        logger.info("taking a snapshot", extra={"directory": request.directory})
        self._snapshot = self._loop.create_task(self._take_snapshot(session, request))

    async def _take_snapshot(self, session: Session, request: messages.TakeSnapshot) -> None:
        name = self._collector.segment.name
        reply: messages.Reply
        try:
            manifest = await self._loop.run_in_executor(
                None, lambda: snapshot.take(name, request.directory, collecting=True)
            )
            reply = messages.SnapshotTaken(id=request.id, manifest=msgspec.json.encode(manifest))
            logger.info("took a snapshot", extra={"records": manifest.records})
        except Exception as error:
            reply = messages.Refused(kind="failed", message=str(error), id=request.id)
            logger.warning("took no snapshot: %s", error)
        with self.lock:
            self.guard(self.service.thaw)
            session.send(reply)
            self._ring()
            self.changed()

    # -- the ring and the clock -----------------------------------------------------------------

    def _watch(self) -> None:
        """Sleep on the ring in a thread of its own, and lease newly complete groups."""
        while not self._stopping:
            self._collector.reader.wait(None)
            if self._stopping:
                return
            done = self._serve_ring()
            if not done:
                self._ring_read.clear()
                if self._stopping:
                    return
                self._loop.call_soon_threadsafe(self._ring)
                self._ring_read.wait()
            if self.service.has_waiting:
                time.sleep(_COALESCE_S)
            else:
                self._hurry.wait(_REST_S)
            if done:
                self._clear_up()

    def _serve_ring(self) -> bool:
        """Read the ring and answer waiting clients; return False if only the loop may."""
        read = False

        def work() -> None:
            nonlocal read
            if self._failure is None and not self.service.is_special:
                try:
                    read = not self.service.pump(time.monotonic())
                except errors.ProtocolError as error:
                    # No client caused the error: refuse no client.
                    raise RuntimeError(f"reading the ring: {error}") from error

        self.guard(work)
        # The kernel wakes a client on its writer's processor, where the client would wait until
        # this thread sleeps.
        os.sched_yield()
        with self.lock:
            self._set_hurry()
        return read

    def _clear_up(self) -> None:
        """Do the less urgent work after a read of the ring."""
        with self.lock:
            if self._stopping:
                return
            if not self.service.is_special:
                self.guard(lambda: self._collector.run_maintenance(time.monotonic()))
            self._note_removal()
            if self.service.is_special or self._timer_is_late(time.monotonic()):
                self._loop.call_soon_threadsafe(self.changed)

    def _ring(self) -> None:
        # After a failure the watcher sleeps until the end.
        if not self._stopping and self._failure is None:
            self.guard(self._pump)

    def _pump(self) -> None:
        now = time.monotonic()
        if self.service.pump(now):
            # Messages and timers get their turn in between.
            self._loop.call_soon(self._ring)
            return
        if self.service.frozen:
            return
        self._collector.run_maintenance(now)
        self._note_removal()
        self.changed()
        self._ring_read.set()

    def _tick(self) -> None:
        self._timer = None
        if self._stopping:
            return
        now = time.monotonic()
        with self.lock:
            self.guard(lambda: self.service.tick(now))
            self.limited_log.sum_up(now)
            self._note_removal()
            self._paused_servers.check(now)
            self.changed()

    def changed(self) -> None:
        """After every event: set the timer, hurry the watcher thread, or end the drain."""
        if self._stopping:
            return
        with self.lock:
            now = time.monotonic()
            if self._timer_is_late(now):
                if self._timer is not None:
                    self._timer.cancel()
                wait_s = self.service.next_tick_s(now)
                self._timer_due_s = now + wait_s
                self._timer = self._loop.call_later(wait_s, self._tick)
            self._set_hurry()
            if (self.service.draining or self.service.removed) and self.service.is_empty:
                self._idle.set()

    def _timer_is_late(self, now: float) -> bool:
        """Return True if the timer must be set anew; an early timer does no harm."""
        return self._timer is None or now + self.service.next_tick_s(now) < self._timer_due_s

    def _set_hurry(self) -> None:
        if self.service.has_waiting != self._hurry.is_set():
            (self._hurry.set if self.service.has_waiting else self._hurry.clear)()


def serve(
    name: str,
    policy: StashPolicy,
    duplicate: Any,
    options: dict[str, Any],
    drain_timeout_s: float,
    resume: Sequence[str],
    on_stop: Callable[[], None] | None = None,
) -> bool:
    """Attach to a bus and serve it until SIGTERM or SIGINT."""
    collector = Collector(name, policy, duplicate, DAEMON_LABEL)
    collector.reader.lend()
    server = Server(
        collector, options, drain_timeout_s=drain_timeout_s, resume=resume, on_stop=on_stop
    )
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(server.run())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    return not server.service.removed


def notify(state: str) -> bool:
    """Tell systemd a state like ``READY=1``; return False without a listener."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    # A leading "@" stands for the NUL of the abstract namespace.
    target = "\0" + address[1:] if address[0] == "@" else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), target)
        except OSError as error:
            logger.warning("could not send %s to NOTIFY_SOCKET %s: %s", state, address, error)
            return False
    return True
