"""Prompts to other nodes under every order of events; SHMBUS_TEST_DEATHS=2 is the long form."""

import copy
import os
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import pytest
from relay.every_order import ASK, DIE, STEP, Faults, Found, Said, visit_every_order

from shmbus.relay.messages import Demand, GroupName, PromptOffer, Prompts
from shmbus.relay.prompts import PromptRow, PromptSender, PromptTaker, Rows

IS_LONG = os.environ.get("SHMBUS_TEST_DEATHS", "1") != "1"
pytestmark = pytest.mark.timeout(600)

TRAINER, A, B = "f" * 32, "a" * 32, "b" * 32
SENDER, NOBODY, FIRST_SOURCE = 0, 1, 2
BUSES = (A, B)
PART = {A: FIRST_SOURCE, B: FIRST_SOURCE + 1}
#: Of every_order: refused for the refuser's life.
FOR_NOTHING_IN_HIS_LIFE = 2
REST = "rest"
MAKE, GIVE_BACK = "make", "give back"
#: Number of a request with samples dropped by a policy, which never come.
DROPPED = 9


def group_of(number: int) -> GroupName:
    return str(number), None, "train"


class Put(NamedTuple):
    """The record of a request's sample arrives on the trainer's bus."""

    number: int


class SenderState(NamedTuple):
    """A sender with its lane, by number: sent, put, ended."""

    sender: PromptSender
    lane: tuple[tuple[int, bool, bool, bool], ...]


class SourceState(NamedTuple):
    """A source with its lane: arrived numbers, made or not; and the next events."""

    taker: PromptTaker
    rows: dict[int, bool]
    script: tuple[str, ...]

    @property
    def unmade(self) -> list[int]:
        return [number for number, made in self.rows.items() if not made]


class World:
    """The parts; a subclass plants a bug."""

    sender_kind: type[PromptSender] = PromptSender
    taker_kind: type[PromptTaker] = PromptTaker

    def __init__(self, numbers: Sequence[int], scripts: Sequence[tuple[str, ...]]) -> None:
        self.numbers = numbers
        sources = [SourcePart(self, bus, each) for bus, each in zip(BUSES, scripts, strict=True)]
        self.parts = (SenderPart(self), NobodyPart(), *sources)

    def explore(self, faults: Faults) -> Found:
        states, said = [], []
        for part in self.parts:
            state, words = part.begin()
            states.append(state)
            said += words
        return visit_every_order(self.parts, states, said, faults, self.ask_again)

    def ask_again(self, states: Sequence[Any]) -> tuple[list[Any], list[Said]] | None:
        """Repeat the trainer's side's messages; None at a good end."""
        sender: SenderState = states[SENDER]
        left = [each.rows for each in states[FIRST_SOURCE:]]
        if all(ended for *_, ended in sender.lane) and not any(left):
            return None
        after, said = self.parts[SENDER].after(sender, REST)
        return [after, *states[1:]], said


class NobodyPart:
    """Fills the search's fourth place; does nothing."""

    def begin(self) -> tuple[None, list[Said]]:
        return None, []

    def key(self, state: None) -> Hashable:
        return None

    def can_step(self, state: None) -> bool:
        return False

    def after(self, state: None, given: Any) -> tuple[None, list[Said]]:
        return None, []

    def for_nothing(self, state: None, given: Any) -> int:
        return 0


