"""A bus's status as text, for ``shmbus status`` and for reports of a stall.

Invariant: texts of a segment are printed escaped; `shmbus.inspect.status` has escaped them.
"""

from __future__ import annotations

from shmbus._arguments import TRAIN
from shmbus._format import bar, fold, several, show_count, show_duration, show_size, table
from shmbus.inspect.schema import schema_text
from shmbus.inspect.types import BusStatus, DaemonStatus, RelayStatus

__all__ = ["status_text"]

_MISSING_SHOWN = 6
_WANTED_SHOWN = 8


def status_text(status: BusStatus) -> str:
    """Lay out a status in blocks, as `shmbus status` prints it."""
    blocks = [_head(status), _ledger(status), _groups(status)]
    if len(status.splits) > 1:
        blocks.append(_splits(status))
    if status.verdict is not None:
        blocks.insert(0, status.verdict.sentence)
    if status.wanted or status.groups_given_up or status.ledger.dropped.get("failed"):
        blocks.append(_wanted(status))
    if status.lead is not None or status.requests is not None:
        blocks.append(_requests(status))
    if status.relay is not None:
        blocks.append(_relay(status.relay))
    blocks.append(_collector(status))
    if status.daemon is not None:
        blocks.append(_daemon(status.daemon))
    blocks += [_waited(status), _producers(status)]
    schema = schema_text(status.schema, status.schema_problem)
    return "\n\n".join([*blocks, schema] if schema else blocks)


def _head(status: BusStatus) -> str:
    used = status.capacity - status.free
    lines = [
        f"bus {status.name}  {show_size(status.capacity)}, created "
        f"{show_duration(status.age_s)} ago, policy version {status.policy_version}",
        f"  identity {status.identity}",
        f"  {bar(status.fill, 40)} {status.fill:.0%} in use ({show_size(used)})",
    ]
    if status.paused is not None:
        lines.append(
            f"  producers are paused since policy version {status.paused.policy_version}, for "
            f"{show_duration(status.paused.age_s)}: {status.paused.reason or 'no reason given'}"
        )
    if status.space_wanted:
        lines.append("  a producer waits for space")
    if not status.in_use:
        lines.append("  no living process has it open: `shmbus gc` would remove it")
    return "\n".join(lines)


def _ledger(status: BusStatus) -> str:
    ledger = status.ledger
    rows = [
        ("committed", ledger.committed),
        ("= acknowledged", ledger.acknowledged),
        ("+ leased", ledger.leased),
        ("+ stashed", ledger.stashed),
        ("+ in the ring", ledger.in_ring),
        *((f"+ dropped: {reason}", count) for reason, count in ledger.dropped.items()),
    ]
    if ledger.unreadable:
        rows.append(("+ unreadable", ledger.unreadable))
    how = "counted record by record" if ledger.exact else "by the counters; too busy to walk"
    verdict = "balances" if ledger.balanced else "does not balance"
    lines = [f"  {what:<24}{show_count(count):>14}" for what, count in rows]
    return "\n".join([f"ledger  {verdict}, {how}", *lines])


def _groups(status: BusStatus) -> str:
    if status.groups_incomplete is None or status.groups_complete is None:
        return "groups  too many trajectories to sort"
    lines = [
        f"groups  {show_count(status.groups_incomplete)} incomplete, "
        f"{show_count(status.groups_complete)} complete and not acknowledged"
    ]
    rows = []
    for group in status.oldest_incomplete:
        missing = ", ".join(map(str, group.missing[:_MISSING_SHOWN]))
        if group.size - group.present > _MISSING_SHOWN:
            missing += ", ..."
        round = "" if group.round is None else f" round {group.round}"
        if group.split != TRAIN:
            round += f" of {group.split}"
        needs = f"{group.need} needed of {group.size}" if group.need < group.size else group.size
        rows.append(
            (
                group.instance_id + round,
                f"{group.present} of {needs}",
                show_duration(group.age_s),
                missing,
                ", ".join(map(str, group.producers)),
            )
        )
    if rows:
        lines.append(table(("oldest", "present>", "waits>", "missing", "from producers"), rows))
    alike: dict[str, list[str]] = {}
    for group in status.oldest_incomplete:
        for failed in group.failed:
            why = f"{_times(failed.attempts)}: {failed.reason}"
            alike.setdefault(why, []).append(f"{group.instance_id}[{failed.index}]")
    lines += [f"  failed: {fold(samples)}, {why}" for why, samples in alike.items()]
    return "\n".join(lines)


def _splits(status: BusStatus) -> str:
    rows = [
        (
            split.split,
            show_count(split.acknowledged),
            show_count(split.dropped),
            show_count(split.stashed),
            show_count(split.groups_incomplete),
            show_count(split.groups_ready),
        )
        for split in status.splits
    ]
    head = ("split", "acknowledged>", "dropped>", "stashed>", "groups incomplete>", "ready>")
    lines = ["splits", table(head, rows)]
    lines += [
        f"  split {split.split!r} has {several(split.groups_ready, 'complete group')}: "
        f"take them with Consumer({status.name!r}, split={split.split!r}), or take(split=...)"
        for split in status.splits
        if split.groups_ready and split.split != TRAIN
    ]
    return "\n".join(lines)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _requests(status: BusStatus) -> str:
    lines = []
    if status.requests is not None:
        lane = status.requests
        served = (
            "nobody has ever taken one: start workers that call Producer.requests.next"
            if lane.taken_s is None
            else f"the last was taken {show_duration(lane.taken_s)} ago"
        )
        lines.append(
            f"requests  {several(lane.groups, 'group')}; {served}\n"
            f"  of {several(lane.offered, 'sample')} {show_count(lane.open)} open, "
            f"{show_count(lane.claimed)} with workers, {show_count(lane.done)} done, "
            f"{show_count(lane.given_up)} given up"
        )
    if status.lead is not None:
        begun = several(status.lead.held, "group", "are")
        limit = show_count(status.lead.limit)
        lines.append(f"lead  {begun} begun and not delivered, of at most {limit} now")
    return "\n".join(lines)


