"""Device memory between processes, on a GPU: whole, whoever closes or dies first."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbus import DeviceMismatchError
from shmbus.tensors.device import driver, memory
from shmbus.tensors.device.arena import fetch_descriptor
from shmbus.tensors.device.driver import CudaDriverError
from shmbus.tensors.device.memory import (
    DeviceHandle,
    DeviceMemory,
    Kind,
    device_of,
    refusals,
    uuid_of,
)

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
gpu = pytest.mark.gpu
KINDS: tuple[Kind, ...] = ("vmm", "ipc")
BYTES = 5_000_001

EXPORTER = """
import sys, time, torch
from shmbus.tensors.device.arena import DescriptorServer
from shmbus.tensors.device.memory import DeviceMemory
path, kind, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
memory = DeviceMemory.allocate(nbytes, 0, kind)
memory.tensor().copy_(torch.arange(nbytes, device="cuda").remainder(251).to(torch.uint8))
torch.cuda.synchronize()
def give(question):
    return memory.handle.encode(), memory.descriptor() if kind == "vmm" else None
server = DescriptorServer(path, give)
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        memory.close()
        del memory
        print("closed", flush=True)
    if line.strip() == "sum":
        print(int(memory.tensor().long().sum()), flush=True)
"""


def pattern(nbytes: int, device: int = 0) -> torch.Tensor:
    return torch.arange(nbytes, device=f"cuda:{device}").remainder(251).to(torch.uint8)


class Exporter:
    def __init__(self, path: str, kind: Kind) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, path, kind, str(BYTES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.expect("ready")

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def open(self, **options: object) -> DeviceMemory:
        message, descriptor = fetch_descriptor(self.path, b"", 20.0)
        try:
            return DeviceMemory.open(DeviceHandle.decode(message), descriptor, **options)  # type: ignore[arg-type]
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()  # closes its pipes


@pytest.fixture(params=KINDS)
def exporter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Exporter]:
    exporter = Exporter(str(tmp_path / "socket"), request.param)
    yield exporter
    exporter.kill()


@gpu
def test_another_process_reads_the_same_bytes(exporter: Exporter) -> None:
    memory = exporter.open()
    assert memory.nbytes == BYTES
    assert torch.equal(memory.tensor(), pattern(BYTES))


@gpu
def test_a_tensor_outlives_the_handle_that_it_came_from(exporter: Exporter) -> None:
    memory = exporter.open()
    tensor = memory.tensor()[1000:2000]
    memory.close()
    memory.close()
    del memory
    assert torch.equal(tensor, pattern(BYTES)[1000:2000])


@gpu
def test_what_is_written_where_it_may_be_is_seen_by_its_owner(exporter: Exporter) -> None:
    memory = exporter.open(writable=True)
    memory.tensor().fill_(1)
    torch.cuda.synchronize()
    exporter.say("sum")
    exporter.expect(str(BYTES))


@gpu
def test_memory_exported_by_descriptor_outlives_its_exporter(tmp_path: Path) -> None:
    exporter = Exporter(str(tmp_path / "socket"), "vmm")
    memory = exporter.open()
    exporter.say("close")
    exporter.expect("closed")
    assert torch.equal(memory.tensor(), pattern(BYTES))
    exporter.kill()
    assert torch.equal(memory.tensor(), pattern(BYTES))


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_cycles_leave_the_device_as_it_was(kind: Kind) -> None:
    def cycle() -> None:
        memory = DeviceMemory.allocate(3 << 20, 0, kind)
        if kind == "vmm":
            os.close(memory.descriptor())
        memory.tensor()[:10].fill_(1)
        memory.close()

    def free() -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))

    for _ in range(10):
        cycle()
    before = free()
    for _ in range(1000):
        cycle()
    assert free() == before


@gpu
def test_opening_a_thousand_times_leaves_the_device_as_it_was(exporter: Exporter) -> None:
    found = []
    # The driver takes a page of its own in the first thousand, in some runs.
    for _ in range(2):
        for _ in range(1000):
            exporter.open().tensor()
        found.append((torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))))
    assert found[1] == found[0]


@gpu
def test_a_descriptor_of_something_else_is_refused() -> None:
    handle = DeviceMemory.allocate(100, 0).handle
    other = os.memfd_create("no device memory")
    try:
        with pytest.raises(CudaDriverError, match="cuMemImportFromShareableHandle"):
            DeviceMemory.open(handle, other)
    finally:
        os.close(other)
    with pytest.raises(ValueError, match="a file descriptor"):
        DeviceMemory.open(handle)


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_may_open_what_it_has_allocated_itself(kind: Kind) -> None:
    memory = DeviceMemory.allocate(100, 0, kind)
    descriptor = memory.descriptor() if kind == "vmm" else None
    again = DeviceMemory.open(memory.handle, descriptor)
    if descriptor is not None:
        os.close(descriptor)
    memory.tensor().fill_(7)
    memory.close()
    torch.cuda.synchronize()
    assert again.tensor().tolist() == [7] * 100


@gpu
def test_more_than_the_device_has_is_refused_with_the_drivers_word() -> None:
    with pytest.raises(CudaDriverError, match="OUT_OF_MEMORY"):
        DeviceMemory.allocate(1 << 43, 0)
    DeviceMemory.allocate(100, 0).tensor().fill_(0)
    torch.cuda.synchronize()


@gpu
def test_the_memory_of_an_unseen_device_is_refused_by_its_uuid() -> None:
    assert device_of(uuid_of(0)) == 0
    with pytest.raises(DeviceMismatchError, match="CUDA_VISIBLE_DEVICES"):
        device_of(bytes(16))


@gpu
@needs_two
def test_another_device_reads_it_over_peer_access(tmp_path: Path) -> None:
    exporter = Exporter(str(tmp_path / "socket"), "vmm")
    try:
        memory = exporter.open(device=1)
        assert memory.device == torch.device("cuda", 1)
        assert torch.equal(memory.tensor(), pattern(BYTES, 1))
    finally:
        exporter.kill()


@gpu
def test_the_probe_names_no_refusal_on_a_device_that_has_both() -> None:
    assert refusals(0) == {}


def test_without_a_driver_the_probe_says_so_for_each_kind() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    found = refusals(0)
    assert found.keys() == {"vmm", "ipc"}
    assert "no CUDA driver" in found["vmm"]


def test_an_empty_allocation_is_refused_before_the_driver_is_asked() -> None:
    with pytest.raises(ValueError, match="more than 0 bytes"):
        DeviceMemory.allocate(0, 0)


@pytest.mark.parametrize("writable", [True, False])
def test_a_mapping_is_for_each_device(monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    given: list[tuple[int, int]] = []

    def call(name: str, *arguments: Any) -> None:
        if name == "cuMemSetAccess":
            _, _, access, count = arguments
            assert len(access._obj) == count
            given.extend((each.location.id, each.flags) for each in access._obj)

    monkeypatch.setattr(memory, "call", call)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one != 2)
    mapping = memory._Mapping(1, 2 << 20)
    mapping.map_vmm(7, writable=writable)
    mapping.reserved = mapping.address = mapping.handle = 0  # nothing to unmap
    flags = driver.ACCESS_READ_WRITE if writable else driver.ACCESS_READ
    assert given == [(device, flags) for device in ((1, 0, 3) if writable else (1,))]
