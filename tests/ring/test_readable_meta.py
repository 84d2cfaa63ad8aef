"""Every process can read meta accepted by `put`; unreadable meta is refused by name."""

import dataclasses
import datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Spawner

from shmbus import Bus, Consumer, Feeder, Group, Producer
from shmbus.data.encoding import MOST_META_DEPTH

X = np.zeros(3, np.float32)

READER = """
import sys, shmbus
with shmbus.Consumer(sys.argv[1]) as consumer:
    for group in consumer.take(64, timeout=30):
        print(repr(group[0].meta), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Point:
    x: int = 1


class Named(msgspec.Struct, frozen=True):
    x: int = 1


UNREADABLE = {
    "a dataclass as a key": {Point(): 1},
    "a struct as a key": {Named(): 1},
    "a set of dataclasses as a key": {frozenset([Point()]): 1},
    "a dataclass in a key, deep": [{"a": {(1, (2, Point())): 3}}],
    "an extension that is no timestamp": msgspec.msgpack.Ext(-1, b"x"),
    "raw bytes that are no MessagePack": msgspec.Raw(b"\xc1"),
    "no raw bytes": msgspec.Raw(b""),
    "raw bytes behind a whole value": {"a": 1, "b": msgspec.Raw(b"\xa1\xff")},
}


def nested(depth: int, kind: str) -> Any:
    value: Any = "end" if kind == "value" else ()
    for _ in range(depth - (kind != "value")):
        value = {"list": [value], "key": (1, value), "value": {"a": value}}[kind]
    return {value: 1} if kind == "key" else value


@pytest.mark.parametrize("kind", ["list", "key", "value"])
def test_a_meta_nests_to_a_depth_that_a_reader_decodes_below_many_calls(
    bus: Bus, producer: Producer, kind: str
) -> None:
    most = MOST_META_DEPTH - (kind == "key")
    producer.put("q", group_size=1, index=0, meta=nested(most, kind), x=X)
    with pytest.raises(ValueError, match="128"):
        producer.put("q", group_size=1, index=0, meta=nested(most + 1, kind), x=X)

    def below(calls: int, group: Group) -> Any:
        return group[0].meta if calls == 0 else below(calls - 1, group)

    with Consumer(bus.name) as consumer:
        (group,) = consumer.take(1, timeout=10)
        found = below(600, group)
        assert found == nested(most, kind) or (kind == "list" and len(str(found)) == 2 * most)
        assert consumer.stats().committed == 1


@pytest.mark.parametrize("score", [1.1e38, -1e39, np.float64(1e300), 10**39])
def test_a_score_that_overflows_float32_is_refused_and_nothing_is_put(
    producer: Producer, score: float
) -> None:
    producer.put("q", group_size=2, index=0, score=-1e38, x=X)
    with pytest.raises(ValueError, match="score"):
        producer.put("q", group_size=2, index=1, score=score, x=X)
    with pytest.raises(ValueError, match="score"):
        producer.put_many([{"instance_id": "q", "group_size": 2, "index": 1, "score": score}])
    slot = producer.reserve("q", group_size=2, index=1, fields={"x": ("float32", 3)})
    with pytest.raises(ValueError, match="score"):
        slot.score = score
    slot.abort()
    assert producer.stats().committed == 1


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_meta_that_no_process_could_read_is_refused_and_nothing_is_put(
    bus: Bus, producer: Producer, what: str
) -> None:
    meta: Any = UNREADABLE[what]
    with Feeder(bus.name) as feeder, pytest.raises(TypeError, match="meta"):
        feeder.request("q", group_size=1, meta=meta)
    assert producer.requests.next(0) is None
    for put in (producer.put, lambda *a, **k: producer.put_group("g", [{"meta": meta, "x": X}])):
        with pytest.raises(TypeError, match="meta"):
            put("q", group_size=1, index=0, meta=meta, x=X)
    with Consumer(bus.name) as consumer:
        assert consumer.stats().committed == 0


def test_an_unusual_meta_is_read_by_another_process(
    bus: Bus, producer: Producer, spawn: Spawner
) -> None:
    metas: list[Any] = [
        {1: 2, (3, 4): 5, b"k": None},
        {frozenset([1]): 2},
        datetime.datetime.max.replace(tzinfo=datetime.timezone.utc),
        msgspec.msgpack.Ext(5, b"x"),
        {"a": [np.int64(3), np.float32("nan"), np.arange(3)]},
        2**64 - 1,
    ]
    for number, meta in enumerate(metas):
        producer.put(f"q{number}", group_size=1, index=0, meta=meta, x=X)
    lines = spawn.script(READER, bus.name).finish().splitlines()
    assert len(lines) == len(metas)
    assert lines[0] == "{1: 2, (3, 4): 5, b'k': None}"
    assert lines[-1] == str(2**64 - 1)
