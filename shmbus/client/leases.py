"""The leases that this process holds from a daemon, and what its dialogue with the daemon has open.

`ClientState` is plain data: which requests are in flight, which replies nobody has consumed, which
leases were received, and which ends the daemon has not confirmed. Nothing of this is kept anywhere
else, so an exception of a signal's handler loses none of it. `Leases` changes the part that
concerns leases. It knows no socket: it returns the messages that the daemon has to be told, and is
told what the daemon said.

Invariants:

- A lease is held, ended but not confirmed (`ClientLease.reason`), or forgotten. Its extents stay
  under this client's lease locks until the daemon has confirmed its end: after the daemon's death,
  the next one learns from these locks what is still in use.
- A lease number is valid on one connection only. After a reconnect, `claims` and `learn` give every
  lease its new number before anything else is asked.
- A lease is locked, known and ready in one call of C, and handed out in another: in between it is
  in `ready`, and behind them a group has it, which returns it if it dies on its way.
- `ClientState.lock` is held by every caller of a method here, but for `hand_out`.
"""

from __future__ import annotations

import threading
from typing import TypeVar

from shmbus import errors, limits
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
        #: Once it has been received.
        self.reply: messages.Reply | None = None
        #: What its thread sleeps on while another reads for all: released when it has to look.
        self.wake: threading.Lock | None = None

    def wake_up(self) -> None:
        """Wake its thread, if that sleeps. The lock of the state is held."""
        if self.wake is not None and self.wake.locked():
            self.wake.release()


