"""A bus's status, incomplete groups, events and a group's history as text for commands.

Invariant: pure functions. The readers already escaped a segment's texts, except a schema's, which
are escaped here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shmbus.base.arguments import TRAIN
from shmbus.base.format import (
    bar,
    fold,
    printable,
    several,
    show_count,
    show_duration,
    show_size,
    table,
)
from shmbus.data.schema import SchemaField
from shmbus.data.status_types import (
    BusEvent,
    BusStatus,
    DaemonStatus,
    GroupCells,
    ProducerStatus,
    RelayStatus,
    SampleCell,
)
from shmbus.inspect.groups import Groups
from shmbus.inspect.history import GroupHistory

_WANTED_SHOWN = 8
#: Sources of a trainer's bus, those with the most records.
_BUSES = 8


def status_text(status: BusStatus, most: int | None = None) -> str:
    """Lay out a status in blocks, as `shmbus status` does; `most` bounds the rows of a table."""
    blocks = [_head(status), _ledger(status), _groups(status)]
    if len(status.splits) > 1:
        blocks.append(_splits(status))
    if status.verdict is not None:
        page = f"\nsee {status.verdict.page}" if status.verdict.page else ""
        blocks.insert(0, status.verdict.sentence + page)
    if status.wanted or status.groups_given_up or status.ledger.dropped.get("failed"):
        blocks.append(_wanted(status))
    if status.lead is not None or status.requests is not None:
        blocks.append(_requests(status))
    if status.relay is not None:
        blocks.append(_relay(status.relay))
    blocks.append(_collector(status))
    if status.daemon is not None:
        blocks.append(_daemon(status.daemon, most))
    blocks += [_waited(status), _producers(status, most)]
    if status.engines:
        blocks.append(_engines(status, most))
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
    if (gap := status.mismatch) is not None and gap.mean is not None:
        rounding = "" if gap.gap_share is None else f", {gap.gap_share:.0%} of that by rounding"
        lines.append(
            f"  logprobs of engine and trainer differ by {gap.mean:.4f} a token{rounding}; "
            f"{gap.clipped or 0:.0%} of the tokens are clipped"
        )
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
    head = (
        f"groups  {show_count(status.groups_incomplete)} incomplete, "
        f"{show_count(status.groups_complete)} complete and not acknowledged"
    )
    return "\n".join([head, *_group_lines(status.oldest_incomplete)])


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
        return (
            f"relay  takes this bus's records to trainers; {seen}; holds "
            f"{show_count(relay.held)}, has let {show_count(relay.released)} go"
        )
    lines = [
        f"relay  puts other buses' records here; {seen}; {show_count(relay.moving)} under way, "
        f"{show_count(relay.intended)} being put, {show_count(relay.settled)} of "
        f"{show_count(relay.entries)} entries wait for their source"
    ]
    if relay.refused:
        lines.append(f"  {show_count(relay.refused)} blocks were refused; the relay's log says why")
    held = sorted(relay.held_for.items(), key=lambda each: (-each[1], each[0]))
    lines += [
        f"  bus {bus}: {show_count(count)} are held there too" for bus, count in held[:_BUSES]
    ]
    if rest := held[_BUSES:]:
        count = sum(count for _, count in rest)
        lines.append(f"  {show_count(len(rest))} more buses: {show_count(count)}")
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
        # A closed collector removed its pid from the segment.
        last = who if collector.pid else f"{collector.label}, which closed"
        return f"collector  none; the last was {last}"
    held = f" (for {show_duration(collector.oldest_lease_s)})" if collector.leased_groups else ""
    return (
        f"collector  {who}, polled {show_duration(collector.seen_ago_s)} ago; holds "
        f"{show_count(collector.leased_groups)} leased{held} and "
        f"{show_count(collector.stashed_groups)} stashed groups"
    )


def _daemon(daemon: DaemonStatus, most: int | None) -> str:
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
        for lease in daemon.leases[:most]
    ]
    if not rows:
        return "\n".join([*lines, "  no trainer is attached"])
    head = ("client>", "pid>", "label", "rank", "step>", "groups>", "trajectories>", "held>", "now")
    return "\n".join([*lines, table(head, rows), *_more(len(daemon.leases) - len(rows))])


def _more(hidden: int) -> list[str]:
    return [f"  and {show_count(hidden)} more: `shmbus status` shows all"] if hidden else []


def _waited(status: BusStatus) -> str:
    waited = status.waited
    return (
        f"waited  producers {show_duration(waited.space_s)} for space, "
        f"{show_duration(waited.paused_s)} in pauses, {show_duration(waited.ahead_s)} for the "
        f"bound on groups\n  trainers {show_duration(waited.trainers_s)} for groups"
    )


def _producers(status: BusStatus, most: int | None) -> str:
    if not status.producers:
        return "producers  none has ever attached"
    counts = {
        state: sum(producer.state == state for producer in status.producers)
        for state in ("alive", "dead", "closed", "gone")
    }
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    # With omitted rows: stopped and dead producers first, then the longest without a commit.
    shown = status.producers
    if most is not None:
        shown = sorted(shown, key=_suspicion)[:most]
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
            show_count(producer.released),
            producer.unmade_reason,
        )
        for producer in shown
    ]
    head = (
        "id>", "pid>", "label", "state", "committed>", "aborted>", "holds>", "open>", "idle>",
        "released>", "unmade",
    )  # fmt: skip
    lines = [f"producers  {summary} of {status.max_producers} slots", table(head, rows)]
    return "\n".join([*lines, *_more(len(status.producers) - len(rows))])


def _suspicion(producer: ProducerStatus) -> tuple[bool, float]:
    healthy = producer.state in ("alive", "closed") and not producer.stopped
    return healthy, -(producer.idle_s or 0.0)


def _engines(status: BusStatus, most: int | None) -> str:
    ranked = sorted(status.engines, key=lambda engine: engine.state != "unknown")
    rows = [
        (
            engine.address,
            engine.answers or "-",
            engine.state,
            "-" if engine.version is None else str(engine.version),
            "-" if engine.updated_s is None else show_duration(engine.updated_s),
            "-" if engine.calls is None else show_count(engine.calls),
            engine.why,
        )
        for engine in ranked[:most]
    ]
    head = ("server", "answers", "weights", "version>", "published>", "calls>", "")
    lines = [f"engines  {several(len(ranked), 'inference server')}", table(head, rows)]
    return "\n".join([*lines, *_more(len(ranked) - len(rows))])


def schema_text(fields: list[SchemaField] | None, problem: str) -> str:
    """Lay out a schema as a block of text; "" without a schema."""
    if problem:
        return f"schema  cannot be read: {problem}"
    if fields is None:
        return ""
    rows = [
        (
            field.name,
            field.dtype,
            "any" if field.shape is None else _shape_text(field.shape),
            "" if field.required else "may be missing",
        )
        for field in fields
    ]
    return f"schema\n{table(('field', 'dtype', 'shape', ''), rows)}"


def _shape_text(shape: tuple[int | str | None, ...]) -> str:
    return f"[{', '.join('*' if size is None else printable(str(size)) for size in shape)}]"


#: Signs of a row; a larger group is cut, with a note.
_SIGNS = 64
_SIGN = {"there": "#", "failed": "x", "asked": "?", "begun": "+"}
_MISSING = "."
#: Kinds of failures told in words.
_FAILURES = 20


def groups_text(found: Groups) -> str:
    """Lay out incomplete groups."""
    omitted = f", and {show_count(found.omitted)} more" if found.omitted else ""
    head = f"{several(len(found.groups), 'incomplete group')}, the oldest first{omitted}"
    return "\n".join([head, *_group_lines(found.groups)])


def _group_lines(groups: Sequence[GroupCells]) -> list[str]:
    if not groups:
        return []
    head = ("oldest", "present>", "waits>", "samples", "from producers", "begun by")
    lines = [
        table(head, [_row(group) for group in groups]),
        f"  # there   {_MISSING} missing   + begun   x failed   ? asked for again",
    ]
    alike: dict[str, list[str]] = {}
    for group in groups:
        for cell in group.cells:
            if cell.state in ("failed", "asked"):
                alike.setdefault(_why(cell), []).append(f"{group.instance_id}[{cell.index}]")
    told = list(alike.items())[:_FAILURES]
    lines += [f"  failed: {fold(samples)}, {why}" for why, samples in told]
    if len(alike) > _FAILURES:
        lines.append(f"  and {show_count(len(alike) - _FAILURES)} more kinds of failures: --json")
    return lines


def _row(group: GroupCells) -> tuple[str, ...]:
    signs = dict.fromkeys(range(min(group.size, _SIGNS)), _MISSING)
    signs |= {cell.index: _SIGN[cell.state] for cell in group.cells if cell.index < _SIGNS}
    senders, makers = (
        ", ".join(map(str, sorted({c.producer for c in cells if c.producer is not None})))
        for cells in (
            [c for c in group.cells if c.state != "begun"],
            [c for c in group.cells if c.state == "begun"],
        )
    )
    round = "" if group.round is None else f" round {group.round}"
    needs = f"{group.need} needed of {group.size}" if 0 < group.need < group.size else group.size
    return (
        group.instance_id + round + ("" if group.split == "train" else f" ({group.split})"),
        f"{group.present} of {needs}",
        show_duration(group.age_s),
        "".join(signs[index] for index in sorted(signs)) + ("..." if group.size > _SIGNS else ""),
        senders,
        makers,
    )


def _why(cell: SampleCell) -> str:
    times = "once" if cell.attempts == 1 else f"{cell.attempts} times"
    again = "" if cell.state == "failed" else "; asked for again"
    if cell.taken_by is not None:
        again += f", producer {cell.taken_by} makes it"
    return f"{times}: {cell.reason or 'no reason given'}{again}"


def _cells_text(group: GroupCells) -> str:
    rows = [
        (
            str(cell.index),
            cell.state,
            "" if cell.score is None else f"{cell.score:g}",
            "" if cell.producer is None else str(cell.producer),
            "" if cell.age_s is None else show_duration(cell.age_s),
            f"failed {_why(cell)}" if cell.state in ("failed", "asked") else "",
        )
        for cell in group.cells[:_SIGNS]
    ]
    hidden = len(group.cells) - len(rows) + group.cells_omitted
    more = f"\n  and {show_count(hidden)} more: --json" if hidden else ""
    head = ("sample>", "what", "score>", "producer>", "since>", "")
    return table(head, rows) + more


_WORDS = {
    "daemon_began": "the daemon began",
    "producer_came": "came",
    "producer_left": "left",
    "producer_died": "died",
    "producer_gone": "left or died",
    "trainer_came": "came to take groups",
    "trainer_left": "left",
    "trainer_lost": "lost its connection",
    "paused": "producers were paused",
    "resumed": "producers were resumed",
    "requests_paused": "requests are given out one at a time",
    "requests_resumed": "requests are given out again",
    "policy_version": "policy version",
    "leased": "leased to",
    "given_back": "given back",
    "acknowledged": "acknowledged by",
    "dropped": "dropped",
    "failed": "failed for good",
    "asked": "failed, and asked for again",
}
_STATES = {
    "open": "incomplete",
    "ready": "complete, and waits for a trainer",
    "leased": "leased",
    "gone": "not on the bus",
}


def events_text(events: Sequence[BusEvent]) -> list[str]:
    """Lay out events, a line each."""
    return [_line(event) for event in events]


def _line(event: BusEvent) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
    word = _WORDS.get(event.kind, event.kind)
    if not event.instance_id:
        parts = [event.who, word] if event.kind.startswith(("producer", "trainer")) else [word]
        text = f"{'s' * (' ' in event.text)} {event.text}" if event.kind == "policy_version" else ""
        if event.kind in ("paused", "requests_paused"):
            text = f": {event.text or 'no reason given'}"
        return f"{at}  {' '.join(parts)}{text}"
    group = event.instance_id + ("" if event.round is None else f" round {event.round}")
    if event.split != "train":
        group += f" ({event.split})"
    sample = "" if event.index is None else f"[{event.index}]"
    text = f"{at}  {group}{sample}  {word}"
    if event.kind in ("failed", "asked"):
        times = "" if event.count < 2 else f" for the {event.count}th time"
        by = f" at {event.who}" if event.who else ""
        return f"{text}{times}{by}: {event.text or 'no reason given'}"
    if event.kind == "dropped":
        by = f" by {event.who}" if event.who else ""
        return f"{text}{by} as {event.text}"
    return f"{text} {event.who}".rstrip()


def history_text(name: str, found: GroupHistory) -> str:
    """Lay out the history of a group."""
    state = _STATES[found.state]
    if found.state == "leased":
        state = f"leased to {found.holder} for {show_duration(found.held_s)}"
    lines = [f"{name}  {state}"]
    if found.group is not None:
        group = found.group
        lines[0] += f"; {show_count(group.present)} of {group.need or group.size or '?'} samples"
        lines.append(_cells_text(group))
    lines += [f"  {line}" for line in events_text(found.events)]
    if found.problem:
        lines.append(f"  {found.problem}")
    return "\n".join(lines)
