"""Patches: a model that follows the trainer by what changed is the trainer's, bit for bit."""

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from conftest import Spawner, together
from weight_models import CHANGES, Odd, bits, many, same, step

from shmbus import DamagedError
from shmbus.pool import read_pool
from shmbus.pool.pool_file import open_pool, pool_path
from shmbus.weights import (
    LocalPiece,
    ManifestError,
    ModuleSource,
    ParamMeta,
    PatchBaseError,
    Slice,
    WeightPublisher,
    Weights,
    WeightSource,
    WeightSubscriber,
)
from shmbus.weights.manifest import Manifest
from shmbus.weights.patch_policy import PatchPolicy, patch_capacity, patch_share, pieces_of

VERSIONS = int(os.environ.get("SHMBUS_TEST_PATCHES", "60"))
MakePublisher = Callable[..., WeightPublisher]


@pytest.fixture
def publishers(bus_name: str) -> Iterator[MakePublisher]:
    """Make publishers of one bus with patches; their weights are removed after the test."""
    made: list[WeightPublisher] = []

    def make(model: torch.nn.Module | WeightSource, **options: object) -> WeightPublisher:
        source = ModuleSource(model) if isinstance(model, torch.nn.Module) else model
        given = {"patches": 0.2, **options}
        made.append(WeightPublisher(bus_name, source, **given))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
    Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)


