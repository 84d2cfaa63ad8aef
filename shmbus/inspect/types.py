"""What can be said of a bus: the structs of ``shmbus status`` and of a daemon's answer.

Below the control messages, which carry some of these, and below everything that fills them in.

Invariants:

- Field names are the keys of ``--json`` and of the wire: they stay.
- A struct holds values that were read once; nothing here reads a bus.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from shmbus._schema import SchemaField
from shmbus.inspect.view_types import Verdict, WaitedStatus
from shmbus.ledger import LanePauseStatus, TrajectoryCounts
from shmbus_ext import _core

__all__ = [
    "BusStatus",
    "CollectorStatus",
    "Count",
    "DaemonStatus",
    "FailedSample",
    "GroupStatus",
    "LeaseStatus",
    "LedgerStatus",
    "OpenGroup",
    "PauseStatus",
    "ProducerSlot",
    "ProducerStatus",
    "WantedStatus",
]

#: Bounds of what is decoded from a file or a socket; they count there only.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class LedgerStatus(TrajectoryCounts, frozen=True, kw_only=True):
    """Where every committed trajectory is, as an observer can tell.

    Without a collector, every undelivered trajectory counts as in the ring.

    Attributes
    ----------
    unreadable : int
        Committed, and not found by a walk over the records; the next reader counts them as corrupt.
        Always 0 where `exact` is false.
    exact : bool
        Whether the undelivered were counted record by record, at one instant. Otherwise the bus was
        too busy, and in_ring is what the counters leave over.
    balanced : bool
        Whether the parts add up to `committed`, with nothing unreadable.
    """

    unreadable: int
    exact: bool
    balanced: bool


class ProducerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot in the producer table, and its counters.

    Attributes
    ----------
    slot, producer_id, pid : int
        Its position in the table; the producer's number on the bus; its process, as numbered in its
        own pid namespace.
    label : str
        The name that the producer gave itself.
    committed, aborted : int
        Trajectories, of all producers that ever owned the slot.
    """

    slot: Annotated[int, msgspec.Meta(ge=0, lt=_core.MAX_PRODUCERS)]
    producer_id: Count
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    label: str
    committed: Count
    aborted: Count


class ProducerStatus(ProducerSlot, frozen=True, kw_only=True):
    """A producer slot that has been used.

    Attributes
    ----------
    state : "alive" | "dead" | "closed" | "gone"
        alive: a living process holds the slot's lock. dead: no process does, and the collector has
        not reaped it yet. closed: the producer left properly. gone: it left or died, and was
        reaped.
    held_bytes : int
        Ring bytes in the lane's extents.
    reservations : int | None
        Records in these that are neither committed nor aborted; None where records were not read.
    idle_s : float | None
        Seconds since the last commit, by the records that are still in the lane's extents; None
        where none is.
    stopped : bool
        Whether its process is stopped, as by SIGSTOP or a debugger, as far as that can be seen.
    waited_s : float
        Seconds that the slot's owners so far have waited, for space, a pause or `max_lead`.
    """

    state: Literal["alive", "dead", "closed", "gone"]
    held_bytes: int
    reservations: int | None = None
    idle_s: float | None = None
    stopped: bool = False
    waited_s: float = 0.0


class CollectorStatus(msgspec.Struct, frozen=True):
    """The collector, as it last described itself.

    Attributes
    ----------
    alive : bool
        Whether a living process holds the collector's lock.
    pid : int
        Its process; 0 where no collector ever read the bus.
    label : str
        The name that it gave itself.
    seen_ago_s : float | None
        Seconds since it last polled the ring; None where no collector ever did.
    leased_groups, leased_records, stashed_groups, stashed_records : int
        What it holds; 0 where it is not alive.
    stragglers_bytes : int
        Ring bytes of the stragglers that it moved.
    oldest_lease_s : float
        Seconds since it gave the oldest of those leases.
    stopped : bool
        Whether its process is stopped, as of a producer.
    waits : bool
        Whether it sleeps until records come.
    """

    alive: bool
    pid: int
    label: str
    seen_ago_s: float | None
    leased_groups: int
    leased_records: int
    stashed_groups: int
    stashed_records: int
    stragglers_bytes: int
    oldest_lease_s: float = 0.0
    stopped: bool = False
    waits: bool = False


