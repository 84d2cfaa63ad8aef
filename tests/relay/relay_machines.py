"""The relay's real state machines as parts of a search: a coordinator, a sink, and two sources."""

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from relay.every_order import ASK, DIE, STEP, Faults, Found, Said, visit_every_order
from relay.heads import RecordHead, head_of, healed, pack_heads

from shmbus.relay import messages as m
from shmbus.relay.coordinator import Coordinator
from shmbus.relay.messages import Origin, OriginHead, bus_of
from shmbus.relay.sink import Journal, Sink
from shmbus.relay.source_party import Source
from shmbus.stash.stash import StashPolicy

SINK = "trainer"
COORDINATOR_PART, SINK_PART, FIRST_SOURCE = 0, 1, 2
#: Of every_order: refused for ever; refused for the refuser's life.
FOR_NOTHING, FOR_NOTHING_IN_HIS_LIFE = 1, 2

#: Questions repeated with nothing under way; ASK asks the same at any instant, and more.
REST = "rest"

Plan = dict[str, list[RecordHead]]


class Acknowledged(NamedTuple):
    """A trainer ended these records, at any time after the last put."""

    origins: frozenset[Origin]


class SinkState(NamedTuple):
    """A sink and its lasting parts: lane records, journal, term and ended groups."""

    sink: Sink
    lane: tuple[Origin, ...]
    journal: Journal
    ended: frozenset[Origin]
    offered: int


class SourceState(NamedTuple):
    """A source with its lasting ring, and its future commits."""

    source: Source
    ring: tuple[OriginHead, ...]
    coming: tuple[OriginHead, ...]


def journal_of(sink: Sink) -> Journal:
    """Return the journal row to write."""
    ended = frozenset(sink.dropped.items())
    return Journal(frozenset(sink.settled), sink.intent, sink.before, ended)


class PlannedSource(Source):
    """A source that announces the heads of a plan."""

    def __init__(self, bus: str, incarnation: int, *splits: str) -> None:
        super().__init__(bus, incarnation, self._pack, lambda: splits or ("train",))

    @staticmethod
    def _pack(held: Mapping[Origin, Any]) -> bytes:
        return pack_heads(held.values())


