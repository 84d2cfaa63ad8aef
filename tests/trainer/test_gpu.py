"""Batches on a GPU equal those of `pack` on the host, also in the kernel's interpreter."""

import contextlib
import gc
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import Spawner

from shmbus import Bus, BusClosedError, Consumer, Producer
from shmbus.batch.gather import measure, mentioning
from shmbus.batch.kernel_table import CHUNK_WORDS, KINDS, kernel_table, mapping_of
from trainer_adapter import Batch, FieldNames, OnlineDataHandler, pack
from trainer_adapter.batches.pack import HostPacker
from trainer_adapter.gpu import memory as gpu_memory
from trainer_adapter.gpu import packer as gpu_packer
from trainer_adapter.gpu.packer import GpuPacker

TENSORS = (
    "tokens", "position_ids", "cu_seqlens", "loss_mask", "logprobs", "advantages", "scores",
    "policy_versions", "group_sizes",
)  # fmt: skip


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="64MiB", max_producers=4) as handle:
        yield handle


def random_sample(rng: np.random.Generator, longest: int, fields: Sequence[str]) -> dict[str, Any]:
    """A sample with these optional fields, of any dtype the bus packs."""
    n = int(rng.integers(0, longest))
    floats = ["f4", "f4", "f8"]
    given: dict[str, Any] = {
        "tokens": rng.integers(0, 100, n).astype(rng.choice(["i4", "i4", "u2", "i8", "u1"])),
        "score": float(rng.random()),
    }
    if "loss_mask" in fields:
        given["loss_mask"] = rng.integers(0, 2, n).astype(rng.choice(["u1", "?", "i8", "f4"]))
    if "logprobs" in fields:
        given["logprobs"] = -rng.random(n).astype(rng.choice(floats))
    if "advantages" in fields:
        given["advantages"] = rng.random(n).astype(rng.choice(floats))
        given["advantages"][given.get("loss_mask", np.ones(n)) == 0] = rng.choice([np.nan, 0.5])
    if rng.random() < 0.2:
        given["meta"] = {"finish_reason": "length", "set_advantage_to_zero": True}
    return given


def put_random(producer: Producer, seed: int, groups: int, longest: int) -> None:
    """Put groups with and without the optional fields; logprobs come for every group or none."""
    rng = np.random.default_rng(seed)
    for_all = ["logprobs"] if rng.random() < 0.8 else []
    for number in range(groups):
        often = {"loss_mask": 0.7, "advantages": 0.4}
        fields = for_all + [name for name in often if rng.random() < often[name]]
        for index in range(4):
            producer.put(
                f"k{number}", group_size=4, index=index, policy_version=number, timeout=10,
                **random_sample(rng, longest, fields),
            )  # fmt: skip


def assert_same(got: Batch, want: Batch) -> None:
    for name in TENSORS:
        mine, right = getattr(got, name), getattr(want, name)
        if right is None:
            assert mine is None, name
            continue
        mine = mine.cpu()
        assert mine.dtype == right.dtype, name
        assert torch.equal(mine, right), name
    assert (got.max_seqlen, got.instance_ids) == (want.max_seqlen, want.instance_ids)
    assert (got.layout, got.groups) == (want.layout, want.groups)


def address(trajectory: Any, array: np.ndarray[Any, Any]) -> int:
    """Return the place of a view's elements in CUDA's mapping; views use a second mapping."""
    at = int(array.__array_interface__["data"][0])
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(border, 16) for border in line.split()[0].split("-"))
        if start <= at < end:
            assert line.split()[1].startswith("r--"), line
            return mapping_of(trajectory)[0] + at - start
    raise AssertionError(f"nothing is mapped at {at:#x}")


FIELDS = ("tokens", "loss_mask", "logprobs", "advantages")


def told(count: int, flags: Any = None) -> dict[str, Any]:
    """Return a caller's data on its sequences: numbers to tell them apart."""
    return {"advantages": np.arange(count, dtype=np.float32) / 7, "flags": flags}


def chunks_by_hand(
    trajectories: list[Any], shift: int, chunk: int, more: dict[str, Any]
) -> list[Any]:
    """Launches with their chunks, from the arrays themselves."""
    launches: dict[tuple[int, ...], list[list[Any]]] = {}
    borders = [0, *itertools.accumulate(len(t["tokens"]) for t in trajectories)]
    for number, t in enumerate(trajectories):
        given = [dict(t).get(name) for name in FIELDS]
        kinds = tuple(-1 if a is None else KINDS.index(a.dtype) for a in given)
        length = len(t["tokens"])
        flags = 0 if more["flags"] is None else more["flags"][number]
        if not length:
            continue
        places = [(0 if a is None else address(t, a) + shift, a) for a in given]
        launches.setdefault(kinds, []).extend(
            [
                *(0 if a is None else first + at * a.itemsize for first, a in places),
                borders[number] + at,
                (at, min(chunk, length - at)),
                (flags, more["advantages"][number]),
            ]
            for at in range(0, length, chunk)
        )
    return list(launches.items())


