"""A patch as bytes takes a version from a pool to any pool with its base, and to no other."""

import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shmbus.pool import (
    Piece,
    PoolPublisher,
    PoolReader,
    PoolSpec,
    VersionLease,
    VersionWrite,
)
from shmbus_ext._core import pool_patch_bytes as export_patch
from shmbus_ext._core import pool_patch_crc as patched_crc
from shmbus_ext._core import pool_patch_take as take_patch

KIND = "weights"
SIZE = 1 << 18
SPEC = PoolSpec(slot_bytes=SIZE, patch_bytes=SIZE // 4)
#: Half in a single piece, the rest as every second row in two pieces of a different width.
PIECES = [
    Piece(0, 1, SIZE // 2, SIZE // 2, 2),
    Piece(SIZE // 2, 32, SIZE // 128, SIZE // 64, 4),
    Piece(SIZE // 2 + SIZE // 128, 32, SIZE // 128, SIZE // 64, 1),
]


class Ends:
    def __init__(self, bus: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.payload = self.rng.integers(0, 256, SIZE, dtype=np.uint8)
        self.here = PoolPublisher(f"{bus}.a", KIND, spec=SPEC)
        self.there = PoolPublisher(f"{bus}.b", KIND, spec=SPEC)
        self.from_here, self.from_there = (
            PoolReader(f"{bus}.a", KIND),
            PoolReader(f"{bus}.b", KIND),
        )

    def publish(self, version: int) -> VersionLease:
        self.payload[self.rng.integers(0, SIZE, 50)] ^= 1
        write = begun(self.here, version)
        with write:
            for piece in PIECES:
                write.put_piece(piece, rows_of(self.payload, piece))
        return self.from_here.latest(timeout=0)

    def newest_there(self) -> VersionLease:
        return self.from_there.latest(timeout=0)

    def close(self) -> None:
        self.from_here.close()
        self.from_there.close()
        self.here.close(remove=True)
        self.there.close(remove=True)


@pytest.fixture
def ends(bus_name: str, seed: int) -> Iterator[Ends]:
    made = Ends(bus_name, seed)
    with made.publish(1) as lease, begun(made.there, 1) as write:
        write.view()[:] = lease.view()
    yield made
    made.close()


def begun(publisher: PoolPublisher, version: int) -> VersionWrite:
    write = publisher.begin(version, SIZE, meta=b"the same", patch=True)
    assert write is not None
    return write


def rows_of(payload: npt.NDArray[np.uint8], piece: Piece) -> npt.NDArray[np.uint8]:
    starts = range(piece.offset, piece.offset + piece.rows * piece.stride, piece.stride)
    return np.concatenate([payload[at : at + piece.row_bytes] for at in starts])


def test_each_version_follows_and_has_the_same_patch_there(ends: Ends) -> None:
    for version in range(2, 8):
        with ends.publish(version) as lease:
            exported = export_patch(lease.buffer)
            assert exported is not None
            base, runs = exported
            assert base == lease.sequence - 1
            with begun(ends.there, version) as write:
                assert take_patch(write.buffer, runs)
                assert patched_crc(runs, write.buffer) == patched_crc(runs, lease.buffer)
            with ends.newest_there() as copy:
                assert np.array_equal(copy.view(), ends.payload)
                again = export_patch(copy.buffer)
                assert again is not None and again[1] == runs


def test_a_patch_of_another_base_is_refused_and_the_version_before_stays(ends: Ends) -> None:
    ends.publish(2).close()
    with ends.publish(3) as lease:
        exported = export_patch(lease.buffer)
        assert exported is not None
        write = begun(ends.there, 3)
        runs = exported[1]
        took = take_patch(write.buffer, runs)
        assert not took or patched_crc(runs, write.buffer) != patched_crc(runs, lease.buffer)
        write.give_up("another base")
    with ends.newest_there() as copy:
        assert copy.version == 1


def test_bad_patch_bytes_write_nothing_outside_the_version(ends: Ends, seed: int) -> None:
    rng = random.Random(seed)
    with ends.publish(2) as lease, ends.newest_there() as before:
        exported = export_patch(lease.buffer)
        assert exported is not None
        runs, kept = exported[1], before.view().copy()
        for _ in range(300):
            harmed = bytearray(runs[: rng.randrange(len(runs) + 1)] if rng.random() < 0.3 else runs)
            for _ in range(rng.randint(1, 4)):
                if harmed:
                    harmed[rng.randrange(min(len(harmed), 400))] = rng.randrange(256)
            write = begun(ends.there, 2)
            good = take_patch(write.buffer, harmed)
            crc = patched_crc(harmed, write.buffer) if good else None
            if good and crc == patched_crc(runs, lease.buffer) and bytes(harmed) == runs:
                assert np.array_equal(write.view(), ends.payload)
            write.give_up("harmed")
            assert np.array_equal(before.view(), kept)
    with begun(ends.there, 2) as write:
        assert take_patch(write.buffer, runs)
    with ends.newest_there() as copy:
        assert np.array_equal(copy.view(), ends.payload)
