"""The segment: making, finding and removing, rights to attach, and effects of damage.

Damage goes through a mapping of the test's own. Crashes and hangs happen in a child.
"""

import errno
import mmap
import multiprocessing
import os
import pickle
import random
import re
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, ends_of, take_rest
from fork_server import TEMPLATE

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.segment.names import shm_path
from shmbus_ext import _core

FORK = multiprocessing.get_context("fork")
HEADER_BYTES, SLOT_BYTES, DESCRIPTOR_BYTES, RECORD_HEADER_BYTES = 1024, 256, 64, 128
SEALED_AT = 40


def path_of(name: str) -> Path:
    return Path(shm_path(name))


def put(producer: Producer, key: str, **more: Any) -> None:
    producer.put(key, **{"group_size": 1, "index": 0, "x": np.arange(30), "timeout": 20, **more})


# --- making, finding, removing


def test_a_bus_is_told_from_every_other_one_also_of_its_own_name(bus_name: str) -> None:
    seen = set()
    for _ in range(3):
        with Bus.create(bus_name, capacity="1MiB") as bus, Bus.open(bus_name) as other:
            assert bus.identity == other.identity and len(bytes.fromhex(bus.identity)) == 16
            seen.add(bus.identity)
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["a b", "\N{SNOWMAN}", ".", "..", "-x", "%s", "a\nb", "x" * 150])
def test_a_name_is_any_text_without_slash_and_nul(bus_name: str, name: str) -> None:
    full = f"{bus_name}.{name}"
    with Bus.create(full, capacity=65536):
        assert path_of(full).exists()
        assert Bus.open(full).name == full
    assert not path_of(full).exists()


SIZES: list[tuple[int | str, int]] = [
    (65536, 65536), ("65536", 65536), ("64KiB", 65536), ("64 kib ", 65536), ("64K", 65536),
    ("0.5MiB", 524288), ("1MB", 1000000), ("0.001GiB", 1073741), ("70000B", 70000), (4096, 4096),
]  # fmt: skip


@pytest.mark.parametrize(("size", "expected"), SIZES)
def test_a_capacity_holds_at_least_what_was_asked_for(
    bus_name: str, size: int | str, expected: int
) -> None:
    with Bus.create(bus_name, capacity=size, max_producers=1) as bus:
        assert expected <= bus.capacity < expected + bus.extent_bytes
        assert bus.capacity % bus.extent_bytes == 0
        assert 4096 <= bus.record_limit <= bus.capacity


def test_a_segment_is_private_and_fully_allocated(bus: Bus) -> None:
    info = path_of(bus.name).stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 >= info.st_size > bus.capacity