def read_chunks(memory: np.ndarray[Any, Any], first: int, count: int) -> list[list[Any]]:
    lines = memory.view(np.int64).reshape(-1, CHUNK_WORDS)[first : first + count]
    spans, orders, gains = (np.ascontiguousarray(lines[:, at]) for at in (5, 6, 6))
    return [
        [*line[:5].tolist(), tuple(span), (order[0], gain[1])]
        for line, span, order, gain in zip(
            lines,
            spans.view(np.int32).reshape(-1, 2).tolist(),
            orders.view(np.int32).reshape(-1, 2).tolist(),
            gains.view(np.float32).reshape(-1, 2),
            strict=True,
        )
    ]


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_the_table_maps_chunks_to_places(bus: Bus, seed: int, chunk: int, flagged: bool) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        put_random(producer, seed, 8, 300)
        groups = consumer.take(64, 10)
        plan = measure(groups)
        trajectories = plan.trajectories
        assert trajectories == [t for group in groups for t in group]
        assert plan.sizes.tolist() == [4] * 8
        flags = np.arange(32, dtype=np.uint8) % 4 if flagged else None
        more = told(32, flags)
        memory = np.full(1 << 20, 0xAA, np.uint8)
        table = kernel_table(plan, memory, shift=4096, chunk_tokens=chunk, **more)
        nbytes = plan.table_bytes(chunk)
        lengths = [len(t["tokens"]) for t in trajectories]
        assert (plan.total, plan.longest) == (sum(lengths), max(lengths))
        assert plan.samples[3].tolist() == lengths
        chunks = memory[table.chunks_at : nbytes]
        mine = [
            (kinds, read_chunks(chunks, first, count)) for first, count, kinds in table.launches
        ]
        assert mine == chunks_by_hand(trajectories, 4096, chunk, more)

        def part(at: int, dtype: Any, count: int) -> list[Any]:
            assert at % 64 == 0
            return memory[at:].view(dtype)[:count].tolist()  # type: ignore[no-any-return]

        assert part(table.found_at, np.int32, 3) == [0, 0, 0]
        assert part(table.borders_at, np.int32, 33) == [0, *itertools.accumulate(lengths)]
        assert part(table.versions_at, np.int64, 32) == [t.policy_version for t in trajectories]
        assert part(table.sizes_at, np.int64, 8) == [4] * 8
        assert part(table.scores_at, np.float32, 32) == [np.float32(t.score) for t in trajectories]
        assert (memory[nbytes:] == 0xAA).all()
        assert plan.instance_ids == [t.instance_id for t in trajectories]
        for room in (nbytes - 1, table.chunks_at - 1, table.borders_at, 0):
            memory[:] = 0xAA
            with pytest.raises(ValueError, match=rf"memory: expected uint8 \[{nbytes}\]"):
                kernel_table(plan, memory[:room], shift=0, chunk_tokens=chunk, **more)
            assert (memory == 0xAA).all()


def test_a_plan_refuses_unfit_groups_and_memory(bus: Bus) -> None:
    memory = np.zeros(4096, np.uint8)
    names = FieldNames(logprobs=None)
    with pytest.raises(TypeError, match="groups: expected Groups of a Consumer, got str"):
        measure(["group"])  # type: ignore[list-item]
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put("a", group_size=1, index=0, tokens=np.arange(3), logprobs=np.zeros(2))
        groups = consumer.take(1, 10)
        with pytest.raises(ValueError, match="'logprobs': expected as many elements as tokens"):
            measure(groups)
        plan = measure(groups, names)

        def table(memory: Any = memory, chunk_tokens: int = 8, **changed: Any) -> None:
            kernel_table(plan, memory, shift=0, chunk_tokens=chunk_tokens, **told(1) | changed)

        for wrong in (memory[::2], memory.view(np.int32), np.frombuffer(bytes(4096), np.uint8)):
            for attempt in (table, lambda memory: plan.gather(memory, *told(1).values(), (), 1)):
                with pytest.raises(ValueError, match="memory: expected a contiguous writable"):
                    attempt(wrong)
        with pytest.raises(ValueError, match="memory on a word's border"):
            table(memory[1:])
        for without_tokens in (lambda: table(chunk_tokens=0), lambda: plan.table_bytes(0)):
            with pytest.raises(ValueError, match="chunks of 1 token or more"):
                without_tokens()
        for name, values in (("advantages", np.zeros(2, "f4")), ("flags", np.zeros(1, "f4"))):
            with pytest.raises(ValueError, match=f"{name}: expected a contiguous array"):
                table(**{name: values})
        with pytest.raises(TypeError, match="words: expected a tuple of bytes"):
            mentioning(plan.trajectories, ("text",))  # type: ignore[arg-type]
        with pytest.raises(SystemError):
            plan.gather(memory, *told(1).values(), (memory,), 1)
        table()
        groups[0].trajectories.append("no trajectory")
        with pytest.raises(TypeError, match="expected trajectories, got str"):
            measure(groups, names)
        groups[0].trajectories.pop()
        consumer.ack(groups)
        for attempt in (table, lambda: plan.gather(memory, *told(1).values(), (), 1)):
            with pytest.raises(BusClosedError, match="was acknowledged"):
                attempt()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_and_the_host_make_one_batch(bus: Bus, spawn: Spawner, seed: int) -> None:
    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    program = Path(__file__).with_name("interpreted_kernel.py")
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    said = spawn.file(program, bus.name, seed, env=env).finish(100).splitlines()
    assert said[-2:] == ["batches equal", "fields equal"]


