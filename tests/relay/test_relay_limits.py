"""A small journal, a gone bus, and overlong words leave a relay unharmed."""

from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import take_groups, wait_until
from relay.local import COORDINATOR, put_group, relay, relayed, stats
from relay.swarm import swarm

import shmbus
from shmbus.relay import messages as m
from shmbus.relay.party import Opener
from shmbus.relay.record_reader import RecordReader
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

pytest_plugins = ["relay.relay_fixtures"]


def test_more_small_records_than_the_journal_has_entries_cross(small: dict[str, str]) -> None:
    groups = 300
    with shmbus.Producer(small["a"]) as producer:
        for i in range(groups):
            producer.put(f"q{i}", group_size=1, index=0, score=1.0, tokens=np.ones(2, np.int32))
    with relay([small["a"]], [small["t"]]), shmbus.Consumer(small["t"]) as consumer:
        seen: list[str] = []
        while len(seen) < groups:
            found = consumer.take(timeout=30.0)
            assert found, f"{len(seen)} of {groups} groups"
            for group in found:
                seen.append(group.instance_id)
                group.ack()
        assert sorted(seen) == sorted(f"q{i}" for i in range(groups))
        wait_until(lambda: stats(small["a"]).acknowledged == groups)


@pytest.mark.parametrize(
    ("there", "reason"), [(140, "malformed"), (139, "timeout")], ids=["too-large", "late"]
)
def test_a_group_beyond_the_journal_is_lost(small: dict[str, str], there: int, reason: str) -> None:
    policy = StashPolicy(group_timeout_s=0.5, on_timeout="drop")
    with relay([small["a"]], [small["t"]], policy=policy) as made:
        with shmbus.Producer(small["a"]) as producer:
            for i in range(there):
                producer.put("many", group_size=140, index=i, score=1.0)
        wait_until(lambda: stats(small["a"]).dropped == {reason: there})
        wait_until(lambda: made.coordinator.note().dropped == {reason: there})
        put_group([small["a"]], 1)
        with shmbus.Consumer(small["t"]) as consumer:
            take_groups(consumer, 1)


def test_a_record_of_a_bus_that_has_gone_ends_nothing_of_another_one(buses: dict[str, str]) -> None:
    """Its entry of the journal never serves a second record while a record on the bus names it."""
    with relayed(buses, "ab") as (made, consumer, _, _):
        sink = made.parties[buses["t"]]
        put_group([buses["a"]], 1)
        (gone,) = take_groups(consumer, 1)
        wait_until(lambda: len(sink.sink.settled) == 4)
        shmbus.unlink(buses["a"])
        shmbus.Bus.create(buses["a"], "4MiB").close()
        wait_until(lambda: not sink.sink.settled)
        put_group([buses["b"]], 2)
        (held,) = take_groups(consumer, 1)
        wait_until(lambda: len(sink.sink.settled) == 4)
        gone.ack()
        wait_until(lambda: not sink.sink.left_behind)
        assert not sink.sink.ended and stats(buses["b"]).acknowledged == 0
        held.ack()
        wait_until(lambda: stats(buses["b"]).acknowledged == 4)
        wait_until(lambda: not sink.journal._entries)


def test_a_pause_reason_of_any_script_is_cut(buses: dict[str, str]) -> None:
    with (
        relay([buses["a"]], [buses["t"]]),
        shmbus.Bus.open(buses["t"]) as bus,
        shmbus.Bus.open(buses["a"]) as source,
    ):
        bus.pause("\u754c" * 39)
        wait_until(lambda: (source.paused or "").endswith("\u754c"))
        bus.pause("evaluation")
        wait_until(lambda: (source.paused or "").endswith("evaluation"))
        bus.resume()
        wait_until(lambda: source.paused is None)


SAMPLE = m.MissingSample(("q", None, "train"), 2, 2, 1, 1, "gone")
HELLO = m.Hello("a", False, "a", "a" * 32, 1, 0, COORDINATOR, 0, None, 0, 0, 0, 1, 0, 0, 0)


