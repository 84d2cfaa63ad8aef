"""Powers of another user of the machine (docs/security.md), with real uids: needs root."""

import ast
import os
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawner

import shmbus

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

# The extension and its imports are loaded while that is still allowed.
BECOME_NOBODY = f"""
import os, sys, numpy as np, shmbus
from shmbus import Bus, Consumer, Producer
name = sys.argv[1]
path = "/dev/shm/shmbus." + name
shmbus.Bus.create(name + ".warm", "64KiB").unlink()
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
def denied(action, *kinds):
    try:
        action()
    except kinds as error:
        return str(error)
    raise AssertionError("allowed: " + repr(action))
"""


@needs_root
def test_another_user_can_touch_no_bus(bus_name: str, spawn: Spawner) -> None:
    script = (
        BECOME_NOBODY
        + """
for attach in (shmbus.Producer, shmbus.Consumer, shmbus.Bus.open):
    assert "uid" in denied(lambda: attach(name), PermissionError)
denied(lambda: open(path, "rb"), PermissionError)
denied(lambda: open(path, "r+b"), PermissionError)
denied(lambda: os.truncate(path, 0), PermissionError)
denied(lambda: os.unlink(path), PermissionError)
denied(lambda: os.rename(path, path + ".x"), PermissionError)
denied(lambda: os.chmod(path, 0o666), PermissionError)
denied(lambda: shmbus.unlink(name), PermissionError)
denied(lambda: shmbus.Bus.create(name, "1MiB"), PermissionError, shmbus.BusExistsError)
denied(lambda: os.kill(os.getppid(), 9), PermissionError)
denied(lambda: os.listdir(f"/proc/{os.getppid()}/fd"), PermissionError)
denied(lambda: open(f"/proc/{os.getppid()}/mem", "rb"), PermissionError)
"""
    )
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        producer.put("a", group_size=1, index=0, data=np.arange(9))
        spawn.script(script, bus_name).finish()
        with shmbus.Consumer(bus_name) as consumer:
            (group,) = consumer.take(timeout=5)
            assert (group[0]["data"] == np.arange(9)).all()
            group.ack()


@needs_root
def test_a_bus_that_another_user_planted_is_refused(bus_name: str, spawn: Spawner) -> None:
    """Its owner could read puts, and end every mapping process by truncation."""
    script = (
        BECOME_NOBODY
        + """
shmbus.Bus.create(name, "1MiB")
os.chmod(path, 0o666)
"""
    )
    spawn.script(script, bus_name).finish()
    for attach in (shmbus.Producer, shmbus.Consumer):
        with pytest.raises(PermissionError, match=f"belongs to uid {NOBODY}"):
            attach(bus_name)
    with pytest.raises(shmbus.BusExistsError):
        shmbus.Bus.create(bus_name, "1MiB")


def test_control_characters_never_reach_a_terminal_raw(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "256KiB", max_producers=1) as bus:
        with shmbus.Producer(bus_name, label="evil\x1b[2J\nname") as producer:
            with pytest.raises(shmbus.BusBusyError) as busy:
                shmbus.Producer(bus_name)
            bus.pause("stop\x1b[2J\nINJECTED")
            with pytest.raises(shmbus.BusFullError) as full:
                producer.put("a", group_size=1, index=0, tokens=np.arange(3), timeout=0)
            bus.resume()
            with pytest.raises(shmbus.BusFullError) as crowded:
                for _ in range(100_000):
                    producer.put("a", group_size=9, index=0, tokens=np.arange(99), timeout=0)
        with (
            shmbus.Consumer(bus_name, label="who\x1b[0m"),
            pytest.raises(shmbus.BusBusyError) as taken,
        ):
            shmbus.Consumer(bus_name, daemon=False)
    for caught in (busy, full, crowded, taken):
        text = str(caught.value)
        assert text.isprintable(), text
    assert "INJECTED" in str(full.value)


def test_a_segment_is_created_for_its_user_only(bus_name: str) -> None:
    before = os.umask(0)
    try:
        with shmbus.Bus.create(bus_name, "64KiB"):
            assert Path(f"/dev/shm/shmbus.{bus_name}").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


#: Modules, functions and options by which bytes become objects of the sender's choice. A
#: connection of multiprocessing unpickles whatever comes.
UNPICKLES = re.compile(
    r"_?c?pickle|marshal|shelve|dill|cloudpickle|joblib|yaml|multiprocessing(\..*)?|eval|exec"
    r"|(np|numpy|torch)\.load|allow_pickle"
)


def test_no_module_that_reads_a_segment_or_a_socket_knows_pickle_or_eval() -> None:
    offences = []
    for package in ("shmbus", "trainer_adapter"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    names = [node.func.id]
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    names = [f"{node.value.id}.{node.attr}"]
                elif isinstance(node, ast.keyword):
                    names = [node.arg or ""]
                if any(UNPICKLES.fullmatch(name) for name in names):
                    offences.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offences == []
