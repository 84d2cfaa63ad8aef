"""What an operator wants to know of a bus, gathered without disturbing it.

Invariants:

- All comes from the segment file (`inspect.segment_file`), read-only; what a daemon adds comes in
  at one place, `join`.
- The ledger either was counted record by record at one instant (`exact`), or says that it was not.
- Names in these structs are the names in ``--json``: they stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from shmbus import limits
from shmbus._format import label_text, printable
from shmbus.control import messages
from shmbus.control.ask import ask_status
from shmbus.inspect.open_groups import FailedSample, GroupStatus, OpenGroups
from shmbus.inspect.retry_table import WantedStatus, read_wanted
from shmbus.inspect.segment_file import Run, SegmentFile
from shmbus.inspect.undelivered import count_undelivered, counters
from shmbus.ledger import REASONS
from shmbus.segment.names import check_name
from shmbus_ext import _core

__all__ = [
    "BusStatus",
    "CollectorStatus",
    "DaemonStatus",
    "FailedSample",
    "GroupStatus",
    "LeaseStatus",
    "LedgerStatus",
    "PauseStatus",
    "ProducerStatus",
    "WantedStatus",
    "join",
    "read_status",
    "status_of",
]


class LedgerStatus(msgspec.Struct, frozen=True):
    """Where every committed trajectory is.

    Attributes
    ----------
    committed, acknowledged, leased, stashed, in_ring : int
        As in `shmbus.Ledger`. Without a collector, whatever is undelivered is in the ring.
    dropped : dict[str, int]
        By reason.
    unreadable : int
        Committed, and no longer found by a walk over the records; the next reader counts them as
        corrupt. Always 0 where `exact` is false.
    exact : bool
        Whether the undelivered were counted record by record, at one instant. Otherwise the bus
        was too busy, and in_ring is what the counters leave over.
    balanced : bool
        Whether the parts make up committed, with nothing unreadable.
    """

    committed: int
    acknowledged: int
    leased: int
    stashed: int
    in_ring: int
    dropped: dict[str, int]
    unreadable: int
    exact: bool
    balanced: bool


class ProducerStatus(msgspec.Struct, frozen=True):
    """One producer slot that has been used.

    Attributes
    ----------
    slot, producer_id, pid : int
        Its place, its number on the bus, its process as numbered in its own pid namespace.
    label : str
        How it calls itself.
    state : "alive" | "dead" | "closed" | "gone"
        alive: a living process holds its lock. dead: nobody does, and the collector has not
        noticed yet. closed: it left properly. gone: it died, and was cleaned up.
    committed, aborted : int
        Trajectories, by all that ever owned the slot.
    held_bytes : int
        Ring bytes in the lane's extents.
    reservations : int | None
        Of these, records that were begun and neither committed nor aborted; None where the records
        were not looked at.
    idle_s : float | None
        Seconds since its last commit, by the records that are still in its extents; None where
        none is.
    """

    slot: int
    producer_id: int
    pid: int
    label: str
    state: str
    committed: int
    aborted: int
    held_bytes: int
    reservations: int | None = None
    idle_s: float | None = None


class CollectorStatus(msgspec.Struct, frozen=True):
    """Who reads the bus, as it last said of itself.

    Attributes
    ----------
    alive : bool
        Whether a living process holds the collector's lock.
    pid : int
        Its process; 0 where nobody ever read the bus.
    label : str
        How it calls itself.
    seen_ago_s : float | None
        Seconds since it last polled; None where nobody ever did.
    leased_groups, leased_records, stashed_groups, stashed_records : int
        What it holds; 0 where it is not alive.
    oldest_lease_s : float
        Seconds since it gave out the oldest of those leases.
    stragglers_bytes : int
        Ring bytes of what it moved out of the way.
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


class PauseStatus(msgspec.Struct, frozen=True):
    """Somebody has asked producers to wait.

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


class LeaseStatus(msgspec.Struct, frozen=True):
    """A process that a daemon serves.

    Attributes
    ----------
    client, pid : int
        Its number at the daemon, and its process as numbered in its own pid namespace.
    label : str
        How it calls itself.
    rank, world_size : int
        Which of how many; -1 and 1 without ranks.
    groups, trajectories : int
        Leased to it now.
    oldest_lease_s : float
        Seconds that it has held the oldest of them.
    waiting : bool
        Whether it waits for more.
    connected : bool
        False for one that still holds leases and has not come back.
    """

    client: int
    pid: int
    label: str
    rank: int
    world_size: int
    groups: int
    trajectories: int
    oldest_lease_s: float
    waiting: bool
    connected: bool


class DaemonStatus(msgspec.Struct, frozen=True):
    """What the daemon says of itself; all but `answers` and `problem` is empty where it does not.

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
        Ranks that share the steps; 0 without.
    next_steps : dict[int, int]
        What each rank takes next.
    groups_open, groups_ready, groups_leased : int
        Incomplete groups; complete ones that nobody has taken; delivered ones.
    leases : list[LeaseStatus]
        Who is attached, and what each holds.
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


class BusStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A bus at a glance.

    Attributes
    ----------
    name, path : str
        The bus and its file.
    layout_version : int
        Of the segment.
    age_s : float
        Seconds since it was created.
    capacity, free, segment_bytes, extent_bytes : int
        Bytes for records, those in extents that nobody leases, of the whole file, and of a lease.
    fill : float
        The part of the capacity that is leased, 0 to 1.
    space_wanted : bool
        Whether a producer waits for space.
    paused : PauseStatus | None
        Why producers shall wait, where they shall.
    max_producers : int
        How many may be attached at once.
    policy_version : int
        The trainer's current one.
    in_use : bool
        Whether any living process has the segment open.
    ledger : LedgerStatus
        Where every trajectory is.
    groups_incomplete, groups_complete : int | None
        Undelivered groups, by what lies in the ring; leased ones count as complete. None where
        they were not looked at.
    oldest_incomplete : list[GroupStatus]
        The incomplete groups that have waited longest, and who is missing.
    wanted : list[WantedStatus]
        Samples that are asked for again, and who has taken them.
    groups_given_up : int
        Groups of which a sample failed for good, since the bus was created.
    collector : CollectorStatus
        Who reads.
    producers : list[ProducerStatus]
        Slots that have been used, by producer number.
    daemon : DaemonStatus | None
        What the daemon adds, where one serves the bus.
    """

    name: str
    path: str
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
    groups_given_up: int = 0
    daemon: DaemonStatus | None = None


def read_status(name: str, *, walk: bool = True) -> BusStatus:
    """Look at a bus.

    Parameters
    ----------
    name : str
        The bus.
    walk : bool
        Count the undelivered record by record, and group them. False costs microseconds, for what
        looks several times a second.

    Returns
    -------
    BusStatus

    Raises
    ------
    BusNotFoundError
        There is none.
    LayoutMismatchError
        It is unfinished, foreign, truncated or damaged; the message says which.
    PermissionError
        It is another user's.
    """
    with SegmentFile(check_name(name)) as file:
        file.require()
        return join(status_of(file, walk=walk), ask_status(name))


def join(status: BusStatus, reply: messages.StatusReply | str | None) -> BusStatus:
    """Add what a daemon says to what the segment says; the one place where the two meet.

    Parameters
    ----------
    status : BusStatus
        From the segment.
    reply : StatusReply, str or None
        From `shmbus.control.ask.ask_status`.

    Returns
    -------
    BusStatus
        The same where there is no daemon.
    """
    if reply is None:
        return status
    if isinstance(reply, str):
        return msgspec.structs.replace(
            status, daemon=DaemonStatus(answers=False, problem=printable(reply))
        )
    daemon = DaemonStatus(
        answers=True,
        pid=reply.pid,
        version=printable(reply.version),
        uptime_s=reply.uptime_s,
        recovering=reply.recovering,
        draining=reply.draining,
        in_doubt=reply.in_doubt,
        world_size=reply.world_size,
        next_steps=reply.next_steps,
        groups_open=reply.ledger.groups_open,
        groups_ready=reply.ledger.groups_ready,
        groups_leased=reply.ledger.groups_leased,
        leases=[
            LeaseStatus(
                client=client.client,
                pid=client.pid,
                label=printable(client.label),
                rank=client.rank,
                world_size=client.world_size,
                groups=client.groups,
                trajectories=client.trajectories,
                oldest_lease_s=client.oldest_lease_s,
                waiting=client.waiting,
                connected=client.connected,
            )
            for client in reply.clients
        ],
    )
    oldest = status.oldest_incomplete or [
        GroupStatus(
            instance_id=printable(group.instance_id),
            epoch=group.epoch,
            size=group.size,
            present=group.present,
            missing=group.missing[: limits.STATUS_MISSING],
            age_s=group.age_s,
            producers=[],
            failed=[
                FailedSample(failed.index, failed.attempts, printable(failed.reason))
                for failed in group.failed[: limits.STATUS_MISSING]
            ],
        )
        for group in reply.oldest
    ]
    return msgspec.structs.replace(status, daemon=daemon, oldest_incomplete=oldest)


def status_of(file: SegmentFile, *, walk: bool = True) -> BusStatus:
    """Look at a segment that is open and readable; see `read_status`."""
    file.refresh()
    runs = file.runs()
    collector = _collector(file, runs)
    ledger = count_ledger(file, collector, walk=walk)
    undelivered = ledger.leased + ledger.stashed + ledger.in_ring
    groups = OpenGroups(file, undelivered) if walk else None
    free = file.free_extents() * file.extent_bytes
    capacity = file.extent_count * file.extent_bytes
    header = file.header
    return BusStatus(
        name=printable(file.name),
        path=printable(file.path),
        layout_version=int(header["layout_version"]),
        age_s=max(0.0, time.time() - int(header["created_unix_ns"]) / 1e9),
        capacity=capacity,
        free=free,
        segment_bytes=int(header["segment_bytes"]),
        extent_bytes=file.extent_bytes,
        fill=1 - free / capacity,
        space_wanted=bool(header["space_wanted"]),
        paused=_pause(file),
        max_producers=file.max_producers,
        policy_version=int(header["policy_version"]),
        in_use=file.in_use(),
        ledger=ledger,
        groups_incomplete=groups.incomplete if groups else None,
        groups_complete=groups.complete if groups else None,
        oldest_incomplete=groups.oldest if groups else [],
        collector=collector,
        wanted=read_wanted(file),
        groups_given_up=int(header["groups_failed"]),
        producers=_producers(file, runs, walk=walk),
    )


def _pause(file: SegmentFile) -> PauseStatus | None:
    header = file.header
    if not int(header["paused"]):
        return None
    return PauseStatus(
        reason=label_text(header["pause_reason"]),
        policy_version=int(header["pause_policy_version"]),
        age_s=max(0.0, time.time() - int(header["pause_unix_ns"]) / 1e9),
    )


def _held_bytes(runs: Iterable[Run]) -> dict[int, int]:
    held: dict[int, int] = {}
    for run in runs:
        held[run.slot] = held.get(run.slot, 0) + run.room
    return held


def _collector(file: SegmentFile, runs: list[Run]) -> CollectorStatus:
    header = file.header
    alive = file.collector_alive()
    seen_ns = int(header["collector_seen_ns"])

    # A note that nobody stands behind any more says nothing about now.
    def note(what: str) -> int:
        return int(header[f"collector_{what}"]) if alive else 0

    return CollectorStatus(
        alive=alive,
        pid=int(header["collector_pid"]),
        label=label_text(header["collector_label"]),
        seen_ago_s=max(0.0, (_core.monotonic_ns() - seen_ns) / 1e9) if seen_ns else None,
        leased_groups=note("leased_groups"),
        leased_records=note("leased_records"),
        oldest_lease_s=_lease_age_s(header) if note("leased_groups") else 0.0,
        stashed_groups=note("stashed_groups"),
        stashed_records=note("stashed_records"),
        stragglers_bytes=_held_bytes(runs).get(file.max_producers, 0),
    )


def _lease_age_s(header: Any) -> float:
    since_ns = int(header["collector_lease_ns"])
    return max(0.0, (_core.monotonic_ns() - since_ns) / 1e9) if since_ns else 0.0


def _activity(file: SegmentFile, runs: list[Run]) -> dict[int, tuple[int, int]]:
    """Open reservations and the time of the newest commit, by slot."""
    found: dict[int, tuple[int, int]] = {}
    for run in runs:
        scan = file.scan(run, 2**64 - 1)
        if not scan.changed:
            reserved, newest_ns = found.get(run.slot, (0, 0))
            found[run.slot] = (reserved + scan.reserved, max(newest_ns, scan.newest_ns))
    return found


def _producers(file: SegmentFile, runs: list[Run], *, walk: bool) -> list[ProducerStatus]:
    found = []
    held = _held_bytes(runs)
    activity = _activity(file, runs) if walk else {}
    now_ns = _core.monotonic_ns()
    for slot, row in enumerate(file.slots()[:-1]):
        if not int(row["producer_id"]):
            continue
        reserved, newest_ns = activity.get(slot, (0, 0))
        state = int(row["state"])
        if state == _core.SLOT_ACTIVE:
            shown = "alive" if file.slot_alive(slot) else "dead"
        else:
            shown = "closed" if state == _core.SLOT_CLOSED else "gone"
        found.append(
            ProducerStatus(
                slot=slot,
                producer_id=int(row["producer_id"]),
                pid=int(row["pid"]),
                label=label_text(row["label"]),
                state=shown,
                committed=int(row["committed"]),
                aborted=int(row["aborted"]),
                held_bytes=held.get(slot, 0),
                reservations=reserved if walk else None,
                idle_s=max(0.0, (now_ns - newest_ns) / 1e9) if newest_ns else None,
            )
        )
    return sorted(found, key=lambda producer: producer.producer_id)


# -- the ledger -------------------------------------------------------------------------------


def count_ledger(file: SegmentFile, collector: CollectorStatus, *, walk: bool) -> LedgerStatus:
    """Make up the ledger, by a walk where one instant can be had."""
    attempts = limits.STATUS_ATTEMPTS if walk else 0
    walked: int | None = None
    counts = counters(file)
    for _ in range(attempts):
        walked = count_undelivered(file)
        again = counters(file)
        if walked is not None and again == counts:
            break
        walked, counts = None, again
    released, by_slot, _ = counts
    committed = sum(by_slot)
    undelivered = max(0, committed - sum(released))
    present = undelivered if walked is None else min(walked, undelivered)
    # What the collector says of itself was written a moment before.
    leased = min(collector.leased_records, present)
    stashed = min(collector.stashed_records, present - leased)
    unreadable = undelivered - present
    return LedgerStatus(
        committed=committed,
        acknowledged=released[0],
        leased=leased,
        stashed=stashed,
        in_ring=present - leased - stashed,
        dropped={r: n for r, n in zip(REASONS[1:], released[1:], strict=True) if n},
        unreadable=unreadable,
        exact=walked is not None,
        balanced=committed == sum(released) + (present if walked is None else walked),
    )
