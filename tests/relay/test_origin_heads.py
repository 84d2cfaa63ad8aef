"""Heads as bytes: what went comes, and what no record can say is refused as a whole."""

import math
import random
import struct

import numpy as np
import pytest
from conftest import take_groups, wait_until
from relay.heads import RecordHead, head_of, make_origin, pack_heads
from relay.local import COORDINATOR, put_group, relayed

import shmbus
from shmbus import errors
from shmbus.relay import messages as m
from shmbus.relay.messages import OriginHead, bus_of, by_bus, is_of, name_origin, unpack_heads
from shmbus.relay.record_reader import RecordReader, reason_of
from shmbus_ext import _core

pytest_plugins = ["relay.relay_fixtures"]

BUS = "ab" * 16
FORGED = {
    "group_size": (76, "<H", 16_385),
    "group_size of a sample": (76, "<H", 0),
    "need": (78, "<H", 9),
    "no need": (78, "<H", 0),
    "index": (80, "<H", 8),
    "id_bytes": (82, "<B", 0),
    "split": (83, "<B", 16),
    "policy_version": (40, "<q", -1),
    "nbytes": (56, "<Q", 1 << 63),
    "reason_bytes": (84, "<I", 1 << 31),
}


def head(sequence: int = 0, **other: object) -> OriginHead:
    said = {
        "instance_id": "q\N{SNOWMAN}", "round": None, "group_size": 8, "index": 3, "score": 0.5,
        "policy_version": 2, "nbytes": 640, "made_ns": 5, "check": 7, "need": 8, "reason": None,
    } | other  # fmt: skip
    return head_of(BUS, RecordHead(1 << 40, sequence, **said))  # type: ignore[arg-type]


def test_origins_sort_as_their_numbers_and_say_them() -> None:
    numbers = [(0, 1), (0, 255), (0, 256), (1, 0), (255, 9), (256, 1)]
    origins = [make_origin(BUS, *each) for each in numbers]
    assert sorted(origins) == origins and len(set(origins)) == 6
    assert name_origin(origins[2]) == "0/256" and bus_of(origins[0]) == BUS
    other = make_origin("cd" * 16, 0, 0)
    assert is_of(origins[0], BUS) and not is_of(other, BUS)
    assert by_bus([]) == [] and by_bus(origins) == [(BUS, origins)]
    assert by_bus([other, *origins]) == [(BUS, origins), ("cd" * 16, [other])]


def test_what_is_packed_is_unpacked() -> None:
    heads = [
        head(), head(1, round=-3, score=math.inf, need=2), head(2, instance_id="x" * 255),
        head(3, group_size=0, need=0, reason="out of \N{SNOWMAN}"), head(4, reason=""),
        head(5, split=1), head(6, split=15, round=4),
    ]  # fmt: skip
    packed, same = pack_heads(heads), bytes(range(16))
    names = [each for each in dir(OriginHead) if not each.startswith("_")]
    for found in (_core.unpack_heads(packed, same), unpack_heads(BUS, packed, 0, same)):
        for had, got in zip(heads, found, strict=True):
            assert [getattr(got, name) for name in names] == [getattr(had, name) for name in names]
    assert heads[1].key == ("q\N{SNOWMAN}", -3) and heads[0].key == "q\N{SNOWMAN}"
    assert [each.key for each in heads[5:]] == [("q\N{SNOWMAN}", None, 1), ("q\N{SNOWMAN}", 4, 15)]
    assert [each.failed for each in heads] == [False, False, False, True, True, False, False]
    heads[0].clock_ns = 3
    assert (heads[0].made_ns, heads[0].committed_ns) == (5, 2)


def test_a_split_gets_its_readers_number_and_is_left_out_without_one() -> None:
    packed = pack_heads([head(), head(1, split=2), head(2, split=1), head(3, split=3)])
    assert [each.origin for each in _core.unpack_heads(packed)] == [head().origin]
    found = _core.unpack_heads(packed, bytes([0, 16, 5]))
    assert [(each.origin, each.split) for each in found] == [
        (head().origin, 0), (head(1).origin, 5),
    ]  # fmt: skip
    assert found[1].key == ("q\N{SNOWMAN}", None, 5) and found[1].check == head(1).check


def test_a_records_head_is_what_the_record_says(bus_name: str, producer: shmbus.Producer) -> None:
    for i in range(3):
        producer.put("q", group_size=3, index=i, score=None, round=2, x=np.zeros(9))
    producer.fail("r", 1, "no memory")
    producer.put("s", group_size=4, need=2, round=0, index=3, policy_version=6, x=np.ones(1))
    with RecordReader(bus_name) as reader:
        origins, records = reader.poll(100)
        found = unpack_heads(reader.identity, _core.read_heads(records, reason_of))
        for head, t in zip(found, records, strict=True):
            assert (head.instance_id, head.round) == (t.instance_id, t.round)
            assert (head.group_size, head.index) == (t.group_size, t.index)
            assert head.need == (0 if t.failed else t.need)
            assert (head.policy_version, head.nbytes) == (t.policy_version, t.nbytes)
            assert head.made_ns == t.committed_ns
            assert head.score == t.score if t.scored else math.isnan(head.score)
        assert [each.origin for each in found] == origins
        assert [each.reason for each in found] == [None, None, None, "no memory", None]


@pytest.mark.parametrize("name", FORGED)
def test_a_number_that_no_record_has_is_refused(name: str) -> None:
    at, form, value = FORGED[name]
    packed = bytearray(pack_heads([head(), head(1)]))
    struct.pack_into(form, packed, at, value)
    with pytest.raises(ValueError, match="no record can"):
        _core.unpack_heads(packed)


def test_heads_of_another_bus_and_text_that_is_none_are_refused() -> None:
    packed = bytearray(pack_heads([head()]))
    with pytest.raises(errors.ProtocolError, match="of another one"):
        unpack_heads("cd" * 16, packed)
    packed[88] = 0xFF
    with pytest.raises(errors.ProtocolError, match=f"an announcement of bus {BUS}"):
        unpack_heads(BUS, packed)


def test_whatever_is_cut_or_changed_is_heads_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    whole = pack_heads([head(i, reason=None if i % 3 else "why") for i in range(4)])
    for cut in range(len(whole)):
        try:
            assert len(_core.unpack_heads(whole[:cut])) < 4
        except ValueError:
            continue
    refused = 0
    for _ in range(20_000):
        packed = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            packed[rng.randrange(len(packed))] = rng.randrange(256)
        try:
            for each in _core.unpack_heads(packed):
                assert len(each.instance_id) >= 1 and each.index < 16_384 and repr(each)
        except ValueError:
            refused += 1
    assert 0 < refused < 20_000


def test_a_malformed_announcement_is_refused_and_asked_again(buses: dict[str, str]) -> None:
    with relayed(buses, "a") as (made, consumer, _):
        wait_until(lambda: (pure := made.coordinator.pure) is not None and bool(pure.newest))
        source = made.parties[buses["a"]].source
        news = m.Announcement(source.bus, (source.mark[0], 99), True, b"no heads")
        made.send(buses["a"], COORDINATOR, news)
        wait_until(lambda: made.coordinator.refused == 1)
        put_group([buses["a"]], 1)
        assert take_groups(consumer, 1)[0].instance_id == "q1"
