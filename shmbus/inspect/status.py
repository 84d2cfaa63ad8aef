"""The status of a bus, gathered without disturbing the bus.

Invariants:

- Every value comes from the segment file (`inspect.segment_file`), read-only; only `join` adds
  a daemon's answer.
- The ledger tells if it was counted record by record at a single instant (`exact`).
- The rows of the weights decide about an inference server's version; a recorder's note adds calls
  and health.
- Texts of a segment or a daemon are escaped here, before they enter a struct.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from shmbus import errors
from shmbus.base import limits
from shmbus.base.format import label_text, printable
from shmbus.base.ledger import REASONS
from shmbus.control import messages
from shmbus.control.ask import ask_status
from shmbus.data.status_types import (
    BusStatus,
    CollectorStatus,
    DaemonStatus,
    EngineStatus,
    LedgerStatus,
    MismatchStatus,
    PauseStatus,
    ProducerStatus,
    SplitStatus,
)
from shmbus.inspect.groups import read_groups
from shmbus.inspect.processes import ProducerChecks, is_stopped, servers_left, stopped_pids
from shmbus.inspect.records import Run
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.tables import (
    read_histograms,
    read_lane_pause,
    read_lead,
    read_relay,
    read_requests,
    read_schema,
    read_waited,
    read_wanted,
)
from shmbus.inspect.undelivered import OpenGroups, count_undelivered, counters
from shmbus.inspect.verdict import judge
from shmbus.pool.pool_file import pool_path
from shmbus.pool.pool_status import PoolStatus, read_pool
from shmbus.pool.server_rows import WEIGHTS, row_name, server_versions
from shmbus.segment.names import check_name
from shmbus.segment.note_file import MISMATCH_KIND, read_notes
from shmbus.segment.recorder_files import EngineNote, read_recorders
from shmbus_ext import _core

#: Walks over the records in search of a count at a single instant, before a status declares the bus
#: too busy.
_ATTEMPTS = 3


def read_status(
    name: str, *, walk: bool = True, still_s: float | None = None, wants: str | None = None
) -> BusStatus:
    """Read the status of a bus."""
    with SegmentFile(check_name(name)) as file:
        file.require()
        status = join(status_of(file, walk=walk), ask_status(name))
    if not walk:
        return status
    if wants is not None:
        status = _with_waiting(status, os.getpid())
    groups = read_groups(name, ask=status.daemon is not None and status.daemon.answers)
    verdict = judge(status, groups.groups, omitted=groups.omitted, still_s=still_s, wants=wants)
    oldest = groups.groups[: limits.STATUS_GROUPS]
    return replace(status, verdict=verdict, oldest_incomplete=oldest)


def _with_waiting(status: BusStatus, pid: int) -> BusStatus:
    """Count a process as waiting: it asks between two waits."""
    if status.daemon is None:
        waits = status.collector.alive and status.collector.pid == pid
        collector = replace(status.collector, waits=waits)
        return replace(status, collector=collector)
    leases = [
        replace(lease, waiting=lease.waiting or lease.pid == pid) for lease in status.daemon.leases
    ]
    daemon = replace(status.daemon, leases=leases)
    return replace(status, daemon=daemon)


def join(status: BusStatus, reply: messages.StatusReply | str | None) -> BusStatus:
    """Add a daemon's answer to the status from the segment; the only place that joins the two."""
    if reply is None:
        return status
    if isinstance(reply, str):
        return replace(status, daemon=DaemonStatus(answers=False, problem=printable(reply)))
    daemon = replace(
        reply.daemon,
        version=printable(reply.daemon.version),
        stopped_pids=_stopped_clients(status, reply.daemon),
        leases=[
            replace(
                client,
                label=printable(client.label),
                stopped=client.connected and is_stopped(client.pid, status.path),
            )
            for client in reply.daemon.leases
        ],
    )
    return replace(status, daemon=daemon)


def _stopped_clients(status: BusStatus, daemon: DaemonStatus) -> list[int]:
    """Find stopped processes that may hold the leases of clients missing at a new daemon."""
    if not daemon.in_doubt or daemon.recovering:
        return []
    known = {each.pid for each in status.producers} | {each.pid for each in daemon.leases}
    return [pid for pid in stopped_pids(status.path) if pid not in known]


