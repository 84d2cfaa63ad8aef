"""Who has begun a sample, and how long whom has waited: what producers say, seen from outside."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from conftest import Spawner, wait_until

from shmbus import Bus, BusFullError, Consumer, Feeder, Producer
from shmbus.inspect.groups import read_groups
from shmbus.inspect.processes import ProducerChecks
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import read_status, status_of
from shmbus_ext import _core


def begun(name: str) -> dict[tuple[str, int], int | None]:
    """Who has begun which samples of incomplete groups."""
    return {
        (group.instance_id, cell.index): cell.producer
        for group in read_groups(name).groups
        for cell in group.cells
        if cell.state == "begun"
    }


def put(producer: Producer, index: int, key: str = "q", size: int = 8, **more: object) -> None:
    producer.put(key, group_size=size, index=index, score=1.0, tokens=[1], **more)  # type: ignore[arg-type]


def test_a_sample_that_was_begun_names_its_producer_until_it_is_there(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as one, Producer(bus_name) as two:
        put(one, 0)
        assert one.begin_sample("q", 1) and two.begin_sample("q", 2) and two.begin_sample("q", 2)
        assert begun(bus_name) == {("q", 1): one.producer_id, ("q", 2): two.producer_id}
        put(one, 1)
        assert begun(bus_name) == {("q", 2): two.producer_id}
        two.fail("q", 2, "out of time")
        assert begun(bus_name) == {}


def test_each_way_to_put_ends_the_note(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        put(producer, 0)
        for index in range(1, 6):
            assert producer.begin_sample("q", index)
        item = {"instance_id": "q", "group_size": 8, "score": 1.0, "tokens": [1]}
        producer.put_many([{**item, "index": 1}, {**item, "index": 2}])
        fields = {"tokens": ("int32", 4)}
        with producer.reserve("q", group_size=8, index=3, fields=fields) as slot:
            slot["tokens"][:] = 1
            assert ("q", 3) in begun(bus_name)
        assert begun(bus_name).keys() == {("q", 4), ("q", 5)}
        assert producer.abandon_sample("q", 4)
        assert not producer.abandon_sample("q", 4)
        aborted = producer.reserve("q", group_size=8, index=5, fields=fields)
        with pytest.raises(ZeroDivisionError), aborted:
            raise ZeroDivisionError
        assert begun(bus_name).keys() == {("q", 5)}


def test_round_and_split_tell_groups_of_one_prompt_apart(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        put(producer, 0, round=1)
        put(producer, 0, round=2)
        put(producer, 0, split="eval")
        producer.begin_sample("q", 1, round=2)
        producer.begin_sample("q", 2, split="eval")
        found = {
            (group.round, group.split): [c.index for c in group.cells if c.state == "begun"]
            for group in read_groups(bus_name).groups
        }
    assert found == {(1, "train"): [], (2, "train"): [1], (None, "eval"): [2]}


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


BEGINNER = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
producer.begin_sample("q", 1)
print("begun", flush=True)
time.sleep(600)
"""


def test_the_notes_of_who_closes_or_is_killed_go(bus_name: str, spawn: Spawner) -> None:
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name) as consumer:
        with Producer(bus_name) as producer:
            put(producer, 0)
            producer.begin_sample("q", 2)
        child = spawn.script(BEGINNER, bus_name)
        child.expect("begun")
        assert begun(bus_name).keys() == {("q", 1)}
        child.kill()

        def reaped() -> bool:
            consumer.take(timeout=0.01)
            return not begun(bus_name)

        wait_until(reaped, what="the row of a dead producer")


def test_a_full_table_refuses_and_nothing_else_depends_on_it(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer, Consumer(bus_name) as taker:
        noted = [producer.begin_sample(f"p{n}", 0) for n in range(2 * _core.BEGUN_ROWS)]
        assert _core.BEGUN_ROWS * 0.9 < sum(noted) <= _core.BEGUN_ROWS
        for index in range(8):
            put(producer, index)
        [group] = taker.take(timeout=5)
        group.ack()
    with Bus.create(f"{bus_name}-b", "1MiB"), Producer(f"{bus_name}-b") as producer:
        assert producer.begin_sample("q", 0)


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
    """Counts how many slots are checked."""

    checks = 0

    def slot_alive(self, slot: int) -> bool:
        self.checks += 1
        return super().slot_alive(slot)


def test_of_many_producers_some_are_checked_in_each_look_and_all_in_turn(
    bus_name: str, spawn: Spawner
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(Bus.create(bus_name, "1MiB"))
        for number in range(8):
            stack.enter_context(Producer(bus_name, label=f"w{number}"))
        child = spawn.script(BEGINNER, bus_name)
        child.expect("begun")
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
