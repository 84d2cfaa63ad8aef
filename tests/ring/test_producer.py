"""What producers may put, and what comes out again; reservations, full buses, tasks and threads."""

import array
import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, fill, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer


@pytest.fixture
def small_bus(bus_name: str) -> Iterator[Bus]:
    """Sixteen extents of a page each; a record takes at most four of them."""
    with Bus.create(bus_name, capacity=65536, max_producers=8) as handle:
        yield handle


@contextmanager
def attached(bus: Bus, **options: Any) -> Iterator[tuple[Producer, Consumer]]:
    with Producer(bus.name, **options) as producer, Consumer(bus.name) as consumer:
        yield producer, consumer
        assert consumer.stats().balanced, consumer.stats()


def take_one(consumer: Consumer) -> shmbus.Trajectory:
    [[trajectory]] = consumer.take(1, 10.0)
    return trajectory


def put_one(producer: Producer, key: str = "a", **more: Any) -> None:
    producer.put(key, **{"group_size": 1, "index": 0, "timeout": 10.0, **more})


def fill_pages(producer: Producer) -> int:
    x = np.zeros(3500, np.uint8)
    return fill(lambda number: put_one(producer, f"fill-{number}", x=x, timeout=0))


# --- possible puts

RECORD_DTYPE = np.dtype([("a", "<i4"), ("b", ">f8", (2, 3)), ("c", [("d", "S5"), ("e", "?")])])
DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    "<i2", ">i4", ">u8", ">f2", ">f8", ">c16", "<M8[ns]", "<m8[us]", ">M8[D]",
    "S1", "S7", "<U3", ">U3", "V5",
]  # fmt: skip