class SenderPart:
    def __init__(self, world: World) -> None:
        self.world = world

    def begin(self, before: SenderState | None = None) -> tuple[SenderState, list[Said]]:
        incarnation = 0 if before is None else before.sender.incarnation + 1
        new = self.world.sender_kind(TRAINER, incarnation)
        new.peers(BUSES, complete=True)
        lane = tuple((number, False, False, False) for number in self.world.numbers)
        return self._tell(SenderState(new, lane if before is None else before.lane), asks=True)

    def key(self, state: SenderState) -> Hashable:
        s = state.sender
        return (
            (s.incarnation, s.number, state.lane, tuple(sorted(s.asked.items()))),
            (tuple(sorted(s.at.items())), tuple(sorted(s.sent.items()))),
            tuple(sorted(s.heard.items())),
        )

    def can_step(self, state: SenderState) -> bool:
        """The trainer may end a group."""
        return any(put and not ended for _, _, put, ended in state.lane)

    def _rows(self, state: SenderState) -> dict[int, PromptRow]:
        return {
            number: PromptRow(1, 1, 0, int(put), sent, not sent)
            for number, sent, put, ended in state.lane
            if not ended
        }

    def _tell(self, state: SenderState, *, asks: bool) -> tuple[SenderState, list[Said]]:
        """Do a round of the party."""
        sender = state.sender
        over = sender.ended(self._rows(state))
        assert all(number == DROPPED for number in over), "ended, and was not made"
        lane = {row[0]: (*row[:3], row[3] or row[0] in over) for row in state.lane}
        state = state._replace(lane=tuple(lane.values()))
        said = []
        for bus, ends, numbers in sender.share(self._rows(state), None):
            for number in numbers:
                lane[number] = (number, True, *lane[number][2:])
            offers = [PromptOffer(number, group_of(number), 1, 1, 0, 0) for number in numbers]
            said.append(sender.say(bus, ends, offers))
        told = {each.bus for each in said}
        if asks:
            said += [sender.say(bus, (), ()) for bus in BUSES if bus not in told]
        ways = [Said(each, PART[each.bus], (SENDER, PART[each.bus])) for each in said]
        return state._replace(lane=tuple(lane.values())), ways

    def after(self, state: SenderState, given: Any) -> tuple[SenderState, list[Said]]:
        if given == DIE:
            return self.begin(state)
        new = copy.copy(state.sender)
        new.at, new.sent, new.heard = dict(new.at), dict(new.sent), dict(new.heard)
        new.asked = dict(new.asked)
        state = state._replace(sender=new)
        match given:
            case Put():
                number, sent, put, ended = next(r for r in state.lane if r[0] == given.number)
                assert sent and not put and not ended, "made twice"
                rows = {r[0]: r for r in state.lane} | {number: (number, True, True, False)}
                return state._replace(lane=tuple(rows.values())), []
            case Demand():
                return self._tell(state, asks=False) if new.demand(given) else (state, [])
            case str() if given == STEP:
                done = next(r[0] for r in state.lane if r[2] and not r[3])
                rows = {r[0]: r for r in state.lane} | {done: (done, True, True, True)}
                return state._replace(lane=tuple(rows.values())), []
        assert given in (ASK, REST)
        return self._tell(state, asks=True)

    def for_nothing(self, state: SenderState, given: Any) -> int:
        """Old news, until its death."""
        old = state.sender.heard.get(getattr(given, "bus", ""))
        late = isinstance(given, Demand) and old is not None and given.mark <= old.mark
        return FOR_NOTHING_IN_HIS_LIFE if late else 0


class SourcePart:
    """A rollout node with given workers."""

    def __init__(self, world: World, bus: str, script: tuple[str, ...]) -> None:
        self.world = world
        self.bus = bus
        self.script = script

    def begin(
        self, incarnation: int = 0, rows: dict[int, bool] | None = None
    ) -> tuple[SourceState, list[Said]]:
        rows = dict(rows or {})
        found = [(TRAINER, number, group_of(number)) for number in rows]
        return self._make(incarnation, found, rows, self.script), []

    def _make(
        self,
        incarnation: int,
        found: Sequence[tuple[str, int, GroupName]],
        rows: dict[int, bool],
        script: tuple[str, ...],
    ) -> SourceState:
        def offer(trainer: str, offer: PromptOffer, prompt: bytes) -> bool:
            rows[offer.number] = False
            return True

        def end(group: GroupName) -> None:
            del rows[int(group[0])]

        taker = self.world.taker_kind(self.bus, incarnation, found, offer, end)
        return SourceState(taker, rows, script)

    def key(self, state: SourceState) -> Hashable:
        t = state.taker
        return (
            (t.incarnation, t.number, tuple(t.taken.items()), state.script),
            (tuple(sorted(state.rows.items())), tuple(t.here.get(TRAINER, ()))),
        )

    def can_step(self, state: SourceState) -> bool:
        return bool(state.script and state.unmade)

    def after(self, state: SourceState, given: Any) -> tuple[SourceState, list[Said]]:
        old = state.taker
        if given == DIE:
            new, said = self.begin(old.incarnation + 1, state.rows)
            return new._replace(script=state.script), said
        new = self._make(old.incarnation, (), dict(state.rows), state.script)
        taker = new.taker
        taker.taken, taker.number = dict(old.taken), old.number
        taker.here = {trainer: dict(here) for trainer, here in old.here.items()}
        said = []
        if given == STEP:
            number, what = state.unmade[0], state.script[0]
            new = new._replace(script=state.script[1:])
            if what == GIVE_BACK:
                taker.give_back(TRAINER, number)
            else:
                new.rows[number] = True
                if number != DROPPED:
                    said.append(Said(Put(number), SENDER, ()))
        else:
            assert isinstance(given, Prompts)
            if not taker.take(given, [b""] * len(given.offers)):
                return state, []
        if given == STEP and what == MAKE:
            return new, said  # its next message carries the news
        ended = [number for number, made in new.rows.items() if made and number == DROPPED]
        word = taker.say(TRAINER, ended, int(not new.unmade and MAKE in new.script))
        return new, [Said(word, SENDER, (SENDER, PART[self.bus]))]

    def for_nothing(self, state: SourceState, given: Any) -> int:
        """Late messages stay late until its death."""
        return FOR_NOTHING_IN_HIS_LIFE


