"""A bus's history as events of the Trace Event Format, for Perfetto and Chrome's viewer.

Each process of the bus is a process of the trace; overlapping slices lie on tracks of their own.
A group forms a slice from its first sample to its lease, and a slice at its trainer until its end;
an arrow joins them.

Invariants:

- Pure: the caller passes values read from a bus, and the time.
- Slices of a track are disjoint or nested. Times are whole microseconds since 1970, to keep that
  property through rounding.
- Memory serves open slices, at most MAX_OPEN of a kind, and names; never the past.

Source: "Trace Event Format", the document of the Chromium project (types X, i, C, M, s and f).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from shmbus.data.status_types import BusEvent, BusStatus
from shmbus.inspect.groups import Groups
from shmbus.inspect.verdict import producer_name, trainer_name
from shmbus.pool.pool_status import PoolStatus

TraceEvent: TypeAlias = "dict[str, Any]"

#: Leases, samples under construction, and groups given back, remembered until they end.
MAX_OPEN: Final = 65_536

_GroupKey: TypeAlias = "tuple[str, int | None, str]"
#: By kind of event that begins a state of the whole bus: the kind that ends the state, and its
#: name.
_STATES: Final = {
    "paused": ("resumed", "paused"),
    "requests_paused": ("requests_resumed", "requests paused"),
}
_ENDS: Final = ("acknowledged", "given_back", "dropped")
#: Counters of the whole bus's contents, and the waits of a process.
_COUNTERS: Final = "bus"
_WAITS: Final = "waits"


class _Open(NamedTuple):
    since: int
    who: str
    #: Number of the arrow to the lease; 0 without an arrow.
    flow: int
    samples: int


class TraceEvents:
    """Makes trace events from values read from a bus, in the order of reading."""

    def __init__(self, bus: str) -> None:
        self._bus = bus
        self._pids: dict[str, int] = {}
        #: By track's process: end of the last slice on each of its tracks.
        self._tracks: defaultdict[int, list[int]] = defaultdict(list)
        self._names: dict[int, str] = {}  # of producers, by number
        self._leases: dict[_GroupKey, list[_Open]] = {}
        self._given_back: dict[_GroupKey, int] = {}
        #: Since when a producer makes a sample.
        self._begun: dict[tuple[_GroupKey, int, int], int] = {}
        self._states: dict[str, tuple[int, str]] = {}
        self._waited_s: dict[str, tuple[float, float]] = {}
        self._published: dict[str, int] = {}
        self._runs: dict[str, tuple[int, int]] = {}  # version and since when, by reader
        self._flows = itertools.count(1)
        self._made: list[TraceEvent] = []

    # -- input ----------------------------------------------------------------------------------

    def history(self, events: Sequence[BusEvent], missed: int = 0) -> list[TraceEvent]:
        """Make events from a daemon's memory, oldest first."""
        if missed and events:
            text = f"{missed} events were forgotten before they were read"
            self._instant(self._daemon, text, _us(events[0].unix_s))
        for event in events:
            if event.kind == "leased":
                self._leased(event)
            elif event.kind in _ENDS:
                self._ended(event)
            elif event.instance_id:
                self._of_sample(event)
            else:
                self._of_bus(event)
        return self._taken()

    def has_strangers(self, events: Sequence[BusEvent]) -> bool:
        """Tell if a producer still lacks a name, which the next status may contain."""
        return any(
            sample.producer not in self._names for event in events for sample in event.samples
        )

    def groups(self, found: Groups, now_s: float) -> None:
        """Note samples under construction; their commits turn them into slices."""
        for group in found.groups:
            key = (group.instance_id, group.round, group.split)
            for cell in group.cells:
                maker = cell.producer if cell.state == "begun" else cell.taken_by
                if maker is None:
                    continue
                # At the latest since the first look that found the sample in hand.
                self._begun.setdefault((key, cell.index, maker), _us(now_s))
        _bound(self._begun)

    def status(self, status: BusStatus, now_s: float) -> list[TraceEvent]:
        """Make counters of the bus's contents, and of each process's share of waiting time."""
        now = _us(now_s)
        counts = {"in the ring": status.ledger.in_ring, "stashed": status.ledger.stashed}
        self._counter(self._daemon, f"{_COUNTERS}: trajectories", now, counts)
        self._counter(
            self._daemon, f"{_COUNTERS}: bytes", now, {"used": status.capacity - status.free}
        )
        waited = {}
        for producer in status.producers:
            self._names[producer.producer_id] = name = producer_name(producer)
            if producer.state == "alive":
                waited[name] = producer.waited_s
        if status.daemon is not None and status.daemon.answers:
            daemon = status.daemon
            groups = {
                "incomplete": daemon.groups_open,
                "ready": daemon.groups_ready,
                "leased": daemon.groups_leased,
            }
            self._counter(self._daemon, f"{_COUNTERS}: groups", now, groups)
            for lease in daemon.leases:
                waited[trainer_name(lease)] = lease.waited_s
        for who, waited_s in waited.items():
            before_s, seen_s = self._waited_s.get(who, (waited_s, now_s))
            if now_s > seen_s:
                part = min(1.0, max(0.0, (waited_s - before_s) / (now_s - seen_s)))
                self._counter(who, _WAITS, now, {"part of the time": round(part, 4)})
        self._waited_s = {who: (waited_s, now_s) for who, waited_s in waited.items()}
        return self._taken()

    def weights(self, pools: Sequence[PoolStatus], now_s: float) -> list[TraceEvent]:
        """Make events of published versions, and slices of each reader's versions."""
        now = _us(now_s)
        running = {}
        for pool in pools:
            seen = self._published.get(pool.kind, 0)
            if seen > max((slot.sequence for slot in pool.slots), default=0):
                seen = 0  # another pool, of a restarted trainer
            for slot in sorted(pool.slots, key=lambda slot: slot.sequence):
                if slot.sequence > seen and slot.published_unix_ns:
                    at = slot.published_unix_ns // 1000
                    text = f"version {slot.version} published"
                    more = {"bytes": slot.size, "patch from": slot.patch_from}
                    self._instant(pool.kind, text, at, more)
                    self._published[pool.kind] = slot.sequence
            for reader in pool.readers:
                if reader.state == "alive" and reader.applied_version is not None:
                    who = f"{pool.kind} of {reader.label or 'a reader'} (pid {reader.pid})"
                    running[who] = reader.applied_version
        for who, (version, since) in self._runs.items():
            if running.get(who) != version:
                self._slice(who, f"version {version}", since, now)
        self._runs = {
            who: self._runs[who] if self._runs.get(who, (None,))[0] == version else (version, now)
            for who, version in running.items()
        }
        return self._taken()

    def end(self, now_s: float) -> list[TraceEvent]:
        """End open slices: they reach to the end of the trace."""
        now = _us(now_s)
        for key, leases in self._leases.items():
            for lease in leases:
                self._at_trainer(key, lease, now, "open at the end of the trace")
        for _, (since, name) in self._states.items():
            self._slice(self._daemon, name, since, now)
        for who, (version, since) in self._runs.items():
            self._slice(who, f"version {version}", since, now)
        self._leases, self._states, self._runs = {}, {}, {}
        return self._taken()

    # -- groups and samples ---------------------------------------------------------------------

    def _leased(self, event: BusEvent) -> None:
        key, at = _key(event), _us(event.unix_s)
        flow = 0
        back = self._given_back.pop(key, None)
        began, whole = _born(event)
        if back is not None:
            began, whole = back, back
        if began:
            flow = next(self._flows)
            self._before_lease(key, began, whole, at, "", flow)
        if back is None:
            self._commits(event)
        self._leases.setdefault(key, []).append(_Open(at, event.who, flow, event.count))
        if len(self._leases) > MAX_OPEN:
            oldest = next(iter(self._leases))
            for lease in self._leases.pop(oldest):
                self._at_trainer(oldest, lease, lease.since, "its end was not seen")

    def _ended(self, event: BusEvent) -> None:
        key, at = _key(event), _us(event.unix_s)
        leases = self._leases.get(key, [])
        # Giving back leaves no note of the trainer.
        of_them = (
            i
            for i, lease in enumerate(leases)
            if event.index is None and (lease.who == event.who or event.kind == "given_back")
        )
        found = next(of_them, None)
        if found is not None:
            lease = leases.pop(found)
            if not leases:
                del self._leases[key]
            end = f"dropped: {event.text}" if event.kind == "dropped" else event.kind
            self._at_trainer(key, lease, at, end)
            if event.kind == "given_back":
                self._given_back[key] = at
                _bound(self._given_back)
            return
        began, whole = _born(event)
        if event.kind != "dropped":
            text = f"{_name(key)} {event.kind}"
            self._instant(event.who or self._daemon, text, at)
        elif began and event.index is None:
            self._before_lease(key, began, whole, at, f"dropped: {event.text}")
        else:
            sample = "" if event.index is None else f"/{event.index}"
            text = f"{_name(key)}{sample} dropped: {event.text}"
            self._instant(groups_of(self._bus), text, at)
        self._commits(event)

    def _before_lease(
        self, key: _GroupKey, began: int, whole: int, end: int, why: str, flow: int = 0
    ) -> None:
        """Show a waiting group: for its samples, then for a trainer."""
        began = min(began, end)
        whole = whole and min(max(began, whole), end)
        group, more = groups_of(self._bus), _about(key)
        if why:
            more["end"] = why
        track = self._slice(group, _name(key), began, end, more)
        if flow:
            self._arrow("s", group, track, began, flow)
        if whole:
            self._slice(group, "incomplete", began, whole, track=track)
            if not why and whole < end:
                self._slice(group, "waits for a trainer", whole, end, track=track)

    def _at_trainer(self, key: _GroupKey, lease: _Open, end: int, how: str) -> None:
        more = {**_about(key), "samples": lease.samples, "end": how}
        track = self._slice(lease.who, _name(key), lease.since, end, more)
        if lease.flow:
            self._arrow("f", lease.who, track, lease.since, lease.flow)

    def _commits(self, event: BusEvent) -> None:
        key = _key(event)
        for sample in event.samples:
            who = self._names.setdefault(sample.producer, f"producer {sample.producer}")
            at = _us(sample.unix_s)
            begun = self._begun.pop((key, sample.index, sample.producer), None)
            text = f"{_name(key)}/{sample.index}"
            more = {**_about(key), "sample": sample.index}
            if begun is None:
                self._instant(who, f"{text} put", at, more)
            else:
                self._slice(who, text, min(begun, at), at, more)

    def _of_sample(self, event: BusEvent) -> None:
        """Show a failed sample, with its possible repetition."""
        text = f"{_name(_key(event))}/{event.index} failed: {event.text}"
        more = {"attempts": event.count, "asked again": event.kind == "asked"}
        self._instant(event.who or self._daemon, text, _us(event.unix_s), more)

    # -- the bus --------------------------------------------------------------------------------

    def _of_bus(self, event: BusEvent) -> None:
        at = _us(event.unix_s)
        for begins, (ends, name) in _STATES.items():
            if event.kind == begins:
                self._states[begins] = (at, f"{name}: {event.text}" if event.text else name)
                return
            if event.kind == ends:
                since, text = self._states.pop(begins, (at, name))
                self._slice(self._daemon, text, since, at)
                return
        text = event.kind.replace("_", " ")
        if event.text:
            text = f"{text} {event.text}"
        self._instant(event.who or self._daemon, text, at)

    # -- the format -----------------------------------------------------------------------------

    def _taken(self) -> list[TraceEvent]:
        made, self._made = self._made, []
        return made

    @property
    def _daemon(self) -> str:
        return f"bus {self._bus}"

    def _pid(self, who: str) -> int:
        """Return the number of a process; two containers may use the same system number."""
        if who not in self._pids:
            pid = self._pids[who] = len(self._pids) + 1
            for name, value in (("process_name", who), ("process_sort_index", pid)):
                field = name.removeprefix("process_")
                self._emit("M", who, name, 0, 0, args={field: value})
        return self._pids[who]

    def _emit(self, phase: str, who: str, name: str, track: int, at: int, **more: Any) -> None:
        event = {"ph": phase, "name": name, "cat": "shmbus", "pid": self._pid(who), "tid": track}
        self._made.append({**event, "ts": at, **more})

    def _instant(self, who: str, name: str, at: int, more: dict[str, Any] | None = None) -> None:
        self._emit("i", who, name, 0, at, s="p", args=more or {})

    def _counter(self, who: str, name: str, at: int, values: Mapping[str, float]) -> None:
        self._emit("C", who, name, 0, at, args=values)

    def _slice(
        self,
        who: str,
        name: str,
        began: int,
        end: int,
        more: dict[str, Any] | None = None,
        *,
        track: int | None = None,
    ) -> int:
        """Emit a slice, on the first free track or inside the given track; return its track."""
        if track is None:
            tracks = self._tracks[self._pid(who)]
            free = (at for at, until in enumerate(tracks, 1) if until <= began)
            track = next(free, len(tracks) + 1)
            tracks[track - 1 : track] = [end]
        self._emit("X", who, name, track, began, dur=end - began, args=more or {})
        return track

    def _arrow(self, phase: str, who: str, track: int, at: int, number: int) -> None:
        """Emit an end of an arrow, bound to the slice at that place."""
        self._emit(phase, who, "leased", track, at, id=number, bp="e")


def groups_of(bus: str) -> str:
    """Name the trace's process for the groups of a bus."""
    return f"groups of {bus}"


def _us(unix_s: float) -> int:
    return round(unix_s * 1e6)


def _key(event: BusEvent) -> _GroupKey:
    return event.instance_id, event.round, event.split


def _name(key: _GroupKey) -> str:
    instance_id, round, split = key
    name = instance_id if round is None else f"{instance_id} of round {round}"
    return name if split == "train" else f"{name} ({split})"


def _about(key: _GroupKey) -> dict[str, Any]:
    return dict(zip(("instance_id", "round", "split"), key, strict=True))


def _born(event: BusEvent) -> tuple[int, int]:
    """Return the commit times of a group's first and last sample; 0 if unknown."""
    times = [sample.unix_s for sample in event.samples]
    if not times:
        return _us(event.began_unix_s), 0
    # If an event omits samples of a large group, the last commit is unknown.
    return _us(min(times)), _us(max(times)) if len(times) == event.count else 0


def _bound(remembered: dict[Any, int]) -> None:
    while len(remembered) > MAX_OPEN:
        del remembered[next(iter(remembered))]
