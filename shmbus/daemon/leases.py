"""The daemon's leases: their clients, their groups, and their ends.

Invariants:

- A group leased by the stash is in exactly one Lease. A Lease is in exactly one place: a session,
  `InDoubt`, the steps of the ranks, or `LeaseTable.returned`.
- A lease ends once: the collector releases its group, or the group is delivered next.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable

from shmbus.base import limits
from shmbus.control import messages
from shmbus.data.keys import split_of
from shmbus.data.status_types import LeaseStatus
from shmbus.stash.collector import Collector
from shmbus_ext import _core

#: Seconds after an empty answer in which a client still counts as waiting: clients ask in portions.
_BETWEEN_ASKS_S = 1.0
#: Trajectories leased in one answer, except for a single larger group; a place takes 24 bytes.
MAX_GRANT_TRAJECTORIES = 32_768

Trajectory = _core.Trajectory
_PLACE = struct.Struct("=IIQQ")
_IDENTITY_BYTES = 16


def split_identities(packed: bytes) -> list[bytes]:
    """Return the identity of each trajectory: producer_id and sequence, in 16 bytes."""
    return [packed[at : at + _IDENTITY_BYTES] for at in range(0, len(packed), _IDENTITY_BYTES)]


def extents_of(samples: list[Trajectory]) -> list[int]:
    """Return the first extent of each record, locked by its client's lease lock."""
    return [place[0] for place in _PLACE.iter_unpack(_core.places(samples))]


class Lease:
    """A group on its way through the daemon."""

    __slots__ = ("born_s", "group", "number", "rank", "samples", "size", "step", "trained_at")

    def __init__(
        self,
        number: int,
        group: _core.GroupEntry[Trajectory] | None,
        samples: list[Trajectory],
        size: int,
    ) -> None:
        #: The client's name for the lease; new at each lease of the group.
        self.number = number
        #: Its entry in the stash. None for a claimed group, never in this daemon's stash: its
        #: trajectories were recognised by their identity during the read of the ring.
        self.group = group
        #: The trajectories, by index.
        self.samples = samples
        #: Samples of the complete group.
        self.size = size
        #: The lease's step and rank; -1 without ranks.
        self.step = -1
        self.rank = -1
        #: The trainer's step for the group; -1 if untrained, or without ranks.
        self.trained_at = -1
        #: The start of the lease, on the monotonic clock.
        self.born_s = time.monotonic()

    @property
    def split(self) -> int:
        """The split's number."""
        return split_of(self.samples[0].key)

    def granted(self) -> messages.Granted:
        """Return the message to the client."""
        return messages.Granted(
            number=self.number, size=self.size, places=_core.places(self.samples)
        )


class Session:
    """An admitted client."""

    def __init__(self, client: int, hello: messages.Hello, send: Callable[..., None]) -> None:
        self.client = client
        self.pid = hello.pid
        self.label = hello.label
        self.rank = hello.rank if hello.world_size > 1 and not hello.observer else -1
        self.world_size = hello.world_size
        self.split = hello.split
        #: The rank's next step, from the Hello; 0 before the first step.
        self.next_step = hello.next_step
        self.observer = hello.observer
        self._send = send
        self._ended: list[int] = []
        self._unknown: list[int] = []
        self.leases: dict[int, Lease] = {}
        #: True after the last claim of leases from an earlier connection.
        self.settled = hello.client < 0
        #: True if the last message about trained samples has a continuation.
        self.adds_trained = False
        #: Requests waiting for groups.
        self.waiting = 0
        self._waited_s = 0.0
        #: Seconds of waits already returned by `new_waits_s`.
        self._told_s = 0.0
        #: The start of a wait without a lease; None otherwise.
        self._waits_since_s: float | None = None
        #: The time of the last answer: of any, and of an answer without leases held.
        self._answered_s: float | None = None
        self._empty_s = -math.inf

    def begin_wait(self, now_s: float) -> None:
        """Note a further waiting request."""
        self.waiting += 1
        if self._waits_since_s is None and not self.leases:
            self._waits_since_s = now_s

    def end_wait(self, now_s: float) -> None:
        """Note an answered request."""
        self.waiting -= 1
        self._answered_s = now_s
        if not self.leases:
            self._empty_s = now_s
        if self._waits_since_s is not None and (self.leases or not self.waiting):
            self._waited_s += now_s - self._waits_since_s
            self._waits_since_s = None

    def waited_s(self, now_s: float) -> float:
        """Return the total seconds of waits without a lease."""
        since_s = self._waits_since_s
        return self._waited_s + (0.0 if since_s is None else max(0.0, now_s - since_s))

    def new_waits_s(self, now_s: float) -> float:
        """Return the seconds of waits since the last call."""
        waited_s = self.waited_s(now_s)
        new_s, self._told_s = waited_s - self._told_s, waited_s
        return new_s

    @property
    def name(self) -> str:
        """A name for people."""
        rank = "" if self.rank < 0 else f"rank {self.rank}, "
        return f"{self.label or 'a trainer'} ({rank}pid {self.pid})"

    def send(self, reply: messages.Reply) -> None:
        """Send a reply, behind held-back confirmations: the client wakes once."""
        self._send(*self._held_back(), reply)

    def note_ended(self, ended: list[int], unknown: list[int]) -> None:
        """Confirm ended leases later: with the next reply, or in large numbers."""
        self._ended += ended
        self._unknown += unknown
        if len(self._ended) + len(self._unknown) >= limits.UNCONFIRMED // 2:
            self.confirm()

    def confirm(self) -> None:
        """Send the held-back confirmations."""
        if held := self._held_back():
            self._send(*held)

    def _held_back(self) -> list[messages.Ended]:
        if not (self._ended or self._unknown):
            return []
        held = messages.Ended(numbers=self._ended, unknown=self._unknown)
        self._ended, self._unknown = [], []
        return [held]

    def status(self) -> LeaseStatus:
        """Return the client's status."""
        now = time.monotonic()
        return LeaseStatus(
            client=self.client,
            pid=self.pid,
            label=self.label,
            rank=self.rank,
            world_size=self.world_size,
            split=self.split,
            groups=len(self.leases),
            trajectories=sum(len(lease.samples) for lease in self.leases.values()),
            oldest_lease_s=max((now - x.born_s for x in self.leases.values()), default=0.0),
            waiting=self.waiting > 0 or now < self._empty_s + _BETWEEN_ASKS_S,
            waited_s=self.waited_s(now),
            asked_s=None if self._answered_s is None else max(0.0, now - self._answered_s),
        )


