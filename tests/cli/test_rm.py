"""``shmbus rm``: a bus goes with all its files, or nothing goes; never under somebody's feet."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner, segments_named, wait_until
from operators import WORKER, cli, segment_path

import shmbus
from shmbus.pool import PoolSpec, create_pool
from shmbus.segment.names import companion_name


def files_of(name: str) -> list[str]:
    return sorted(file for file in os.listdir("/dev/shm") if name in file)


def leave_companions(name: str) -> None:
    create_pool(name, "weights", PoolSpec(slot_bytes=4096))
    Path("/dev/shm" + companion_name("gateway", name)).write_bytes(b"state")


def test_a_bus_goes_with_its_companions(bus_name: str, spawn: Spawner) -> None:
    shmbus.Bus.create(bus_name, "4MiB").close()
    leave_companions(bus_name)
    worker = spawn.script(WORKER, bus_name, 3, "w", until="ready")
    worker.kill()
    done = cli("rm", bus_name)
    assert (done.status, files_of(bus_name)) == (0, []), done.err
    assert f"removed bus '{bus_name}' and 2 files that went with it" in done.out
    assert "13 undelivered trajectories are lost" in done.out


def test_nothing_goes_while_somebody_has_the_bus_open(bus_name: str, spawn: Spawner) -> None:
    shmbus.Bus.create(bus_name, "4MiB").close()
    leave_companions(bus_name)
    before = files_of(bus_name)
    spawn.script(WORKER, bus_name, 1, "w").expect("ready")
    refused = cli("rm", bus_name)
    assert (refused.status, files_of(bus_name)) == (1, before)
    assert "1 living producer" in refused.err and "--force" in refused.err
    assert cli("rm", "--force", bus_name).status == 0
    assert files_of(bus_name) == []


def test_by_force_who_has_it_open_is_told(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        assert cli("rm", "--force", bus_name).status == 0
        with pytest.raises(shmbus.BusRemovedError):
            producer.put("a", group_size=1, index=0, tokens=[1], timeout=5)


def test_a_forced_removal_ends_a_daemon(bus_name: str, daemon: Callable[..., Any]) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    served = daemon()
    assert "a daemon listens on it" in cli("rm", bus_name).err
    assert cli("rm", "--force", bus_name).status == 0
    served.child.finish()
    wait_until(lambda: files_of(bus_name) == [], what="the daemon's socket to go")


def test_force_removes_a_killed_daemons_files(bus_name: str, daemon: Callable[..., Any]) -> None:
    served = daemon("--capacity", "1MiB")
    leave_companions(bus_name)
    served.kill()
    assert f"shmbus-{bus_name}.sock" in files_of(bus_name)
    done = cli("rm", "--force", bus_name)
    assert (done.status, files_of(bus_name)) == (0, []), done.err


def test_an_unknown_bus_is_named_and_keeps_no_other_from_going(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        missing = cli("rm", bus_name[:-1])
        assert missing.status == 1
        assert f"there is no bus '{bus_name[:-1]}' to remove" in missing.err
        assert f"did you mean '{bus_name}'?" in missing.err
        assert segment_path(bus_name).exists()
    shmbus.Bus.create(bus_name, "1MiB").close()
    assert (cli("rm", f"{bus_name}-none", bus_name).status, segments_named(bus_name)) == (1, [])


def test_servers_that_were_left_paused_keep_their_note(bus_name: str) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    note = Path("/dev/shm" + companion_name("fleet", bus_name))
    note.write_bytes(b"paused")
    try:
        refused = cli("rm", bus_name)
        assert refused.status == 1 and f"shmbus weights {bus_name} --resume" in refused.err
        assert note.exists() and segment_path(bus_name).exists()
    finally:
        note.unlink()


def test_another_kind_of_file_under_the_name_is_never_removed(bus_name: str) -> None:
    segment_path(bus_name).mkdir()
    try:
        assert cli("rm", "--force", bus_name).status == 1
        assert segment_path(bus_name).is_dir()
    finally:
        segment_path(bus_name).rmdir()


def test_the_buses_of_its_annotators_go_with_a_bus(bus_name: str, spawn: Spawner) -> None:
    columns = f"{bus_name}.columns.ref_logprobs"
    for name in (bus_name, columns):
        shmbus.Bus.create(name, "1MiB").close()
    worker = spawn.script(WORKER, columns, 1, "w", until="ready")
    refused = cli("rm", bus_name)
    assert (refused.status, len(files_of(bus_name))) == (1, 2) and columns in refused.err
    worker.kill()
    done = cli("rm", bus_name)
    assert (done.status, files_of(bus_name)) == (0, []), done.err
    shmbus.Bus.create(columns, "1MiB").close()  # the trainer's bus went before
    assert (cli("rm", bus_name).status, files_of(bus_name)) == (0, [])
