"""A bus's page as plain values; the difference of two pictures; curves of minutes.

Invariants:

- The picture's size stays bounded on every bus, and the picture reports omissions.
- A picture contains neither None nor numbers missing from JSON: a key without a value stays out. So
  null in a difference marks a removed key; a difference forms a JSON merge patch (RFC 7386).
- Times are the machine's, of the moment of an event, and not ages: unchanged facts stay equal in
  the next picture.
- Curves hold `settings.HISTORY` points of `NAMES`. A gap without a poll appears as a point without
  values, never as a line. Mean and percentiles describe deliveries between two polls, from the
  differences of counters.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from shmbus.base.format import printable, several, unprinted
from shmbus.data.status_types import BusStatus, GroupCells, LeaseStatus, ProducerStatus, SampleCell
from shmbus.inspect.groups import Groups
from shmbus.inspect.rates import Watcher
from shmbus.inspect.verdict import producer_name
from shmbus.inspect.who_is_missing import waiting_for
from shmbus.segment.recorder_files import SessionNote, read_recorders
from shmbus.web import settings

Picture: TypeAlias = dict[str, Any]

#: Letters of a cell on the page's way, by its state.
_LETTERS = {"there": "t", "failed": "f", "asked": "a", "begun": "b"}
#: Seconds without a commit after which a producer counts as idle in its row.
_IDLE_S = 5.0
_STATE_ORDER = {"dead": 0, "alive": 1, "gone": 2, "closed": 3}


def missing(name: str, problem: str, state: str = "unreadable") -> Picture:
    """Show an unreadable bus."""
    sentence = {"level": "trouble", "sentence": problem, "findings": []}
    return {"name": name, "state": state, "verdict": sentence}


def picture(watcher: Watcher, now_s: float) -> Picture:
    """Show a bus."""
    status = watcher.status
    blamed = waiting_for(watcher.groups.groups, status.producers)
    waits = Counter(number for number in blamed if number is not None)
    shown: Picture = _plain(
        {
            "name": status.name,
            "state": _state(status),
            "created": watcher.created_unix_ns / 1e9,
            "now": now_s,
            "capacity": status.capacity,
            "used": status.capacity - status.free,
            "space_wanted": status.space_wanted,
            "policy_version": status.policy_version,
            "paused": None if status.paused is None else status.paused.reason or "no reason given",
            "verdict": msgspec.to_builtins(status.verdict),
            "ledger": msgspec.to_builtins(status.ledger),
            "rates": msgspec.to_builtins(watcher.rates),
            "groups": _counts(watcher),
            "given_up": status.groups_given_up,
            "asked": len(status.wanted),
            "wall": _wall(watcher.groups, blamed, now_s - watcher.groups_age_s),
            "producers": _producers(watcher, waits, now_s),
            "agents": _agents(status.name, now_s),
            "engines": _engines(status, now_s),
            "collector": _collector(status, now_s),
            "holders": _holders(status, now_s),
            "daemon": _daemon(status, now_s),
            "delivered": _histograms(status),
            "events": [
                {"t": round(each.unix_s), "kind": each.kind, "who": each.who, "text": each.text}
                for each in watcher.events
            ],
            "waited": {
                "producers": round(sum(watcher.waited_s.values())),
                "trainers": round(watcher.trainers_waited_s),
            },
        }
    )
    return shown


def _plain(value: Any) -> Any:
    """Leave out None and numbers that are not finite."""
    if isinstance(value, dict):
        kept = {str(key): _plain(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each is not None}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _since(age_s: float | None, now_s: float) -> float | None:
    """Return the time of an event to the second: nearly always equal in every picture."""
    return None if age_s is None else round(now_s - age_s)


def _state(status: BusStatus) -> str:
    if status.daemon is not None and not status.daemon.answers:
        return "stuck"
    if not status.in_use:
        return "unused"
    if status.paused is not None:
        return "paused"
    if not status.collector.alive:
        return "unread"
    return "live"


def _counts(watcher: Watcher) -> Picture:
    """Count groups by state: as the daemon says, or as the records showed it when last walked."""
    status = watcher.status
    daemon = status.daemon
    if daemon is not None and daemon.answers:
        return {
            "open": daemon.groups_open, "ready": daemon.groups_ready, "leased": daemon.groups_leased
        }  # fmt: skip
    leased = status.collector.leased_groups
    incomplete, complete = watcher.sorted
    return {
        "open": incomplete,
        "ready": None if complete is None else max(0, complete - leased),
        "leased": leased,
    }


def _wall(found: Groups, blamed: list[int | None], now_s: float) -> Picture:
    """Show incomplete groups, as of `now_s`."""
    groups = _that_fit(found.groups[: settings.GROUPS])
    return {
        "source": found.source,
        # Records are read for groups only now and then.
        "read": round(now_s) if found.source == "records" else None,
        "problem": found.problem or None,
        "omitted": found.omitted + len(found.groups) - len(groups),
        "order": [_key(group) for group in groups],
        "rows": {
            _key(group): _row(group, number, now_s)
            for group, number in zip(groups, blamed, strict=False)
        },
    }


def _that_fit(groups: list[GroupCells]) -> list[GroupCells]:
    """Leave out the last groups above a page's number of samples; never the first."""
    room = settings.WALL_CELLS
    for at, group in enumerate(groups):
        room -= min(len(group.cells), settings.CELLS)
        if room < 0 < at:
            return groups[:at]
    return groups


