"""A pool with any bytes: an error or a checked version, never a crash."""

import random
import sys
from pathlib import Path

from conftest import Spawner

from shmbus import errors
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, read_pool
from shmbus.pool.pool_file import pool_path

ROUNDS = 3000
TABLES = 4096 + 8 * 256 + 64 * 256 + 128 * 256


def use(bus: str, *, write: bool) -> bool:
    got = False
    read_pool(bus, "fuzz")
    with PoolReader(bus, "fuzz") as reader, reader.latest(timeout=0) as lease:
        assert len(memoryview(lease.buffer)) <= 4096
        lease.meta()
        lease.check()
        reader.applied(lease)
        got = True
    if write:
        with PoolPublisher(bus, "fuzz", timeout=0, when_held="grow") as publisher:
            taken = publisher.begin(9, 4096, meta=b"x")
            if taken is not None:
                taken.view()[:] = 9
                taken.finish(digests=True)
    return got


def mutate(rng: random.Random, image: bytes) -> bytes:
    data = bytearray(image)
    for _ in range(rng.randint(1, 6)):
        at = rng.choice([rng.randrange(0, 420), rng.randrange(4096, 4096 + 600),
                         rng.randrange(TABLES)])  # fmt: skip
        width = rng.choice([1, 2, 4, 8])
        value = rng.choice([0, 1, 255, 1 << 31, (1 << 64) - 1, rng.getrandbits(64)])
        data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data))]
    return bytes(data)


def main(bus: str, seed: int) -> None:
    rng = random.Random(seed)
    path = Path(pool_path(bus, "fuzz"))
    spec = PoolSpec(slot_bytes=4096, slots=2, max_slots=3, meta_bytes=64)
    with PoolPublisher(bus, "fuzz", spec=spec) as publisher:
        for version in (1, 2):
            with publisher.begin(version, 4096, meta=b"meta") as write:  # type: ignore[union-attr]
                write.finish(digests=True)
    image = path.read_bytes()
    good = bad = 0
    for _ in range(ROUNDS):
        path.unlink()
        path.write_bytes(mutate(rng, image))
        path.chmod(0o600)
        try:
            good += use(bus, write=rng.random() < 0.5)
        except (errors.ShmbusError, ValueError):
            bad += 1
    path.unlink()
    print("done", good > 0, bad > 0)


def test_no_bytes_of_a_pool_crash_a_reader(bus_name: str, spawn: Spawner, seed: int) -> None:
    text = "import sys; sys.path.insert(0, sys.argv[3]); import test_pool_fuzz as t\n"
    text += "import shmbus.pool.pool_file as l; l.OPEN_WAIT_S = 0\n"
    text += "t.main(sys.argv[1], int(sys.argv[2]))"
    here = str(Path(__file__).parent)
    child = spawn.script(text, bus_name, seed, here, env={"PYTHONPATH": ":".join(sys.path)})
    assert child.finish(timeout=120).endswith("done True True\n")
