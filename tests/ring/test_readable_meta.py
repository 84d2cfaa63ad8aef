"""What `put` takes as meta, every process can read; what none could is refused by name."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Spawner

from shmbus import Bus, Consumer, Feeder, Producer

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


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_meta_that_no_process_could_read_is_refused_and_nothing_is_put(
    bus: Bus, producer: Producer, what: str
) -> None:
    meta: Any = UNREADABLE[what]
    with Feeder(bus.name) as feeder, pytest.raises(TypeError, match="meta"):
        feeder.request("q", group_size=1, meta=meta)
    feeder_took = producer.requests.next(0)
    assert feeder_took is None
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
