"""An absent engine: workers fail, or give back, their samples."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, next_request, wait_until, work_until

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer
from shmbus.inspect.history import read_events
from shmbus.inspect.status import read_status

GROUPS, SIZE = 20, 8

# Without the engine's file every sample fails within a millisecond, or is given back.
WORKER = """
import os, sys, shmbus
with shmbus.Producer(sys.argv[1]) as producer:
    print("ready", flush=True)
    failed = 0
    while (request := producer.requests.next()) is not None:
        if os.path.exists(sys.argv[2]):
            producer.requests.answer(request, score=1.0, tokens=[request.index])
        elif sys.argv[3] == "release":
            producer.requests.release(request)
            failed += 1
        else:
            producer.requests.fail(request, "ConnectionRefusedError(111, 'port 8000')")
            failed += 1
        if request.instance_id == "last" and request.index == 7:
            print("unmade", failed, flush=True)
"""


@pytest.fixture(params=["embedded", "daemon"])
def consumer(request: pytest.FixtureRequest, bus_name: str) -> Iterator[Callable[[], Consumer]]:
    """Makes a consumer with two retries; the bus is there from the beginning."""
    if request.param == "daemon":
        request.getfixturevalue("daemon")(
            "--capacity", "4MiB", "--sample-retries", 2, "--retry-backoff", "0.1,1"
        )
        yield lambda: Consumer(bus_name)
    else:
        with Bus.create(bus_name, "4MiB"):
            yield lambda: Consumer(bus_name, sample_retries=2, retry_backoff=(0.1, 1.0))


def offer(bus_name: str) -> None:
    with Feeder(bus_name) as feeder:
        for number in range(GROUPS - 1):
            feeder.request(f"q{number}", group_size=SIZE, prompt=np.zeros(4, np.int32))
        feeder.request("last", group_size=SIZE, prompt=np.zeros(4, np.int32))


def take_all(consumer: Consumer) -> list[str]:
    found: list[str] = []

    def taken() -> bool:
        for group in consumer.take(timeout=0.05):
            found.append(group.instance_id)
            group.ack()
        return len(found) == GROUPS

    wait_until(taken, what="all groups")
    return sorted(found)


def unmade(child: Any) -> int:
    return int(child.output().split("unmade ")[-1].split()[0])


def test_an_engine_that_refuses_for_seconds_gives_up_nothing(
    consumer: Callable[[], Consumer],
    bus_name: str,
    spawn: Spawner,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    engine = tmp_path / "engine"
    offer(bus_name)
    with consumer() as mine:
        workers = [spawn.script(WORKER, bus_name, engine, "fail") for _ in range(2)]
        work_until(mine, lambda: mine.stats().lane_pause)
        pause = mine.stats().lane_pause
        assert pause is not None and pause.reason.startswith("the last ")
        assert "samples all failed: ConnectionRefusedError(111" in pause.reason
        assert pause.since_unix_s == pytest.approx(time.time(), abs=60)
        seen = read_status(bus_name).lane_pause
        assert seen is not None and seen.reason == pause.reason
        assert all(row.attempt < 100 for row in read_status(bus_name).wanted)
        for _ in range(40):
            assert mine.take(timeout=0.05) == []
        assert mine.stats().groups_given_up == 0
        failures = mine.stats().committed
        # A pause's worth, the samples under way, and a probe each second at the least.
        assert 16 <= failures < 80
        engine.touch()
        assert len(take_all(mine)) == GROUPS
        ledger = mine.stats()
        assert ledger.lane_pause is None and read_status(bus_name).lane_pause is None
        assert ledger.groups_given_up == 0 and ledger.acknowledged == GROUPS * SIZE
        assert ledger.balanced and ledger.requests.balanced and ledger.requests.groups == 0
        assert ledger.committed - GROUPS * SIZE < 90
        if "daemon" in request.node.name:

            def kinds() -> list[str]:
                events = read_events(bus_name, limit=1000).events
                return [event.kind for event in events if event.kind.startswith("requests_")]

            wait_until(lambda: kinds()[-1:] == ["requests_resumed"])
            assert kinds()[0] == "requests_paused" and kinds().count("requests_paused") <= 3
    for worker in workers:
        worker.kill()


def test_what_is_given_back_uses_up_nothing_and_is_no_hot_loop(
    bus: Bus, spawn: Spawner, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    offer(bus.name)
    with Consumer(bus.name, retry_backoff=(0.1, 1.0)) as mine:
        worker = spawn.script(WORKER, bus.name, engine, "release", until="ready")
        for _ in range(30):
            assert mine.take(timeout=0.05) == []
        engine.touch()
        assert len(take_all(mine)) == GROUPS
        ledger = mine.stats()
        assert ledger.dropped == {} and ledger.committed == GROUPS * SIZE
        wait_until(lambda: "unmade" in worker.output())
        assert 1 <= unmade(worker) < 8
    worker.kill()


def test_a_pause_outlives_the_trainer_and_its_successor_goes_on(
    bus_name: str, spawn: Spawner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tmp_path / "engine"
    with Bus.create(bus_name, "4MiB"):
        offer(bus_name)
        options: dict[str, Any] = {"sample_retries": 2, "retry_backoff": (0.1, 1.0)}
        worker = spawn.script(WORKER, bus_name, engine, "fail")
        with (
            caplog.at_level(logging.WARNING, "shmbus.requests"),
            Consumer(bus_name, **options) as c,
        ):
            work_until(c, lambda: c.stats().lane_pause)
        assert len([r for r in caplog.records if "requests pause" in r.getMessage()]) == 1
        before = read_status(bus_name)
        assert before.lane_pause is not None
        with Consumer(bus_name, **options) as c:
            for _ in range(20):
                assert c.take(timeout=0.05) == []
            again = c.stats()
            assert again.lane_pause is not None and again.groups_given_up == 0
            assert again.lane_pause.since_unix_s == before.lane_pause.since_unix_s
            engine.touch()
            assert len(take_all(c)) == GROUPS
            assert c.stats().groups_given_up == 0 and c.stats().balanced
    worker.kill()


def test_an_operators_pause_wins(bus: Bus, feeder: Feeder) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name, sample_retries=2) as consumer:
        for number in range(GROUPS):
            feeder.request(f"q{number}", group_size=SIZE)
        for request in producer.requests.next_many(40):
            producer.requests.fail(request, "refused")
        work_until(consumer, lambda: consumer.stats().lane_pause)
        bus.pause("loading weights")
        assert producer.requests.next(0.3) is None
        status = read_status(bus.name)
        assert status.paused is not None and status.lane_pause is not None
        bus.resume()
        probe = next_request(producer)
        assert producer.requests.next(0) is None, "one at a time"
        assert producer.requests.answer(probe, score=1.0, tokens=[1])
        work_until(consumer, lambda: not consumer.stats().lane_pause)
        assert producer.requests.next(10) is not None


def test_without_a_consumer_a_failing_worker_waits_longer_each_time(
    bus: Bus, feeder: Feeder
) -> None:
    for number in range(GROUPS):
        feeder.request(f"q{number}", group_size=SIZE)
    with Producer(bus.name) as producer:
        failed = 0
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            if (request := producer.requests.next(timeout=0.05)) is not None:
                producer.requests.fail(request, "refused")
                failed += 1
        assert 16 <= failed <= 20
        request = next_request(producer, timeout=60.0)
        producer.requests.answer(request, score=1.0, tokens=[1])
        assert len(producer.requests.next_many(40, timeout=0)) == 40, "an answer ends the wait"


def test_a_judge_that_raises_for_one_prompt_gives_up_that_prompt(bus: Bus, feeder: Feeder) -> None:
    async def judged(prompt: str) -> float:
        await asyncio.sleep(0)
        if prompt == "q3":
            raise ZeroDivisionError("no tests ran")
        return 1.0

    async def work(producer: Producer) -> None:
        while (request := await producer.requests.anext(1.5)) is not None:
            try:
                score = await judged(request.instance_id)
            except ZeroDivisionError as error:
                await producer.requests.afail(request, repr(error))
                continue
            await producer.requests.aanswer(request, score=score, tokens=[1])

    options: dict[str, Any] = {"sample_retries": 1, "retry_backoff": (0.05, 0.1)}
    with Producer(bus.name) as producer, Consumer(bus.name, **options) as consumer:
        for number in range(6):
            feeder.request(f"q{number}", group_size=4)

        async def run() -> list[str]:
            task = asyncio.create_task(work(producer))
            found: list[str] = []
            while len(found) < 5 or consumer.stats().groups_given_up < 1:
                for group in await consumer.atake(timeout=0.1):
                    found.append(group.instance_id)
                    group.ack()
            task.cancel()
            return sorted(found)

        assert asyncio.run(asyncio.wait_for(run(), 60)) == ["q0", "q1", "q2", "q4", "q5"]
        assert consumer.stats().lane_pause is None


def test_a_producer_and_a_consumer_end_with_an_async_block(bus_name: str) -> None:
    async def run() -> tuple[Producer, Consumer]:
        with Bus.create(bus_name, "1MiB"):
            async with await Producer.awaited(bus_name) as producer:
                await producer.aput("q", group_size=1, index=0, tokens=[1])
                async with Consumer(bus_name) as consumer:
                    (group,) = await consumer.atake(timeout=10)
                    group.ack()
            return producer, consumer

    producer, consumer = asyncio.run(run())
    assert producer.closed
    with pytest.raises(shmbus.BusClosedError):
        consumer.take(timeout=0)


def test_samples_given_back_are_counted_with_their_reason_until_the_worker_makes_one(
    bus_name: str,
) -> None:
    def row() -> tuple[int, int, int, str]:
        [each] = [p for p in read_status(bus_name).producers if p.state == "alive"]
        return each.released, each.given_back, each.failed, each.unmade_reason

    with Bus.create(bus_name, "1MiB", max_producers=1), Consumer(bus_name) as consumer:
        consumer.request("q", group_size=4)
        with Producer(bus_name) as producer:
            for _ in range(2):
                taken = producer.requests.next(timeout=30.0)
                producer.requests.release(taken, reason="engine away: \u00e9" + "x" * 100)
            assert row()[:3] == (2, 2, 0)
            assert row()[3] == ("engine away: \u00e9" + "x" * 100)[:71]  # 72 bytes
            assert read_status(bus_name).producers[0].rests_s > 0
            partial = producer.requests.next(timeout=30.0)
            producer.requests.release(partial, {"tokens": [1]})
            assert row()[:3] == (2, 2, 0)  # a part counts as work
            producer.requests.fail(producer.requests.next(timeout=30.0), "broken")
            assert row() == (2, 2, 1, "broken")
            producer.requests.answer(producer.requests.next(timeout=30.0), tokens=[1])
            assert row() == (2, 0, 0, "")
            producer.requests.fail(producer.requests.next(timeout=30.0), "broken")
        with Producer(bus_name) as after:
            assert row() == (2, 0, 0, "")
            with pytest.raises(TypeError, match=r"^reason: expected a str, got int"):
                after.requests.release(after.requests.next(timeout=30.0), reason=1)  # type: ignore[arg-type]
