"""Blocks for a trainer's bus: compared with their request, or refused."""

from typing import Any

import pytest
from conftest import take_groups, wait_until
from relay.heads import export, poll
from relay.local import COORDINATOR, LocalRelay, put_group, relay, stats

import shmbus
from shmbus.relay import messages as m
from shmbus.relay.messages import OriginHead
from shmbus.relay.record_reader import RecordReader
from shmbus.relay.sink_party import SinkParty

pytest_plugins = ["relay.relay_fixtures"]


def forged(made: LocalRelay, sink: str, source: str, **changes: Any) -> None:
    """Send a block to a waiting sink, in its source's name."""
    party: SinkParty = made.parties[sink]
    wanted = tuple(sorted(party.sink.wanted))
    payload = changes.pop("payload")
    number = party.sink.batches[0].number
    message = m.Fetched(sink, party.sink.incarnation, wanted, (), (9, 9), number)
    message = message._replace(**changes)
    made.send(source, sink, message, payload)


def waiting(made: LocalRelay, sink: str) -> SinkParty:
    """Return the party of a sink that knows its coordinator."""
    party: SinkParty = made.parties[sink]
    wait_until(lambda: made.coordinator.pure is not None and party.sink.term > 0)
    return party


def assignment(party: SinkParty, heads: list[OriginHead], to: str = "") -> m.Assignment:
    """Assign these records to a sink, or to another address."""
    origins, checks = zip(*((head.origin, head.check) for head in heads), strict=True)
    state = party.sink
    return m.Assignment(to or state.name, state.incarnation, state.term, origins, 99, checks)


def test_a_wrong_block_is_refused(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with relay([], [buses["t"]]) as made, RecordReader(buses["a"]) as reader:
        put_group([buses["a"]], 1)
        put_group([buses["a"]], 2)
        heads = sorted(poll(reader), key=lambda head: (head.instance_id, head.index))
        sink = waiting(made, buses["t"])
        state = sink.sink
        made.send(COORDINATOR, buses["t"], assignment(sink, heads[:4]))
        wait_until(lambda: bool(state.wanted))
        good = export(reader, [head.origin for head in heads[:4]])
        flipped = bytearray(good)
        flipped[-1] ^= 1
        for count, (payload, why) in enumerate(
            [
                (good[:-64], "cut"),
                (bytes(flipped), "checksum"),
                (
                    export(reader, [head.origin for head in heads[4:]]),
                    "records as announced by its sender",
                ),
                (b"", "cut"),
            ]
        ):
            forged(made, buses["t"], "x", payload=payload)
            wait_until(lambda count=count: sink.refused == count + 1)
            assert why in caplog.records[-1].getMessage()
            assert stats(buses["t"]).committed == 0 and state.wanted
        forged(made, buses["t"], "x", payload=good)
        with shmbus.Consumer(buses["t"]) as consumer:
            assert take_groups(consumer, 1)[0].instance_id == "q1"


def test_own_names_are_compared(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """In a source's form: without names beside it, in any order, and doubled."""
    with relay([], [buses["t"]]) as made, RecordReader(buses["a"]) as reader:
        for number in (1, 2, 3):
            put_group([buses["a"]], number)
        heads = sorted(poll(reader), key=lambda head: (head.instance_id, head.index))
        sink = waiting(made, buses["t"])
        state = sink.sink
        asked = ((heads[:4], ""), (heads[8:], "elsewhere"), (heads[4:8], ""))
        several = m.Assignments(tuple(assignment(sink, *each) for each in asked))
        made.send(COORDINATOR, buses["t"], several)
        wait_until(lambda: len(state.wanted) == 8)
        assert len(state.batches) == 1 and not state.waiting
        ids = [head.origin for head in heads]
        for count, (payload, why) in enumerate(
            [
                (export(reader, ids[8:]), "got 4 unrequested records"),
                (export(reader, ids[:8])[:-64], "cut"),
            ]
        ):
            forged(made, buses["t"], "x", payload=payload, origins=())
            wait_until(lambda count=count: sink.refused == count + 1)
            assert why in caplog.records[-1].getMessage()
            assert stats(buses["t"]).committed == 0 and len(state.wanted) == 8
        # A message without its block is ignored.
        forged(made, buses["t"], "x", payload=b"", origins=())
        forged(made, buses["t"], "x", payload=export(reader, ids[7:3:-1]), origins=())
        wait_until(lambda: len(state.wanted) == 4)
        forged(made, buses["t"], "x", payload=export(reader, ids[4:8]), origins=())
        forged(made, buses["t"], "x", payload=export(reader, ids[:4]), origins=())
        with shmbus.Consumer(buses["t"]) as consumer:
            found = take_groups(consumer, 2)
            assert {each.instance_id for each in found} == {"q1", "q2"}
            for each in found:
                assert [t["tokens"][0] for t in each] == [int(each.instance_id[1:])] * 4
        assert stats(buses["t"]).committed == 8 and sink.refused == 2


def test_an_unlike_head_is_refused(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with relay([], [buses["t"]]) as made, RecordReader(buses["a"]) as reader:
        put_group([buses["a"]], 1, size=1)
        (head,) = poll(reader)
        sink = waiting(made, buses["t"])
        unlike = assignment(sink, [head])._replace(checks=(head.check ^ 1,))
        made.send(COORDINATOR, buses["t"], unlike)
        wait_until(lambda: bool(sink.sink.wanted))
        forged(made, buses["t"], "x", payload=export(reader, [head.origin]))
        wait_until(lambda: sink.refused == 1)
        assert "another thing than its head" in caplog.text
        assert stats(buses["t"]).committed == 0
