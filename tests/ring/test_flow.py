"""Flow control: pauses visible to producers, and pressure to wait for."""

import asyncio
import gc
import os
import resource
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from conftest import Spawner, beside, fill, take_rest, wait_until

from shmbus import Bus, BusFullError, Consumer, Producer
from shmbus.cli import main
from shmbus.segment.names import shm_path

TOKENS = np.zeros(1000, np.int32)


def put_now(producer: Producer, number: int = 0) -> None:
    producer.put(f"fill-{number}", group_size=1, index=0, tokens=TOKENS, timeout=0)


def test_a_paused_bus_is_a_full_one_that_says_why(bus: Bus, producer: Producer) -> None:
    bus.policy_version = 7
    bus.pause("weights are being loaded")
    assert bus.paused == producer.paused == "weights are being loaded"
    for attempt in (
        lambda: producer.put("a", group_size=1, index=0, tokens=TOKENS, timeout=0.05),
        lambda: producer.put_many(
            [{"instance_id": "a", "group_size": 1, "index": 0, "tokens": TOKENS}], timeout=0.05
        ),
        lambda: producer.reserve(
            "a", group_size=1, index=0, fields={"tokens": ("int32", 5)}, timeout=0.05
        ),
    ):
        with pytest.raises(BusFullError, match=r"paused at policy version 7 \(weights .*resume"):
            attempt()
    assert bus.stats().committed == 0
    bus.resume()
    assert bus.paused is None and producer.paused is None
    put_now(producer)


def test_resuming_lets_a_waiting_producer_go_on(bus: Bus, producer: Producer) -> None:
    bus.pause()
    with beside(producer.put, "a", group_size=1, index=0, tokens=TOKENS, timeout=20) as put:
        time.sleep(0.1)
        assert not put.done()
        bus.resume()
    assert bus.stats().committed == 1


def test_what_was_reserved_before_a_pause_can_be_committed(bus: Bus, producer: Producer) -> None:
    with producer.reserve("a", group_size=1, index=0, fields={"tokens": ("int32", 5)}) as slot:
        bus.pause()
        slot["tokens"][:] = 1
    assert bus.stats().committed == 1
    with Consumer(bus.name) as consumer:
        assert len(consumer.take(timeout=5)) == 1


def test_pressure_is_the_part_of_the_bus_that_is_held(bus: Bus, producer: Producer) -> None:
    assert producer.pressure() < 0.1
    fill(partial(put_now, producer))
    assert producer.pressure() > 0.9
    with Consumer(bus.name) as consumer:
        take_rest(consumer)
        assert producer.pressure() < 0.5
    bus.pause()
    assert producer.pressure() == 1.0


async def test_waiting_until_ready_leaves_the_loop_to_others(bus: Bus, producer: Producer) -> None:
    assert await producer.wait_ready(timeout=0)
    fill(partial(put_now, producer))
    assert not await producer.wait_ready(timeout=0.05)
    turns = 0
    done = False

    async def other() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0.005)

    task = asyncio.create_task(other())
    waiting = asyncio.create_task(producer.wait_ready(0.5, timeout=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    with Consumer(bus.name) as consumer:
        take_rest(consumer)
        assert await waiting
    done = True
    await task
    assert turns > 3


def test_the_command_line_pauses_and_resumes(bus: Bus, spawn: Spawner) -> None:
    assert main(["pause", bus.name, "--reason", "why"]) == 0
    assert bus.paused == "why"
    spawn.module("shmbus", "resume", bus.name).finish()
    assert wait_until(lambda: bus.paused is None)


@pytest.mark.parametrize("consumers_before", [0, 1])
def test_a_bus_that_was_filled_before_its_consumer_came_goes_on(
    bus_name: str, consumers_before: int
) -> None:
    body = np.zeros(1500, np.int8)

    def put(number: int) -> None:
        producer.put(f"s{number}", group_size=2, index=0, body=body, timeout=0)
        producer.put(f"f{number}", group_size=1, index=0, body=body, timeout=0)

    with Bus.create(bus_name, "64KiB", extent_bytes=4096), Producer(bus_name) as producer:
        for _ in range(consumers_before):
            Consumer(bus_name).close()
        # A sample of an open group in each extent: none becomes free by itself.
        stragglers = fill(put)
        with Consumer(bus_name) as consumer, ThreadPoolExecutor(1) as pool:
            rest = pool.submit(
                lambda: [
                    producer.put(f"s{number}", group_size=2, index=1, body=body, timeout=20)
                    for number in range(stragglers)
                ]
            )
            while not rest.done():
                consumer.ack(consumer.take(8, timeout=0.02))
            rest.result()
            while groups := consumer.take(8, timeout=0.1):
                consumer.ack(groups)
            ledger = consumer.stats()
            assert ledger.moved > 0
            assert ledger.acknowledged == ledger.committed


PUT_ON = """
import os, sys
import numpy as np
from shmbus import Producer
name, count, processor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.sched_setaffinity(0, {processor})
with Producer(name) as producer:
    for number in range(count):
        producer.put(f"p-{number}", group_size=1, index=0, tokens=np.zeros(8, np.int32))
"""


def sleeps_beside_a_producer(name: str, spawn: Spawner, count: int) -> int:
    """Return a reader's sleeps over so many takes from a producer on a separate processor."""
    taken, processors = 0, os.sched_getaffinity(0)
    shared = min(processors)
    with Consumer(name) as consumer:
        spawn.script(PUT_ON, name, count, shared)
        os.sched_setaffinity(0, {shared})
        try:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            while taken < count:
                groups = consumer.take(timeout=20)
                taken += len(groups)
                consumer.ack(groups)
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        finally:
            os.sched_setaffinity(0, processors)


def test_a_reader_on_the_processor_of_a_producer_is_not_woken_for_every_record(
    bus_name: str, spawn: Spawner
) -> None:
    count, sleeps = 20_000, []
    with Bus.create(bus_name, "8MiB"):
        # Other work on the processor adds sleeps at times; systematic sleeps come always.
        while len(sleeps) < 5 and min(sleeps, default=count) >= count // 100:
            sleeps.append(sleeps_beside_a_producer(bus_name, spawn, count))
        print(f"{sleeps} sleeps")
        assert min(sleeps) < count // 100


HOLD_SLOT = """
import fcntl, struct, sys, time
from shmbus_ext import _core
with open(sys.argv[1], "r+b") as file:
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, _core.LOCK_SLOT, 1, 0)
    fcntl.fcntl(file, 37, lock)  # F_OFD_SETLK
    print("held", flush=True)
    time.sleep(0.2)
"""


def test_a_slot_whose_lock_is_held_in_passing_is_waited_for(bus_name: str, spawn: Spawner) -> None:
    # As by a reader in recovery from a dead producer, without a run for a while.
    with Bus.create(bus_name, "1MiB", max_producers=1):
        child = spawn.script(HOLD_SLOT, shm_path(bus_name), until="held")
        Producer(bus_name).close()
        child.finish()


def test_a_producer_keeps_no_event_loop_alive(producer: Producer) -> None:
    fill(partial(put_now, producer))
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def put() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        with pytest.raises(BusFullError):
            await producer.aput("a", group_size=1, index=0, tokens=TOKENS, timeout=0.02)

    for _ in range(30):
        asyncio.run(put())
    gc.collect()
    assert [loop() for loop in loops if loop() is not None] == []
