"""What the commands say of slot pools beside a bus."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Spawner
from operators import cli

import shmbus
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, unlink_pool
from shmbus.pool.pool_file import pool_path
from shmbus.pool.pool_status import find_pools

TRAINER = """
import sys, time
from shmbus.pool import PoolPublisher, PoolSpec
with PoolPublisher(sys.argv[1], "weights", spec=PoolSpec(slot_bytes=4096)) as publisher:
    with publisher.begin(7, 4096) as write:
        write.view()[:] = 7
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def weights(bus_name: str) -> Iterator[PoolPublisher]:
    with (
        shmbus.Bus.create(bus_name, "1MiB"),
        PoolPublisher(bus_name, "weights", spec=PoolSpec(slot_bytes=4096)) as publisher,
    ):
        with publisher.begin(12, 4096) as write:  # type: ignore[union-attr]
            write.view()[:] = 1
        yield publisher
        publisher.close(remove=True)


def test_status_and_list_say_what_weights_there_are(bus_name: str, weights: PoolPublisher) -> None:
    with PoolReader(bus_name, "weights", label="replica") as reader:
        with reader.latest(timeout=5) as lease:
            reader.applied(lease)
        text = cli("status", bus_name).out
        assert "weights: version 12, " in text and "1 reader, all run it" in text
        assert f"publisher pid {os.getpid()}" in text
        (pool,) = cli("status", bus_name, "--json").json()["pools"]  # type: ignore[call-overload, index]
        assert (pool["kind"], pool["version"]) == ("weights", 12)
        assert f"  {bus_name}: weights: version 12" in cli("list").out
        rows = cli("list", "--json").json()
        (row,) = [row for row in rows if row["name"] == bus_name]  # type: ignore[index, union-attr, call-overload]
        assert row["pools"][0]["readers"][0]["label"] == "replica"  # type: ignore[index, call-overload]


def test_a_version_refused_by_a_reader_is_found(bus_name: str, weights: PoolPublisher) -> None:
    del weights
    with PoolReader(bus_name, "weights", label="replica") as reader:
        with reader.latest(timeout=5) as lease:
            reader.refused(lease, 3, "no room on the device")
        assert "without that version; replica refused version 12" in cli("status", bus_name).out


def test_top_has_a_row_for_weights(bus_name: str, weights: PoolPublisher) -> None:
    del weights
    assert "weights: version 12" in cli("top", bus_name).out


def test_weights_whose_trainer_died_are_listed_and_collected(bus_name: str, spawn: Spawner) -> None:
    trainer = spawn.script(TRAINER, bus_name, until="ready")
    assert "in_use" in str(cli("gc", bus_name, "--json").json())
    trainer.kill()
    assert find_pools(bus_name) == [(bus_name, "weights")]
    assert f"{bus_name}: weights: version 7" in cli("list").out
    assert "(died); no readers" in cli("list").out
    assert "removed 1 file" in cli("gc", bus_name, "--yes").out
    assert find_pools(bus_name) == [] and not Path(pool_path(bus_name, "weights")).exists()


def test_files_that_are_no_pools_are_left_out(bus_name: str) -> None:
    path = Path(pool_path(bus_name, "weights"))
    path.write_bytes(b"SHBPOOL1" + bytes(100))
    try:
        assert find_pools(bus_name) == [(bus_name, "weights")]
        assert bus_name not in cli("list").out
        path.write_bytes(b"something else")
        assert find_pools(bus_name) == []
    finally:
        unlink_pool(bus_name, "weights")
