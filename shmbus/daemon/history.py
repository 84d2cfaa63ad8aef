"""The history of a bus: arrivals and deaths, fates of groups, waits.

Invariants:

- History changes no lease or group, and decides nothing. An entry costs a tuple in a list; texts
  are made on request, and samples are noted only during a trace.
- Bounded: the oldest entries go first. Group events, thousands a second, do not push out arrivals
  and deaths. Consecutive policy versions are a single event.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from shmbus.base import limits
from shmbus.control import messages
from shmbus.daemon.leases import Lease, Session
from shmbus.data.keys import make_key, split_key
from shmbus.data.status_types import BusEvent, SampleCommit
from shmbus.inspect.failure_kinds import kind_of
from shmbus.stash.collector import Collector
from shmbus.stash.failures import FailedIndex
from shmbus_ext import _core

#: Events in an answer about a group: far above a group's usual number.
_OF_A_GROUP = 200
#: Group events kept: some seconds at full speed, days of a run with minutes a step; and other
#: events kept.
GROUP_EVENTS: Final = 8192
OTHER_EVENTS: Final = 1024
#: Seconds of noting samples after a trace request; a trace asks several times a second.
_TRACED_S = 10.0
#: Samples in an event; a full answer of such events is a quarter of a message.
SAMPLES_OF_EVENT: Final = 32
#: A producer slot without an owner.
_FREE = 0


class _Noted(NamedTuple):
    number: int
    unix_s: float
    kind: str
    who: str
    text: str
    key: Hashable
    sample: int | None
    amount: int
    #: On the monotonic clock; 0 if unknown.
    began_s: float = 0.0
    #: Index, producer and committed_ns of each.
    samples: tuple[tuple[int, int, int], ...] = ()
    #: Of a run of policy versions: the first version, and its event's number.
    first: str = ""
    since: int = 0


class Events:
    """The history of a daemon."""

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        self._numbers = itertools.count(1)
        self._newest = 0
        self._groups: deque[_Noted] = deque(maxlen=GROUP_EVENTS)
        self._others: deque[_Noted] = deque(maxlen=OTHER_EVENTS)
        #: Numbers and texts of events merged into a later event.
        self._joined: deque[tuple[int, str]] = deque(maxlen=OTHER_EVENTS)
        self._traced_until_s = 0.0

    def note(self, kind: str, who: str = "", text: str = "") -> None:
        """Note an event without a group."""
        self._newest = next(self._numbers)
        self._others.append(_Noted(self._newest, time.time(), kind, who, text, None, None, 0))

    def note_version(self, version: int) -> None:
        """Note a policy version; a version right after a lower version joins its event."""
        before = self._others[-1] if self._others else None
        if before is None or before.kind != "policy_version" or int(before.text) >= version:
            self.note("policy_version", text=str(version))
            return
        self._joined.append((before.number, before.text))
        self._newest = next(self._numbers)
        self._others[-1] = before._replace(
            number=self._newest,
            unix_s=time.time(),
            text=str(version),
            first=before.first or before.text,
            since=before.since or before.number,
        )

    def note_group(
        self,
        kind: str,
        key: Hashable,
        who: str = "",
        text: str = "",
        *,
        index: int | None = None,
        count: int = 0,
        began_s: float = 0.0,
        samples: Sequence[_core.Trajectory] = (),
    ) -> None:
        """Note an event of a group, or of a sample in it."""
        self._newest = next(self._numbers)
        now_s = time.time()
        commits: tuple[tuple[int, int, int], ...] = ()
        if now_s < self._traced_until_s:
            commits = tuple(
                (each.index, each.producer_id, each.committed_ns)
                for each in itertools.islice(samples, SAMPLES_OF_EVENT)
            )
        self._groups.append(
            _Noted(self._newest, now_s, kind, who, text, key, index, count, began_s, commits)
        )

    def read(
        self, after: int, limit: int, *, groups: bool = True, trace: bool = False
    ) -> tuple[list[BusEvent], int, int]:
        """Return the newest events behind a number; for a trace the oldest, and note samples."""
        if after > self._newest:
            after = 0  # a number of an earlier daemon
        found = _newest_of(self._others, after, OTHER_EVENTS if trace else limit)
        if groups:
            found += _newest_of(self._groups, after, GROUP_EVENTS if trace else limit)
        found.sort()
        shown, newest = found[-limit:], self._newest
        if trace:
            self._traced_until_s = time.time() + _TRACED_S
            shown = found[:limit]
            newest = shown[-1].number if shown else newest
        joined = sum(after < number <= newest for number, _ in self._joined)
        missed = max(0, newest - after - len(shown) - joined)
        return [self._told(each, after) for each in shown], newest, missed

    def of_group(self, key: Hashable) -> list[BusEvent]:
        """Return the newest events of a group, oldest first."""
        found = [each for each in self._groups if each.key == key]
        return [self._told(each) for each in found[-_OF_A_GROUP:]]

    def _text(self, noted: _Noted, after: int) -> str:
        """Return an event's text; for a run of versions, only the versions after a number."""
        if noted.since > after:
            return f"{noted.first} to {noted.text}"
        newer = (text for number, text in self._joined if after < number < noted.number)
        first = next(newer, noted.text) if noted.since else noted.text
        return noted.text if first == noted.text else f"{first} to {noted.text}"

    def _told(self, noted: _Noted, after: int = 0) -> BusEvent:
        key, round, split = ("", None, _core.SPLIT_TRAIN)
        if noted.key is not None:
            key, round, split = split_key(noted.key)
        # The current offset from the clock of commits to the wall clock.
        ahead_s = time.time() - time.monotonic()
        return BusEvent(
            number=noted.number,
            unix_s=noted.unix_s,
            kind=noted.kind,
            who=noted.who,
            text=self._text(noted, after)[: limits.FAIL_REASON_CHARS],
            instance_id=key,
            round=round,
            split=_core.split_label(self._segment, split),
            index=noted.sample,
            count=noted.amount,
            began_unix_s=noted.began_s + ahead_s if noted.began_s else 0.0,
            samples=[
                SampleCommit(index, producer, committed_ns / 1e9 + ahead_s)
                for index, producer, committed_ns in noted.samples
            ],
        )


