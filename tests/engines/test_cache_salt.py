"""A request's salt keeps an engine from serving it what older weights have cached."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from small_vllm import CachingVllm
from trainers import TIMEOUT_S, Trainer

import shmbus
from shmbus import Bus
from shmbus.engines import EngineFleet, VllmServer

pytest_plugins = ["engine_fixtures"]

PROMPTS = 3


async def ask(producer: shmbus.Producer, running: Any, salted: bool, answers: list[Any]) -> None:
    """Send requests one after the other, each with the salt of now."""
    number = 0
    while True:
        number += 1
        body = {"prompt": f"{number % PROMPTS}"}
        if salted:
            body["cache_salt"] = producer.cache_salt
        answers.append(await running.post("/v1/completions", body))


def stale(answers: list[dict[str, float]]) -> int:
    """Count what was served from a cache of other weights, but for what was in flight."""
    return sum(
        each["cached"] != each["runs"] and each["arrived"] == each["runs"] for each in answers
    )


@pytest.mark.parametrize("salted", [True, False])
async def test_no_new_request_is_served_what_older_weights_have_cached(
    bus: Bus, trainer: Trainer, servers: Any, salted: bool
) -> None:
    running = servers(1, CachingVllm)
    answers: list[dict[str, float]] = []
    async with EngineFleet([VllmServer(running.url)], bus=bus.name, timeout=TIMEOUT_S) as fleet:
        await fleet.update(trainer, 1)
        with shmbus.Producer(bus.name) as producer:
            requests = [
                asyncio.ensure_future(ask(producer, running, salted, answers)) for _ in range(4)
            ]
            for version in range(2, 8):
                await fleet.update(trainer, version)
                seen = len(answers)
                while len(answers) < seen + 4 * PROMPTS:
                    await asyncio.sleep(0.01)
            for each in requests:
                each.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
    assert (stale(answers) == 0) == salted
    assert sum(each["runs"] == 7 for each in answers) > PROMPTS, "nothing could be cached"


async def test_a_number_that_comes_again_clears_what_was_cached_by_it(
    bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = servers(1, CachingVllm)
    answers: list[dict[str, float]] = []
    async with EngineFleet([VllmServer(running.url)], bus=bus.name, timeout=TIMEOUT_S) as fleet:
        with shmbus.Producer(bus.name) as producer:
            for version in (3, 4, 3, 4):
                if version == 3:
                    trainer.publisher.new_life()  # training went back
                await fleet.update(trainer, version)
                body = {"prompt": "", "cache_salt": producer.cache_salt}
                answers += [await running.post("/v1/completions", body) for _ in range(2)]
    assert [each["runs"] for each in answers[::2]] == [3.0, 4.0, 3.0, 4.0]
    assert [each["clears"] for each in answers[::2]] == [0, 0, 1, 1]


async def test_while_servers_are_updated_no_two_requests_share_a_salt(
    bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = servers(1)
    with shmbus.Producer(bus.name) as producer:
        assert producer.cache_salt == "0"
        async with EngineFleet([VllmServer(running.url)], bus=bus.name, timeout=TIMEOUT_S) as fleet:
            await running.fault("update", "slow")
            updating = asyncio.ensure_future(fleet.update(trainer, 1))
            while producer.cache_salt == "0":
                await asyncio.sleep(0.01)
            assert not updating.done()
            assert len({producer.cache_salt for _ in range(20)}) == 20
            await updating
        assert {producer.cache_salt for _ in range(20)} == {"1"}


def test_a_request_has_the_salt_of_what_engines_run_now(bus: Bus) -> None:
    with shmbus.Feeder(bus.name) as feeder, shmbus.Producer(bus.name) as producer:
        feeder.request("q1", group_size=1, tokens=[1])
        request = producer.requests.next(timeout=10)
        assert request is not None and request.cache_salt == "0"
        bus.policy_version = 12
        assert request.cache_salt == "12"
        producer.requests.release(request)
    del producer
    with pytest.raises(shmbus.BusClosedError, match="producer"):
        _ = request.cache_salt
