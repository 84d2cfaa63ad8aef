"""A process's leases from a daemon, and the open part of its dialogue with the daemon.

`ClientState` is plain data: requests in flight, unconsumed replies, received leases, and
unconfirmed ends. No second copy exists, so an exception of a signal handler loses nothing. `Leases`
changes the part about leases, without a socket: it returns the messages for the daemon, and takes
the daemon's replies.

Invariants:

- A lease is held, ended but not confirmed (`ClientLease.reason`), or forgotten. Its extents stay
  under this client's lease locks until the daemon confirms the end: after the daemon's death, the
  next daemon learns from these locks which extents are in use.
- A lease number is valid on a single connection. After a reconnect, `claims` and `learn` renumber
  every lease before any other request.
- A lease is locked, known and ready in a single call of C, and handed out in another. In between it
  lies in `ready`; later a group holds it, and returns it if the group dies on its way.
- Every caller here and of the borrower, except of `hand_out`, holds `ClientState.lock`.
"""

from __future__ import annotations

import threading
from typing import TypeVar

from shmbus import errors
from shmbus.base import limits
from shmbus.control import messages
from shmbus_ext import _core

ClientLease = _core.ClientLease
_G = TypeVar("_G", bound=_core.GroupBase)

#: Lease numbers in one End message; far below the bound on a message.
_NUMBERS = 65_536

#: Bytes of a group in a Claim besides its identities.
_CLAIM_BYTES = 64


class Pending:
    """A request in flight."""

    __slots__ = ("reply", "wake")

    def __init__(self) -> None:
        #: Set on receipt.
        self.reply: messages.Reply | None = None
        #: The sleeping thread's lock while another thread reads: released for a new look.
        self.wake: threading.Lock | None = None

    def wake_up(self) -> None:
        """Wake the request's thread, if asleep. The caller holds the state's lock."""
        if self.wake is not None and self.wake.locked():
            self.wake.release()