class PauseStatus(msgspec.Struct, frozen=True):
    """A pause of the producers.

    Attributes
    ----------
    reason : str
        As it was given; may be "".
    policy_version : int
        The trainer's when the pause began.
    age_s : float
        Seconds since then.
    """

    reason: str
    policy_version: int
    age_s: float


class FailedSample(msgspec.Struct, frozen=True):
    """A sample of an incomplete group that failed.

    Attributes
    ----------
    index : int
        Its index in the group.
    attempts : int
        Failed attempts, as far as they were reported.
    reason : str
        The reason of the last one.
    """

    index: int
    attempts: int
    reason: str


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """An incomplete group.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int | None
        None where its producers gave none.
    size, present : int
        Samples of its group, 0 where that is not known yet, and samples that are here.
    need : int
        Samples that complete it, at most `size`; 0 where that is not known yet.
    split : str
        Who it is for.
    missing : list[int]
        Missing indices; a status names the first of them.
    age_s : float
        Seconds since its first sample.
    failed : list[FailedSample]
        Missing samples that failed; a status names the first of them.
    """

    instance_id: str
    round: int | None
    size: int
    present: int
    missing: list[int]
    age_s: float
    failed: list[FailedSample] = []
    need: int = 0
    split: str = "train"


class GroupStatus(OpenGroup, frozen=True, kw_only=True):
    """An incomplete group, as its records show it.

    Attributes
    ----------
    producers : list[int]
        Numbers of the producers that sent its samples.
    """

    producers: list[int]


class WantedStatus(msgspec.Struct, frozen=True):
    """A retry request: a sample that producers are asked for again.

    Attributes
    ----------
    instance_id, round, index : str, int | None, int
        The sample.
    attempt : int
        1 for its first retry.
    reason : str
        Why the attempt before failed.
    asked_s : float
        Seconds since the request was published.
    taken_by : int | None
        Number of the producer that has taken it.
    split : str
        Who its group is for.
    """

    instance_id: str
    round: int | None
    index: int
    attempt: int
    reason: str
    asked_s: float
    taken_by: int | None
    split: str = "train"


class SplitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one split.

    Attributes
    ----------
    split : str
        Its label.
    acknowledged, dropped : int
        Trajectories released, since the bus was created.
    stashed : int
        Trajectories that wait, for their group or to be taken; as the collector last said.
    groups_incomplete, groups_ready : int
        Incomplete groups, and complete ones that wait for a consumer; the same.
    """

    split: str
    acknowledged: int
    dropped: int
    stashed: int
    groups_incomplete: int
    groups_ready: int


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A client of a daemon, and the leases that it holds.

    Attributes
    ----------
    client, pid : int
        Its number at the daemon; its process, as numbered in its own pid namespace.
    label : str
        The name that it gave itself.
    rank, world_size : int
        Which of how many; -1 and 1 without ranks.
    groups, trajectories : int
        Leased to it now.
    oldest_lease_s : float
        Seconds that it has held the oldest of them.
    split : str
        Whose groups it takes.
    waiting : bool
        Whether it waits for more.
    connected : bool
        False for a client that holds leases of an earlier connection and has not come back.
    waited_s : float
        Seconds that it has waited for groups in all, while it held none.
    stopped : bool
        Whether its process is stopped, as of a producer; whoever looks says so, not the daemon.
    """

    client: int
    pid: int
    label: str
    rank: int = -1
    world_size: int = 1
    groups: int = 0
    trajectories: int = 0
    oldest_lease_s: float = 0.0
    split: str = "train"
    waiting: bool = False
    connected: bool = True
    waited_s: float = 0.0
    stopped: bool = False


