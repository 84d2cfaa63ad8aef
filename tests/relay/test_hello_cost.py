"""Words of a node cost the coordinator as much among 1,000 nodes as among 16: by counted work."""

from collections.abc import Callable
from typing import Any

import pytest
from counted_work import instructions
from relay.heads import RecordHead, head_of, pack_heads
from relay.local import COORDINATOR

from shmbus.relay import messages as m
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.party import Opener

SINK = "sink"


class Word(str):
    """A text with comparisons in Python, which counts them."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


class Box:
    address = COORDINATOR

    def __init__(self) -> None:
        self.opener = Opener(COORDINATOR)
        self.sent: list[tuple[str, Any]] = []

    def send(self, to: str, message: Any, payload: Any = b"") -> None:
        self.sent.append((to, message))

    def flush(self) -> None:
        """Nothing waits."""

    def receive(self, timeout_s: float) -> list[m.Envelope]:
        return []


def bus_of(number: int) -> str:
    return Word(f"{number:032x}")


def hello(number: int, *, mark: m.Mark = (1, 1), version: int = 0) -> m.Envelope:
    sink = number < 0
    address = Word(SINK if sink else f"source{number}")
    bus = Word("f" * 32) if sink else bus_of(number)
    said = m.Hello(
        address, sink, "bus", bus, 1, 0, COORDINATOR, version, None, 1 << 20, 1 << 20, 1 << 10,
        1, 0, 0, 0, mark=mark,
    )  # fmt: skip
    return m.Envelope(address, said, b"")


def announcement(number: int, mark: m.Mark) -> m.Envelope:
    heads = [
        head_of(
            bus_of(number), RecordHead(1, mark[1] * 8 + i, f"q{i}", None, 2, 0, 0.0, 0, 64, 9, 7, 2)
        )
        for i in range(8)
    ]
    said = m.Announcement(bus_of(number), mark, False, pack_heads(heads))
    return m.Envelope(Word(f"source{number}"), said, b"")


def begun(count: int) -> tuple[CoordinatorParty, Box]:
    box = Box()
    party = CoordinatorParty(box, [Word(f"source{n}") for n in range(count)], [Word(SINK)])
    party.take(hello(-1))
    assert party.pure is not None
    term = party.pure.term
    party.take(m.Envelope(SINK, m.SinkState(SINK, 1, term, frozenset(), frozenset()), b""))
    for number in range(count):
        party.take(hello(number))
        whole = m.Announcement(bus_of(number), (1, 1), True, pack_heads([]), (term, 0))
        party.take(m.Envelope(Word(f"source{number}"), whole, b""))
    party.round()
    return party, box


SAYS: dict[str, Callable[[CoordinatorParty], object]] = {
    "a source's hello": lambda party: party.take(hello(7)),
    "a hello after news that is lost": lambda party: party.take(hello(7, mark=(1, 3))),
    "the sink's hello": lambda party: party.take(hello(-1)),
    "eight heads": lambda party: party.take(announcement(7, (1, 2))),
    "a round with nothing to do": lambda party: party.round(),
}


@pytest.mark.parametrize("say", SAYS.values(), ids=SAYS)
def test_a_word_costs_a_constant(say: Callable[[CoordinatorParty], object]) -> None:
    work = []
    for count in (16, 1000):
        party, _ = begun(count)
        party._next_ask_s = float("inf")
        work.append(instructions(lambda party=party: say(party)))
    assert 0 < work[1] <= 1.3 * work[0], work


def test_a_thousand_first_words_tell_the_sink_of_sources_a_few_times() -> None:
    party, box = begun(1000)
    peers = [message for _, message in box.sent if isinstance(message, m.Peers)]
    assert len(peers) <= 20 and sum(len(each.addresses) for each in peers) <= 5000
    party._next_peers_s = 0.0
    party.round()
    (*_, last) = [message for _, message in box.sent if isinstance(message, m.Peers)]
    assert len(last.addresses) == 1000 and last.complete


def test_a_new_version_is_told_to_each_source_once() -> None:
    party, box = begun(50)
    box.sent.clear()
    for _ in range(3):
        party.take(hello(-1, version=4))
    for number in range(50):
        party.take(hello(number, version=4))
    told = [to for to, message in box.sent if isinstance(message, m.Steering)]
    assert sorted(told) == sorted(f"source{n}" for n in range(50))
    box.sent.clear()
    party.take(hello(7, version=3))
    assert [to for to, message in box.sent if isinstance(message, m.Steering)] == ["source7"]