def _relay(relay: RelayStatus) -> str:
    seen = "never seen" if relay.seen_s is None else f"seen {show_duration(relay.seen_s)} ago"
    if not relay.is_sink:
        line = (
            f"relay  takes this bus's records to trainers; {seen}; holds "
            f"{show_count(relay.held)}, has let {show_count(relay.released)} go"
        )
        kept = f"; {show_count(relay.kept)} of other splits stay here" if relay.kept else ""
        return line + kept
    lines = [
        f"relay  puts other buses' records here; {seen}; {show_count(relay.moving)} under way, "
        f"{show_count(relay.intended)} being put, {show_count(relay.settled)} of "
        f"{show_count(relay.entries)} entries wait for their source"
    ]
    if relay.refused:
        lines.append(f"  {show_count(relay.refused)} blocks were refused; the relay's log says why")
    lines += [
        f"  bus {bus}: {show_count(count)} are held there too"
        for bus, count in sorted(relay.held_for.items())
    ]
    return "\n".join(lines)


def _wanted(status: BusStatus) -> str:
    lines = [
        f"failures  {show_count(status.ledger.dropped.get('failed', 0))} dropped, "
        f"{show_count(len(status.wanted))} asked for again, "
        f"{several(status.groups_given_up, 'group')} given up"
    ]
    rows = [
        (
            f"{wanted.instance_id}[{wanted.index}]"
            + ("" if wanted.round is None else f" round {wanted.round}"),
            str(wanted.attempt),
            show_duration(wanted.asked_s),
            "nobody" if wanted.taken_by is None else f"producer {wanted.taken_by}",
            wanted.reason,
        )
        for wanted in status.wanted[:_WANTED_SHOWN]
    ]
    if rows:
        lines.append(table(("wanted", "attempt>", "since>", "taken by", "because"), rows))
    return "\n".join(lines)


def _collector(status: BusStatus) -> str:
    collector = status.collector
    if collector.seen_ago_s is None:
        return "collector  none has ever read this bus"
    who = f"{collector.label} (pid {collector.pid})"
    if not collector.alive:
        # One that closed has taken its pid out of the segment.
        last = who if collector.pid else f"{collector.label}, which closed"
        return f"collector  none; the last was {last}"
    held = f" (for {show_duration(collector.oldest_lease_s)})" if collector.leased_groups else ""
    return (
        f"collector  {who}, polled {show_duration(collector.seen_ago_s)} ago; holds "
        f"{show_count(collector.leased_groups)} leased{held} and "
        f"{show_count(collector.stashed_groups)} stashed groups"
    )


def _daemon(daemon: DaemonStatus) -> str:
    if not daemon.answers:
        return f"daemon  {daemon.problem}"
    lines = [
        f"daemon  pid {daemon.pid}, shmbus {daemon.version}, up {show_duration(daemon.uptime_s)}; "
        f"groups: {show_count(daemon.groups_open)} incomplete, "
        f"{show_count(daemon.groups_ready)} ready, {show_count(daemon.groups_leased)} leased"
    ]
    if daemon.recovering:
        lines.append(
            "  recovering: it waits for clients of an earlier daemon, which may hold "
            f"{several(daemon.in_doubt, 'group')}"
        )
    if daemon.draining:
        lines.append("  draining: it stops when all leases have ended")
    rows = [
        (
            str(lease.client),
            str(lease.pid),
            lease.label,
            "-" if lease.rank < 0 else f"{lease.rank} of {lease.world_size}",
            "" if lease.rank < 0 else str(daemon.next_steps.get(lease.rank, "")),
            show_count(lease.groups),
            show_count(lease.trajectories),
            show_duration(lease.oldest_lease_s) if lease.groups else "-",
            "disconnected"
            if not lease.connected
            else "waits for groups"
            if lease.waiting
            else "works",
        )
        for lease in daemon.leases
    ]
    if not rows:
        return "\n".join([*lines, "  no trainer is attached"])
    head = ("client>", "pid>", "label", "rank", "step>", "groups>", "trajectories>", "held>", "now")
    return "\n".join([*lines, table(head, rows)])


def _waited(status: BusStatus) -> str:
    waited = status.waited
    return (
        f"waited  producers {show_duration(waited.space_s)} for space, "
        f"{show_duration(waited.paused_s)} in pauses, {show_duration(waited.ahead_s)} for the "
        f"bound on groups\n  trainers {show_duration(waited.trainers_s)} for groups"
    )


def _producers(status: BusStatus) -> str:
    if not status.producers:
        return "producers  none has ever attached"
    counts = {
        state: sum(producer.state == state for producer in status.producers)
        for state in ("alive", "dead", "closed", "gone")
    }
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    rows = [
        (
            str(producer.producer_id),
            str(producer.pid),
            producer.label,
            "stopped" if producer.stopped else producer.state,
            show_count(producer.committed),
            show_count(producer.aborted),
            show_size(producer.held_bytes),
            "-" if producer.reservations is None else show_count(producer.reservations),
            "-" if producer.idle_s is None else show_duration(producer.idle_s),
        )
        for producer in status.producers
    ]
    head = ("id>", "pid>", "label", "state", "committed>", "aborted>", "holds>", "open>", "idle>")
    return f"producers  {summary} of {status.max_producers} slots\n{table(head, rows)}"