def _key(group: GroupCells) -> str:
    # Escaped ids and labels contain no line feed.
    parts = [group.instance_id]
    if group.round is not None:
        parts.append(str(group.round))
    if group.split != "train":
        parts.append(group.split)
    return "\n".join(parts)


def _row(group: GroupCells, waits_for: int | None, now_s: float) -> Picture:
    cells = [cell for cell in group.cells if cell.index < settings.CELLS]
    return {
        "id": group.instance_id,
        # As text: a round of 63 bits exceeds a browser's numbers.
        "round": None if group.round is None else str(group.round),
        "split": None if group.split == "train" else group.split,
        "size": group.size,
        "need": None if group.need in (0, group.size) else group.need,
        "present": group.present,
        "since": _since(group.age_s, now_s),
        "waits_for": waits_for,
        "omitted": group.cells_omitted + len(group.cells) - len(cells),
        "cells": {str(cell.index): _cell(cell, now_s) for cell in cells},
    }


def _cell(cell: SampleCell, now_s: float) -> Picture:
    shown: Picture = {"s": _LETTERS[cell.state]}
    if cell.score is not None:
        shown["v"] = cell.score
    if cell.producer is not None:
        shown["p"] = cell.producer
    if cell.age_s is not None:
        shown["t"] = _since(cell.age_s, now_s)
    if cell.state in ("failed", "asked"):
        shown |= {"n": cell.attempts, "r": cell.reason}
        if cell.taken_by is not None:
            shown["b"] = cell.taken_by
    return shown


def _producers(watcher: Watcher, waits: Counter[int], now_s: float) -> Picture:
    status = watcher.status
    ranked = sorted(
        status.producers,
        key=lambda each: (
            -waits.get(each.producer_id, 0), _STATE_ORDER[each.state], each.producer_id
        ),
    )  # fmt: skip
    shown = sorted(ranked[: settings.PRODUCERS], key=lambda each: each.producer_id)
    states = Counter(_producer_state(each, watcher) for each in status.producers)
    return {
        "states": dict(states),
        "omitted": len(ranked) - len(shown),
        "max": status.max_producers,
        "rows": {str(each.producer_id): _producer(each, watcher, waits, now_s) for each in shown},
    }


def _agents(name: str, now_s: float) -> Picture | None:
    """Show recorders' notes of their sessions; None without a living recorder."""
    recorders = read_recorders(unprinted(name))
    if not recorders:
        return None
    running = [session for each in recorders for session in each.running]
    engines = {engine.url: engine.state for each in recorders for engine in each.engines}
    return {
        "recorders": len(recorders),
        "sessions": sum(each.sessions for each in recorders),
        "calls": sum(each.calls for each in recorders),
        "drift": sum(each.drift for each in recorders),
        "engines": engines,
        "rows": {
            title: {
                "since": _since(session.age_s, now_s),
                "turns": session.turns,
                "tokens": session.tokens,
                "calls": session.calls,
                "engine": session.engine,
            }
            for title, session in _named(running[: settings.SESSIONS])
        },
    }


def _named(sessions: Sequence[SessionNote]) -> Iterator[tuple[str, SessionNote]]:
    """Yield sessions with distinct names: a sample may have a session in each of several rounds."""
    seen: Counter[str] = Counter()
    for session in sessions:
        name = f"{printable(session.instance_id)}[{session.index}]"
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", session


def _engines(status: BusStatus, now_s: float) -> Picture | None:
    """Show inference servers; None for a bus without servers."""
    rows: Picture = {
        engine.address: {
            "state": engine.state,
            "version": engine.version,
            "life": engine.life or None,
            "why": engine.why or None,
            "published": _since(engine.updated_s, now_s),
            "calls": engine.calls,
            "answers": engine.answers or None,
        }
        for engine in status.engines[: settings.PRODUCERS]
    }
    return {"rows": rows, "omitted": len(status.engines) - len(rows)} if rows else None


def _producer_state(producer: ProducerStatus, watcher: Watcher) -> str:
    if producer.state != "alive":
        return producer.state
    if producer.stopped:
        return "stopped"
    return "idle" if watcher.idle_s.get(producer.producer_id, 0.0) >= _IDLE_S else "alive"


def _producer(
    producer: ProducerStatus, watcher: Watcher, waits: Counter[int], now_s: float
) -> Picture:
    return {
        "name": producer.label or f"producer {producer.producer_id}",
        "full_name": producer_name(producer),
        "pid": producer.pid,
        "state": _producer_state(producer, watcher),
        "rate": round(watcher.producer_rates.get(producer.producer_id, 0.0), 1),
        "committed": producer.committed,
        "since": _since(watcher.idle_s.get(producer.producer_id), now_s),
        "held": producer.held_bytes,
        "waits": waits.get(producer.producer_id, 0),
        "waited": round(watcher.waited_s.get(producer.producer_id, 0.0)),
        "unmade": _unmade(producer),
    }


