"""The client of a daemon: the Source of a Consumer whose bus a daemon serves.

Invariants:

- A lease is in exactly one place: held, ended but not confirmed, or forgotten. Its extents stay
  under this client's lease locks until the daemon has confirmed its end.
- A daemon that died is dialled again by whoever notices first: a request, or the watcher, which
  sleeps on the connection so that a trainer in a long step notices too. All that is held, and all
  whose end was not confirmed, is claimed before anything else is asked.
- Nobody waits longer than asked and a second, and nobody for ever on a daemon that is gone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from shmbus import _segments, errors, limits, messages
from shmbus.daemon.dialing import Away, Wire, refusal
from shmbus.ledger import Ledger
from shmbus_ext import _core

__all__ = ["ClientLease", "DaemonClient"]

Trajectory = _core.Trajectory


class ClientLease:
    """A group that the daemon leased to this process."""

    __slots__ = ("identities", "key", "lost", "number", "places", "samples", "size", "step")

    def __init__(self, granted: messages.Granted, samples: list[Trajectory], step: int) -> None:
        self.number = granted.number
        self.places = granted.places
        self.size = granted.size
        self.samples = samples
        self.key = samples[0].key
        self.step = step
        self.identities = _core.identities(samples)
        self.lost = False


class DaemonClient:
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
    Away
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
        self._leases: dict[int, ClientLease] = {}
        self._unconfirmed: dict[int, tuple[ClientLease, int]] = {}
        self._to_end: dict[int, list[int]] = {}
        self._late: int | None = None
        self._spare: list[ClientLease] = []
        self._known = False
        segment = _segments.open_segment(name, read_only=True)
        self._borrower = _core.Borrower(segment)
        self._segment = segment
        try:
            with self.lock:
                self._dial()
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

    def _dial(self) -> None:
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
        for id_ in [id_ for id_, reply in self._replies.items() if reply is None]:
            del self._replies[id_]  # asked of the daemon before; whoever waits asks again
        self._late = None
        self._changed.notify_all()

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            version=messages.VERSION,
            bus=self.name,
            created_unix_ns=self._segment.created_unix_ns,
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
        raise Away(f"pid {wire.pid} said nothing within {limits.HELLO_WAIT_S:g} s of a Hello")

    def _claim(self, wire: Wire) -> None:
        """Say what is held and what was ended, and learn what became of it."""
        tokens: dict[int, tuple[ClientLease, int]] = {}
        for lease in self._leases.values():
            tokens[len(tokens)] = (lease, -1)
        for lease, reason in self._unconfirmed.values():
            tokens[len(tokens)] = (lease, reason)
        held = [
            messages.Held(token=t, identities=lease.identities, reason=reason, step=lease.step)
            for t, (lease, reason) in tokens.items()
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
                raise Away(f"pid {wire.pid} did not answer a claim")
            for reply in replies:
                if isinstance(reply, messages.Refused):
                    raise refusal(reply)
                if isinstance(reply, messages.Claimed):
                    self._learn(reply, tokens, leases)
        self._leases = leases
        self._unconfirmed = {}
        self._to_end = {}

    def _learn(
        self,
        claimed: messages.Claimed,
        tokens: dict[int, tuple[ClientLease, int]],
        leases: dict[int, ClientLease],
    ) -> None:
        for token, number in claimed.kept:
            lease, _ = tokens.pop(token)
            lease.number = number
            leases[number] = lease
        for token in [*claimed.ended, *claimed.lost]:
            lease, reason = tokens.pop(token)
            lease.lost = reason < 0
            self._borrower.end_lease(lease.places)

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
                    self._dial()
                    continue
                except Away as error:
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
    ) -> messages.Reply | None:
        """Send a request and wait for its reply; None where the daemon is away or silent.

        A reply to one that takes groups is not given up: the next that takes waits for it instead.
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
                    except Away as error:
                        self._broken(wire, error)
                        continue
            try:
                reply = self._await(wire, id_, time.monotonic() + patience_s)
            except Away as error:
                self._broken(wire, error)
                continue
            if reply is None:
                self._note_silence(id_, takes)
            if isinstance(reply, messages.Refused):
                raise refusal(reply)
            return reply

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
                if self._replies.get(id_) is not None:
                    return self._replies.pop(id_)
                if self._closed or wire is not self._wire:
                    raise Away("the connection was given up")
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
                    for reply in replies:
                        self._receive(reply)
            finally:
                with self.lock:
                    self._reading = False
                    self._changed.notify_all()

    def _receive(self, reply: messages.Reply) -> None:
        self._silent_since_s = None
        if isinstance(reply, messages.Ended):
            for number in [*reply.numbers, *reply.unknown]:
                ended = self._unconfirmed.pop(number, None)
                if ended is not None:
                    self._borrower.end_lease(ended[0].places)
            return
        id_ = getattr(reply, "id", -1)
        if id_ in self._replies:
            self._replies[id_] = reply
        elif isinstance(reply, messages.Refused):
            raise refusal(reply)

    # -- taking ---------------------------------------------------------------------------------

    def take(self, max_groups: int, timeout: float | None) -> list[ClientLease]:
        """Lease complete groups; wait for the first, at most `timeout` seconds and one.

        A large portion that came whole is followed by a request for the next, so that the daemon
        prepares it meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        leases = self._take_spare(max_groups)
        if not leases:
            leases = self._take_until(
                deadline,
                lambda id_, slice_s: messages.Take(
                    id=id_, max_groups=max_groups, timeout_s=slice_s
                ),
                max_groups if max_groups >= limits.AHEAD_GROUPS else 0,
            )
            if len(leases) > max_groups:
                with self.lock:
                    self._spare = leases[max_groups:]
                    leases = leases[:max_groups]
        return leases

    def _take_spare(self, max_groups: int) -> list[ClientLease]:
        with self.lock:
            leases, self._spare = self._spare[:max_groups], self._spare[max_groups:]
            return [lease for lease in leases if not lease.lost]

    def _ask_ahead(self, max_groups: int) -> None:
        with self.lock:
            if self._late is None and self._wire is not None:
                self._ids += 1
                self._late = self._ids
                self._replies[self._ids] = None
                self._send(
                    messages.Take(id=self._ids, max_groups=max_groups, timeout_s=0.0, ahead=True)
                )

    def _return_ahead(self) -> None:
        """Give back what was asked for ahead: something else comes first now."""
        with self.lock:
            late, self._late = self._late, None
            spare, self._spare = self._spare, []
            wire = self._wire
        if late is not None and wire is not None:
            try:
                reply = self._await(wire, late, time.monotonic() + limits.TAKE_GRACE_S)
            except Away as error:
                self._broken(wire, error)
                reply = None
            if isinstance(reply, messages.Leases):
                spare += self._borrow(reply)
        self._give_back(spare)

    def take_step(
        self,
        *,
        groups: int | None,
        tokens: int | None,
        max_wait: float | None,
        field: str,
        timeout: float | None,
    ) -> list[ClientLease]:
        """Lease this rank's shard of its next step; empty when the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._take_until(
            deadline,
            lambda id_, slice_s: messages.TakeStep(
                id=id_,
                groups=groups,
                tokens=tokens,
                max_wait_s=max_wait,
                field=field,
                timeout_s=slice_s,
            ),
        )

    def _take_until(
        self,
        deadline: float | None,
        make: Callable[[int, float], messages.Request],
        ahead: int = 0,
    ) -> list[ClientLease]:
        while True:
            left = limits.TAKE_SLICE_S
            if deadline is not None:
                left = min(left, max(deadline - time.monotonic(), 0.0))
            reply = self._ask(
                lambda id_, left=left: make(id_, left),  # type: ignore[misc]
                deadline,
                left + limits.TAKE_GRACE_S,
                takes=True,
            )
            if isinstance(reply, messages.Leases) and reply.groups:
                if ahead and len(reply.groups) == ahead:
                    self._ask_ahead(ahead)
                leases = self._borrow(reply)
                if leases:
                    return leases
            elif deadline is not None and time.monotonic() >= deadline:
                return []

    def _borrow(self, reply: messages.Leases) -> list[ClientLease]:
        leases = []
        with self.lock:
            for granted in reply.groups:
                try:
                    samples = self._borrower.borrow(granted.places)
                except ValueError:
                    samples = []
                if not samples:
                    # It was whole when the daemon read it: a process that may write scribbled it.
                    self._to_end.setdefault(_core.DROP_CORRUPT, []).append(granted.number)
                    continue
                lease = ClientLease(granted, samples, reply.step)
                self._leases[lease.number] = lease
                leases.append(lease)
            if reply.step >= self.next_step:
                self.next_step = reply.step + 1
            if self._to_end:
                self.flush()
        return leases

    # -- ending leases --------------------------------------------------------------------------

    def is_leased(self, lease: Any) -> bool:
        """Whether the daemon gave this lease to this client, and it has not ended."""
        return lease.lost or self._leases.get(lease.number) is lease

    def end(self, lease: ClientLease, reason: int) -> None:
        """End a lease; `flush` says so to the daemon, which may be away."""
        if lease.lost:
            raise errors.ProtocolError(
                f"group {lease.key!r}: the daemon that leased it is gone, and this process came "
                "back to the next one too late; it may have been delivered to another"
            )
        self._borrower.release(lease.samples)
        del self._leases[lease.number]
        self._unconfirmed[lease.number] = (lease, reason)
        self._to_end.setdefault(reason, []).append(lease.number)

    def give_back(self, lease: ClientLease) -> None:
        """Make a leased group the next to be delivered, to whoever asks."""
        if self._late is not None or self._spare:
            self._return_ahead()
        self._give_back([lease])

    def _give_back(self, leases: list[ClientLease]) -> None:
        leases = [lease for lease in leases if not lease.lost]
        for lease in leases:
            self._borrower.release(lease.samples)
            del self._leases[lease.number]
            # With no lock on it, a daemon that comes next delivers it too.
            self._borrower.end_lease(lease.places)
        if leases:
            self._send(messages.GiveBack(numbers=[lease.number for lease in leases]))

    def flush(self) -> None:
        """Say which leases have ended. Where the daemon is away, it is told when it is back."""
        with self.lock:
            to_end, self._to_end = self._to_end, {}
            self._send(
                *(
                    messages.End(numbers=numbers[at : at + _NUMBERS], reason=reason)
                    for reason, numbers in to_end.items()
                    for at in range(0, len(numbers), _NUMBERS)
                )
            )
            if len(self._unconfirmed) > limits.UNCONFIRMED and not self._reading:
                self._hear()

    def _send(self, *requests: messages.Request) -> None:
        wire = self._wire
        if wire is None:
            if time.monotonic() > self._away_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(time.monotonic() - self._away_since_s)
            return
        try:
            wire.send(*requests)
        except Away as error:
            self._broken(wire, error)

    def _hear(self) -> None:
        """Take in what the daemon has confirmed meanwhile, without waiting."""
        wire = self._wire
        if wire is None:
            return
        try:
            while replies := wire.receive(0.0):
                for reply in replies:
                    self._receive(reply)
        except Away as error:
            self._broken(wire, error)

    # -- state ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version: a read of shared memory."""
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._demand(lambda id_: messages.SetPolicyVersion(id=id_, policy_version=version))

    def stats(self) -> Ledger:
        """Return the daemon's ledger."""
        reply = self._demand(lambda id_: messages.GetLedger(id=id_))
        assert isinstance(reply, messages.LedgerReply)
        return reply.ledger

    def _demand(self, make: Callable[[int], messages.Request]) -> messages.Reply:
        began = time.monotonic()
        deadline = began + limits.CLIENT_WAIT_S
        reply = self._ask(make, deadline, limits.CLIENT_WAIT_S, takes=False)
        if reply is None:
            raise self.unavailable(time.monotonic() - began)
        return reply

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
            except Away:
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


#: Numbers in one End message; far below the bound on a message.
_NUMBERS = 65_536

_clients: weakref.WeakSet[DaemonClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A copy of the descriptor would keep the connection open after the parent has died.
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _watch(reference: weakref.ref[DaemonClient]) -> None:
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
