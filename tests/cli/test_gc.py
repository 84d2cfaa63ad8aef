"""``shmbus gc`` and ``shmbus list``: a bus in use is never touched, in any state."""

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner, wait_until
from operators import WORKER, cli, header_offset, put_group, segment_path, write_at

import shmbus
from shmbus.inspect import leftovers
from shmbus_ext import _core

HANDLE = """
import sys, time, shmbus
bus = shmbus.Bus.create(sys.argv[1], "1MiB") if sys.argv[2] == "create" else shmbus.Bus.open(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""  # noqa: E501
CONSUMER = """
import sys, time, shmbus
consumer = shmbus.Consumer(sys.argv[1], label="trainer")
print("ready", flush=True)
time.sleep(600)
"""


def found(name: str) -> dict[str, Any]:
    (row,) = cli("gc", name, "--json").json()
    assert isinstance(row, dict)
    return row


def test_an_abandoned_bus_is_removed_only_with_yes(bus_name: str, spawn: Spawner) -> None:
    shmbus.Bus.create(bus_name, "4MiB").close()
    worker = spawn.script(WORKER, bus_name, 3, "w", until="ready")
    assert found(bus_name)["verdict"] == "in_use"
    assert "nothing" not in cli("gc", f"{bus_name}-none").out
    worker.kill()
    look = cli("gc", bus_name)
    assert look.status == 0
    assert "abandoned" in look.out
    assert "13 undelivered trajectories (3 complete groups) would be lost" in look.out
    assert "`shmbus gc --yes` would remove 1 file" in look.out
    assert segment_path(bus_name).exists()
    kept = cli("gc", bus_name, "--yes", "--keep-data")
    assert (kept.status, segment_path(bus_name).exists()) == (0, True)
    done = cli("gc", bus_name, "--yes")
    assert (done.status, segment_path(bus_name).exists()) == (0, False)
    assert "removed 1 file" in done.out


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("user", ["creator", "handle", "producer", "consumer"])
def test_a_bus_in_use_is_untouched(bus_name: str, spawn: Spawner, user: str, stopped: bool) -> None:
    if user != "creator":
        shmbus.Bus.create(bus_name, "1MiB").close()
    child = {
        "creator": lambda: spawn.script(HANDLE, bus_name, "create"),
        "handle": lambda: spawn.script(HANDLE, bus_name, "open"),
        "producer": lambda: spawn.script(WORKER, bus_name, 1, "w"),
        "consumer": lambda: spawn.script(CONSUMER, bus_name),
    }[user]()
    child.expect("ready")
    if stopped:
        child.send_signal(signal.SIGSTOP)
    assert found(bus_name)["verdict"] == "in_use"
    result = cli("gc", bus_name, "--yes")
    assert result.status == 0
    assert "in use" in result.out and "nothing to remove" in result.out
    assert segment_path(bus_name).exists()
    child.kill()
    assert found(bus_name)["verdict"] == "removable"


def test_a_forked_child_does_not_keep_the_bus_in_use(bus_name: str, spawn: Spawner) -> None:
    child = spawn.script(
        "import os, sys, time, shmbus\n"
        "bus, creator = shmbus.Bus.create(sys.argv[1], '1MiB'), os.getpid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "while os.getppid() == creator: time.sleep(0.01)\n"
        "print('orphaned', flush=True)\n"
        "time.sleep(5)",
        bus_name,
    )
    wait_until(lambda: "orphaned" in child.output(), what="the forked child")
    assert found(bus_name)["verdict"] == "removable"


def test_a_segment_being_removed_is_not_opened(bus_name: str, spawn: Spawner) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    fd = os.open(segment_path(bus_name), os.O_RDWR)
    assert _core.lock_all(fd)
    opener = spawn.script(
        "import sys, shmbus\n"
        "print('started', flush=True)\n"
        "try:\n"
        "    shmbus.Bus.open(sys.argv[1])\n"
        "    print('opened')\n"
        "except shmbus.BusNotFoundError:\n"
        "    print('not found')",
        bus_name,
        until="started",
    )
    segment_path(bus_name).unlink()
    os.close(fd)
    assert opener.finish().splitlines() == ["started", "not found"]


def test_a_segment_that_was_spared_after_all_is_opened(bus_name: str) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    fd = os.open(segment_path(bus_name), os.O_RDWR)
    assert _core.lock_all(fd)
    threading.Timer(0.1, os.close, [fd]).start()
    with shmbus.Bus.open(bus_name) as bus:
        assert bus.capacity == 2**20


def test_who_came_between_the_look_and_the_removal_is_left_alone(bus_name: str) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    (leftover,) = [row for row in leftovers.survey() if row.name == bus_name]
    assert leftover.verdict == "removable"
    with shmbus.Bus.open(bus_name), pytest.raises(shmbus.BusBusyError, match="begun to use it"):
        leftovers.remove(leftover)
    shmbus.unlink(bus_name)
    with pytest.raises(FileNotFoundError):
        leftovers.remove(leftover)
    shmbus.Bus.create(bus_name, "1MiB").close()
    with pytest.raises(shmbus.BusBusyError):
        leftovers.remove(leftover)
    assert segment_path(bus_name).exists()


def test_segments_of_other_layouts_are_removable_and_say_what_is_unknown(bus_name: str) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    write_at(bus_name, header_offset("layout_version"), (99).to_bytes(4, "little"))
    row = found(bus_name)
    assert row["verdict"] == "removable"
    assert "layout version 99" in row["reason"]
    assert row["undelivered"] is None
    assert cli("gc", bus_name, "--yes", "--keep-data").status == 0
    assert segment_path(bus_name).exists()
    fd = os.open(segment_path(bus_name), os.O_RDWR)
    assert _core.lock_all(fd)  # whatever byte a living process of another version locks
    assert found(bus_name)["verdict"] == "in_use"
    os.close(fd)
    assert cli("gc", bus_name, "--yes").status == 0
    assert not segment_path(bus_name).exists()


def test_unfinished_and_truncated_segments_are_removable(bus_name: str) -> None:
    path = segment_path(bus_name)
    path.touch()
    assert "never finished it" in found(bus_name)["reason"]
    assert cli("gc", bus_name, "--yes").status == 0
    assert not path.exists()
    shmbus.Bus.create(bus_name, "1MiB").close()
    os.truncate(path, 200_000)
    assert found(bus_name)["verdict"] == "removable"
    assert cli("gc", bus_name, "--yes").status == 0
    assert not path.exists()


def test_what_is_not_recognisably_ours_is_left_alone(bus_name: str, tmp_path: Path) -> None:
    path = segment_path(bus_name)
    path.write_bytes(b"somebody else's notes" * 1000)
    assert found(bus_name)["verdict"] == "unknown"
    assert cli("gc", bus_name, "--yes").status == 0
    assert path.exists()
    path.unlink()
    target = tmp_path / "target"
    target.touch()
    path.symlink_to(target)
    assert cli("gc", bus_name, "--yes").status == 0
    assert path.is_symlink() and target.exists()
    path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_another_users_segment_is_named_as_not_ours(bus_name: str) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    os.chown(segment_path(bus_name), 65534, 65534)
    row = found(bus_name)
    assert row["verdict"] == "not_ours"
    assert row["owner"] in row["reason"]
    assert cli("gc", bus_name, "--yes").status == 0
    assert segment_path(bus_name).exists()


@pytest.mark.parametrize("mark", ["-", "+"])
def test_a_socket_is_abandoned_when_nobody_listens(bus_name: str, mark: str) -> None:
    path = Path(f"/dev/shm/shmbus{mark}{bus_name}.sock")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            assert found(bus_name)["verdict"] == "in_use"
            assert cli("gc", bus_name, "--yes").status == 0
            assert path.exists()
        assert found(bus_name)["verdict"] == "removable"
        assert "nobody listens" in cli("gc", bus_name, "--yes").out
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_a_full_backlog_is_a_living_daemon(bus_name: str) -> None:
    path = Path(f"/dev/shm/shmbus-{bus_name}.sock")
    try:
        with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as clients:
            server.bind(str(path))
            server.listen(0)
            for _ in range(4):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect_ex(str(path))
            assert found(bus_name)["verdict"] == "in_use"
    finally:
        path.unlink(missing_ok=True)


def test_a_name_without_a_file_is_an_error_and_the_rest_is_done(bus_name: str) -> None:
    shmbus.Bus.create(bus_name, "1MiB").close()
    result = cli("gc", bus_name, bus_name + ".none", "--yes")
    assert result.status == 1
    assert bus_name + ".none" in result.err
    assert not segment_path(bus_name).exists()
    assert cli("gc", bus_name).out == ""


def test_odd_file_names_are_shown_and_steer_no_terminal(bus_name: str) -> None:
    raw = os.fsencode(segment_path(bus_name)) + b".\x1b[2J\xff"
    fd = os.open(raw, os.O_CREAT | os.O_RDWR, 0o600)
    os.close(fd)
    try:
        result = cli("gc")
        assert result.status == 0
        assert f"{bus_name}.\\x1b[2J\\udcff" in result.out
        assert "\x1b" not in result.out
        rows = cli("gc", "--json").json()
        assert f"{bus_name}.\\x1b[2J\\udcff" in [row["name"] for row in rows]
        assert "\\x1b[2J" in cli("list").out
    finally:
        os.unlink(raw)


def test_list_shows_every_bus_and_why_one_cannot_be_read(bus_name: str) -> None:
    broken = bus_name + ".broken"
    shmbus.Bus.create(broken, "1MiB").close()
    write_at(broken, header_offset("layout_version"), (99).to_bytes(4, "little"))
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Producer(bus_name) as producer:
        put_group(producer, "a")
        with shmbus.Consumer(bus_name, label="trainer"):
            rows = {row["name"]: row for row in cli("list", "--json").json()}
            assert rows[bus_name]["capacity"] == 4 * 2**20
            assert rows[bus_name]["undelivered"] == 4
            assert rows[bus_name]["producers"] == 1
            assert rows[bus_name]["collector"].startswith("trainer (pid ")
            assert "layout version 99" in rows[broken]["problem"]
            text = cli("list")
            assert text.status == 0
            assert "trainer" in text.out and "layout version 99" in text.out


#: Maps a file as an engine does; no tracker of Python removes the file after the kill.
MAPPER = """
import mmap, sys, time
with open(sys.argv[1], "wb+") as file:
    file.write(bytes(1 << 20))
    memory = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_dead_engines_shared_memory_is_reported_and_kept(bus_name: str, spawn: Spawner) -> None:
    path = f"/dev/shm/psm_{bus_name}"
    engine = spawn.script(MAPPER, path, until="ready")
    try:
        assert path not in [row["path"] for row in cli("gc", "--json").json()]
        engine.kill()
        [row] = [row for row in cli("gc", "--json").json() if row["path"] == path]
        assert (row["verdict"], row["size"]) == ("unknown", 1 << 20)
        assert f"rm {path}" in row["reason"]
        findings = {row["check"]: row for row in cli("doctor", "--quick", "--json").json()}
        assert findings["foreign_files"]["level"] == "warn"
        assert Path(path).exists()
    finally:
        Path(path).unlink(missing_ok=True)
