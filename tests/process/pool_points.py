"""Ends or stops a process of a slot pool at each of its failpoints, and checks the remains.

After a child's end at each point of KIND ("publisher", "patcher", "reader", "rank") the newest
version is whole, a successor publishes, and every reader gets it. A line of JSON a case.
"""

import functools
from collections.abc import Callable

from failpoints import await_signal, play
from supervisor import Child

from shmbus import ShmbusError
from shmbus.pool import (
    Piece,
    PoolPublisher,
    PoolReader,
    PoolSpec,
    VersionLease,
    read_pool,
    unlink_pool,
)
from shmbus_ext import _core

SIZE = 1 << 16
SPEC = PoolSpec(slot_bytes=SIZE, slots=3, patch_bytes=2 * SIZE)
VERSIONS = (2, 3, 4)

_POINTS = {
    "publisher": (
        "pool-writer-claimed", "pool-slot-locked", "pool-writing", "pool-announced", "pool-written",
        "pool-ready", "pool-unlocked", "pool-latest", "pool-rung",
    ),
    "patcher": ("pool-patch-piece", "pool-patch-sealed"),
    "reader": (
        "pool-reader-claimed", "pool-lease-locked", "pool-leased", "pool-applied", "pool-let-go",
    ),
    "rank": (
        "pool-writer-claimed", "pool-piece-locked", "pool-piece-begun", "pool-piece-written",
        "pool-piece-done",
    ),
}  # fmt: skip
#: Kind: point: passes before the signal.
POINTS = {
    kind: {point: (1,) if point.endswith("claimed") else (1, 2) for point in points}
    for kind, points in _POINTS.items()
}


def run_publisher(bus: str, *, patch: bool = False, **rank: int) -> None:
    """Publish alone or as a rank, with or without patches."""
    with PoolPublisher(bus, "weights", timeout=20, **rank) as publisher:
        for version in VERSIONS:
            publish(publisher, version, patch=patch)


def run_reader(bus: str) -> None:
    with PoolReader(bus, "weights") as reader:
        for _ in range(3):
            with reader.latest(timeout=20) as lease:
                reader.applied(lease)


CHILDREN: dict[str, Callable[[str], None]] = {
    "publisher": run_publisher,
    "patcher": functools.partial(run_publisher, patch=True),
    "reader": run_reader,
    "rank": functools.partial(run_publisher, rank=1, world_size=2),
}


def publish(publisher: PoolPublisher, version: int, *, patch: bool = False) -> None:
    """Write this rank's half of a version, or the whole."""
    with publisher.begin(version, SIZE, meta=b"m", patch=patch) as write:  # type: ignore[union-attr]
        share = SIZE // publisher.world_size
        if patch:  # two pieces: a death may come between them
            for at in (0, SIZE // 2):
                data = bytes([version]) * (SIZE // 2)
                write.put_piece(Piece(at, 1, SIZE // 2, SIZE // 2, 1), data)
            return
        begin = publisher.rank * share
        write.view()[begin : begin + share] = version


def newest(bus: str) -> int:
    with PoolReader(bus, "weights") as reader, reader.latest(timeout=5) as lease:
        found = lease.view()
        check_patch(bus, lease)
        assert (found == lease.version).all(), f"version {lease.version} is torn"
        return lease.version


def check_patch(bus: str, lease: VersionLease) -> None:
    """A patch leads from its base to the version, whoever made it."""
    found = _core.pool_patch_bytes(lease.buffer)
    if found is None:
        return
    base, runs = lease.version - 1, found[1]
    with PoolPublisher(f"{bus}.m", "weights", spec=SPEC) as copies:
        with copies.begin(base, SIZE) as whole:  # type: ignore[union-attr]
            whole.view()[:] = base
        with copies.begin(lease.version, SIZE, patch=True) as write:  # type: ignore[union-attr]
            assert _core.pool_patch_take(write.buffer, runs), f"of version {lease.version}"
            assert (write.view() == lease.version).all(), f"of version {lease.version}"
        copies.close(remove=True)


def lead(bus: str) -> list[str]:
    try:
        with PoolPublisher(bus, "weights", world_size=2, timeout=2.0) as publisher:
            for version in VERSIONS:
                publish(publisher, version)
    except ShmbusError as error:
        return [type(error).__name__]
    return []


def case(bus: str, kind: str, failpoint: str, action: str) -> dict[str, object]:
    faults: list[str] = []
    with PoolPublisher(bus, "weights", spec=SPEC) as publisher:
        publish(publisher, 1)
    child = Child(lambda: CHILDREN[kind](bus), failpoint)
    try:
        ends = lead(bus) if kind == "rank" else []
        signalled = await_signal(child, action)
        before = newest(bus)
        if kind in ("publisher", "patcher"):
            child.kill()
        with PoolPublisher(bus, "weights", timeout=5.0) as successor:
            for version in (before + 1, before + 2):
                publish(successor, version, patch=kind == "patcher")
                if newest(bus) != version:
                    faults.append(f"version {version} did not become the newest")
        if kind == "rank" and ends == [] and not failpoint.startswith("pool-piece-done"):
            faults.append("rank 0 published without its other rank")
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error}")
        signalled = True
    finally:
        child.kill()
    left = read_pool(bus, "weights")
    faults += [
        f"{reader.label} is still there" for reader in left.readers if reader.state != "dead"
    ]
    unlink_pool(bus, "weights")
    return {"signalled": signalled, "faults": faults}


if __name__ == "__main__":
    play(
        POINTS,
        {
            kind: lambda bus, point, action, kind=kind: case(bus, kind, point, action)
            for kind in POINTS
        },
    )
