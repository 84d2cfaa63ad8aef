"""Patches: versions of a second pool, made by what changed, equal the trainer's bit for bit."""

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Spawner, together
from weight_models import CHANGES, MakePublisher, Odd, bits, many, publishing, same, step

from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, VersionLease
from shmbus.pool.pool_file import open_pool, pool_path
from shmbus.weights import (
    LocalPiece,
    ModuleSource,
    ParamMeta,
    Slice,
    WeightPublisher,
    WeightSubscriber,
)
from shmbus.weights.manifest import Manifest
from shmbus.weights.patch_policy import PatchPolicy, patch_capacity, patch_share, pieces_of
from shmbus_ext import _core

HERE = Path(__file__).parent
VERSIONS = int(os.environ.get("SHMBUS_TEST_PATCHES", "60"))


class Mirror:
    """A second pool with the versions of a first: by patches where the base is here."""

    def __init__(self, bus: str) -> None:
        self.bus, self._from, self._base = bus, f"{bus}.t", 0
        self._publisher: PoolPublisher | None = None
        self._version = 0

    def follow(self, lease: VersionLease) -> str:
        """Take a version over; return "patch" or "whole"."""
        found = _core.pool_patch_bytes(lease.buffer)
        base, runs = found or (0, b"")
        how = "patch" if found and base == self._base else "whole"
        self._version += 1
        write = self._pool().begin(
            self._version, lease.size, meta=lease.meta(), patch=how == "patch"
        )
        assert write is not None
        if how == "patch":
            assert _core.pool_patch_take(write.buffer, runs)
            assert _core.pool_patch_crc(runs, write.buffer) == _core.pool_patch_crc(
                runs, lease.buffer
            )
        else:
            write.view()[:] = lease.view()
        write.finish()
        self._base = lease.sequence
        with PoolReader(self.bus, "weights") as reader, reader.latest(timeout=5) as copy:
            assert np.array_equal(copy.view(), lease.view())
        return how

    def next(self) -> str:
        """Take the newest version over."""
        with PoolReader(self._from, "weights") as reader, reader.latest(timeout=5) as lease:
            return self.follow(lease)

    def _pool(self) -> PoolPublisher:
        if self._publisher is None:
            with contextlib.closing(open_pool(self._from, "weights", read_only=True)) as pool:
                spec = PoolSpec(
                    slot_bytes=pool.slot_bytes, slots=2, max_slots=pool.max_slots,
                    meta_bytes=pool.meta_bytes, patch_bytes=pool.patch_bytes,
                )  # fmt: skip
            self._publisher = PoolPublisher(self.bus, "weights", spec=spec)
        return self._publisher

    def load(self, model: torch.nn.Module | dict[str, torch.Tensor]) -> None:
        with WeightSubscriber(self.bus) as reader, reader.latest(timeout=5) as weights:
            weights.load_into(model)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close(remove=True)


@pytest.fixture
def mirror(bus_name: str) -> Iterator[Mirror]:
    """A mirror of the publishers' pool; both are removed after the test."""
    with contextlib.closing(Mirror(bus_name)) as made:
        yield made
    Path(pool_path(f"{bus_name}.t", "weights")).unlink(missing_ok=True)


@pytest.fixture
def publishers(bus_name: str, mirror: Mirror) -> Iterator[MakePublisher]:
    del mirror
    with publishing(f"{bus_name}.t", patches=0.2) as make:
        yield make


