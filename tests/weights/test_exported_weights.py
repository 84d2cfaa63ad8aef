"""Whole versions in exported memory: a memfd on any machine, device memory on a GPU."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Spawner, open_descriptors, wait_until
from weight_models import MakePublisher, Odd, load_newest, many, published, publishing, same

from shmbus import CapacityError, DamagedError, WaitTimeoutError
from shmbus.pool import read_pool
from shmbus.pool.pool_file import pool_path
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
from shmbus.weights.carriers.exported import ExportedWriter, OwnBuffers, Placed
from shmbus.weights.carriers.pool_writer import PoolWriter

GPU = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEVICE = "cuda:0"
VMM, IPC, SHM = (pytest.param(name, marks=GPU) for name in ("cuda_vmm", "cuda_ipc", "shm"))
in_each_memory = pytest.mark.parametrize("carrier", ["memfd", VMM, IPC])
to_a_device = pytest.mark.parametrize("carrier", [VMM, IPC, SHM])


def place(carrier: str) -> str:
    """Return the device of a model for this carrier's versions."""
    return "cpu" if carrier == "memfd" else DEVICE


SYNCS = int(os.environ.get("SHMBUS_CUDA_SYNCS", "100"))

READER = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from weight_models import many, same
from shmbus.weights import *
bus, device, last = sys.argv[2], sys.argv[3], int(sys.argv[4])
replica, wanted = many(300, seed=9).to(device), many(300, seed=1).to(device)
have, want = ([each.detach() for each in model.parameters()] for model in (replica, wanted))

def free_bytes():
    torch.cuda.synchronize(); torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())]

free = None
with WeightSubscriber(bus, device=device, label="replica") as subscriber:
    version, wrong = 0, 0
    print("ready", flush=True)
    while version < last:
        version = subscriber.wait(newer_than=version, timeout=60)
        with subscriber.latest(timeout=5) as weights:
            weights.load_into(replica)
            version = weights.version
            # One question: two processes take turns on a device for each.
            expected = torch.cat([each.view(-1) for each in torch._foreach_add(want, version)])
            wrong += not torch.equal(torch.cat([each.view(-1) for each in have]), expected)
        del expected
        if free is None and version >= last // 2:
            free = free_bytes()
    grown = sum(max(0, before - now) for before, now in zip(free, free_bytes()))
    print("read to", version, "wrong", wrong, "grown", grown, flush=True)
"""

HOLDER = """
import sys, time, torch
from shmbus.weights import *
subscriber = WeightSubscriber(sys.argv[1], device=sys.argv[2], label="slow")
weights = subscriber.latest(timeout=60)
view = next(iter(weights.values()))
print("holds", weights.version, flush=True)
time.sleep(600)
"""

PUBLISHER = """
import sys, time, torch
from shmbus.weights import *
bus, carrier, device = sys.argv[1:4]
model = torch.nn.Linear(40, 40, device=device)
publisher = WeightPublisher(bus, ModuleSource(model), carrier=carrier, device=device)
for version in range(int(sys.argv[4]), int(sys.argv[5])):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(version)
    publisher.publish(version=version)
print("published", flush=True)
time.sleep(600)
"""

BLIND = """
import sys, torch
from shmbus.errors import DeviceMismatchError
from shmbus.weights import *
bus = sys.argv[1]
assert torch.cuda.device_count() == 1
replica = torch.nn.Linear(40, 50, device="cuda:0")
before = replica.weight.detach().clone()
with WeightSubscriber(bus, device="cuda:0", label="blind") as subscriber:
    try:
        subscriber.latest(timeout=20)
    except DeviceMismatchError as error:
        print("refused", error, flush=True)
        assert torch.equal(replica.weight, before)
    else:
        load_newest(subscriber, replica)
