"""The leases that this process holds from a daemon, and what its dialogue with the daemon has open.

`ClientState` is plain data: which requests are in flight, which replies nobody has consumed, which
leases were received but not handed out, and which ends the daemon has not confirmed. Nothing of
this is kept anywhere else. `Leases` changes the part that concerns leases. It knows no socket: it
returns the messages that the daemon has to be told, and is told what the daemon said.

Invariants:

- A lease is held, ended but not confirmed (`ClientLease.reason`), or forgotten. Its extents stay
  under this client's lease locks until the daemon has confirmed its end: after the daemon's death,
  the next one learns from these locks what is still in use.
- A lease number is valid on one connection only. After a reconnect, `claims` and `learn` give every
  lease its new number before anything else is asked.
- `ClientState.lock` is held by every caller of a method here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from shmbus import errors, limits
from shmbus.control import messages
from shmbus_ext import _core

__all__ = ["ClientLease", "ClientState", "Leases"]

ClientLease = _core.ClientLease

#: Lease numbers in one End message; far below the bound on a message.
_NUMBERS = 65_536

#: Bytes of a group in a Claim besides its identities.
_CLAIM_BYTES = 64


class ClientState:
    """What is open between this process and its daemon, as data.

    Attributes
    ----------
    lock : RLock
        Guards everything here, and the connection. It is not held while a thread sleeps.
    replies : dict[int, Reply | None]
        Requests in flight by id: None until the reply has been received, then the reply until the
        thread that asked consumes it. Empty after a reconnect: whoever waits asks again.
    open_take : int | None
        The id of a request for groups whose reply no thread waits for: it was asked ahead, or its
        caller's time was over. The next take waits for this reply instead of asking again.
    spare : list[ClientLease]
        Leases that were received and not handed out: the next to be handed out.
    leases : dict[int, ClientLease]
        All leases by number: handed out, spare, or ended and not confirmed.
    unconfirmed : int
        How many of `leases` have ended.
    to_end : dict[int, list[int]]
        Numbers of ended leases that the daemon has not been told, by reason.
    next_step : int
        The step that this rank takes next.
    """

    __slots__ = (
        "last_id",
        "leases",
        "lock",
        "next_step",
        "open_take",
        "replies",
        "spare",
        "to_end",
        "unconfirmed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.replies: dict[int, messages.Reply | None] = {}
        self.last_id = 0
        self.open_take: int | None = None
        self.spare: list[ClientLease] = []
        self.leases: dict[int, ClientLease] = {}
        self.unconfirmed = 0
        self.to_end: dict[int, list[int]] = {}
        self.next_step = 0

    def new_request(self) -> int:
        """Return the id of a request that is about to be sent; its reply is expected from now."""
        self.last_id += 1
        self.replies[self.last_id] = None
        return self.last_id


class Leases:
    """The groups that a daemon leased to this process.

    Parameters
    ----------
    segment : Segment
        The bus's, mapped read-only.
    state : ClientState
        Where they are kept.

    Attributes
    ----------
    client : int
        The number under which the daemon knows this process; -1 before the first Welcome.
    """

    def __init__(self, segment: _core.Segment, state: ClientState) -> None:
        self._state = state
        self._borrower = _core.Borrower(segment)
        self.client = -1

    # -- received -------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Whether this process packs payload of the bus into batches; each take says so."""
        return self._borrower.packs

    def borrow(self, granted: messages.Leases) -> tuple[list[ClientLease], list[int]]:
        """Lock and read what the daemon has granted; neither is kept before `keep`.

        Returns
        -------
        tuple[list[ClientLease], list[int]]
            The leases, and the numbers of groups that are not in the segment. Those were whole
            when the daemon read them, so a process with write access has damaged them.
        """
        return self._borrower.borrow(granted.groups, granted.step)

    def keep(self, leases: list[ClientLease], refused: list[int], step: int) -> None:
        """Hold what was borrowed, and end what is damaged."""
        state = self._state
        for lease in leases:
            state.leases[lease.number] = lease
        if refused:
            state.to_end.setdefault(_core.DROP_CORRUPT, []).extend(refused)
        if step >= state.next_step:
            state.next_step = step + 1

    def disown(self, leases: list[ClientLease]) -> None:
        """Unlock leases that the daemon takes back, or never knew that this process has."""
        for lease in leases:
            self._borrower.end(lease, _core.LEASE_HELD)
        self._borrower.forget(leases)

    def take_spare(self, max_groups: int) -> list[ClientLease]:
        """Hand out what was received before and nobody has."""
        state = self._state
        leases, state.spare = state.spare[:max_groups], state.spare[max_groups:]
        return [lease for lease in leases if not lease.lost]

    # -- ended ----------------------------------------------------------------------------------

    def is_leased(self, lease: ClientLease) -> bool:
        """Whether the daemon leased this to this client, and the lease has not ended."""
        known = self._state.leases.get(lease.number) is lease
        return bool(lease.lost or (known and lease.reason == _core.LEASE_HELD))

    def end(self, lease: ClientLease, reason: int) -> None:
        """End one lease.

        Raises
        ------
        ProtocolError
            It was lost with its daemon.
        """
        if lease.lost:
            raise errors.ProtocolError(
                f"group {lease.key!r}: the daemon that leased it is gone, and this process reached "
                "the next one too late; it may have been delivered to another consumer: do not use "
                "what was computed from it"
            )
        self._borrower.end(lease, reason)
        self._state.unconfirmed += 1
        self._state.to_end.setdefault(reason, []).append(lease.number)

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End the leases of groups in one call, up to the first that this consumer does not hold.

        Each ended group gets its new state. Returns how many that are.
        """
        numbers = self._state.to_end.setdefault(reason, [])
        before = len(numbers)
        try:
            return self._borrower.end_groups(consumer, groups, reason, state, numbers)
        finally:
            self._state.unconfirmed += len(numbers) - before

    def unsent_ends(self) -> Iterator[messages.End]:
        """Yield what the daemon has not been told; it counts as told from now."""
        state = self._state
        to_end, state.to_end = state.to_end, {}
        for reason, numbers in to_end.items():
            for at in range(0, len(numbers), _NUMBERS):
                yield messages.End(numbers=numbers[at : at + _NUMBERS], reason=reason)

    def confirmed(self, numbers: list[int]) -> None:
        """Forget ended leases, now that the daemon has released them."""
        state = self._state
        # A group that was given back is confirmed, too, and is not known here any more.
        over = [
            lease
            for n in numbers
            if (lease := state.leases.get(n)) and lease.reason != _core.LEASE_HELD
        ]
        for lease in over:
            del state.leases[lease.number]
        state.unconfirmed -= len(over)
        self._borrower.forget(over)

    def give_back(self, leases: list[ClientLease]) -> list[int]:
        """Forget leases that others shall have; return the numbers that the daemon has to know.

        Without locks they are also delivered by a daemon that starts before it was told.
        """
        leases = [lease for lease in leases if not lease.lost]
        for lease in leases:
            del self._state.leases[lease.number]
        self.disown(leases)
        return [lease.number for lease in leases]

    # -- after a reconnect ----------------------------------------------------------------------

    def set_client(self, client: int) -> None:
        """Take the number that the daemon gave, and move the locks of all leases to it."""
        if client != self._borrower.client:
            self._borrower.set_client(client)
        self.client = client

    def claims(self) -> tuple[dict[int, ClientLease], list[messages.Claim]]:
        """Return all leases, held or not confirmed, by token, and the messages that claim them."""
        tokens = dict(enumerate(self._state.leases.values()))
        portions: list[list[messages.Held]] = [[]]
        size = 0
        for token, lease in tokens.items():
            held = messages.Held(
                token=token,
                identities=_core.identities(lease.samples),
                reason=lease.reason,
                step=lease.step,
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
        """Move what one Claimed answers out of `tokens`; what is leased again goes into `kept`."""
        for token, number in claimed.kept:
            lease = tokens.pop(token)
            lease.number = number
            kept[number] = lease
        over = [tokens.pop(token) for token in [*claimed.ended, *claimed.lost]]
        for lease in over:
            lease.lost = lease.reason == _core.LEASE_HELD
        self._borrower.forget(over)

    def reclaimed(self, kept: dict[int, ClientLease]) -> None:
        """Replace all leases by those that the new daemon leased again; all ends are confirmed."""
        self._state.leases = kept
        self._state.unconfirmed = 0
        self._state.to_end = {}

    def locks(self) -> tuple[int, int]:
        """Return how many extents are under lease locks, and how many under view locks."""
        return self._borrower.locks()

    def close(self) -> None:
        """Drop all locks. Arrays that are still referenced get copies of their own."""
        self._borrower.close()