def _newest_of(events: deque[_Noted], after: int, limit: int) -> list[_Noted]:
    newer = itertools.takewhile(lambda each: each.number > after, reversed(events))
    return list(itertools.islice(newer, limit))


class ProducerWatch:
    """Finds producers that came or went between two looks at their slots."""

    def __init__(self) -> None:
        self._epoch = -1
        self._deaths = 0
        #: Slot by producer number: its name, and a flag for a closed slot.
        self._known: dict[int, tuple[str, bool]] = {}

    def name(self, number: int) -> str:
        """Name a producer, as of the last look."""
        return self._known[number][0] if number in self._known else f"producer {number}"

    def look(self, segment: _core.Segment, deaths: int) -> Iterable[tuple[str, str]]:
        """Compare the slots with the last look; costs a load without a change."""
        if segment.attach_epoch == self._epoch:
            return ()
        self._epoch = segment.attach_epoch
        rows = segment.producers()
        now = {
            row[2]: (f"{row[4] or f'producer {row[2]}'} (pid {row[3]})", row[1])
            for row in rows
            if row[2]
        }
        return list(self._changes(now, deaths))

    def _changes(self, now: dict[int, tuple[str, int]], deaths: int) -> Iterable[tuple[str, str]]:
        attached = {number: who for number, (who, state) in now.items() if state != _FREE}
        gone = [
            who for number, (who, closed) in self._known.items()
            if number not in attached and not closed
        ]  # fmt: skip
        # A freed slot hides its owner's end; the count of deaths may tell.
        ended = "producer_died" if deaths - self._deaths >= len(gone) else "producer_gone"
        self._deaths = deaths
        for who in gone:
            yield ended, who
        for number, who in attached.items():
            closed = now[number][1] == _core.SLOT_CLOSED
            known = self._known.get(number)
            if known is None:
                yield "producer_came", who
            if closed and (known is None or not known[1]):
                yield "producer_left", who
        self._known = {
            number: (who, now[number][1] == _core.SLOT_CLOSED) for number, who in attached.items()
        }


