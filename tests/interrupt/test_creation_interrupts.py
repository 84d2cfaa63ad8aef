"""A Ctrl-C while a segment is created ends as one, and leaves nothing in /dev/shm."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import open_descriptors

import shmbus
from shmbus.channel import endpoint as channels
from shmbus.pool import pool_file as pools

#: Bytes that take some milliseconds to allocate.
SIZE = 64 << 20
TRIES = 40


class CtrlC(BaseException):
    """Raised by a handler."""


def bus(name: str) -> Any:
    return shmbus.Bus.create(name, SIZE)


def pool(name: str) -> Any:
    return pools.create_handle(name, "weights", pools.PoolSpec(slots=2, slot_bytes=SIZE // 2))


def channel(name: str) -> Any:
    return channels.companion_of(name).create(name, 0, 8, 1 << 20)


#: The file of each, and seconds before a signal: before, within, behind the creation.
FILES = {
    bus: (lambda name: f"/dev/shm/shmbus.{name}", 0.03),
    pool: (lambda name: pools.pool_path(name, "weights"), 0.03),
    channel: (channels.channel_path, 0.0005),
}


@pytest.fixture
def armed() -> Iterator[list[bool]]:
    """Whether the next signal raises: a handler may run some steps behind its signal."""
    state = [False]

    def handler(*_: object) -> None:
        if state[0]:
            raise CtrlC

    before = signal.signal(signal.SIGALRM, handler)
    yield state
    state[0] = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("create", FILES)
def test_an_interrupted_creation_leaves_no_file_and_no_other_error(
    create: Callable[[str], Any], bus_name: str, seed: int, armed: list[bool]
) -> None:
    random_s = random.Random(seed)
    path_of, latest_s = FILES[create]
    path = path_of(bus_name)
    for _ in range(TRIES):
        before = open_descriptors()
        made, armed[0] = None, True
        try:
            signal.setitimer(signal.ITIMER_REAL, random_s.uniform(1e-5, latest_s))
            made = create(bus_name)
            armed[0] = False
        except CtrlC:
            pass
        finally:
            armed[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if made is not None:
            made.close()
            os.unlink(path)
        assert not os.path.lexists(path)
        made = None
        assert not open_descriptors() - before
