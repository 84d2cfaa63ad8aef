"""Leases that survive the daemon, or a connection: what their clients' locks and claims say.

A client holds a lock on each extent of a lease until its end was confirmed (shmbus_ext/LAYOUT.md,
"Proof of death"). So a daemon that begins, or that loses a connection, knows whose groups may be in
somebody's hands; a client that comes back says which. Nothing here goes by a timeout: a client that
is stopped keeps its groups, and one that is dead has no lock.

Two ways, in this order:

1. Before the ring is read, for as long as RECLAIM_WAIT_S: claims are remembered by trajectory, and
   `divert` takes them out of what the reader hands over, so they never reach the stash.
2. After that, what lies in the extents of a client which has not come is `Withheld` from the
   stash, trajectory by trajectory, since nobody else knows how it was grouped, until the client
   has claimed what it holds, or its locks are gone.

A client whose connection to this daemon broke is `InDoubt` with the leases that it was given.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable

from shmbus.control import messages
from shmbus.daemon.leases import Lease, LeaseTable, Session, extents_of, split_identities
from shmbus.stash.collector import Collector
from shmbus_ext import _core

__all__ = ["Claims", "InDoubt", "Withheld", "extents_of_client", "extents_of_clients"]

Trajectory = _core.Trajectory
#: In place of a reason: the client had not ended this lease.
LEASE_HELD = _core.LEASE_HELD


def extents_of_client(segment: _core.Segment, client: int) -> set[int]:
    """Ask the kernel for the extents that a client has leases in."""
    ranges = segment.locks_held(1 + client)
    return {e for first, count in ranges for e in range(first, first + count)}


def extents_of_clients(segment: _core.Segment) -> dict[int, set[int]]:
    """Ask so for every client; those that have none are left out."""
    found = {client: extents_of_client(segment, client) for client in range(_core.MAX_CLIENTS)}
    return {client: extents for client, extents in found.items() if extents}


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

    def forget(self, session: Session, *, dead: bool) -> None:
        """Drop what a client that went away again held; what it had ended stays ended.

        One that is not dead claims it again.
        """
        held = [c for c in self._claims if c.session is session and c.held.reason == LEASE_HELD]
        for claim in held:
            claim.session = None
        if not dead:
            self._claims = [claim for claim in self._claims if claim not in held]
            self._by_identity = {i: c for i, c in self._by_identity.items() if c not in held}

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
                    answers = lost if held.reason == LEASE_HELD else ended
                    answers.setdefault(session, []).append(held.token)
                continue
            lease = table.claimed(sorted(claim.samples, key=lambda t: t.index))
            if held.reason != LEASE_HELD:
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


class Withheld:
    """What clients of the daemon before this one may hold, and the rest of those groups.

    All that comes for such a group is kept with it, so that it is not delivered in two parts.

    Parameters
    ----------
    collector : Collector
        Into whose stash goes what nobody can hold.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._extents: dict[int, set[int]] = {}
        self._keys: set[Hashable] = set()
        #: In the order in which they were read.
        self._samples: list[Trajectory] = []

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, samples: list[Trajectory], extents: dict[int, set[int]]) -> None:
        """Keep what of the ring may be held, by clients that each have leases in some extents."""
        self._extents = extents
        self._samples = samples
        self._sort()

    def _sort(self) -> None:
        """Keep what somebody may hold, and give the rest to the stash."""
        samples, self._samples = self._samples, []
        awaited = set().union(*self._extents.values())
        extents = extents_of(samples) if awaited else ()
        self._keys = {
            sample.key
            for sample, extent in zip(samples, extents, strict=False)
            if extent in awaited
        }
        self._collector.stash.add(self.divert(samples), time.monotonic())
        self._collector.divert = self.divert if self._keys else None

    def divert(self, samples: list[Trajectory]) -> list[Trajectory]:
        """Keep what belongs to a group that is kept; the rest is for the stash."""
        if not self._keys:
            return samples
        self._samples += [sample for sample in samples if sample.key in self._keys]
        return [sample for sample in samples if sample.key not in self._keys]

    def clients(self) -> set[int]:
        """Everybody whose word or death is awaited."""
        return set(self._extents)

    def records(self) -> int:
        """Trajectories that are here."""
        return len(self._samples)

    def claim(self, client: int, groups: list[messages.Held]) -> dict[int, list[Trajectory]]:
        """Take out what a client says it holds or has ended, by the tokens of its groups."""
        extents = self._extents.get(client, set())
        tokens = {i: held.token for held in groups for i in split_identities(held.identities)}
        found: dict[int, list[Trajectory]] = {}
        left = []
        samples = self._samples
        identities = split_identities(_core.identities(samples))
        for sample, identity, extent in zip(samples, identities, extents_of(samples), strict=True):
            if extent in extents and identity in tokens:
                found.setdefault(tokens[identity], []).append(sample)
            else:
                left.append(sample)
        self._samples = left
        return {token: sorted(samples, key=lambda t: t.index) for token, samples in found.items()}

    def clear(self, client: int) -> None:
        """Let go of what only this client might have held: it has said all, or is dead."""
        if self._extents.pop(client, None) is not None:
            self._sort()


class InDoubt:
    """Leases of clients whose connection broke, and what clients that have not come may hold."""

    def __init__(self, collector: Collector) -> None:
        self._segment = collector.segment
        self._leases: dict[int, list[Lease]] = {}
        self.withheld = Withheld(collector)

    def __len__(self) -> int:
        return sum(map(len, self._leases.values())) + len(self.withheld)

    def add(self, client: int, leases: Iterable[Lease]) -> None:
        """Keep leases until their client has claimed them or is dead."""
        self._leases.setdefault(client, []).extend(leases)

    def clients(self) -> set[int]:
        """Everybody whose word or death is awaited."""
        return self.withheld.clients() | set(self._leases)

    def ranks(self) -> set[int]:
        """Ranks that have something here."""
        return {x.rank for leases in self._leases.values() for x in leases if x.rank >= 0}

    def claim(
        self, session: Session, groups: list[messages.Held], table: LeaseTable
    ) -> messages.Claimed:
        """Answer a client that came back, or came after the ring was read."""
        client = session.client
        mine = {_core.identities(x.samples): x for x in self._leases.pop(client, [])}
        withheld = self.withheld.claim(client, groups)
        kept: list[tuple[int, int]] = []
        ended: list[int] = []
        lost: list[int] = []
        for held in groups:
            lease = mine.pop(held.identities, None)
            if lease is None and held.token in withheld:
                lease = table.claimed(withheld[held.token])
            if lease is None:
                # What was acknowledged before is released already, and fine; what was not is lost.
                (ended if held.reason != LEASE_HELD else lost).append(held.token)
            elif held.reason != LEASE_HELD:
                table.end(lease, held.reason)
                ended.append(held.token)
            else:
                keep(session, lease, held.step)
                kept.append((held.token, lease.number))
        if mine:
            self._leases[client] = list(mine.values())
        return messages.Claimed(kept=kept, ended=ended, lost=lost)

    def clear(self, client: int) -> list[Lease]:
        """Let go of what only this client might have held: it has said all, or is dead.

        Its leases are returned; what was withheld goes into the stash.
        """
        self.withheld.clear(client)
        return self._leases.pop(client, [])

    def reap(self, connected: set[int]) -> list[Lease]:
        """Look which of the awaited clients have no lock any more, and clear those."""
        out = []
        for client in self.clients() - connected:
            if not self._segment.locks_held(1 + client):
                out += self.clear(client)
        return out