class History:
    """The history of a bus under a daemon."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._segment = collector.segment
        self.events = Events(self._segment)
        self._producers = ProducerWatch()
        #: The name behind the current end of a lease, for its drop event.
        self._ending = ""
        #: Of samples, by the kind of their reason.
        self.failed_attempts: Counter[str] = Counter()
        self._paused = self._segment.paused()
        self._lane_pause = collector.lane_pause
        self._version = self._segment.policy_version
        collector.drops.told = self._dropped
        collector.stash.failures.told = self._failed
        self._producers.look(self._segment, collector.deaths)  # producers from earlier
        self.events.note("daemon_began")

    # -- what happens ---------------------------------------------------------------------------

    def look_at_producers(self) -> None:
        """Note producers' arrivals and ends, before a sweep makes the ended look alike."""
        for kind, who in self._producers.look(self._segment, self._collector.deaths):
            self.events.note(kind, who)

    def look(self, sessions: Iterable[Session], now_s: float) -> None:
        """Look for unreported changes: producers, pauses, versions; and count waits."""
        self.look_at_producers()
        paused, lane = self._segment.paused(), self._collector.lane_pause
        if (paused is None) != (self._paused is None):
            self._note_pause("", None if paused is None else paused[0])
        if (lane is None) != (self._lane_pause is None):
            self._note_pause("requests_", None if lane is None else lane.reason)
        self._paused, self._lane_pause = paused, lane
        version = self._segment.policy_version
        if version != self._version:
            self._version = version
            self.events.note_version(version)
        for session in sessions:
            self._count_waits(session, now_s)

    def _note_pause(self, what: str, reason: str | None) -> None:
        self.events.note(f"{what}{'resumed' if reason is None else 'paused'}", text=reason or "")

    def _count_waits(self, session: Session, now_s: float) -> None:
        waited_s = session.new_waits_s(now_s)
        if waited_s > 0:
            _core.note_waited(self._segment, waited_s)

    def joined(self, session: Session) -> None:
        """Note a new client."""
        if not session.observer:
            self.events.note("trainer_came", session.name)

    def left(self, session: Session, now_s: float, *, orderly: bool) -> None:
        """Note a client's leave or lost connection."""
        if not session.observer:
            self._count_waits(session, now_s)
            self.events.note("trainer_left" if orderly else "trainer_lost", session.name)

    def leased(self, lease: Lease, session: Session) -> None:
        """Note a group's lease to a client."""
        samples = lease.samples
        self.events.note_group(
            "leased",
            samples[0].key,
            session.name,
            count=len(samples),
            began_s=0.0 if lease.group is None else lease.group.born_s,
            samples=samples,
        )

    def given_back(self, lease: Lease) -> None:
        """Note a returned group."""
        self.events.note_group("given_back", lease.samples[0].key, count=len(lease.samples))

    def end(self, lease: Lease, session: Session, reason: int) -> None:
        """Note a client's end of a lease; the collector reports its drop at once."""
        if reason != _core.ACKED:
            self._ending = session.name
        else:
            key, count = lease.samples[0].key, len(lease.samples)
            self.events.note_group("acknowledged", key, session.name, count=count)

    def _dropped(self, reason: str, samples: Sequence[_core.Trajectory]) -> None:
        who, self._ending = self._ending, ""
        first = samples[0]
        index = first.index if len(samples) == 1 < first.group_size else None
        self.events.note_group(
            "dropped", first.key, who, reason, index=index, count=len(samples), samples=samples
        )

    def _failed(self, key: Hashable, index: int, failed: FailedIndex[_core.Trajectory]) -> None:
        self.failed_attempts[kind_of(failed.reason)] += 1
        report = failed.report
        self.events.note_group(
            "failed" if failed.request is None else "asked",
            key,
            "" if report is None else self._producers.name(report.producer_id),
            failed.reason,
            index=index,
            count=failed.attempts,
        )

    # -- who asks -------------------------------------------------------------------------------

    def key_of(self, request: messages.GetGroup) -> Hashable | None:
        """Return the requested group's key; None for a split never used, which has no groups."""
        # The lookup assigns no number.
        labels = {label: number for number, label, *_ in _core.splits(self._segment)}
        if request.split not in labels:
            return None
        return make_key(request.instance_id, request.round, labels[request.split])

    def reply(self, request: messages.GetEvents) -> messages.EventsReply:
        """Return the requested events."""
        limit = min(request.limit, limits.MAX_EVENTS_SHOWN)
        events, newest, missed = self.events.read(
            request.after, limit, groups=request.groups or request.trace, trace=request.trace
        )
        return messages.EventsReply(id=request.id, events=events, newest=newest, missed=missed)
