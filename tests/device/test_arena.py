"""Buffers that grow while others read them: by generation, in host memory, on any machine."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Spawner, open_descriptors, wait_until

from shmbus.inspect.leftovers import remove, survey
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import (
    Arena,
    ArenaView,
    BufferLostError,
    allocator,
    fetch_descriptor,
)
from shmbus.tensors.device.memory import NO_UUID, DeviceHandle, HostMemory
from shmbus.tensors.tensor_sender import Completion


@pytest.fixture
def place(bus_name: str) -> str:
    return memory_socket("channel", bus_name)


@pytest.fixture
def arena(place: str) -> Iterator[Arena]:
    made = Arena(place, allocator("memfd"))
    yield made
    made.close()
    assert not os.path.exists(place)


def test_what_was_replaced_can_be_mapped_until_it_is_let_go_of(arena: Arena, place: str) -> None:
    first, tensor = arena.buffer(0, 10)
    tensor.fill_(1)
    second, _ = arena.buffer(0, 20)
    assert second.generation > first.generation
    assert (arena.replaced, arena.nbytes) == (True, 30)
    view = ArenaView(place)
    assert view.memory(first).tensor().tolist() == [1] * 10
    arena.buffer(1, 5)
    with pytest.raises(RuntimeError, match="expected let_go"):
        arena.buffer(1, 6)
    arena.let_go()
    assert (arena.replaced, arena.nbytes) == (False, 25)
    kept = view.memory(first).tensor()  # mapped memory stays mapped
    with pytest.raises(BufferLostError, match="not there any more"):
        ArenaView(place).memory(first)
    assert view.memory(second).nbytes == 20
    assert kept.tolist() == [1] * 10


def test_no_generation_of_a_successor_is_one_of_the_dead_owners(place: str) -> None:
    names = set()
    for _ in range(5):
        arena = Arena(place, allocator("memfd"))
        names |= {arena.buffer(number, 8)[0].generation for number in range(3)}
        arena.close()
    assert len(names) == 15


def test_a_question_that_is_none_is_refused(arena: Arena, place: str) -> None:
    with pytest.raises(ValueError, match="expected a buffer's name"):
        fetch_descriptor(place, b"\x80\x04cposix\nsystem\n", 5.0)


def test_a_failed_allocation_leaves_what_was_there(bus_name: str) -> None:
    def allocate(nbytes: int) -> HostMemory:
        if nbytes > 100:
            raise OSError(errno.ENOMEM, "no memory")
        return HostMemory.allocate(nbytes)

    arena = Arena(memory_socket("channel", bus_name), allocate)
    name, _ = arena.buffer(0, 10)
    with pytest.raises(OSError, match="no memory"):
        arena.buffer(0, 1000)
    assert arena.buffer(0, 10)[0] == name
    arena.close()


def test_host_memory_that_is_not_what_it_says_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0 bytes"):
        HostMemory.allocate(0)
    small = os.memfd_create("small")
    try:
        with pytest.raises(ValueError, match="expected a file of 4096 bytes, got one of 0"):
            HostMemory.open(DeviceHandle("memfd", NO_UUID, 4096, 4096), small)
    finally:
        os.close(small)
    with pytest.raises(ValueError, match="expected a file descriptor"):
        HostMemory.open(DeviceHandle("memfd", NO_UUID, 4096, 4096), None)


def test_a_thousand_buffers_leave_no_descriptor_and_no_mapping(arena: Arena, place: str) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:shmbus")

    view = ArenaView(place)
    for size in range(1, 1002):
        assert view.memory(arena.buffer(0, size)[0]).nbytes == size
        arena.let_go()
        if size == 1:
            before, mappings = open_descriptors(), mapped()
    # The last answering threads close their connections a moment after their askers have read.
    wait_until(lambda: not open_descriptors() - before and mapped() <= mappings)


def test_what_an_action_raises_is_raised_where_its_end_is_awaited() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    completion = Completion()
    with pytest.raises(ZeroDivisionError):
        completion.after(torch.device("cpu"), fail)
    done: list[int] = []
    completion.after(torch.device("cpu"), lambda: done.append(1))
    completion.close()
    completion.close()
    assert done == [1]


OWNER = """
import sys, time
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import Arena, allocator
arena = Arena(memory_socket("channel", sys.argv[1]), allocator("memfd"))
print("listens", flush=True)
time.sleep(600)
"""


def test_an_owners_socket_is_in_use_while_it_lives(bus_name: str, spawn: Spawner) -> None:
    path = memory_socket("channel", bus_name)

    def verdict() -> str:
        return next(found.verdict for found in survey() if found.path == path)

    child = spawn.script(OWNER, bus_name, until="listens")
    assert verdict() == "in_use"
    child.kill()
    assert verdict() == "removable"
    remove(next(found for found in survey() if found.path == path))
    assert not os.path.exists(path)
