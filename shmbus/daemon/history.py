"""What a daemon notes of its bus: who came and went, what became of groups, who waited how long.

Invariants: nothing here changes a lease or a group; what is noted of a group is a tuple, whatever
its size, so that noting costs little beside leasing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from shmbus import limits
from shmbus._keys import make_key
from shmbus.control import messages
from shmbus.daemon.events import Events, ProducerWatch
from shmbus.daemon.leases import Lease, Session
from shmbus.inspect.failure_kinds import kind_of
from shmbus.inspect.view_types import BusEvent
from shmbus.stash.collector import Collector
from shmbus.stash.failures import FailedIndex
from shmbus_ext import _core

__all__ = ["History"]

#: Events that the answer about one group has: many more than a group goes through.
_OF_A_GROUP = 200


class History:
    """The history of one bus, while one daemon serves it.

    Parameters
    ----------
    collector : Collector
        Tells of its drops and failures from now on.

    Attributes
    ----------
    failed_attempts : Counter[str]
        Of samples, by the kind of their reason.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._segment = collector.segment
        self._events = Events(self._segment)
        self._producers = ProducerWatch()
        #: Who is ending a lease, so that a drop has a name.
        self._ending = ""
        self.failed_attempts: Counter[str] = Counter()
        self._paused = self._segment.paused()
        self._lane_pause = collector.lane_pause
        self._version = self._segment.policy_version
        collector.drops.told = self._dropped
        collector.stash.failures.told = self._failed
        self._producers.look(self._segment, collector.deaths)  # these were here before
        self._events.note("daemon_began")

    # -- what happens ---------------------------------------------------------------------------

    def look_at_producers(self) -> None:
        """Note who came and went: before a sweep, which makes all that went alike."""
        for kind, who in self._producers.look(self._segment, self._collector.deaths):
            self._events.note(kind, who)

    def look(self, sessions: Iterable[Session], now_s: float) -> None:
        """Look for what nobody tells a daemon: producers, pauses, versions; and count waits."""
        self.look_at_producers()
        paused = self._segment.paused()
        if (paused is None) != (self._paused is None):
            if paused is not None:
                self._events.note("paused", text=paused[0])
            else:
                self._events.note("resumed")
        self._paused = paused
        lane = self._collector.lane_pause
        if (lane is None) != (self._lane_pause is None):
            if lane is not None:
                self._events.note("requests_paused", text=lane.reason)
            else:
                self._events.note("requests_resumed")
        self._lane_pause = lane
        version = self._segment.policy_version
        if version != self._version:
            self._version = version
            self._events.note_version(version)
        for session in sessions:
            self._count_waits(session, now_s)

    def _count_waits(self, session: Session, now_s: float) -> None:
        waited_s = session.new_waits_s(now_s)
        if waited_s > 0:
            _core.note_waited(self._segment, waited_s)

    def joined(self, session: Session) -> None:
        """Note a new client."""
        if not session.observer:
            self._events.note("trainer_came", session.name)

    def left(self, session: Session, now_s: float, *, orderly: bool) -> None:
        """Note that a client has left, or lost its connection."""
        if not session.observer:
            self._count_waits(session, now_s)
            self._events.note("trainer_left" if orderly else "trainer_lost", session.name)

    def leased(self, lease: Lease, session: Session) -> None:
        """Note that a client was given a group."""
        samples = lease.samples
        self._events.note_group("leased", samples[0].key, session.name, count=len(samples))

    def given_back(self, lease: Lease) -> None:
        """Note that a group is to be delivered again."""
        self._events.note_group("given_back", lease.samples[0].key, count=len(lease.samples))

    def end(self, lease: Lease, session: Session, reason: int) -> None:
        """Note that a client ends a lease; its drop is told by the collector at once."""
        if reason != _core.ACKED:
            self._ending = session.name
        else:
            samples = lease.samples
            self._events.note_group(
                "acknowledged", samples[0].key, session.name, count=len(samples)
            )

    def _dropped(self, reason: str, samples: Sequence[_core.Trajectory]) -> None:
        who, self._ending = self._ending, ""
        first = samples[0]
        index = first.index if len(samples) == 1 < first.group_size else None
        self._events.note_group("dropped", first.key, who, reason, index=index, count=len(samples))

    def _failed(self, key: Hashable, index: int, failed: FailedIndex[_core.Trajectory]) -> None:
        self.failed_attempts[kind_of(failed.reason)] += 1
        report = failed.report
        self._events.note_group(
            "failed" if failed.request is None else "asked",
            key,
            "" if report is None else self._producers.name(report.producer_id),
            failed.reason,
            index=index,
            count=failed.attempts,
        )

    # -- who asks -------------------------------------------------------------------------------

    def key_of(self, request: messages.GetGroup) -> Hashable:
        """Return the key of the group that is asked for."""
        labels = {label: number for number, label, *_ in _core.splits(self._segment)}
        # A split that nobody has used has no groups; no number is given to it here.
        split = labels.get(request.split, -1)
        return make_key(request.instance_id, request.round, split)

    def of_group(self, key: Hashable) -> list[BusEvent]:
        """Return the events of a group, oldest first."""
        return self._events.of_group(key, _OF_A_GROUP)

    def reply(self, request: messages.GetEvents) -> messages.EventsReply:
        """Return the events that a client asks for."""
        limit = min(request.limit, limits.MAX_EVENTS_SHOWN)
        events, newest, missed = self._events.read(request.after, limit, groups=request.groups)
        return messages.EventsReply(id=request.id, events=events, newest=newest, missed=missed)
