"""The relay's real state machines under every order of events: two sources, one sink, faults.

A state is what all machines, the rings, the lane, the journal and the network are. From each state
every event is tried that can come next: any message that is under way arrives, whatever was sent
before or after it; the sink does its next step; a producer commits; a process dies at that instant
and its successor begins, with the messages from and to it lost, or late.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmbus import RecordHead
from shmbus.relay import messages as m
from shmbus.relay.coordinator import Coordinator
from shmbus.relay.origin_head import OriginHead, head_of
from shmbus.relay.origins import Origin, bus_of
from shmbus.relay.sink import Journal, Sink
from shmbus.relay.source import Source
from shmbus.stash.stash import StashPolicy

SINK = "trainer"
COORDINATOR = "coordinator"
#: 1 takes ten seconds; 2 takes many minutes.
DEATHS = int(os.environ.get("SHMBUS_TEST_DEATHS", "1"))
#: Messages that are lost though nobody dies, as in a partition.
LOSSES = int(os.environ.get("SHMBUS_TEST_LOSSES", "2"))
#: Far above what a correct protocol needs, far below what memory takes.
MOST_STATES = 3_000_000


#: Identities of the sources' buses.
A, B = "a" * 32, "b" * 32


def head(
    bus: str,
    group: str,
    size: int,
    index: int,
    sequence: int,
    epoch: int | None = None,
    score: float | None = None,
) -> OriginHead:
    """A head on one of the buses."""
    value = float(index) if score is None else score
    of = RecordHead(1, sequence, group, epoch, size, index, value, 0, 64, 0, 7, size)
    return head_of(bus, of)


#: A group of equal scores is dropped: its records are let go, and never put.
POLICY = StashPolicy(skip_zero_variance=True)


class System:
    """All of one state; `after` gives the next ones."""

    sink_kind: type[Sink] = Sink
    asks_for_news = True

    def __init__(self, kind: type[Coordinator], plan: dict[str, list[OriginHead]]) -> None:
        self.kind = kind
        self.buses = tuple(sorted(plan))
        self.to_commit = {bus: list(heads) for bus, heads in plan.items()}
        self.rings: dict[str, dict[Origin, OriginHead]] = {bus: {} for bus in plan}
        self.lane: tuple[Origin, ...] = ()
        self.journal = Journal()
        self.deaths = DEATHS
        self.losses = 0
        self.network: tuple[m.Message, ...] = ()
        self.epoch = 0
        self.log: list[tuple[str, m.Message]] = []
        self.coordinator = kind(0, self.buses, [SINK], POLICY)
        self.send(self.coordinator.begin())
        self.sources = {bus: Source(bus, 0) for bus in plan}
        for source in self.sources.values():
            self.send(source.begin({}))
        self.sink = self.sink_kind(SINK, 0, self.journal, "put")
        self.send(self.sink.begin())
        # They have met when the exploration begins; after a death they meet in every order.
        while self.network:
            self.on_deliver(0)

    def copy(self) -> System:
        other = copy.copy(self)
        other.to_commit = {bus: list(heads) for bus, heads in self.to_commit.items()}
        other.rings = {bus: dict(ring) for bus, ring in self.rings.items()}
        other.log = list(self.log)
        other.sources = {bus: copy.copy(source) for bus, source in self.sources.items()}
        for source in other.sources.values():
            source.held = dict(source.held)
        other.sink = copy.copy(self.sink)
        other.sink.waiting = list(self.sink.waiting)
        other.sink.batches = list(self.sink.batches)
        other.sink.wanted = set(self.sink.wanted)
        other.sink._gone = dict(self.sink._gone)
        other.sink.ended = dict(self.sink.ended)
        other.sink.dropped = dict(self.sink.dropped)
        other.sink.settled = set(self.sink.settled)
        other.sink.owed = set(self.sink.owed)
        return other

    def own_coordinator(self) -> Coordinator:
        """Return one that no other state has: until it is told something, states share theirs.

        A group table cannot be copied, so a coordinator hears everything once more.
        """
        self.coordinator = self.kind(self.epoch, self.buses, [SINK], POLICY)
        self.coordinator.begin()
        for name, message in self.log:
            self._call_coordinator(name, message)
        return self.coordinator

    def key(self) -> Any:
        c, s = self.coordinator, self.sink
        view = c.sinks[SINK]
        return (
            (self.deaths, self.losses),
            tuple(len(heads) for heads in self.to_commit.values()),
            tuple(tuple(sorted(ring)) for ring in self.rings.values()),
            self.lane,
            self.journal,
            tuple(sorted(map(hash, self.network))),
            tuple((x.mark, x.asked, tuple(sorted(x.held))) for x in self.sources.values()),
            (s.incarnation, s.epoch, s.journal, tuple(s.waiting), tuple(s.batches)),
            (frozenset(s.wanted), frozenset(s._gone.items()), frozenset(s.ended.items())),
            (c.epoch, view.incarnation, view.heard, frozenset(view.leases)),
            tuple(sorted(c.newest.items())),
            frozenset(c.taken.items()),
            frozenset(c.doubtful & c.taken.keys()),
            tuple(sorted(c.dropped.items())),
            (frozenset(c.orphans.items()), view.owed),
            tuple(sorted(sample.origin for sample in c.stash.waiting_samples())),
            tuple(sorted(c.known)),
        )

    # -- events ---------------------------------------------------------------------------------

    def send(self, said: list[m.Message]) -> None:
        self.network += tuple(said)

    def events(self) -> Iterator[tuple[Any, ...]]:
        seen = set()
        for i, message in enumerate(self.network):
            if message not in seen:
                seen.add(message)
                yield ("deliver", i)
                if self.losses:
                    yield ("lose", i)
        for bus, heads in self.to_commit.items():
            if heads:
                yield ("commit", bus)
        if self.sink.ready:
            yield ("step",)
        if self.deaths:
            for who in (COORDINATOR, SINK, *self.buses):
                yield ("die", who, False)
                yield ("die", who, True)

    def after(self, event: tuple[Any, ...]) -> System:
        system = self.copy()
        getattr(system, f"on_{event[0]}")(*event[1:])
        return system

    def on_deliver(self, i: int) -> None:
        message = self.network[i]
        self.network = self.network[:i] + self.network[i + 1 :]
        match message:
            case m.Subscription():
                self.send(self.sources[message.bus].subscribe(message))
            case m.Fetch():
                self.send(self.sources[message.bus].fetch(message))
            case m.Release():
                for origin in message.origins:
                    assert message.reason == "zero_variance" or origin in self.lane, (
                        "released before it was put"
                    )
                    self.rings[message.bus].pop(origin, None)
                self.send(self.sources[message.bus].release(message))
            case m.SinkStateWanted():
                self.send(self.sink.tell(message))
            case m.Assignment():
                self.send(self.sink.assign(message))
            case m.Drop():
                self.send(self.sink.drop(message))
                self.journal = self.sink.journal
            case m.Fetched():
                self.send(self.sink.fetched(message))
                self.journal = self.sink.journal
            case m.Released():
                self.send(self.sink.released(message))
                self.journal = self.sink.journal
            case m.Announcement():
                self._to_coordinator("announced", message)
            case m.SinkState():
                self._to_coordinator("sink_state", message)
            case m.Settled():
                self._to_coordinator("settled", message)
            case m.Returned():
                self._to_coordinator("returned", message)
            case m.Confirmation():
                self._to_coordinator("confirmed", message)

    def _to_coordinator(self, name: str, message: m.Message) -> None:
        self.own_coordinator()
        self.log.append((name, message))
        self.send(self._call_coordinator(name, message))

    def _call_coordinator(self, name: str, message: m.Message) -> list[m.Message]:
        call: Callable[..., list[m.Message]] = getattr(self.coordinator, name)
        return call(message, 0.0)

    def on_lose(self, i: int) -> None:
        self.losses -= 1
        self.network = self.network[:i] + self.network[i + 1 :]

    def on_commit(self, bus: str) -> None:
        new = self.to_commit[bus].pop(0)
        self.rings[bus][new.origin] = new
        self.send(self.sources[bus].poll({new.origin: new}))

    def on_step(self) -> None:
        """The next of: intend, put one, ..., settle."""
        sink, journal = self.sink, self.sink.journal
        if journal.intent != sink.fetching or journal.before > len(self.lane):
            sink.intend(len(self.lane))
            self.journal = sink.journal
        elif len(self.lane) < journal.before + len(journal.intent):
            origin = journal.intent[len(self.lane) - journal.before]
            assert origin not in self.lane, f"put twice: {origin}"
            self.lane += (origin,)
        else:
            said = sink.settle()
            self.journal = sink.journal
            self.send(said)

    def on_die(self, who: str, lose: bool) -> None:
        self.deaths -= 1
        if lose:
            self.network = tuple(x for x in self.network if who not in parties(x))
        if who == COORDINATOR:
            self.epoch += 1
            self.log = []
            self.coordinator = self.kind(self.epoch, self.buses, [SINK], POLICY)
            self.send(self.coordinator.begin())
        elif who == SINK:
            self.journal = self.journal.healed(len(self.lane))
            self.sink = self.sink_kind(SINK, self.sink.incarnation + 1, self.journal, "put")
            self.send(self.sink.begin())
        else:
            self.sources[who] = Source(who, self.sources[who].incarnation + 1)
            self.send(self.sources[who].begin(self.rings[who]))

    def asked_again(self) -> System:
        """What everybody does now and then, since an answer may have been lost."""
        system = self.copy()
        coordinator = system.own_coordinator()
        system.send(coordinator.ask_sinks())
        system.send(coordinator.ask_sources_again())
        held = {bus: len(source.held) for bus, source in system.sources.items()}
        system.send(coordinator.ask_who_holds_less(held))
        for bus, source in system.sources.items():
            # As it says of itself now and then.
            if self.asks_for_news and coordinator.lacks_news(bus, source.mark):
                system.send(coordinator.ask_source(bus))
        system.send(coordinator.assign_again())
        system.send(coordinator.drop_again())
        system.send(system.sink.ask_again())
        system.send(system.sink.ask_release_again())
        return system

    @property
    def at_rest(self) -> bool:
        return not self.network and not self.sink.ready and not any(self.to_commit.values())

    def check_end(self, plan: dict[str, list[OriginHead]]) -> None:
        heads = [head for heads in plan.values() for head in heads]
        useless = len({head.score for head in heads}) == 1
        put = [] if useless else sorted(head.origin for head in heads)
        assert sorted(self.lane) == put, "lost, or put though it is useless"
        assert not any(self.rings.values()), "not released"
        assert not self.journal.settled and not self.journal.intent, "not forgotten by the sink"
        stash = self.coordinator.stash
        assert not stash.waiting_samples() and not stash.leased_groups, "a phantom in the stash"
        assert not self.coordinator.known and not self.coordinator.taken, "not forgotten"
        assert not self.coordinator.dropped, "not dropped"


def parties(message: m.Message) -> tuple[str, ...]:
    """Who sent it, and to whom."""
    match message:
        case m.Subscription() | m.Announcement():
            return (COORDINATOR, message.bus)
        case m.Fetch() | m.Release() | m.Released():
            return (SINK, message.bus)
        case m.Fetched():
            return (SINK, *{bus_of(origin) for origin in message.origins + message.gone})
        case _:
            return (COORDINATOR, SINK)


def explore(
    kind: type[Coordinator],
    plan: dict[str, list[OriginHead]],
    deaths: int = DEATHS,
    losses: int = 0,
) -> int:
    """Visit every state, and return how many there are; an assertion names the way to a bad one."""
    first = System(kind, plan)
    first.deaths, first.losses = deaths, losses
    ways: dict[Any, tuple[Any, Any]] = {hash(first.key()): (None, None)}
    todo = deque([(hash(first.key()), first)])
    while todo:
        at, system = todo.popleft()
        following: list[tuple[Any, Callable[[], System]]] = [
            (event, functools.partial(system.after, event)) for event in system.events()
        ]
        if system.at_rest:
            following.append((("ask again",), system.asked_again))
        for event, make in following:
            try:
                other = make()
                key = hash(other.key())
                if event == ("ask again",) and key == at:
                    system.check_end(plan)
                    continue
            except AssertionError as error:
                way = [event]
                while ways[at][0] is not None:
                    way.append(ways[at][1])
                    at = ways[at][0]
                error.add_note("\n".join(map(str, reversed(way))))
                raise
            if key not in ways:
                assert len(ways) < MOST_STATES
                ways[key] = (at, event)
                todo.append((key, other))
    return len(ways)


#: A group of two samples, one from each source.
ONE_GROUP = {A: [head(A, "q", 2, 0, 0)], B: [head(B, "q", 2, 1, 0)]}


#: The same with an epoch, which the stash remembers when a group was complete.
WITH_EPOCH = {A: [head(A, "q", 2, 0, 0, epoch=1)], B: [head(B, "q", 2, 1, 0, epoch=1)]}
#: The same without variance.
USELESS = {A: [head(A, "q", 2, 0, 0, score=1.0)], B: [head(B, "q", 2, 1, 0, score=1.0)]}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", [WITH_EPOCH, USELESS], ids=["epoch", "useless"])
def test_every_order_of_events_and_deaths_puts_each_record_once_and_leaves_nothing_behind(
    plan: dict[str, list[OriginHead]],
) -> None:
    print(f"{explore(Coordinator, plan):,} states, {DEATHS} deaths")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", [WITH_EPOCH, USELESS], ids=["epoch", "useless"])
def test_every_message_may_be_lost_though_nobody_dies(plan: dict[str, list[OriginHead]]) -> None:
    print(f"{explore(Coordinator, plan, 0, LOSSES):,} states, {LOSSES} losses")


def test_without_asking_for_news_a_lost_last_announcement_hides_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(System, "asks_for_news", False)
    with pytest.raises(AssertionError, match="lost"):
        explore(Coordinator, ONE_GROUP, 0, 1)


class TakesLateAnnouncements(Coordinator):
    """Without the rule that the numbers of announcements only grow."""

    def _is_news(self, mark: m.Mark, newest: m.Mark) -> bool:
        return True


class Forgets(Coordinator):
    """Without the rule that what was taken is remembered until an announcement is as new."""

    def _is_taken(self, origin: Origin) -> bool:
        return False


@pytest.mark.parametrize(
    ("kind", "found"), [(TakesLateAnnouncements, "lost|phantom"), (Forgets, "phantom")]
)
@pytest.mark.timeout(600)
def test_without_either_rule_a_late_announcement_leaves_a_phantom_or_hides_a_record(
    kind: type[Coordinator], found: str
) -> None:
    with pytest.raises(AssertionError, match=found) as caught:
        explore(kind, ONE_GROUP)
    print(caught.value, *caught.value.__notes__, sep="\n")


class TrustsAnyAssignment(Sink):
    """A sink that puts whatever it is told to."""

    def assign(self, message: m.Assignment) -> list[m.Message]:
        self.waiting.append(message)
        return self._next()


@pytest.mark.timeout(600)
def test_a_sink_that_trusted_any_assignment_would_put_a_record_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(System, "sink_kind", TrustsAnyAssignment)
    with pytest.raises(AssertionError, match="put twice"):
        explore(Coordinator, ONE_GROUP)


class TinyBlocks(Sink):
    """A sink to which each group is more than a block, so that it asks for two of them at once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, block_bytes=1)


#: Two groups of one sample each, from one source each.
TWO_GROUPS = {
    A: [head(A, "q", 1, 0, 0)],
    B: [head(B, "r", 1, 0, 0, score=1.0)],
}


@pytest.mark.timeout(3600)
def test_every_order_of_events_and_deaths_with_two_blocks_under_way_puts_each_record_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(System, "sink_kind", TinyBlocks)
    monkeypatch.setitem(globals(), "POLICY", StashPolicy())
    # One death fewer: 155,000 states with one, which take minutes.
    monkeypatch.setitem(globals(), "DEATHS", DEATHS - 1)
    print(f"{explore(Coordinator, TWO_GROUPS):,} states, {DEATHS} deaths")