def test_a_bus_is_created_once_and_the_loser_changes_nothing(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        put(producer, "a")
        with pytest.raises(shmbus.BusExistsError, match=rf"Bus.open\({bus.name!r}\)"):
            Bus.create(bus.name, capacity="2MiB")
        assert take_rest(consumer) == ["a"]


def test_the_block_of_its_creator_removes_a_bus_and_no_other_block_does(bus_name: str) -> None:
    with pytest.raises(KeyError, match="mine"), Bus.create(bus_name, capacity=65536):
        with Bus.open(bus_name) as opened:
            pass
        assert opened.closed and path_of(bus_name).exists()
        raise KeyError("mine")
    assert not path_of(bus_name).exists()
    with Bus.create(bus_name, capacity=65536):
        shmbus.unlink(bus_name)
    bus = Bus.create(bus_name, capacity=65536)
    bus.close()
    bus.close()
    with pytest.raises(shmbus.BusClosedError):
        bus.stats()
    Bus.open(bus_name).unlink()
    with pytest.raises(shmbus.BusNotFoundError):
        bus.unlink()


def test_the_counters_of_a_bus_can_be_read_without_being_its_consumer(bus: Bus) -> None:
    with Producer(bus.name, label="worker") as producer:
        for number in range(3):
            put(producer, f"k{number}")
        producer.reserve("r", group_size=1, index=0, fields={}).abort()
        stats, [info] = bus.stats(), bus.stats().producers
        assert (stats.committed, stats.undelivered, stats.collector_pid) == (3, 3, 0)
        assert (info.pid, info.label, info.state) == (os.getpid(), "worker", "active")
        assert (info.committed, info.aborted) == (3, 1)
    with Consumer(bus.name) as consumer:
        consumer.take(3, 10)[0].ack()
        stats = bus.stats()
        assert (stats.acknowledged, stats.undelivered, stats.dropped) == (1, 2, {})
        assert (stats.collector_pid, stats.capacity) == (os.getpid(), bus.capacity)


# --- slots


def test_as_many_producers_attach_as_were_asked_for_and_slots_are_used_again(
    bus: Bus, spawn: Spawner
) -> None:
    producers = [Producer(bus.name) for _ in range(4)]
    ids = {producer.producer_id for producer in producers}
    with pytest.raises(shmbus.BusBusyError, match=r"all 4 producer slots are taken \(4 active\)"):
        Producer(bus.name)
    for number in range(20):
        # The closed handle still exists: closing alone must free the slot.
        producers[number].close()
        producers.append(Producer(bus.name))
        ids.add(producers[-1].producer_id)
    assert len(ids) == 24
    del producers[:20]
    producers.pop().close()
    child = spawn.holder("import sys, shmbus; p = shmbus.Producer(sys.argv[1])", bus.name)
    with pytest.raises(shmbus.BusBusyError):
        Producer(bus.name)
    child.kill()
    with Consumer(bus.name) as consumer, Producer(bus.name) as last:
        for number, producer in enumerate([*producers, last]):
            put(producer, f"k{number}")
            producer.close()
        assert sorted(take_rest(consumer)) == ["k0", "k1", "k2", "k3"]


# --- forks and pickles


def in_child(context: Any, target: Callable[..., None], *args: Any) -> None:
    child = context.Process(target=target, args=args)
    child.start()
    child.join(30)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0


def use_inherited(
    producer: Producer, slot: shmbus.Reservation, consumer: Consumer, group: shmbus.Group
) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: put(producer, "x"), slot.commit, lambda: producer.reserve(
            "x", group_size=1, index=0, fields={}),
        consumer.take, consumer.stats, group.ack, group.give_back, group.drop,
        lambda: group[0]["x"], lambda: setattr(consumer, "policy_version", 77),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(shmbus.BusClosedError, match="before a fork; make a new one"):
            use()
    assert producer.closed
    producer.close()
    consumer.close()
    with Producer(producer.name) as own:
        put(own, "child")


def test_a_forked_child_gets_errors_and_handles_of_its_own_and_its_parent_goes_on(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        for key in "ab":
            put(producer, key)
        [group] = consumer.take(1, 10)
        slot = producer.reserve("slot", group_size=1, index=0, fields={"x": ("i4", 9)})
        in_child(FORK, use_inherited, producer, slot, consumer, group)
        slot["x"][:] = 3
        slot.commit()
        group.ack()
        assert consumer.policy_version == 0
        assert sorted(take_rest(consumer)) == ["b", "child", "slot"]
        ledger = consumer.stats()
        assert (ledger.acknowledged, ledger.balanced) == (4, True)


def test_what_a_forked_child_inherited_neither_changes_nor_reaches_the_ring(bus: Bus) -> None:
    def child(view: np.ndarray[Any, Any], room: np.ndarray[Any, Any]) -> None:
        ready.set()
        assert moved_on.wait(30)
        room[:] = 99
        assert np.array_equal(view, np.arange(30))

    ready, moved_on = FORK.Event(), FORK.Event()
    with Producer(bus.name) as one, Producer(bus.name) as two, Consumer(bus.name) as consumer:
        put(one, "a")
        [group] = consumer.take(1, 10)
        slot = two.reserve("slot", group_size=1, index=0, fields={"x": ("i4", 1000)})
        process = FORK.Process(target=child, args=(group[0]["x"], slot["x"]))
        process.start()
        assert ready.wait(30)
        slot["x"][:] = 3
        slot.commit()
        group.ack()
        [kept] = consumer.take(1, 10)
        for number in range(3 * bus.capacity // 8000):
            put(one, f"n{number}", x=np.zeros(1000))
            take_rest(consumer)
        moved_on.set()
        process.join(30)
        assert np.array_equal(kept[0]["x"], np.full(1000, 3))
        assert process.exitcode == 0


def test_handles_pickle_by_name_and_attach_anew(bus: Bus) -> None:
    with Producer(bus.name, checksum=True, label="mine") as producer:
        with pickle.loads(pickle.dumps(producer)) as copy:
            assert copy.producer_id != producer.producer_id
            put(copy, "copy", score=1.0)
        in_child(TEMPLATE, put, producer, "spawned")
        assert {info.label for info in bus.stats().producers} == {"mine"}
        put(producer, "level", group_size=2, index=0)
        put(producer, "level", group_size=2, index=1)
    original = Consumer(bus.name, skip_zero_variance=True, label="the original")
    consumer = pickle.loads(pickle.dumps(original))
    with pytest.raises(shmbus.BusBusyError, match="the original"):
        consumer.take(1, 0)
    original.close()
    with consumer:
        # A group of one has no variance either.
        assert take_rest(consumer) == []
        assert consumer.stats().dropped == {"zero_variance": 4}
    never_used = pickle.loads(pickle.dumps(consumer))
    never_used.close()
    with pytest.raises(shmbus.BusClosedError):
        never_used.take(1, 0)


# --- a file that is no segment, or a different segment


class Raw:
    """A segment as bytes, with the geometry in its header."""

    def __init__(self, name: str) -> None:
        with path_of(name).open("r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)
        self.data_at, self.extent_bytes, self.extents, self.slots = struct.unpack_from(
            "<QQII", self.bytes, 24
        )
        self.descriptors_at = HEADER_BYTES + (self.slots + 1) * SLOT_BYTES

    def find(self, needle: bytes) -> int:
        """Return the place of the record around these bytes: the cache line with its state."""
        end = self.find_text(needle)
        states = (self.bytes.rfind(state, self.data_at, end) for state in (b"COMT", b"ABRT"))
        return max(states) // 64 * 64

    def find_text(self, needle: bytes) -> int:
        at = self.bytes.find(needle, self.data_at)
        assert at > 0
        return at

    def flip(self, byte: int, bit: int) -> None:
        self.bytes[byte] ^= 1 << bit


def assert_refused(name: str, match: str) -> None:
    for use in (Bus.open, Producer, Consumer):
        with pytest.raises(shmbus.LayoutMismatchError, match=match):
            use(name)


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"notabus!", "is not a shmbus segment"),
        (8, struct.pack("<I", 99), f"layout version 99, this process needs {_core.LAYOUT_VERSION}"),
        (12, b"\1\2\3\4", rf"layout hash 0x04030201, this process needs {_core.LAYOUT_HASH:#010x}"),
        (16, struct.pack("<Q", 2**63), "fewer than its header says"),
        (24, struct.pack("<Q", 0), "damaged"),
        (24, struct.pack("<Q", 2**64 - 4096), "damaged"),
        (32, struct.pack("<Q", 2**60), "damaged"),
        (32, struct.pack("<Q", 0), "damaged"),
        (40, struct.pack("<I", 0), "damaged"),
        (40, struct.pack("<I", 2**32 - 1), "damaged"),
        (44, struct.pack("<I", 2**32 - 1), "damaged"),
        (44, struct.pack("<I", 0), "damaged"),
    ],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_header_of_another_kind_is_refused_with_what_both_sides_say(
    bus: Bus, at: int, value: bytes, match: str, sealed: bool
) -> None:
    raw = Raw(bus.name)
    raw.bytes[at : at + len(value)] = value
    if sealed:
        raw.bytes[56:60] = struct.pack("<I", _core.crc32c(raw.bytes[8:56]))
    assert_refused(bus.name, match)


def test_every_flipped_bit_of_the_geometry_is_noticed(bus: Bus) -> None:
    raw = Raw(bus.name)
    for where in [(byte, bit) for byte in range(60) for bit in range(8)]:
        raw.flip(*where)
        with pytest.raises(shmbus.LayoutMismatchError):
            Bus.open(bus.name)
        raw.flip(*where)
    Bus.open(bus.name).close()


@pytest.mark.parametrize("missing", [1, 4096, 900_000])
def test_a_truncated_segment_is_refused(bus: Bus, missing: int) -> None:
    path = path_of(bus.name)
    for size in (path.stat().st_size - missing, 4096, 4095, 1):
        os.truncate(path, size)
        assert_refused(bus.name, "fewer than its header says")


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"text" * 5000])
def test_a_file_that_is_no_segment_is_refused_and_can_be_removed(
    bus_name: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmbus.segment.lifecycle.ATTACH_WAIT_S", 0.02)
    path_of(bus_name).write_bytes(content)
    assert_refused(bus_name, "was never finished|is not a shmbus segment")
    shmbus.unlink(bus_name)


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_what_is_no_file_is_no_bus(bus_name: str, kind: str) -> None:
    path = path_of(bus_name)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    try:
        assert_refused(bus_name, "not a file of shmbus")
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


# --- damage
#: Flipped bits of each byte, drawn anew in each run, or every bit.
BITS_OF_A_BYTE = 8 if "SHMBUS_TEST_LONG" in os.environ else 1


def flip_one(bus_name: str, byte: int, bit: int, late: bool, aborted: bool) -> str:
    with (
        Bus.create(bus_name, capacity=131_072, max_producers=2),
        Producer(bus_name) as hurt,
        Producer(bus_name) as other,
        ExitStack() as stack,
    ):
        with Consumer(bus_name) as earlier:
            put(hurt, "before")
            take_rest(earlier)
        consumer = None if late else stack.enter_context(Consumer(bus_name))
        put(hurt, "first")
        slot = hurt.reserve("middle", group_size=1, index=0, fields={"x": ("i8", 30)})
        slot.abort() if aborted else slot.commit()
        put(hurt, "last")
        raw = Raw(bus_name)
        raw.flip(raw.find(b"middle") + byte, bit)
        consumer = consumer or stack.enter_context(Consumer(bus_name))
        put(other, "other")
        taken = sorted(take_rest(consumer))
        ledger = consumer.stats()
        # A lane goes on at the latest with its next run.
        for number in range(10):
            put(hurt, f"n{number}", x=np.zeros(2000, np.uint8))
        later = take_rest(consumer)
        missing = 4 - aborted - len(taken)
        # An untrustworthy length hides the rest behind it.
        good = taken in (["first", "last", "other"], ["first", "other"]) and "n9" in later
        good = good and ledger.dropped == ({"corrupt": missing} if missing else {})
        good = good and ledger.balanced and consumer.stats().balanced
        return "" if good else f"byte {byte}, bit {bit}: {taken}, {later}, {ledger}"


@pytest.mark.parametrize("aborted", [False, True], ids=["committed", "aborted"])
@pytest.mark.parametrize("late", [False, True], ids=["reading", "attaching later"])
def test_a_flipped_bit_of_a_header_is_quarantined_and_counted(
    bus_name: str, seed: int, late: bool, aborted: bool
) -> None:
    # The header, and behind it two words of shape, the id, and an entry of the schema.
    draw, hurt = random.Random(seed), range(RECORD_HEADER_BYTES + 38)
    bits = [(byte, bit) for byte in hurt for bit in draw.sample(range(8), BITS_OF_A_BYTE)]
    wrong = list(filter(None, (flip_one(bus_name, *where, late, aborted) for where in bits)))
    assert not wrong, "\n".join([f"{len(wrong)} bits", *wrong[:3]])


@pytest.mark.parametrize("checksum", [False, True])
def test_a_flipped_bit_of_the_payload_is_found_where_a_checksum_was_asked_for(
    bus: Bus, checksum: bool
) -> None:
    with Producer(bus.name, checksum=checksum) as producer, Consumer(bus.name) as consumer:
        put(producer, "a", meta={"text": "needle"})
        put(producer, "b", x=np.full(99, 0x55, np.uint8))
        raw = Raw(bus.name)
        raw.flip(raw.find_text(b"needle") - 1, 3)
        raw.flip(raw.find_text(b"\x55" * 99) + 98, 0)
        put(producer, "c")
        groups = {group.instance_id: group for group in consumer.take(9, 10)}
        touch(list(groups.values()))
        if checksum:
            assert groups.keys() == {"c"}
        else:
            assert int(groups["b"][0]["x"][98]) == 0x54
        assert consumer.stats().dropped == ({"corrupt": 2} if checksum else {})
        assert consumer.stats().balanced


# Results of reading damaged bytes, beside the bytes themselves.
SURVIVABLE = (shmbus.ShmbusError, ValueError, TypeError)


def touch(groups: list[shmbus.Group]) -> None:
    for group in groups:
        for t in group:
            with suppress(*SURVIVABLE):
                repr((t, t.meta, t.key, t.round, t.score, t.nbytes))
            for name in t:
                with suppress(*SURVIVABLE):
                    assert len(t[name].tobytes()) == t[name].nbytes


def scribble(raw: Raw, rng: random.Random, regions: list[tuple[int, int]]) -> None:
    start, end = rng.choice(regions)
    size = min(rng.choice([1, 4, 8, 64, 500]), end - start)
    at = rng.randrange(start, end - size + 1)
    raw.bytes[at : at + size] = rng.choice([rng.randbytes(size), b"\0" * size, b"\xff" * size])


def survive_damage_everywhere(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        with ExitStack() as stack:
            bus = stack.enter_context(Bus.create(name, capacity=262_144, max_producers=3))
            raw = Raw(name)
            # Everything but the segment's identity, read once by a process.
            regions = [
                (64, HEADER_BYTES), (HEADER_BYTES, raw.descriptors_at),
                (raw.descriptors_at, raw.data_at), (raw.data_at, len(raw.bytes)),
            ]  # fmt: skip
            ends: list[Any] = [Producer(name), Producer(name), Consumer(name)]
            for step in range(60):
                scribble(raw, rng, regions)
                for producer in ends[:2]:
                    for size in (10, 3000, 9000):
                        with suppress(*SURVIVABLE):
                            put(producer, f"k{step}", x=np.zeros(size, np.uint8), timeout=0)
                    with suppress(*SURVIVABLE):
                        producer.reserve("r", group_size=1, index=0, fields={}, timeout=0).commit()
                for use in (bus.stats, ends[2].stats, lambda end=ends[2]: end.take(1, 0.001)):
                    with suppress(*SURVIVABLE):
                        use()
                with suppress(*SURVIVABLE):
                    groups = ends[2].take(50, 0)
                    touch(groups)
                    ends[2].ack(groups[::2])
                if rng.random() < 0.1:
                    at = rng.randrange(3)
                    ends[at].close()
                    with suppress(*SURVIVABLE):
                        ends[at] = type(ends[at])(name)


def test_damage_anywhere_never_crashes_or_hangs_anybody(bus_name: str, seed: int) -> None:
    in_child(TEMPLATE, survive_damage_everywhere, bus_name, seed)


def lose_nothing_beside_a_damaged_lane(name: str, seed: int) -> None:
    rng = random.Random(seed)
    with Producer(name) as hurt, Producer(name) as sound, Consumer(name) as consumer:
        raw = Raw(name)
        taken: list[str] = []
        for step in range(300):
            with suppress(*SURVIVABLE):
                put(hurt, f"hurt{step}", x=np.zeros(rng.choice([10, 2000]), np.uint8), timeout=0)
            regions = [(HEADER_BYTES, HEADER_BYTES + SLOT_BYTES)]
            for extent in range(raw.extents):
                at = raw.descriptors_at + extent * DESCRIPTOR_BYTES
                if struct.unpack_from("<I", raw.bytes, at)[0] == 1:
                    data = raw.data_at + extent * raw.extent_bytes
                    # The owner's word stays: every lane needs an extent's holder.
                    regions += [(at + 8, at + DESCRIPTOR_BYTES), (data, data + raw.extent_bytes)]
            scribble(raw, rng, regions)
            put(sound, f"sound{step}", x=np.full(500, step))
            groups = consumer.take(50, 0)
            touch(groups)
            for group in groups:
                if group.instance_id.startswith("sound"):
                    taken.append(group.instance_id)
                    assert np.array_equal(group[0]["x"], np.full(500, int(taken[-1][5:])))
                group.ack()
        taken += take_rest(consumer)
        assert [k for k in taken if k[0] == "s"] == [f"sound{step}" for step in range(300)]


def test_other_lanes_lose_nothing_beside_a_damaged_one(bus: Bus, seed: int) -> None:
    in_child(TEMPLATE, lose_nothing_beside_a_damaged_lane, bus.name, seed)


@pytest.mark.parametrize("length", [10, 20_000], ids=["within the run", "past the run's end"])
def test_a_producer_leaves_a_run_that_damage_gave_away(bus: Bus, length: int) -> None:
    with ends_of(bus, daemon=False) as (hurt, consumer), Producer(bus.name) as sound:
        put(hurt, "hurt")
        raw = Raw(bus.name)
        struct.pack_into("<I", raw.bytes, raw.descriptors_at + SEALED_AT, 1)
        assert take_rest(consumer) == ["hurt"]
        put(sound, "sound")
        for step in range(4):
            put(sound, f"sound{step}")
            put(hurt, f"hurt{step}", x=np.zeros(length, np.uint8))
            assert f"sound{step}" in take_rest(consumer)


def forge(raw: Raw, rng: random.Random, record: int) -> None:
    """Change a part of a committed record, and make its checksums right again."""
    fields = [(8, 8), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8), (64, 4), (68, 4), (88, 4)]
    fields += [(92, 4), (96, 2), (98, 2), (100, 4), (104, 4), (112, 8)]
    fields += [(at, rng.choice([1, 2, 4, 8])) for at in range(128, 330, 2)]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, size = rng.choice(fields)
        value = rng.choice(
            [0, 1, 2, 63, 64, 255, 4096, 2**31, 2**48, 2**63, -1, -64, rng.getrandbits(64)]
        )
        raw.bytes[record + at : record + at + size] = (value % 2**64).to_bytes(8, "little")[:size]
    offset = record - raw.data_at
    extent, offset = divmod(offset, raw.extent_bytes)
    word = struct.unpack_from("<Q", raw.bytes, raw.descriptors_at + extent * DESCRIPTOR_BYTES)[0]
    place = struct.pack("<QQ", extent << 32 | word >> 32, offset)
    frame = _core.crc32c(place + raw.bytes[record + 8 : record + 32])
    struct.pack_into("<I", raw.bytes, record + 4, frame)
    id_bytes, _, words, schema = struct.unpack_from("<HHII", raw.bytes, record + 96)
    tables = raw.bytes[record + 128 : record + 128 + words * 8 + id_bytes + schema]
    header = _core.crc32c(raw.bytes[record + 8 : record + 124] + tables)
    struct.pack_into("<I", raw.bytes, record + 124, header)


def survive_forged_records(name: str, seed: int) -> None:
    rng = random.Random(seed)
    with Producer(name) as forger, Producer(name) as honest, Consumer(name) as consumer:
        raw = Raw(name)
        for number in range(600):
            y = np.zeros((3, 4), [("a", "i1"), ("b", "f8")])
            put(forger, f"forged{number:04}", y=y, meta={"m": [1, 2, 3]})
            forge(raw, rng, raw.find(b"forged%04d" % number))
            put(honest, f"honest{number:04}")
            groups = consumer.take(50, 10)
            touch(groups)
            assert f"honest{number:04}" in [group.instance_id for group in groups]
            consumer.ack(groups)


def test_records_forged_under_right_checksums_never_crash_their_reader(bus: Bus, seed: int) -> None:
    in_child(TEMPLATE, survive_forged_records, bus.name, seed)


HOLDER = """
import mmap, sys, shmbus
with open(sys.argv[1], "rb") as file:
    kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""


@pytest.mark.parametrize(("at", "value"), [(8, b"\x63\0\0\0"), (12, b"\1\2\3\4")])
def test_a_segment_of_another_layout_is_told_with_who_has_it_and_what_to_do(
    bus_name: str, spawn: Spawner, at: int, value: bytes
) -> None:
    Bus.create(bus_name, "1MiB").close()
    path = Path(f"/dev/shm/shmbus.{bus_name}")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)
    assert_refused(bus_name, rf"no process that .* has it open.* `shmbus snapshot {bus_name} DIR`")
    holder = spawn.holder(HOLDER, path)
    version = re.escape(shmbus.__version__)
    assert_refused(bus_name, rf"pid {holder.pid} \(shmbus {version}\) has it open: use that shmbus")


def test_a_bus_that_cannot_be_created_names_its_file(bus_name: str, spawn: Spawner) -> None:
    script = (
        "import os, resource, sys, shmbus\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "used = max(map(int, os.listdir('/proc/self/fd')))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))\n"
        "try:\n"
        "    shmbus.Bus.create(sys.argv[1], '64KiB')\n"
        "except OSError as error:\n"
        "    print(error.errno, error.filename)\n"
    )
    said = spawn.script(script, bus_name).finish()
    assert said.split() == [str(errno.EMFILE), str(shm_path(bus_name))]