def arbitrary(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Any bytes for an array of this dtype, with proper booleans and text."""
    count = int(np.prod(shape, dtype=int))
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(dtype).reshape(shape)
    if dtype.kind == "U":
        return np.array([chr(65 + i % 1000) * 2 for i in range(count)], dtype).reshape(shape)
    raw = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [*DTYPES, RECORD_DTYPE], ids=str)
def test_every_dtype_of_fixed_size_comes_out_as_it_went_in(bus: Bus, dtype: Any, seed: int) -> None:
    value = arbitrary(np.dtype(dtype), (3, 5), seed)
    with attached(bus) as (producer, consumer):
        put_one(producer, x=value)
        got = take_one(consumer)["x"]
        assert (got.dtype, got.shape) == (value.dtype, (3, 5))
        assert got.tobytes() == value.tobytes()
        assert got.flags.aligned and got.flags.c_contiguous and not got.flags.writeable


SHAPES = [(), (1,), (0,), (7,), (0, 5), (5, 0), (2, 3, 4), (1,) * 32, (0,) * 32, (3, 0, 2**40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_comes_out_as_it_went_in(bus: Bus, shape: tuple[int, ...]) -> None:
    value = np.arange(int(np.prod(shape, dtype=float)), dtype=np.int32).reshape(shape)
    with attached(bus) as (producer, consumer):
        put_one(producer, x=value, y=np.float64(2.5))
        trajectory = take_one(consumer)
        assert trajectory.shape("x") == shape == trajectory["x"].shape
        assert np.array_equal(trajectory["x"], value)
        assert (trajectory["y"].shape, float(trajectory["y"])) == ((), 2.5)


def sources() -> dict[str, tuple[Any, Any]]:
    base = np.arange(120, dtype=np.int64).reshape(4, 5, 6)
    frozen = base.copy()
    frozen.flags.writeable = False
    record = np.zeros(6, [("a", "i1"), ("b", "<i4")])
    record["b"] = range(6)
    return {
        "backwards, every other element": (base[0, 0, ::-2], base[0, 0, ::-2]),
        "fortran order": (np.asfortranarray(base), base),
        "transposed": (base.transpose(2, 0, 1), base.transpose(2, 0, 1)),
        "read-only": (frozen, base),
        "unaligned field": (record["b"], np.arange(6, dtype=np.int32)),
        "a subclass": (base.view(np.recarray), base),
        "array.array": (array.array("d", [1.5, 2.5]), np.array([1.5, 2.5])),
        "memoryview": (memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)),
        "a numpy scalar": (np.uint16(9), np.array(9, np.uint16)),
    }


@pytest.mark.parametrize("kind", sources())
def test_any_source_of_an_array_is_copied_by_value(bus: Bus, kind: str) -> None:
    given, expected = sources()[kind]
    with attached(bus) as (producer, consumer):
        put_one(producer, x=given)
        got = take_one(consumer)["x"]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(got, expected)


def test_torch_tensors_are_taken_as_they_are(bus: Bus) -> None:
    import torch

    tensors = {
        "plain": torch.arange(6).reshape(2, 3), "strided": torch.arange(10)[::2],
        "half": torch.ones(3, dtype=torch.float16), "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(4.0), "empty": torch.zeros((0, 3)),
    }  # fmt: skip
    with attached(bus) as (producer, consumer):
        put_one(producer, **tensors)
        trajectory = take_one(consumer)
        for name, tensor in tensors.items():
            assert np.array_equal(trajectory[name], tensor.numpy()), name
        with pytest.raises(TypeError, match="x: Tensor gives no NumPy array"):
            put_one(producer, "b", x=torch.ones(2, device="meta"))


METAS: list[Any] = [
    {}, [], 0, 0.0, "", False, b"", {"a": None}, {"deep": [[[{"x": [1, 2.5, True]}]]]},
    "\N{SNOWMAN}" * 1000, b"\0\xff" * 500, -(2**63), 2**64 - 1, list(range(10_000)),
]  # fmt: skip


def test_any_meta_comes_out_as_it_went_in_and_an_empty_one_is_not_none(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        for meta in METAS:
            put_one(producer, meta=meta)
            got = take_one(consumer).meta
            assert (got, type(got)) == (meta, type(meta))


def test_zero_and_empty_are_ordinary_values_and_differ_from_none(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        producer.put("a", group_size=1, index=0, score=0.0, policy_version=0, round=0, meta={})
        producer.put("a", group_size=1, index=0)
        with_round, without = consumer.take(2, 10.0)
        [first], [second] = with_round, without
        assert (first.index, first.score, first.policy_version) == (0, 0.0, 0)
        assert (first.round, with_round.round, first.meta) == (0, 0, {})
        assert (second.round, without.round, second.meta) == (None, None, None)
        assert list(first) == list(first.keys()) == []
        big = {"score": -1e38, "policy_version": 2**63 - 1, "round": 2**63 - 1}
        odd = {"score": np.float32(0.5), "policy_version": np.int16(3), "round": np.uint8(4)}
        for values in (big, odd, {"score": True, "policy_version": 1, "round": 1}):
            put_one(producer, **values)
            trajectory = take_one(consumer)
            assert {name: getattr(trajectory, name) for name in values} == values


def test_any_text_is_an_instance_id_and_the_name_of_a_field(bus: Bus) -> None:
    names = [f"f{number}" for number in range(60)]
    names += ["with space", "\N{SNOWMAN}", "self", "n" * 255]
    arrays = {name: np.arange(number, dtype=np.int16) for number, name in enumerate(names)}
    with attached(bus) as (producer, consumer):
        for key in ("a" * 255, "\N{SNOWMAN}" * 85, "\0", " ", "a/b\n", "0"):
            put_one(producer, key, **arrays)
            trajectory = take_one(consumer)
            assert trajectory.instance_id == key
            assert trajectory.keys() == tuple(names)
            assert all(np.array_equal(trajectory[name], arrays[name]) for name in names)


def test_the_largest_record_fits(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        # Header, shape, id and schema take three cache lines.
        put_one(producer, x=np.zeros(producer.record_limit - 192, np.uint8))
        assert take_one(consumer).nbytes == producer.record_limit == bus.record_limit


# --- put_many


def items(n: int) -> list[dict[str, Any]]:
    return [
        {"instance_id": "m", "group_size": n, "index": i, "x": np.full(500, i)} for i in range(n)
    ]


@pytest.mark.parametrize("at", [0, 7, 19])
@pytest.mark.parametrize(
    "spoiled",
    [{"index": 99}, {"x": object()}, {"meta": object()}, {"x": np.zeros(2**20)}],
    ids=["index", "field", "meta", "size"],
)
def test_put_many_writes_nothing_when_one_item_is_bad(
    bus: Bus, spoiled: dict[str, Any], at: int
) -> None:
    with attached(bus) as (producer, consumer):
        given = items(20)
        given[at].update(spoiled)
        with pytest.raises((TypeError, ValueError)) as caught:
            producer.put_many(given, timeout=0)
        assert getattr(caught.value, "accepted", 0) == 0
        assert producer.stats().committed == consumer.stats().committed == 0
        assert producer.put_many([]) == 0
        assert producer.put_many(iter(items(20))) == 20
        assert [int(t["x"][0]) for t in consumer.take(1, 10)[0]] == list(range(20))


def test_put_many_on_a_full_bus_has_checked_all_and_says_what_was_accepted(small_bus: Bus) -> None:
    with attached(small_bus) as (producer, consumer):
        given = items(40)
        given[39]["index"] = -1
        with pytest.raises(ValueError, match="index"):
            producer.put_many(given, timeout=0)
        assert consumer.stats().committed == len(consumer.take(9, 0)) == 0
        with pytest.raises(shmbus.BusFullError) as caught:
            producer.put_many(items(40), timeout=0)
        assert 0 < caught.value.accepted < 40
        assert producer.stats().committed == caught.value.accepted


def test_put_many_keeps_what_it_was_given_while_it_converts_it(bus: Bus) -> None:
    class Fickle:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            item.clear()
            self.others = ["other" * 9 + str(number) for number in range(1000)]
            return np.zeros(3)

    item = {"instance_id": "".join(["mine"] * 9), "group_size": 1, "index": 0, "x": Fickle()}
    with attached(bus) as (producer, consumer):
        assert producer.put_many([item]) == 1
        assert take_one(consumer).instance_id == "mine" * 9


def test_put_many_goes_on_where_a_reader_makes_room_whatever_its_fields(small_bus: Bus) -> None:
    count = 120
    given = [
        {"instance_id": f"m{i}", "group_size": 1, "index": 0, f"field{i % 20}": np.full(200, i)}
        for i in range(count)
    ]
    with attached(small_bus) as (producer, consumer), ThreadPoolExecutor(1) as pool:
        putting = pool.submit(producer.put_many, given, timeout=60)
        for number in range(count):
            with consumer.take(1, 10)[0] as group:
                assert group.instance_id == f"m{number}"
                assert group[0].keys() == (f"field{number % 20}",)
                assert np.array_equal(group[0][f"field{number % 20}"], np.full(200, number))
        assert putting.result(30) == count


# --- reservations

FIELDS = {"tokens": ("int32", 100), "grid": (np.float32, (4, 5)), "one": ("u1", ())}


def reserve(producer: Producer, key: str = "r", x: Any = None, **more: Any) -> shmbus.Reservation:
    arguments = {"group_size": 1, "index": 0, "fields": FIELDS, "timeout": 10, **more}
    return producer.reserve(key, **arguments)


def test_a_reservation_is_delivered_when_it_is_committed_and_not_before(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        with reserve(producer, score=1.0, policy_version=3, round=0, meta={"a": 1}) as slot:
            slot["tokens"][:] = np.arange(100)
            slot["grid"][...] = 2.5
            slot["one"][...] = 9
            assert slot.fields == tuple(FIELDS)
            assert consumer.take(1, 0) == []
            slot.score = 0.25
            slot.policy_version += 1
            with pytest.raises(ValueError, match="policy_version: expected 0 to"):
                slot.policy_version = -1
            with pytest.raises(ValueError, match="score: expected a finite number"):
                slot.score = float("nan")
        with pytest.raises(shmbus.BusClosedError, match="committed"):
            slot.policy_version = 5
        trajectory = take_one(consumer)
        assert np.array_equal(trajectory["tokens"], np.arange(100))
        assert np.array_equal(trajectory["grid"], np.full((4, 5), 2.5))
        assert (int(trajectory["one"]), trajectory.score) == (9, 0.25)
        assert (trajectory.policy_version, trajectory.round, trajectory.meta) == (4, 0, {"a": 1})


def test_an_exception_or_an_abort_leaves_nothing_to_deliver(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        with pytest.raises(KeyError, match="reason"), reserve(producer) as slot:
            raise KeyError("reason")
        reserve(producer).abort()
        reserve(producer)  # collected without an end
        with reserve(producer) as slot:
            slot.abort()
        assert consumer.take(1, 0) == []
        assert consumer.stats().committed == 0
        assert producer.stats().aborted == 4


def test_a_resize_keeps_what_is_in_front_and_can_be_done_again(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        with reserve(producer) as slot:
            slot["tokens"][:] = np.arange(100)
            for name, size in [("tokens", 60), ("tokens", 50), ("grid", 0)]:
                slot.resize(name, size)
                assert len(slot[name]) == size
            for name, size in [("tokens", 51), ("tokens", -1), ("one", 0)]:
                with pytest.raises(ValueError, match=name):
                    slot.resize(name, size)
        trajectory = take_one(consumer)
        assert np.array_equal(trajectory["tokens"], np.arange(50))
        assert trajectory["grid"].shape == (0, 5)


def test_meta_can_be_set_later_as_far_as_there_is_room(bus: Bus) -> None:
    with attached(bus, checksum=True) as (producer, consumer):
        for key, first, then, room in [
            ("a", None, {"late": "x" * 900}, 1024),
            ("b", {"early": "y" * 2000}, {"late": 1}, 0),
            ("c", {"early": 1}, None, 1024),
        ]:
            with reserve(producer, key, meta=first, meta_room=room) as slot:
                slot["tokens"][:] = 7
                with pytest.raises(ValueError, match=r"meta.*room"):
                    slot.meta = "z" * 5000
                slot.meta = then
            trajectory = take_one(consumer)
            assert trajectory.meta == then
            assert np.array_equal(trajectory["tokens"], np.full(100, 7))


def test_arrays_of_a_reservation_are_read_only_after_its_end(bus: Bus) -> None:
    with attached(bus) as (producer, consumer):
        slot = reserve(producer)
        kept = [slot["tokens"]]
        kept[0][:] = 1
        slot.resize("tokens", 50)
        kept.append(slot["tokens"])
        slot.commit()
        for view in kept:
            with pytest.raises(ValueError, match="read-only"):
                view[:] = 5
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        assert np.array_equal(take_one(consumer)["tokens"], np.ones(50))


def test_what_was_made_of_an_array_and_kept_never_reaches_a_later_record(small_bus: Bus) -> None:
    with attached(small_bus) as (producer, consumer):
        slots = [reserve(producer, f"r{i}", fields={"x": ("u1", 3000)}) for i in range(4)]
        kept = [slot["x"][10:] for slot in slots] + [memoryview(slot["x"]) for slot in slots]
        for slot, end in zip(slots, ["commit", "abort"] * 2, strict=True):
            getattr(slot, end)()
        del slots, slot
        consumer.ack(consumer.take(9, 10))
        for number in range(100):
            put_one(producer, f"n{number}", x=np.full(3000, 7, np.uint8))
            for view in kept:
                with suppress(ValueError, TypeError):
                    view[0] = 99
            with consumer.take(1, 10)[0] as group:
                assert np.array_equal(group[0]["x"], np.full(3000, 7))
        del kept, view
        wait_until(lambda: consumer.take(1, 0) == [] and consumer.stats().free >= 57344)


def test_closing_a_producer_aborts_what_is_open(bus: Bus) -> None:
    with Consumer(bus.name) as consumer:
        producer = Producer(bus.name)
        slot = reserve(producer)
        view = slot["tokens"]
        put_one(producer)
        producer.close()
        producer.close()
        for use in (slot.commit, lambda: put_one(producer)):
            with pytest.raises(shmbus.BusClosedError, match=r"committed or aborted|closed"):
                use()
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 1
        assert [group.instance_id for group in consumer.take(9, 0)] == ["a"]
        assert consumer.stats().balanced


# --- a full bus


def test_without_a_timeout_a_full_bus_is_an_answer_at_once(small_bus: Bus) -> None:
    with attached(small_bus) as (producer, consumer):
        count = fill_pages(producer)
        with pytest.raises(shmbus.BusFullError, match=r"is full.* 0 of 16 are free") as caught:
            put_one(producer, x=np.zeros(3500, np.uint8), timeout=0)
        assert (caught.value.accepted, producer.stats().full_waits) == (0, 2)
        assert [g.instance_id for g in consumer.take(99, 9)] == [f"fill-{i}" for i in range(count)]


def test_put_waits_as_long_as_it_takes_for_space_and_as_its_timeout_says(small_bus: Bus) -> None:
    with attached(small_bus) as (producer, consumer), ThreadPoolExecutor(1) as pool:
        fill_pages(producer)
        for use in (put_one, partial(reserve, fields={"x": ("u1", 3500)})):
            began = time.monotonic()
            with pytest.raises(shmbus.BusFullError):
                use(producer, x=np.zeros(3500, np.uint8), timeout=0.2)
            assert time.monotonic() - began >= 0.2
        waiting = pool.submit(put_one, producer, "late", x=np.zeros(3500, np.uint8), timeout=None)
        for group in consumer.take(99, 10):
            assert not waiting.done()
            group.ack()
        waiting.result(30)
        assert take_one(consumer).instance_id == "late"


# --- asyncio


@pytest.mark.parametrize("freed", [0, 1], ids=["no space", "too little space"])
async def test_aput_on_a_full_bus_neither_blocks_its_loop_nor_spins(
    small_bus: Bus, freed: int
) -> None:
    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    with attached(small_bus) as (producer, consumer):
        fill_pages(producer)
        if freed:
            consumer.take(1, 10)[0].ack()
        ticks = 0
        other = asyncio.create_task(tick())
        before = producer.stats().full_waits
        with pytest.raises(shmbus.BusFullError):
            await producer.aput("a", group_size=1, index=0, x=np.zeros(1500), timeout=0.5)
        other.cancel()
        assert ticks >= 5
        assert producer.stats().full_waits - before < 50


async def test_hundreds_of_aputs_wait_together_and_all_arrive(small_bus: Bus) -> None:
    with attached(small_bus) as (producer, consumer):
        more = {"group_size": 1, "index": 0, "timeout": 60}
        puts = [producer.aput(f"k{i}", x=np.full(100, i), **more) for i in range(300)]
        tasks = [asyncio.create_task(put) for put in puts]
        while consumer.stats().acknowledged < 300:
            for group in consumer.take(64, 0):
                assert np.array_equal(group[0]["x"], np.full(100, int(group.instance_id[1:])))
                group.ack()
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)


# --- threads and signals


def test_threads_share_a_producer_and_every_record_arrives_whole(bus: Bus, seed: int) -> None:
    threads, each = 6, 150
    sizes = random.Random(seed).choices([10, 3000, 90_000], k=each)

    def work(producer: Producer, thread: int) -> None:
        for number in range(thread * each, (thread + 1) * each):
            x = np.full(sizes[number % each], number, np.int32)
            if number % 3 == 0:
                with reserve(producer, f"n{number}", fields={"x": (x.dtype, x.size)}) as slot:
                    slot["x"][:] = x
            else:
                put_one(producer, f"n{number}", x=x, timeout=60)

    with attached(bus) as (producer, consumer), ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(work, producer, thread) for thread in range(threads)]
        seen: dict[int, int] = {}
        while len(seen) < threads * each:
            [group] = consumer.take(1, 60)
            number = int(group.instance_id[1:])
            assert np.array_equal(group[0]["x"], np.full(sizes[number % each], number, np.int32))
            seen[number] = group[0].sequence
            group.ack()
        for future in done:
            future.result(60)
        assert sorted(seen.values()) == list(range(threads * each))


def test_a_put_that_waits_keeps_its_fields_whatever_other_threads_put(small_bus: Bus) -> None:
    with attached(small_bus) as (producer, consumer), ThreadPoolExecutor(1) as pool:
        put_one(producer, mine=np.arange(400))
        fill_pages(producer)
        before = producer.stats().full_waits
        waiting = pool.submit(put_one, producer, "late", mine=np.arange(400))
        wait_until(lambda: producer.stats().full_waits > before)
        for number in range(200):
            with pytest.raises(shmbus.BusFullError):
                put_one(producer, timeout=0, **{f"{'other' * 5}{number}": np.zeros(3500, np.int8)})
        consumer.ack(consumer.take(99, 10))
        waiting.result(30)
        late = take_one(consumer)
        assert late.keys() == ("mine",)
        assert np.array_equal(late["mine"], np.arange(400))


def test_a_list_that_changes_while_its_put_waits_arrives_as_it_was(small_bus: Bus) -> None:
    value = list(range(900))
    with attached(small_bus) as (producer, consumer), ThreadPoolExecutor(1) as pool:
        fill_pages(producer)
        before = producer.stats().full_waits
        waiting = pool.submit(put_one, producer, "late", tokens=value)
        wait_until(lambda: producer.stats().full_waits > before)
        value.clear()
        consumer.ack(consumer.take(99, 10))
        waiting.result(30)
        assert take_one(consumer)["tokens"].tolist() == list(range(900))


INTERRUPTED = """
import os, signal, sys, numpy, shmbus
producer = shmbus.Producer(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: producer.close())
class Slow:
    def __array__(self, dtype=None, copy=None):
        os.kill(os.getpid(), signal.SIGUSR1)
        return numpy.zeros(10)
item = dict(instance_id="a", group_size=1, index=0, x=Slow())
try:
    producer.put(**item) if sys.argv[2] == "put" else producer.put_many([item])
except shmbus.BusClosedError:
    pass
print("closed", producer.closed)
"""


@pytest.mark.parametrize("verb", ["put", "put_many"])
def test_a_signal_handler_may_close_the_producer_that_it_interrupts(
    bus: Bus, spawn: Spawner, verb: str
) -> None:
    assert spawn.script(INTERRUPTED, bus.name, verb).finish() == "closed True\n"
    with Consumer(bus.name) as consumer:
        assert consumer.stats().balanced


def test_closing_while_another_thread_copies_never_writes_into_a_later_record(bus: Bus) -> None:
    big = np.full(bus.record_limit - 4096, 1, np.uint8)
    with Consumer(bus.name) as consumer, Producer(bus.name) as other:
        for number in range(20):
            producer = Producer(bus.name)
            with ThreadPoolExecutor(1) as pool:
                copying = pool.submit(put_one, producer, f"big{number}", x=big)
                time.sleep(number / 10_000)
                producer.close()
                consumer.stats()
                put_one(other, f"next{number}", x=np.full(big.size, 2, np.uint8))
                with suppress(shmbus.BusClosedError):
                    copying.result(30)
            for group in consumer.take(9, 10):
                value = 1 if group.instance_id.startswith("big") else 2
                assert np.all(group[0]["x"] == value)
                group.ack()
        assert consumer.stats().balanced
