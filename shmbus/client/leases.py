"""The client of a daemon: the Source of a Consumer whose bus a daemon serves.

Invariants:

- What was asked for ahead is delivered before anything newer, or given back before anything older.
- Nobody waits longer than asked and a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shmbus import errors, limits
from shmbus.client.connection import Link
from shmbus.control import messages
from shmbus.control.wire import DaemonUnreachable, Wire
from shmbus.ledger import Ledger
from shmbus_ext import _core

__all__ = ["DaemonClient"]

ClientLease = _core.ClientLease

#: Numbers in one End message; far below the bound on a message.
_NUMBERS = 65_536


class DaemonClient(Link):
    """What a Consumer asks of its daemon; parameters and errors are those of `Link`."""

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
                    id=id_,
                    max_groups=max_groups,
                    timeout_s=slice_s,
                    gathers=self._borrower.packs,
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
                    messages.Take(
                        id=self._ids,
                        max_groups=max_groups,
                        timeout_s=0.0,
                        ahead=True,
                        gathers=self._borrower.packs,
                    )
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
            except DaemonUnreachable as error:
                self._broken(wire, error)
                reply = None
            if isinstance(reply, messages.Leases):
                spare += self._borrow(reply, wire)
        self._give_back(spare)

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
                gathers=self._borrower.packs,
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
            answer = self._ask(
                lambda id_, left=left: make(id_, left),  # type: ignore[misc]
                deadline,
                left + limits.TAKE_GRACE_S,
                takes=True,
            )
            reply = None if answer is None else answer[0]
            if answer is not None and isinstance(reply, messages.Leases) and reply.groups:
                if ahead and len(reply.groups) == ahead:
                    self._ask_ahead(ahead)
                leases = self._borrow(reply, answer[1])
                if leases:
                    return leases
            elif deadline is not None and time.monotonic() >= deadline:
                return []

    def _borrow(self, reply: messages.Leases, wire: Wire) -> list[ClientLease]:
        with self.lock:
            if wire is not self._wire:
                # Never claimed, so the next daemon delivers them, under other numbers.
                return []
            leases, refused = self._borrower.borrow(reply.groups, reply.step)
            if wire.is_over():
                # The next daemon may have looked at the locks before they were there.
                for lease in leases:
                    self._borrower.end(lease, _core.LEASE_HELD)
                self._borrower.forget(leases)
                return []
            for lease in leases:
                self._leases[lease.number] = lease
            if refused:
                # They were whole when the daemon read them: a process that may write scribbled it.
                self._to_end.setdefault(_core.DROP_CORRUPT, []).extend(refused)
            if reply.step >= self.next_step:
                self.next_step = reply.step + 1
            if self._to_end:
                self.flush()
        return leases

    # -- ending leases --------------------------------------------------------------------------

    def is_leased(self, lease: Any) -> bool:
        """Whether the daemon gave this lease to this client, and it has not ended."""
        known = self._leases.get(lease.number) is lease
        return bool(lease.lost or (known and lease.reason == _core.LEASE_HELD))

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End the leases of groups up to the first for which that is not so simple; how many."""
        numbers = self._to_end.setdefault(reason, [])
        before = len(numbers)
        try:
            return self._borrower.end_groups(consumer, groups, reason, state, numbers)
        finally:
            self._unconfirmed += len(numbers) - before

    def end(self, lease: ClientLease, reason: int) -> None:
        """End a lease; `flush` says so to the daemon, which may be away."""
        if lease.lost:
            raise errors.ProtocolError(
                f"group {lease.key!r}: the daemon that leased it is gone, and this process came "
                "back to the next one too late; it may have been delivered to another"
            )
        self._borrower.end(lease, reason)
        self._unconfirmed += 1
        self._to_end.setdefault(reason, []).append(lease.number)

    def give_back(self, lease: ClientLease) -> None:
        """Make a leased group the next to be delivered, to whoever asks."""
        if self._late is not None or self._spare:
            self._return_ahead()
        self._give_back([lease])

    def _give_back(self, leases: list[ClientLease]) -> None:
        leases = [lease for lease in leases if not lease.lost]
        for lease in leases:
            self._borrower.end(lease, _core.LEASE_HELD)
            del self._leases[lease.number]
        if leases:
            # With no lock on them, a daemon that comes next delivers them too.
            self._borrower.forget(leases)
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
            if self._unconfirmed > limits.UNCONFIRMED and not self._reading:
                self._hear()

    def _send(self, *requests: messages.Request) -> None:
        wire = self._wire
        if wire is None:
            if time.monotonic() > self._away_since_s + limits.CLIENT_WAIT_S:
                raise self.unavailable(time.monotonic() - self._away_since_s)
            return
        try:
            wire.send(*requests)
        except DaemonUnreachable as error:
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
        except DaemonUnreachable as error:
            self._broken(wire, error)

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
        began = time.monotonic()
        deadline = began + limits.CLIENT_WAIT_S
        answer = self._ask(make, deadline, limits.CLIENT_WAIT_S, takes=False)
        if answer is None:
            raise self.unavailable(time.monotonic() - began)
        return answer[0]
