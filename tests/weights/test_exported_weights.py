"""Whole versions in exported memory: by a memfd, on any machine.

`test_cuda_weights.py` has the same of a GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Spawner, open_descriptors, wait_until
from weight_models import many

from shmbus import DamagedError, WaitTimeoutError
from shmbus.pool import read_pool
from shmbus.pool.lifecycle import pool_path
from shmbus.segment.names import memory_socket
from shmbus.tensors.copy_plan import split
from shmbus.tensors.copy_table import LARGE_BYTES
from shmbus.weights import (
    ModuleSource,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
    probe_carriers,
)
from shmbus.weights.carriers.exported import ExportedWriter, OwnBuffers, Placed, block_sums
from shmbus.weights.carriers.pool import PoolWriter

MakePublisher = Callable[..., WeightPublisher]

PUBLISHER = """
import sys, time, torch
from shmbus.weights import *
model = torch.nn.Linear(40, 40)
publisher = WeightPublisher(sys.argv[1], ModuleSource(model), carrier="memfd")
for version in range(int(sys.argv[2]), int(sys.argv[3])):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(version)
    publisher.publish(version=version)
print("published", flush=True)
time.sleep(600)
"""

READER = """
import sys, time, torch
from shmbus.weights import *
subscriber = WeightSubscriber(sys.argv[1], label="slow")
weights = subscriber.latest(timeout=30)
view = weights["weight"]
print("holds", weights.version, flush=True)
time.sleep(600)
"""


@pytest.fixture
def publishers(bus_name: str) -> Iterator[MakePublisher]:
    """Make publishers of one bus; nothing of them is left after the test."""
    made: list[WeightPublisher] = []

    def make(model: torch.nn.Module, **options: object) -> WeightPublisher:
        options = {"carrier": "memfd", **options}
        made.append(WeightPublisher(bus_name, ModuleSource(model), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
    assert not os.path.exists(memory_socket("weights", bus_name))
    Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)


@pytest.fixture
def subscriber(bus_name: str) -> Iterator[WeightSubscriber]:
    with WeightSubscriber(bus_name, label="replica") as made:
        yield made


def test_a_pool_grows_by_a_buffer(bus_name: str, publishers: MakePublisher, spawn: Spawner) -> None:
    publisher = publishers(torch.nn.Linear(40, 40), when_held="grow", max_slots=3, timeout=0.2)
    publisher.publish(version=1)
    child = spawn.script(READER, bus_name)
    child.expect("holds 1")
    for version in range(2, 5):
        publisher.publish(version=version)
    writer = publisher._writer
    assert isinstance(writer, PoolWriter) and isinstance(writer.memory, ExportedWriter)
    buffers = writer.memory.buffers
    assert isinstance(buffers, OwnBuffers)
    assert len(buffers._arena._buffers) == 3
    child.kill()


@pytest.mark.timeout(60)
def test_a_killed_or_stopped_reader_decides_as_with_shm(
    bus_name: str, publishers: MakePublisher, spawn: Spawner
) -> None:
    publisher = publishers(torch.nn.Linear(40, 40), timeout=0.3)
    publisher.publish(version=1)
    child = spawn.script(READER, bus_name)
    child.expect("holds 1")
    child.send_signal(signal.SIGSTOP)
    publisher.publish(version=2)
    with pytest.raises(WaitTimeoutError, match="slow"):
        publisher.publish(version=3)
    child.kill()
    publisher.publish(version=3)


@pytest.mark.timeout(90)
def test_a_killed_publisher_leaves_its_versions_to_readers_that_have_them_and_a_successor(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(PUBLISHER, bus_name, 1, 3)
    child.expect("published")
    with WeightSubscriber(bus_name) as attached, WeightSubscriber(bus_name) as late:
        attached.latest(timeout=5).close()
        child.kill()
        with attached.latest(timeout=5) as weights:
            assert weights.version == 2
            assert bool((weights["weight"] == 2).all())
        with pytest.raises(WeightsError, match="lay in the memory of its publisher, which has end"):
            late.latest(timeout=0.05)
        successor = spawn.script(PUBLISHER, bus_name, 5, 6)
        for reader in (attached, late):
            assert reader.wait(newer_than=2, timeout=30) == 5
            with reader.latest(timeout=5) as weights:
                assert bool((weights["weight"] == 5).all())
        successor.kill()
    Path(pool_path(bus_name, "weights")).unlink()
    Path(memory_socket("weights", bus_name)).unlink()


def test_a_scribble_is_found_by_the_digests(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers(torch.nn.Linear(64, 64), digests=True)
    publisher.publish(version=1)
    writer = publisher._writer
    assert isinstance(writer, PoolWriter) and isinstance(writer.memory, ExportedWriter)
    buffers = writer.memory.buffers
    assert isinstance(buffers, OwnBuffers)
    with WeightSubscriber(bus_name, verify="all") as reader:
        reader.latest(timeout=5).close()
        buffers._arena.buffer(0, 1)[1][100] ^= 1
        with pytest.raises(DamagedError, match="do not match their digest"):
            reader.latest(timeout=5)
    rows = read_pool(bus_name, "weights").readers
    assert rows == []


@pytest.mark.parametrize("carrier", ["cuda_vmm", "cuda_ipc"])
def test_a_device_carrier_needs_a_device_and_says_so(
    carrier: str, publishers: MakePublisher
) -> None:
    with pytest.raises(WeightsError, match=f"carrier '{carrier}' cannot serve here: it needs a CU"):
        publishers(many(3), carrier=carrier)


def test_the_probe_names_what_it_does_not_choose_by_itself() -> None:
    refused = probe_carriers("cpu").refused
    assert "ask for it by name" in refused["memfd"]
    assert "needs a CUDA device, got 'cpu'" in refused["cuda_vmm"]
    assert "needs a CUDA device, got 'cpu'" in refused["cuda_ipc"]


def test_a_hundred_publishers_leave_nothing_behind(
    publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:shmbus")

    for version in range(100):
        publisher = publishers(many(2))
        publisher.publish(version=version)
        with subscriber.latest(timeout=5) as weights:
            weights.load_into(many(2, seed=1))
        publisher.close()
        if version == 0:
            before, mappings = open_descriptors(), mapped()
    wait_until(lambda: not open_descriptors() - before and mapped() <= mappings)


def test_small_tensors_of_a_device_go_together_and_large_ones_alone() -> None:
    small, large = torch.zeros(8), torch.zeros(LARGE_BYTES // 4)
    alone, together = split([(small, small), (large, large)])
    assert (len(alone), together) == (2, [])  # of the CPU nothing is launched


def test_a_digest_knows_a_change_and_an_exchange() -> None:
    payload = torch.arange(4096).to(torch.uint8)
    sums = block_sums(payload)
    changed = payload.clone()
    changed[9] += 1
    exchanged = payload.view(torch.int64).clone()
    exchanged[[3, 4]] = exchanged[[4, 3]]
    assert len({sums[0], block_sums(changed)[0], block_sums(exchanged.view(torch.uint8))[0]}) == 3


def test_a_slot_that_does_not_say_where_its_bytes_are_is_torn() -> None:
    for data in (b"", bytes(64), b"\x05\x00\x00\x00\x80\x04cpo"):
        with pytest.raises(DamagedError, match="does not say where its bytes are"):
            Placed.decode(data)