class System:
    """The parts' classes; a subclass plants a bug."""

    coordinator_kind: type[Coordinator] = Coordinator
    sink_kind: type[Sink] = Sink
    source_kind: type[Source] = PlannedSource
    asks_for_news = True

    def __init__(self, plan: Plan, policy: StashPolicy, release: str = "put") -> None:
        self.plan = {bus: [head_of(bus, head) for head in heads] for bus, heads in plan.items()}
        self.release = release
        self.buses = tuple(sorted(plan))
        self.policy = policy
        sources = [SourcePart(self, bus) for bus in self.buses]
        self.parts = (CoordinatorPart(self), SinkPart(self), *sources)
        self.by_bus = {bus: FIRST_SOURCE + i for i, bus in enumerate(self.buses)}

    def heal(self, journal: Journal, committed: int) -> Journal:
        """Return a dead sink's remains, once its lane is free."""
        return healed(journal, committed)

    def said(self, messages: Sequence[m.Message | Acknowledged]) -> list[Said]:
        return [self._way(message) for message in messages]

    def _way(self, message: m.Message | Acknowledged) -> Said:
        match message:
            case Acknowledged():
                return Said(message, SINK_PART, ())
            case m.Subscription():
                bus = self.by_bus[message.bus]
                return Said(message, bus, (COORDINATOR_PART, bus))
            case m.Announcement():
                return Said(message, COORDINATOR_PART, (COORDINATOR_PART, self.by_bus[message.bus]))
            case m.Fetch() | m.Release():
                bus = self.by_bus[message.bus]
                return Said(message, bus, (SINK_PART, bus))
            case m.Released():
                return Said(message, SINK_PART, (SINK_PART, self.by_bus[message.bus]))
            case m.Fetched():
                buses = {self.by_bus[bus_of(each)] for each in message.origins + message.gone}
                return Said(message, SINK_PART, (SINK_PART, *buses))
            case m.SinkStateWanted() | m.Assignment() | m.Drop():
                return Said(message, SINK_PART, (COORDINATOR_PART, SINK_PART))
            case _:
                return Said(message, COORDINATOR_PART, (COORDINATOR_PART, SINK_PART))

    def explore(self, faults: Faults) -> Found:
        """Visit every state; an assertion names the way to a bad state."""
        states: list[Any] = []
        said: list[Said] = []
        for part in self.parts:
            state, words = part.begin()
            states.append(state)
            said += words
        # They have met when the search begins; after a death they meet in every order.
        while said:
            message, to, _ = said.pop(0)
            states[to], words = self.parts[to].after(states[to], message)
            said += words
        return visit_every_order(self.parts, states, said, faults, self.ask_again)

    def ask_again(self, states: Sequence[Any]) -> tuple[list[Any], list[Said]] | None:
        """Repeat every question with a losable answer; None at a good end."""
        sources: list[SourceState] = list(states[FIRST_SOURCE:])
        after, said = self.parts[COORDINATOR_PART].after(states[COORDINATOR_PART], REST)
        messages: list[m.Message] = []
        held = {each.source.bus: len(each.source.held) for each in sources}
        messages += after.ask_who_holds_less(held)
        for each in sources:
            # As in its reports from time to time.
            if self.asks_for_news and after.lacks_news(each.source.bus, each.source.mark):
                messages += after.ask_source(each.source.bus)
        sink, more = self.parts[SINK_PART].after(states[SINK_PART], REST)
        if sink.sink.incarnation > after.sinks[SINK].incarnation:
            # Its first message was lost; its report of presence carries the number.
            messages.append(m.SinkStateWanted(SINK, after.term))
        said = [*said, *self.said(messages), *more]
        coordinator = self.parts[COORDINATOR_PART]
        same = coordinator.key(after) == coordinator.key(states[COORDINATOR_PART])
        if not said and same:
            self.check_end(after, sink, sources)
            return None
        return [after, sink, *sources], said

    def check_end(
        self, coordinator: Coordinator, sink: SinkState, sources: list[SourceState]
    ) -> None:
        """Every committed record was put once, or dropped, and no part keeps a remainder."""
        heads = [head for heads in self.plan.values() for head in heads]
        scores = {head.score for head in heads if head.split == 0}
        useless = self.policy.skip_zero_variance and len(scores) == 1
        put = [] if useless else sorted(head.origin for head in heads)
        assert sorted(sink.lane) == put, "lost, or put though it is useless"
        assert not any(each.ring for each in sources), "not released"
        assert not sink.journal.settled, "not forgotten by the sink"
        assert not sink.journal.intent, "begun, and never put"
        stash = coordinator.stash
        assert not stash.waiting_samples() and not stash.table.leased_groups, (
            "a phantom in the stash"
        )
        assert not coordinator.known and not coordinator.taken, "not forgotten"
        assert not coordinator.dropped, "not dropped"


