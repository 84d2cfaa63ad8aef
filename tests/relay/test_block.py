"""Blocks: records leave a bus and enter the next unchanged; any fault is refused."""

import os
import random
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmbus
from shmbus.segment import lifecycle
from shmbus_ext import _core

SEED = int(os.environ.get("SHMBUS_TEST_SEED", random.randrange(1 << 32)))
SNOWMAN = "\N{SNOWMAN}"
HEADER = _core.BLOCK_HEADER_BYTES
FIELDS_AT = 128
VERSION_AT, LAYOUT_AT, COUNT_AT, RECORDS_CRC_AT, HEADER_CRC_AT = 8, 12, 24, 56, 60


@pytest.fixture
def source(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, "4MiB"):
        yield bus_name


@pytest.fixture
def target(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name + ".to", "4MiB"):
        yield bus_name + ".to"


def reader_of(name: str) -> _core.Reader:
    return _core.Reader(lifecycle.open_segment(name), "test")


def put_some(name: str, rng: np.random.Generator, *, checksum: bool = False) -> None:
    """Put records of many forms: rounds, metas, no field, empty ones, large ones, failures."""
    with shmbus.Producer(name, checksum=checksum) as producer:
        for i in range(40):
            arrays: dict[str, Any] = {
                "tokens": rng.integers(0, 9, int(rng.integers(0, 3000)), dtype=np.int32),
                "mask": rng.integers(0, 2, (int(rng.integers(0, 5)), 7), dtype=np.uint8),
                "scalar": np.array(2.5),
            }
            kept = dict(list(arrays.items())[: i % 4])
            producer.put(
                SNOWMAN * (i % 3) + f"q{i}", group_size=i + 1, index=i // 2, score=i / 7,
                policy_version=i, round=i if i % 2 else None,
                meta={"i": [i, "x" * i]} if i % 3 else None, **kept,
            )  # fmt: skip
        producer.put("big", group_size=1, index=0, x=rng.integers(0, 9, 75_000))
        producer.fail("gone", 3, "out of memory")


def block_of(trajectories: list[_core.Trajectory]) -> bytes:
    into = bytearray(HEADER + sum(t.nbytes for t in trajectories))
    return bytes(into[: _core.export_block(trajectories, into)])


def checks_of(trajectories: list[_core.Trajectory]) -> list[int]:
    return [head.check for head in _core.unpack_heads(_core.read_heads(trajectories, str))]


def said(t: _core.Trajectory) -> tuple[Any, ...]:
    """The content of a trajectory, without place and time of its put."""
    arrays = [(n, a.dtype.str, a.shape, a.tobytes()) for n, a in t.items()]
    return (
        t.instance_id, t.round, t.group_size, t.index, t.score, t.policy_version, t.failed, t.meta,
        arrays,
    )  # fmt: skip


@pytest.mark.parametrize("checksum", [False, True])
def test_records_arrive_as_they_were(source: str, target: str, checksum: bool) -> None:
    print(f"SHMBUS_TEST_SEED={SEED}")
    put_some(source, np.random.default_rng(SEED), checksum=checksum)
    sent = reader_of(source).poll(100)
    block = block_of(sent)
    origins, checks = _core.check_block(block)
    with shmbus.Bus.open(source) as bus:
        identity = bytes.fromhex(bus.identity)
    assert (
        origins
        == b"".join(_core.record_origins(sent))
        == b"".join(struct.pack(">16sQQ", identity, t.producer_id, t.sequence) for t in sent)
    )
    assert array("I", checks).tolist() == checks_of(sent)
    with shmbus.Producer(target) as producer:
        assert _core.import_block(producer, block, 0, 100, 5.0) == len(sent)
        taken = reader_of(target).poll(100)
        assert [said(t) for t in taken] == [said(t) for t in sent]
        assert [t.sequence for t in taken] == list(range(len(sent)))
        assert {t.producer_id for t in taken} == {producer.producer_id}
    # The heads differ only in the numbers of their buses: this hop serves as the next.
    assert [said(t) for t in sent] == [said(t) for t in taken]


