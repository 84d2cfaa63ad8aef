"""Trainers of 1, 2 and 4 ranks in each layout and carrier, and readers with other shards."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import RUN_PREFIX, Child, Spawner
from weight_models import bits, fill, publishing

from shmbus import PeerGoneError
from shmbus.pool import unlink_pool
from shmbus.pool.pool_file import pool_path
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import Arena, ArenaView, BufferLostError, BufferName, allocator
from shmbus.weights import ModuleSource, WeightPublisher, WeightsError, WeightSubscriber

HERE = Path(__file__).parent
ENV = {
    "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    "GLOO_SOCKET_IFNAME": "lo",
}
gpus = torch.cuda.device_count()
needs_two = pytest.mark.skipif(gpus < 2, reason="needs two CUDA devices")

RANK = """
import sys, time, torch
from shmbus import ShmbusError
from shmbus.weights import *
bus, rank, first, last, size = sys.argv[1], *map(int, sys.argv[2:])
model = torch.nn.Linear(size, 40)
publisher = WeightPublisher(
    bus, ModuleSource(model), carrier="memfd", rank=rank, world_size=2, timeout=20
)
for version in range(first, last):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
    try:
        publisher.publish(version=version)
        print("published", version)
    except ShmbusError as error:
        print("failed", version, type(error).__name__, error)