ONE, TWO = (1,), (1, 2)
EACH_MAKES = ((MAKE,), (MAKE,))
GIVES_BACK = ((MAKE,), (GIVE_BACK, MAKE))


class Case(NamedTuple):
    name: str
    faults: Faults
    numbers: tuple[int, ...] = ONE
    scripts: tuple[tuple[str, ...], tuple[str, ...]] = EACH_MAKES


SHORT = [
    Case("two deaths", Faults(2)),
    Case("a death and a loss", Faults(1, losses=1)),
    Case("a death and a double", Faults(1, doubles=1)),
    Case("two requests, a death", Faults(1), TWO, ((MAKE, MAKE), ())),
    Case("two requests, two nodes", Faults(), TWO, ((MAKE, MAKE), (MAKE, MAKE))),
    Case("given back, a death", Faults(1), ONE, GIVES_BACK),
    Case("given back, a loss and a double", Faults(losses=1, doubles=1), ONE, GIVES_BACK),
    Case("dropped, a death and a loss", Faults(1, losses=1), (DROPPED,)),
]
LONG = [
    Case("a death and asking early", Faults(1, hurries=1)),
    Case("given back, two deaths", Faults(2), ONE, GIVES_BACK),
    Case("two deaths and a loss", Faults(2, losses=1)),
]


@pytest.mark.parametrize("case", [*SHORT, *(LONG if IS_LONG else [])], ids=lambda case: case.name)
def test_in_every_order_each_request_is_made_once_and_ends_on_every_node(case: Case) -> None:
    print(World(case.numbers, case.scripts).explore(case.faults))


class AsksNobody(PromptSender):
    """Breaks the rule: every source reports its holdings before a second send."""

    def _free(self, rows: Rows) -> list[int]:
        asked, self.asked = self.asked, {}
        found = super()._free(rows)
        self.asked = asked
        return found


class TrustsAnyWord(PromptSender):
    """Breaks the rule: a report may be older than the sends after it."""

    def demand(self, word: Demand) -> bool:
        self.sent.clear()
        return super().demand(word)


class TakesOldWords(PromptSender):
    """Breaks the rule: a report to the earlier sender tells nothing of the present."""

    def demand(self, word: Demand) -> bool:
        return super().demand(word._replace(answers=(self.incarnation, word.answers[1])))


class TakesLateMessages(PromptTaker):
    """Breaks the rule: marks grow."""

    def take(self, message: Prompts, prompts: Sequence[bytes]) -> bool:
        self.taken.clear()
        return super().take(message, prompts)


class TakesWhatAnotherWasTold(PromptTaker):
    """Breaks the rule: a message is for a single life."""

    def take(self, message: Prompts, prompts: Sequence[bytes]) -> bool:
        return super().take(message._replace(incarnation=self.incarnation), prompts)


class ForgetsItsLane(PromptTaker):
    """A source that begins without a look at its earlier holdings."""

    def __init__(self, bus: str, incarnation: int, found: Any, offer: Any, end: Any) -> None:
        super().__init__(bus, incarnation, (), offer, end)


class Planted(NamedTuple):
    """A planted bug: the missing rule, the finding, and the necessary faults."""

    without: type[PromptSender | PromptTaker]
    found: str
    faults: Faults = Faults(deaths=1)
    scripts: tuple[tuple[str, ...], tuple[str, ...]] = ((MAKE, MAKE), (MAKE, MAKE))


PLANTED = [
    Planted(AsksNobody, "made twice"),
    Planted(TrustsAnyWord, "made twice", Faults(hurries=1)),
    Planted(TakesOldWords, "made twice|no end", Faults(deaths=1), GIVES_BACK),
    Planted(TakesLateMessages, "made twice", Faults(doubles=1)),
    Planted(TakesWhatAnotherWasTold, "made twice", Faults(deaths=1, doubles=1)),
    Planted(ForgetsItsLane, "no end"),
]


@pytest.mark.parametrize("planted", PLANTED, ids=[each.without.__name__ for each in PLANTED])
def test_each_rule_that_is_left_out_is_missed(planted: Planted) -> None:
    class Without(World):
        pass

    kind = "sender_kind" if issubclass(planted.without, PromptSender) else "taker_kind"
    setattr(Without, kind, planted.without)
    with pytest.raises(AssertionError, match=planted.found) as caught:
        Without(ONE, planted.scripts).explore(planted.faults)
    print(caught.value, *caught.value.__notes__, sep="\n")