def test_a_record_has_the_split_number_of_its_bus(source: str, target: str) -> None:
    with shmbus.Producer(source) as producer, shmbus.Producer(target) as other:
        for split in ("test", "eval"):
            other.put("before", group_size=1, index=0, split=split)
        for split in ("train", "eval", "test"):
            producer.put("q", group_size=1, index=0, split=split, x=np.arange(9))
    sent = reader_of(source).poll(9)
    block = block_of(sent)
    assert [t.key for t in sent] == ["q", ("q", None, 1), ("q", None, 2)]
    assert "record 1: it is of split number 1 of its own bus" in refusal(block)
    splits = bytes([0, 2, 1])
    checks = _core.check_block(block, splits)[1]
    heads = _core.unpack_heads(_core.read_heads(sent, str), bytes(range(16)))
    assert array("I", checks).tolist() == [each.check for each in heads]
    with shmbus.Producer(target) as producer:
        with pytest.raises(ValueError, match="record 1: it is of split"):
            _core.import_block(producer, block, 1, 9, 5.0, b"", bytes([0, 16]))
        assert _core.import_block(producer, block, 0, 9, 5.0, b"", splits) == 3
    taken = reader_of(target).poll(9)
    assert {(t.key, t.split) for t in taken} == {
        (("before", None, 1), "test"), (("before", None, 2), "eval"),
        ("q", "train"), (("q", None, 2), "eval"), (("q", None, 1), "test"),
    }  # fmt: skip


def test_a_head_has_the_same_check_after_its_record_was_moved(source: str) -> None:
    with shmbus.Producer(source) as producer:
        for i in range(60):
            producer.put(f"q{i}", group_size=2, index=0, x=np.zeros(4000, np.uint8))
    reader = reader_of(source)
    trajectories = reader.poll(100)
    before = checks_of(trajectories)
    reader.release([t for i, t in enumerate(trajectories) if i % 7], 0)
    kept = trajectories[::7]
    reader.evacuate(kept)
    assert reader.moves > 0
    assert checks_of(kept) == before[::7]


def test_a_full_bus_takes_what_it_has_room_for_and_the_rest_later(source: str) -> None:
    with shmbus.Bus.create(source + ".to", "64KiB", max_producers=2, extent_bytes=4096):
        with shmbus.Producer(source) as producer:
            for i in range(40):
                producer.put(f"q{i}", group_size=1, index=0, x=np.full(3500, i, np.uint8))
        block = block_of(reader_of(source).poll(100))
        reader = reader_of(source + ".to")
        got: list[int] = []
        with shmbus.Producer(source + ".to") as sink:
            done = 0
            while done < 40:
                try:
                    done += _core.import_block(sink, block, done, 100, 0.0)
                except shmbus.BusFullError:
                    taken = reader.poll(100)
                    assert taken
                    got += [int(t["x"][0]) for t in taken]
                    reader.release(taken, 0)
            got += [int(t["x"][0]) for t in reader.poll(100)]
        assert got == list(range(40))


def test_a_record_that_the_bus_can_never_take_is_an_error(source: str) -> None:
    with shmbus.Bus.create(source + ".to", "64KiB", max_producers=2):
        with shmbus.Producer(source) as producer:
            producer.put("q", group_size=1, index=0, x=np.zeros(100_000, np.uint8))
        block = block_of(reader_of(source).poll(1))
        with (
            shmbus.Producer(source + ".to") as sink,
            pytest.raises(shmbus.RecordTooLargeError, match="at most"),
        ):
            _core.import_block(sink, block, 0, 1, 5.0)


def resealed(block: bytearray) -> bytes:
    """The block with both checksums made right."""
    struct.pack_into("<I", block, RECORDS_CRC_AT, _core.crc32c(bytes(block[HEADER:])))
    struct.pack_into("<I", block, HEADER_CRC_AT, _core.crc32c(bytes(block[:HEADER_CRC_AT])))
    return bytes(block)


def with_head_resealed(block: bytearray) -> bytes:
    """The same, and the first record's header checksum."""
    shape_words, schema_bytes = struct.unpack_from("<II", block, HEADER + 100)
    (id_bytes,) = struct.unpack_from("<H", block, HEADER + 96)
    tables = shape_words * 8 + id_bytes + schema_bytes
    head = bytes(block[HEADER + 8 : HEADER + 124]) + bytes(
        block[HEADER + FIELDS_AT : HEADER + FIELDS_AT + tables]
    )
    struct.pack_into("<I", block, HEADER + 124, _core.crc32c(head))
    return resealed(block)


def small_block(source: str, **arrays: Any) -> bytearray:
    with shmbus.Producer(source) as producer:
        for i in range(3):
            producer.put("q", group_size=3, index=i, **(arrays or {"x": np.arange(9)}))
    return bytearray(block_of(reader_of(source).poll(9)))


def refusal(block: bytes) -> str:
    with pytest.raises(ValueError) as caught:
        _core.check_block(block)
    return str(caught.value)


def test_a_cut_block_is_refused(source: str) -> None:
    block = small_block(source)
    for size in (*range(0, 200, 7), len(block) - 1):
        assert "cut" in refusal(bytes(block[:size]))
    assert "something was added" in refusal(bytes(block) + b"\0")


