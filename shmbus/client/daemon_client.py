"""DaemonClient: the Source of a Consumer whose bus is served by a daemon.

It is made of two parts: a `Connection`, which knows the socket and no leases, and `Leases`, which
knows the leases and no socket. What both have open is in one `ClientState`.

Invariants:

- Groups that were asked ahead are handed out before any newer ones, or given back before an older
  group is.
- No call lasts longer than its timeout and TAKE_GRACE_S.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from shmbus import errors, limits
from shmbus.client.connection import REPLY_GRACE_S, Connection
from shmbus.client.leases import ClientLease, ClientState, Leases
from shmbus.control import messages
from shmbus.control.wire import Wire
from shmbus.ledger import Ledger
from shmbus.segment import lifecycle
from shmbus_ext import _core

__all__ = ["DaemonClient"]

#: Groups of a take from which on the next portion is requested ahead: a smaller take wants few.
_AHEAD_GROUPS = 16


class DaemonClient:
    """Attaches to the daemon that serves a bus, and leases groups from it.

    Parameters
    ----------
    name : str
        The bus.
    policy : dict[str, Any]
        Options of the stash that must be the daemon's too, by the names of Consumer.
    label : str
        How other processes' messages name this one.
    rank, world_size : int
        Which of how many trainer processes this is.

    Attributes
    ----------
    state : ClientState
        Requests, replies, leases and ends that are open with the daemon.
    connection : Connection
        To the daemon, and after its death to the next one.
    leases : Leases
        What this process holds.

    Raises
    ------
    DaemonUnreachable
        No daemon answers; the caller knows whether to wait.
    BusNotFoundError, BusBusyError, LayoutMismatchError, ProtocolError, ValueError
        There is no such bus, the rank is taken, another layout or version, other options.
    """

    def __init__(
        self, name: str, policy: dict[str, Any], label: str, rank: int = 0, world_size: int = 1
    ) -> None:
        self.segment = lifecycle.open_segment(name, read_only=True)
        self._pid = os.getpid()
        self.state = ClientState()
        self.lock = self.state.lock
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
        )
        try:
            self.connection = Connection(hello, self.state, self.leases)
        except BaseException:
            self.leases.close()
            raise

    def require(self) -> None:
        """Raise BusClosedError in a child of the process that attached."""
        if os.getpid() != self._pid:
            raise errors.BusClosedError(
                f"bus {self.segment.name!r}: this Consumer was made in another process, before a "
                "fork; make a new one in this process"
            )

    # -- taking ---------------------------------------------------------------------------------

    def take(self, max_groups: int, timeout: float | None) -> list[ClientLease]:
        """Lease complete groups; wait up to `timeout` seconds for the first.

        After a large reply with all that was asked for, the next groups are asked ahead, so that
        the daemon prepares them while the caller works.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            leases = self.leases.take_spare(max_groups)
        if leases:
            return leases
        leases = self._take_until(
            deadline,
            lambda id_, slice_s: messages.Take(
                id=id_,
                max_groups=max_groups,
                timeout_s=slice_s,
                gathers=self.leases.gathers,
            ),
            max_groups if max_groups >= _AHEAD_GROUPS else 0,
        )
        if len(leases) > max_groups:
            # The reply to a larger take that was late.
            with self.lock:
                self.state.spare = leases[max_groups:]
                leases = leases[:max_groups]
        return leases

    def take_step(
        self,
        *,
        groups: int | None,
        tokens: int | None,
        max_wait: float | None,
        field: str,
        timeout: float | None,
        only_full: bool,
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
                only_full=only_full,
                gathers=self.leases.gathers,
            ),
        )

    def _take_until(
        self,
        deadline: float | None,
        make: Callable[[int, float], messages.Request],
        ahead: int = 0,
    ) -> list[ClientLease]:
        """Ask again and again until there are groups; `ahead` is how many to ask ahead then."""
        while True:
            left = limits.TAKE_SLICE_S
            if deadline is not None:
                left = min(left, max(deadline - time.monotonic(), 0.0))
            answer = self.connection.request(
                lambda id_, left=left: make(id_, left),  # type: ignore[misc]
                deadline,
                left + REPLY_GRACE_S,
                takes=True,
            )
            reply = None if answer is None else answer[0]
            if answer is not None and isinstance(reply, messages.Leases) and reply.groups:
                if ahead and len(reply.groups) == ahead:
                    self._ask_ahead(ahead)
                leases = self.borrow(reply, answer[1])
                if leases:
                    return leases
            elif deadline is not None and time.monotonic() >= deadline:
                return []

    def borrow(self, reply: messages.Leases, wire: Wire) -> list[ClientLease]:
        """Turn what the daemon granted into leases of this process; empty if it died since."""
        with self.lock:
            if wire is not self.connection.wire:
                # Never claimed, so the next daemon delivers them under other numbers.
                return []
            leases, refused = self.leases.borrow(reply)
            if wire.is_over():
                # The next daemon may have read the locks before these were there.
                self.leases.disown(leases)
                return []
            self.leases.keep(leases, refused, reply.step)
            if self.state.to_end:
                self.flush()
        return leases

    def _ask_ahead(self, max_groups: int) -> None:
        state = self.state
        with self.lock:
            if state.open_take is None and self.connection.wire is not None:
                state.open_take = id_ = state.new_request()
                self.connection.send(
                    messages.Take(
                        id=id_,
                        max_groups=max_groups,
                        timeout_s=0.0,
                        ahead=True,
                        gathers=self.leases.gathers,
                    )
                )

    def _return_ahead(self) -> None:
        """Give back the groups that were asked ahead: an older one is delivered before them now."""
        state = self.state
        with self.lock:
            id_, state.open_take = state.open_take, None
            spare, state.spare = state.spare, []
            wire = self.connection.wire
        if id_ is not None and wire is not None:
            reply = self.connection.late_reply(wire, id_, REPLY_GRACE_S)
            if isinstance(reply, messages.Leases):
                spare += self.borrow(reply, wire)
        self._give_back(spare)

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
        """End the leases of groups in one call, up to the first that needs a closer look.

        Each group is checked as `Consumer` does it, and gets its new state. Returns how many.
        """
        return self.leases.end_groups(consumer, groups, reason, state)

    def give_back_group(self, consumer: object, group: _core.GroupBase, state: str) -> bool:
        """Leave it to `give_back`: the daemon has to be told."""
        return False

    def give_back(self, lease: ClientLease) -> None:
        """Make a leased group the next to be delivered, to whichever client asks first."""
        if self.state.open_take is not None or self.state.spare:
            self._return_ahead()
        self._give_back([lease])

    def _give_back(self, leases: list[ClientLease]) -> None:
        numbers = self.leases.give_back(leases)
        if numbers:
            self.connection.send(messages.GiveBack(numbers=numbers))

    def flush(self) -> None:
        """Tell the daemon which leases have ended. An unreachable one learns it from the claim."""
        with self.lock:
            self.connection.send(*self.leases.unsent_ends())
            if self.state.unconfirmed > limits.UNCONFIRMED:
                self.connection.receive_pending()

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

    def _demand(self, make: Callable[[int], messages.Request]) -> messages.Reply:
        """Send a request that the daemon answers immediately, and return the reply."""
        began = time.monotonic()
        deadline = began + limits.CLIENT_WAIT_S
        answer = self.connection.request(make, deadline, limits.CLIENT_WAIT_S, takes=False)
        if answer is None:
            raise self.connection.unavailable(time.monotonic() - began)
        return answer[0]

    def close(self) -> None:
        """Leave. Groups that are not ended are the next to be delivered; arrays stay valid."""
        self.connection.close()
