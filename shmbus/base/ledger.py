"""The ledger: the place of every committed trajectory. It must balance at every instant.

committed = acknowledged + leased + stashed + in_ring + dropped. Every term comes from its own
source: committed from the producers' numbers, in_ring from a walk of the lanes, stashed and leased
from the stash, acknowledged and dropped from counters in the segment that outlive all processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from shmbus_ext import _core

#: Names of the ways out of the bus, by their number in the segment.
REASONS: tuple[str, ...] = (
    "acknowledged",
    "duplicate",
    "size_mismatch",
    "surplus",
    "timeout",
    "stale",
    "zero_variance",
    "overflow",
    "malformed",
    "corrupt",
    "failed",
    "filtered",
    "relayed",
)
assert REASONS[_core.DROP_DUPLICATE] == "duplicate" and REASONS[_core.DROP_FAILED] == "failed"
assert REASONS[_core.DROP_FILTERED] == "filtered" and REASONS[_core.RELAYED] == "relayed"
assert len(REASONS) == _core.REASONS


class TrainedBefore(NamedTuple):
    """Trained samples and groups of a checkpoint that may come again.

    Attributes
    ----------
    names : set of bytes
        The lasting names of its samples (`Consumer.lasting_names`).
    groups : list of (str, int | None, str)
        Instance ids, rounds and splits of groups held now or last by a rank.
    """

    names: set[bytes]
    groups: list[tuple[str, int | None, str]]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requested samples by outcome; all 0 for an unused lane.

    Attributes
    ----------
    offered : int
        Since the bus was created.
    open : int
        Not taken by a worker, or given back.
    claimed : int
        Held by workers.
    done : int
        Answered: put, or reported as failed.
    given_up : int
        Not made, because their group ended without them.
    groups : int
        Open requests: those whose group was neither acknowledged nor given up.
    """

    offered: int = 0
    open: int = 0
    claimed: int = 0
    done: int = 0
    given_up: int = 0
    groups: int = 0

    @property
    def balanced(self) -> bool:
        """True if every offered sample is accounted for exactly once."""
        return self.offered == self.open + self.claimed + self.done + self.given_up


class LanePauseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of the request lane after like failures of recent samples; ends by itself.

    Attributes
    ----------
    reason : str
        Number of failures, and their reason.
    since_unix_s : float
        Start of the pause, in seconds since 1970.
    """

    reason: str
    since_unix_s: float


class TrajectoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The two sides of the ledger's equation, as `Ledger` explains them."""

    committed: int
    acknowledged: int
    leased: int
    stashed: int
    in_ring: int
    dropped: dict[str, int]

    @property
    def undelivered(self) -> int:
        """Committed, and neither acknowledged nor dropped."""
        return self.leased + self.stashed + self.in_ring

    @property
    def accounted(self) -> int:
        """Sum of the right-hand side; equals `committed`."""
        return self.acknowledged + self.undelivered + sum(self.dropped.values())


class SplitCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Read trajectories of a split, by place; for unread trajectories the split is unknown.

    Attributes
    ----------
    acknowledged, dropped : int
        Trajectories released, since the bus was created.
    leased, stashed : int
        Trajectories held by a trainer, and those waiting for their group or for a take.
    groups_open, groups_ready, groups_leased : int
        Incomplete groups; complete groups that wait for a take; leased groups.
    """

    acknowledged: int = 0
    dropped: int = 0
    leased: int = 0
    stashed: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_leased: int = 0


class Ledger(TrajectoryCounts, frozen=True, kw_only=True):
    """Trajectories by place, and related counts.

    Attributes
    ----------
    committed : int
        Trajectories committed by producers since the bus was created.
    acknowledged : int
        Delivered, and acknowledged by a trainer.
    leased : int
        Delivered, and not acknowledged yet.
    stashed : int
        Read, in an incomplete group or in a complete group that waits for a take.
    in_ring : int
        Committed, and not read yet.
    ready : int
        The part of `stashed` in complete groups.
    dropped : dict[str, int]
        Released without acknowledgement, by reason.
    groups_open, groups_ready, groups_leased : int
        Incomplete groups; complete groups that wait for a take; leased groups.
    groups_timed_out, stash_overflows : int
        How often a deadline or the stash's bound took effect, in this consumer.
    groups_given_up : int
        Groups given up by this consumer for a failed sample.
    groups_dropped : int
        Training groups dropped whole, for every reason, since the bus was created: the number of
        extra groups to sample for an equal number of trained groups.
    samples_wanted : int
        Open retry requests.
    lane_pause : LanePauseStatus | None
        The lane's pause after like failures of all recent samples; workers then get a sample at a
        time.
    moved : int
        Stragglers moved by this consumer, to free the space around them.
    producers : int
        Attached now.
    policy_version : int
        The trainer's current version.
    capacity, free : int
        Bytes for records, and bytes in free extents.
    requests : RequestCounts
        Requested samples.
    splits : dict[str, SplitCounts]
        Read trajectories, by the label of their split.
    """

    ready: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_leased: int = 0
    groups_timed_out: int = 0
    stash_overflows: int = 0
    groups_given_up: int = 0
    groups_dropped: int = 0
    samples_wanted: int = 0
    lane_pause: LanePauseStatus | None = None
    moved: int = 0
    producers: int = 0
    policy_version: int = 0
    capacity: int = 0
    free: int = 0
    requests: RequestCounts = RequestCounts()
    splits: dict[str, SplitCounts] = {}

    @classmethod
    def from_counts(cls, released: tuple[int, ...], **counts: Any) -> Ledger:
        """Build the ledger from the segment's release counters and the remaining counts.

        Parameters
        ----------
        released : tuple of int
            Trajectories released for each of `REASONS`, in that order.
        **counts : int
            The remaining attributes, by name.

        Returns
        -------
        Ledger
            With `acknowledged` and `dropped` filled in.
        """
        dropped = {name: n for name, n in zip(REASONS[1:], released[1:], strict=True) if n}
        return cls(acknowledged=released[0], dropped=dropped, **counts)

    @property
    def balanced(self) -> bool:
        """True if every committed trajectory is accounted for exactly once."""
        return self.committed == self.accounted
