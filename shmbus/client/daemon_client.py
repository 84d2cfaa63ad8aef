"""DaemonClient: the Source of a Consumer on a bus with a daemon.

Two parts: a `Connection` with a socket and no leases, and `Leases` without a socket. A shared
`ClientState` holds their open requests.

Invariants:

- Groups asked ahead are handed out before newer groups, or given back before an older group is
  given back.
- No call exceeds its timeout plus REPLY_GRACE_S.
- An interruption between a request and the leases of its reply, or between a lease's end here and
  its message, ends the connection, except for the daemon's own errors. The next connection's claim
  reports the truth.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import TRAIN
from shmbus.base.ledger import Ledger, TrainedBefore
from shmbus.client.connection import REPLY_GRACE_S, Connection, end_trained_messages
from shmbus.client.leases import ClientLease, ClientState, Leases
from shmbus.control import messages
from shmbus.control.wire import Wire, refusal
from shmbus.segment import lifecycle
from shmbus_ext import _core

#: Least size of a take for a request ahead: smaller takes want few groups.
_AHEAD_GROUPS = 16

_G = TypeVar("_G", bound=_core.GroupBase)


class DaemonClient:
    """Attaches to the daemon of a bus (`attach`), and leases groups from it."""

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
        #: Open requests, replies, leases and ends.
        self.state = ClientState()
        self.lock = self.state.lock
        #: This process's leases.
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
        #: To the daemon, and after its death to the next.
        self.connection = Connection(hello, self.state, self.leases, self.segment)

    def attach(self) -> None:
        """Connect; after an exception nothing is attached, and the object is unusable."""
        self.connection.attach()

    def require(self) -> None:
        """Raise BusClosedError in a child of the attaching process."""
        if os.getpid() != self._pid:
            raise errors.BusClosedError(
                f"bus {self.segment.name!r}: this Consumer was made in another process, before a "
                "fork; make a new one in this process"
            )

    # -- taking ---------------------------------------------------------------------------------

    def receive(self, max_groups: int, timeout: float | None) -> bool:
        """Wait for leases to hand out; return False at the timeout."""
        # After a full large reply the next groups are asked ahead: the daemon prepares them while
        # the caller works.
        if self.leases.borrower.ready:
            return True
        return self._receive_until(
            timeout,
            lambda id_, slice_s: messages.Take(
                id=id_,
                max_groups=max_groups,
                timeout_s=slice_s,
                gathers=self.leases.borrower.packs,
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
        return bool(self.leases.borrower.ready) or self._receive_until(
            timeout,
            lambda id_, slice_s: messages.TakeStep(
                id=id_,
                groups=groups,
                tokens=tokens,
                max_wait_s=max_wait,
                field=field,
                timeout_s=slice_s,
                only_full=only_full,
                gathers=self.leases.borrower.packs,
            ),
        )

    def hand_out(self, kind: type[_G], consumer: object, limit: int) -> list[_G]:
        """Make groups of received leases; empty if another thread took them."""
        # Callers return the groups without keeping them: a group lost on its way is ready again.
        return self.leases.borrower.hand_out(kind, consumer, limit)

    def _receive_until(
        self, timeout: float | None, make: Callable[[int, float], messages.Request], ahead: int = 0
    ) -> bool:
        """Ask until groups arrive; `ahead` is the number to ask ahead then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        # An old answer, asked ahead or abandoned, tells nothing about now.
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
            if self.leases.borrower.ready:
                return True
            # A removed bus still delivers its groups, and will get no more.
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
        """Ask once; granted groups are ready when the call returns."""
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
        """Turn granted groups into leases of this process; empty if the daemon died since."""
        if not reply.groups:
            return []
        with self.lock:
            if wire is not self.connection.wire:
                # Never claimed: the next daemon delivers them under new numbers.
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
                        gathers=self.leases.borrower.packs,
                    )
                )

    # -- ending leases --------------------------------------------------------------------------

    def is_leased(self, lease: Any) -> bool:
        """Return True for a living lease of this client."""
        return self.leases.is_leased(lease)

    def end(self, lease: ClientLease, reason: int) -> None:
        """End a lease; `flush` tells the daemon."""
        self.leases.end(lease, reason)

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End the leases of groups in a single call, up to the first special case."""
        # Checks each group like `Consumer`, and sets its new state; returns the number.
        return self.leases.end_groups(consumer, groups, reason, state)

    def recall(self) -> None:
        """Give back the groups asked ahead, for an older group to come first."""
        if self.state.open_take is None and not self.leases.borrower.ready:
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
                self._tell_given_back(self.leases.borrower.give_back_ready(self.state.leases))
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
        """Give back a lease lost with its daemon: another consumer may hold it already."""

    def _tell_given_back(self, numbers: list[int]) -> None:
        if numbers:
            self.connection.send(messages.GiveBack(numbers=numbers))

    def flush(self) -> None:
        """Report ended leases to the daemon; an unreachable daemon learns them from the claim."""
        try:
            with self.lock:
                self.connection.send(*self.leases.unsent_ends())
                if self.leases.borrower.unconfirmed > limits.UNCONFIRMED:
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

    def stats(self, timeout: float | None = None) -> Ledger:
        """Return the daemon's ledger."""
        reply = self._demand(lambda id_: messages.GetLedger(id=id_), timeout)
        assert isinstance(reply, messages.LedgerReply)
        return reply.ledger

    def note_trained(self, leases: list[ClientLease], step: int) -> None:
        """Report the trained step of groups to the daemon."""
        if not self.connection.ranked:
            return
        # An absent daemon learns the step from the claim.
        with self.lock, contextlib.suppress(errors.DaemonUnavailableError):
            self.connection.send(self.leases.note_trained(leases, step))

    def trained_before(self, step: int) -> TrainedBefore:
        """Return the samples on the bus trained by any rank before this step."""
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
        """Have the daemon, and its successors, end samples trained according to a checkpoint."""
        self.recall()
        packed = b"".join(sorted(origins))
        with self.lock:
            self.state.trained = packed
        for message in end_trained_messages(packed) or [messages.EndTrained(id=0, names=b"")]:
            self._demand(functools.partial(_with_id, message))

    def _demand(
        self, make: Callable[[int], messages.Request], timeout: float | None = None
    ) -> messages.Reply:
        """Send a request that the daemon answers immediately, and return the reply."""
        began = time.monotonic()
        wait_s = limits.CLIENT_WAIT_S if timeout is None else timeout
        try:
            answer = self.connection.request(make, began + wait_s, wait_s, takes=False)
        except errors.DaemonUnavailableError:
            raise
        except BaseException:
            # No thread waits for the reply any longer.
            self.connection.doubtful = True
            self.connection.abandon()
            raise
        if answer is None:
            raise self.connection.unavailable(time.monotonic() - began)
        if isinstance(answer[0], messages.Refused):
            raise refusal(answer[0])
        return answer[0]

    def close(self) -> None:
        """Leave. Living leases are delivered next; arrays stay valid."""
        self.connection.close()


def _with_id(message: messages.Request, id_: int) -> messages.Request:
    return msgspec.structs.replace(message, id=id_)
