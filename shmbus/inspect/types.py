"""What can be said of a bus: the structs of ``shmbus status``, of a daemon's answer, of a verdict.

Below the control messages, which carry some of these, and below everything that fills them in.

Invariants:

- Field names are the keys of ``--json`` and of the wire: they stay.
- A struct holds values that were read once; nothing here reads a bus.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from shmbus._schema import SchemaField
from shmbus.ledger import LanePauseStatus, TrajectoryCounts
from shmbus_ext import _core

#: Where a group is: incomplete; complete and not taken; with a trainer; or not on the bus, maybe
#: not any more.
GroupState: TypeAlias = Literal["open", "ready", "leased", "gone"]


class SampleCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sample of an incomplete group, as far as it is known."""

    index: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    #: asked: the sample failed, and producers are asked again. begun: a producer holds the sample's
    #: request. A missing sample has no cell.
    state: Literal["there", "failed", "asked", "begun"] = "there"
    #: Of a sample that is there; None also where it is not finite.
    score: float | None = None
    #: Number of the producer that sent the sample or its failure, or holds its request.
    producer: int | None = None
    #: Seconds since the commit.
    age_s: float | None = None
    attempts: int = 0
    reason: str = ""
    #: Number of the producer that makes it again.
    taken_by: int | None = None


class GroupHead(msgspec.Struct, frozen=True, kw_only=True):
    """An incomplete group, its samples counted."""

    instance_id: str
    round: int | None
    #: Samples of its group, 0 where that is not known yet, and samples that are here.
    size: int
    present: int
    age_s: float
    #: Samples that complete it, at most `size`; 0 where that is not known yet.
    need: int = 0
    split: str = "train"


class GroupCells(GroupHead, frozen=True, kw_only=True):
    """An incomplete group, sample by sample."""

    #: By index; a missing sample has none.
    cells: list[SampleCell]
    #: Cells that did not fit into the answer.
    cells_omitted: int = 0

    @property
    def missing(self) -> list[int]:
        """Indices that are not there; none of a group that is not shown whole."""
        there = {cell.index for cell in self.cells if cell.state == "there"}
        return [] if self.cells_omitted else [i for i in range(self.size) if i not in there]


class SampleCommit(msgspec.Struct, frozen=True, array_like=True):
    """Who committed a sample of a group, and when."""

    index: int
    #: The producer's number.
    producer: int
    unix_s: float


class BusEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened on a bus."""

    #: Grows with each event of a daemon.
    number: int
    #: When, in seconds since 1970.
    unix_s: float
    #: "daemon_began", "producer_came", "producer_left", "producer_died", "producer_gone" (left or
    #: died), "trainer_came", "trainer_left", "trainer_lost", "paused", "resumed",
    #: "requests_paused", "requests_resumed", "policy_version"; of a group "leased", "given_back",
    #: "acknowledged", "dropped"; of a sample "failed" and "asked" (it failed, and producers are
    #: asked for it again).
    kind: str
    #: The producer or the trainer; "" where nobody is to be named.
    who: str = ""
    #: The reason of a failure, a drop or a pause; the number of a policy version, or "3 to 5" where
    #: versions followed each other.
    text: str = ""
    #: The group; an id of "" where it is of none.
    instance_id: str = ""
    round: int | None = None
    split: str = "train"
    index: int | None = None
    #: Samples of the group, or failed attempts of the sample.
    count: int = 0
    #: Of a group that is leased: when its first sample came; 0 where that is not known.
    began_unix_s: float = 0.0
    #: Of a group, where somebody traces the bus: its samples, the first of many.
    samples: list[SampleCommit] = []


class WaitedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that were waited on a bus since it was created, of all who waited together."""

    #: By producers: for space in the ring, for the end of a pause, and for the bound on groups that
    #: may be begun (`max_lead`).
    space_s: float = 0.0
    paused_s: float = 0.0
    ahead_s: float = 0.0
    #: By trainers that held no group, for the next.
    trainers_s: float = 0.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that keeps a bus from going on, or may."""

    #: Such as "producers_wait"; `shmbus.inspect.verdict` lists them.
    kind: str
    #: The part of the work that it costs, 0 to 1, as an estimate: what findings are ranked by.
    cost: float
    #: What happens, who causes it, and what to do; the latter two may be "".
    what: str
    cause: str = ""
    advice: str = ""
    #: The producers and trainers that cause it.
    who: list[str] = []
    #: Incomplete groups that wait for them.
    groups: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of a bus in one sentence."""

    #: How bad the first finding is.
    level: Literal["good", "note", "warning", "trouble"]
    #: The first finding: what, who, and what to do.
    sentence: str
    #: All of them, the costliest first; empty where nothing is wrong.
    findings: list[Finding] = []


