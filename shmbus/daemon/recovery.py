"""Leases that outlive the daemon or a connection: found by their clients' locks and claims.

A client holds a lock on each extent of a lease until the daemon confirms the end
(shmbus_ext/LAYOUT.md, "Proof of death"). A daemon after a start, or a lost connection, thus knows
the extents in use by a client. A reconnecting client claims its groups. No timeout decides: a
stopped client keeps its groups, and a dead client holds no lock.

Two phases:

1. Before the read of the ring, for at most RECLAIM_WAIT_S, claims are collected by trajectory.
   `divert` then takes claimed trajectories out of the reader's output: they never reach the stash.
2. Afterwards, the trajectories in the extents of an absent client are `Withheld` from the stash,
   one by one, because only the client knows their groups. They stay withheld until the client
   claims its groups, or its locks are gone.

Leases of a client with a broken connection to this daemon are `InDoubt`.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable

from shmbus.control import messages
from shmbus.daemon.leases import Lease, LeaseTable, Session, extents_of, split_identities
from shmbus.stash.collector import Collector
from shmbus_ext import _core

Trajectory = _core.Trajectory
#: In place of a reason: the client had not ended this lease.
LEASE_HELD = _core.LEASE_HELD


def extents_of_client(segment: _core.Segment, client: int) -> set[int]:
    """Return the extents under a client's leases, from the kernel's table of locks."""
    ranges = segment.locks_held(1 + client)
    return {e for first, count in ranges for e in range(first, first + count)}


def extents_of_clients(segment: _core.Segment) -> dict[int, set[int]]:
    """Return the extents of each client with leases."""
    found = {client: extents_of_client(segment, client) for client in range(_core.MAX_CLIENTS)}
    return {client: extents for client, extents in found.items() if extents}


class _Claim:
    """A claimed group, with the trajectories read so far."""

    __slots__ = ("held", "samples", "session")

    def __init__(self, session: Session | None, held: messages.Held) -> None:
        self.session = session
        self.held = held
        self.samples: list[Trajectory] = []


class Claims:
    """Groups claimed by clients of the previous daemon, until the ring is read."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._by_identity: dict[bytes, _Claim] = {}

    def add(self, session: Session, groups: Iterable[messages.Held]) -> None:
        """Add a client's claims; the first claim of a trajectory counts."""
        for held in groups:
            claim = _Claim(session, held)
            self._claims.append(claim)
            for identity in split_identities(held.identities):
                self._by_identity.setdefault(identity, claim)

    def forget(self, session: Session, *, dead: bool) -> None:
        """Forget a departed client's held groups; its ended groups stay ended."""
        # A dead client's groups go to other clients. A living client claims its groups again.
        held = [c for c in self._claims if c.session is session and c.held.reason == LEASE_HELD]
        for claim in held:
            claim.session = None
        if not dead:
            self._claims = [claim for claim in self._claims if claim not in held]
            self._by_identity = {i: c for i, c in self._by_identity.items() if c not in held}

    def divert(self, samples: list[Trajectory]) -> list[Trajectory]:
        """Take claimed trajectories out of read samples; the rest goes into the stash."""
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
        """Lease or release the claimed groups, once the ring is read; return the answers."""
        answers: dict[Session, messages.Claimed] = {}
        for claim in self._claims:
            session, held = claim.session, claim.held
            answer = messages.Claimed()
            if session is not None:
                answer = answers.setdefault(session, answer)
            if not claim.samples:
                # Released by the previous daemon, dead before a confirmation.
                (answer.lost if held.reason == LEASE_HELD else answer.ended).append(held.token)
                continue
            lease = table.claimed(sorted(claim.samples, key=lambda t: t.index))
            if held.reason != LEASE_HELD:
                table.end(lease, held.reason)
                answer.ended.append(held.token)
            elif session is None:
                table.give_back([lease])
            else:
                keep(session, lease, held)
                answer.kept.append((held.token, lease.number))
        return answers


def keep(session: Session, lease: Lease, held: messages.Held) -> None:
    """Give a claimed lease to its client."""
    lease.step = held.step
    lease.trained_at = held.trained_at
    lease.rank = session.rank
    session.leases[lease.number] = lease


