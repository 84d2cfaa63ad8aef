"""Publishers and readers that are killed at any moment: nothing torn, nothing starved."""

import signal
from pathlib import Path

from conftest import Spawner

from shmbus.pool import PoolPublisher, PoolSpec, read_pool
from shmbus.pool.pool_file import pool_path

KIND = "weights"
SIZE = 1 << 20


def test_a_killed_reader_frees_its_slot_a_stopped_one_not(bus_name: str, spawn: Spawner) -> None:
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
