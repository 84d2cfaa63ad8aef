"""What another user, or a mistake, leaves in the place of a daemon's socket: it is named."""

import logging
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawner, wait_until
from operators import cli

import shmbus
from shmbus.control.ask import ask_status
from shmbus.inspect.status import read_status

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

PLANT = f"""
import os, socket, sys
path, kind = sys.argv[1:]
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
if kind == "socket":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.chmod(path, 0o777)
    print("there", flush=True)
    import time; time.sleep(600)
elif kind == "directory":
    os.mkdir(path)
elif kind == "file":
    open(path, "w").close()
elif kind == "symbolic link":
    os.symlink("/dev/null", path)
elif kind == "FIFO":
    os.mkfifo(path)
"""
KINDS = ("socket", "directory", "file", "symbolic link", "FIFO")


def plant(spawn: Spawner, name: str, kind: str) -> Path:
    path = Path(f"/dev/shm/shmbus-{name}.sock")
    child = spawn.script(PLANT, path, kind)
    if kind == "socket":
        child.expect("there")
    else:
        child.finish()
    return path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_an_embedded_consumer_goes_on_beside_what_another_user_left(
    bus_name: str, spawn: Spawner, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = plant(spawn, bus_name, kind)
    try:
        with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
            with shmbus.Consumer(bus_name) as consumer:
                producer.put("a", group_size=1, index=0, data=np.arange(3))
                assert len(consumer.take(timeout=10)) == 1
            said = caplog.messages[0]
            assert f"{path} is a {kind} of uid {NOBODY} (nobody), and no daemon" in said
            assert ask_status(bus_name) is None
            assert read_status(bus_name).daemon is None
            with pytest.raises(shmbus.DaemonUnavailableError, match=f"a {kind} of uid {NOBODY}"):
                shmbus.Consumer(bus_name, daemon=True)
    finally:
        remove(path)


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_another_users_daemon_is_named(bus_name: str, spawn: Spawner, kind: str) -> None:
    """Nobody's daemon, and what root has left."""
    path = Path(f"/dev/shm/shmbus-{bus_name}.sock")
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        leave(path, kind)
    script = (
        f"import os, sys; import shmbus.cli.serve; os.setgroups([]); os.setgid({NOBODY});"
        f"os.setuid({NOBODY}); sys.exit(shmbus.cli.main(['serve', sys.argv[1]]))"
    )
    try:
        child = spawn.script(script, bus_name)
        assert child.wait() == 1
        said = child.output()
        assert "Traceback" not in said, said
        assert f"its daemon cannot listen: {path} is a {kind} of uid 0 (root)" in said
        assert f"{path}, as uid 0 (root) or root), or choose another name" in said
        assert not Path(f"/dev/shm/shmbus.{bus_name}").exists()
    finally:
        remove(path)


def leave(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.touch()
    elif kind == "symbolic link":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(path)


def test_a_directory_of_ones_own_is_told_with_the_command_that_removes_it(bus_name: str) -> None:
    path = Path(f"/dev/shm/shmbus-{bus_name}.sock")
    path.mkdir()
    try:
        result = cli("serve", bus_name)
        assert result.status == 1
        assert f"is a directory of this user (uid {os.geteuid()})" in result.err
        assert f"remove it (rm -r {path})" in result.err
    finally:
        path.rmdir()


@needs_root
def test_root_serves_in_place_of_a_socket_that_another_user_left(
    bus_name: str, spawn: Spawner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plant(spawn, bus_name, "socket")
    child = spawn.module("shmbus.cli", "serve", bus_name, "--capacity", "1MiB")
    wait_until(lambda: " serving " in child.output() or not child.running)
    with shmbus.Consumer(bus_name, daemon=True) as consumer:
        assert consumer.stats().balanced
    assert not caplog.messages
