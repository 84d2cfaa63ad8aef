"""Samples in hand, and waiting time of producers and trainers, seen from outside."""

import asyncio
import contextlib

import pytest
from conftest import Spawner

from shmbus import Bus, BusFullError, Consumer, Feeder, Producer
from shmbus.inspect.groups import read_groups
from shmbus.inspect.processes import ProducerChecks
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import read_status, status_of


def begun(name: str) -> dict[tuple[str, int], int | None]:
    return {
        (group.instance_id, cell.index): cell.producer
        for group in read_groups(name).groups
        for cell in group.cells
        if cell.state == "begun"
    }


def put(producer: Producer, index: int, key: str = "q", size: int = 8, **more: object) -> None:
    producer.put(key, group_size=size, index=index, score=1.0, tokens=[1], **more)  # type: ignore[arg-type]


def test_a_request_in_hand_is_a_sample_that_was_begun(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as one, Producer(bus_name) as two:
        with Feeder(bus_name) as feeder:
            feeder.request("q", group_size=4)
        first, second = one.requests.next(5.0), two.requests.next(5.0)
        assert first is not None and second is not None
        one.requests.answer(first, score=1.0, tokens=[1])
        assert begun(bus_name) == {("q", second.index): two.producer_id}
        two.requests.release(second)
        assert begun(bus_name) == {}


def test_a_request_in_hand_is_of_its_split_only(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer, Feeder(bus_name) as feeder:
        feeder.request("q", group_size=4, split="eval")
        first, second = producer.requests.next(5.0), producer.requests.next(5.0)
        assert first is not None and second is not None
        producer.requests.answer(first, score=1.0, tokens=[1])
        put(producer, 0, size=4)
        found = {
            group.split: [cell.index for cell in group.cells if cell.state == "begun"]
            for group in read_groups(bus_name).groups
        }
    assert found == {"eval": [second.index], "train": []}


IDLER = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
print("attached", flush=True)
time.sleep(600)
"""


def test_seconds_of_waiting_are_counted_by_what_was_waited_for(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB", max_lead=1) as bus, Producer(bus_name) as producer:
        before = read_status(bus_name).waited
        assert (before.space_s, before.paused_s, before.ahead_s, before.trainers_s) == (0,) * 4
        put(producer, 0)
        with pytest.raises(BusFullError):
            put(producer, 0, key="another", timeout=0.05)
        waited = read_status(bus_name).waited
        assert waited.ahead_s > 0.04 and not waited.space_s and not waited.paused_s
        bus.pause("new weights")
        with pytest.raises(BusFullError):
            put(producer, 1, timeout=0.05)
        bus.resume()
        waited = read_status(bus_name).waited
        assert waited.paused_s > 0.04 and not waited.space_s
        with pytest.raises(BusFullError):
            for index in range(1, 8):
                producer.put("q", group_size=8, index=index, tokens=[1] * 50_000, timeout=0.05)
        status = read_status(bus_name)
        assert status.waited.space_s > 0.04
        [row] = status.producers
        total = status.waited.space_s + status.waited.paused_s + status.waited.ahead_s
        assert row.waited_s == pytest.approx(total)


def test_trainers_wait_while_they_hold_nothing(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer, Consumer(bus_name) as taker:
        assert taker.take(timeout=0.1) == []
        waited_s = read_status(bus_name).waited.trainers_s
        assert waited_s > 0.09
        for index in range(8):
            put(producer, index)
        held = taker.take(timeout=5.0)
        before_s = read_status(bus_name).waited.trainers_s
        taker.take(timeout=0.1)
        assert read_status(bus_name).waited.trainers_s == before_s
        taker.ack(held)


def test_a_wait_in_an_event_loop_counts_too(bus_name: str) -> None:
    async def wait(producer: Producer) -> None:
        waits = [
            producer.aput("q", group_size=8, index=i, tokens=[1], timeout=0.2) for i in range(4)
        ]
        await asyncio.gather(*waits, return_exceptions=True)

    with Bus.create(bus_name, "1MiB") as bus, Producer(bus_name) as producer:
        bus.pause("new weights")
        asyncio.run(wait(producer))
        waited_s = read_status(bus_name).waited.paused_s
        assert waited_s > 0.1


class Counted(SegmentFile):
    checks = 0

    def slot_alive(self, slot: int) -> bool:
        self.checks += 1
        return super().slot_alive(slot)


def test_each_look_checks_some_of_many_producers(bus_name: str, spawn: Spawner) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(Bus.create(bus_name, "1MiB"))
        for number in range(8):
            stack.enter_context(Producer(bus_name, label=f"w{number}"))
        child = spawn.script(IDLER, bus_name, until="attached")
        checks = ProducerChecks(3)

        def look() -> tuple[int, str]:
            with Counted(bus_name) as file:
                rows = status_of(file, walk=False, checks=checks).producers
                return file.checks, rows[-1].state

        assert look() == (9, "alive")  # nobody was known
        child.kill()
        looks = [look() for _ in range(3)]
    assert [count for count, _ in looks] == [3, 3, 3]
    assert looks[-1][1] == "dead"
