"""Labels name the weights that sampled, and no prompt is read from a cache of older weights.

64 requests in flight, servers killed and started at any moment; each token's weights show in its
logprob. `SHMBUS_TEST_UPDATES` sets the number of updates.
"""

import asyncio
import contextlib
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from small_engine import Running
from small_vllm import LabelledVllm, UnsaltedVllm, value_of
from trainers import Trainer, fleet_of

import shmbus
from shmbus import Bus, VersionUnknownError
from shmbus.engines import EngineError, EngineFleet, UpdateRolledBackError

pytest_plugins = ["engine_fixtures"]

#: The long form has 200, and every mode of a pause.
UPDATES = int(os.environ.get("SHMBUS_TEST_UPDATES", "4"))
MODES = ["keep", "wait", "abort"] if "SHMBUS_TEST_UPDATES" in os.environ else ["keep"]
IN_FLIGHT = 64
PROMPTS = 4
#: Answers of each server between two updates.
ANSWERS = 8
#: Of updates, the share with a restart.
RESTARTS = 0.4
WATCHDOG_S = 120 + 5 * UPDATES


class Workers:
    """Workers that label samples by the servers' rows before and after each request."""

    def __init__(self, producer: shmbus.Producer, urls: list[str], seed: int) -> None:
        self.producer, self.urls, self.rng = producer, urls, random.Random(seed)
        self.counts: Counter[str] = Counter()
        #: Answers by server since the last update.
        self.answers: Counter[str] = Counter()

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            url = self.rng.choice(self.urls)
            try:
                begun = self.producer.version_of(url)
                body = {
                    "prompt": f"{self.rng.randrange(PROMPTS)}", "max_tokens": 8,
                    "cache_salt": self.producer.cache_salt,
                }  # fmt: skip
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    said = await response.json()
                ended = self.producer.version_of(url)
            except (VersionUnknownError, aiohttp.ClientError) as error:
                self.counts[type(error).__name__] += 1
                await asyncio.sleep(0.01)
                continue
            self.counts.update(hit=said["hit"], stale=said["stale"], sample=1)
            self.answers[url] += 1
            name = f"{self.counts['sample']}"
            await self.producer.aput(
                name, index=0, group_size=1, policy_version=(begun, ended),
                logprobs=said["logprobs"],
            )  # fmt: skip


def checked(sample: shmbus.Trajectory) -> str:
    met = {value_of(float(each)) for each in sample["logprobs"]}
    label = sample.policy_version, sample.newest_policy_version
    if (min(met), max(met)) == label:
        return "equal"
    # The update came between a label's look and a token.
    return "wider" if label[0] <= min(met) and max(met) <= label[1] else f"{label} for {met}"


async def check(consumer: shmbus.Consumer, found: Counter[str]) -> None:
    while True:
        with contextlib.suppress(shmbus.WaitTimeoutError):
            for group in await asyncio.to_thread(consumer.take, 1, timeout=0.2):
                found.update(map(checked, group))
                group.ack()


async def whole(
    fleet: EngineFleet, workers: Workers, version: int, tasks: list[asyncio.Task[None]]
) -> None:
    workers.answers.clear()
    while True:
        for task in tasks:
            if task.done():
                task.result()
        with contextlib.suppress(VersionUnknownError):
            versions = {workers.producer.version_of(url) for url in workers.urls}
            enough = all(workers.answers[url] >= ANSWERS for url in workers.urls)
            if versions == {version} and enough:
                return
            if versions == {version}:
                await asyncio.sleep(0.01)
                continue
        with contextlib.suppress(EngineError):
            await fleet.catch_up()
        await asyncio.sleep(0.01)


async def restart(running: Running, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        # A request to a free port of this machine may connect to itself, and hold the port.
        with contextlib.suppress(EOFError):
            return await asyncio.to_thread(running.start_anew)


@pytest.mark.timeout(WATCHDOG_S)
@pytest.mark.parametrize("mode", MODES)
async def test_labels_are_true_over_updates_and_restarts(
    mode: Any, bus: Bus, trainer: Trainer, servers: Any, seed: int
) -> None:
    counts, found, restarts = await storm(mode, LabelledVllm, bus, trainer, servers, seed)
    assert set(found) <= {"equal", "wider"}, (found, counts)
    assert counts["stale"] == 0 and counts["hit"] > UPDATES, counts
    assert restarts > 0 and found["equal"] > found["wider"], (restarts, found)


async def test_the_check_finds_an_engine_without_salts(
    bus: Bus, trainer: Trainer, servers: Any, seed: int
) -> None:
    counts, found, _ = await storm("keep", UnsaltedVllm, bus, trainer, servers, seed, updates=4)
    assert counts["stale"] > 0
    assert set(found) - {"equal", "wider"}, found


async def test_a_restarted_server_without_rows_is_unknown(
    bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    running = servers(1)
    writer.publish(3)
    async with fleet_of(bus.name, running) as fleet:
        assert (await fleet.reload(tmp_path)).servers[0].version == 3
        with shmbus.Producer(bus.name) as producer:
            for _ in range(2):
                with pytest.raises(VersionUnknownError) as caught:
                    producer.version_of(running.url)
                assert caught.value.servers == [running.url]
                running.start_anew()  # its base checkpoint again, and nobody is told
        assert await running.tokens(1) == [0.0]


async def storm(
    mode: Any, kind: type[LabelledVllm], bus: Bus, trainer: Trainer, servers: Any, seed: int,
    updates: int = UPDATES,
) -> tuple[Counter[str], Counter[str], int]:  # fmt: skip
    """Bring versions to two servers under load; return counts of requests, labels, restarts."""
    rng, restarts = random.Random(seed), 0
    running = [servers(1, kind), servers(1, kind)]
    found: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            fleet_of(bus.name, *running, mode=mode, quorum=1, timeout=10.0)
        )
        await fleet.update(trainer, 1)
        consumer = stack.enter_context(shmbus.Consumer(bus.name))
        producer = stack.enter_context(shmbus.Producer(bus.name))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        workers = Workers(producer, [each.url for each in running], seed)
        tasks = [asyncio.create_task(workers.run(session)) for _ in range(IN_FLIGHT)]
        tasks.append(asyncio.create_task(check(consumer, found)))
        try:
            await whole(fleet, workers, 1, tasks)
            for version in range(2, updates + 2):
                restarted = []
                if kind is LabelledVllm and (version == 2 or rng.random() < RESTARTS):
                    restarts += 1
                    ended = restart(rng.choice(running), rng.uniform(0, 0.1))
                    restarted.append(asyncio.create_task(ended))
                    await asyncio.sleep(rng.choice([0.0, 0.05, 0.3]))
                with contextlib.suppress(EngineError, UpdateRolledBackError):
                    await fleet.update(trainer, version)
                await asyncio.gather(*restarted)
                await whole(fleet, workers, version, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for group in consumer.take(1000, timeout=0.0) if found else ():
            found.update(map(checked, group))
            group.ack()
    return workers.counts, found, restarts