print("done", flush=True)
time.sleep(600)
"""


def read_back(child: Child, bus: str, directory: Path, how: str, device: str) -> None:
    """Compare what a reader on a device gets with what the ranks of a child publish."""
    from rank_child import READ, VERSIONS, whole_model

    with WeightSubscriber(bus, device=device) as reader:
        assert reader.wait(newer_than=VERSIONS[-1] - 1, timeout=200) == VERSIONS[-1]
        replica = whole_model().to(torch.bfloat16).to(device)
        with reader.latest(timeout=5) as weights:
            weights.load_into(replica)
    for name, value in whole_model().state_dict().items():
        expected = (value + VERSIONS[-1]).bfloat16()
        assert torch.equal(replica.state_dict()[name].cpu(), expected), name
    (directory / READ).touch()
    said = child.finish(timeout=60)
    world = int(how.partition(":")[0])
    assert all(f"rank {rank} of {world}: published {bus}" in said for rank in range(world))
    if "shm" in how:
        unlink_pool(bus, "weights")
    assert not os.path.exists(memory_socket("weights", bus))
    assert not os.path.exists(pool_path(bus, "weights"))


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["2:rows", "4:columns"])
@pytest.mark.parametrize("carrier", ["cuda_vmm", "cuda_ipc", "shm"])
@pytest.mark.parametrize(
    ("reader", "visible"),
    [
        ("cuda:0", 1),
        pytest.param("cuda:0", 2, marks=needs_two),
        pytest.param("cuda:1", 2, marks=needs_two),
    ],
)
def test_ranks_of_devices_write_into_the_memory_of_rank_0(
    reader: str, visible: int, carrier: str, how: str, bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = ENV | ({"CUDA_VISIBLE_DEVICES": first} if visible == 1 else {})
    task = f"publish:{bus_name}:{how}:{carrier}:cuda"
    child = spawn.module("rank_child", tmp_path, task, env=env)
    read_back(child, bus_name, tmp_path, f"{how}:{carrier}:cuda", reader)


@pytest.fixture
def rank_of(bus_name: str) -> Iterator[Callable[[int, int], WeightPublisher]]:
    """Make a rank of two in this process; the test leaves no weights behind."""
    with publishing(bus_name, carrier="memfd", world_size=2, timeout=20) as make:
        yield lambda rank, size=30: make(torch.nn.Linear(size, 40), rank=rank)
    Path(memory_socket("weights", bus_name)).unlink(missing_ok=True)


def fill_its_model(publisher: WeightPublisher, value: int) -> None:
    source = publisher._source
    assert isinstance(source, ModuleSource)
    fill(source._model, value)


def is_all(bus: str, version: int) -> bool:
    with WeightSubscriber(bus) as reader, reader.latest(timeout=5) as weights:
        return weights.version == version and all(
            bool((weights[name] == version).all()) for name in weights
        )


def test_a_killed_rank_fails_the_version_and_its_successor_writes_the_next(
    bus_name: str, rank_of: Callable[..., WeightPublisher], spawn: Spawner
) -> None:
    leader = rank_of(0)
    fill_its_model(leader, 1)
    other = spawn.script(RANK, bus_name, 1, 1, 2, 30)
    leader.publish(version=1)
    other.expect("done")
    other.kill()
    fill_its_model(leader, 2)
    with pytest.raises(PeerGoneError, match="rank 1"):
        leader.publish(version=2)
    assert is_all(bus_name, 1)
    spawn.script(RANK, bus_name, 1, 2, 3, 30)
    leader.publish(version=2)
    assert is_all(bus_name, 2)


def test_a_rank_that_outlives_rank_0_writes_into_the_memory_of_its_successor(
    bus_name: str, rank_of: Callable[..., WeightPublisher], spawn: Spawner
) -> None:
    leader = spawn.script(RANK, bus_name, 0, 1, 4, 30)
    other = rank_of(1)
    for version in (1, 2, 3):  # maps both slots
        fill_its_model(other, version)
        other.publish(version=version)
    assert is_all(bus_name, 3)
    leader.kill()
    fill_its_model(other, 4)
    with pytest.raises(PeerGoneError, match="rank 0"):
        other.publish(version=4)
    spawn.script(RANK, bus_name, 0, 4, 7, 30)
    for version in (4, 5, 6):
        fill_its_model(other, version)
        other.publish(version=version)
        assert is_all(bus_name, version)


def test_ranks_with_different_models_publish_nothing_and_say_so(
    bus_name: str, rank_of: Callable[..., WeightPublisher], spawn: Spawner
) -> None:
    leader = rank_of(0)
    other = spawn.script(RANK, bus_name, 1, 1, 2, 31)
    with pytest.raises(WeightsError, match="rank 1: rank 0 publishes version 1 with another m"):
        leader.publish(version=1)
    other.expect("done")
    assert "failed 1 WeightsError rank 1: rank 0 publishes version 1 with another" in other.output()


def test_a_name_of_an_owner_leads_to_its_own_memory_and_to_no_other(bus_name: str) -> None:
    place = memory_socket("weights", bus_name)
    first = Arena(place, allocator("memfd"))
    first.buffer(3, 100)[1].fill_(7)
    view = ArenaView(place, writable=True)
    mapped = view.memory(BufferName(3, first.owner)).tensor()
    mapped[5] = 9
    assert first.buffer(3, 100)[1][4:6].tolist() == [7, 9]
    first.close()
    second = Arena(place, allocator("memfd"))
    second.buffer(3, 100)
    assert second.owner != first.owner
    with pytest.raises(BufferLostError, match="not there any more"):
        ArenaView(place).memory(BufferName(3, first.owner))
    second.close()


PUBLISHED = [
    ("rows", 1), ("rows", 2), ("columns", 2), ("fsdp", 2), ("replicated", 2), ("columns", 4),
    ("fsdp", 4),
]  # fmt: skip


READ = [("rows", 2), ("columns", 4)]


READERS = [("rows", 1), ("columns", 2), ("rows", 4)]


def bus_of(layout: str, world: int) -> str:
    return f"{RUN_PREFIX}ranks-{layout}-{world}"


EXPORTED = "2:columns:memfd"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> Iterator[Child]:
    """Run every rank, in succession; importing torch for them takes the longest."""
    tasks = [f"publish:{bus_of(*how)}:{how[1]}:{how[0]}" for how in PUBLISHED]
    tasks += [f"read:{bus_of(*how)}:{world}:{layout}" for how in READ for layout, world in READERS]
    tasks.append(f"publish:{bus_of('memfd', 2)}:{EXPORTED}")
    spawner = Spawner(directory)
    try:
        yield spawner.module("rank_child", directory, *tasks, env=ENV)
    finally:
        spawner.end_all()
        for how in PUBLISHED:
            if os.path.exists(pool_path(bus_of(*how), "weights")):
                unlink_pool(bus_of(*how), "weights")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("layout", "world"), PUBLISHED)
def test_many_ranks_publish_one_model(layout: str, world: int, ranks: Child) -> None:
    from rank_child import VERSIONS, whole_model

    bus = bus_of(layout, world)
    for rank in range(world):
        ranks.expect(f"rank {rank} of {world}: published {bus}", timeout=200)
    with WeightSubscriber(bus) as subscriber, subscriber.latest(timeout=5) as weights:
        assert weights.version == VERSIONS[-1]
        for name, value in whole_model().state_dict().items():
            assert bits(weights[name]) == bits((value + weights.version).bfloat16())


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("layout", "world"), READ)
def test_any_layout_reads_any_layout(layout: str, world: int, ranks: Child) -> None:
    for _, readers in READERS:
        for rank in range(readers):
            ranks.expect(f"rank {rank} of {readers}: read {bus_of(layout, world)}", timeout=200)


@pytest.mark.timeout(240)
def test_a_rank_writes_its_pieces_into_rank_0s_memory(ranks: Child, directory: Path) -> None:
    read_back(ranks, bus_of("memfd", 2), directory, EXPORTED, "cpu")