class Withheld:
    """Trajectories that clients of the previous daemon may hold, and the rest of their groups."""

    # Later samples of such a group are withheld, too: the group is not delivered in two parts.

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._extents: dict[int, set[int]] = {}
        self._keys: set[Hashable] = set()
        #: Withheld trajectories, in the order of reading.
        self.samples: list[Trajectory] = []

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, samples: list[Trajectory], extents: dict[int, set[int]]) -> None:
        """Withhold the trajectories in clients' extents; the rest goes into the stash."""
        self._extents = extents
        self.samples = samples
        self._withhold()

    def _withhold(self) -> None:
        """Divide the trajectories between here and the stash, by the awaited clients."""
        samples, self.samples = self.samples, []
        awaited = set().union(*self._extents.values())
        extents = extents_of(samples) if awaited else ()
        self._keys = {
            sample.key
            for sample, extent in zip(samples, extents, strict=False)
            if extent in awaited
        }
        self._collector.add(self.divert(samples), time.monotonic())
        self._collector.divert = self.divert if self._keys else None

    def divert(self, samples: list[Trajectory]) -> list[Trajectory]:
        """Withhold samples of withheld groups; the rest goes into the stash."""
        if not self._keys:
            return samples
        self.samples += [sample for sample in samples if sample.key in self._keys]
        return [sample for sample in samples if sample.key not in self._keys]

    def clients(self) -> set[int]:
        """Clients that may still hold leases."""
        return set(self._extents)

    def claim(self, client: int, groups: list[messages.Held]) -> dict[int, list[Trajectory]]:
        """Take out a client's held or ended trajectories, by its groups' tokens."""
        extents = self._extents.get(client, set())
        tokens = {i: held.token for held in groups for i in split_identities(held.identities)}
        found: dict[int, list[Trajectory]] = {}
        left = []
        samples = self.samples
        identities = split_identities(_core.identities(samples))
        for sample, identity, extent in zip(samples, identities, extents_of(samples), strict=True):
            if extent in extents and identity in tokens:
                found.setdefault(tokens[identity], []).append(sample)
            else:
                left.append(sample)
        self.samples = left
        return {token: sorted(samples, key=lambda t: t.index) for token, samples in found.items()}

    def clear(self, client: int) -> None:
        """Release samples withheld only for this client, after a full claim or its death."""
        if self._extents.pop(client, None) is not None:
            self._withhold()


class InDoubt:
    """Leases of clients with broken connections, and trajectories withheld for absent clients."""

    def __init__(self, collector: Collector) -> None:
        self._segment = collector.segment
        self._leases: dict[int, list[Lease]] = {}
        self.withheld = Withheld(collector)

    def __len__(self) -> int:
        return sum(map(len, self._leases.values())) + len(self.withheld)

    def add(self, client: int, leases: Iterable[Lease]) -> None:
        """Keep leases until their client claims them or dies."""
        self._leases.setdefault(client, []).extend(leases)

    def leases(self) -> list[Lease]:
        """Return the leases in doubt, in no order."""
        return [lease for leases in self._leases.values() for lease in leases]

    def clients(self) -> set[int]:
        """Clients that may still hold leases."""
        return self.withheld.clients() | set(self._leases)

    def ranks(self) -> set[int]:
        """Ranks with leases in doubt."""
        return {x.rank for leases in self._leases.values() for x in leases if x.rank >= 0}

    def claim(
        self, session: Session, groups: list[messages.Held], table: LeaseTable
    ) -> messages.Claimed:
        """Answer the claims of a client that reconnected after the read of the ring."""
        client = session.client
        mine = {_core.identities(x.samples): x for x in self._leases.pop(client, [])}
        withheld = self.withheld.claim(client, groups)
        answer = messages.Claimed()
        for held in groups:
            lease = mine.pop(held.identities, None)
            if lease is None and held.token in withheld:
                lease = table.claimed(withheld[held.token])
            if lease is None:
                # Released before: an acknowledged group is done, a held group is lost.
                (answer.ended if held.reason != LEASE_HELD else answer.lost).append(held.token)
            elif held.reason != LEASE_HELD:
                table.end(lease, held.reason)
                answer.ended.append(held.token)
            else:
                keep(session, lease, held)
                answer.kept.append((held.token, lease.number))
        if mine:
            self._leases[client] = list(mine.values())
        return answer

    def clear(self, client: int) -> list[Lease]:
        """Release this client's leases and samples in doubt, after a full claim or its death."""
        # Returns its leases; withheld trajectories go into the stash.
        self.withheld.clear(client)
        return self._leases.pop(client, [])

    def reap(self, connected: set[int]) -> list[Lease]:
        """Clear every absent client without locks; return its leases."""
        out = []
        for client in self.clients() - connected:
            if not self._segment.locks_held(1 + client):
                out += self.clear(client)
        return out