class CoordinatorPart:
    """The coordinator: leaves nothing behind but a smaller term than its successor's."""

    def __init__(self, system: System) -> None:
        self.system = system

    def begin(self, term: int = 0) -> tuple[Coordinator, list[Said]]:
        system = self.system
        new = system.coordinator_kind(term, system.buses, [SINK], system.policy)
        return new, system.said(new.begin())

    def key(self, c: Coordinator) -> Hashable:
        view = c.sinks[SINK]
        table = c.stash.table
        return (
            (c.term, c._question, view.incarnation, view.heard, view.bytes, view.owed),
            tuple(sorted(tuple(sorted(origins)) for origins in view.leases)),
            tuple(sorted(c.newest.items())),
            frozenset(c.taken.items()),
            frozenset(c.doubtful),
            frozenset(c.dropped.items()),
            frozenset(c.orphans.items()),
            tuple(sorted(sample.origin for sample in table.samples())),
            table.ready_groups,
            frozenset(c.known),
            frozenset(table.recent),
            tuple(c.splits.labels),
        )

    def can_step(self, c: Coordinator) -> bool:
        return False

    def copy(self, c: Coordinator) -> Coordinator:
        system = self.system
        new = system.coordinator_kind(c.term, c.buses, [SINK], system.policy)
        new.newest, new.taken = dict(c.newest), dict(c.taken)
        new._due = {
            bus: {mark: list(origins) for mark, origins in due.items()}
            for bus, due in c._due.items()
        }
        new.assigned, new.dropped = dict(c.assigned), dict(c.dropped)
        new.doubtful, new.orphans = set(c.doubtful), dict(c.orphans)
        new.splits.labels = list(c.splits.labels)
        new.known, new._question = dict(c.known), c._question
        view, old = new.sinks[SINK], c.sinks[SINK]
        view.incarnation, view.heard, view.owed = old.incarnation, old.heard, old.owed
        view.bytes, view.placed, view.weights = old.bytes, old.placed, dict(old.weights)
        for origins, entry in old.leases.items():
            new.stash.add(entry.samples, 0.0)
            (view.leases[origins],) = new.stash.lease(1, 0, entry.split)
        new.stash.table.recent.clear()
        new.stash.add(c.stash.table.samples(), 0.0)
        new.stash.table.recent.clear()
        new.stash.table.recent.update(c.stash.table.recent)
        assert self.key(new) == self.key(c), "a copy that differs"
        return new

    def after(self, c: Coordinator, given: Any) -> tuple[Coordinator, list[Said]]:
        if given == DIE:
            return self.begin(c.term + 1)
        new = self.copy(c)
        said: list[m.Message] = []
        match given:
            case str():
                if given == ASK:
                    # From a source's earlier report.
                    for bus in new.buses:
                        said += new.ask_source(bus)
                said += new.ask_sinks()
                said += new.ask_sources_again()
                unheard = [bus for bus in new.buses if bus not in new.newest]
                said += [m.Subscription(bus, new.term) for bus in unheard]
                said += new.assign_again()
                said += new.drop_again()
            case m.Announcement():
                said += new.announced(given, 0.0)
            case m.SinkState():
                said += new.sink_state(given, 0.0)
            case m.Settled():
                said += new.settled(given, 0.0)
            case m.Returned():
                said += new.returned(given, 0.0)
            case m.Confirmation():
                said += new.confirmed(given, 0.0)
        new.drops.clear()  # figures for people
        return new, self.system.said(said)

    def for_nothing(self, c: Coordinator, given: Any) -> int:
        """Refused by its numbers: only a successor may take the message."""
        match given:
            case m.Announcement() if given.mark <= c.newest.get(given.bus, (-1, -1)):
                return FOR_NOTHING_IN_HIS_LIFE
            case m.SinkState() if given.incarnation <= c.sinks[SINK].incarnation:
                return FOR_NOTHING_IN_HIS_LIFE
        return 0


