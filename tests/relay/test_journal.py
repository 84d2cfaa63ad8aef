"""The relay's journal: intents are whole, a lane's successor heals them, ends are noted."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import Spawner
from relay.heads import export

import shmbus
from shmbus.base.ledger import REASONS
from shmbus.relay.record_reader import RecordReader
from shmbus.segment import lifecycle
from shmbus_ext import _core

IDENTITY = bytes(range(16))
NEW = 0xFFFFFFFF
INTENDED, OWED = 2, 3


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, "4MiB"):
        yield bus_name


def origins(*sequences: int, identity: bytes = IDENTITY) -> bytes:
    return b"".join(struct.pack(">16sQQ", identity, 7, each) for each in sequences)


def numbers(*entries: int) -> bytes:
    return struct.pack(f"<{len(entries)}I", *entries)


def states(segment: _core.Segment) -> dict[int, int]:
    return {int.from_bytes(note[1][-8:], "big"): note[2] for note in _core.relay_notes(segment)}


def ends(segment: _core.Segment) -> dict[int, int]:
    """Ended records: reason by entry."""
    return {note[0]: note[3] for note in _core.relay_notes(segment, True)}


class Sink:
    def __init__(self, name: str) -> None:
        self.segment = lifecycle.open_segment(name)
        self.incarnation = _core.relay_begin(self.segment)
        self.producer = shmbus.Producer(name)
        _core.relay_bind(self.producer)

    def close(self) -> None:
        self.producer.close()
        self.segment.close()


def put(producer: shmbus.Producer, index: int) -> None:
    producer.put("q", group_size=8, index=index, x=np.zeros(3))


def test_an_intent_is_settled_as_far_as_its_lane_was_committed(bus: str) -> None:
    sink = Sink(bus)
    entries = _core.relay_intend(sink.producer, origins(3, 4, 5), numbers(NEW, NEW, NEW))
    assert entries == numbers(0, 1, 2)
    assert set(states(sink.segment).values()) == {INTENDED}
    put(sink.producer, 0)
    put(sink.producer, 1)
    sink.close()
    successor = Sink(bus)
    assert successor.incarnation == 2
    settled, owed = _core.RELAY_SETTLED, OWED
    assert states(successor.segment) == {3: settled, 4: settled, 5: owed}
    again = _core.relay_intend(successor.producer, origins(5), numbers(2))
    assert again == numbers(2)
    put(successor.producer, 2)
    _core.relay_settle(successor.producer, again)
    assert states(successor.segment) == {3: settled, 4: settled, 5: settled}
    _core.relay_forget(successor.segment, numbers(0, 2))
    assert states(successor.segment) == {4: settled}
    successor.close()


def test_a_bus_has_one_sink_at_a_time(bus: str) -> None:
    sink = Sink(bus)
    other = lifecycle.open_segment(bus)
    assert _core.relay_begin(other) is None
    sink.close()
    assert _core.relay_begin(other) == 2
    other.close()


def test_an_intent_without_room_changes_nothing(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "64KiB"):
        sink = Sink(bus_name)
        (count, *_) = _core.relay_words(sink.segment)
        assert count == 64
        assert _core.relay_intend(sink.producer, origins(*range(65)), numbers(*[NEW] * 65)) is None
        assert states(sink.segment) == {}
        full = _core.relay_intend(sink.producer, origins(*range(64)), numbers(*[NEW] * 64))
        assert full is not None and len(states(sink.segment)) == 64
        _core.relay_forget(sink.segment, numbers(*range(60)))
        many = b"".join(origins(i, identity=bytes([i + 1]) * 16) for i in range(60))
        assert _core.relay_intend(sink.producer, many, numbers(*[NEW] * 60)) is not None
        sink.close()


def test_free_entries_are_given_out_in_turn(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "64KiB"):
        sink = Sink(bus_name)
        first = _core.relay_intend(sink.producer, origins(1, 2, 3), numbers(NEW, NEW, NEW))
        assert first == numbers(0, 1, 2)
        _core.relay_forget(sink.segment, numbers(0, 1))
        # Freed parts lie behind: no used part gets a second look before the end.
        more = _core.relay_intend(sink.producer, origins(*range(4, 64)), numbers(*[NEW] * 60))
        assert more == numbers(*range(3, 63))
        last = _core.relay_intend(sink.producer, origins(64, 65, 66), numbers(NEW, NEW, NEW))
        assert last == numbers(63, 0, 1)
        assert _core.relay_intend(sink.producer, origins(67), numbers(NEW)) is None
        assert len(states(sink.segment)) == 64
        sink.close()


@pytest.mark.parametrize("count", [257, 300, 1000])
def test_records_of_any_number_of_sources_are_in_hand_at_once(bus_name: str, count: int) -> None:
    with shmbus.Bus.create(bus_name, "16MiB"):
        sink = Sink(bus_name)
        asked = [origins(i, identity=struct.pack("<QQ", i + 1, 9)) for i in range(count)]
        at_once = _core.relay_intend(sink.producer, b"".join(asked), numbers(*[NEW] * count))
        assert at_once is not None
        assert sorted(note[1] for note in _core.relay_notes(sink.segment)) == sorted(asked)
        _core.relay_forget(sink.segment, at_once)
        for origin in asked:
            assert _core.relay_intend(sink.producer, origin, numbers(NEW)) is not None
        assert len(_core.relay_notes(sink.segment)) == count
        dropped = origins(7, identity=b"another bus, too")
        assert _core.relay_drop(sink.segment, dropped, REASONS.index("stale")) is not None
        sink.close()


@pytest.mark.parametrize("bad", [b"123", numbers(1 << 20)])
def test_an_entry_that_is_none_is_refused(bus: str, bad: bytes) -> None:
    sink = Sink(bus)
    with pytest.raises(SystemError):
        _core.relay_forget(sink.segment, bad)
    with pytest.raises((SystemError, ValueError)):
        _core.relay_intend(sink.producer, origins(1), bad)
    sink.close()


def relay(bus: str, sink: Sink, count: int) -> None:
    """Records of another bus, put through the journal."""
    with shmbus.Bus.create(bus + ".from", "4MiB"):
        with shmbus.Producer(bus + ".from") as producer:
            for i in range(count):
                producer.put("q", group_size=count, index=i, x=np.arange(500))
        with RecordReader(bus + ".from") as reader:
            block = export(reader, reader.poll(count)[0])
    _core.check_block(block)
    entries = _core.relay_intend(sink.producer, origins(*range(count)), numbers(*[NEW] * count))
    assert entries is not None
    assert _core.import_block(sink.producer, block, 0, count, 5.0, entries) == count
    _core.relay_settle(sink.producer, entries)


def test_the_journal_says_what_became_of_each_record(bus: str) -> None:
    sink = Sink(bus)
    relay(bus, sink, 6)
    assert ends(sink.segment) == {}
    with RecordReader(bus) as reader:
        polled, _ = reader.poll(100)
        reader.release(polled[:2], "acknowledged")
        reader.release(polled[2:5], "stale")
    acknowledged, stale = REASONS.index("acknowledged"), REASONS.index("stale")
    want = dict.fromkeys([0, 1], acknowledged) | dict.fromkeys([2, 3, 4], stale)
    assert ends(sink.segment) == want
    sink.close()


def test_a_record_that_was_moved_is_noted_too(bus: str) -> None:
    sink = Sink(bus)
    relay(bus, sink, 60)
    reader = _core.Reader(lifecycle.open_segment(bus), "test")
    held = reader.poll(100)
    reader.release([t for i, t in enumerate(held) if i % 7], 0)
    stale = REASONS.index("stale")
    reader.evacuate(held[::7])
    assert reader.moves
    reader.release(held[::7], stale)
    assert ends(sink.segment) == {i: 0 if i % 7 else stale for i in range(60)}
    sink.close()


CHILD = """
import struct, sys
import numpy as np
import shmbus
from shmbus.segment import lifecycle
from shmbus_ext import _core
name, point = sys.argv[1:]
segment = lifecycle.open_segment(name)
assert _core.relay_begin(segment) is not None
producer = shmbus.Producer(name)
_core.relay_bind(producer)
entries = b""
origins = b"".join(struct.pack(">16sQQ", bytes(range(16)), 7, i) for i in range(4))
entries = _core.relay_intend(producer, origins, b"\\xff" * 16)
for i in range(int(point)):
    producer.put("q", group_size=8, index=i, x=np.zeros(3))
"""


@pytest.mark.parametrize("committed", [0, 1, 3, 4])
def test_a_new_sink_heals_the_journal_first(bus: str, committed: int, spawn: Spawner) -> None:
    spawn.holder(CHILD, bus, committed).kill()
    # Others take the dead one's slot, and commit in its lane, before the next sink looks.
    others = [shmbus.Producer(bus) for _ in range(64)]
    for producer in others:
        put(producer, 7)
    for producer in others:
        producer.close()
    successor = Sink(bus)
    expected = {i: _core.RELAY_SETTLED if i < committed else OWED for i in range(4)}
    assert states(successor.segment) == expected
    successor.close()