def test_every_bit_follows_by_patches(publishers: MakePublisher, mirror: Mirror, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = Odd(1), Odd(2)
    publisher = publishers(model)
    how = {"whole": 0, "patch": 0}
    for version in range(VERSIONS):
        step(model, made, (0.0, 0.001, 0.02, 0.5)[version % 4])
        publisher.publish(version=version)
        how[mirror.next()] += 1
        mirror.load(replica)
        assert same(model, replica), f"version {version}"
    assert how["patch"] > VERSIONS // 4 and how["whole"] >= 1


def test_lazy_empty_tensors_follow_by_patches(publishers: MakePublisher, mirror: Mirror) -> None:
    model = torch.nn.Linear(9, 9)
    # Like an empty tensor of a device: without bytes in host memory to compare.
    empty = torch.conj(torch.empty(0, 3, dtype=torch.complex64))
    model.empty = torch.nn.Parameter(empty, requires_grad=False)
    publisher = publishers(model)
    target = {name: torch.zeros_like(t.resolve_conj()) for name, t in model.state_dict().items()}
    for version in range(4):
        with torch.no_grad():
            model.bias[version] = version
        publisher.publish(version)
        assert mirror.next() == ("patch" if version else "whole")
        mirror.load(target)
        assert torch.equal(target["bias"], model.bias)


@pytest.mark.parametrize("count", [300, 1000])
def test_models_of_many_tensors_follow_by_patches(
    count: int, publishers: MakePublisher, mirror: Mirror, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = many(count, 1), many(count, 2)
    publisher = publishers(model, slots=3)
    for version in range(8):
        step(model, made, 0.01)
        assert (publisher.publish(version=version).changed is None) == (version == 0)
        assert mirror.next() == ("patch" if version else "whole")
        mirror.load(replica)
        assert same(model, replica)


def test_cast_masters_are_patched(publishers: MakePublisher, mirror: Mirror, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    masters = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900))
    replica = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900)).bfloat16()
    publisher = publishers(ModuleSource(masters, dtype=torch.bfloat16))
    for version in range(4):
        step(masters, made, 0.01)
        publisher.publish(version=version)
        assert mirror.next() == ("patch" if version else "whole")
        mirror.load(replica)
        wanted = {name: value.bfloat16() for name, value in masters.state_dict().items()}
        assert all(bits(replica.state_dict()[name]) == bits(wanted[name]) for name in wanted)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_trainer_whose_tensors_changed_between_patches_publishes_them_as_they_are(
    change: Callable[[torch.nn.Module], None], publishers: MakePublisher, mirror: Mirror, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = many(20, 1), many(20, 2)
    publisher = publishers(model)
    for version in range(8):
        step(model, made, 0.01)
        if version in (3, 6):
            change(model)
        publisher.publish(version=version)
        mirror.next()
        mirror.load(replica)
        assert same(model, replica), f"version {version}"


KILLED = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from weight_models import many, step
from shmbus.weights import ModuleSource, WeightPublisher
model = many(200, 0)
made = torch.Generator().manual_seed(5)
with WeightPublisher(sys.argv[1], ModuleSource(model), patches=0.3, keep=True) as publisher:
    print("ready", flush=True)
    version = int(sys.argv[3])
    while True:
        version += 1
        step(model, made, 0.02)
        publisher.publish(version=version)
"""


def test_killed_patchers_leave_whole_versions(mirror: Mirror, spawn: Spawner, seed: int) -> None:
    rng = random.Random(seed)
    patched = 0
    bus = f"{mirror.bus}.t"
    with WeightSubscriber(bus) as subscriber:
        for turn in range(3):
            child = spawn.script(KILLED, bus, HERE, turn * 100_000, until="ready")
            newest = subscriber.wait(timeout=20)
            for _ in range(rng.randint(10, 30)):
                newest = subscriber.wait(newer_than=newest, timeout=20)
                patched += mirror.next() == "patch"
            child.kill()
    assert patched > 5


def scribble(path: Path, lease: VersionLease, rng: random.Random) -> None:
    """Change a byte of a leased version's patch."""
    bus = path.name.removeprefix("shmbus-weights.")
    found = _core.pool_patch_bytes(lease.buffer)
    assert found is not None
    with contextlib.closing(open_pool(bus, "weights", read_only=True)) as pool:
        slots = pool.file_bytes - pool.max_slots * pool.slot_stride
        end = slots + (lease.buffer.slot + 1) * pool.slot_stride
        # Behind the payload: the meta and the digests, a page each; its first bytes.
        begin = end - pool.slot_stride + -(-pool.slot_bytes // 4096) * 4096
        begin += -(-pool.meta_bytes // 4096) * 4096 + 4096
    at = begin + rng.randrange(len(found[1]))
    with path.open("r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 0x55]))


def test_scribbled_patches_are_refused(
    publishers: MakePublisher, mirror: Mirror, seed: int
) -> None:
    rng = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    model, replica = many(60, 1), many(60, 2)
    publisher = publishers(model)
    bus = f"{mirror.bus}.t"
    with PoolReader(bus, "weights") as reader:
        for version in range(20):
            step(model, made, 0.02)
            publisher.publish(version=version)
            with reader.latest(timeout=5) as lease:
                if version % 3 == 2:
                    scribble(Path(pool_path(bus, "weights")), lease, rng)
                harmed = version == 0 or version % 3 == 2
                assert mirror.follow(lease) == ("whole" if harmed else "patch")
            mirror.load(replica)
            assert same(model, replica)


def test_pieces_cover_each_element_of_a_part_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        start = tuple(rng.randrange(size) for size in shape)
        sizes = tuple(rng.randint(1, size - at) for size, at in zip(shape, start, strict=True))
        dtype = rng.choice(["uint8", "bfloat16", "float32", "float64"])
        (place,) = Manifest.plan([ParamMeta("t", dtype, shape)]).tensors
        memory = torch.arange(place.size, dtype=torch.int64)
        whole = torch.arange(math.prod(shape)).reshape(shape)
        part = whole[tuple(slice(at, at + n) for at, n in zip(start, sizes, strict=True))]
        itemsize = place.size // max(1, math.prod(shape))
        found = [
            memory[piece.offset + row * piece.stride :][: piece.row_bytes]
            for piece in pieces_of(place, start, sizes)
            for row in range(piece.rows)
        ]
        assert (torch.cat(found)[::itemsize] // itemsize).tolist() == part.reshape(-1).tolist()


def test_a_patch_is_not_tried_for_ever_where_too_much_changes() -> None:
    policy = PatchPolicy()
    tried = []
    for version in range(60):
        if policy.wants():
            tried.append(version)
            policy.ended(begun=True, made=False)
    assert tried == [0, 2, 5, 10, 19, 36, 53]
    while not policy.wants():
        pass
    policy.ended(begun=True, made=True)
    assert policy.wants()


def test_shares_and_capacities_are_checked() -> None:
    assert [*map(patch_share, (False, True, 0.1, np.float32(0.5), 1))] == [0, 0.05, 0.1, 0.5, 1]
    manifest = Manifest.plan([ParamMeta("t", "bfloat16", (1000, 1000))])
    assert patch_capacity(manifest, 0.0, 1) == 0
    assert 0.015 < patch_capacity(manifest, 0.01, 1) / manifest.total < 0.025


RANK_VERSIONS = 6


class Whole(torch.nn.Module):
    """Tensors of which no number of ranks divides each dimension, in several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(3)
        shapes = {"up": (30, 514), "down": (700, 13), "experts": (5, 70, 33), "bias": (9,)}
        for number, (name, shape) in enumerate(shapes.items()):
            dtype = (torch.bfloat16, torch.float32, torch.float16, torch.float64)[number]
            value = torch.randn(shape, generator=made).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(value))


class Shards:
    """A source of shards along a dimension, like a tensor-parallel trainer."""

    def __init__(self, model: torch.nn.Module, dim: int) -> None:
        self._model, self._dim = model, dim

    def params(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in self._model.state_dict().items()
        ]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def slices(self) -> Mapping[str, Slice]:
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """The rank's chunk of each tensor, in memory of its own; uneven, and maybe empty."""
        for name, value in self._model.state_dict().items():
            dim = min(self._dim, value.dim() - 1)
            chunk = -(-value.shape[dim] // world_size)
            at = min(rank * chunk, value.shape[dim])
            length = min(chunk, value.shape[dim] - at)
            start = tuple(at if each == dim else 0 for each in range(value.dim()))
            yield LocalPiece(name, start, value.narrow(dim, at, length).clone())


def publish_all(publishers: list[WeightPublisher], version: int) -> list[int | None]:
    told: list[int | None] = [None] * len(publishers)

    def run(rank: int) -> None:
        told[rank] = publishers[rank].publish(version=version).changed

    together(run, range(len(publishers)))
    return told


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_layouts_patch_one_model(
    world: int, dim: int, publishers: MakePublisher, mirror: Mirror, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model = Whole()
    ranks = [
        publishers(Shards(model, dim), rank=rank, world_size=world, patches=0.3, timeout=30)
        for rank in range(world)
    ]
    for version in range(RANK_VERSIONS):
        step(model, made, 0.02)
        told = publish_all(ranks, version)
        assert [it is None for it in told] == [version == 0] * world
        assert mirror.next() == ("patch" if version else "whole")
        with WeightSubscriber(mirror.bus) as reader, reader.latest(timeout=5) as weights:
            for name, value in model.state_dict().items():
                assert bits(weights[name]) == bits(value), name


def test_a_full_patch_of_a_rank_leaves_the_version_whole(
    publishers: MakePublisher, mirror: Mirror, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = Whole(), Whole()
    ranks = [
        publishers(Shards(model, 0), rank=rank, world_size=2, patches=0.3, timeout=30)
        for rank in range(2)
    ]
    how = []
    for version in range(6):
        step(model, made, 0.01)
        if version == 2:  # the whole part of rank 1
            with torch.no_grad():
                for value in model.parameters():
                    value[-(value.shape[0] // 2) :] += 1
        publish_all(ranks, version)
        how.append(mirror.next())
        mirror.load(replica)
        assert same(model, replica)
    assert how == ["whole", "patch", "whole", "whole", "patch", "patch"]
