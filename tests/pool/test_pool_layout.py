"""The bytes of a pool are those of shmbus_ext/pool/LAYOUT.md, read without shmbus's own code."""

import struct
from pathlib import Path

import pytest

from shmbus import errors
from shmbus.pool import Piece, PoolPublisher, PoolReader, PoolSpec
from shmbus.pool.pool_file import pool_path
from shmbus_ext import _core

SLOT_ROWS = 4096
RANK_ROWS = SLOT_ROWS + 8 * 256
READER_ROWS = RANK_ROWS + 64 * 256
SLOTS = READER_ROWS + 128 * 256


def test_header_rows_and_slots_lie_where_the_page_says(bus_name: str) -> None:
    spec = PoolSpec(slot_bytes=5000, slots=2, max_slots=3, meta_bytes=100, block_bytes="1MiB")
    with (
        PoolPublisher(bus_name, "weights", spec=spec, label="trainer") as publisher,
        PoolReader(bus_name, "weights", label="replica", device="cpu") as reader,
    ):
        with publisher.begin(-7, 4321, meta=b"meta", text="step") as write:  # type: ignore[union-attr]
            write.view()[:] = 9
            write.finish(digests=True)
        with reader.latest(timeout=5) as lease:
            reader.refused(lease, 3, "no")
            data = Path(pool_path(bus_name, "weights")).read_bytes()
        publisher.close(remove=True)
    stride = 8192 + 4096 + 4096  # payload, meta, digests: a page's multiple each
    offset = -(-SLOTS // 4096) * 4096
    assert data[:8] == b"SHBPOOL1"
    assert struct.unpack_from("<II7Q", data, 8)[:8] == (
        2, 3, offset + 3 * stride, offset, stride, 5000, 100, 1 << 20,
    )  # fmt: skip
    assert struct.unpack_from("<I", data, 80)[0] == _core.crc32c(data[8:80])
    assert struct.unpack_from("<Q", data, 88)[0] != 0  # life, random
    assert struct.unpack_from("<QQQ", data, 128) == (1 << 8 | 1, 0, 2)  # latest, writing, next
    assert struct.unpack_from("<I", data, 384) == (2,)  # slots_open
    assert struct.unpack_from("<QQ", data, 392) == (1, 0)  # published, skipped
    row = data[SLOT_ROWS : SLOT_ROWS + 256]
    assert row[:4] == b"REDY"
    assert struct.unpack_from("<I", row, 4)[0] == _core.crc32c(row[8:])
    assert struct.unpack_from("<QqQQ", row, 8) == (1, -7, 4321, 4)
    assert struct.unpack_from("<III", row, 40) == (_core.crc32c(b"meta"), 1, 1)
    assert row[64:69] == b"step\0"
    assert data[RANK_ROWS + 28 : RANK_ROWS + 36] == b"trainer\0"
    assert struct.unpack_from("<QQqqII i", data, READER_ROWS)[:5] == (0, 1, 0, -7, 1)
    assert data[READER_ROWS + 44 : READER_ROWS + 52] == b"replica\0"
    assert data[offset : offset + 4321] == b"\x09" * 4321
    assert data[offset + 8192 : offset + 8196] == b"meta"
    digest = struct.unpack_from("<I", data, offset + 8192 + 4096)[0]
    assert digest == _core.crc32c(b"\x09" * 4321)
    assert (_core.POOL_MAX_SLOTS, _core.POOL_MAX_RANKS, _core.POOL_MAX_READERS) == (8, 64, 128)


def test_a_patch_lies_where_the_page_says(bus_name: str) -> None:
    spec = PoolSpec(slot_bytes=1000, meta_bytes=1, patch_bytes=4096)
    with PoolPublisher(bus_name, "weights", spec=spec) as publisher:
        payload = bytearray(1000)
        for version in (5, 6):
            with publisher.begin(version, 1000, patch=True) as write:  # type: ignore[union-attr]
                piece = Piece(offset=20, rows=2, row_bytes=300, stride=400, width=2)
                write.put_piece(piece, bytes(payload[:600]))
            payload[2 * 7] = 9
            payload[300 + 2 * 149] = 8
        data = Path(pool_path(bus_name, "weights")).read_bytes()
        publisher.close(remove=True)
    offset = -(-SLOTS // 4096) * 4096
    start = offset + 4 * 4096 + 3 * 4096  # the second slot; behind payload, meta and digests
    assert struct.unpack_from("<Q", data, 72) == (4096,)
    assert struct.unpack_from("<QQq", data, SLOT_ROWS + 256 + 128) == (1, 0, 5)  # base, kept, base
    head = struct.unpack_from("<QQQQI", data, start)
    stream = bytes([1, 7, 9, 0]) + bytes([1, 149, 8, 0])
    assert head == (2, 1, 64 + 8, 2, 1)
    runs = data[start + 64 : start + 64 + 72]
    assert struct.unpack_from("<I", data, start + 60)[0] == _core.crc32c(
        data[start : start + 60] + runs
    )
    mixed = 0x9E3779B97F4A7C15 * (2 * 7 + 1) + 0x9E3779B97F4A7C15 * (2 * (150 + 149) + 1)
    assert struct.unpack_from("<QQQQQQQI", runs) == (
        20, 2, 300, 400, 8, 2, mixed % (1 << 64), 2,
    )  # fmt: skip
    assert runs[64:] == stream


def test_a_pool_of_another_layout_version_is_refused_by_number(bus_name: str) -> None:
    publisher = PoolPublisher(bus_name, "weights", spec=PoolSpec(slot_bytes=4096))
    publisher.close()
    path = Path(pool_path(bus_name, "weights"))
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 77))
    with pytest.raises(errors.LayoutMismatchError, match="layout version 77, this process needs 2"):
        PoolReader(bus_name, "weights")
    path.unlink()
