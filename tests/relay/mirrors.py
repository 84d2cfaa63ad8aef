"""Mirrors of a pool, a thread of this process for each party, and versions of known bytes."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from relay.local import LocalMailbox, LocalRelay

from shmbus.errors import BusNotFoundError, LayoutMismatchError
from shmbus.pool import (
    Piece,
    PoolPublisher,
    PoolReader,
    PoolSpec,
    read_pool,
    unlink_pool,
)
from shmbus.relay.mirror_party import POOL_KIND, MirrorParty
from shmbus.relay.weights_party import WeightsParty

SOURCE = "weights"


class Trainer:
    """A publisher of versions; every byte follows from the version's number."""

    def __init__(self, bus: str, size: int, seed: int, *, patches: bool = True, **options: Any):
        self.bus, self.size, self.seed, self.patches = bus, size, seed, patches
        spec = PoolSpec(slot_bytes=size, patch_bytes=max(4096, size // 4) if patches else 0)
        options.setdefault("timeout", 30.0)
        self.publisher = PoolPublisher(bus, POOL_KIND, spec=spec, **options)

    def publish(self, version: int, *, meta: bytes = b"of it") -> None:
        """Publish a version, in pieces that may become a patch."""
        payload = bytes_of(version, self.size, self.seed)
        write = self.publisher.begin(
            version, self.size, meta=meta, text=f"v{version}", patch=self.patches
        )
        assert write is not None
        with write:
            for piece in pieces_of(self.size):
                at = slice(piece.offset, piece.offset + piece.row_bytes)
                write.put_piece(piece, np.ascontiguousarray(payload[at]))

    def close(self) -> None:
        self.publisher.close(remove=True)


def pieces_of(size: int) -> list[Piece]:
    half = size // 8 * 4
    return [Piece(0, 1, half, half, 2), Piece(half, 1, size - half, size - half, 1)]


def bytes_of(version: int, size: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return a version's bytes: version 0's, with a few changes by each version."""
    payload = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    numbers = np.arange(0, size, 997)
    payload[numbers] = (version * 31 + numbers) % 251
    return payload


def is_version(lease: Any, size: int, seed: int) -> bool:
    """Whether a lease equals the bytes of its version."""
    return lease.size == size and np.array_equal(lease.view(), bytes_of(lease.version, size, seed))


@contextmanager
def mirrors(
    trainer: str,
    nodes: list[str],
    *,
    mailbox: type[LocalMailbox] = LocalMailbox,
    piece_bytes: int = 64 << 10,
) -> Iterator[LocalRelay]:
    """Mirror a pool of the trainer's bus beside these buses, through such a mailbox."""
    made = LocalRelay([], [])
    made.kinds[SOURCE] = mailbox
    try:
        for name in nodes:
            made.start(name, lambda box, bus=name: MirrorParty(bus, box, SOURCE))
        made.start(SOURCE, lambda box: WeightsParty(trainer, box, nodes, piece_bytes))
        yield made
    finally:
        made.stop()
        for name in nodes:
            remove(name)
    for address, error in made.ended.items():
        raise AssertionError(f"{address} ended") from error


def remove(bus: str) -> None:
    """Remove a mirror's pool, if present."""
    with contextlib.suppress(BusNotFoundError):
        unlink_pool(bus, POOL_KIND)


def version_of(bus: str) -> int | None:
    """Return the newest version in a bus's pool; None without a version."""
    try:
        return read_pool(bus, POOL_KIND).version
    except (BusNotFoundError, LayoutMismatchError):
        return None


def checked(bus: str, size: int, seed: int) -> int:
    """Return the newest version of a bus's pool after a comparison of its bytes."""
    with PoolReader(bus, POOL_KIND, label="checks") as reader, reader.latest(timeout=30) as lease:
        assert is_version(lease, size, seed), f"version {lease.version} of {bus} is torn"
        return int(lease.version)