#: Bounds of what is decoded from a file or a socket; they count there only.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class LedgerStatus(TrajectoryCounts, frozen=True, kw_only=True):
    """Where every committed trajectory is, as an observer can tell."""

    # Without a collector, every undelivered trajectory counts as in the ring.

    #: Committed, and not found by a walk over the records; the next reader counts them as corrupt.
    #: Always 0 where `exact` is false.
    unreadable: int
    #: Whether the undelivered were counted record by record, at one instant. Otherwise the bus was
    #: too busy, and in_ring is what the counters leave over.
    exact: bool
    #: Whether the parts add up to `committed`, with nothing unreadable.
    balanced: bool


class ProducerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot in the producer table, and its counters."""

    #: Its position in the table; the producer's number on the bus; its process, as numbered in its
    #: own pid namespace.
    slot: Annotated[int, msgspec.Meta(ge=0, lt=_core.MAX_PRODUCERS)]
    producer_id: Count
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    label: str
    #: Trajectories, of all producers that ever owned the slot.
    committed: Count
    aborted: Count


class ProducerStatus(ProducerSlot, frozen=True, kw_only=True):
    """A producer slot that has been used."""

    #: alive: a living process holds the slot's lock. dead: no process does, and the collector has
    #: not reaped it yet. closed: the producer left properly. gone: it left or died, and was reaped.
    state: Literal["alive", "dead", "closed", "gone"]
    #: Ring bytes in the lane's extents.
    held_bytes: int
    #: Records in these that are neither committed nor aborted; None where records were not read.
    reservations: int | None = None
    #: Seconds since the last commit, by the records that are still in the lane's extents; None
    #: where none is.
    idle_s: float | None = None
    #: Whether its process is stopped, as by SIGSTOP or a debugger, as far as that can be seen.
    stopped: bool = False
    #: Seconds that the slot's owners so far have waited, for space, a pause or `max_lead`.
    waited_s: float = 0.0
    #: Samples that the slot's owners so far gave back unmade (`requests.release`).
    released: Count = 0
    #: Samples that the present owner gave back, and failed, since its last answer; the last reason.
    given_back: int = 0
    failed: int = 0
    unmade_reason: str = ""
    #: Seconds for which shmbus hands the worker no sample: it made none of the last ones.
    rests_s: float = 0.0


class CollectorStatus(msgspec.Struct, frozen=True):
    """The collector, as it last described itself."""

    #: Whether a living process holds the collector's lock.
    alive: bool
    #: Its process; 0 where no collector ever read the bus.
    pid: int
    label: str
    #: Seconds since it last polled the ring; None where no collector ever did.
    seen_ago_s: float | None
    #: What it holds; 0 where it is not alive.
    leased_groups: int
    leased_records: int
    stashed_groups: int
    stashed_records: int
    #: Ring bytes of the stragglers that it moved.
    stragglers_bytes: int
    #: Seconds since it gave the oldest of those leases.
    oldest_lease_s: float = 0.0
    #: Whether its process is stopped, as of a producer.
    stopped: bool = False
    #: Whether it sleeps until records come.
    waits: bool = False


class PauseStatus(msgspec.Struct, frozen=True):
    """A pause of the producers."""

    reason: str
    #: The trainer's when the pause began.
    policy_version: int
    age_s: float


class WantedStatus(msgspec.Struct, frozen=True):
    """A retry request: a sample that producers are asked for again."""

    instance_id: str
    round: int | None
    index: int
    #: 1 for its first retry.
    attempt: int
    #: Why the attempt before failed.
    reason: str
    asked_s: float
    taken_by: int | None
    #: Who its group is for.
    split: str = "train"


class SplitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one split."""

    split: str
    #: Trajectories released, since the bus was created.
    acknowledged: int
    dropped: int
    #: Trajectories that wait, for their group or to be taken; as the collector last said.
    stashed: int
    #: Incomplete groups, and complete ones that wait for a consumer; the same.
    groups_incomplete: int
    groups_ready: int


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A client of a daemon, and the leases that it holds."""

    #: Its number at the daemon; its process, as numbered in its own pid namespace.
    client: int
    pid: int
    label: str
    #: Which of how many; -1 and 1 without ranks.
    rank: int = -1
    world_size: int = 1
    groups: int = 0
    trajectories: int = 0
    #: Seconds that it has held the oldest of them.
    oldest_lease_s: float = 0.0
    split: str = "train"
    waiting: bool = False
    #: False for a client that holds leases of an earlier connection and has not come back.
    connected: bool = True
    #: Seconds that it has waited for groups in all, while it held none.
    waited_s: float = 0.0
    #: Seconds since its last request for groups was answered; None for a client without any.
    asked_s: float | None = None
    #: Whether its process is stopped, as whoever reads the status finds; a daemon does not say.
    stopped: bool = False


class DaemonStatus(msgspec.Struct, frozen=True):
    """A daemon's answer; where it gave none, all but `answers` and `problem` is empty."""

    answers: bool
    problem: str = ""
    pid: int = 0
    version: str = ""
    uptime_s: float = 0.0
    #: Whether it waits for clients of an earlier daemon, or for leases to end before it stops.
    recovering: bool = False
    draining: bool = False
    #: Groups that a client which has not come back may hold.
    in_doubt: int = 0
    #: While there are such: processes that are stopped, have the bus open and are not attached, as
    #: whoever reads the status finds.
    stopped_pids: list[int] = []
    #: Ranks that share the steps; 0 without ranks.
    world_size: int = 0
    next_steps: dict[int, int] = {}
    #: Incomplete groups; complete ones that wait to be taken; leased ones.
    groups_open: int = 0
    groups_ready: int = 0
    groups_leased: int = 0
    leases: list[LeaseStatus] = []
    #: Age of the oldest incomplete group.
    oldest_s: float = 0.0
    #: Failed attempts since it began, by the kind of their reason.
    failed_attempts: dict[str, int] = {}


