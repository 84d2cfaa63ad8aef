"""Planted files under the names of our files are not followed, awaited, written or believed."""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbus import Bus, CapacityError, LayoutMismatchError, Producer
from shmbus.channel.endpoint import channel_path, companion_of
from shmbus.engines.pause_note import PauseNote, paused_by
from shmbus.errors import WeightsError
from shmbus.gateway.journal import Journal
from shmbus.inspect.processes import servers_left
from shmbus.inspect.status import read_status
from shmbus.pool.pool_file import open_pool, pool_path
from shmbus.segment.names import companion_name, shm_path
from shmbus.segment.recorder_files import RecorderFile
from shmbus.weights.manifest import Manifest
from shmbus.weights.single_copy import SharedFile, open_file, shared_state
from trainer_adapter import LogprobMismatch, OnlineDataHandler

NOBODY = 65534
SECRET = b"of the victim" * 1000

#: Files that strangers may plant: place, and opener. Openers that would make a missing file come
#: last.
Use = Callable[[str, Path], Any]
OPENED: dict[str, tuple[Callable[[str, Path], str], Use]] = {
    "bus": (lambda bus, _: shm_path(f"{bus}.planted"), lambda bus, _: Producer(f"{bus}.planted")),
    "pool": (lambda bus, _: pool_path(bus, "weights"), lambda bus, _: open_pool(bus, "weights")),
    "channel": (lambda bus, _: channel_path(bus), lambda bus, _: companion_of(bus).open(bus)),
    "pause note, read": (lambda bus, _: companion("fleet", bus), lambda bus, _: paused_by(bus)),
    "shared weights": (lambda bus, _: companion("shared", bus), lambda bus, _: open_file(bus, 0)),
    "shared weights, looked at": (
        lambda bus, _: companion("shared", bus),
        lambda bus, _: shared_state(bus),
    ),
    "shared weights, replaced": (
        lambda bus, _: companion("shared", bus),
        lambda bus, _: SharedFile(bus).made(Manifest(tensors=()), 1).__enter__(),
    ),
}
MADE: dict[str, tuple[Callable[[str, Path], str], Use]] = {
    "pause note": (lambda bus, _: companion("fleet", bus), lambda bus, _: PauseNote(bus)),
    "recorder": (lambda bus, _: companion("recordera", bus), lambda bus, _: RecorderFile(bus)),
    "gateway": (lambda bus, _: companion("gateway", bus), lambda bus, _: Journal(Bus.open(bus))),
}


def companion(kind: str, bus: str) -> str:
    return "/dev/shm" + companion_name(kind, bus)


def plant_link(path: str, victim: Path) -> None:
    os.symlink(victim, path)


def plant_dangling_link(path: str, victim: Path) -> None:
    os.symlink(victim.with_name("not-there"), path)


def plant_folder(path: str, victim: Path) -> None:
    os.mkdir(path)


def plant_fifo(path: str, victim: Path) -> None:
    os.mkfifo(path)


def plant_socket(path: str, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


def plant_of_another_user(path: str, victim: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    Path(path).write_bytes(SECRET)
    os.chmod(path, 0o666)
    os.chown(path, NOBODY, NOBODY)


def plant_second_name(path: str, victim: Path) -> None:
    os.link(victim, path)


PLANTS = [
    plant_link,
    plant_dangling_link,
    plant_folder,
    plant_fifo,
    plant_socket,
    plant_of_another_user,
]


@pytest.fixture
def folder(bus_name: str) -> Iterator[Path]:
    """A folder in /dev/shm, for non-companions and a victim's file."""
    made = Path(f"/dev/shm/shmbus-planted.{bus_name}")
    made.mkdir()
    yield made
    with ExitStack() as stack:
        stack.callback(made.rmdir)
        for each in made.iterdir():
            (each.rmdir if each.is_dir() and not each.is_symlink() else each.unlink)()


CASES = [(name, plant) for name in {**OPENED, **MADE} for plant in PLANTS]
CASES += [(name, plant_second_name) for name in MADE]


@pytest.mark.parametrize(
    ("name", "plant"), CASES, ids=[f"{name} - {plant.__name__[6:]}" for name, plant in CASES]
)
def test_what_is_planted_is_refused_by_its_name_and_stays_as_it_is(
    name: str, plant: Callable[[str, Path], None], bus: Bus, folder: Path
) -> None:
    place, use = {**OPENED, **MADE}[name]
    path = place(bus.name, folder)
    victim = folder / "victim"
    victim.write_bytes(SECRET)
    plant(path, victim)
    before = os.lstat(path)
    try:
        with pytest.raises((PermissionError, LayoutMismatchError, WeightsError)) as caught:
            use(bus.name, folder)
        assert path in str(caught.value)
        if plant is plant_of_another_user:
            assert f"belongs to uid {NOBODY}" in str(caught.value)
            assert Path(path).read_bytes() == SECRET
        after = os.lstat(path)
        assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
        assert victim.read_bytes() == SECRET
        assert not victim.with_name("not-there").exists()
    finally:
        (os.rmdir if plant is plant_folder else os.unlink)(path)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_note_is_idle(plant: Callable[[str, Path], None], bus: Bus, folder: Path) -> None:
    path = companion("fleet", bus.name)
    victim = folder / "victim"
    victim.write_bytes(SECRET)
    plant(path, victim)
    try:
        assert not servers_left(bus.name)
    finally:
        (os.rmdir if plant is plant_folder else os.unlink)(path)


def test_a_gateway_without_memory_names_its_file(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=companion("gateway", bus.name)):
        Journal(bus)
    os.unlink(companion("gateway", bus.name))


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_note_breaks_neither_a_status_nor_the_note_of_a_run(
    plant: Callable[[str, Path], None], bus: Bus, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = companion("trainer", bus.name)
    (folder / "victim").write_bytes(SECRET)
    plant(path, folder / "victim")
    figures = LogprobMismatch(*torch.ones(7))
    try:
        with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
            handler.note_mismatch(figures)
            handler.note_mismatch(figures)
            assert handler.metrics()["mismatch/mean"] == 1
            assert read_status(bus.name).mismatch is None
        [record] = [each for each in caplog.records if each.name.startswith("trainer_adapter")]
        assert path in record.getMessage()
    finally:
        (os.rmdir if plant is plant_folder else os.unlink)(path)