class ClientState:
    """What is open between this process and its daemon, as data."""

    __slots__ = (
        "last_id", "leases", "lock", "next_step", "open_take", "replies", "to_end", "trained",
        "trained_at",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Guards everything here, and the connection. It is not held while a thread sleeps.
        self.lock = threading.RLock()
        #: Requests in flight by id, until the thread that asked consumes the reply. Empty after a
        #: reconnect: whoever waits asks again.
        self.replies: dict[int, Pending] = {}
        self.last_id = 0
        #: The id of a request for groups whose reply no thread waits for: it was asked ahead, or
        #: its caller's time was over. The next take waits for this reply instead of asking again.
        self.open_take: int | None = None
        #: All leases by number: handed out, ready, or ended and not confirmed.
        self.leases: dict[int, ClientLease] = {}
        #: Numbers of ended leases that the daemon has not been told, by reason.
        self.to_end: dict[int, list[int]] = {}
        #: The step that this rank takes next.
        self.next_step = 0
        #: Lasting names that a loaded checkpoint counts as trained; each daemon is told.
        self.trained = b""
        #: The step as which a lease that is held was trained.
        self.trained_at: dict[ClientLease, int] = {}

    def new_request(self) -> int:
        """Return the id of a request that is about to be sent; its reply is expected from now."""
        self.last_id += 1
        self.replies[self.last_id] = Pending()
        return self.last_id


class Leases:
    """The groups that a daemon leased to this process."""

    def __init__(self, segment: _core.Segment, state: ClientState) -> None:
        self._state = state
        self._borrower = _core.Borrower(segment)
        #: The number under which the daemon knows this process; -1 before the first Welcome.
        self.client = -1

    # -- received -------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Whether this process packs payload of the bus into batches; each take says so."""
        return self._borrower.packs

    @property
    def ready(self) -> list[ClientLease]:
        """Leases that were received and not handed out; the next first."""
        return self._borrower.ready

    @property
    def unconfirmed(self) -> int:
        """How many leases have ended, and the daemon has not confirmed it."""
        return self._borrower.unconfirmed

    def receive(self, granted: messages.Leases, fd: int) -> list[ClientLease]:
        """Lock, read and keep what the daemon has granted; it is ready to be handed out then."""
        # Groups that are not in the segment were whole when the daemon read them, so a process with
        # write access has damaged them: they are ended.
        state = self._state
        leases, refused = self._borrower.receive(granted.groups, granted.step, state.leases, fd)
        if refused:
            state.to_end.setdefault(_core.DROP_CORRUPT, []).extend(refused)
        if leases and granted.step >= state.next_step:
            state.next_step = granted.step + 1
        return leases

    def hand_out(self, kind: type[_G], consumer: object, limit: int) -> list[_G]:
        """Make groups of what has been ready longest; with a limit of -1, of all of one step."""
        return self._borrower.hand_out(kind, consumer, limit)

    @property
    def next_step(self) -> int:
        """The step that this rank takes next, as a daemon is told it."""
        known = self._state.leases.values()
        return max([self._state.next_step, *(1 + lease.step for lease in known)])

    # -- trained --------------------------------------------------------------------------------

    def note_trained(self, leases: list[ClientLease], step: int) -> messages.Trained:
        """Note as which step groups that are held are trained; return what the daemon is told."""
        known = self._state.leases
        at = self._state.trained_at
        self._state.trained_at = {x: at[x] for x in at if known.get(x.number) is x}
        self._state.trained_at.update(dict.fromkeys(leases, step))
        return messages.Trained(numbers=[lease.number for lease in leases], step=step)

    # -- ended ----------------------------------------------------------------------------------

    def is_leased(self, lease: ClientLease) -> bool:
        """Whether the daemon leased this to this client, and the lease has not ended."""
        known = self._state.leases.get(lease.number) is lease
        return bool(lease.lost or (known and lease.reason == _core.LEASE_HELD))

    def end(self, lease: ClientLease, reason: int) -> None:
        """End one lease."""
        if lease.lost:
            raise errors.ProtocolError(
                f"group {lease.key!r}: the daemon that leased it is gone, and this process reached "
                "the next one too late; it may have been delivered to another consumer: do not use "
                "what was computed from it"
            )
        self._borrower.end(lease, reason)
        self._state.to_end.setdefault(reason, []).append(lease.number)

    def end_groups(
        self, consumer: object, groups: list[_core.GroupBase], reason: int, state: str
    ) -> int:
        """End leases of groups, up to the first that is not held here; return how many."""
        numbers = self._state.to_end.setdefault(reason, [])
        return self._borrower.end_groups(consumer, groups, reason, state, numbers)

    def unsent_ends(self) -> list[messages.End]:
        """Return what the daemon has not been told; it counts as told from now."""
        state = self._state
        to_end, state.to_end = state.to_end, {}
        return [
            messages.End(numbers=numbers[at : at + _NUMBERS], reason=reason)
            for reason, numbers in to_end.items()
            for at in range(0, len(numbers), _NUMBERS)
        ]

    def confirmed(self, numbers: list[int]) -> None:
        """Forget ended leases, now that the daemon has released them."""
        self._borrower.confirm(self._state.leases, numbers)

    def give_back_group(
        self, consumer: object, group: _core.GroupBase, state: str
    ) -> list[int] | None:
        """Forget the lease of a group that others shall have, and give the group its new state."""
        # Returns the numbers that the daemon has to know, or None where this consumer does not hold
        # it. Without locks it is also delivered by a daemon that starts before it was told.
        number = self._borrower.give_back_group(consumer, group, state, self._state.leases)
        return None if number is None else [number]

    def give_back_ready(self) -> list[int]:
        """Forget all leases that are ready; return the numbers that the daemon has to know."""
        return self._borrower.give_back_ready(self._state.leases)

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
        """Move what one Claimed answers out of `tokens`; what is leased again goes into `kept`."""
        for token, number in claimed.kept:
            kept[number] = tokens.pop(token)
        over = [tokens.pop(token) for token in [*claimed.ended, *claimed.lost]]
        for lease in over:
            lease.lost = lease.reason == _core.LEASE_HELD
        self._borrower.forget(over)

    def reclaimed(self, kept: dict[int, ClientLease]) -> None:
        """Replace all leases by those that the new daemon leased again; all ends are confirmed."""
        for number, lease in kept.items():
            lease.number = number
        self._state.leases = kept
        self._state.to_end = {}

    def locks(self) -> tuple[int, int]:
        """Return how many extents are under lease locks, and how many under view locks."""
        return self._borrower.locks()

    def close(self) -> None:
        """Drop all locks. Arrays that are still referenced get copies of their own."""
        self._borrower.close()

    def __del__(self) -> None:
        # Each of them refers to the list's owner.
        ready = self._borrower.ready if hasattr(self, "_borrower") else None
        if ready is not None:
            ready.clear()
