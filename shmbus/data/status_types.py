"""Facts about a bus: the structs of ``shmbus status``, of a daemon's answer, of a verdict.

Below the control messages, which carry some of these structs, and below all code that fills them.

Invariants:

- Field names are the keys of ``--json`` and of the wire: they stay.
- A struct holds values read once; nothing here reads a bus.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from shmbus.base.ledger import LanePauseStatus, RequestCounts, TrajectoryCounts
from shmbus.data.encoding import decodable
from shmbus.data.schema import SchemaField
from shmbus_ext import _core

#: Place of a group: incomplete; complete and not taken; with a trainer; or absent from the bus, now
#: or always.
GroupState: TypeAlias = Literal["open", "ready", "leased", "gone"]


class SampleCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sample of an incomplete group, as far as known."""

    index: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    #: asked: the sample failed, and producers are asked again. begun: a producer holds the sample's
    #: request. A missing sample lacks a cell.
    state: Literal["there", "failed", "asked", "begun"] = "there"
    #: Score of an arrived sample; None also for a score that is not finite.
    score: float | None = None
    #: Number of the producer that sent the sample or its failure, or holds its request.
    producer: int | None = None
    #: Seconds since the commit.
    age_s: float | None = None
    attempts: int = 0
    reason: str = ""
    #: Number of the producer that makes the sample again.
    taken_by: int | None = None


class GroupHead(msgspec.Struct, frozen=True, kw_only=True):
    """An incomplete group, its samples counted."""

    instance_id: str
    round: int | None
    #: Samples of its group, 0 if still unknown, and arrived samples.
    size: int
    present: int
    age_s: float
    #: Samples that complete the group, at most `size`; 0 if still unknown.
    need: int = 0
    split: str = "train"


class GroupCells(GroupHead, frozen=True, kw_only=True):
    """An incomplete group, sample by sample."""

    #: By index; a missing sample lacks a cell.
    cells: list[SampleCell]
    #: Cells omitted from the answer.
    cells_omitted: int = 0

    @property
    def missing(self) -> list[int]:
        """Indices of missing samples; empty for a partly shown group."""
        there = {cell.index for cell in self.cells if cell.state == "there"}
        return [] if self.cells_omitted else [i for i in range(self.size) if i not in there]


class SampleCommit(msgspec.Struct, frozen=True, array_like=True):
    """Producer and time of a sample's commit."""

    index: int
    #: The producer's number.
    producer: int
    unix_s: float


class BusEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event on a bus."""

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
    #: The producer or the trainer; "" without a name.
    who: str = ""
    #: The reason of a failure, a drop or a pause; the number of a policy version, or "3 to 5" for
    #: consecutive versions.
    text: str = ""
    #: The group; "" outside of groups.
    instance_id: str = ""
    round: int | None = None
    split: str = "train"
    index: int | None = None
    #: Samples of the group, or failed attempts of the sample.
    count: int = 0
    #: Arrival of a leased group's first sample; 0 if unknown.
    began_unix_s: float = 0.0
    #: The group's samples, while the bus is traced; the first of many.
    samples: list[SampleCommit] = []


class WaitedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of waiting on a bus since its creation, summed over all processes."""

    #: By producers: for space in the ring, for the end of a pause, and for the bound on begun
    #: groups (`max_lead`).
    space_s: float = 0.0
    paused_s: float = 0.0
    ahead_s: float = 0.0
    #: By trainers without a group, for the next.
    trainers_s: float = 0.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that keeps, or may keep, a bus from going on."""

    #: For example "producers_wait"; `shmbus.inspect.verdict` lists the kinds.
    kind: str
    #: The lost part of the work, 0 to 1, as an estimate: the rank of findings.
    cost: float
    #: The symptom, its cause, and the remedy; the latter two may be "".
    what: str
    cause: str = ""
    advice: str = ""
    #: The producers and trainers at fault.
    who: list[str] = []
    #: Incomplete groups that wait for them.
    groups: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A bus's state in a sentence."""

    #: Severity of the first finding.
    level: Literal["good", "note", "warning", "trouble"]
    #: The first finding: symptom, cause and remedy.
    sentence: str
    #: The documentation of the first finding, as a path in the repository; "" without a finding.
    page: str = ""
    #: All findings, the costliest first; empty for a healthy bus.
    findings: list[Finding] = []


