"""What others leave in /dev/shm under a bus's name is refused at once, and named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawner

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.cli import main

SHM = Path("/dev/shm")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def place(bus_name: str):  # type: ignore[no-untyped-def]
    path = SHM / f"shmbus.{bus_name}"
    yield path
    if path.is_dir():
        path.rmdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "sparse"])
@needs_root
def test_what_another_user_planted_is_refused_at_once_by_its_owner(
    bus_name: str, place: Path, kind: str
) -> None:
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
    else:
        with place.open("wb") as file:
            file.truncate(1 << 40)
    os.chown(place, 65534, 65534)
    for attach in (Producer, Consumer, Bus.open):
        with pytest.raises(PermissionError, match="belongs to uid 65534"):
            attach(bus_name)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_what_is_no_file_is_no_bus(bus_name: str, place: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
    for attach in (Producer, Consumer, Bus.open):
        with pytest.raises(shmbus.LayoutMismatchError, match="not a file of shmbus"):
            attach(bus_name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["status", "snapshot", "pause", "inspect", "gc", "list"])
def test_no_command_ends_in_a_traceback_over_a_directory(
    bus_name: str, place: Path, command: str, spawn: Spawner, tmp_path: Path
) -> None:
    place.mkdir()
    arguments = [] if command in ("gc", "list") else [bus_name]
    if command == "snapshot":
        arguments.append(str(tmp_path / "s"))
    child = spawn.module("shmbus.cli", command, *arguments)
    child.wait()
    assert "Traceback" not in child.output()


def test_control_characters_never_reach_a_terminal_raw(bus_name: str) -> None:
    with Bus.create(bus_name, "256KiB", max_producers=1) as bus:
        with Producer(bus_name, label="evil\x1b[2J\nname") as producer:
            with pytest.raises(shmbus.BusBusyError) as busy:
                Producer(bus_name)
            bus.pause("stop\x1b[2J\nINJECTED")
            with pytest.raises(shmbus.BusFullError) as full:
                producer.put("a", group_size=1, index=0, tokens=np.arange(3), timeout=0)
            bus.resume()
            with pytest.raises(shmbus.BusFullError) as crowded:
                for _ in range(100_000):
                    producer.put("a", group_size=9, index=0, tokens=np.arange(99), timeout=0)
        with Consumer(bus_name, label="who\x1b[0m"), pytest.raises(shmbus.BusBusyError) as taken:
            Consumer(bus_name, daemon=False)
    for caught in (busy, full, crowded, taken):
        text = str(caught.value)
        assert text.isprintable(), text
    assert "INJECTED" in str(full.value)


def test_the_commands_exist() -> None:
    assert main(["list"]) == 0
