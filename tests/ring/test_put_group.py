"""A group put whole appears with its every sample, or not at all."""

import asyncio
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import beside, ends_of, fill

from shmbus import Bus, Consumer, Producer, RecordTooLargeError

DATA = np.arange(100, dtype=np.int32)


def samples(count: int, elements: int = 100) -> list[dict[str, object]]:
    return [{"score": float(i), "data": np.full(elements, i, np.int32)} for i in range(count)]


@pytest.fixture
def small(bus_name: str) -> Iterator[tuple[Producer, Consumer]]:
    with ends_of(Bus.create(bus_name, "64KiB", max_producers=2, extent_bytes=4096)) as ends:
        yield ends


def test_the_samples_have_what_was_given_for_the_group_and_their_own(
    bus: Bus, producer: Producer
) -> None:
    round = producer.put_group(
        "q",
        [{"score": 1.0, "data": DATA}, {"data": DATA[:3], "meta": "own", "policy_version": 9}],
        meta="all", policy_version=(3, 5), split="eval", need=1,
    )  # fmt: skip
    with Consumer(bus.name) as consumer:
        assert consumer.take(timeout=0) == []
        [group] = consumer.take(timeout=10, split="eval")
        assert (group.instance_id, group.round, group.split) == ("q", round, "eval")
        assert (group.size, group.need, len(group), group.complete) == (2, 1, 1, True)
        assert (group[0].score, group[0].meta, group[0].index) == (1.0, "all", 0)
        assert (group[0].policy_version, group[0].newest_policy_version) == (3, 5)
        group.ack()
        # The other sample came after the group had what it needs.
        assert consumer.stats().dropped == {"surplus": 1} and consumer.stats().balanced


def test_a_prompt_that_is_put_again_is_another_group(bus: Bus, producer: Producer) -> None:
    first, second = (producer.put_group("q", samples(3)) for _ in range(2))
    assert first != second
    with Consumer(bus.name) as consumer:
        groups = consumer.take(timeout=10)
        assert [(group.round, len(group)) for group in groups] == [(first, 3), (second, 3)]


def test_a_group_without_room_leaves_nothing_and_waits_for_all_of_it(
    small: tuple[Producer, Consumer],
) -> None:
    producer, consumer = small
    put = fill(lambda number: producer.put_group(f"g{number}", samples(4, 600), timeout=0))
    assert put >= 3
    assert consumer.stats().committed == 4 * put
    held = consumer.take(64, timeout=10)
    assert [len(group) for group in held] == [4] * put
    with beside(producer.put_group, "late", samples(4, 600), timeout=60):
        time.sleep(0.05)
        assert consumer.stats().committed == 4 * put
        consumer.ack(held)
        [late] = consumer.take(timeout=30)
        assert (late.instance_id, len(late)) == ("late", 4)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ([], ValueError, ["samples", "at least one"]),
        ({"data": DATA}, TypeError, ["samples", "iterable of mappings", "dict"]),
        ([{"data": DATA}, 7], TypeError, ["sample 1", "mapping", "int"]),
        ([{"data": DATA}, {"data": DATA, "score": "x"}], TypeError, ["sample 1", "score", "str"]),
        ([{"data": DATA, "index": 0}], ValueError, ["sample 0", "'index'", "belongs to the group"]),
        ([{"data": DATA}, {"data": [1, object()]}], TypeError, ["sample 1", "data"]),
        ([{"data": DATA, "score": float("nan")}], ValueError, ["sample 0", "score", "finite"]),
        (
            [{"data": np.zeros(300_000, np.int32)}] * 2,
            RecordTooLargeError,
            ["whole", "1048576", "2400384", "put_many"],
        ),
    ],
)
def test_a_bad_group_names_the_sample_and_leaves_the_bus_as_it_was(
    bus: Bus, producer: Producer, given: object, kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        producer.put_group("q", given)  # type: ignore[arg-type]
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert producer.stats().committed == 0 and producer.stats().bytes == 0
    with Consumer(bus.name) as consumer:
        assert consumer.stats().committed == 0


async def test_an_awaited_group_waits_for_room_and_a_cancelled_one_leaves_nothing(
    small: tuple[Producer, Consumer],
) -> None:
    producer, consumer = small
    fill(lambda number: producer.put_group("fill", samples(4, 600), timeout=0))
    task = asyncio.create_task(producer.aput_group("never", samples(4, 600)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = asyncio.create_task(producer.aput_group("late", samples(4, 600), timeout=60))
    await asyncio.sleep(0.05)
    assert not task.done()
    consumer.ack(consumer.take(64, timeout=10))
    round = await task
    [late] = consumer.take(timeout=30)
    assert (late.instance_id, late.round, len(late)) == ("late", round, 4)


def test_a_group_takes_memory_by_the_fields_in_use_while_it_is_put(bus_name: str) -> None:
    size = 4096
    group = samples(size, elements=1)
    with Bus.create(bus_name, "64MiB"), Producer(bus_name) as producer:
        tracemalloc.start()
        try:
            producer.put_group("q", group)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < size * 2048