#: Bounds of values decoded from a file or a socket; they count only there.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class LedgerStatus(TrajectoryCounts, frozen=True, kw_only=True):
    """The place of every committed trajectory, as far as an observer can tell."""

    # Without a collector, every undelivered trajectory counts as in the ring.

    #: Committed, and missing from a walk over the records; the next reader counts them as corrupt.
    #: Always 0 if `exact` is false.
    unreadable: int
    #: True if the undelivered were counted record by record, at a single instant. Otherwise the bus
    #: was too busy, and in_ring is the remainder of the counters.
    exact: bool
    #: True if the parts add up to `committed`, without unreadable records.
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
    """A used producer slot."""

    #: alive: a living process holds the slot's lock. dead: no process holds the lock, and the
    #: collector has not reaped the producer yet. closed: the producer left properly. gone: it left
    #: or died, and was reaped.
    state: Literal["alive", "dead", "closed", "gone"]
    #: Ring bytes in the lane's extents.
    held_bytes: int
    #: Reserved records in its extents, neither committed nor aborted; None if records were not
    #: read.
    reservations: int | None = None
    #: Seconds since the last commit, by the records still in the lane's extents; None without
    #: records.
    idle_s: float | None = None
    #: True for a stopped process, as by SIGSTOP or a debugger, if visible.
    stopped: bool = False
    #: Seconds of waiting by the slot's owners so far, for space, a pause or `max_lead`.
    waited_s: float = 0.0
    #: Samples given back unmade by the slot's owners so far (`requests.release`).
    released: Count = 0
    #: Samples that the present owner gave back, and failed, since its last answer; the last reason.
    given_back: int = 0
    failed: int = 0
    unmade_reason: str = ""
    #: Seconds of backoff in which shmbus hands the worker no sample, after unmade samples.
    rests_s: float = 0.0


class CollectorStatus(msgspec.Struct, frozen=True):
    """The collector, by its own last description."""

    #: True if a living process holds the collector's lock.
    alive: bool
    #: Its process; 0 on a bus that never met a collector.
    pid: int
    label: str
    #: Seconds since its last poll of the ring; None on a bus that never met a collector.
    seen_ago_s: float | None
    #: Its holdings; 0 for a dead collector.
    leased_groups: int
    leased_records: int
    stashed_groups: int
    stashed_records: int
    #: Ring bytes of its moved stragglers.
    stragglers_bytes: int
    #: Seconds since the oldest of those leases began.
    oldest_lease_s: float = 0.0
    #: True for a stopped process, as of a producer.
    stopped: bool = False
    #: True while it sleeps until records come.
    waits: bool = False


class PauseStatus(msgspec.Struct, frozen=True):
    """A pause of the producers."""

    reason: str
    #: The trainer's when the pause began.
    policy_version: int
    age_s: float


class WantedStatus(msgspec.Struct, frozen=True):
    """A retry request: producers are asked for the sample again."""

    instance_id: str
    round: int | None
    index: int
    #: 1 for its first retry.
    attempt: int
    #: Why the attempt before failed.
    reason: str
    asked_s: float
    taken_by: int | None
    #: Purpose of its group.
    split: str = "train"


class SplitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Read samples of a split."""

    split: str
    #: Trajectories released, since the bus was created.
    acknowledged: int
    dropped: int
    #: Trajectories that wait, for their group or for a take; by the collector's last note.
    stashed: int
    #: Incomplete groups, and complete groups that wait for a consumer; by the same note.
    groups_incomplete: int
    groups_ready: int


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A client of a daemon, and its leases."""

    #: Its number at the daemon; its process, as numbered in its own pid namespace.
    client: int
    pid: int
    label: str
    #: Rank and number of ranks; -1 and 1 without ranks.
    rank: int = -1
    world_size: int = 1
    groups: int = 0
    trajectories: int = 0
    #: Age of its oldest lease in seconds.
    oldest_lease_s: float = 0.0
    split: str = "train"
    waiting: bool = False
    #: False for a client that holds leases of an earlier connection and has not come back.
    connected: bool = True
    #: Total seconds of waiting for groups without holding a group.
    waited_s: float = 0.0
    #: Seconds since the answer to its last request for groups; None for a client without requests.
    asked_s: float | None = None
    #: True for a stopped process, as found by the status's reader; a daemon does not tell.
    stopped: bool = False


class DaemonStatus(msgspec.Struct, frozen=True):
    """A daemon's answer; without an answer, all but `answers` and `problem` is empty."""

    answers: bool
    problem: str = ""
    pid: int = 0
    version: str = ""
    uptime_s: float = 0.0
    #: True while it waits for clients of an earlier daemon, or for leases to end before a stop.
    recovering: bool = False
    draining: bool = False
    #: Groups possibly held by a client that has not come back.
    in_doubt: int = 0
    #: During such a wait: stopped processes with the bus open and not attached, as found by the
    #: status's reader.
    stopped_pids: list[int] = []
    #: Ranks that share the steps; 0 without ranks.
    world_size: int = 0
    next_steps: dict[int, int] = {}
    #: Incomplete groups; complete groups that wait for a take; leased groups.
    groups_open: int = 0
    groups_ready: int = 0
    groups_leased: int = 0
    leases: list[LeaseStatus] = []
    #: Age of the oldest incomplete group.
    oldest_s: float = 0.0
    #: Failed attempts since the daemon's start, by the kind of their reason.
    failed_attempts: dict[str, int] = {}


#: The weights of an inference server. behind: the pool has a newer version. loading: a load runs.
#: unknown: no row proves a version, and samples of the server have no label. assumed: a recorder
#: takes the trainer's version (`--assume-trainer-version`). asleep, waking: by the fleet's note.
EngineState: TypeAlias = Literal[
    "serving", "behind", "loading", "unknown", "assumed", "asleep", "waking"
]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server: by the rows of its ranks in the pool of weights, and by recorders."""

    #: The name in rows, which cut a long address.
    address: str
    state: EngineState
    #: The oldest version of the ranks; None for unknown.
    version: int | None = None
    #: The publication all ranks run, as in `Request.cache_salt`; "" for unknown.
    life: str = ""
    #: Reason of an unknown or refused version.
    why: str = ""
    #: Rows of ranks; 0 for a server known to recorders alone.
    ranks: int = 0
    #: Seconds since the publication of the server's version; for a server behind, seconds since the
    #: publication of the newest version.
    updated_s: float | None = None
    behind_s: float | None = None
    #: Seconds since the begin of a sleep.
    asleep_s: float | None = None
    #: Calls of recorders in flight, and health by recorders' probes: "up", "slow", "down". None and
    #: "" without a recorder.
    calls: int | None = None
    answers: str = ""


class LeadStatus(msgspec.Struct, frozen=True):
    """The producers' lead."""

    #: Groups begun and not delivered, and their current maximum.
    held: int
    limit: int
    #: The bus's bounds from its creation.
    max_lead: int | None
    max_lead_versions: int | None


class RelayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A relay at this bus, by its last note; the journal is counted entry by entry."""

    #: True if the relay puts records of other buses onto this bus; else it takes this bus's away.
    is_sink: bool
    #: Seconds since its last sign of life; None without a sign.
    seen_s: float | None
    #: Number of relay starts here.
    begun: int
    #: The journal's room for records of other buses.
    entries: int
    #: Of a source: held records; released records.
    held: int
    released: int
    #: Of a sink: records under way to this bus; put by this process; refused blocks.
    moving: int
    put: int
    refused: int
    #: Entries of records here or dropped, which their source may hold too; and of
    #: records under way.
    settled: int
    intended: int
    #: Settled entries, by the identity of the bus that still holds them.
    held_for: dict[str, int]


class RequestsStatus(RequestCounts, frozen=True, kw_only=True):
    """Requested samples by outcome."""

    #: Seconds since a worker's last take; None without a take.
    taken_s: float | None
    #: Open requests, with a sample open or held by a worker.
    unmade: int = 0
    #: `open` and `claimed` of each split with an open request.
    by_split: dict[str, tuple[int, int]]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How often values fell between bounds."""

    #: "lag" in versions, "age" of a group in seconds, "length" in tokens, "score", or "solved": the
    #: part of a group's samples with a score of 0.5 or more, 0 to 1.
    name: str
    #: Upper bounds of the buckets, ascending; the last bucket is unbounded.
    bounds: list[float]
    #: Values up to each bound and above the previous bound; a bucket more than bounds.
    buckets: list[int]
    sum: float


@decodable
class MismatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's newest comparison with the engine; None for a figure without a measurement."""

    #: The trainer's version.
    policy_version: int
    #: Dtypes of the forward passes; "" if unknown.
    engine: str = ""
    trainer: str = ""
    mean: float | None = None
    p99: float | None = None
    k3: float | None = None
    clipped: float | None = None
    policy_change: float | None = None
    precision_gap: float | None = None
    gap_share: float | None = None


class BusStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A bus at a glance."""

    name: str
    path: str
    #: 128 random bits as hexadecimal digits, unique to the bus.
    identity: str
    layout_version: int
    age_s: float
    #: Bytes for records, of free extents, of the whole file, and of one extent.
    capacity: int
    free: int
    segment_bytes: int
    extent_bytes: int
    #: The part of the capacity leased to lanes, 0 to 1.
    fill: float
    space_wanted: bool
    paused: PauseStatus | None
    max_producers: int
    policy_version: int
    in_use: bool
    ledger: LedgerStatus
    #: Undelivered groups, by the records in the ring; leased groups count as complete. None if the
    #: records were not sorted into groups.
    groups_incomplete: int | None
    groups_complete: int | None
    collector: CollectorStatus
    #: Used slots, by producer number.
    producers: list[ProducerStatus]
    wanted: list[WantedStatus] = []
    #: The lane's pause after like failures of recent samples; workers then get a sample at a time.
    lane_pause: LanePauseStatus | None = None
    #: Groups given up for a failed sample, since the bus was created.
    groups_given_up: int = 0
    #: The producers' lead, on a bus with a bound.
    lead: LeadStatus | None = None
    #: Requested samples, on a bus with requests.
    requests: RequestsStatus | None = None
    #: The relay that carries records to or from this bus, if present.
    relay: RelayStatus | None = None
    #: Training groups dropped whole, for every reason, since the bus was created.
    groups_dropped: int = 0
    #: Policy lag, age, length, score and solved part of deliveries, since the bus was
    #: created.
    delivered: list[Histogram] = []
    #: Waiting times of producers and trainers.
    waited: WaitedStatus = WaitedStatus()
    #: True if a trainer ended while inference servers were paused for its weights.
    servers_left: bool = False
    #: Engine and trainer compared, by the trainer's `note_mismatch`; None without a living trainer.
    mismatch: MismatchStatus | None = None
    #: Newest version of the bus's weights; None without weights in /dev/shm.
    weights_version: int | None = None
    #: Of each split known to the bus, by number; "train" is the first.
    splits: list[SplitStatus] = []
    #: Inference servers that read weights of this bus or serve recorders, by address.
    engines: list[EngineStatus] = []
    daemon: DaemonStatus | None = None
    #: The declared fields; None without a declaration.
    schema: list[SchemaField] | None = None
    #: Reason for an unreadable schema; "" if readable.
    schema_problem: str = ""
    #: The incomplete groups with the longest waits; empty if the records were not walked.
    oldest_incomplete: list[GroupCells] = []
    #: The bus's state in a sentence; None if the records were not walked.
    verdict: Verdict | None = None