def test_every_bit_follows_by_patches(publishers: MakePublisher, bus_name: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica, late = Odd(1), Odd(2), Odd(3)
    publisher = publishers(model)
    how = {"whole": 0, "patch": 0}
    with (
        WeightSubscriber(bus_name, patches=True) as subscriber,
        WeightSubscriber(bus_name, patches=True) as seldom,
    ):
        for version in range(VERSIONS):
            step(model, made, (0.0, 0.001, 0.02, 0.5)[version % 4])
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
                how[str(weights.loaded)] += 1
            assert same(model, replica), f"version {version}"
            if version % 5 == 0:
                with seldom.latest(timeout=5) as weights:
                    weights.load_into(late)
                    assert weights.loaded == "whole"  # it never has the version before
                assert same(model, late)
    assert how["patch"] > VERSIONS // 4 and how["whole"] >= 1


def test_lazy_empty_tensors_follow_by_patches(publishers: MakePublisher, bus_name: str) -> None:
    model = torch.nn.Linear(9, 9)
    # As an empty one of a device, it has no bytes in host memory to compare.
    empty = torch.conj(torch.empty(0, 3, dtype=torch.complex64))
    model.empty = torch.nn.Parameter(empty, requires_grad=False)
    publisher = publishers(model)
    target = {name: torch.zeros_like(t.resolve_conj()) for name, t in model.state_dict().items()}
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(4):
            with torch.no_grad():
                model.bias[version] = version
            publisher.publish(version)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(target)
                assert weights.loaded == ("patch" if version else "whole")
            assert torch.equal(target["bias"], model.bias)


@pytest.mark.parametrize("count", [300, 1000])
def test_models_of_many_tensors_follow_by_patches(
    count: int, publishers: MakePublisher, bus_name: str, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = many(count, 1), many(count, 2)
    publisher = publishers(model, slots=3)
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(8):
            step(model, made, 0.01)
            told = publisher.publish(version=version)
            assert (told.changed is None) == (version == 0)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
                assert weights.loaded == ("patch" if version else "whole")
            assert same(model, replica)


def test_cast_masters_are_patched(publishers: MakePublisher, bus_name: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    masters = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900))
    replica = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900)).bfloat16()
    publisher = publishers(ModuleSource(masters, dtype=torch.bfloat16))
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(4):
            step(masters, made, 0.01)
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
                assert weights.loaded == ("patch" if version else "whole")
            wanted = {name: value.bfloat16() for name, value in masters.state_dict().items()}
            assert all(bits(replica.state_dict()[name]) == bits(wanted[name]) for name in wanted)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_changed_between_patches_gets_the_whole_version(
    change: Callable[[torch.nn.Module], None], publishers: MakePublisher, bus_name: str, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = many(20, 1), many(20, 2)
    publisher = publishers(model)
    how = []
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(8):
            step(model, made, 0.01)
            publisher.publish(version=version)
            if version in (3, 6):
                change(replica)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
                how.append(weights.loaded)
            assert same(model, replica), f"version {version}"
    expected = ["patch"] * 8
    for version in (0, 3, 6):
        expected[version] = "whole"
    assert how == expected


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_trainer_whose_tensors_changed_between_patches_publishes_them_as_they_are(
    change: Callable[[torch.nn.Module], None], publishers: MakePublisher, bus_name: str, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = many(20, 1), many(20, 2)
    publisher = publishers(model)
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(8):
            step(model, made, 0.01)
            if version in (3, 6):
                change(model)
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
            assert same(model, replica), f"version {version}"


def test_another_load_is_compared(publishers: MakePublisher, bus_name: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = many(20, 1), many(20, 2)
    some = {name: value for name, value in replica.named_parameters() if name != "p3"}
    publisher = publishers(model)
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(6):
            step(model, made, 0.01)
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                if version == 3:
                    with pytest.raises(ManifestError, match="p3"):
                        weights.load_into(some)
                    weights.load_into(some, strict=False)
                weights.load_into(replica)
            assert same(model, replica), f"version {version}"


def test_a_patch_checks_its_place_for_changes(publishers: MakePublisher, bus_name: str) -> None:
    model, replica = many(20, 1), many(20, 2)
    publisher = publishers(model)
    with WeightSubscriber(bus_name, patches=True, verify="off") as subscriber:
        for version in range(2):
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
        replica.p7.data[0] = 99  # type: ignore[index, union-attr]
        with torch.no_grad():
            model.p7[0] = 77  # type: ignore[index]
        publisher.publish(version=2)
        with subscriber.latest(timeout=5) as weights:
            weights.load_into(replica)
            assert weights.loaded == "whole"
    assert same(model, replica)


def test_verifying_reads_beyond_the_patch(publishers: MakePublisher, bus_name: str) -> None:
    model, replica = many(20, 1), many(20, 2)
    publisher = publishers(model, digests=True)
    with WeightSubscriber(bus_name, patches=True, verify="all") as subscriber:
        for version in range(3):
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(replica)
                assert weights.loaded == ("patch" if version == 1 else "whole")
            assert same(model, replica)
            if version == 1:
                replica.p7.data[0] = 99  # type: ignore[index, union-attr]


def test_a_patch_for_another_base_is_refused(publishers: MakePublisher, bus_name: str) -> None:
    model, replica = many(20, 1), many(20, 2)
    publisher = publishers(model)
    with WeightSubscriber(bus_name) as subscriber:
        publisher.publish(version=7)
        with subscriber.latest(timeout=5) as weights:
            assert weights.patch_base() is None
            with pytest.raises(PatchBaseError, match="version 7 has no patch") as none:
                weights.apply_patch(replica, base=6)
            assert none.value.base is None
            weights.load_into(replica)
        before = many(20, 2)
        with torch.no_grad():
            model.p1.add_(1)  # type: ignore[operator]
        publisher.publish(version=8)
        with subscriber.latest(timeout=5) as weights:
            with pytest.raises(PatchBaseError, match="for version 7 alone, the model has"):
                weights.apply_patch(before, base=6)
            assert same(before, many(20, 2))
            assert weights.apply_patch(replica, base=7) > 0
            assert same(replica, model)
            (row,) = read_pool(bus_name, "weights").readers
            assert (row.applied_version, row.refused_version) == (8, None)
            with pytest.raises(DamagedError, match="was not version 7"):
                weights.apply_patch(before, base=7)
            (row,) = read_pool(bus_name, "weights").readers
            assert (row.applied_version, row.refused_version) == (None, 8)


def test_fused_and_cast_parts_follow(publishers: MakePublisher, bus_name: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    model = torch.nn.Module()
    model.register_parameter("qkv", torch.nn.Parameter(torch.randn(96, 64)))
    model.register_parameter("o", torch.nn.Parameter(torch.randn(64, 32)))
    slices = {f"{name}": Slice("qkv", 0, 32 * i, 32) for i, name in enumerate("qkv")}
    publisher = publishers(ModuleSource(model, slices=slices))
    parts = {name: torch.zeros(32, 64) for name in "qkv"} | {"o": torch.zeros(64, 32)}
    wide = {"qkv": torch.zeros(96, 64, dtype=torch.float64), "o": torch.zeros(64, 32)}
    with (
        WeightSubscriber(bus_name, patches=True) as one,
        WeightSubscriber(bus_name, patches=True) as other,
    ):
        for version in range(4):
            step(model, made, 0.01)
            publisher.publish(version=version)
            with one.latest(timeout=5) as weights:
                weights.load_into(parts)
                assert weights.loaded == ("patch" if version else "whole")
            with other.latest(timeout=5) as weights:
                weights.load_into(wide, cast=True)
                assert weights.loaded == ("patch" if version else "whole")
            assert bits(torch.cat([parts[name] for name in "qkv"])) == bits(model.qkv)  # type: ignore[arg-type]
            assert bits(wide["qkv"]) == bits(model.qkv.double())  # type: ignore[operator, union-attr]
            assert bits(parts["o"]) == bits(wide["o"]) == bits(model.o)  # type: ignore[arg-type]


def test_restarted_weights_are_no_base(bus_name: str, publishers: MakePublisher) -> None:
    replica = many(20, 9)
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for round_ in range(2):
            model = many(20, round_)
            with publishers(model) as publisher:
                for version in range(2):
                    publisher.publish(version=10 * round_ + version)
                    subscriber.wait(newer_than=10 * round_ + version - 1, timeout=5)
                    with subscriber.latest(timeout=5) as weights:
                        weights.load_into(replica)
                        assert weights.loaded == ("patch" if version else "whole")
                    assert same(model, replica)


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
        publisher.publish(version=version, text=str(hash(tuple(
            tensor.view(torch.uint8).sum().item() for tensor in model.state_dict().values()))))
"""


def test_killed_patchers_leave_whole_versions(bus_name: str, spawn: Spawner, seed: int) -> None:
    rng = random.Random(seed)
    replica = many(200, 0)
    patched = 0
    try:
        with WeightSubscriber(bus_name, patches=True) as subscriber:
            for turn in range(3):
                child = spawn.script(KILLED, bus_name, str(Path(__file__).parent), turn * 100_000)
                child.expect("ready")
                for _ in range(rng.randint(10, 30)):
                    newest = subscriber.wait(timeout=20)
                    with subscriber.latest(timeout=5) as weights:
                        weights.load_into(replica)
                        patched += weights.loaded == "patch"
                        views = {name: bits(weights[name]) for name in weights}
                        state = {name: bits(it) for name, it in replica.state_dict().items()}
                        assert views == state and weights.version >= newest
                child.kill()
    finally:
        Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)
    assert patched > 5


def scribble(path: Path, weights: Weights, rng: random.Random) -> None:
    """Change a byte of the patch of a version that is leased."""
    lease = weights._open()._lease  # type: ignore[attr-defined]
    bus = path.name.removeprefix("shmbus-weights.")
    with contextlib.closing(open_pool(bus, "weights", read_only=True)) as pool:
        slots = pool.file_bytes - pool.max_slots * pool.slot_stride
        end = slots + (lease.buffer.slot + 1) * pool.slot_stride
        used = lease.patch().size
        # What is behind the payload, the meta and the digests, a page each; its first bytes.
        begin = end - pool.slot_stride + -(-pool.slot_bytes // 4096) * 4096
        begin += -(-pool.meta_bytes // 4096) * 4096 + 4096
    at = begin + rng.randrange(used)
    with path.open("r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 0x55]))


def test_scribbled_patches_are_refused(bus_name: str, publishers: MakePublisher, seed: int) -> None:
    rng = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    model, replica = many(60, 1), many(60, 2)
    publisher = publishers(model)
    path = Path(pool_path(bus_name, "weights"))
    with WeightSubscriber(bus_name, patches=True) as subscriber:
        for version in range(20):
            step(model, made, 0.02)
            publisher.publish(version=version)
            with subscriber.latest(timeout=5) as weights:
                if version % 3 == 2:
                    scribble(path, weights, rng)
                weights.load_into(replica)
                views = {name: bits(weights[name]) for name in weights}
                assert views == {name: bits(it) for name, it in replica.state_dict().items()}
            assert same(model, replica)


def test_pieces_cover_each_element_of_a_part_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        start = tuple(rng.randrange(size) for size in shape)
        sizes = tuple(rng.randint(1, size - at) for size, at in zip(shape, start, strict=True))
        dtype = rng.choice(["uint8", "bfloat16", "float32", "float64"])
        manifest = Manifest.plan([ParamMeta("t", dtype, shape)])
        (place,) = manifest.tensors
        memory = torch.arange(place.size, dtype=torch.int64)
        whole = torch.arange(math.prod(shape)).reshape(shape)
        part = whole[tuple(slice(at, at + n) for at, n in zip(start, sizes, strict=True))]
        itemsize = place.size // max(1, math.prod(shape))
        found = [
            memory[piece.offset + row * piece.stride :][: piece.row_bytes]
            for piece in pieces_of(place, start, sizes)
            for row in range(piece.rows)
        ]
        firsts = torch.cat(found)[::itemsize] // itemsize
        assert firsts.tolist() == part.reshape(-1).tolist()


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
    assert [patch_share(it) for it in (False, True, 0.1, 1)] == [0.0, 0.05, 0.1, 1.0]
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
    """A source that has the shards of one dimension, as a tensor-parallel trainer does."""

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


def part(model: torch.nn.Module, dim: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """What a server of a tensor-parallel group has of a model."""
    return {piece.name: piece.tensor for piece in Shards(model, dim).iter_local(rank, world)}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_layouts_patch_one_model(world: int, dim: int, bus_name: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = Whole(), Whole()
    publishers = [
        WeightPublisher(
            bus_name, Shards(model, dim), rank=rank, world_size=world, patches=0.3, timeout=30
        )
        for rank in range(world)
    ]
    try:
        with WeightSubscriber(bus_name, patches=True) as subscriber:
            for version in range(RANK_VERSIONS):
                step(model, made, 0.02)
                told = publish_all(publishers, version)
                assert [it is None for it in told] == [version == 0] * world
                with subscriber.latest(timeout=5) as weights:
                    weights.load_into(replica)
                    assert weights.loaded == ("patch" if version else "whole")
                    views = {name: weights[name] for name in weights}
                    for servers in (1, 2, 4):
                        for server in range(servers):
                            wanted = part(model, dim, server, servers)
                            found = torch.nn.Module()
                            for name, view in views.items():
                                found.register_buffer(name, view)
                            for name, value in part(found, dim, server, servers).items():
                                assert bits(value) == bits(wanted[name])
                    del views, view, found
                state = model.state_dict()
                assert all(bits(it) == bits(state[n]) for n, it in replica.state_dict().items())
    finally:
        for publisher in reversed(publishers):
            publisher.close()
        Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)


def test_a_full_patch_of_a_rank_leaves_the_version_whole(bus_name: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = Whole(), Whole()
    publishers = [
        WeightPublisher(
            bus_name, Shards(model, 0), rank=rank, world_size=2, patches=0.3, timeout=30
        )
        for rank in range(2)
    ]
    loaded = []
    try:
        with WeightSubscriber(bus_name, patches=True) as subscriber:
            for version in range(6):
                step(model, made, 0.01)
                if version == 2:  # all that rank 1 has, and no more
                    with torch.no_grad():
                        for value in model.parameters():
                            value[-(value.shape[0] // 2) :] += 1
                publish_all(publishers, version)
                with subscriber.latest(timeout=5) as weights:
                    weights.load_into(replica)
                    loaded.append(weights.loaded)
                state = model.state_dict()
                assert all(bits(it) == bits(state[n]) for n, it in replica.state_dict().items())
    finally:
        for publisher in reversed(publishers):
            publisher.close()
        Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)
    assert loaded == ["whole", "patch", "whole", "whole", "patch", "patch"]