print("sum", float(replica.weight.detach().double().sum()), flush=True)
"""


@pytest.fixture
def publishers(bus_name: str) -> Iterator[MakePublisher]:
    with publishing(bus_name) as make:

        def exported(
            model: torch.nn.Module, carrier: str = "memfd", **options: object
        ) -> WeightPublisher:
            if carrier.startswith("cuda"):
                options = {"device": DEVICE, **options}
            return make(model, carrier=carrier, **options)

        yield exported
    assert not os.path.exists(memory_socket("weights", bus_name))


def buffers_of(publisher: WeightPublisher) -> OwnBuffers:
    writer = publisher._writer
    assert isinstance(writer, PoolWriter) and isinstance(writer.memory, ExportedWriter)
    buffers = writer.memory.buffers
    assert isinstance(buffers, OwnBuffers)
    return buffers


@pytest.mark.parametrize(
    ("carrier", "device"),
    [
        ("shm", "cpu"),
        ("memfd", "cpu"),
        *(pytest.param(each, DEVICE, marks=GPU) for each in ("cuda_vmm", "cuda_ipc", "shm")),
    ],
)
@pytest.mark.parametrize(
    "make", [Odd, lambda seed=0: many(300, seed), lambda seed=0: many(1000, seed)]
)
def test_every_bit_of_a_model_arrives(
    carrier: str,
    device: str,
    make: Callable[..., torch.nn.Module],
    bus_name: str,
    publishers: MakePublisher,
) -> None:
    model, replica = make(seed=1).to(device), make(seed=2).to(device)
    assert not same(model, replica)
    publisher = publishers(model, carrier)
    with WeightSubscriber(bus_name, device=device) as subscriber:
        for version in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point() and parameter.element_size() > 1:
                        parameter.add_(version)
            told = publisher.publish(version=version)
            assert (told.version, told.skipped) == (version, False)
            with subscriber.latest(timeout=5) as weights:
                assert weights.version == version
                assert weights.load_into(replica) > 0
            assert same(model, replica)


@to_a_device
def test_large_and_cast_ones_arrive(carrier: str, bus_name: str, publishers: MakePublisher) -> None:
    torch.manual_seed(0)
    masters = torch.nn.Sequential(*(torch.nn.Linear(2048, 2000 + n) for n in range(3)))
    replica = torch.nn.Sequential(*(torch.nn.Linear(2048, 2000 + n) for n in range(3)))
    source = ModuleSource(masters, dtype=torch.bfloat16)
    replica = replica.to(DEVICE, torch.bfloat16)
    there = {"device": DEVICE}
    options = {"carrier": carrier} | ({} if carrier == "shm" else there)
    with published(bus_name, source, there, **options) as (publisher, subscriber):
        publisher.publish(version=0)
        load_newest(subscriber, replica)
        for have, want in zip(replica.parameters(), masters.parameters(), strict=True):
            assert torch.equal(have.cpu(), want.bfloat16())
        host = torch.nn.Sequential(*(torch.nn.Linear(2048, 2000 + n) for n in range(3))).bfloat16()
        load_newest(subscriber, host)
        assert same(host, replica)


@pytest.mark.timeout(250)
@to_a_device
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=needs_two)])
def test_another_process_loads_versions_in_flat_memory(
    carrier: str, device: str, bus_name: str, publishers: MakePublisher, spawn: Spawner
) -> None:
    model = many(300, seed=1).to(DEVICE)
    live = [parameter.detach() for parameter in model.parameters()]
    start = [each.clone() for each in live]
    publisher = publishers(model, carrier, timeout=60)
    child = spawn.script(READER, str(Path(__file__).parent), bus_name, device, SYNCS)
    for version in range(1, SYNCS + 1):
        torch._foreach_copy_(live, torch._foreach_add(start, version))
        publisher.publish(version=version)
        if version == 1:
            child.expect("ready", timeout=60)
    assert f"read to {SYNCS} wrong 0 grown 0" in child.finish(timeout=120)


@needs_two
@pytest.mark.parametrize("carrier", [VMM, IPC])
def test_a_reader_that_does_not_see_the_device_says_so_and_reads_through_the_host(
    carrier: str, bus_name: str, publishers: MakePublisher, spawn: Spawner
) -> None:
    model = torch.nn.Linear(40, 50, device=DEVICE)
    publisher = publishers(model, carrier)
    publisher.publish(version=1)
    env = {"CUDA_VISIBLE_DEVICES": "1"}
    said = spawn.script(BLIND, bus_name, env=env).finish(timeout=60)
    assert "choose the carrier 'shm'" in said and "that this process runs stay" in said
    publisher.close()
    publishers(model, "shm").publish(version=2)
    said = spawn.script(BLIND, bus_name, env=env).finish(timeout=60)
    assert f"sum {float(model.weight.detach().double().sum())}" in said and "refused" not in said


def test_a_pool_grows_by_a_buffer(bus_name: str, publishers: MakePublisher, spawn: Spawner) -> None:
    publisher = publishers(torch.nn.Linear(40, 40), when_held="grow", max_slots=3, timeout=0.2)
    publisher.publish(version=1)
    child = spawn.script(HOLDER, bus_name, "cpu", until="holds 1")
    for version in range(2, 5):
        publisher.publish(version=version)
    assert len(buffers_of(publisher)._arena._buffers) == 3
    child.kill()


@in_each_memory
def test_a_reader_that_is_stopped_or_killed_decides_as_with_shm(
    carrier: str, bus_name: str, publishers: MakePublisher, spawn: Spawner
) -> None:
    publisher = publishers(many(5).to(place(carrier)), carrier, timeout=0.3)
    publisher.publish(version=1)
    child = spawn.script(HOLDER, bus_name, place(carrier))
    child.expect("holds 1", timeout=60)
    child.send_signal(signal.SIGSTOP)
    publisher.publish(version=2)
    with pytest.raises(WaitTimeoutError, match="slow"):
        publisher.publish(version=3)
    child.kill()
    publisher.publish(version=3)


@pytest.mark.parametrize("carrier", ["memfd", VMM])
def test_a_killed_publishers_versions_stay(carrier: str, bus_name: str, spawn: Spawner) -> None:
    device = place(carrier)
    child = spawn.script(PUBLISHER, bus_name, carrier, device, 1, 3)
    child.expect("published", timeout=60)
    with (
        WeightSubscriber(bus_name, device=device) as attached,
        WeightSubscriber(bus_name, device=device) as late,
    ):
        attached.latest(timeout=5).close()
        child.kill()
        with attached.latest(timeout=5) as weights:
            assert weights.version == 2
            assert bool((weights["weight"] == 2).all())
        with pytest.raises(WeightsError, match="lay in the memory of its publisher, which has end"):
            late.latest(timeout=0.05)
        successor = spawn.script(PUBLISHER, bus_name, carrier, device, 5, 6)
        for reader in (attached, late):
            assert reader.wait(newer_than=2, timeout=60) == 5
            with reader.latest(timeout=5) as weights:
                assert bool((weights["weight"] == 5).all())
        successor.kill()
    Path(pool_path(bus_name, "weights")).unlink()
    Path(memory_socket("weights", bus_name)).unlink()


@GPU
def test_a_view_keeps_its_slot_until_read(bus_name: str, publishers: MakePublisher) -> None:
    model = torch.nn.Linear(1024, 1024, device=DEVICE)
    publisher = publishers(model, "cuda_vmm", when_held="skip")
    publisher.publish(version=1)
    before = model.weight.detach().clone()
    with WeightSubscriber(bus_name, device=DEVICE) as subscriber:
        with subscriber.latest(timeout=5) as weights:
            view = weights["weight"]
        with torch.no_grad():
            model.weight.zero_()
        assert not publisher.publish(version=2).skipped
        assert publisher.publish(version=3).skipped
        torch.cuda._sleep(200_000_000)
        copy = view.clone()  # begins at the device's wake
        del view
        assert not publisher.publish(version=4).skipped
        assert torch.equal(copy, before)


@GPU
def test_too_large_versions_are_refused_at_once(bus_name: str, publishers: MakePublisher) -> None:
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(CapacityError, match="Choose fewer slots"):
        publishers(torch.nn.Linear(16_384, 10_000, dtype=torch.float32), "cuda_vmm")
    del taken
    torch.cuda.empty_cache()
    assert not os.path.exists(pool_path(bus_name, "weights"))


@GPU
def test_publishing_ignores_later_computation(bus_name: str, publishers: MakePublisher) -> None:
    model = torch.nn.Linear(2048, 2048, device=DEVICE)
    publisher = publishers(model, "cuda_vmm")
    with WeightSubscriber(bus_name, device=DEVICE) as subscriber:
        for version in range(20):
            with torch.no_grad():
                torch.cuda._sleep(1_000_000)
                model.weight.fill_(version)
            publication = publisher.publish_async(version=version)
            publication.wait_copied(timeout=20)
            with torch.no_grad():
                model.weight.fill_(-1)
            publication.wait(timeout=20)
            with subscriber.latest(timeout=5) as weights:
                assert bool((weights["weight"] == version).all())


@GPU
def test_rows_name_the_device(bus_name: str, publishers: MakePublisher) -> None:
    publishers(many(2).to(DEVICE), "cuda_vmm").publish(version=1)
    with WeightSubscriber(bus_name, device=DEVICE, label="r") as subscriber:
        load_newest(subscriber, many(2).to(DEVICE))
        (row,) = read_pool(bus_name, "weights").readers
        assert (row.device, row.applied_version) == ("cuda:0", 1)


@pytest.mark.parametrize("carrier", ["cuda_vmm", "cuda_ipc"])
def test_a_device_carrier_needs_a_device_and_says_so(carrier: str, bus_name: str) -> None:
    with pytest.raises(WeightsError, match=f"carrier '{carrier}' cannot serve here: it needs a CU"):
        WeightPublisher(bus_name, ModuleSource(many(3)), carrier=carrier)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=GPU)])
def test_the_probe_names_what_it_does_not_choose_by_itself(device: str) -> None:
    refused = probe_carriers(device).refused
    asked, other = "ask for it by name", "needs a CUDA device, got 'cpu'"
    if device == "cpu":
        expected = {"memfd": asked, "cuda_vmm": other, "cuda_ipc": other}
    else:
        expected = {"memfd": "not that of cuda:0", "cuda_vmm": asked, "cuda_ipc": asked}
    for carrier, why in expected.items():
        assert why in refused[carrier]


def test_a_hundred_publishers_leave_nothing(bus_name: str, publishers: MakePublisher) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:shmbus")

    with WeightSubscriber(bus_name, label="replica") as subscriber:
        for version in range(100):
            publisher = publishers(many(2))
            publisher.publish(version=version)
            load_newest(subscriber, many(2, seed=1))
            publisher.close()
            if version == 0:
                before, mappings = open_descriptors(), mapped()
        wait_until(lambda: not open_descriptors() - before and mapped() <= mappings)


@GPU
@pytest.mark.parametrize("size", [1 << 20, 8 << 20, 64 << 20])
def test_lazy_views_cross_host_memory(bus_name: str, publishers: MakePublisher, size: int) -> None:
    real = torch.randn(size // 4, device=DEVICE)
    pairs = torch.randn(size // 8, dtype=torch.complex64, device=DEVICE)
    model = torch.nn.Module()
    model.negative = torch.nn.Parameter(torch._neg_view(real), requires_grad=False)
    model.conjugate = torch.nn.Parameter(torch.conj(pairs), requires_grad=False)
    publisher = publishers(model, carrier="shm")
    target = {"negative": torch.zeros_like(real), "conjugate": torch.zeros_like(pairs)}
    with WeightSubscriber(bus_name, device=DEVICE) as subscriber:
        for version in range(6):
            real.normal_()
            pairs.normal_()
            publisher.publish(version)
            load_newest(subscriber, target)
            assert torch.equal(target["negative"], -real)
            assert torch.equal(target["conjugate"], torch.conj(pairs).resolve_conj())


@GPU
@pytest.mark.parametrize("reader", [DEVICE, "cpu"])
def test_empty_tensors_follow(bus_name: str, publishers: MakePublisher, reader: str) -> None:
    model = torch.nn.Linear(500, 500, device=DEVICE)
    model.empty = torch.nn.Parameter(torch.empty(0, 3, device=DEVICE))
    publisher = publishers(model, carrier="shm", patches=True)
    target = {name: torch.zeros_like(t, device=reader) for name, t in model.state_dict().items()}
    with WeightSubscriber(bus_name, device=reader) as subscriber:
        for version in range(4):
            with torch.no_grad():
                model.bias[version] = version
            publisher.publish(version)
            load_newest(subscriber, target)
            assert torch.equal(target["bias"].to(DEVICE), model.bias)


@needs_two
@pytest.mark.parametrize("reader", ["cuda:0", "cuda:1"])
@to_a_device
def test_a_model_over_two_devices_arrives(
    bus_name: str, publishers: MakePublisher, carrier: str, reader: str
) -> None:
    first, second = torch.nn.Linear(700, 700, device="cuda:0"), torch.nn.Linear(3, 3000)
    model = torch.nn.Sequential(first, second.to("cuda:1"))
    publisher = publishers(model, carrier=carrier)
    target = {name: torch.zeros_like(t, device=reader) for name, t in model.state_dict().items()}
    with WeightSubscriber(bus_name, device=reader) as subscriber:
        for version in range(6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            publisher.publish(version)
            load_newest(subscriber, target)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor.cpu(), target[name].cpu()), name


def test_small_tensors_of_a_device_go_together_and_large_ones_alone() -> None:
    small, large = torch.zeros(8), torch.zeros(LARGE_BYTES // 4)
    alone, together = split([(small, small), (large, large)])
    assert (len(alone), together) == (2, [])  # the CPU launches nothing


def test_a_slot_that_does_not_say_where_its_bytes_are_is_torn() -> None:
    for data in (b"", bytes(64), b"\x05\x00\x00\x00\x80\x04cpo"):
        with pytest.raises(DamagedError, match="does not say where its bytes are"):
            Placed.decode(data)
