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
from weight_models import Odd, bits, many, same

from shmbus import BusBusyError, DamagedError, WaitTimeoutError
from shmbus.pool import read_pool
from shmbus.pool.lifecycle import pool_path
from shmbus.segment.names import memory_socket
from shmbus.tensors.copy_plan import split
from shmbus.tensors.copy_table import LARGE_BYTES
from shmbus.weights import (
    ManifestError,
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


@pytest.mark.parametrize("make", [Odd, lambda seed=0: many(300, seed)])
def test_every_bit_of_a_model_arrives(
    make: Callable[..., torch.nn.Module], publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    model, replica = make(seed=1), make(seed=2)
    publisher = publishers(model, digests=True)
    for version in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.element_size() > 1:
                    parameter.add_(version)
        publisher.publish(version=version)
        with subscriber.latest(timeout=5) as weights:
            assert weights.version == version
            assert weights.load_into(replica) > 0
            weights._open().verify(sample=False)
        assert same(model, replica)


def test_readers_rows_and_versions_are_those_of_shm(
    bus_name: str, publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    publisher = publishers(many(5))
    assert publisher.carrier.name == "memfd"
    publisher.publish(version=7, text="step 7")
    with subscriber.latest(timeout=5) as weights:
        assert weights.text == "step 7"
        weights.load_into(many(5, seed=3))
        status = read_pool(bus_name, "weights")
        assert status.version == 7
        assert [(row.label, row.applied_version) for row in status.readers] == [("replica", 7)]
        assert [slot.held_by != [] for slot in status.slots if slot.newest] == [True]
    assert status.size < 1 << 20


def test_a_view_keeps_its_slot_and_its_bytes(
    publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    model = many(5)
    publisher = publishers(model, when_held="skip")
    publisher.publish(version=1)
    with subscriber.latest(timeout=5) as weights:
        view = weights["p3"]
    before = bits(view)
    with torch.no_grad():
        model.p3.zero_()  # type: ignore[operator]
    assert not publisher.publish(version=2).skipped
    assert publisher.publish(version=3).skipped
    assert bits(view) == before
    del view
    assert not publisher.publish(version=4).skipped


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


def test_a_second_publisher_is_refused(bus_name: str, publishers: MakePublisher) -> None:
    publishers(many(3)).publish(version=1)
    with pytest.raises(BusBusyError, match="is rank 0 already"):
        publishers(many(3))
    with WeightSubscriber(bus_name) as reader:
        reader.latest(timeout=5).close()


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


def test_a_model_that_changed_is_compared_again(
    publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    model, replica = many(4, seed=1), many(4, seed=2)
    publisher = publishers(model)
    for version in range(6):  # each slot, and again
        with torch.no_grad():
            model.p2.add_(1)  # type: ignore[operator]
        publisher.publish(version=version)
        with subscriber.latest(timeout=5) as weights:
            weights.load_into(replica)
        assert same(model, replica)
    model.p1 = torch.nn.Parameter(model.p1.detach() * 2)  # type: ignore[operator]
    replica.p2.data = torch.zeros_like(replica.p2)  # type: ignore[assignment, arg-type]
    publisher.publish(version=6)
    with subscriber.latest(timeout=5) as weights:
        weights.load_into(replica)
        assert same(model, replica)
        replica.p3 = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
        with pytest.raises(ManifestError, match="shape of 'p3'"):
            weights.load_into(replica)
    model.p3 = torch.nn.Parameter(torch.zeros(1, 99, dtype=torch.bfloat16))
    with pytest.raises(WeightsError, match="make a new publisher when the model changes"):
        publisher.publish(version=7)