class DaemonStatus(msgspec.Struct, frozen=True):
    """A daemon's answer; where it gave none, all but `answers` and `problem` is empty.

    Attributes
    ----------
    answers : bool
        Whether it gave a status.
    problem : str
        Why not.
    pid, version, uptime_s : int, str, float
        Its process.
    recovering, draining : bool
        Whether it waits for clients of an earlier daemon, or for leases to end before it stops.
    in_doubt : int
        Groups that a client which has not come back may hold.
    world_size : int
        Ranks that share the steps; 0 without ranks.
    next_steps : dict[int, int]
        Each rank's next step.
    groups_open, groups_ready, groups_leased : int
        Incomplete groups; complete ones that wait to be taken; leased ones.
    leases : list[LeaseStatus]
        Its clients.
    failed_attempts : dict[str, int]
        Failed attempts since it began, by the kind of their reason.
    """

    answers: bool
    problem: str = ""
    pid: int = 0
    version: str = ""
    uptime_s: float = 0.0
    recovering: bool = False
    draining: bool = False
    in_doubt: int = 0
    world_size: int = 0
    next_steps: dict[int, int] = {}
    groups_open: int = 0
    groups_ready: int = 0
    groups_leased: int = 0
    leases: list[LeaseStatus] = []
    failed_attempts: dict[str, int] = {}


class LeadStatus(msgspec.Struct, frozen=True):
    """How far producers are ahead.

    Attributes
    ----------
    held, limit : int
        Groups that are begun and not delivered, and how many there may be now.
    max_lead, max_lead_versions : int | None
        The bounds that the bus was created with.
    """

    held: int
    limit: int
    max_lead: int | None
    max_lead_versions: int | None


class RelayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A relay at this bus, as it last said; what its journal has is counted entry by entry.

    Attributes
    ----------
    is_sink : bool
        Whether it puts records of other buses onto this one; else it takes this one's away.
    seen_s : float | None
        Seconds since it last said that it is there; None where it never did.
    begun : int
        How often a relay has begun here.
    entries : int
        Records of other buses that the journal has room for.
    held, kept, released : int
        Of a source: records that it holds; those of other splits, which stay; those let go.
    moving, put, refused : int
        Of a sink: records under way to this bus; put by this process; blocks that were refused.
    settled, intended : int
        Entries of records that are here, or were dropped, and that their source may hold too; and
        of those that are being put.
    held_for : dict[str, int]
        Those settled, by the identity of the bus that has not let them go.
    """

    is_sink: bool
    seen_s: float | None
    begun: int
    entries: int
    held: int
    kept: int
    released: int
    moving: int
    put: int
    refused: int
    settled: int
    intended: int
    held_for: dict[str, int]


class RequestsStatus(msgspec.Struct, frozen=True):
    """Samples that were requested, by what became of them.

    Attributes
    ----------
    offered : int
        Since the bus was created.
    open, claimed : int
        Not taken by a worker, or given back; and in the hands of workers.
    done, given_up : int
        Answered; and not made, since their group has ended without them.
    groups : int
        Requests that have not ended.
    unmade : int
        Those of them with a sample that is open or with a worker.
    by_split : dict[str, tuple[int, int]]
        `open` and `claimed` of each split that has any request that has not ended.
    taken_s : float | None
        Seconds since a worker took one; None where none ever did.
    """

    offered: int
    open: int
    claimed: int
    done: int
    given_up: int
    groups: int
    taken_s: float | None
    unmade: int = 0
    by_split: dict[str, tuple[int, int]] = {}


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How often values fell between bounds.

    Attributes
    ----------
    name : str
        "lag" in versions, "age" of a group in seconds, "length" in tokens, "score", or "solved":
        the part of a group's samples with a score of 0.5 or more, 0 to 1.
    bounds : list[float]
        Upper bounds of the buckets, ascending; the last bucket has none.
    buckets : list[int]
        Values up to each bound and above the one before; one more than bounds.
    sum : float
        Of all values.
    """

    name: str
    bounds: list[float]
    buckets: list[int]
    sum: float


class BusStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A bus at a glance.

    Attributes
    ----------
    name, path : str
        The bus and its file.
    identity : str
        128 random bits as hexadecimal digits, which no other bus has.
    layout_version : int
        Of the segment.
    age_s : float
        Seconds since it was created.
    capacity, free, segment_bytes, extent_bytes : int
        Bytes for records, of free extents, of the whole file, and of one extent.
    fill : float
        The part of the capacity that is leased to lanes, 0 to 1.
    space_wanted : bool
        Whether a producer waits for space.
    paused : PauseStatus | None
        The pause, where producers are paused.
    max_producers : int
        How many may be attached at once.
    policy_version : int
        The trainer's current one.
    in_use : bool
        Whether a living process has the segment open.
    ledger : LedgerStatus
        Where every trajectory is.
    groups_incomplete, groups_complete : int | None
        Undelivered groups, by the records in the ring; leased ones count as complete. None where
        the records were not sorted into groups.
    oldest_incomplete : list[GroupStatus]
        The incomplete groups that have waited longest, with their missing samples.
    collector : CollectorStatus
        The reader of the bus.
    producers : list[ProducerStatus]
        Slots that have been used, by producer number.
    wanted : list[WantedStatus]
        Open retry requests.
    lane_pause : LanePauseStatus | None
        Why workers get one sample at a time, where all samples of late failed alike.
    groups_given_up : int
        Groups that were given up for a failed sample, since the bus was created.
    lead : LeadStatus | None
        How far producers are ahead, where the bus bounds it.
    requests : RequestsStatus | None
        Samples that were requested, where any was.
    relay : RelayStatus | None
        The relay that carries records to or from this bus, where one has.
    groups_dropped : int
        Groups for training that were dropped whole, for any reason, since the bus was created.
    delivered : list[Histogram]
        Policy lag, age, length, score and solved part of what was delivered, since the bus was
        created.
    waited : WaitedStatus
        How long producers and trainers have waited.
    servers_left : bool
        Whether a trainer ended while inference servers were paused for its weights.
    splits : list[SplitStatus]
        Of each split that the bus knows, by number; "train" is the first.
    daemon : DaemonStatus | None
        The daemon's answer, where one serves the bus.
    schema : list[SchemaField] | None
        The fields that the bus declares; None where it declares none.
    schema_problem : str
        Why these cannot be read; "" where they can.
    verdict : Verdict | None
        What is to be said of it in one sentence; None where the records were not walked.
    """

    name: str
    path: str
    identity: str
    layout_version: int
    age_s: float
    capacity: int
    free: int
    segment_bytes: int
    extent_bytes: int
    fill: float
    space_wanted: bool
    paused: PauseStatus | None
    max_producers: int
    policy_version: int
    in_use: bool
    ledger: LedgerStatus
    groups_incomplete: int | None
    groups_complete: int | None
    oldest_incomplete: list[GroupStatus]
    collector: CollectorStatus
    producers: list[ProducerStatus]
    wanted: list[WantedStatus] = []
    lane_pause: LanePauseStatus | None = None
    groups_given_up: int = 0
    lead: LeadStatus | None = None
    requests: RequestsStatus | None = None
    relay: RelayStatus | None = None
    groups_dropped: int = 0
    delivered: list[Histogram] = []
    waited: WaitedStatus = WaitedStatus()
    servers_left: bool = False
    splits: list[SplitStatus] = []
    daemon: DaemonStatus | None = None
    schema: list[SchemaField] | None = None
    schema_problem: str = ""
    verdict: Verdict | None = None
