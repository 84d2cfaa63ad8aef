"""A bus that was removed says so to whoever still holds it, and takes nothing more."""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer

DATA = np.arange(10, dtype=np.int32)
LONG_S = 60.0


def put(producer: Producer, key: str = "a") -> None:
    producer.put(key, group_size=1, index=0, tokens=DATA, timeout=1)


@pytest.mark.parametrize("again", [False, True])
def test_no_call_waits_for_a_removed_bus_and_each_names_a_new_one(
    bus_name: str, again: bool
) -> None:
    with Bus.create(bus_name, "1MiB") as bus:
        producer, feeder = Producer(bus_name), Feeder(bus_name)
        consumer = Consumer(bus_name, daemon=False)
        put(producer)
        feeder.request("offered", group_size=8)
        bus.unlink()
    if again:
        Bus.create(bus_name, "1MiB").close()
    expected = "a new bus of that name exists" if again else "there is no bus of that name"
    for attempt in (
        lambda: put(producer),
        lambda: producer.put_many(
            [{"instance_id": "b", "group_size": 1, "index": 0, "tokens": DATA}]
        ),
        lambda: producer.reserve(
            "c", group_size=1, index=0, fields={"tokens": ("int32", 4)}, timeout=1
        ),
        lambda: producer.fail("d", group_size=1, index=0, reason="x"),
        lambda: asyncio.run(producer.wait_ready(1e-9, timeout=LONG_S)),
        lambda: producer.requests.next(timeout=0),
        lambda: asyncio.run(producer.requests.anext(timeout=0)),
        lambda: feeder.request("e", group_size=1, timeout=LONG_S),
        lambda: consumer.request("f", group_size=1, timeout=LONG_S),
    ):
        with pytest.raises(shmbus.BusRemovedError, match=expected) as caught:
            attempt()
        assert bus_name in str(caught.value) and "removed" in str(caught.value)
    assert producer.stats().committed == 1


def test_a_file_that_was_deleted_by_hand_is_noticed_where_a_put_waits(bus_name: str) -> None:
    with Bus.create(bus_name, "256KiB"), Producer(bus_name) as producer:
        os.unlink(f"/dev/shm/shmbus.{bus_name}")
        with pytest.raises(shmbus.BusRemovedError):
            for _ in range(100_000):
                producer.put("a", group_size=1, index=0, tokens=DATA, timeout=5)


def test_the_stall_report_of_a_removed_bus_speaks_of_that_bus(bus_name: str) -> None:
    reports: list[shmbus.StallReport] = []
    with Bus.create(bus_name, "1MiB"):
        consumer = Consumer(bus_name, daemon=False, on_stall=reports.append, stall_timeout=0.2)
        os.unlink(f"/dev/shm/shmbus.{bus_name}")
        with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
            put(producer)
            with pytest.raises(shmbus.BusRemovedError, match="a new bus of that name exists"):
                consumer.take(timeout=10)
    assert all("complete and not acknowledged" not in str(report) for report in reports)


def test_every_call_of_a_handle_of_a_removed_bus_answers(bus: Bus) -> None:
    producer = Producer(bus.name)
    consumer = Consumer(bus.name, daemon=False)
    put(producer)
    (group,) = consumer.take(timeout=1)
    bus.unlink()
    calls: list[Callable[[], object]] = [
        group.ack, consumer.stats, producer.stats, producer.pressure,
        producer.close, consumer.close, bus.stats,
    ]  # fmt: skip
    for call in calls:
        call()


def test_a_removed_bus_delivers_its_own_records_and_then_ends_a_take(bus_name: str) -> None:
    with ExitStack() as stack:
        ends: list[tuple[Producer, Consumer]] = []
        for number in range(2):
            bus = Bus.create(bus_name, capacity="1MiB")
            ends.append(
                (stack.enter_context(Producer(bus_name)), stack.enter_context(Consumer(bus_name)))
            )
            put(ends[-1][0], f"k{number}")
            bus.unlink()
            bus.close()
        for number, (producer, consumer) in enumerate(ends):
            (group,) = consumer.take(timeout=1)
            assert group.instance_id == f"k{number}"
            with pytest.raises(shmbus.BusRemovedError):
                put(producer, "late")
            with pytest.raises(shmbus.BusRemovedError):
                consumer.take(timeout=LONG_S)
