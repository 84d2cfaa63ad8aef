"""A request's salt hides an engine's cache of older weights."""

import asyncio
from typing import Any

import pytest
import torch
from conftest import next_request
from small_vllm import CachingVllm
from trainers import TIMEOUT_S, Scene, Trainer

import shmbus
from shmbus import Bus
from shmbus.engines import EngineFleet, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

pytest_plugins = ["engine_fixtures"]

PROMPTS = 3


async def ask(producer: shmbus.Producer, running: Any, salted: bool, answers: list[Any]) -> None:
    number = 0
    while True:
        number += 1
        body = {"prompt": f"{number % PROMPTS}"}
        if salted:
            body["cache_salt"] = producer.cache_salt
        answers.append(await running.post("/v1/completions", body))


def stale(answers: list[dict[str, float]]) -> int:
    """Count tokens served from a foreign weights' cache, except for requests in flight."""
    return sum(
        each["cached"] != each["runs"] and each["arrived"] == each["runs"] for each in answers
    )


@pytest.mark.parametrize("salted", [True, False])
async def test_no_new_request_gets_older_weights_cache(salted: bool, scene: Scene) -> None:
    running = scene.servers(1, CachingVllm)
    answers: list[dict[str, float]] = []
    async with scene.fleet_at_1(running) as fleet:
        with shmbus.Producer(scene.bus.name) as producer:
            requests = [
                asyncio.ensure_future(ask(producer, running, salted, answers)) for _ in range(4)
            ]
            for version in range(2, 8):
                await fleet.update(scene.trainer, version)
                seen = len(answers)
                while len(answers) < seen + 4 * PROMPTS:
                    await asyncio.sleep(0.01)
            for each in requests:
                each.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
    assert (stale(answers) == 0) == salted
    assert sum(each["runs"] == 7 for each in answers) > PROMPTS, "nothing could be cached"


async def test_a_repeated_number_clears_its_cache(bus: Bus, trainer: Trainer, servers: Any) -> None:
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


async def test_no_two_requests_share_a_salt(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1)
    with shmbus.Producer(bus.name) as producer:
        before = producer.cache_salt
        async with EngineFleet([VllmServer(running.url)], bus=bus.name, timeout=TIMEOUT_S) as fleet:
            await running.fault("update", "slow")
            updating = asyncio.ensure_future(fleet.update(trainer, 1))
            while producer.cache_salt == before:
                await asyncio.sleep(0.01)
            assert not updating.done()
            assert len({producer.cache_salt for _ in range(20)}) == 20
            await updating
        (after,) = {producer.cache_salt for _ in range(20)}
        assert after.partition(".")[0] == "1" and after != before


def test_a_request_has_the_salt_of_what_engines_run_now(bus: Bus) -> None:
    with shmbus.Feeder(bus.name) as feeder, shmbus.Producer(bus.name) as producer:
        feeder.request("q1", group_size=1, tokens=[1])
        request = next_request(producer)
        before = request.cache_salt
        assert before == producer.cache_salt
        bus.policy_version = 12
        assert request.cache_salt == producer.cache_salt != before
        producer.requests.release(request)
    del producer
    with pytest.raises(shmbus.BusClosedError, match="producer"):
        _ = request.cache_salt


class Run:
    """A trainer with a bus, workers and a publisher; a server may serve another run after it."""

    def __init__(self, name: str, server: Any) -> None:
        self.name, self.server = name, server
        self.trainer: Trainer | None = None
        self.answers: list[tuple[str, float, float]] = []

    def start(self) -> None:
        self.trainer = Trainer(self.name, keep=True)

    async def ask(self, producer: shmbus.Producer) -> None:
        for prompt in ("a", "b"):
            salt = producer.cache_salt
            said = await self.server.post("/v1/completions", {"prompt": prompt, "cache_salt": salt})
            self.answers.append((salt, said["cached"], said["runs"]))

    async def bring(self, version: int, value: float) -> None:
        assert self.trainer is not None
        publisher, model = self.trainer.publisher, self.trainer.model

        class Valued:
            version = publisher.version

            def publish(self, version: int) -> None:
                model.value.data.fill_(value)
                publisher.publish(version=version)

        servers = [VllmServer(self.server.url)]
        async with EngineFleet(servers, bus=self.name, timeout=TIMEOUT_S) as fleet:
            await fleet.update(Valued(), version)
        with shmbus.Producer(self.name) as producer:
            await self.ask(producer)


async def two_runs(run: Run, other: Run) -> None:
    run.start()
    await run.bring(7, 1.0)
    other.start()
    await other.bring(7, 2.0)


async def a_trainer_that_dies(run: Run, other: Run) -> None:
    run.start()
    await run.bring(7, 1.0)
    assert run.trainer is not None
    run.trainer.publisher.close()  # keep=True: the pool stays, as after a death
    run.start()
    await run.bring(7, 2.0)


async def a_trainer_that_ends(run: Run, other: Run) -> None:
    """The pool goes with its publisher, and workers go on asking meanwhile."""
    for value in (1.0, 2.0):
        run.start()
        assert run.trainer is not None
        with Bus.open(run.name) as bus:
            bus.policy_version = 5  # as a trainer that restores a checkpoint says
        await run.bring(6, value + 10)
        await run.bring(7, value)
        run.trainer.publisher._close(keep=False)
        with shmbus.Producer(run.name) as producer:
            await run.ask(producer)


async def a_return_to_a_checkpoint(run: Run, other: Run) -> None:
    run.start()
    assert run.trainer is not None
    for version, value in ((7, 1.0), (8, 2.0)):
        await run.bring(version, value)
    run.trainer.publisher.new_life()
    for version, value in ((7, 3.0), (8, 4.0)):
        await run.bring(version, value)


@pytest.mark.parametrize(
    "life", [two_runs, a_trainer_that_dies, a_trainer_that_ends, a_return_to_a_checkpoint]
)
async def test_a_repeated_number_salts_anew(
    life: Any, bus: Bus, bus_name: str, servers: Any
) -> None:
    running = servers(1, CachingVllm)
    other_name = f"{bus.name}-b"
    with Bus.create(other_name, "1MiB"):
        run, other = Run(bus.name, running), Run(other_name, running)
        try:
            await life(run, other)
        finally:
            for each in (run, other):
                if each.trainer is not None:
                    each.trainer.publisher._close(keep=False)
    made = run.answers + other.answers
    assert [(cached, runs) for _, cached, runs in made if cached != runs] == []
    published = [(salt, runs) for salt, _, runs in made if "." in salt]
    assert len({salt for salt, _ in published}) >= len({runs for _, runs in published}) > 1


def test_where_engines_run_other_numbers_only_no_two_requests_share_a_salt(bus: Bus) -> None:
    with (
        shmbus.Producer(bus.name) as producer,
        WeightPublisher(bus.name, ModuleSource(torch.nn.Linear(2, 2))) as publisher,
        WeightSubscriber(bus.name) as engine,
    ):
        publisher.publish(version=3)
        with engine.latest(timeout=5) as weights:
            weights.report_applied()
        bus.policy_version = 3
        assert producer.cache_salt == producer.cache_salt
        bus.policy_version = 4  # announced before any engine's load
        assert producer.cache_salt != producer.cache_salt