class LeaseTable:
    """Makes leases of the collector's groups, and ends them."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._numbers = 0
        #: Claimed groups given back: the stash never held them.
        self.returned: deque[Lease] = deque()
        #: Trajectories of claimed groups leased or in doubt.
        self.claimed_records = 0
        #: The policy version of the last judgement by `drop_stale`.
        self._judged_version = -1

    @property
    def ready_groups(self) -> int:
        """Training groups not taken yet."""
        return self.ready_of(_core.SPLIT_TRAIN)

    def ready_of(self, split: int) -> int:
        """Count the untaken groups of a split."""
        returned = sum(lease.split == split for lease in self.returned)
        return returned + self._collector.stash.table.counts(split)[2]

    def take(
        self, max_groups: int, max_trajectories: int, split: int = _core.SPLIT_TRAIN
    ) -> list[Lease]:
        """Lease groups, oldest first; at least one, whatever the bound on trajectories."""
        leases: list[Lease] = []
        total = 0
        for lease in [each for each in self.returned if each.split == split]:
            if len(leases) == max_groups:
                break
            self.returned.remove(lease)
            self.claimed_records += len(lease.samples)
            if self._collector.is_stale(lease.samples):
                self._drop_stale(lease)
                continue
            total += len(lease.samples)
            leases.append(self._lease_again(lease))
        if len(leases) == max_groups:
            return leases
        groups = self._collector.lease(max_groups - len(leases), split)
        for at, group in enumerate(groups):
            samples = group.samples
            total += len(samples)
            if leases and total > max_trajectories:
                for later in reversed(groups[at:]):
                    self._collector.stash.table.give_back(later)
                break
            leases.append(self.lease_of(group, samples))
        return leases

    def lease_of(self, group: _core.GroupEntry[Trajectory], samples: list[Trajectory]) -> Lease:
        """Give a number to a leased group of the stash."""
        self._numbers += 1
        return Lease(self._numbers, group, samples, group.size)

    def claimed(self, samples: list[Trajectory]) -> Lease:
        """Give a number to a group that a client holds from the previous daemon."""
        self._numbers += 1
        self.claimed_records += len(samples)
        self._collector.stash.note_complete(samples[0].key)
        return Lease(self._numbers, None, samples, samples[0].group_size)

    def _lease_again(self, lease: Lease) -> Lease:
        self._numbers += 1
        lease.number = self._numbers
        lease.born_s = time.monotonic()
        lease.step = lease.rank = lease.trained_at = -1
        return lease

    def end(self, lease: Lease, reason: int) -> None:
        """Release a group: every trajectory, or, if the daemon dies now, none."""
        self._collector.release(lease.samples, reason, lease.group)
        if lease.group is None:
            self.claimed_records -= len(lease.samples)

    def drop_stale(self, leases: Iterable[Lease]) -> set[Lease]:
        """Release and return the groups among these too old for the policy."""
        version = self._collector.policy_version
        if version == self._judged_version:
            # Fresh at the lease, and the version is unchanged.
            return set()
        self._judged_version = version
        stale = {lease for lease in leases if self._collector.is_stale(lease.samples)}
        for lease in stale:
            self._drop_stale(lease)
        return stale

    def _drop_stale(self, lease: Lease) -> None:
        if lease.group is not None:
            self._collector.stash.discard_leased("stale", lease.group)
        else:
            self._collector.stash.discard("stale", lease.samples)
            self.claimed_records -= len(lease.samples)
        self._collector.release_discards()

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Deliver these groups next, in order."""
        for lease in sorted(leases, key=lambda each: -each.number):
            if lease.group is not None:
                self._collector.stash.table.give_back(lease.group)
                continue
            self.claimed_records -= len(lease.samples)
            if not self._collector.frozen and self._collector.trained_of(lease.samples):
                self._collector.add(lease.samples, time.monotonic())
            else:
                self.returned.appendleft(lease)
        self.end_trained_returned()

    def end_trained_returned(self) -> None:
        """End unheld groups trained according to a checkpoint."""
        collector = self._collector
        if not collector.trained or collector.frozen:
            return
        for lease in [each for each in self.returned if collector.trained_of(each.samples)]:
            self.returned.remove(lease)
            collector.add(lease.samples, time.monotonic())
        collector.end_trained_waiting(time.monotonic())

    @property
    def returned_records(self) -> int:
        """Trajectories of claimed groups without a client."""
        return sum(len(lease.samples) for lease in self.returned)
