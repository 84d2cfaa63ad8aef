"""Obstacles of a bus, with causes and remedies: a sentence, by rules.

Invariants:

- Pure: the status is an argument; the same status gives the same sentence.
- Obstacles that block everything else come first, in the order of `_FIRST`. The rest is ranked by
  cost: the part of the work that stands still for the obstacle, 0 to 1.
- A missing producer is named only if certain (`waiting_for`).
- A sample merely begun, not taken yet, or not read yet never counts as failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from shmbus.base import limits
from shmbus.base.format import fold, several, show_count, show_duration
from shmbus.data.status_types import (
    BusStatus,
    DaemonStatus,
    EngineStatus,
    Finding,
    GroupCells,
    LeaseStatus,
    ProducerStatus,
    Verdict,
)
from shmbus.inspect.who_is_missing import waiting_for
from shmbus.segment.explain import DAEMON_LABEL, RELAY_LABEL
from shmbus.segment.fleet_note import ASLEEP_REASON

#: Seconds without movement after which a bus with open work stands still.
STILL_S: Final = 60.0
#: Seconds without a commit after which a producer awaited by groups counts as silent.
SILENT_S: Final = 5.0
#: The same limit for a producer with reserved space: longer than writing a sample in place takes.
RESERVED_S: Final = 30.0
#: Seconds without a request after which a trainer counts as busy, and as stuck: a step, and more.
BUSY_S: Final = 30.0
_STUCK_S: Final = 600.0
#: Minimum costs of a trouble, and of a warning.
_TROUBLE: Final = 0.6
_WARNING: Final = 0.25
#: Names in a sentence.
_NAMED: Final = 3
#: Minimum failed samples, and minimum part of the incomplete groups with failures, for reporting
#: retries: occasional retries go on by themselves.
_MANY_FAILED: Final = 4
_FAILING_SHARE: Final = 0.5
#: Minimum shares for reporting a precision gap: of the logprob difference, and of clipped tokens.
_GAP_SHARE: Final = 0.5
_GAP_CLIPPED: Final = 0.05

#: Kinds of findings that block everything else, in the order of their cure.
_FIRST: Final = (
    "unbalanced",
    "unused",
    "reader_stopped",
    "daemon_silent",
    "recovering",
    "nobody_reads",
    "paused",
    "servers_left",
    "engines_unknown",
    "trainer_stopped",
    "not_back",
    "no_trainer",
    "rank_missing",
    "engines_asleep",
    "nobody_sends",
    "requests_paused",
    "workers_held",
    "producers_wait",
    "nothing_open",
    "untaken",
)

#: The documentation of each kind.
_KINDS_OF_PAGE: Final = {
    "docs/errors.md#busfullerror": "producers_wait",
    "docs/errors.md#daemonunavailableerror": "daemon_silent",
    "docs/faq.md#new-run-or-resumed-run": "earlier_run",
    "docs/operating.md#an-engine-that-is-away": "requests_paused worker_held workers_held",
    "docs/operating.md#pausing-producers": "paused",
    "docs/operating.md#prompts-to-workers": "nothing_open untaken",
    "docs/operating.md#samples-that-fail": "failures producer_gone waits_for_one",
    "docs/operating.md#several-trainer-processes": "rank_missing trainers_share",
    "docs/operating.md#start-order": "no_producer no_trainer nobody_reads nobody_sends "
    "trainer_away unused",
    "docs/operating.md#the-daemons-life": "not_back recovering",
    "docs/operating.md#the-ledger": "unbalanced",
    "docs/operating.md#when-nothing-moves": "reader_stopped still trainer_busy trainer_stopped",
    "docs/trainer.md#when-engine-and-trainer-disagree": "precision_gap",
    "docs/tuning.md#how-far-ahead": "trainers_wait",
    "docs/weights.md#into-vllm-and-sglang-servers": "engine_behind engine_unknown "
    "engines_asleep engines_unknown servers_left",
}
PAGES: Final = {kind: page for page, kinds in _KINDS_OF_PAGE.items() for kind in kinds.split()}


def judge(
    status: BusStatus,
    groups: Sequence[GroupCells] = (),
    *,
    omitted: int = 0,
    still_s: float | None = None,
    wants: str | None = None,
) -> Verdict:
    """Judge a bus by its status and its oldest groups; `wants` of a waiting process."""
    least = "at least " if omitted else ""
    quality = _precision_gap(status) if wants is None else ()
    wants = wants or ""
    findings = [
        *_damage(status),
        *_reader(status),
        *_pause(status),
        *_earlier_run(status),
        *_engines(status),
        *_asleep(status, wants),
        *_space(status),
        *_producers(status, groups, least),
        *_nobody_sends(status, groups, wants),
        *_requests(status, groups, wants),
        *_failures(status, groups, least),
        *_trainers(status, groups, wants),
        *_stillness(status, still_s),
        *quality,
    ]
    findings.sort(key=_rank)
    if not findings:
        return Verdict(level="good", sentence=_all_is_well(status))
    first = findings[0]
    return Verdict(
        level=_level(first), sentence=_sentence(first), page=PAGES[first.kind], findings=findings
    )


def _rank(finding: Finding) -> tuple[int, float]:
    first = _FIRST.index(finding.kind) if finding.kind in _FIRST else len(_FIRST)
    return first, -finding.cost


def _level(finding: Finding) -> Literal["note", "warning", "trouble"]:
    if finding.cost >= _TROUBLE:
        return "trouble"
    return "warning" if finding.cost >= _WARNING else "note"


def _sentence(first: Finding) -> str:
    text = first.what + (f": {first.cause}" if first.cause else "")
    advice = first.advice[:1].upper() + first.advice[1:]
    return f"{text}. {advice}." if advice else f"{text}."


def _alive(status: BusStatus) -> int:
    return sum(producer.state == "alive" for producer in status.producers)


def _running(status: BusStatus) -> list[ProducerStatus]:
    return [each for each in status.producers if each.state == "alive" and not each.stopped]


def producer_name(producer: ProducerStatus) -> str:
    """Name a producer for people: its label with its pid."""
    label = producer.label or f"producer {producer.producer_id}"
    return f"{label} (pid {producer.pid})"


def trainer_name(lease: LeaseStatus) -> str:
    """Name a trainer for people: its label with its rank and pid."""
    rank = "" if lease.rank < 0 else f"rank {lease.rank}, "
    return f"{lease.label or 'a trainer'} ({rank}pid {lease.pid})"


def _collector_name(status: BusStatus) -> str:
    return f"{status.collector.label} (pid {status.collector.pid})"


def _who_waits(status: BusStatus) -> list[str]:
    if status.daemon is not None:
        here = [lease for lease in status.daemon.leases if lease.connected and lease.waiting]
        return [trainer_name(lease) for lease in here]
    return [_collector_name(status)] if status.collector.waits else []


def _waits(status: BusStatus, wants: str) -> str:
    """Name the waiting trainers and their wants; "" without a waiting trainer."""
    who = _who_waits(status)
    if not who:
        return ""
    held = 0 if status.daemon is not None else status.collector.leased_groups
    each = "waits" if len(who) == 1 else "wait"
    holds = f" and holds {show_count(held)}" if held else ""
    return f"{fold(who, _NAMED)} {each} for {wants or 'groups'}{holds}"


def _incomplete(status: BusStatus, groups: Sequence[GroupCells]) -> int:
    """Count incomplete groups, by the best source."""
    if status.daemon is not None and status.daemon.answers:
        return status.daemon.groups_open
    counted = status.groups_incomplete
    return counted or len(groups) or sum(split.groups_incomplete for split in status.splits)


def _last_producer(status: BusStatus) -> str:
    if not status.producers:
        return ""
    last = max(status.producers, key=lambda producer: producer.producer_id)
    # A slot taken back hides its owner's end.
    ended = {"dead": "which died", "closed": "which has left", "gone": "which is gone"}
    return f"; the last was {producer_name(last)}, {ended.get(last.state, 'which lives')}"


# -- the bus as a whole -------------------------------------------------------------------------


def _damage(status: BusStatus) -> Iterator[Finding]:
    if not status.ledger.balanced:
        yield Finding(
            kind="unbalanced",
            cost=1.0,
            what="The ledger does not balance: "
            f"{several(status.ledger.unreadable, 'committed trajectory')} cannot be found",
            advice="the next consumer counts them as corrupt and goes on; look for a process that "
            "writes through a view",
        )


def _reader(status: BusStatus) -> Iterator[Finding]:
    daemon, collector = status.daemon, status.collector
    if collector.stopped:
        name = _collector_name(status)
        held = collector.leased_groups
        yield Finding(
            kind="reader_stopped",
            cost=0.99,
            what=f"{name} is stopped"
            + (f" and holds {several(held, 'group')}" if held else ", and nobody else reads"),
            advice=f"`kill -CONT {collector.pid}` continues it",
            who=[name],
        )
    elif not status.in_use:
        yield _unused(status)
    elif daemon is not None and not daemon.answers and collector.alive:
        yield Finding(
            kind="daemon_silent",
            cost=0.98,
            what=f"The daemon gives no answer: {daemon.problem}",
            advice="see its log; producers and trainers go on by themselves once another runs",
        )
    elif daemon is not None and daemon.recovering:
        yield Finding(
            kind="recovering",
            cost=0.5,
            what="A new daemon waits for the clients of the one before, which may hold "
            f"{several(daemon.in_doubt, 'group')}",
            advice="it goes on by itself within seconds",
        )
    elif not collector.alive:
        yield _nobody_reads(status)


def _nobody_reads(status: BusStatus) -> Finding:
    collector = status.collector
    # A closed collector removes its pid from the segment.
    last = f"; the last was {_collector_name(status)}, which died" if collector.pid else ""
    again = {
        DAEMON_LABEL: f"`shmbus serve {status.name}`; producers and trainers go on by themselves",
        RELAY_LABEL: f"`shmbus relay {status.name} --trainer NAME` again, on any node",
    }
    waits = _what_waits(status)
    return Finding(
        kind="nobody_reads",
        cost=0.95 if waits or collector.pid else 0.2,
        what=f"Nobody reads the bus{last}",
        cause=waits,
        advice=f"start {again.get(collector.label, 'the trainer, or `shmbus serve`')}",
    )


def _what_waits(status: BusStatus) -> str:
    waiting = status.ledger.undelivered
    prompts = 0 if status.requests is None else status.requests.unmade
    parts = [
        f"{several(waiting, 'trajectory')}" if waiting else "",
        f"{several(prompts, 'open prompt')}" if prompts else "",
    ]
    text = " and ".join(part for part in parts if part)
    if text:
        return f"{text} {'waits' if waiting + prompts == 1 else 'wait'}"
    # The reader frees aborted reservations.
    aborted = sum(producer.aborted for producer in status.producers)
    if not status.space_wanted or not aborted:
        return ""
    return f"{several(aborted, 'aborted reservation', 'stay')} until somebody reads the bus"


def _unused(status: BusStatus) -> Finding:
    waits = _what_waits(status)
    asked = status.requests is not None and status.requests.offered > 0
    again = "start the trainer and the workers again, and they go on"
    return Finding(
        kind="unused",
        cost=0.3 if waits else 0.1,
        what="No living process has the bus open",
        cause=waits,
        advice=(again if asked or waits else "a Consumer or `shmbus serve` goes on with it")
        + f"; without them `shmbus gc` removes the bus {status.name}",
    )


def _pause(status: BusStatus) -> Iterator[Finding]:
    pause = status.paused
    if pause is not None and not (_sleepers(status) and pause.reason == ASLEEP_REASON):
        yield Finding(
            kind="paused",
            cost=0.9 if pause.age_s >= STILL_S else 0.4,
            what=f"Paused for {show_duration(pause.age_s)}",
            cause=pause.reason or "no reason was given",
            advice=f"`shmbus resume {status.name}` ends the pause",
        )
    if status.lane_pause is not None:
        yield Finding(
            kind="requests_paused",
            cost=0.7,
            what="The request lane is paused",
            cause=status.lane_pause.reason,
            advice="mend what the workers report; the first sample that succeeds reopens it",
        )
    if status.servers_left:
        yield Finding(
            kind="servers_left",
            cost=0.8,
            what="Inference servers are paused by a trainer that died",
            advice=f"`shmbus weights {status.name} --resume` resumes them",
        )


def _earlier_run(status: BusStatus) -> Iterator[Finding]:
    """Report a trainer whose weights are older than the samples on the bus."""
    published = status.weights_version
    if published is None or published >= status.policy_version or not status.collector.alive:
        return
    yield Finding(
        kind="earlier_run",
        cost=_WARNING - 0.01,
        what=f"The bus is at policy version {status.policy_version}, and the newest weights "
        f"are of version {published}",
        cause="the bus may be of an earlier run",
        advice=f"before a new run, end the old one and `shmbus rm {status.name}`; a trainer "
        "that returns to a checkpoint calls load_state_dict or reset_policy_version",
    )


# -- inference servers --------------------------------------------------------------------------


def _engines(status: BusStatus) -> Iterator[Finding]:
    """Name the servers of unknown version, and the servers behind the newest version."""
    unknown = [each for each in status.engines if each.state == "unknown"]
    behind = [each for each in status.engines if (each.behind_s or 0.0) >= STILL_S]
    if unknown:
        who = [each.address for each in unknown]
        all_of_them = len(unknown) == len(status.engines)
        yield Finding(
            kind="engines_unknown" if all_of_them else "engine_unknown",
            cost=0.4 + 0.5 * len(unknown) / len(status.engines),
            what=f"The weights version of {fold(who, _NAMED)} is unknown, and so is the label "
            "of each sample of it",
            cause=unknown[0].why,
            advice="`EngineFleet.catch_up()` or the next update brings the weights; "
            "a fleet without the server drops the server",
            who=who,
        )
    if behind:
        who = [each.address for each in behind]
        since = show_duration(max(each.behind_s or 0.0 for each in behind))
        yield Finding(
            kind="engine_behind",
            cost=0.1 + 0.2 * len(behind) / len(status.engines),
            what=f"{fold(who, _NAMED)} {'runs' if len(behind) == 1 else 'run'} an older version "
            f"than the newest, which was published {since} ago",
            cause=behind[0].why,
            advice="`EngineFleet.catch_up()` or the next update brings the newest version",
            who=who,
        )


def _sleepers(status: BusStatus) -> list[EngineStatus]:
    return [each for each in status.engines if each.state in ("asleep", "waking")]


def _asleep(status: BusStatus, wants: str) -> Iterator[Finding]:
    """Name sleeping servers: a fault only without a trainer, or with a waiting trainer."""
    sleepers = _sleepers(status)
    if not sleepers:
        return
    who = [each.address for each in sleepers]
    since_s = max(each.asleep_s or 0.0 for each in sleepers)
    # A prefetching trainer waits for groups in its training step too.
    fault = _waits(status, wants) if since_s >= STILL_S else ""
    daemon = status.daemon
    is_there = status.collector.alive
    if daemon is not None and daemon.answers:
        is_there = any(lease.connected for lease in daemon.leases)
    fault = fault if is_there else "no trainer is there to wake them"
    wakes = f"`EngineFleet.wake` or `shmbus weights {status.name} --resume` continues requests"
    yield Finding(
        kind="engines_asleep",
        cost=0.7 if fault else 0.05,
        what=f"{fold(who, _NAMED)} {'sleeps' if len(who) == 1 else 'sleep'} while the trainer has "
        f"the GPU, for {show_duration(since_s)}",
        cause=fault,
        advice=wakes if fault else "",
        who=who,
    )


def _stillness(status: BusStatus, still_s: float | None) -> Iterator[Finding]:
    if still_s is None or still_s < STILL_S or not status.in_use or _busy(status):
        return
    undelivered, leased = status.ledger.undelivered, status.ledger.leased
    cost = 0.7 if undelivered else 0.3
    who: list[str] = []
    cause = f"{several(_alive(status), 'producer')} and "
    cause += f"{'a collector' if status.collector.alive else 'no collector'} are there"
    advice = "see what the producers do; `py-spy dump --pid` shows it"
    if leased and leased == undelivered and not _who_waits(status):
        # A step, a judge or an annotator may take so long.
        cost = cost if still_s >= _STUCK_S else _WARNING - 0.05
        cause, who = _holder(status)
        advice = "see what its step, judge or annotator does; `py-spy dump --pid` shows it"
    yield Finding(
        kind="still",
        cost=cost,
        what=f"Nothing has moved for {show_duration(still_s)}",
        cause=cause,
        advice=advice,
        who=who,
    )


# -- producers wait for space -------------------------------------------------------------------


def _space(status: BusStatus) -> Iterator[Finding]:
    # A killed producer's mark stays until space is freed.
    if not status.space_wanted or not _running(status):
        return
    ledger = status.ledger
    held = {"leased": ledger.leased, "stashed": ledger.stashed, "ring": ledger.in_ring}
    most = max(held, key=lambda key: held[key])
    what = f"Producers wait for space, the ring is {status.fill:.0%} full"
    if not held[most]:
        yield Finding(kind="producers_wait", cost=0.5, what=what, advice="give it more capacity")
        return
    if most == "leased":
        cause, who = _holder(status)
        advice = "acknowledge groups sooner, or give the bus more capacity"
    elif most == "ring":
        who = [status.collector.label] if status.collector.alive else []
        reader = _collector_name(status) if who else "nobody"
        cause = f"{several(ledger.in_ring, 'trajectory', 'wait')} to be read by {reader}"
        advice = "take groups faster" if who else "start the trainer, or `shmbus serve`"
    else:
        who = []
        cause, advice = _stashed(status)
    yield Finding(kind="producers_wait", cost=0.85, what=what, cause=cause, advice=advice, who=who)


def _stashed(status: BusStatus) -> tuple[str, str]:
    """Explain the wait of untaken groups, whose number of bytes is unknown."""
    daemon = status.daemon
    if busy := _busy_trainers(status):
        return busy[0].what, busy[0].advice
    if daemon is None or not daemon.groups_ready:
        return (
            f"{several(status.ledger.stashed, 'trajectory', 'wait')} in incomplete groups",
            "set group_timeout, or give the bus more capacity",
        )
    if daemon.groups_ready >= daemon.groups_open:
        return (
            f"{several(daemon.groups_ready, 'complete group', 'wait')} for a trainer",
            "the trainer is what limits; more capacity only buffers more",
        )
    return (
        f"{several(daemon.groups_open, 'incomplete group')}, and "
        f"{show_count(daemon.groups_ready)} complete ones that wait for a trainer",
        "have the trainer take groups, set group_timeout, or give the bus more capacity",
    )


def _holder(status: BusStatus) -> tuple[str, list[str]]:
    leases = [] if status.daemon is None else status.daemon.leases
    if leases:
        most = max(leases, key=lambda lease: lease.trajectories)
        name = trainer_name(most)
        gone = "" if most.connected else ", and is not connected"
        return (
            f"{name} holds {several(most.groups, 'group')} for "
            f"{show_duration(most.oldest_lease_s)}{gone}",
            [name],
        )
    collector, name = status.collector, _collector_name(status)
    return (
        f"{name} holds {several(collector.leased_groups, 'group')} for "
        f"{show_duration(collector.oldest_lease_s)}",
        [name],
    )


# -- groups wait for producers ------------------------------------------------------------------


def _producers(status: BusStatus, groups: Sequence[GroupCells], least: str) -> Iterator[Finding]:
    waited = waiting_for(groups, status.producers)
    blamed = Counter(number for number in waited if number is not None)
    for producer in status.producers:
        waits = blamed.get(producer.producer_id, 0)
        share = waits / max(1, len(groups))
        reserved = bool(producer.reservations) and producer.state == "alive"
        if not waits and producer.state != "dead" and not producer.stopped and not reserved:
            continue
        yield from _producer(producer, waits, share, least)


def _producer(producer: ProducerStatus, waits: int, share: float, least: str) -> Iterator[Finding]:
    """Yield a finding on a producer awaited alone by `waits` groups, if noteworthy."""
    name = producer_name(producer)
    each = "waits" if waits == 1 else "wait"
    groups = f"{least}{several(waits, 'group')} {each} for it alone"
    advice = ""
    idle_s = producer.idle_s or 0.0
    silent = idle_s >= SILENT_S
    if producer.state in ("dead", "gone"):
        # A reaped producer counts as gone even after an orderly end.
        what = f"{name} {'died' if producer.state == 'dead' else 'is gone'}"
        if waits:
            what += f", and {groups}; nobody will send these samples"
            advice = "start it again, or set group_timeout with sample_retries"
        cost = 0.15 + 0.7 * share
    elif producer.state == "closed":
        what = f"{name} has left, and {groups}"
        advice = "start it again, or set group_timeout with sample_retries"
        cost = 0.1 + 0.7 * share
    elif producer.stopped:
        what = f"{name} is stopped" + (f", and {groups}" if waits else "")
        advice = f"`kill -CONT {producer.pid}` continues it"
        cost = 0.3 + 0.6 * share
    elif producer.reservations and idle_s >= RESERVED_S:
        what = (
            f"{name} has {several(producer.reservations, 'record')} reserved and has sent nothing "
            f"for {show_duration(idle_s)}" + (f", and {groups}" if waits else "")
        )
        advice = f"see what it does: `py-spy dump --pid {producer.pid}`"
        cost = 0.25 + 0.5 * share
    elif silent and waits:
        what = f"{name} has sent nothing for {show_duration(idle_s)}, and {groups}"
        advice = f"see what it does: `py-spy dump --pid {producer.pid}`"
        cost = 0.1 + 0.5 * share
    elif waits > 1 and share >= 0.5:
        what = f"{name} is the slowest: {groups}"
        advice = "give it less, or more processor"
        cost = 0.3 * share
    else:
        return
    yield Finding(
        kind="waits_for_one" if waits else "producer_gone",
        cost=cost, what=what, advice=advice, who=[name], groups=waits,
    )  # fmt: skip


def _nobody_sends(status: BusStatus, groups: Sequence[GroupCells], wants: str) -> Iterator[Finding]:
    """Report a wanted sample without a producer to make it."""
    if _running(status) or not status.collector.alive:
        return
    prompts = 0 if status.requests is None else status.requests.unmade
    incomplete = _incomplete(status, groups)
    waits = _waits(status, wants)
    stopped = [each for each in status.producers if each.stopped]
    worker = "worker" if prompts else "producer"
    if prompts:
        what = f"{several(prompts, 'prompt', 'are')} open"
    elif incomplete:
        what = f"{several(incomplete, 'incomplete group', 'wait')}"
    else:
        what = waits
    if stopped:
        names = [producer_name(each) for each in stopped]
        still = f"{', '.join(names[:_NAMED])} {'is' if len(names) == 1 else 'are'} stopped"
        yield Finding(
            kind="nobody_sends",
            cost=0.7,
            what=f"{still}, and no other {worker} is attached",
            cause=what[:1].lower() + what[1:],
            advice=f"`kill -CONT {' '.join(str(each.pid) for each in stopped)}` continues "
            f"{'it' if len(names) == 1 else 'them'}",
            who=names,
            groups=incomplete,
        )
        return
    if not what:
        yield Finding(
            kind="no_producer",
            cost=0.2,
            what=f"No producer is attached{_last_producer(status)}",
            advice="start producers",
        )
        return
    never = "" if status.producers else f"no {worker} has ever attached"
    advice = "start workers" if prompts else "start producers"
    if incomplete and not prompts:
        advice += "; a group_timeout ends groups that nobody completes"
    yield Finding(
        kind="nobody_sends",
        cost=0.7 if prompts else 0.5,
        what=f"{what}, and " + (never or f"no {worker} is attached{_last_producer(status)}"),
        advice=advice,
        groups=incomplete,
    )


def _requests(status: BusStatus, groups: Sequence[GroupCells], wants: str) -> Iterator[Finding]:
    """Report prompts that wait for idle workers, or workers and trainers that wait for prompts."""
    lane, running = status.requests, _running(status)
    if lane is None or not running or not status.collector.alive:
        return
    held = [each for each in running if lane.open and _is_held(each, lane.claimed)]
    if held:
        yield _held_back(held, len(running))
    running = [each for each in running if each not in held]
    if not running:
        return
    if lane.open and not lane.claimed and (lane.taken_s is None or lane.taken_s >= SILENT_S):
        since = "" if lane.taken_s is None else f" for {show_duration(lane.taken_s)}"
        yield Finding(
            kind="untaken",
            cost=0.5,
            what=f"{several(lane.unmade, 'prompt', 'are')} open,"
            f" and none of {several(len(running), 'producer')} takes one{since}",
            advice="workers take them by `producer.requests.next()`; see what they do: "
            f"`py-spy dump --pid {running[0].pid}`",
        )
        return
    waits = _waits(status, wants)
    ledger = status.ledger
    unread = ledger.in_ring or (status.daemon is not None and status.daemon.groups_ready)
    if lane.unmade or not waits or unread or status.wanted or _incomplete(status, groups):
        return
    lost = status.groups_given_up
    yield Finding(
        kind="nothing_open",
        cost=0.7,
        what=f"{waits}, and no prompt is open",
        cause=f"{several(lost, 'group', 'were')} given up for failed samples" if lost else "",
        advice="offer more: give `handler.offer` further prompts or a larger `ahead`"
        if lane.offered
        else "offer more: `handler.offer(prompts)` keeps prompts open whatever becomes of them",
    )


def _is_held(producer: ProducerStatus, claimed: int) -> bool:
    """Tell if a worker made none of its last samples, and holds none now."""
    if producer.rests_s > 0:
        return producer.given_back + producer.failed > 0
    return producer.given_back > 0 and not claimed


def _held_back(held: list[ProducerStatus], workers: int) -> Finding:
    """Report workers that give back or fail each sample, and so get few."""
    names = [producer_name(each) for each in held]
    alone = len(names) == 1
    who = names[0] if alone else f"{show_count(len(names))} of {several(workers, 'worker')}"
    given_back, failed = sum(each.given_back for each in held), sum(each.failed for each in held)
    did = [
        f"gave back {several(given_back, 'sample')}" if given_back else "",
        f"failed {several(failed, 'sample')}" if failed else "",
    ]
    reasons = Counter(each.unmade_reason for each in held if each.unmade_reason)
    return Finding(
        kind="workers_held" if len(held) == workers else "worker_held",
        cost=0.1 + 0.6 * len(held) / workers,
        what=f"{who} {' and '.join(filter(None, did))} in a row, and made none",
        cause=reasons.most_common(1)[0][0] if reasons else "",
        advice=f"mend what {'the worker reports' if alone else 'the workers report'}; shmbus holds "
        f"{'it' if alone else 'them'} back until a sample succeeds, up to "
        f"{show_duration(limits.RETRY_BACKOFF_S[1])} at a time",
        who=names[:_NAMED],
    )


def _failures(status: BusStatus, groups: Sequence[GroupCells], least: str) -> Iterator[Finding]:
    failing = final = samples = 0
    by: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    read_s = status.collector.seen_ago_s
    for group in groups:
        # An unread report has had no consequence yet.
        failed = [
            cell
            for cell in group.cells
            if cell.state == "asked"
            or (
                cell.state == "failed"
                and (cell.age_s is None or read_s is None or cell.age_s > read_s)
            )
        ]
        failing += bool(failed)
        samples += len(failed)
        for cell in failed:
            final += cell.state == "failed"
            reasons[cell.reason or "no reason given"] += 1
            if cell.producer is not None:
                by[cell.producer] += 1
    # Requested retries go on by themselves, unless they are most of the work.
    many = samples >= _MANY_FAILED and failing >= _FAILING_SHARE * len(groups)
    if not final and not many:
        return
    names = {producer.producer_id: producer_name(producer) for producer in status.producers}
    who = [names.get(number, f"producer {number}") for number, _ in by.most_common(_NAMED)]
    reason, alike = reasons.most_common(1)[0]
    if many:
        failed_samples = f"{least.capitalize()}{several(samples, 'sample')} failed"
        what = f"{failed_samples}, {show_count(alike)} of them alike"
        advice = "see what they have in common; " + (
            "set sample_retries to have them made again" if final else "they are asked for again"
        )
    else:
        what = f"{least.capitalize()}{several(failing, 'group', 'have')} a failed sample"
        advice = "" if status.wanted else "set sample_retries to have them made again"
    yield Finding(
        kind="failures",
        cost=0.1 + 0.5 * failing / len(groups),
        what=what,
        cause=(f"{', '.join(who)}: " if who and not many else "") + reason,
        advice=advice,
        who=who,
        groups=failing,
    )


# -- trainers -----------------------------------------------------------------------------------


class _Busy(NamedTuple):
    """A living trainer that asks for no group, with the seconds since its last request."""

    name: str
    pid: int
    asked_s: float
    held: int


def _ready(status: BusStatus) -> int:
    """Count untaken complete groups, as far as an observer knows."""
    if status.daemon is not None and status.daemon.answers:
        return status.daemon.groups_ready
    return max(0, (status.groups_complete or 0) - status.collector.leased_groups)


def _busy(status: BusStatus) -> list[_Busy]:
    """Return the trainers, if each has requested nothing of late while complete groups wait."""
    daemon, collector = status.daemon, status.collector
    if not _ready(status) or _who_waits(status):
        return []
    if daemon is None:
        seen_s = collector.seen_ago_s
        if not collector.alive or collector.stopped or seen_s is None or seen_s < BUSY_S:
            return []
        return [_Busy(_collector_name(status), collector.pid, seen_s, collector.leased_groups)]
    here = [
        _Busy(trainer_name(lease), lease.pid, lease.asked_s, lease.groups)
        for lease in daemon.leases
        if lease.connected and not lease.stopped and lease.asked_s is not None
    ]
    return here if all(each.asked_s >= BUSY_S for each in here) else []


def _busy_trainers(status: BusStatus) -> list[Finding]:
    """Report complete groups that wait for a busy trainer."""
    busy = _busy(status)
    if not busy:
        return []
    first, ready = min(busy, key=lambda each: each.asked_s), _ready(status)
    return [
        Finding(
            kind="trainer_busy",
            cost=_WARNING - 0.05 if first.asked_s < _STUCK_S else _TROUBLE,
            what=f"{several(ready, 'complete group', 'wait')}, and {first.name} has asked for none "
            f"for {show_duration(first.asked_s)}"
            + (f"; it holds {several(first.held, 'group')}" if first.held else ""),
            advice="unless its step takes so long, see what it does: "
            f"`py-spy dump --pid {first.pid}`",
            who=[each.name for each in busy],
        )
    ]


def _sharing(daemon: DaemonStatus) -> Iterator[Finding]:
    """Report trainers without ranks, each of which gets a part of the groups."""
    by_split: dict[str, list[LeaseStatus]] = {}
    for lease in daemon.leases:
        asks = lease.waiting or lease.groups or lease.asked_s is not None
        if lease.connected and lease.rank < 0 and asks:
            by_split.setdefault(lease.split, []).append(lease)
    for split, leases in by_split.items():
        if len({lease.pid for lease in leases}) > 1:
            names = [trainer_name(lease) for lease in leases]
            yield Finding(
                kind="trainers_share",
                cost=_WARNING - 0.03,
                what=f"{' and '.join(names[:_NAMED])} share the groups of split {split!r}, and "
                "each gets a part",
                advice="if they are two runs, end one: a run has a bus of its own",
                who=names,
            )


def _trainers(status: BusStatus, groups: Sequence[GroupCells], wants: str) -> list[Finding]:
    daemon = status.daemon
    if daemon is None:
        return _busy_trainers(status) or _waiting(status, groups, wants)
    if not daemon.answers or daemon.recovering:
        return []
    here = [lease for lease in daemon.leases if lease.connected]
    away = _not_back(daemon)
    if not here:
        ready = daemon.groups_ready
        waits = f"{several(ready, 'complete group', 'wait')}, and no"
        return away or [
            Finding(
                kind="no_trainer" if status.space_wanted else "trainer_away",
                cost=0.8 if ready else 0.3,
                what=(waits if ready else "No") + " trainer is attached",
                advice="start the trainer",
            )
        ]
    found = away + [_stopped_trainer(lease, len(here)) for lease in here if lease.stopped]
    waiting = [lease for lease in here if lease.waiting]
    absent = sorted(set(range(daemon.world_size)) - {lease.rank for lease in here})
    if waiting and absent:
        ranks = ", ".join(map(str, absent[:_NAMED])) + ", ..." * (len(absent) > _NAMED)
        found.append(
            Finding(
                kind="rank_missing",
                cost=0.8,
                what=f"The step waits for rank{'s' * (len(absent) > 1)} {ranks}, and no trainer of "
                f"{'that rank' if len(absent) == 1 else 'those ranks'} is attached",
                advice="start it again" if len(absent) == 1 else "start them again",
            )
        )
    rest = _busy_trainers(status) or _waiting(status, groups, wants)
    return found or [*_sharing(daemon), *rest]


def _stopped_trainer(lease: LeaseStatus, trainers: int) -> Finding:
    name = trainer_name(lease)
    return Finding(
        kind="trainer_stopped",
        cost=0.3 + 0.6 / trainers,
        what=f"{name} is stopped"
        + (f" and holds {several(lease.groups, 'group')}" if lease.groups else ""),
        advice=f"`kill -CONT {lease.pid}` continues it",
        who=[name],
    )


def _not_back(daemon: DaemonStatus) -> list[Finding]:
    """Report groups kept back by a client of an earlier daemon or connection."""
    if not daemon.in_doubt:
        return []
    pids = daemon.stopped_pids[:_NAMED]
    named = f" (pid {', '.join(map(str, pids))}, stopped)" if pids else ""
    return [
        Finding(
            kind="not_back",
            cost=0.6,
            what=f"{several(daemon.in_doubt, 'group')} may be held by a trainer that has not come "
            f"back to the daemon{named}",
            advice=f"`kill -CONT {' '.join(map(str, pids))}` continues it; others get them once "
            "it ends"
            if pids
            else "they come back once it attaches again, or ends",
        )
    ]


def _precision_gap(status: BusStatus) -> Iterator[Finding]:
    """Report rounding between engine and trainer, for PPO's clip a change of the policy."""
    gap = status.mismatch
    if gap is None or (gap.gap_share or 0) < _GAP_SHARE or (gap.clipped or 0) < _GAP_CLIPPED:
        return
    dtypes = f"Engine {gap.engine}, trainer {gap.trainer}: " if gap.engine and gap.trainer else ""
    yield Finding(
        kind="precision_gap",
        cost=_WARNING + 0.05,
        what=f"{dtypes}{gap.gap_share:.0%} of the logprob difference is rounding, and PPO's clip "
        f"removes the gradients of {gap.clipped:.0%} of the tokens",
        advice="run the trainer's forward pass in the engine's dtype, or publish the weights with "
        "rounding='stochastic'",
    )


def _waiting(status: BusStatus, groups: Sequence[GroupCells], wants: str) -> list[Finding]:
    """Report trainers that wait for groups in the making: workers are the bottleneck."""
    if not (waits := _waits(status, wants)):
        return []
    incomplete, lane = _incomplete(status, groups), status.requests
    made = f"{show_count(incomplete)} {'is' if incomplete == 1 else 'are'} incomplete"
    if lane is not None and lane.unmade:
        made += (
            f", {several(lane.claimed, 'sample', 'are')} with "
            f"workers and {show_count(lane.open)} not taken yet"
        )
    return [Finding(kind="trainers_wait", cost=0.2, what=waits, cause=made, who=_who_waits(status))]


def _all_is_well(status: BusStatus) -> str:
    alive = _alive(status)
    ledger = status.ledger
    held = f"; {_holder(status)[0]}" if ledger.leased else ""
    return (
        f"Nothing stands in the way: {several(alive, 'producer')}, "
        f"{several(ledger.undelivered, 'trajectory')} not trained on yet, "
        f"{show_count(ledger.acknowledged)} trained on{held}."
    )