class SinkPart:
    """The sink with its lane; puts a record in a single step."""

    def __init__(self, system: System) -> None:
        self.system = system

    def begin(self, before: SinkState | None = None) -> tuple[SinkState, list[Said]]:
        """Begin a sink with an earlier sink's remains."""
        system = self.system
        if before is None:
            new = system.sink_kind(SINK, 0, Journal(), system.release)
            return SinkState(new, (), Journal(), frozenset(), 0), system.said(new.begin())
        left = system.heal(before.journal, len(before.lane))
        ended = {(origin, "acknowledged") for origin in before.ended & left.settled}
        left = left._replace(ended=left.ended | ended)
        new = system.sink_kind(SINK, before.sink.incarnation + 1, left, system.release)
        new.term = before.sink.term
        said = [*new.begin(), *new.ask_release_again()]
        return before._replace(sink=new, journal=left), system.said(said)

    def key(self, state: SinkState) -> Hashable:
        s = state.sink
        return (
            (s.incarnation, s.term, journal_of(s), tuple(s.waiting), tuple(s.batches)),
            (frozenset(s.wanted), frozenset(s._gone.items()), frozenset(s.ended.items())),
            (frozenset(s.owed), s._number),
            state.lane,
            state.journal,
            (state.ended, state.offered),
        )

    def can_step(self, state: SinkState) -> bool:
        return state.sink.ready

    def copy(self, s: Sink) -> Sink:
        new = copy.copy(s)
        new.waiting, new.batches = list(s.waiting), list(s.batches)
        new.wanted, new.owed, new.settled = set(s.wanted), set(s.owed), set(s.settled)
        new._gone, new.ended, new.dropped = dict(s._gone), dict(s.ended), dict(s.dropped)
        return new

    def after(self, state: SinkState, given: Any) -> tuple[SinkState, list[Said]]:
        if given == DIE:
            return self.begin(state)
        new = self.copy(state.sink)
        lane, journal, ended, offered = state[1:]
        said: list[Any] = []
        match given:
            case str():
                if given == STEP:
                    lane, said = self._step(new, lane)
                    journal = journal_of(new)
                    if self._has_put_all(new, lane):
                        taken, offered = frozenset(lane[state.offered :]), len(lane)
                        said = [*said, *self._taken(taken)]
                else:
                    said = [*new.ask_again(), *new.ask_release_again()]
            case Acknowledged():
                ended |= given.origins
            case m.SinkStateWanted():
                said = new.tell(given)
            case m.Assignment():
                said = new.assign_all([given])
            case m.Drop():
                said = new.drop(given)
                journal = journal_of(new)
            case m.Fetched():
                said = new.fetched(given)
                journal = journal_of(new)
            case m.Released():
                said = new.released(given)
                journal = journal_of(new)
        if untold := (ended & new.settled) - new.ended.keys():
            said = [*said, *new.end(untold)]
        for word in said:
            if isinstance(word, m.Release) and word.reason != "zero_variance":
                assert word.origins <= set(lane), "released before it was put"
                assert word.reason == "relayed" or word.origins <= ended, "released too early"
        return SinkState(new, lane, journal, ended, offered), self.system.said(said)

    def _step(self, sink: Sink, lane: tuple[Origin, ...]) -> tuple[tuple[Origin, ...], list[Any]]:
        """Do the next of: intend, put a record, ..., settle."""
        journal = journal_of(sink)
        if journal.intent != sink.fetching or journal.before > len(lane):
            sink.intend(len(lane))
        elif len(lane) < journal.before + len(journal.intent):
            origin = journal.intent[len(lane) - journal.before]
            assert origin not in lane, f"put twice: {origin}"
            lane += (origin,)
        else:
            return lane, sink.settle()
        return lane, []

    def _has_put_all(self, sink: Sink, lane: tuple[Origin, ...]) -> bool:
        """Whether a trainer may take the put records at this moment."""
        journal = journal_of(sink)
        return bool(journal.intent) and len(lane) == journal.before + len(journal.intent)

    def _taken(self, origins: frozenset[Origin]) -> list[Any]:
        tells = self.system.release == "acknowledged" and origins
        return [Acknowledged(origins)] if tells else []

    def for_nothing(self, state: SinkState, given: Any) -> int:
        """Refused: for an earlier sink, or from an earlier coordinator."""
        s = state.sink
        match given:
            case m.Fetched() if given.incarnation < s.incarnation:
                return FOR_NOTHING
            case m.Assignment() | m.Drop():
                meant = (given.incarnation, given.term)
                return FOR_NOTHING if meant < (s.incarnation, s.term) else 0
            case m.SinkStateWanted() if given.term < s.term:
                return FOR_NOTHING
        return 0


class SourcePart:
    """A source with its ring, target of its producers' commits."""

    def __init__(self, system: System, bus: str) -> None:
        self.system = system
        self.bus = bus

    def begin(
        self,
        incarnation: int = 0,
        ring: tuple[OriginHead, ...] = (),
        coming: tuple[OriginHead, ...] | None = None,
    ) -> tuple[SourceState, list[Said]]:
        new = self.system.source_kind(self.bus, incarnation)
        said = new.begin({head.origin: head for head in ring})
        if coming is None:
            coming = tuple(self.system.plan[self.bus])
        return SourceState(new, ring, coming), self.system.said(said)

    def key(self, state: SourceState) -> Hashable:
        s = state.source
        ring = tuple(head.origin for head in state.ring)
        return (s.mark, s.asked, tuple(s.held), ring, len(state.coming))

    def can_step(self, state: SourceState) -> bool:
        return bool(state.coming)

    def after(self, state: SourceState, given: Any) -> tuple[SourceState, list[Said]]:
        if given == DIE:
            return self.begin(state.source.incarnation + 1, state.ring, state.coming)
        new = copy.copy(state.source)
        new.held = dict(new.held)
        ring, coming = state.ring, state.coming
        said: list[m.Message] = []
        match given:
            case str():
                assert given == STEP
                ring, coming = (*ring, coming[0]), coming[1:]
                said = new.poll({ring[-1].origin: ring[-1]})
            case m.Subscription():
                said = new.subscribe(given)
            case m.Fetch():
                said = new.fetch(given)
            case m.Release():
                ring = tuple(head for head in ring if head.origin not in given.origins)
                said = new.release(given)
        return SourceState(new, ring, coming), self.system.said(said)

    def for_nothing(self, state: SourceState, given: Any) -> int:
        return 0