def test_a_second_thread_is_told_who_is_in_the_packer_and_the_first_goes_on() -> None:
    from trainer_adapter.gpu.packer import OneThread

    packer = OneThread("GpuPacker", "give each thread a packer of its own")

    def enter() -> str:
        try:
            with packer:
                return "in"
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(1, thread_name_prefix="second") as pool:
        with packer:
            said = pool.submit(enter).result(30)
        assert "got thread 'second_0' while thread 'MainThread' is in it; give each" in said
        assert pool.submit(enter).result(30) == enter() == "in"


def test_memory_for_tables_is_used_again_only_when_it_was_given_back() -> None:
    from trainer_adapter.gpu.memory import Staging

    staging = Staging(torch.device("cpu"))
    first, second = staging.take(100), staging.take(100)
    assert first is not second
    staging.give_back(first)
    assert staging.take(first.array.nbytes) is first
    staging.give_back(second)
    larger = staging.take(second.array.nbytes + 1)
    assert larger.array.nbytes > second.array.nbytes


@contextlib.contextmanager
def packing(bus: Bus, **options: Any) -> Iterator[tuple[GpuPacker, Producer, Consumer]]:
    """A packer between a producer and a consumer; releases the ring first."""
    packer = GpuPacker("cuda", **options)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        try:
            yield packer, producer, consumer
        finally:
            packer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("transport", ["gather", "pinned", "copy"])
def test_transports_and_host_agree(bus: Bus, seed: int, transport: Any, layout: Any) -> None:
    options: dict[str, Any] = {"layout": layout, "truncated": "mask"}
    with packing(bus, transport=transport, **options) as (packer, producer, consumer):
        for number, longest in enumerate((60, 5000, 1)):
            put_random(producer, seed + number, 8, longest)
            groups = consumer.take(64, 10)
            batch = packer.deliver(packer.pack(groups))
            assert batch.transport == transport
            assert batch.tokens.device == torch.device("cuda", torch.cuda.current_device())
            assert_same(batch, pack(groups, **options))
            consumer.ack(groups)


@pytest.mark.gpu
def test_batches_overlap_and_records_may_change_after_arrival(bus: Bus, seed: int) -> None:
    with packing(bus) as (packer, producer, consumer):
        waiting: list[tuple[Any, Batch]] = []
        for number in range(40):
            put_random(producer, seed + number, 8, 4000)
            groups = consumer.take(64, 10)
            waiting.append((packer.begin(groups), pack(groups)))
            if len(waiting) > 2:
                pending, want = waiting.pop(0)
                assert_same(pending.finish(), want)
                consumer.ack(want.groups)


@pytest.mark.gpu
def test_an_unawaited_batch_keeps_its_table_until_its_kernel_ends(bus: Bus, seed: int) -> None:
    with packing(bus) as (packer, producer, consumer):
        put_random(producer, seed, 8, 4000)
        groups = consumer.take(64, 10)
        for _ in range(20):
            with torch.cuda.stream(packer._stream):
                torch.cuda._sleep(5_000_000)
            dropped = packer.begin(groups[:4])
            batch = dropped._batch
            del dropped
            # This may reuse the memory of its table.
            torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True).fill_(0xFF)
            assert_same(batch, pack(groups[:4]))


