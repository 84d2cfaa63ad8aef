"""A client's link to its daemon: the connection, dialled again when it breaks, and its leases.

Invariants:

- A lease is held, ended but not confirmed (`ClientLease.reason`), or forgotten. Its extents stay
  under this client's lease locks until the daemon has confirmed its end.
- A daemon that died is dialled again by whoever notices first: a request, or the watcher, which
  sleeps on the connection so that a trainer in a long step notices too. All that is held, and all
  whose end was not confirmed, is claimed before anything else is asked.
- Nobody waits for ever on a daemon that is gone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from shmbus import errors, limits
from shmbus.control import messages
from shmbus.control.wire import DaemonUnreachable, Wire, refusal
from shmbus.segment import lifecycle
from shmbus_ext import _core

__all__ = ["Link"]

ClientLease = _core.ClientLease


class Link:
    """Attaches to the daemon that serves a bus.

    Parameters
    ----------
    name : str
        The bus.
    policy : dict[str, Any]
        Options of the stash that must be the daemon's too.
    label : str
        How operators see this process.
    rank, world_size : int
        Which of how many.

    Raises
    ------
    DaemonUnreachable
        Nobody answers; the caller knows whether to wait.
    BusNotFoundError, BusBusyError, LayoutMismatchError, ProtocolError, ValueError
        There is no such bus, the rank is taken, another layout or version, other options.
    """

    def __init__(
        self, name: str, policy: dict[str, Any], label: str, rank: int = 0, world_size: int = 1
    ) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.next_step = 0
        self._policy = policy
        self._label = label
        self._rank, self._world_size = rank, world_size
        self._pid = os.getpid()
        self._changed = threading.Condition(self.lock)
        self._closed = False
        self._wire: Wire | None = None
        self._away_since_s = time.monotonic()
        self._away_because = ""
        self._daemon_pid = 0
        self._silent_since_s: float | None = None
        self._reading = False
        self._ids = 0
        self._replies: dict[int, messages.Reply | None] = {}
        #: Held, or ended and not confirmed, by their numbers; of the latter there are so many.
        self._leases: dict[int, ClientLease] = {}
        self._unconfirmed = 0
        self._to_end: dict[int, list[int]] = {}
        self._late: int | None = None
        self._spare: list[ClientLease] = []
        self._known = False
        segment = lifecycle.open_segment(name, read_only=True)
        self._borrower = _core.Borrower(segment)
        self.segment = segment
        try:
            with self.lock:
                self._connect()
        except BaseException:
            self._borrower.close()
            raise
        _clients.add(self)
        threading.Thread(
            target=_watch, args=(weakref.ref(self),), name="shmbus-watch", daemon=True
        ).start()

    def require(self) -> None:
        """Raise BusClosedError in a child of the process that attached."""
        if os.getpid() != self._pid:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer was made in another process, before a fork; "
                "make a new one in this process"
            )

    # -- the connection -------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect, and claim what is held. The lock is held."""
        wire = Wire(self.name)
        try:
            wire.send(self._hello())
            welcome = self._first_reply(wire)
            if welcome.client != self._borrower.client:
                self._borrower.set_client(welcome.client)
            self._daemon_pid = welcome.pid if welcome.pid else wire.pid
            if self._known:
                self._claim(wire)
        except BaseException:
            wire.end()
            raise
        self._known = True
        self._wire = wire
        self._silent_since_s = None
        self._replies.clear()  # asked of the daemon before; whoever waits asks again
        self._late = None
        self._changed.notify_all()

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            version=messages.VERSION,
            bus=self.name,
            created_unix_ns=self.segment.created_unix_ns,
            pid=self._pid,
            label=self._label,
            rank=self._rank,
            world_size=self._world_size,
            policy=self._policy,
            client=self._borrower.client if self._known else -1,
            next_step=self.next_step,
        )

    def _first_reply(self, wire: Wire) -> messages.Welcome:
        deadline = time.monotonic() + limits.HELLO_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            for reply in wire.receive(left):
                if isinstance(reply, messages.Refused):
                    raise refusal(reply)
                if isinstance(reply, messages.Welcome):
                    return reply
                raise errors.ProtocolError(
                    f"bus {self.name!r}: expected Welcome from the daemon (pid {wire.pid}), got "
                    f"{type(reply).__name__}; restart what runs another shmbus"
                )
        raise DaemonUnreachable(
            f"pid {wire.pid} said nothing within {limits.HELLO_WAIT_S:g} s of a Hello"
        )

    def _claim(self, wire: Wire) -> None:
        """Say what is held and what was ended, and learn what became of it."""
        tokens = dict(enumerate(self._leases.values()))
        held = [
            messages.Held(
                token=token,
                identities=_core.identities(lease.samples),
                reason=lease.reason,
                step=lease.step,
            )
            for token, lease in tokens.items()
        ]
        portions: list[list[messages.Held]] = [[]]
        size = 0
        for each in held:
            size += len(each.identities) + 64
            if size > limits.MAX_MESSAGE_BYTES // 2:
                portions.append([])
                size = len(each.identities) + 64
            portions[-1].append(each)
        wire.send(*(messages.Claim(groups=p, last=p is portions[-1]) for p in portions))
        deadline = time.monotonic() + limits.RECLAIM_WAIT_S + limits.HELLO_WAIT_S
        leases: dict[int, ClientLease] = {}
        while tokens:
            left = deadline - time.monotonic()
            replies = wire.receive(left)
            if not replies and left <= 0:
                raise DaemonUnreachable(f"pid {wire.pid} did not answer a claim")
            for reply in replies:
                if isinstance(reply, messages.Refused):
                    raise refusal(reply)
                if isinstance(reply, messages.Claimed):
                    self._learn(reply, tokens, leases)
        self._leases = leases
        self._unconfirmed = 0
        self._to_end = {}

    def _learn(
        self,
        claimed: messages.Claimed,
        tokens: dict[int, ClientLease],
        leases: dict[int, ClientLease],
    ) -> None:
        for token, number in claimed.kept:
            lease = tokens.pop(token)
            lease.number = number
            leases[number] = lease
        over = [tokens.pop(token) for token in [*claimed.ended, *claimed.lost]]
        for lease in over:
            lease.lost = lease.reason == _core.LEASE_HELD
        self._borrower.forget(over)

    def _connected(self, deadline: float | None) -> Wire | None:
        """Return the connection, dialled again if need be; None at the deadline."""
        while True:
            with self.lock:
                if self._closed:
                    raise errors.BusClosedError(
                        f"bus {self.name!r}: this Consumer is closed; make a new one"
                    )
                if self._wire is not None:
                    return self._wire
                try:
                    self._connect()
                    continue
                except DaemonUnreachable as error:
                    self._away_because = str(error)
            now = time.monotonic()
            if now > self._away_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(now - self._away_since_s)
            if deadline is not None and now >= deadline:
                return None
            time.sleep(limits.REDIAL_INTERVAL_S)

    def unavailable(self, waited_s: float) -> errors.DaemonUnavailableError:
        """Say since when, and what to do."""
        return errors.DaemonUnavailableError(
            f"bus {self.name!r}: its daemon (last pid {self._daemon_pid}) has not answered for "
            f"{waited_s:.3g} s ({self._away_because or 'it is silent'}); start it again with "
            f"`shmbus serve {self.name}`: nothing is lost, and what is leased here stays leased"
        )

    def _broken(self, wire: Wire, because: object) -> None:
        with self.lock:
            if self._wire is wire:
                self._wire = None
                self._away_since_s = time.monotonic()
                self._away_because = str(because)
                self._changed.notify_all()
        wire.end()

    # -- requests -------------------------------------------------------------------------------

    def _ask(
        self,
        make: Callable[[int], messages.Request],
        deadline: float | None,
        patience_s: float,
        *,
        takes: bool,
    ) -> tuple[messages.Reply, Wire] | None:
        """Send a request and wait for its reply; None where the daemon is away or silent.

        A reply to one that takes groups is not given up: the next that takes waits for it instead.
        It comes with its connection: numbers of leases mean nothing on another.
        """
        while True:
            wire = self._connected(deadline)
            if wire is None:
                return None
            with self.lock:
                if wire is not self._wire:
                    continue
                id_ = None
                if takes:
                    id_, self._late = self._late, None
                if id_ is None:
                    id_ = self._ids = self._ids + 1
                    self._replies[id_] = None
                    try:
                        wire.send(make(id_))
                    except DaemonUnreachable as error:
                        self._broken(wire, error)
                        continue
            try:
                reply = self._await(wire, id_, time.monotonic() + patience_s)
            except DaemonUnreachable as error:
                self._broken(wire, error)
                continue
            if reply is None:
                self._note_silence(id_, takes)
                return None
            if isinstance(reply, messages.Refused):
                raise refusal(reply)
            return reply, wire

    def _note_silence(self, id_: int, takes: bool) -> None:
        now = time.monotonic()
        with self.lock:
            if takes:
                self._late = id_
            else:
                self._replies.pop(id_, None)
            if self._silent_since_s is None:
                self._silent_since_s = now
            elif now > self._silent_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(now - self._silent_since_s)

    def _await(self, wire: Wire, id_: int, until: float) -> messages.Reply | None:
        """One thread reads for all; the others wait for it."""
        while True:
            with self.lock:
                self._require_wire(wire)
                if self._replies.get(id_) is not None:
                    return self._replies.pop(id_)
                left = until - time.monotonic()
                if left <= 0:
                    return None
                if self._reading:
                    self._changed.wait(left)
                    continue
                self._reading = True
            try:
                replies = wire.receive(left)
                with self.lock:
                    # The watcher may have dialled the next daemon since.
                    self._require_wire(wire)
                    for reply in replies:
                        self._receive(reply)
            finally:
                with self.lock:
                    self._reading = False
                    self._changed.notify_all()

    def _require_wire(self, wire: Wire) -> None:
        if self._closed or wire is not self._wire:
            raise DaemonUnreachable("the connection was given up")

    def _receive(self, reply: messages.Reply) -> None:
        self._silent_since_s = None
        if isinstance(reply, messages.Ended):
            self._confirmed([*reply.numbers, *reply.unknown])
            return
        id_ = getattr(reply, "id", -1)
        if id_ in self._replies:
            self._replies[id_] = reply
        elif isinstance(reply, messages.Refused):
            raise refusal(reply)

    def _confirmed(self, numbers: list[int]) -> None:
        # What was given back is confirmed, too, and not known here any more.
        leases = [lease for n in numbers if (lease := self._leases.get(n))]
        over = [lease for lease in leases if lease.reason != _core.LEASE_HELD]
        for lease in over:
            del self._leases[lease.number]
        self._unconfirmed -= len(over)
        self._borrower.forget(over)

    def close(self) -> None:
        """Leave. What is not ended is the next to be delivered; arrays that are out stay valid."""
        if os.getpid() != self._pid or self._closed:
            return
        with self.lock:
            self._closed = True
            wire, self._wire = self._wire, None
            try:
                if wire is not None:
                    wire.send(messages.Bye())
            except DaemonUnreachable:
                pass  # the daemon is gone; the next one finds no lock of ours
            finally:
                self._borrower.close()
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


_clients: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A copy of the descriptor would keep the connection open after the parent has died.
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _watch(reference: weakref.ref[Link]) -> None:
    """Notice that the daemon is gone while nobody asks it for anything, and dial it again."""
    while True:
        client = reference()
        if client is None or client._closed:
            return
        wire = client._wire
        if wire is None:
            try:
                client._connected(time.monotonic() + limits.TAKE_GRACE_S)
            except errors.BusClosedError:
                return
            except (errors.ShmbusError, OSError, ValueError) as error:
                # Whoever asks next is told; until then it may come back.
                client._away_because = str(error)
                time.sleep(limits.TAKE_GRACE_S)
            continue
        del client
        wire.await_end()
        client = reference()
        if client is not None:
            client._broken(wire, "it closed the connection")
        del client, wire