class ClientState:
    """Open requests and leases of this process and its daemon, as data."""

    __slots__ = (
        "last_id", "leases", "lock", "next_step", "open_take", "replies", "to_end", "trained",
        "trained_at",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Guards this state and the connection. Not held while a thread sleeps.
        self.lock = threading.RLock()
        #: Requests in flight by id, until their thread consumes the reply. Empty after a reconnect:
        #: waiting threads ask again.
        self.replies: dict[int, Pending] = {}
        self.last_id = 0
        #: Id of a request for groups without a waiting thread: asked ahead, or abandoned at its
        #: caller's timeout. The next take waits for this reply instead of asking again.
        self.open_take: int | None = None
        #: Every lease by number: handed out, ready, or ended and unconfirmed.
        self.leases: dict[int, ClientLease] = {}
        #: Ended leases not yet reported to the daemon, by reason.
        self.to_end: dict[int, list[int]] = {}
        #: This rank's next step.
        self.next_step = 0
        #: Lasting names trained according to a loaded checkpoint; reported to each daemon.
        self.trained = b""
        #: The trained step of held leases.
        self.trained_at: dict[ClientLease, int] = {}

    def new_request(self) -> int:
        """Return the id of a new request, with its reply expected from now."""
        self.last_id += 1
        self.replies[self.last_id] = Pending()
        return self.last_id


class Leases:
    """The groups leased by a daemon to this process."""

    def __init__(self, segment: _core.Segment, state: ClientState) -> None:
        self._state = state
        #: Holds the locks: ready leases, and ended leases without the daemon's confirmation.
        self.borrower = _core.Borrower(segment)
        #: This process's number at the daemon; -1 before the first Welcome.
        self.client = -1

    # -- received -------------------------------------------------------------------------------

    def receive(self, granted: messages.Leases, fd: int) -> list[ClientLease]:
        """Lock, read and keep granted leases; they are then ready to be handed out."""
        # The daemon read these groups whole: a group missing from the segment was damaged by a
        # process with write access. Damaged groups are ended.
        state = self._state
        leases, refused = self.borrower.receive(granted.groups, granted.step, state.leases, fd)
        if refused:
            state.to_end.setdefault(_core.DROP_CORRUPT, []).extend(refused)
        if leases and granted.step >= state.next_step:
            state.next_step = granted.step + 1
        return leases

    @property
    def next_step(self) -> int:
        """The next step of this rank, as reported to a daemon."""
        known = self._state.leases.values()
        return max([self._state.next_step, *(1 + lease.step for lease in known)])

    # -- trained --------------------------------------------------------------------------------

    def note_trained(self, leases: list[ClientLease], step: int) -> messages.Trained:
        """Note the trained step of held groups; return the message for the daemon."""
        known = self._state.leases
        at = self._state.trained_at
        self._state.trained_at = {x: at[x] for x in at if known.get(x.number) is x}
        self._state.trained_at.update(dict.fromkeys(leases, step))
        return messages.Trained(numbers=[lease.number for lease in leases], step=step)

    # -- ended ----------------------------------------------------------------------------------

    def is_leased(self, lease: ClientLease) -> bool:
        """Return True for a living lease of this client."""
        known = self._state.leases.get(lease.number) is lease
        return bool(lease.lost or (known and lease.reason == _core.LEASE_HELD))

    def end(self, lease: ClientLease, reason: int) -> None:
        """End a lease."""
        if lease.lost:
            raise errors.ProtocolError(
                f"group {lease.key!r}: its lease ended with its daemon, and this process reached "
                "the next daemon too late; a second consumer may have the group: discard the "
                "results computed from it"
            )
        self.borrower.end(lease, reason)
        self._state.to_end.setdefault(reason, []).append(lease.number)

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End leases of groups, up to the first not held here; return the number."""
        numbers = self._state.to_end.setdefault(reason, [])
        return self.borrower.end_groups(consumer, groups, reason, state, numbers)

    def unsent_ends(self) -> list[messages.End]:
        """Return unreported ends; they count as reported from now."""
        state = self._state
        to_end, state.to_end = state.to_end, {}
        return [
            messages.End(numbers=numbers[at : at + _NUMBERS], reason=reason)
            for reason, numbers in to_end.items()
            for at in range(0, len(numbers), _NUMBERS)
        ]

    def give_back_group(
        self, consumer: object, group: _core.GroupBase, state: str
    ) -> list[int] | None:
        """Forget the lease of a group for other consumers, and set the group's new state."""
        # Returns the numbers for the daemon, or None if this consumer does not hold the group.
        # Without locks, a daemon started before the report also delivers the group.
        number = self.borrower.give_back_group(consumer, group, state, self._state.leases)
        return None if number is None else [number]

    # -- after a reconnect ----------------------------------------------------------------------

    def set_client(self, client: int) -> None:
        """Take the daemon's number, and move every lease lock to it."""
        if client != self.borrower.client:
            self.borrower.set_client(client)
        self.client = client

    def claims(self) -> tuple[dict[int, ClientLease], list[messages.Claim]]:
        """Return leases by token, held or unconfirmed, and their claim messages."""
        tokens = dict(enumerate(self._state.leases.values()))
        portions: list[list[messages.Held]] = [[]]
        size = 0
        for token, lease in tokens.items():
            held = messages.Held(
                token=token,
                identities=_core.identities(lease.samples),
                reason=lease.reason,
                step=lease.step,
                trained_at=self._state.trained_at.get(lease, -1),
            )
            size += len(held.identities) + _CLAIM_BYTES
            if size > limits.MAX_MESSAGE_BYTES // 2:
                portions.append([])
                size = len(held.identities) + _CLAIM_BYTES
            portions[-1].append(held)
        return tokens, [messages.Claim(groups=p, last=p is portions[-1]) for p in portions]

    def learn(
        self,
        claimed: messages.Claimed,
        tokens: dict[int, ClientLease],
        kept: dict[int, ClientLease],
    ) -> None:
        """Move the leases answered by Claimed out of `tokens`; living leases go into `kept`."""
        for token, number in claimed.kept:
            kept[number] = tokens.pop(token)
        over = [tokens.pop(token) for token in [*claimed.ended, *claimed.lost]]
        for lease in over:
            lease.lost = lease.reason == _core.LEASE_HELD
        self.borrower.forget(over)

    def reclaimed(self, kept: dict[int, ClientLease]) -> None:
        """Replace every lease by the new daemon's leases; every end is confirmed."""
        for number, lease in kept.items():
            lease.number = number
        self._state.leases = kept
        self._state.to_end = {}

    @_core.finalizer
    def __del__(self) -> None:
        # Each lease refers to the list's owner.
        ready = self.borrower.ready if hasattr(self, "borrower") else None
        if ready is not None:
            ready.clear()
