"""Ends or stops a process of a slot pool at each of its failpoints, and looks at what is left.

usage: python -m pool_points BUS KIND:   (in a build with failpoints)

For each point of KIND ("publisher", "patcher", "reader", "rank") a child runs with SHMBUS_FAILPOINT
set. Then the newest version has to be whole, a successor has to publish, and every reader has to
get it. One line of JSON a case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from shmbus.pool import (
    Piece,
    PoolError,
    PoolPublisher,
    PoolReader,
    PoolSpec,
    VersionLease,
    put_piece,
    read_pool,
    unlink_pool,
)

SIZE = 1 << 16
SPEC = PoolSpec(slot_bytes=SIZE, slots=3, patch_bytes=2 * SIZE)
WAIT_S = 20.0

POINTS = {
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

CHILDREN = {
    "publisher": """
with PoolPublisher(bus, "weights", timeout=20) as publisher:
    for version in (2, 3, 4):
        publish(publisher, version)
""",
    "patcher": """
with PoolPublisher(bus, "weights", timeout=20) as publisher:
    for version in (2, 3, 4):
        publish(publisher, version, patch=True)
""",
    "reader": """
with PoolReader(bus, "weights") as reader:
    for turn in range(3):
        with reader.latest(timeout=20) as lease:
            reader.applied(lease)
""",
    "rank": """
with PoolPublisher(bus, "weights", rank=1, world_size=2, timeout=20) as publisher:
    for version in (2, 3, 4):
        publish(publisher, version)
""",
}


def publish(publisher: PoolPublisher, version: int, *, patch: bool = False) -> None:
    """Write this rank's half of a version, or all of it."""
    with publisher.begin(version, SIZE, meta=b"m", patch=patch) as write:  # type: ignore[union-attr]
        share = SIZE // publisher.world_size
        if patch:  # two pieces, so that a death may come between them
            for at in (0, SIZE // 2):
                data = bytes([version]) * (SIZE // 2)
                put_piece(write, Piece(at, 1, SIZE // 2, SIZE // 2, 1), data)
            return
        begin = publisher.rank * share
        write.view()[begin : begin + share] = version


def newest(bus: str) -> int:
    """The newest version, which has to be whole."""
    with PoolReader(bus, "weights") as reader, reader.latest(timeout=5) as lease:
        found = lease.view()
        check_patch(lease)
        assert (found == lease.version).all(), f"version {lease.version} is torn"
        return lease.version


def check_patch(lease: VersionLease) -> None:
    """A patch leads from its base to the version, whoever has made it."""
    patch = lease.patch()
    if patch is not None:
        before = np.full(SIZE, patch.base_version, np.uint8)
        assert all(patch.apply(run, before) for run in patch.runs), f"of version {lease.version}"
        assert (before == lease.version).all(), f"the patch of version {lease.version} is torn"


def start(bus: str, kind: str, point: str, hit: int, action: str) -> subprocess.Popen[bytes]:
    text = "import sys\nfrom pool_points import *\nbus = sys.argv[1]\n" + CHILDREN[kind]
    env = {**os.environ, "SHMBUS_FAILPOINT": f"{point}:{hit}:{action}"}
    return subprocess.Popen([sys.executable, "-c", text, bus], env=env, stderr=subprocess.PIPE)


def await_signal(child: subprocess.Popen[bytes], action: str) -> bool:
    """Whether the child was killed, or stopped, as it should have been."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            return action == "kill" and child.returncode == -signal.SIGKILL
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return action == "stop"
        time.sleep(0.005)
    return False


def lead(bus: str) -> list[str]:
    """Publish as rank 0 until the other rank is gone."""
    try:
        with PoolPublisher(bus, "weights", world_size=2, timeout=2.0) as publisher:
            for version in (2, 3, 4):
                publish(publisher, version)
    except PoolError as error:
        return [type(error).__name__]
    return []


def case(bus: str, kind: str, point: str, hit: int, action: str) -> dict[str, object]:
    """One death or stop, and what is left."""
    faults: list[str] = []
    with PoolPublisher(bus, "weights", spec=SPEC) as publisher:
        publish(publisher, 1)
    child = start(bus, kind, point, hit, action)
    try:
        ends = lead(bus) if kind == "rank" else []
        signalled = await_signal(child, action)
        before = newest(bus)
        stopped = kind in ("publisher", "patcher") and action == "stop"
        if stopped:
            child.kill()
            child.wait()
        with PoolPublisher(bus, "weights", timeout=5.0) as successor:
            for version in (before + 1, before + 2):
                publish(successor, version, patch=kind == "patcher")
                if newest(bus) != version:
                    faults.append(f"version {version} did not become the newest")
        if kind == "rank" and ends == [] and point != "pool-piece-done":
            faults.append("rank 0 published without its other rank")
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error}")
        signalled = True
    finally:
        child.kill()
        child.wait()
    left = read_pool(bus, "weights")
    faults += [
        f"{reader.label} is still there" for reader in left.readers if reader.state != "dead"
    ]
    unlink_pool(bus, "weights")
    said = {"point": point, "hit": hit, "action": action}
    return {**said, "signalled": signalled, "faults": faults}


def main() -> None:
    """Print one line a case."""
    bus, kind = sys.argv[1], sys.argv[2].rstrip(":")
    for point in POINTS[kind]:
        for hit in (1,) if point.endswith("claimed") else (1, 2):
            for action in ("kill", "stop"):
                print(json.dumps(case(bus, kind, point, hit, action)), flush=True)


if __name__ == "__main__":
    main()