#: The weights of an inference server. behind: the pool has a newer version. loading: a load runs.
#: unknown: no row proves a version, and samples of the server have no label. assumed: a recorder
#: takes the trainer's version (`--assume-trainer-version`).
EngineState: TypeAlias = Literal["serving", "behind", "loading", "unknown", "assumed"]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server: by the rows of its ranks in the pool of weights, and by recorders."""

    #: The name in rows, which cut a long address.
    address: str
    state: EngineState
    #: The oldest version of the ranks; None for unknown.
    version: int | None = None
    #: The publication that all ranks run, as in `Request.cache_salt`; "" for unknown.
    life: str = ""
    #: Reason of an unknown or refused version.
    why: str = ""
    #: Rows of ranks; 0 for a server known to recorders alone.
    ranks: int = 0
    #: Seconds since the publication of the server's version; for a server behind, seconds since the
    #: publication of the newest version.
    updated_s: float | None = None
    behind_s: float | None = None
    #: Calls of recorders in flight, and health by recorders' probes: "up", "slow", "down". None and
    #: "" without a recorder.
    calls: int | None = None
    answers: str = ""


class LeadStatus(msgspec.Struct, frozen=True):
    """How far producers are ahead."""

    #: Groups that are begun and not delivered, and how many there may be now.
    held: int
    limit: int
    #: The bounds that the bus was created with.
    max_lead: int | None
    max_lead_versions: int | None


class RelayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A relay at this bus, as it last said; what its journal has is counted entry by entry."""

    #: Whether it puts records of other buses onto this one; else it takes this one's away.
    is_sink: bool
    #: Seconds since it last said that it is there; None where it never did.
    seen_s: float | None
    #: How often a relay has begun here.
    begun: int
    #: Records of other buses that the journal has room for.
    entries: int
    #: Of a source: records that it holds; those let go.
    held: int
    released: int
    #: Of a sink: records under way to this bus; put by this process; blocks that were refused.
    moving: int
    put: int
    refused: int
    #: Entries of records that are here, or were dropped, and that their source may hold too; and of
    #: those that are being put.
    settled: int
    intended: int
    #: Those settled, by the identity of the bus that has not let them go.
    held_for: dict[str, int]