def status_of(
    file: SegmentFile, *, walk: bool = True, checks: ProducerChecks | None = None
) -> BusStatus:
    """Read the status of an open, readable segment; see `read_status`."""
    file.refresh()
    runs = file.runs()
    collector = _collector(file, runs)
    ledger = count_ledger(file, collector, walk=walk)
    groups = OpenGroups(file, ledger.undelivered) if walk else None
    free = file.free_extents() * file.extent_bytes
    capacity = file.extent_count * file.extent_bytes
    header = file.header
    schema, schema_problem = read_schema(file)
    histograms, useless = read_histograms(file)
    waited, notes = read_waited(file)
    return BusStatus(
        name=printable(file.name),
        path=printable(file.path),
        identity=header["identity"].tobytes().hex(),
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
        collector=collector,
        wanted=read_wanted(file),
        lane_pause=read_lane_pause(file),
        groups_given_up=int(header["groups_failed"]),
        lead=read_lead(file),
        requests=read_requests(file),
        relay=read_relay(file),
        groups_dropped=useless,
        delivered=histograms,
        waited=waited,
        servers_left=servers_left(file.name),
        mismatch=_mismatch(file.name),
        weights_version=_weights_version(file.name),
        splits=_splits(file, alive=collector.alive),
        engines=read_engines(file.name, int(header["policy_version"])),
        producers=_producers(file, runs, notes, checks or ProducerChecks(), walk=walk),
        schema=schema,
        schema_problem=schema_problem,
    )


def _mismatch(name: str) -> MismatchStatus | None:
    for note in read_notes(name, [MISMATCH_KIND], "trainer", MismatchStatus):
        return replace(note, engine=printable(note.engine), trainer=printable(note.trainer))
    return None


def _weights_version(name: str) -> int | None:
    try:
        there = os.path.exists(pool_path(name, WEIGHTS))
        return read_pool(name, WEIGHTS).version if there else None
    except (errors.ShmbusError, OSError, ValueError):  # gone, damaged, or a name without companions
        return None


def _splits(file: SegmentFile, *, alive: bool) -> list[SplitStatus]:
    """Read the splits with a label; a dead collector's notes about them do not count."""
    return [
        SplitStatus(
            split=printable(label),
            acknowledged=int(row["acked"]),
            dropped=int(row["dropped"]),
            stashed=int(row["stashed"]) if alive else 0,
            groups_incomplete=int(row["open_groups"]) if alive else 0,
            groups_ready=int(row["ready_groups"]) if alive else 0,
        )
        for label, row in file.labelled_splits()
    ]


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
    alive = _core.lock_held(file.fd, _core.LOCK_COLLECTOR)
    seen_ns = int(header["collector_seen_ns"])

    # A dead collector's note proves nothing about now.
    def note(what: str) -> int:
        return int(header[f"collector_{what}"]) if alive else 0

    now_ns = time.monotonic_ns()
    lease_ns = note("lease_ns") if note("leased_groups") else 0
    return CollectorStatus(
        alive=alive,
        pid=int(header["collector_pid"]),
        label=label_text(header["collector_label"]),
        seen_ago_s=max(0.0, (now_ns - seen_ns) / 1e9) if seen_ns else None,
        leased_groups=note("leased_groups"),
        leased_records=note("leased_records"),
        oldest_lease_s=max(0.0, (now_ns - lease_ns) / 1e9) if lease_ns else 0.0,
        stopped=alive and is_stopped(int(header["collector_pid"]), file.path),
        waits=alive and int(header["bell"]) != 0,
        stashed_groups=note("stashed_groups"),
        stashed_records=note("stashed_records"),
        stragglers_bytes=_held_bytes(runs).get(file.max_producers, 0),
    )


def _activity(file: SegmentFile, runs: list[Run]) -> dict[int, tuple[int, int]]:
    """Open reservations and the time of the newest commit, by slot."""
    found: dict[int, tuple[int, int]] = {}
    for run in runs:
        scan = file.scan(run, 2**64 - 1)
        if not scan.changed:
            reserved, newest_ns = found.get(run.slot, (0, 0))
            found[run.slot] = (reserved + scan.reserved, max(newest_ns, scan.newest_ns))
    return found


