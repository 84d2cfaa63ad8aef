"""A relay's parties in turns within a thread: their messages, and the order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from relay.local import put_group

import shmbus
from shmbus.relay import messages as m
from shmbus.relay import sink_party
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.host import HostMailbox
from shmbus.relay.messages import unpack
from shmbus.relay.party import Party
from shmbus.relay.sink_party import SinkParty
from shmbus.relay.source_party import SourceParty

pytest_plugins = ["relay.relay_fixtures"]

#: More turns than any case takes.
MOST_TURNS = 20_000


class Turns:
    def __init__(self, **kinds: Any) -> None:
        self.said: list[m.Message] = []
        self.boxes = {name: HostMailbox(name, self._carry) for name in kinds}
        self.parties: dict[str, Party] = {
            name: make(self.boxes[name]) for name, make in kinds.items()
        }

    def _carry(self, to: str, packed: list[bytes], payload: Any) -> None:
        self.said += [unpack(each).message for each in packed]
        if to in self.boxes:
            self.boxes[to].put(packed, bytes(payload))

    def turn(self) -> None:
        """Let each party take its messages, and do its work."""
        for name, party in self.parties.items():
            for envelope in self.boxes[name].receive(0.0):
                party.take(envelope)
            party.round()
            self.boxes[name].flush()

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.said if type(message) is kind]


@contextmanager
def turns(**kinds: Any) -> Iterator[Turns]:
    made = Turns(**kinds)
    try:
        yield made
    finally:
        for party in made.parties.values():
            party.close()


def test_several_blocks_are_heard(buses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    # No time is over, however slow this machine.
    monkeypatch.setattr(sink_party, "SETTLED_LINGER_S", 1e9)
    groups = 40
    for group in range(groups):
        put_group([buses["a"]], group, values=4000)
    with (
        shmbus.Consumer(buses["t"]) as consumer,
        turns(
            source=lambda box: SourceParty(buses["a"], box, "coordinator"),
            coordinator=lambda box: CoordinatorParty(box, ["source"], ["sink"]),
            sink=lambda box: SinkParty(buses["t"], box, "coordinator", block_bytes=200_000),
        ) as made,
    ):
        coordinator: Any = made.parties["coordinator"]
        taken = 0
        for _ in range(MOST_TURNS):
            made.turn()
            for complete in consumer.take(timeout=0.0):
                complete.ack()
                taken += 1
            if taken == groups and not coordinator.pure.assigned:
                break
        told = [len(message.origins) for message in made.heard(m.Settled)]
        blocks = len({message.number for message in made.heard(m.Fetch)})
        assert taken == groups and sum(told) == 4 * groups and not coordinator.pure.assigned
        assert 1 < len(told) < blocks


def test_a_sink_greets_each_source_at_once(buses: dict[str, str]) -> None:
    with turns(
        source=lambda box: SourceParty(buses["a"], box, "coordinator"),
        coordinator=lambda box: CoordinatorParty(box, ["source"], ["sink"]),
        sink=lambda box: SinkParty(buses["t"], box, "coordinator"),
    ) as made:
        for _ in range(MOST_TURNS):
            made.turn()
            if made.heard(m.Fetched):
                break
        # The connection exists by then: the first block's request succeeds.
        assert [message.origins for message in made.heard(m.Fetch)] == [()]
        assert [message.gone for message in made.heard(m.Fetched)] == [()]
