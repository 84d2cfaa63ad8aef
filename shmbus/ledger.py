"""The ledger: where every committed trajectory is. It must balance at every instant.

committed = acknowledged + leased + stashed + in_ring + dropped, each counted in its own way:
committed by the producers' numbers, in_ring by walking the lanes, stashed and leased by the stash,
acknowledged and dropped by counters in the segment that survive any process.
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
    """What a checkpoint counts as trained, and may come again.

    Attributes
    ----------
    names : set of bytes
        The lasting names of its samples (`Consumer.lasting_names`).
    groups : list of (str, int | None, str)
        Instance ids, rounds and splits of those that some rank holds or held last.
    """

    names: set[bytes]
    groups: list[tuple[str, int | None, str]]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that were requested, by what became of them; all 0 where the lane is not used.

    Attributes
    ----------
    offered : int
        Since the bus was created.
    open : int
        Not taken by a worker, or given back.
    claimed : int
        In the hands of workers.
    done : int
        Answered: put, or reported as failed.
    given_up : int
        Not made, since their group has ended without them.
    groups : int
        Requests that have not ended: those whose group was neither acknowledged nor given up.
    """

    offered: int = 0
    open: int = 0
    claimed: int = 0
    done: int = 0
    given_up: int = 0
    groups: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every sample that was offered is accounted for exactly once."""
        return self.offered == self.open + self.claimed + self.done + self.given_up


class LanePauseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of the request lane, since all samples of late failed alike; it ends by itself.

    Attributes
    ----------
    reason : str
        How many failed, and what was said of them.
    since_unix_s : float
        When it began, in seconds since 1970.
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
        """The sum of the right-hand side: what `committed` must be."""
        return self.acknowledged + self.undelivered + sum(self.dropped.values())


class SplitCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one split, by where it is; of what nobody has read the split is not known.

    Attributes
    ----------
    acknowledged, dropped : int
        Trajectories released, since the bus was created.
    leased, stashed : int
        Trajectories that a trainer holds, and those that wait: for their group, or to be taken.
    groups_open, groups_ready, groups_leased : int
        Incomplete groups; complete ones that wait to be taken; leased ones.
    """

    acknowledged: int = 0
    dropped: int = 0
    leased: int = 0
    stashed: int = 0
    groups_open: int = 0
    groups_ready: int = 0
    groups_leased: int = 0


class Ledger(TrajectoryCounts, frozen=True, kw_only=True):
    """Trajectories by where they are, and the counts that go with them.

    Attributes
    ----------
    committed : int
        Trajectories that producers have committed since the bus was created.
    acknowledged : int
        Delivered, and acknowledged by a trainer.
    leased : int
        Delivered, and not acknowledged yet.
    stashed : int
        Read, and in an incomplete group or in a complete one that waits to be taken.
    in_ring : int
        Committed, and not read yet.
    ready : int
        Those of `stashed` that are in complete groups.
    dropped : dict[str, int]
        Released without acknowledgement, by reason.
    groups_open, groups_ready, groups_leased : int
        Incomplete groups; complete ones that wait to be taken; leased ones.
    groups_timed_out, stash_overflows : int
        How often a deadline or the stash's bound took effect, in this consumer.
    groups_given_up : int
        Groups that this consumer gave up for a failed sample.
    groups_dropped : int
        Groups for training that were dropped whole, for any reason, since the bus was created: as
        many more have to be sampled for as many to train on.
    samples_wanted : int
        Open retry requests.
    lane_pause : LanePauseStatus | None
        Why workers get one sample at a time, where all samples of late failed alike.
    moved : int
        Stragglers that this consumer moved, to free the space around them.
    producers : int
        Attached now.
    policy_version : int
        The trainer's current one.
    capacity, free : int
        Bytes for records, and bytes in free extents.
    requests : RequestCounts
        Samples that were requested.
    splits : dict[str, SplitCounts]
        What was read, by the label of its split.
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
        """Build it from the segment's counters of releases and the other counts.

        Parameters
        ----------
        released : tuple of int
            Trajectories released for each of `REASONS`, in that order.
        **counts : int
            The other attributes, by name.

        Returns
        -------
        Ledger
            With `acknowledged` and `dropped` filled in.
        """
        dropped = {name: n for name, n in zip(REASONS[1:], released[1:], strict=True) if n}
        return cls(acknowledged=released[0], dropped=dropped, **counts)

    @property
    def balanced(self) -> bool:
        """Whether every committed trajectory is accounted for exactly once."""
        return self.committed == self.accounted
