"""Publishers and readers that are killed at any moment: nothing torn, nothing starved."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Child, Spawner, wait_until

from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, read_pool, unlink_pool
from shmbus.pool.lifecycle import pool_path

KIND = "weights"
SIZE = 1 << 20
STORM_S = 6.0

# Each word of a version is its number, written with a pause in the middle, so that kills meet it.
PUBLISHER = """
import sys, time, numpy as np
from shmbus import BusBusyError, WaitTimeoutError
from shmbus.pool import PoolPublisher, PoolSpec
while True:
    try:
        spec = PoolSpec(slot_bytes=1 << 20, slots=3)
        publisher = PoolPublisher(sys.argv[1], "weights", spec=spec)
        break
    except BusBusyError:
        time.sleep(0.002)
print("ready", flush=True)
version = publisher.pool.newest()
while True:
    version += 1
    with publisher.begin(version, 1 << 20, meta=b"%d" % version) as write:
        words = write.view().view(np.uint64)
        words[: len(words) // 2] = version
        time.sleep(0.001)
        words[len(words) // 2 :] = version
        del words
        write.finish(digests=True)
"""

READER = """
import sys, numpy as np
from shmbus.pool import PoolReader
reader = PoolReader(sys.argv[1], "weights")
print("ready", flush=True)
after, reads = 0, 0
while True:
    with reader.latest(timeout=20) as lease:
        words = lease.view().view(np.uint64)
        torn = int((words != lease.version).sum())
        if torn or lease.meta() != b"%d" % lease.version or lease.sequence < after:
            print("FAULT", torn, lease.version, lease.sequence, after, flush=True)
        lease.check()
        after = lease.sequence
        reader.applied(lease)
        del words
    reads += 1
    if reads % 20 == 0:
        print("reads", reads, flush=True)
"""


@pytest.mark.timeout(120)
def test_kills_of_publishers_and_readers_tear_and_starve_nothing(
    bus_name: str, spawn: Spawner, seed: int
) -> None:
    rng = random.Random(seed)
    children: dict[str, Child] = {}
    everyone: list[Child] = []
    kills = 0

    def start(name: str) -> None:
        text = PUBLISHER if name == "publisher" else READER
        children[name] = spawn.script(text, bus_name)
        everyone.append(children[name])

    start("publisher")
    children["publisher"].expect("ready")
    wait_until(lambda: read_pool(bus_name, KIND).version)
    for name in ("reader-1", "reader-2"):
        start(name)
    for child in children.values():
        child.expect("ready")
    end = time.monotonic() + STORM_S
    # A busy machine starts few of them in that time.
    while time.monotonic() < end or kills <= 10:
        time.sleep(rng.uniform(0, 0.15))
        name = rng.choice(sorted(children))
        if "ready" in children[name].output():
            children[name].kill()
            kills += 1
            start(name)
    for name, child in children.items():
        child.expect("ready")
        if name != "publisher":
            wait_until(lambda child=child: "reads" in child.output() or not child.running)
    last = read_pool(bus_name, KIND)
    wait_until(lambda: (read_pool(bus_name, KIND).published) > last.published)
    for child in children.values():
        assert child.running, child.output()
        child.kill()
    assert not [child.output() for child in everyone if "FAULT" in child.output()]
    with PoolReader(bus_name, KIND) as reader, reader.latest(timeout=5) as lease:
        lease.check()
        assert (lease.view().view(np.uint64) == lease.version).all()
    unlink_pool(bus_name, KIND)


def test_a_reader_that_is_killed_frees_its_slot_and_a_stopped_one_keeps_it(
    bus_name: str, spawn: Spawner
) -> None:
    reader_text = (
        "import sys, time\nfrom shmbus.pool import PoolReader\n"
        'reader = PoolReader(sys.argv[1], "weights", label="slow")\n'
        'lease = reader.latest(timeout=20)\nprint("leased", flush=True)\ntime.sleep(600)'
    )
    spec = PoolSpec(slot_bytes=SIZE, slots=2)
    with PoolPublisher(bus_name, KIND, spec=spec, when_held="skip") as publisher:
        write = publisher.begin(1, SIZE)
        assert write is not None
        write.finish()
        child = spawn.script(reader_text, bus_name)
        child.expect("leased")
        child.send_signal(signal.SIGSTOP)
        write = publisher.begin(2, SIZE)
        assert write is not None
        write.finish()
        assert publisher.begin(3, SIZE) is None
        assert "slow" in str(read_pool(bus_name, KIND).slots)
        child.kill()
        write = publisher.begin(4, SIZE)
        assert write is not None
        write.finish()
        (row,) = read_pool(bus_name, KIND).readers
        assert (row.state, row.pid) == ("dead", child.pid)
        publisher.close(remove=True)
    assert not Path(pool_path(bus_name, KIND)).exists()
