"""A client's connection to its daemon: dialled again when it breaks, and shared by all threads.

Invariants:

- Whoever notices first that the daemon died dials again: a thread with a request, or the watcher,
  which sleeps on the connection so that a trainer in a long step notices too. All leases, held or
  not confirmed, are claimed from the new daemon before anything else is sent.
- One thread at a time reads from the socket, and files each reply under its request's id; the
  others wait for theirs.
- A reply belongs to the connection that it was received on. A thread never gets one of another.
- No wait for a daemon that is gone is endless: it ends after CLIENT_WAIT_S.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from shmbus import errors, limits
from shmbus.client.leases import ClientLease, ClientState, Leases
from shmbus.control import messages
from shmbus.control.wire import DaemonUnreachable, Wire, refusal

__all__ = ["Connection"]

#: Seconds that a reply may be late before the client gives up on it.
REPLY_GRACE_S = 1.0


class Connection:
    """Attaches to the daemon that serves a bus, and stays attached.

    Parameters
    ----------
    hello : Hello
        Who this process is, and which options of the stash it insists on.
    state : ClientState
        Where requests in flight and their replies are kept; its lock guards this, too.
    leases : Leases
        What is claimed after a reconnect, and what confirmations are passed to.

    Raises
    ------
    DaemonUnreachable
        No daemon answers; the caller knows whether to wait.
    BusNotFoundError, BusBusyError, LayoutMismatchError, ProtocolError, ValueError
        There is no such bus, the rank is taken, another layout or version, other options.
    """

    def __init__(self, hello: messages.Hello, state: ClientState, leases: Leases) -> None:
        self._hello = hello
        self._state = state
        self._leases = leases
        self._lock = state.lock
        self._pid = os.getpid()
        #: Notified when a reply was received, and when the connection is made or lost.
        self._changed = threading.Condition(state.lock)
        self._closed = False
        self._wire: Wire | None = None
        self._unreachable_since_s = time.monotonic()
        self._problem = ""
        self._daemon_pid = 0
        self._silent_since_s: float | None = None
        #: Whether a thread reads from the socket, without the lock.
        self._reading = False
        with self._lock:
            self._dial()
        _connections.add(self)
        threading.Thread(
            target=_watch, args=(weakref.ref(self),), name="shmbus-watch", daemon=True
        ).start()

    @property
    def wire(self) -> Wire | None:
        """The socket; None while no daemon is reached."""
        return self._wire

    # -- connecting -----------------------------------------------------------------------------

    def _dial(self) -> None:
        """Connect, and claim all leases. The lock is held."""
        wire = Wire(self._hello.bus)
        try:
            returns = self._leases.client >= 0
            wire.send(
                msgspec.structs.replace(
                    self._hello, client=self._leases.client, next_step=self._state.next_step
                )
            )
            welcome = self._receive_welcome(wire)
            self._leases.set_client(welcome.client)
            self._daemon_pid = welcome.pid if welcome.pid else wire.pid
            if returns:
                self._claim(wire)
        except BaseException:
            wire.end()
            raise
        self._wire = wire
        self._silent_since_s = None
        self._state.replies.clear()  # requests to the daemon before; their threads ask again
        self._state.open_take = None
        self._changed.notify_all()

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
        """Tell a new daemon which leases are held and which have ended, and learn their fate."""
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

    def _connected(self, deadline: float | None) -> Wire | None:
        """Return the socket, dialled again if necessary; None at the deadline."""
        while True:
            with self._lock:
                if self._closed:
                    raise errors.BusClosedError(
                        f"bus {self._hello.bus!r}: this Consumer is closed; make a new one"
                    )
                if self._wire is not None:
                    return self._wire
                try:
                    self._dial()
                    continue
                except DaemonUnreachable as error:
                    self._problem = str(error)
            now = time.monotonic()
            if now > self._unreachable_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(now - self._unreachable_since_s)
            if deadline is not None and now >= deadline:
                return None
            time.sleep(limits.REDIAL_INTERVAL_S)

    def unavailable(self, waited_s: float) -> errors.DaemonUnavailableError:
        """Return the error that says for how long the daemon was missed, and what to do."""
        return errors.DaemonUnavailableError(
            f"bus {self._hello.bus!r}: its daemon (last pid {self._daemon_pid}) has not answered "
            f"for {waited_s:.3g} s ({self._problem or 'it is silent'}); start it again with "
            f"`shmbus serve {self._hello.bus}`: nothing is lost, and what is leased here stays "
            "leased"
        )

    def _lose(self, wire: Wire, because: object) -> None:
        """Give up a socket that broke; another thread may have replaced it already."""
        with self._lock:
            if self._wire is wire:
                self._wire = None
                self._unreachable_since_s = time.monotonic()
                self._problem = str(because)
                self._changed.notify_all()
        wire.end()

    # -- requests -------------------------------------------------------------------------------

    def request(
        self,
        make: Callable[[int], messages.Request],
        deadline: float | None,
        patience_s: float,
        *,
        takes: bool,
    ) -> tuple[messages.Reply, Wire] | None:
        """Send a request and wait for its reply, across reconnects.

        Parameters
        ----------
        make : callable
            Makes the request, given its id.
        deadline : float | None
            Until when an unreachable daemon is dialled; on the monotonic clock.
        patience_s : float
            Seconds to wait for the reply.
        takes : bool
            Whether it asks for groups. If its reply is late, the next such request waits for that
            reply instead of asking again, so that no group is leased to nobody.

        Returns
        -------
        tuple[Reply, Wire] or None
            The reply and its socket: numbers of leases mean nothing on another. None where the
            daemon is unreachable or silent.

        Raises
        ------
        DaemonUnavailableError
            It has been unreachable or silent for CLIENT_WAIT_S.
        BusClosedError
            This connection was closed.
        """
        state = self._state
        while True:
            wire = self._connected(deadline)
            if wire is None:
                return None
            with self._lock:
                if wire is not self._wire:
                    continue
                id_ = None
                if takes:
                    id_, state.open_take = state.open_take, None
                if id_ is None:
                    id_ = state.new_request()
                    try:
                        wire.send(make(id_))
                    except DaemonUnreachable as error:
                        self._lose(wire, error)
                        continue
            try:
                reply = self._await(wire, id_, time.monotonic() + patience_s)
            except DaemonUnreachable as error:
                self._lose(wire, error)
                continue
            if reply is None:
                self._note_silence(id_, takes)
                return None
            if isinstance(reply, messages.Refused):
                raise refusal(reply)
            return reply, wire

    def late_reply(self, wire: Wire, id_: int, patience_s: float) -> messages.Reply | None:
        """Wait for the reply to a request that this socket has sent; None if it does not come."""
        try:
            return self._await(wire, id_, time.monotonic() + patience_s)
        except DaemonUnreachable as error:
            self._lose(wire, error)
            return None

    def send(self, *requests: messages.Request) -> None:
        """Send what has no reply of its own. Without a daemon this is a no-op: the claim tells it.

        Raises
        ------
        DaemonUnavailableError
            The daemon has been unreachable for CLIENT_WAIT_S.
        """
        wire = self._wire
        if wire is None:
            if time.monotonic() > self._unreachable_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(time.monotonic() - self._unreachable_since_s)
            return
        try:
            wire.send(*requests)
        except DaemonUnreachable as error:
            self._lose(wire, error)

    def receive_pending(self) -> None:
        """File the replies that have arrived, without waiting. The lock is held."""
        wire = self._wire
        if wire is None or self._reading:
            return
        try:
            while replies := wire.receive(0.0):
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
        """Wait for one reply: read for all threads, or wait for the thread that reads."""
        replies = self._state.replies
        while True:
            with self._lock:
                self._require_current(wire)
                if replies.get(id_) is not None:
                    return replies.pop(id_)
                left = until - time.monotonic()
                if left <= 0:
                    return None
                if self._reading:
                    self._changed.wait(left)
                    continue
                self._reading = True
            try:
                received = wire.receive(left)
                with self._lock:
                    # The watcher may have reached the next daemon in between.
                    self._require_current(wire)
                    for reply in received:
                        self._file(reply)
            finally:
                with self._lock:
                    self._reading = False
                    self._changed.notify_all()

    def _require_current(self, wire: Wire) -> None:
        if self._closed or wire is not self._wire:
            raise DaemonUnreachable("the connection was given up")

    def _file(self, reply: messages.Reply) -> None:
        """Keep a reply for the thread that waits for it, or pass on a confirmation."""
        self._silent_since_s = None
        if isinstance(reply, messages.Ended):
            self._leases.confirmed([*reply.numbers, *reply.unknown])
            return
        id_ = getattr(reply, "id", -1)
        if id_ in self._state.replies:
            self._state.replies[id_] = reply
        elif isinstance(reply, messages.Refused):
            raise refusal(reply)

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Say Bye, drop all leases, and wake every thread that waits here."""
        if os.getpid() != self._pid or self._closed:
            return
        with self._lock:
            self._closed = True
            wire, self._wire = self._wire, None
            try:
                if wire is not None:
                    wire.send(messages.Bye())
            except DaemonUnreachable:
                pass  # the next daemon finds no lock of this client
            finally:
                self._leases.close()
                self._changed.notify_all()
                if wire is not None:
                    wire.end()

    def __del__(self) -> None:
        wire = getattr(self, "_wire", None)
        if wire is not None and os.getpid() == self._pid:
            wire.end()

    def _forget(self) -> None:
        if self._wire is not None:
            self._wire.forget()
            self._wire = None


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A copy of the descriptor would keep the connection open after the parent has died.
    for connection in list(_connections):
        connection._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _watch(reference: weakref.ref[Connection]) -> None:
    """Notice the daemon's death while no thread has a request, and dial again."""
    while True:
        connection = reference()
        if connection is None or connection._closed:
            return
        wire = connection._wire
        if wire is None:
            try:
                connection._connected(time.monotonic() + REPLY_GRACE_S)
            except errors.BusClosedError:
                return
            except (errors.ShmbusError, OSError, ValueError) as error:
                # The next request raises it; until then the daemon may return.
                connection._problem = str(error)
                time.sleep(REPLY_GRACE_S)
            continue
        del connection
        wire.await_end()
        connection = reference()
        if connection is not None:
            connection._lose(wire, "it closed the connection")
        del connection, wire