def _producers(
    file: SegmentFile,
    runs: list[Run],
    notes: list[dict[str, Any]],
    checks: ProducerChecks,
    *,
    walk: bool,
) -> list[ProducerStatus]:
    found = []
    held = _held_bytes(runs)
    activity = _activity(file, runs) if walk else {}
    now_ns = time.monotonic_ns()
    rows = file.slots()[:-1]
    used = np.flatnonzero(rows["producer_id"])
    names = ("producer_id", "pid", "label", "state", "committed", "aborted")
    columns = [rows[name][used].tolist() for name in names]
    checks.begin(len(used))
    for slot, number, pid, label, state, committed, aborted in zip(
        used.tolist(), *columns, strict=True
    ):
        reserved, newest_ns = activity.get(slot, (0, 0))
        alive, stopped = (False, False)
        if state == _core.SLOT_ACTIVE:
            alive, stopped = checks.check(file, slot, number, pid)
        found.append(
            ProducerStatus(
                slot=slot,
                producer_id=number,
                pid=pid,
                label=label_text(label),
                state=_producer_state(state, alive=alive),
                stopped=stopped,
                committed=committed,
                aborted=aborted,
                held_bytes=held.get(slot, 0),
                reservations=reserved if walk else None,
                idle_s=max(0.0, (now_ns - newest_ns) / 1e9) if newest_ns else None,
                **notes[slot],
            )
        )
    return sorted(found, key=lambda producer: producer.producer_id)


def _producer_state(state: int, *, alive: bool) -> Literal["alive", "dead", "closed", "gone"]:
    if state == _core.SLOT_ACTIVE:
        return "alive" if alive else "dead"
    return "closed" if state == _core.SLOT_CLOSED else "gone"


# -- the ledger -------------------------------------------------------------------------------


def count_ledger(file: SegmentFile, collector: CollectorStatus, *, walk: bool) -> LedgerStatus:
    """Make the ledger, by a walk of a single instant if the bus allows."""
    attempts = _ATTEMPTS if walk else 0
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
    # The collector's own note was written a moment before.
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


def read_engines(name: str, trainers: int) -> list[EngineStatus]:
    """Read the inference servers of a bus, by address; `trainers` is the trainer's version."""
    try:
        pool = read_pool(name, WEIGHTS)
    except (errors.ShmbusError, PermissionError):  # no readable pool now
        pool = None
    found = _by_rows(name, pool, trainers, time.time())
    for note in (engine for each in read_recorders(name) for engine in each.engines):
        at = printable(row_name(note.url))
        known = found.get(at) or _by_note(at, note)
        calls = (known.calls or 0) + note.calls
        found[at] = msgspec.structs.replace(known, calls=calls, answers=note.state)
    return [found[at] for at in sorted(found)]


def _by_rows(
    bus: str, pool: PoolStatus | None, trainers: int, now_s: float
) -> dict[str, EngineStatus]:
    slots = () if pool is None else pool.slots
    newest = max((slot.published_unix_ns for slot in slots if slot.newest), default=0)
    return {
        name: EngineStatus(
            address=name,
            state=server.state,
            version=server.version,
            life=server.life,
            why=server.why,
            ranks=server.ranks,
            updated_s=_since(server.published_unix_ns or 0, now_s),
            behind_s=_since(newest, now_s) if server.state == "behind" else None,
            asleep_s=_since(server.asleep_unix_ns or 0, now_s),
        )
        for name, server in server_versions(bus, pool, trainers).items()
    }


def _since(unix_ns: int, now_s: float) -> float | None:
    return max(0.0, now_s - unix_ns / 1e9) if unix_ns else None


def _by_note(address: str, note: EngineNote) -> EngineStatus:
    """Show a server without rows, by a recorder's note."""
    return EngineStatus(
        address=address,
        state="unknown"
        if note.version is None
        else "assumed" if note.version_by == "trainer" else "serving",
        version=note.version,
        why=printable(note.why),
    )  # fmt: skip