def _unmade(producer: ProducerStatus) -> str | None:
    """Describe a worker's samples taken and unmade since its last success."""
    if not producer.given_back and not (producer.failed and producer.rests_s):
        return None
    taken = several(producer.given_back + producer.failed, "sample")
    return f"{taken} not made" + (f": {producer.unmade_reason}" * bool(producer.unmade_reason))


def _collector(status: BusStatus, now_s: float) -> Picture:
    collector = status.collector
    return {
        "alive": collector.alive,
        "name": collector.label,
        "pid": collector.pid,
        # The collector notes the time only now and then: a value to the second would change in
        # every picture.
        "seen": None if collector.seen_ago_s is None else _since(collector.seen_ago_s, now_s),
    }


def _holders(status: BusStatus, now_s: float) -> list[Picture]:
    daemon, collector = status.daemon, status.collector
    if daemon is not None:
        return [_holder(lease, daemon.next_steps, now_s) for lease in daemon.leases]
    if not collector.alive:
        return []
    return [
        {
            "name": collector.label,
            "pid": collector.pid,
            "groups": collector.leased_groups,
            "trajectories": collector.leased_records,
            "since": _since(collector.oldest_lease_s, now_s) if collector.leased_groups else None,
            "now": "stopped"
            if collector.stopped
            else "works"
            if collector.leased_groups
            else "has taken all",
        }
    ]


def _holder(lease: LeaseStatus, steps: dict[int, int], now_s: float) -> Picture:
    now = "stopped" if lease.stopped else "waits" if lease.waiting else "works"
    return {
        "name": lease.label,
        "pid": lease.pid,
        "split": None if lease.split == "train" else lease.split,
        "rank": None if lease.rank < 0 else f"{lease.rank} of {lease.world_size}",
        "step": steps.get(lease.rank),
        "groups": lease.groups,
        "trajectories": lease.trajectories,
        "since": _since(lease.oldest_lease_s, now_s) if lease.groups else None,
        "waited_s": round(lease.waited_s, 1),
        "now": now if lease.connected else "gone",
    }


def _daemon(status: BusStatus, now_s: float) -> Picture | None:
    daemon = status.daemon
    if daemon is None:
        return None
    if not daemon.answers:
        return {"answers": False, "problem": daemon.problem}
    return {
        "answers": True,
        "pid": daemon.pid,
        "version": daemon.version,
        "since": _since(daemon.uptime_s, now_s),
        "recovering": daemon.recovering,
        "draining": daemon.draining,
    }


def _histograms(status: BusStatus) -> Picture:
    # A status holds histograms if its collector counts deliveries.
    found = msgspec.to_builtins(status).get("delivered", [])
    return {each["name"]: {k: each[k] for k in ("bounds", "buckets", "sum")} for each in found}


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the change from a picture to another."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = difference(before, value)
            if inner:
                changes[key] = inner
        elif value != before:
            changes[key] = value
    return changes


#: Values of a point, in this order, after its time.
NAMES: Final = (
    "committed", "acknowledged", "dropped", "tokens", "bytes", "fill",
    "reward", "age50", "age99", "version",
)  # fmt: skip

Point = list[float | None]


class Curves:
    """The points of one bus."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=settings.HISTORY)
        self._before: dict[str, Any] = {}

    def add(self, picture: dict[str, Any]) -> Point:
        """Add the point of a poll."""
        rates = picture.get("rates", {})
        delivered = picture.get("delivered", {})
        reward = _since_before(delivered, self._before, "score")
        age = _since_before(delivered, self._before, "age")
        self._before = delivered
        values: dict[str, float | None] = {
            **{name: rates.get(name) for name in NAMES[:5]},
            "fill": picture["used"] / picture["capacity"],
            "reward": None if reward is None else reward[2] / max(1, sum(reward[1])),
            "age50": None if age is None else percentile(age[0], age[1], 0.5),
            "age99": None if age is None else percentile(age[0], age[1], 0.99),
            "version": picture["policy_version"],
        }
        point: Point = [picture["now"], *(_rounded(values[name]) for name in NAMES)]
        self.points.append(point)
        return point


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _since_before(
    now: dict[str, Any], before: dict[str, Any], name: str
) -> tuple[list[float], list[int], float] | None:
    """Return bounds, buckets and sum of the increase; None without an increase."""
    if name not in now or name not in before:
        return None
    new, old = now[name], before[name]
    buckets = [a - b for a, b in zip(new["buckets"], old["buckets"], strict=True)]
    if sum(buckets) <= 0 or min(buckets) < 0:
        return None
    return new["bounds"], buckets, new["sum"] - old["sum"]


def percentile(bounds: list[float], buckets: list[int], part: float) -> float:
    """Estimate a percentile of a histogram, by straight lines within its buckets."""
    wanted = part * sum(buckets)
    below = 0.0
    for number, count in enumerate(buckets):
        if count and below + count >= wanted:
            low = bounds[number - 1] if number else min(0.0, bounds[0])
            high = bounds[number] if number < len(bounds) else low
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]