def test_every_flipped_bit_is_refused(source: str) -> None:
    block = small_block(source)
    _core.check_block(block)
    for bit in range(len(block) * 8):
        block[bit // 8] ^= 1 << bit % 8
        assert refusal(bytes(block)).startswith("block refused: ")
        block[bit // 8] ^= 1 << bit % 8
    _core.check_block(block)


def test_another_layout_or_version_is_refused_with_both_numbers(source: str) -> None:
    block = small_block(source)
    for at, what, own in (
        (VERSION_AT, "block version 77", 1),
        (LAYOUT_AT, "layout version 77", _core.LAYOUT_VERSION),
    ):
        other = bytearray(block)
        struct.pack_into("<I", other, at, 77)
        text = refusal(resealed(other))
        assert what in text and f"needs {own}" in text and "same shmbus on both" in text


def test_forged_lengths_are_refused_though_every_checksum_is_right(source: str) -> None:
    block = small_block(source)
    forgeries = {
        (HEADER + 8, "<Q"): (0, 64, 127, 1 << 63, (1 << 64) - 64),  # record_bytes
        (HEADER + 92, "<I"): (0, 1 << 31, 0xFFFFFFFF),  # meta_offset
        (HEADER + 88, "<I"): (1 << 20, 0xFFFFFFFF),  # meta_bytes
        (HEADER + 96, "<H"): (0, 256, 0xFFFF),  # id_bytes
        (HEADER + 98, "<H"): (0, 65, 0xFFFF),  # field_count
        (HEADER + 64, "<H"): (0, 0xFFFF),  # group_size
        (HEADER + 66, "<H"): (0, 4),  # need
        (HEADER + 68, "<H"): (3,),  # index
        (HEADER + 70, "<H"): (16,),  # split
        (HEADER + 16, "<Q"): (0,),  # producer_id
        (HEADER + 24, "<I"): (1,),  # slot
        (HEADER + 28, "<I"): (2, 8, 1 << 31),  # flags
        (HEADER + FIELDS_AT, "<Q"): (0, 1 << 20, 1 << 63),  # a field's offset
        (HEADER + FIELDS_AT + 8, "<Q"): (1 << 20, 1 << 61, (1 << 64) - 1),  # and its size
    }
    for (at, form), values in forgeries.items():
        for value in values:
            forged = bytearray(block)
            struct.pack_into(form, forged, at, value)
            assert "record 0" in refusal(with_head_resealed(forged)), (at, value)
    for count in (0, 1, 2, 4, _core.MAX_GROUP_SIZE + 1):
        forged = bytearray(block)
        struct.pack_into("<I", forged, COUNT_AT, count)
        assert "length" in refusal(resealed(forged)), count


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"bb", b"aa", "two of its fields have one name"),
        *((b"<i8", dtype, "") for dtype in (b"|O8", b"<i4", b"<q8", b"\xff\xff\xff")),
        (b"q", b"\xff", ""),
    ],
)
def test_words_that_no_producer_can_write_are_refused(
    source: str, old: bytes, new: bytes, said: str
) -> None:
    block = small_block(source, aa=np.arange(4), bb=np.arange(4))
    at = block.index(old, HEADER + FIELDS_AT)
    block[at : at + len(old)] = new
    assert f"record 0: {said}" in refusal(with_head_resealed(block))


def test_a_payload_without_its_producers_checksum_is_refused(source: str) -> None:
    with shmbus.Producer(source, checksum=True) as producer:
        producer.put("q", group_size=1, index=0, x=np.arange(9))
    block = bytearray(block_of(reader_of(source).poll(1)))
    block[-1] ^= 1
    assert "producer's checksum" in refusal(resealed(block))


def test_a_refused_block_leaves_the_bus_as_it_was(source: str, target: str) -> None:
    block = small_block(source)
    block[HEADER + 8] ^= 0x40
    with shmbus.Producer(target) as producer:
        with pytest.raises(ValueError, match="block refused"):
            _core.import_block(producer, bytes(block), 0, 9, 0.0)
        for junk in (b"", b"x" * 64, bytes(HEADER)):
            with pytest.raises(ValueError, match="expected a block"):
                _core.import_block(producer, junk, 0, 9, 0.0)
        assert producer.stats().committed == 0


def test_a_record_that_was_released_cannot_be_exported(source: str) -> None:
    with shmbus.Producer(source) as producer:
        for i in range(3):
            producer.put("q", group_size=3, index=i, x=np.arange(9))
    reader = reader_of(source)
    (first, *_) = trajectories = reader.poll(9)
    reader.release([first], 0)
    with pytest.raises(shmbus.BusClosedError):
        _core.export_block(trajectories, bytearray(1 << 16))
    for room in (0, 63, 64, 400):
        with pytest.raises(ValueError, match="bytes"):
            _core.export_block(trajectories[1:], bytearray(room))
    with pytest.raises(ValueError, match="1 to"):
        _core.export_block([], bytearray(1 << 16))