def of_another(kind: type[Any], message: Any) -> bytes:
    """A message in the form of an unchecking sender."""
    body = msgspec.Raw(msgspec.msgpack.encode(list(message)))
    number = m._NUMBER_OF[kind]
    frame = m._Frame(m.PROTOCOL, _core.LAYOUT_VERSION, "x", number, body)
    return msgspec.msgpack.encode(frame)


@pytest.mark.parametrize(
    "message",
    [
        m.Steering(-1, None),
        m.Steering(2**64 - 1, None),
        m.SinkStateWanted("t", 2**62),
        m.Subscription("b", 2**64 - 1),
        m.HelloWanted(-5),
        m.Release("b", "t", frozenset(), "no reason"),
        m.Drop("t", 1, 1, "no reason", ()),
        m.Fetch("b", "t", 1, (bytes(32),) * 16_385),
        m.Assignment("t", 1, 1, (), -5),
        HELLO._replace(clock_ns=2**64 - 1),
        HELLO._replace(clock_ns=-1),
        HELLO._replace(term=2**63 - 1),
        HELLO._replace(policy_version=-1),
        HELLO._replace(largest_count=-1),
        HELLO._replace(bus="no identity"),
        HELLO._replace(splits=("x",) * 17),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_message_with_a_number_that_nothing_has_is_refused_by_its_sender(message: Any) -> None:
    with pytest.raises(shmbus.ProtocolError, match="x sent a"):
        m.unpack(of_another(type(message), message))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("group", ("", None, "train")), ("group", ("\u754c" * 200, None, "train")),
        ("group", ("q", -1, "train")), ("group", ("q", 2**63, "train")), ("group", ("q", None)),
        ("group", ("q", None, "x" * 32)), ("group_size", -1), ("group_size", 20_000), ("need", 3),
        ("need", -1), ("index", 2), ("index", -1), ("attempt", -1), ("attempt", 2**40),
    ],
)  # fmt: skip
def test_a_sample_that_no_bus_has_a_row_for_is_refused(name: str, wrong: Any) -> None:
    sample = [wrong if each == name else getattr(SAMPLE, each) for each in SAMPLE.__struct_fields__]
    with pytest.raises(shmbus.ProtocolError, match="x sent an invalid Wanted"):
        m.unpack(of_another(m.Wanted, ("b", 1, 1, [sample])))


@pytest.mark.parametrize(
    "packed",
    [
        b"\x95\x03\x05\xa1x\x00" + b"\x91" * 1_000_000,
        of_another(m.Peers, ())[:-1] + b"\x91" * 1_000_000,
        b"\x95\x03\x05\xa2\xff\xfe\x00\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"",
    ],
    ids=["deep", "deep-body", "no-text", "long", "nothing"],
)
def test_bytes_that_are_no_message_are_refused_and_end_nobody(packed: bytes) -> None:
    opener = Opener("here")
    assert opener.open(packed, b"") == [] and opener.refused == 1


@pytest.mark.parametrize(("nodes", "size"), [(257, 257), (300, 10), (1000, 1000)])
def test_records_of_any_number_of_nodes_cross_at_once(bus_name: str, nodes: int, size: int) -> None:
    names = {"a": f"{bus_name}.a", "t": f"{bus_name}.t"}
    for name in names.values():
        shmbus.Bus.create(name, "32MiB").close()
    with shmbus.Producer(names["a"]) as producer:
        for i in range(nodes):
            producer.put(f"q{i // size}", group_size=size, index=i % size, tokens=[i])
    with (
        relay([], [names["t"]]) as made,
        RecordReader(names["a"]) as reader,
        swarm(made, reader, nodes) as sources,
        shmbus.Consumer(names["t"]) as consumer,
    ):
        groups = take_groups(consumer, nodes // size)
        assert sorted(int(t["tokens"][0]) for group in groups for t in group) == list(range(nodes))
        consumer.ack(groups)
        wait_until(lambda: len(sources.released) == nodes)
        wait_until(lambda: not made.parties[names["t"]].sink.settled)
    for name in names.values():
        shmbus.unlink(name)
