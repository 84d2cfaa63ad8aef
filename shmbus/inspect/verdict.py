"""What keeps a bus from going on, who causes it, and what to do: one sentence, by rules.

Invariants:

- Pure: what was read is an argument; the same status gives the same sentence.
- Findings are ranked by what they cost: the part of the work that stands still for them, 0 to 1.
- Who is missing is said only where it can be told (`waiting_for`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from shmbus._format import show_count, show_duration
from shmbus.inspect.types import BusStatus, LeaseStatus, ProducerStatus
from shmbus.inspect.view_types import Finding, GroupCells, Verdict
from shmbus.inspect.who_is_missing import waiting_for

__all__ = ["judge", "producer_name"]

#: Seconds without any movement after which a bus with something to do stands still.
STILL_S: Final = 60.0
#: Seconds without a commit after which a producer that groups wait for is called silent.
SILENT_S: Final = 5.0
#: Costs from which a finding is trouble, or a warning.
_TROUBLE: Final = 0.6
_WARNING: Final = 0.25
#: Names in a sentence.
_NAMED: Final = 3


def judge(
    status: BusStatus, groups: Sequence[GroupCells] = (), *, still_s: float | None = None
) -> Verdict:
    """Say what keeps a bus from going on.

    Parameters
    ----------
    status : BusStatus
        Of one moment.
    groups : sequence of GroupCells
        Its oldest incomplete groups.
    still_s : float, optional
        Seconds without any movement; None where nobody has watched.

    Returns
    -------
    Verdict
    """
    findings = [
        *_damage(status),
        *_reader(status),
        *_pause(status),
        *_space(status),
        *_producers(status, groups),
        *_nobody_sends(status, groups),
        *_failures(status, groups),
        *_trainers(status),
        *_stillness(status, still_s),
    ]
    findings.sort(key=lambda finding: -finding.cost)
    if not findings:
        return Verdict(level="good", sentence=_all_is_well(status))
    return Verdict(level=_level(findings[0]), sentence=_sentence(findings), findings=findings)


def _level(finding: Finding) -> Literal["note", "warning", "trouble"]:
    if finding.cost >= _TROUBLE:
        return "trouble"
    return "warning" if finding.cost >= _WARNING else "note"


def _sentence(findings: list[Finding]) -> str:
    first = findings[0]
    if first.kind == "trainers_wait" and not first.cause:
        # Whoever keeps groups incomplete is why trainers wait.
        for other in findings[1:]:
            if other.kind in ("waits_for_one", "failures"):
                return f"{first.what}: {other.what}. {_capital(other.advice)}".rstrip()
    text = first.what + (f": {first.cause}" if first.cause else "")
    return f"{text}. {_capital(first.advice)}".rstrip()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] + ("." if text else "")


def _count(number: int, what: str) -> str:
    many = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{show_count(number)} {what if number == 1 else many}"


def _alive(status: BusStatus) -> int:
    return sum(producer.state == "alive" for producer in status.producers)


def producer_name(producer: ProducerStatus) -> str:
    """Name a producer for people: its label with its pid.

    Parameters
    ----------
    producer : ProducerStatus
        Of a status, whose texts are escaped.

    Returns
    -------
    str
    """
    label = producer.label or f"producer {producer.producer_id}"
    return f"{label} (pid {producer.pid})"


def _trainer_name(lease: LeaseStatus) -> str:
    rank = "" if lease.rank < 0 else f"rank {lease.rank}, "
    return f"{lease.label or 'a trainer'} ({rank}pid {lease.pid})"


# -- the bus as a whole -------------------------------------------------------------------------


def _damage(status: BusStatus) -> list[Finding]:
    if status.ledger.balanced:
        return []
    return [
        Finding(
            kind="unbalanced",
            cost=1.0,
            what=f"The ledger does not balance: {show_count(status.ledger.unreadable)} committed "
            "trajectories cannot be found",
            advice="`shmbus inspect` shows where the damage is; the next consumer counts them as "
            "corrupt and goes on",
        )
    ]


def _reader(status: BusStatus) -> list[Finding]:
    daemon, collector = status.daemon, status.collector
    undelivered = status.ledger.undelivered
    if daemon is not None and not daemon.answers:
        return [
            Finding(
                kind="daemon_silent",
                cost=0.98,
                what=f"The daemon gives no answer: {daemon.problem}",
                advice="see its log; producers and trainers go on by themselves once another runs",
            )
        ]
    if daemon is not None and daemon.recovering:
        return [
            Finding(
                kind="recovering",
                cost=0.5,
                what="A new daemon waits for the clients of the one before, which may hold "
                f"{_count(daemon.in_doubt, 'group')}",
                advice="it goes on by itself within seconds",
            )
        ]
    if collector.alive:
        return []
    if not status.in_use:
        return [
            Finding(
                kind="unused",
                cost=0.1 if not undelivered else 0.3,
                what="No living process has the bus open"
                + (f", and {_count(undelivered, 'trajectory')} wait in it" if undelivered else ""),
                advice="a Consumer or `shmbus serve` goes on with it, `shmbus gc` removes it",
            )
        ]
    last = f"; the last was {collector.label} (pid {collector.pid})" if collector.pid else ""
    return [
        Finding(
            kind="nobody_reads",
            cost=0.95 if undelivered else 0.2,
            what=f"Nobody reads the bus{last}",
            cause=f"{show_count(undelivered)} trajectories wait" if undelivered else "",
            advice="start the trainer, or `shmbus serve`",
        )
    ]


def _pause(status: BusStatus) -> list[Finding]:
    pause = status.paused
    if pause is None:
        return []
    return [
        Finding(
            kind="paused",
            cost=0.9 if pause.age_s >= STILL_S else 0.4,
            what=f"Producers are paused for {show_duration(pause.age_s)}",
            cause=pause.reason or "no reason was given",
            advice=f"`shmbus resume {status.name}` ends the pause",
        )
    ]


def _stillness(status: BusStatus, still_s: float | None) -> list[Finding]:
    if still_s is None or still_s < STILL_S or not status.in_use:
        return []
    alive = _alive(status)
    return [
        Finding(
            kind="still",
            cost=0.7 if status.ledger.undelivered else 0.3,
            what=f"Nothing has moved for {show_duration(still_s)}",
            cause=f"{_count(alive, 'producer')} and "
            f"{'a collector' if status.collector.alive else 'no collector'} are there",
            advice="see what the producers do; `py-spy dump --pid` shows it",
        )
    ]


# -- producers wait for space -------------------------------------------------------------------


def _space(status: BusStatus) -> list[Finding]:
    if not status.space_wanted:
        return []
    ledger = status.ledger
    held = {"leased": ledger.leased, "stashed": ledger.stashed, "ring": ledger.in_ring}
    most = max(held, key=lambda key: held[key])
    what = f"Producers wait for space, the ring is {status.fill:.0%} full"
    if not held[most]:
        return [_empty(status, what)]
    if most == "leased":
        cause, who = _holder(status)
        advice = "acknowledge groups sooner, or give the bus more capacity"
    elif most == "ring":
        who = [status.collector.label] if status.collector.alive else []
        cause = f"{show_count(ledger.in_ring)} trajectories wait to be read by " + (
            f"{status.collector.label} (pid {status.collector.pid})" if who else "nobody"
        )
        advice = "take groups faster" if who else "start the trainer, or `shmbus serve`"
    else:
        who = []
        cause, advice = _stashed(status)
    return [
        Finding(kind="producers_wait", cost=0.85, what=what, cause=cause, advice=advice, who=who)
    ]


def _stashed(status: BusStatus) -> tuple[str, str]:
    """Say what the groups that nobody has taken wait for. How many bytes they have is not known."""
    daemon = status.daemon
    if daemon is None or not daemon.groups_ready:
        return (
            f"{show_count(status.ledger.stashed)} trajectories wait in incomplete groups",
            "set group_timeout, or give the bus more capacity",
        )
    if daemon.groups_ready >= daemon.groups_open:
        return (
            f"{_count(daemon.groups_ready, 'complete group')} wait for a trainer to take them",
            "the trainer is what limits; more capacity only buffers more",
        )
    return (
        f"{_count(daemon.groups_open, 'incomplete group')}, and "
        f"{show_count(daemon.groups_ready)} complete ones that wait for a trainer",
        "have the trainer take groups, set group_timeout, or give the bus more capacity",
    )


def _empty(status: BusStatus, what: str) -> Finding:
    """Say why a ring without a trajectory is full: the reader frees what was aborted."""
    aborted = sum(producer.aborted for producer in status.producers)
    cost, cause, advice = 0.5, "", "give it more capacity"
    if aborted and not status.collector.alive:
        cost, advice = 0.85, "start the trainer, or `shmbus serve`"
        cause = f"{_count(aborted, 'aborted reservation')} stay until somebody reads the bus"
    return Finding(kind="producers_wait", cost=cost, what=what, cause=cause, advice=advice)


def _holder(status: BusStatus) -> tuple[str, list[str]]:
    leases = [] if status.daemon is None else status.daemon.leases
    if leases:
        most = max(leases, key=lambda lease: lease.trajectories)
        name = _trainer_name(most)
        gone = "" if most.connected else ", and is not connected"
        return (
            f"{name} holds {_count(most.groups, 'group')} for "
            f"{show_duration(most.oldest_lease_s)}{gone}",
            [name],
        )
    collector = status.collector
    name = f"{collector.label} (pid {collector.pid})"
    return (
        f"{name} holds {_count(collector.leased_groups, 'group')} for "
        f"{show_duration(collector.oldest_lease_s)}",
        [name],
    )


# -- groups wait for producers ------------------------------------------------------------------


def _producers(status: BusStatus, groups: Sequence[GroupCells]) -> list[Finding]:
    waited = waiting_for(groups, status.producers)
    blamed = Counter(number for number in waited if number is not None)
    findings = []
    for producer in status.producers:
        waits = blamed.get(producer.producer_id, 0)
        share = waits / max(1, len(groups))
        if not waits and producer.state != "dead" and not producer.stopped:
            continue
        finding = _producer(producer, waits, share)
        if finding is not None:
            findings.append(finding)
    return findings


def _producer(producer: ProducerStatus, waits: int, share: float) -> Finding | None:
    """Say what there is to say of a producer that `waits` groups wait for alone."""
    name = producer_name(producer)
    each = "waits" if waits == 1 else "wait"
    groups = f"{_count(waits, 'group')} {each} for it alone"
    advice = ""
    silent = producer.idle_s is not None and producer.idle_s >= SILENT_S
    if producer.state in ("dead", "gone"):
        # One that left in order is gone too, once it was reaped.
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
    elif silent and producer.idle_s is not None:
        what = f"{name} has sent nothing for {show_duration(producer.idle_s)}, and {groups}"
        advice = f"see what it does: `py-spy dump --pid {producer.pid}`"
        cost = 0.1 + 0.5 * share
    elif waits > 1 and share >= 0.5:
        what = f"{name} is the slowest: {groups}"
        advice = "give it less, or more processor"
        cost = 0.3 * share
    else:
        return None
    return Finding(
        kind="waits_for_one" if waits else "producer_gone",
        cost=cost, what=what, advice=advice, who=[name], groups=waits,
    )  # fmt: skip


def _nobody_sends(status: BusStatus, groups: Sequence[GroupCells]) -> list[Finding]:
    """Say that nobody is there who could complete a group, whoever began it."""
    if _alive(status):
        return []
    open_groups = status.groups_incomplete or len(groups)
    if not open_groups or not status.collector.alive:
        return []
    each = "waits" if open_groups == 1 else "wait"
    return [
        Finding(
            kind="nobody_sends",
            cost=0.5,
            what=f"{_count(open_groups, 'incomplete group')} {each}, and no producer is attached",
            advice="start producers; a group_timeout ends groups that nobody completes",
            groups=open_groups,
        )
    ]


def _failures(status: BusStatus, groups: Sequence[GroupCells]) -> list[Finding]:
    failing = 0
    again = bool(status.wanted)
    by: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for group in groups:
        failed = [cell for cell in group.cells if cell.state != "there"]
        failing += bool(failed)
        for cell in failed:
            again = again or cell.state == "asked" or cell.attempts > 1
            reasons[cell.reason or "no reason given"] += 1
            if cell.producer is not None:
                by[cell.producer] += 1
    if not failing:
        return []
    names = {producer.producer_id: producer_name(producer) for producer in status.producers}
    who = [names.get(number, f"producer {number}") for number, _ in by.most_common(_NAMED)]
    reason = reasons.most_common(1)[0][0]
    return [
        Finding(
            kind="failures",
            cost=0.1 + 0.4 * failing / len(groups),
            what=f"{_count(failing, 'group')} {'has' if failing == 1 else 'have'} a failed sample",
            cause=(f"{', '.join(who)}: " if who else "") + reason,
            advice="" if again else "set sample_retries to have them made again",
            who=who,
            groups=failing,
        )
    ]


# -- trainers -----------------------------------------------------------------------------------


def _trainers(status: BusStatus) -> list[Finding]:
    daemon = status.daemon
    if daemon is None or not daemon.answers or daemon.recovering:
        return []
    here = [lease for lease in daemon.leases if lease.connected]
    if not here:
        if not daemon.groups_ready:
            return []
        return [
            Finding(
                kind="no_trainer",
                cost=0.8,
                what=f"{_count(daemon.groups_ready, 'complete group')} wait, and no trainer is "
                "attached",
                advice="start the trainer",
            )
        ]
    waiting = [lease for lease in here if lease.waiting and not lease.groups]
    if not waiting:
        return []
    who = [_trainer_name(lease) for lease in waiting[:_NAMED]]
    alive = _alive(status)
    cause = "" if alive else "no producer is attached"
    if daemon.groups_ready and daemon.world_size:
        absent = sorted(set(range(daemon.world_size)) - {lease.rank for lease in here})
        cause = f"the step waits for rank {absent[0]}" if absent else ""
    each = "Trainers wait" if len(waiting) == len(here) > 1 else f"{', '.join(who)} waits"
    return [
        Finding(
            kind="trainers_wait",
            cost=0.55 * len(waiting) / len(here),
            what=f"{each} for groups; {show_count(daemon.groups_open)} are incomplete",
            cause=cause,
            advice="" if alive else "start producers",
            who=who,
        )
    ]


def _all_is_well(status: BusStatus) -> str:
    alive = _alive(status)
    ledger = status.ledger
    return (
        f"Nothing stands in the way: {_count(alive, 'producer')}, "
        f"{show_count(ledger.undelivered)} trajectories on their way, "
        f"{show_count(ledger.acknowledged)} trained on."
    )
