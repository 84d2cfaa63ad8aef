"""DaemonClient: the Source of a Consumer whose bus is served by a daemon.

It is made of two parts: a `Connection`, which knows the socket and no leases, and `Leases`, which
knows the leases and no socket. What both have open is in one `ClientState`.

Invariants:

- Groups that were asked ahead are handed out before any newer ones, or given back before an older
  group is.
- No call lasts longer than its timeout and REPLY_GRACE_S.
- Whatever happens between a request and the leases that its reply grants, or between the end of a
  lease here and the message that says so, ends the connection, unless it is the daemon's own word.
  The next connection's claim says what is true.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shmbus import errors, limits
from shmbus._arguments import TRAIN
from shmbus.client.connection import REPLY_GRACE_S, Connection, end_trained_messages
from shmbus.client.leases import ClientLease, ClientState, Leases
from shmbus.control import messages
from shmbus.control.wire import Wire, refusal
from shmbus.ledger import Ledger, TrainedBefore
from shmbus.segment import lifecycle
from shmbus_ext import _core

#: Groups of a take from which on the next portion is requested ahead: a smaller take wants few.
_AHEAD_GROUPS = 16

_G = TypeVar("_G", bound=_core.GroupBase)


class DaemonClient:
    """Attaches to the daemon that serves a bus (`attach`), and leases groups from it."""

    def __init__(
        self,
        name: str,
        policy: dict[str, Any],
        label: str,
        rank: int = 0,
        world_size: int = 1,
        split: str = TRAIN,
    ) -> None:
        self.segment = lifecycle.open_segment(name, read_only=True)
        self._pid = os.getpid()
        #: Requests, replies, leases and ends that are open with the daemon.
        self.state = ClientState()
        self.lock = self.state.lock
        #: What this process holds.
        self.leases = Leases(self.segment, self.state)
        hello = messages.Hello(
            version=messages.VERSION,
            bus=name,
            created_unix_ns=self.segment.created_unix_ns,
            pid=self._pid,
            label=label,
            rank=rank,
            world_size=world_size,
            policy=policy,
            split=split,
        )
        #: To the daemon, and after its death to the next one.
        self.connection = Connection(hello, self.state, self.leases, self.segment)

    def attach(self) -> None:
        """Connect; after an exception nothing is attached, and this cannot be used any more."""
        self.connection.attach()

    def require(self) -> None:
        """Raise BusClosedError in a child of the process that attached."""
        if os.getpid() != self._pid:
            raise errors.BusClosedError(
                f"bus {self.segment.name!r}: this Consumer was made in another process, before a "
                "fork; make a new one in this process"
            )

    # -- taking ---------------------------------------------------------------------------------

    def receive(self, max_groups: int, timeout: float | None) -> bool:
        """Wait until there are leases to hand out; False at the timeout."""
        # After a large reply with all that was asked for, the next groups are asked ahead, so that
        # the daemon prepares them while the caller works.
        if self.leases.ready:
            return True
        return self._receive_until(
            timeout,
            lambda id_, slice_s: messages.Take(
                id=id_,
                max_groups=max_groups,
                timeout_s=slice_s,
                gathers=self.leases.gathers,
            ),
            max_groups if max_groups >= _AHEAD_GROUPS else 0,
        )

    def receive_step(
        self,
        *,
        groups: int | None,
        tokens: int | None,
        max_wait: float | None,
        field: str,
        timeout: float | None,
        only_full: bool,
    ) -> bool:
        """Wait likewise for this rank's shard of its next step."""
        return bool(self.leases.ready) or self._receive_until(
            timeout,
            lambda id_, slice_s: messages.TakeStep(
                id=id_,
                groups=groups,
                tokens=tokens,
                max_wait_s=max_wait,
                field=field,
                timeout_s=slice_s,
                only_full=only_full,
                gathers=self.leases.gathers,
            ),
        )

    def hand_out(self, kind: type[_G], consumer: object, limit: int) -> list[_G]:
        """Make groups of what was received; none where another thread has had it."""
        # Callers return this and keep it nowhere: a group that dies on its way is ready again.
        return self.leases.hand_out(kind, consumer, limit)

    def _receive_until(
        self,
        timeout: float | None,
        make: Callable[[int, float], messages.Request],
        ahead: int = 0,
    ) -> bool:
        """Ask again and again until there are groups; `ahead` is how many to ask ahead then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        # The answer to what was asked ahead, or gave up waiting, says nothing of now.
        earlier = self.state.open_take is not None
        while True:
            left = limits.TAKE_SLICE_S
            if deadline is not None:
                left = min(left, max(deadline - time.monotonic(), 0.0))
            reply = self._ask_for_groups(
                lambda id_, left=left: make(id_, left),  # type: ignore[misc]
                deadline,
                left + REPLY_GRACE_S,
                ahead,
            )
            if isinstance(reply, messages.Refused):
                raise refusal(reply)
            if self.leases.ready:
                return True
            # What a removed bus holds is delivered; nothing comes of waiting for more.
            self.segment.require_name()
            over = deadline is not None and time.monotonic() >= deadline
            if over and (reply is None or not earlier):
                return False
            earlier = False

    def _ask_for_groups(
        self,
        make: Callable[[int], messages.Request],
        deadline: float | None,
        patience_s: float,
        ahead: int,
    ) -> messages.Reply | None:
        """Ask once; what is granted is ready to be handed out when this returns."""
        try:
            answer = self.connection.request(make, deadline, patience_s, takes=True)
            if answer is None:
                return None
            reply, wire = answer
            if isinstance(reply, messages.Leases):
                if ahead and len(reply.groups) == ahead:
                    self._ask_ahead(ahead)
                self.borrow(reply, wire)
            return reply
        except errors.DaemonUnavailableError:
            raise
        except BaseException:
            self.connection.doubtful = True
            self.connection.abandon()
            raise

    def borrow(self, reply: messages.Leases, wire: Wire) -> list[ClientLease]:
        """Turn what the daemon granted into leases of this process; empty if it died since."""
        if not reply.groups:
            return []
        with self.lock:
            if wire is not self.connection.wire:
                # Never claimed, so the next daemon delivers them under other numbers.
                return []
            leases = self.leases.receive(reply, wire.fileno())
            if self.state.to_end:
                self.flush()
        return leases

    def _ask_ahead(self, max_groups: int) -> None:
        with self.lock:
            if self.state.open_take is None and self.connection.wire is not None:
                self.state.open_take = id_ = self.state.new_request()
                self.connection.send(
                    messages.Take(
                        id=id_,
                        max_groups=max_groups,
                        timeout_s=0.0,
                        ahead=True,
                        gathers=self.leases.gathers,
                    )
                )

    # -- ending leases --------------------------------------------------------------------------

    def is_leased(self, lease: Any) -> bool:
        """Whether the daemon leased this to this client, and the lease has not ended."""
        return self.leases.is_leased(lease)

    def end(self, lease: ClientLease, reason: int) -> None:
        """End a lease; `flush` tells the daemon."""
        self.leases.end(lease, reason)

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End the leases of groups in one call, up to the first that needs a closer look."""
        # Each group is checked as `Consumer` does it, and gets its new state. Returns how many.
        return self.leases.end_groups(consumer, groups, reason, state)

    def recall(self) -> None:
        """Give back the groups that were asked ahead: an older one is delivered before them now."""
        if self.state.open_take is None and not self.leases.ready:
            return
        try:
            with self.lock:
                id_, self.state.open_take = self.state.open_take, None
                wire = self.connection.wire
            if id_ is not None and wire is not None:
                reply = self.connection.late_reply(wire, id_, REPLY_GRACE_S)
                if isinstance(reply, messages.Leases):
                    self.borrow(reply, wire)
                elif reply is None and wire is self.connection.wire:
                    self.state.open_take = id_
            with self.lock:
                self._tell_given_back(self.leases.give_back_ready())
        except BaseException:
            self.connection.doubtful = True
            self.connection.abandon()
            raise

    def give_back_group(self, consumer: object, group: _core.GroupBase, state: str) -> bool:
        """Make a leased group the next to be delivered, to whichever client asks first."""
        try:
            numbers = self.leases.give_back_group(consumer, group, state)
            if numbers is None:
                return False
            self._tell_given_back(numbers)
            return True
        except BaseException:
            self.connection.doubtful = True
            self.connection.abandon()
            raise

    def give_back(self, lease: ClientLease) -> None:
        """Give back a lease that was lost with its daemon: others have it already."""

    def _tell_given_back(self, numbers: list[int]) -> None:
        if numbers:
            self.connection.send(messages.GiveBack(numbers=numbers))

    def flush(self) -> None:
        """Tell the daemon which leases have ended. An unreachable one learns it from the claim."""
        try:
            with self.lock:
                self.connection.send(*self.leases.unsent_ends())
                if self.leases.unconfirmed > limits.UNCONFIRMED:
                    self.connection.receive_pending()
        except errors.DaemonUnavailableError:
            raise
        except BaseException:
            self.connection.doubtful = True
            self.connection.abandon()
            raise

    # -- state ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version: a read of shared memory."""
        return self.segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._demand(lambda id_: messages.SetPolicyVersion(id=id_, policy_version=version))

    def stats(self) -> Ledger:
        """Return the daemon's ledger."""
        reply = self._demand(lambda id_: messages.GetLedger(id=id_))
        assert isinstance(reply, messages.LedgerReply)
        return reply.ledger

    def note_trained(self, leases: list[ClientLease], step: int) -> None:
        """Tell the daemon as which step groups are trained."""
        if not self.connection.ranked:
            return
        # A daemon that is away learns it from the claim.
        with self.lock, contextlib.suppress(errors.DaemonUnavailableError):
            self.connection.send(self.leases.note_trained(leases, step))

    def trained_before(self, step: int) -> TrainedBefore:
        """Return what all ranks have trained before this step and is on the bus."""
        names: set[bytes] = set()
        groups: list[tuple[str, int | None, str]] = []
        after, more = b"", True
        while more:
            ask = messages.GetTrained(id=0, step=step, after=after)
            reply = self._demand(functools.partial(_with_id, ask))
            assert isinstance(reply, messages.TrainedReply)
            names |= messages.split_names(reply.names)
            groups += reply.groups
            after, more = reply.names[-messages.NAME_BYTES :], reply.more
        return TrainedBefore(names, groups)

    def end_trained(self, origins: set[bytes]) -> None:
        """Have the daemon end what a checkpoint counts as trained, and the one after it too."""
        self.recall()
        packed = b"".join(sorted(origins))
        with self.lock:
            self.state.trained = packed
        for message in end_trained_messages(packed) or [messages.EndTrained(id=0, names=b"")]:
            self._demand(functools.partial(_with_id, message))

    def _demand(self, make: Callable[[int], messages.Request]) -> messages.Reply:
        """Send a request that the daemon answers immediately, and return the reply."""
        began = time.monotonic()
        deadline = began + limits.CLIENT_WAIT_S
        try:
            answer = self.connection.request(make, deadline, limits.CLIENT_WAIT_S, takes=False)
        except errors.DaemonUnavailableError:
            raise
        except BaseException:
            # Nobody waits for that reply any more.
            self.connection.doubtful = True
            self.connection.abandon()
            raise
        if answer is None:
            raise self.connection.unavailable(time.monotonic() - began)
        if isinstance(answer[0], messages.Refused):
            raise refusal(answer[0])
        return answer[0]

    def close(self) -> None:
        """Leave. Groups that are not ended are the next to be delivered; arrays stay valid."""
        self.connection.close()


def _with_id(message: messages.Request, id_: int) -> messages.Request:
    return msgspec.structs.replace(message, id=id_)