@pytest.mark.gpu
def test_a_ring_that_cannot_be_registered_is_packed_into_pinned_memory(bus: Bus, seed: int) -> None:
    with packing(bus) as (packer, producer, consumer):
        put_random(producer, seed, 4, 500)
        groups = consumer.take(64, 10)
        first = GpuPacker("cuda", transport="gather")
        assert_same(first.pack(groups), pack(groups))
        batch = packer.pack(groups)
        assert batch.transport == packer.transport == "pinned"
        assert "cannot be registered" in packer.reason
        assert_same(batch, pack(groups))
        assert torch.ones(3, device="cuda").sum().item() == 3
        first.close()


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_handler_says_how_its_batches_came(bus: Bus, seed: int, prefetch: int) -> None:
    with Producer(bus.name) as producer:
        put_random(producer, seed, 12, 800)
        with OnlineDataHandler(
            bus.name, groups_per_batch=4, device="cuda", prefetch=prefetch
        ) as handler:
            for _ in range(3):
                batch = handler.next_batch(10)
                assert batch.transport == handler.transport == "gather"
                assert_same(batch, pack(batch.groups))
                handler.ack(batch)
            assert handler.stats().acknowledged == 48


@pytest.mark.gpu
def test_fields_go_by_their_names_on_the_way_to_a_gpu_too(bus: Bus) -> None:
    names = FieldNames(tokens="ids", loss_mask=None, logprobs=None, advantages=None)
    with packing(bus, fields=names) as (packer, producer, consumer):
        producer.put("a", group_size=1, index=0, ids=np.arange(7), logprobs=np.ones(3))
        groups = consumer.take(1, 10)
        assert_same(packer.pack(groups), pack(groups, fields=names))


@pytest.mark.gpu
def test_training_that_is_under_way_is_not_waited_for(bus: Bus, seed: int) -> None:
    with packing(bus) as (packer, producer, consumer):
        put_random(producer, seed, 8, 4000)
        groups = consumer.take(64, 10)
        packer.pack(groups)
        busy = torch.cuda.Event()
        # About a second of the device's clock, on the training stream.
        torch.cuda._sleep(2_000_000_000)
        busy.record()
        batch = packer.pack(groups)
        assert not busy.query()
        assert_same(packer.deliver(batch), pack(groups))


class Registered:
    """Stands for CUDA's registration; reports whether the memory outlived it."""

    seen: ClassVar[list[str]] = []
    device_shift = 0

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address

    def close(self) -> None:
        there = f"{self.address:x}-" in Path("/proc/self/maps").read_text()
        Registered.seen.append("mapped" if there else "gone")


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_ring_stays_mapped_until_it_is_unregistered(
    monkeypatch: pytest.MonkeyPatch, bus: Bus, producer: Producer, how: str
) -> None:
    monkeypatch.setattr(gpu_memory, "Registration", Registered)
    Registered.seen.clear()
    stream: Any = SimpleNamespace(synchronize=lambda: None)
    consumer = Consumer(bus.name)
    producer.put("q", group_size=1, index=0, tokens=np.arange(3), timeout=10)
    (group,) = consumer.take(1, 10)
    address, nbytes, owner = mapping_of(group.trajectories[0])
    ring = gpu_memory.RegisteredRing(address, nbytes, owner, stream)
    consumer.ack([group])
    consumer.close()
    del consumer, group, owner
    with Consumer(bus.name):  # its successor maps the ring elsewhere
        if how == "close":
            ring.close()
            assert Registered.seen == ["mapped"]
        del ring
        gc.collect()
        assert Registered.seen == ["mapped"]
        assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_rings_follow_groups(monkeypatch: pytest.MonkeyPatch, bus: Bus, producer: Producer) -> None:
    monkeypatch.setattr(gpu_memory, "Registration", Registered)
    monkeypatch.setattr(gpu_packer, "_on", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(gpu_packer, "begin_gather", lambda *args, **options: "begun")
    Registered.seen.clear()
    packer: Any = object.__new__(GpuPacker)
    packer._ring = packer._staging = packer.device = packer._layout = None
    packer._stream = SimpleNamespace(synchronize=lambda: None)
    owners = []
    for turn in range(2):
        with Consumer(bus.name) as consumer:
            for sample in range(2):
                producer.put(f"{turn}.{sample}", group_size=1, index=0, tokens=[3], timeout=10)
                groups = consumer.take(1, 10)
                assert packer._gather(HostPacker().plan(groups)) == "begun"
                owners.append(packer._ring.owner)
                assert mapping_of(groups[0].trajectories[0])[2] is owners[-1]
                consumer.ack(groups)
    assert owners[0] is owners[1] is not owners[2] is owners[3]
    assert Registered.seen == ["mapped"]


@pytest.mark.gpu
def test_a_packer_outlives_its_consumer_and_may_be_dropped(bus: Bus, seed: int) -> None:
    packer = GpuPacker("cuda", transport="gather")
    with Producer(bus.name) as producer:
        for turn in range(4):
            with Consumer(bus.name) as consumer:
                put_random(producer, seed + turn, 8, 300)
                groups = consumer.take(64, 10)
                assert_same(packer.deliver(packer.pack(groups)), pack(groups))
                consumer.ack(groups)
                del groups
    del consumer, packer
    assert torch.zeros(1 << 28, dtype=torch.uint8, device="cuda").sum().item() == 0
