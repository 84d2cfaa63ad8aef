"""`aput_many`: a list from an event loop, over a bus that is full more often than not."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmbus import Bus, BusFullError, Consumer, Producer

ROOM = 15  # records of an extent each


@pytest.fixture
def name(bus_name: str) -> Iterator[str]:
    with Bus.create(bus_name, "64KiB", max_producers=2):
        yield bus_name


def items(count: int) -> list[dict[str, Any]]:
    return [
        {"instance_id": f"k{i}", "group_size": 1, "index": 0, "x": np.full(3800, i % 100, np.uint8)}
        for i in range(count)
    ]


async def take_all(consumer: Consumer, count: int) -> list[str]:
    taken: list[str] = []
    while len(taken) < count:
        for group in consumer.take(64, 0):
            taken.append(group.instance_id)
            assert set(group[0]["x"]) == {int(group.instance_id[1:]) % 100}
            group.ack()
        await asyncio.sleep(0)
    return taken


async def test_a_list_that_is_longer_than_the_bus_arrives_whole_and_in_order(name: str) -> None:
    with Producer(name) as producer, Consumer(name) as consumer:
        task = asyncio.create_task(producer.aput_many(iter(items(5 * ROOM)), timeout=60))
        taken = await take_all(consumer, 5 * ROOM)
        assert await task == 5 * ROOM
    assert taken == [f"k{i}" for i in range(5 * ROOM)]


async def test_a_list_that_found_no_room_says_how_much_of_it_was_put(name: str) -> None:
    every = items(3 * ROOM)
    with Producer(name) as producer, Consumer(name) as consumer:
        with pytest.raises(BusFullError) as caught:
            await producer.aput_many(every, timeout=0)
        done = caught.value.accepted
        assert 0 < done == producer.stats().committed
        rest = asyncio.create_task(producer.aput_many(every[done:], timeout=60))
        assert await take_all(consumer, 3 * ROOM) == [f"k{i}" for i in range(3 * ROOM)]
        assert await rest == 3 * ROOM - done


async def test_a_cancelled_list_says_how_much_of_it_was_put_and_puts_no_more(name: str) -> None:
    said: list[int] = []

    async def put(producer: Producer) -> None:
        try:
            await producer.aput_many(items(3 * ROOM))
        except asyncio.CancelledError as error:
            said.append(error.accepted)  # type: ignore[attr-defined]
            raise

    with Producer(name) as producer, Consumer(name) as consumer:
        task = asyncio.create_task(put(producer))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert said == [producer.stats().committed]
        assert len(await take_all(consumer, said[0])) == said[0]
        await asyncio.sleep(0.05)
        assert consumer.take(1, 0) == []
