"""A client's connection to its daemon: reconnecting, and shared by every thread.

Invariants:

- The watcher, a thread asleep on the connection, reconnects after a break, also during a trainer's
  long step. Every lease, held or unconfirmed, is claimed from the new daemon before any other
  message.
- An interrupted dialogue is a broken connection. A thread interrupted between a request and the
  handling of its reply gives the connection up (`abandon`). The claim then reports this process's
  true leases, and the daemon delivers the rest again. Signal handlers never run in the watcher.
- One thread at a time reads from the socket, and files each reply under its request's id; the other
  threads sleep until their reply. Waiting changes nothing, and ends with the reader.
- A reply belongs to its connection: a thread never gets a reply from another connection.
- A wait for a lost daemon ends after CLIENT_WAIT_S.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from shmbus import errors
from shmbus.base import limits
from shmbus.base.closing import LiveObjects
from shmbus.client.leases import ClientLease, ClientState, Leases
from shmbus.control import messages
from shmbus.control.wire import DaemonUnreachable, Wire, refusal
from shmbus_ext import _core

#: Seconds of delay allowed for a reply.
REPLY_GRACE_S = 1.0
#: Seconds until a waiting thread checks for a living reader: an exception may have ended the
#: reader.
_READER_CHECK_S = 0.5
_GIVEN_UP = "it was given up after an interrupt"


class Connection:
    """Attaches to the daemon of a bus (`attach`), and stays attached."""

    def __init__(
        self, hello: messages.Hello, state: ClientState, leases: Leases, segment: _core.Segment
    ) -> None:
        self._hello = hello
        self._state = state
        self._leases = leases
        self._segment = segment
        self._lock = state.lock
        self._pid = os.getpid()
        self._closed = False
        #: The socket; None without a daemon.
        self.wire: Wire | None = None
        #: True if the dialogue may have stopped in the middle.
        self.doubtful = False
        self._unreachable_since_s = time.monotonic()
        self._problem = ""
        #: True after a failed dial since the connection broke.
        self._dialled = False
        #: The daemon's current reason to refuse this client.
        self._refused: Exception | None = None
        self._daemon_pid = 0
        self._silent_since_s: float | None = None
        #: Its owner reads from the socket.
        self._turn = _core.RecursiveLock()

    def attach(self) -> None:
        """Connect for the first time; after an exception nothing is attached."""
        try:
            with self._lock:
                self._dial()
            _connections.add(self)
            threading.Thread(
                target=_watch, args=(weakref.ref(self),), name="shmbus-watch", daemon=True
            ).start()
        except BaseException:
            self.close()
            raise

    @property
    def ranked(self) -> bool:
        """True if this client is a rank of several."""
        return self._hello.world_size > 1

    # -- connecting -----------------------------------------------------------------------------

    def _dial(self) -> None:
        """Connect, and claim every lease. The caller holds the lock."""
        wire = Wire(self._hello.bus)
        try:
            leases = self._leases
            returns = leases.client >= 0
            hello = {"client": leases.client, "next_step": leases.next_step}
            wire.send(msgspec.structs.replace(self._hello, **hello))
            welcome = self._receive_welcome(wire)
            leases.set_client(welcome.client)
            self._daemon_pid = wire.pid or welcome.pid  # 0 from another pid namespace
            if returns:
                self._claim(wire)
                wire.send(*end_trained_messages(self._state.trained))
            self._wake_all()
            self._state.replies.clear()  # requests to the daemon before; their threads ask again
            self._state.open_take = None
            self._silent_since_s = None
            self._refused = None
            self.wire = wire
        except BaseException:
            wire.end()
            raise

    def _receive_welcome(self, wire: Wire) -> messages.Welcome:
        deadline = time.monotonic() + limits.HELLO_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            for reply in wire.receive(left):
                if isinstance(reply, messages.Refused):
                    raise refusal(reply)
                if isinstance(reply, messages.Welcome):
                    return reply
                raise errors.ProtocolError(
                    f"bus {self._hello.bus!r}: expected Welcome from the daemon (pid {wire.pid}), "
                    f"got {type(reply).__name__}; restart the processes that run another shmbus"
                )
        raise DaemonUnreachable(
            f"pid {wire.pid} did not answer a Hello within {limits.HELLO_WAIT_S:g} s"
        )

    def _claim(self, wire: Wire) -> None:
        """Report held and ended leases to a new daemon, and learn their fate."""
        tokens, claims = self._leases.claims()
        wire.send(*claims)
        deadline = time.monotonic() + limits.RECLAIM_WAIT_S + limits.HELLO_WAIT_S
        kept: dict[int, ClientLease] = {}
        while tokens:
            left = deadline - time.monotonic()
            replies = wire.receive(left)
            if not replies and left <= 0:
                raise DaemonUnreachable(f"pid {wire.pid} did not answer a claim")
            for reply in replies:
                if isinstance(reply, messages.Refused):
                    raise refusal(reply)
                if isinstance(reply, messages.Claimed):
                    self._leases.learn(reply, tokens, kept)
        self._leases.reclaimed(kept)

    def _redial(self) -> float:
        """Try to reach the daemon again, in the watcher; return for how long to rest then."""
        with self._lock:
            if self._closed or self.wire is not None:
                return 0.0
            try:
                self._dial()
                return 0.0
            except DaemonUnreachable as error:
                self._problem = str(error)
                return limits.REDIAL_INTERVAL_S
            except Exception as error:
                # The next request raises the error; until then the daemon may return.
                self._problem, self._refused = str(error), error
                return REPLY_GRACE_S
            finally:
                self._dialled = True

    def _connected(self, deadline: float | None) -> Wire | None:
        """Return the socket, waiting for the watcher's reconnect; None at the deadline."""
        rest_s = limits.REDIAL_INTERVAL_S / 64
        while True:
            with self._lock:
                if self._closed:
                    raise errors.BusClosedError(
                        f"bus {self._hello.bus!r}: this Consumer is closed; make a new one"
                    )
                wire = self.wire
                if wire is not None and not wire.ended and not self.doubtful:
                    return wire
                if wire is not None:
                    self._lose(wire, _GIVEN_UP)
                refused, dialled = self._refused, self._dialled
            if refused is not None:
                raise refused.with_traceback(None)
            if dialled:
                self._segment.require_name()
            now = time.monotonic()
            if now > self._unreachable_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(now - self._unreachable_since_s)
            if deadline is not None and now >= deadline + (not dialled) * REPLY_GRACE_S:
                return None
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, limits.REDIAL_INTERVAL_S)

    def unavailable(self, waited_s: float) -> errors.DaemonUnavailableError:
        """Return the error with the daemon's absence in seconds, and the next step."""
        return errors.DaemonUnavailableError(
            f"bus {self._hello.bus!r}: its daemon (last pid {self._daemon_pid}) has not answered "
            f"for {waited_s:.3g} s ({self._problem or 'it is silent'}); start it again with "
            f"`shmbus serve {self._hello.bus}`: nothing is lost, and what is leased here stays "
            "leased"
        )

    def _lose(self, wire: Wire, because: object) -> None:
        """Give up a broken socket, unless the watcher already replaced it."""
        # An exception may come anywhere in here. After the socket's end the watcher does the rest;
        # and while a reference remains, the next request repeats this.
        wire.end()
        with self._lock:
            if self.wire is wire:
                self._unreachable_since_s = time.monotonic()
                self._problem = str(because)
                self._dialled = self.doubtful = False
                self.wire = None
                self._wake_all()

    def abandon(self) -> None:
        """Give the connection up, after an exception that came in the middle of a dialogue."""
        # The caller sets `doubtful` first: another exception may come before the first line.
        wire = self.wire
        if wire is not None:
            wire.end()
        else:
            self.doubtful = False

    def _wake_all(self) -> None:
        for pending in self._state.replies.values():
            pending.wake_up()

    # -- requests -------------------------------------------------------------------------------

    def request(
        self,
        make: Callable[[int], messages.Request],
        deadline: float | None,
        patience_s: float,
        *,
        takes: bool,
    ) -> tuple[messages.Reply, Wire] | None:
        """Send a request and wait for its reply, across reconnects."""
        while True:
            wire = self._connected(deadline)
            if wire is None:
                return None
            try:
                id_ = self._ask(wire, make, takes=takes)
                reply = self._await(wire, id_, time.monotonic() + patience_s)
            except DaemonUnreachable as error:
                self._lose(wire, error)
                continue
            if reply is None:
                self._note_silence(id_, takes)
                return None
            return reply, wire

    def _ask(self, wire: Wire, make: Callable[[int], messages.Request], *, takes: bool) -> int:
        """Send a request, behind the unsent ends; return its id."""
        state = self._state
        with self._lock:
            self._require_current(wire)
            id_ = state.open_take if takes else None
            if id_ is not None:
                state.open_take = None
            else:
                id_ = state.new_request()
                wire.send(*self._leases.unsent_ends(), make(id_))
        return id_

    def late_reply(self, wire: Wire, id_: int, patience_s: float) -> messages.Reply | None:
        """Wait for the reply to a request already sent on this socket; None without a reply."""
        try:
            return self._await(wire, id_, time.monotonic() + patience_s)
        except DaemonUnreachable as error:
            self._lose(wire, error)
            return None

    def send(self, *requests: messages.Request) -> None:
        """Send messages without replies; without a daemon nothing: the claim replaces them."""
        wire = self.wire
        if wire is None:
            if time.monotonic() > self._unreachable_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(time.monotonic() - self._unreachable_since_s)
            return
        if self.doubtful:
            self._lose(wire, _GIVEN_UP)
            return
        try:
            wire.send(*requests)
        except DaemonUnreachable as error:
            self._lose(wire, error)

    def receive_pending(self) -> None:
        """File the replies already here, without waiting. The caller holds the lock."""
        wire = self.wire
        if wire is None:
            return
        with self._turn.attempt() as mine:
            try:
                while mine and (replies := wire.receive(0.0)):
                    for reply in replies:
                        self._file(reply)
            except DaemonUnreachable as error:
                self._lose(wire, error)

    def _note_silence(self, id_: int, takes: bool) -> None:
        now = time.monotonic()
        with self._lock:
            if takes:
                self._state.open_take = id_
            else:
                self._state.replies.pop(id_, None)
            if self._silent_since_s is None:
                self._silent_since_s = now
            elif now > self._silent_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(now - self._silent_since_s)

    def _await(self, wire: Wire, id_: int, until: float) -> messages.Reply | None:
        """Wait for a reply: read for every thread, or wait for the reading thread."""
        replies = self._state.replies
        while True:
            with self._lock:
                self._require_current(wire)
                reply = self._consume(id_)
                left = until - time.monotonic()
                if reply is not None or left <= 0:
                    self._pass_on()
                    return reply
            with self._turn.attempt() as mine:
                if mine:
                    reply = self._read(wire, id_, left)
            if reply is not None:
                if replies:
                    with self._lock:
                        self._pass_on()
                return reply
            if not mine:
                self._wait_for_reader(wire, id_, left)

    def _consume(self, id_: int) -> messages.Reply | None:
        """Return a request's reply, and end the request. The caller holds the lock."""
        reply = self._state.replies[id_].reply
        if reply is not None:
            del self._state.replies[id_]
        return reply

    def _read(self, wire: Wire, id_: int, left: float) -> messages.Reply | None:
        """Wait for replies, and file them; return this request's reply, if it came."""
        if not wire.wait(left):
            return None
        with self._lock:
            # The watcher may have reached the next daemon in between.
            self._require_current(wire)
            for reply in wire.receive_now():
                self._file(reply)
            return self._consume(id_)

    def _wait_for_reader(self, wire: Wire, id_: int, left: float) -> None:
        """Sleep until the reading thread files this reply, or stops reading."""
        with self._lock:
            self._require_current(wire)
            pending = self._state.replies[id_]
            if pending.reply is not None:
                return
            wake = pending.wake
            if wake is None:
                # The reader sees this from now on; without a reader the caller is the next reader.
                wake = threading.Lock()
                wake.acquire()
                pending.wake = wake
                return
        # A reader ended by an exception may have woken no thread.
        wake.acquire(timeout=min(left, _READER_CHECK_S))

    def _pass_on(self) -> None:
        """Wake another thread to read in this thread's place. The caller holds the lock."""
        for pending in self._state.replies.values():
            if pending.wake is not None and pending.reply is None:
                pending.wake_up()
                return

    def _require_current(self, wire: Wire) -> None:
        if self._closed or wire is not self.wire:
            raise DaemonUnreachable("the connection was given up")

    def _file(self, reply: messages.Reply) -> None:
        """Keep a reply for its waiting thread, or forward a confirmation."""
        self._silent_since_s = None
        if isinstance(reply, messages.Ended):
            self._leases.borrower.confirm(self._state.leases, [*reply.numbers, *reply.unknown])
            return
        id_ = getattr(reply, "id", -1)
        pending = self._state.replies.get(id_)
        if pending is not None:
            pending.reply = reply
            pending.wake_up()
        elif isinstance(reply, messages.Refused) and id_ < 0:
            raise refusal(reply)

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Say Bye, drop every lease, and wake every waiting thread; may be called again."""
        # With unreported acknowledgements, wait for an absent daemon, LEAVE_WAIT_S at most:
        # otherwise the groups would come again.
        if os.getpid() != self._pid:
            return
        try:
            with contextlib.suppress(errors.ShmbusError):
                self._tell_ends()
            self._leave()
        except BaseException:
            self._leave()
            raise

    def _tell_ends(self) -> None:
        deadline = time.monotonic() + limits.LEAVE_WAIT_S
        while not self._closed and self._leases.borrower.unconfirmed:
            wire = self._connected(deadline)
            if wire is None:
                return
            try:
                with self._lock:
                    self._require_current(wire)
                    wire.send(*self._leases.unsent_ends())
                return
            except DaemonUnreachable as error:
                self._lose(wire, error)

    def _leave(self) -> None:
        with self._lock:
            self._closed = True
            wire = self.wire
            if wire is not None:
                # the next daemon finds no lock of ours
                with contextlib.suppress(DaemonUnreachable):
                    wire.send(*self._leases.unsent_ends(), messages.Bye())
                wire.end()
            self._leases.borrower.close()
            self.wire = None
            self._wake_all()

    @_core.finalizer
    def __del__(self) -> None:
        # The watcher wakes in here, and still gets a reference: it must not dial again, because an
        # object resurrected by it is not finalised twice.
        self._closed = True
        wire = getattr(self, "wire", None)
        if wire is not None and os.getpid() == self._pid:
            wire.end()

    def _forget(self) -> None:
        if self.wire is not None:
            self.wire.forget()
            self.wire = None


def end_trained_messages(names: bytes) -> list[messages.EndTrained]:
    """Return the messages that report trained samples; empty without names."""
    ends = range(messages.NAMES_BYTES, len(names) + messages.NAMES_BYTES, messages.NAMES_BYTES)
    return [
        messages.EndTrained(
            id=0, names=names[end - messages.NAMES_BYTES : end], more=end < len(names)
        )
        for end in ends
    ]


_connections: LiveObjects[Connection] = LiveObjects()


def _after_fork_in_child() -> None:
    # A copy of the descriptor would keep the connection open after the parent has died.
    for connection in _connections:
        connection._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _watch(reference: weakref.ref[Connection]) -> None:
    """Notice the daemon's death while no thread has a request, and dial again."""
    while True:
        connection = reference()
        if connection is None or connection._closed:
            return
        wire = connection.wire
        if wire is None:
            rest_s = connection._redial()
            del connection
            time.sleep(rest_s)
            continue
        del connection
        wire.await_end()
        connection = reference()
        if connection is not None:
            connection._lose(wire, "it closed the connection")
        del connection, wire
