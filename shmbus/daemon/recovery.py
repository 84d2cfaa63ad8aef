"""Leases that survive the daemon, or a connection: what their clients' locks and claims say.

A client holds a lock on each extent of a lease until its end was confirmed (shmbus_ext/LAYOUT.md,
"Proof of death"). So a daemon that begins, or that loses a connection, knows whose groups may be in
somebody's hands; a client that comes back says which. Nothing here goes by a timeout: a client that
is stopped keeps its groups, and one that is dead has no lock.

Two ways, in this order:

1. Before the ring is read, for as long as RECLAIM_WAIT_S: claims are remembered by trajectory, and
   `divert` takes them out of what the reader hands over, so they never reach the stash.
2. After that, groups that lie in the extents of a client which has not come are kept `in_doubt`
   until it claims them, or its locks are gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmbus import messages
from shmbus.daemon.leases import Lease, LeaseTable, Session, split_identities
from shmbus_ext import _core

__all__ = ["Claims", "InDoubt", "extents_of_clients"]

Trajectory = _core.Trajectory


def extents_of_clients(segment: _core.Segment) -> dict[int, set[int]]:
    """Ask the kernel for the extents that each client, by its number, has leases in."""
    found = {}
    for client in range(_core.MAX_CLIENTS):
        ranges = segment.locks_held(1 + client)
        if ranges:
            found[client] = {e for first, count in ranges for e in range(first, first + count)}
    return found


class _Claim:
    __slots__ = ("held", "samples", "session")

    def __init__(self, session: Session | None, held: messages.Held) -> None:
        self.session = session
        self.held = held
        self.samples: list[Trajectory] = []


class Claims:
    """What clients of the daemon before this one say they hold, until the ring has been read."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._by_identity: dict[bytes, _Claim] = {}

    def add(self, session: Session, groups: Iterable[messages.Held]) -> None:
        """Remember them; of two claims of one trajectory the first holds."""
        for held in groups:
            claim = _Claim(session, held)
            self._claims.append(claim)
            for identity in split_identities(held.identities):
                self._by_identity.setdefault(identity, claim)

    def forget(self, session: Session) -> None:
        """Drop what a client that went away again held; what it had ended stays ended."""
        for claim in self._claims:
            if claim.session is session and claim.held.reason < 0:
                claim.session = None

    def divert(self, samples: list[Trajectory]) -> list[Trajectory]:
        """Take claimed trajectories out of what the reader found; the rest is for the stash."""
        if not self._by_identity:
            return samples
        rest = []
        for identity, sample in zip(
            split_identities(_core.identities(samples)), samples, strict=True
        ):
            claim = self._by_identity.get(identity)
            if claim is None:
                rest.append(sample)
            else:
                claim.samples.append(sample)
        return rest

    def resolve(self, table: LeaseTable) -> dict[Session, messages.Claimed]:
        """After the ring has been read: lease again, release again, and say what became of each."""
        kept: dict[Session, list[tuple[int, int]]] = {}
        ended: dict[Session, list[int]] = {}
        lost: dict[Session, list[int]] = {}
        sessions: dict[Session, None] = {}
        for claim in self._claims:
            session, held = claim.session, claim.held
            if session is not None:
                sessions[session] = None
            if not claim.samples:
                # Released by the daemon before this one, though it could not say so any more.
                if session is not None:
                    (ended if held.reason >= 0 else lost).setdefault(session, []).append(held.token)
                continue
            lease = table.claimed(sorted(claim.samples, key=lambda t: t.index))
            if held.reason >= 0:
                table.end(lease, held.reason)
                if session is not None:
                    ended.setdefault(session, []).append(held.token)
            elif session is None:
                table.give_back([lease])
            else:
                keep(session, lease, held.step)
                kept.setdefault(session, []).append((held.token, lease.number))
        return {
            session: messages.Claimed(
                kept=kept.get(session, []),
                ended=ended.get(session, []),
                lost=lost.get(session, []),
            )
            for session in sessions
        }


def keep(session: Session, lease: Lease, step: int) -> None:
    """Put a claimed lease where its client's leases are."""
    lease.step = step
    lease.rank = session.rank
    session.leases[lease.number] = lease


class InDoubt:
    """Leases that a client which is not connected may hold, each with those clients."""

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        self._entries: list[tuple[Lease, set[int]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, lease: Lease, clients: set[int]) -> None:
        """Keep a lease until none of these clients can hold it."""
        self._entries.append((lease, clients))

    def clients(self) -> set[int]:
        """Everybody whose word or death is awaited."""
        return {client for _, clients in self._entries for client in clients}

    def ranks(self) -> set[int]:
        """Ranks that have something here."""
        return {lease.rank for lease, _ in self._entries if lease.rank >= 0}

    def records(self) -> int:
        """Trajectories of these leases."""
        return sum(len(lease.samples) for lease, _ in self._entries)

    def claim(
        self, session: Session, groups: Iterable[messages.Held], table: LeaseTable
    ) -> messages.Claimed:
        """Answer a client that came after the ring was read."""
        by_identities = {
            _core.identities(lease.samples): lease
            for lease, clients in self._entries
            if session.client in clients
        }
        kept: list[tuple[int, int]] = []
        ended: list[int] = []
        lost: list[int] = []
        found: set[int] = set()
        for held in groups:
            lease = by_identities.get(held.identities)
            if lease is None or lease.number in found:
                # What was acknowledged before is released already, and fine; what was not is lost.
                (ended if held.reason >= 0 else lost).append(held.token)
                continue
            found.add(lease.number)
            if held.reason >= 0:
                table.end(lease, held.reason)
                ended.append(held.token)
            else:
                keep(session, lease, held.step)
                kept.append((held.token, lease.number))
        self._entries = [entry for entry in self._entries if entry[0].number not in found]
        return messages.Claimed(kept=kept, ended=ended, lost=lost)

    def clear(self, client: int) -> list[Lease]:
        """Take out what only this client might have held: it has said all, or is dead."""
        out, left = [], []
        for lease, clients in self._entries:
            clients.discard(client)
            if clients:
                left.append((lease, clients))
            else:
                out.append(lease)
        self._entries = left
        return out

    def bury(self, connected: set[int]) -> list[Lease]:
        """Look which of the awaited clients have no lock any more, and clear those."""
        out = []
        for client in self.clients() - connected:
            if not self._segment.locks_held(1 + client):
                out += self.clear(client)
        return out