class RequestsStatus(msgspec.Struct, frozen=True):
    """Samples that were requested, by what became of them."""

    #: Since the bus was created.
    offered: int
    #: Not taken by a worker, or given back; and in the hands of workers.
    open: int
    claimed: int
    #: Answered; and not made, since their group has ended without them.
    done: int
    given_up: int
    #: Requests that have not ended.
    groups: int
    #: Seconds since a worker took one; None where none ever did.
    taken_s: float | None
    #: Requests that have not ended, with a sample that is open or with a worker.
    unmade: int = 0
    #: `open` and `claimed` of each split that has any request that has not ended.
    by_split: dict[str, tuple[int, int]] = {}


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How often values fell between bounds."""

    #: "lag" in versions, "age" of a group in seconds, "length" in tokens, "score", or "solved": the
    #: part of a group's samples with a score of 0.5 or more, 0 to 1.
    name: str
    #: Upper bounds of the buckets, ascending; the last bucket has none.
    bounds: list[float]
    #: Values up to each bound and above the one before; one more than bounds.
    buckets: list[int]
    sum: float


class BusStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A bus at a glance."""

    name: str
    path: str
    #: 128 random bits as hexadecimal digits, which no other bus has.
    identity: str
    layout_version: int
    age_s: float
    #: Bytes for records, of free extents, of the whole file, and of one extent.
    capacity: int
    free: int
    segment_bytes: int
    extent_bytes: int
    #: The part of the capacity that is leased to lanes, 0 to 1.
    fill: float
    space_wanted: bool
    paused: PauseStatus | None
    max_producers: int
    policy_version: int
    in_use: bool
    ledger: LedgerStatus
    #: Undelivered groups, by the records in the ring; leased ones count as complete. None where the
    #: records were not sorted into groups.
    groups_incomplete: int | None
    groups_complete: int | None
    collector: CollectorStatus
    #: Slots that have been used, by producer number.
    producers: list[ProducerStatus]
    wanted: list[WantedStatus] = []
    #: Why workers get one sample at a time, where all samples of late failed alike.
    lane_pause: LanePauseStatus | None = None
    #: Groups that were given up for a failed sample, since the bus was created.
    groups_given_up: int = 0
    #: How far producers are ahead, where the bus bounds it.
    lead: LeadStatus | None = None
    #: Samples that were requested, where any was.
    requests: RequestsStatus | None = None
    #: The relay that carries records to or from this bus, where one has.
    relay: RelayStatus | None = None
    #: Groups for training that were dropped whole, for any reason, since the bus was created.
    groups_dropped: int = 0
    #: Policy lag, age, length, score and solved part of what was delivered, since the bus was
    #: created.
    delivered: list[Histogram] = []
    #: How long producers and trainers have waited.
    waited: WaitedStatus = WaitedStatus()
    #: Whether a trainer ended while inference servers were paused for its weights.
    servers_left: bool = False
    #: Newest version of the bus's weights; None without weights in /dev/shm.
    weights_version: int | None = None
    #: Of each split that the bus knows, by number; "train" is the first.
    splits: list[SplitStatus] = []
    #: Inference servers that read weights of this bus or serve recorders, by address.
    engines: list[EngineStatus] = []
    daemon: DaemonStatus | None = None
    #: The fields that the bus declares; None where it declares none.
    schema: list[SchemaField] | None = None
    #: Why these cannot be read; "" where they can.
    schema_problem: str = ""
    #: The incomplete groups that have waited longest; empty where the records were not walked.
    oldest_incomplete: list[GroupCells] = []
    #: What is to be said of it in one sentence; None where the records were not walked.
    verdict: Verdict | None = None
