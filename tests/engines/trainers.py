"""Trainers: in this process, and in a process that ends in the middle of an update."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import torch

from shmbus import Bus
from shmbus.engines import EngineFleet, SglangServer, UpdateReport, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher

KINDS: dict[str, Any] = {"vllm": VllmServer, "sglang": SglangServer}
TIMEOUT_S = 5.0
#: Of tests that wait for the end; a server on a loaded machine answers sooner.
SHORT_S = 2.0


class Trainer:
    """A publisher of a vector, filled by each version with its number."""

    def __init__(self, bus: str, **options: Any) -> None:
        self.model = torch.nn.Module()
        self.model.value = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)
        self.publisher = WeightPublisher(bus, ModuleSource(self.model), **options)

    def publish(self, version: int) -> None:
        self.model.value.data.fill_(float(version))
        self.publisher.publish(version=version)


def fleet_of(bus: str, *running: Any, **options: Any) -> EngineFleet:
    servers = [each.server() for each in running]
    return EngineFleet(servers, bus=bus, **{"timeout": TIMEOUT_S, **options})


async def token(running: Any) -> float:
    return float((await running.complete(1))["tokens"][0])


async def assert_serving(version: float, *running: Any) -> None:
    """Require servers that are not paused and have whole weights of a version."""
    for each in running:
        assert not await each.paused()
        assert await each.tokens(2) == [version, version]


async def update(
    bus: str, trainer: Trainer, version: int, *running: Any, **options: Any
) -> UpdateReport:
    async with fleet_of(bus, *running, **options) as fleet:
        return await fleet.update(trainer, version)


class Scene(NamedTuple):
    bus: Bus
    trainer: Trainer
    servers: Callable[..., Any]

    def fleet(self, *running: Any, **options: Any) -> EngineFleet:
        return fleet_of(self.bus.name, *running, **options)

    @contextlib.asynccontextmanager
    async def fleet_at_1(self, *running: Any, **options: Any) -> AsyncIterator[EngineFleet]:
        """A fleet of servers, brought to version 1."""
        async with self.fleet(*running, **options) as fleet:
            await fleet.update(self.trainer, 1)
            yield fleet

    async def update(self, version: int, *running: Any, **options: Any) -> UpdateReport:
        return await update(self.bus.name, self.trainer, version, *running, **options)


def end_in_an_update(
    bus: str, kind: str, urls: list[str], step: str, after: bool, number: int, level: int = 0
) -> None:
    """Bring version 1 to the servers, and get a signal with every server at a step of version 2."""
    torch.set_num_threads(1)
    server = KINDS[kind]
    at_it: list[str] = []

    async def end(address: str) -> None:
        at_it.append(address)
        while len(at_it) < len(urls):
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), number)

    class Ending(server):  # type: ignore[misc, valid-type]
        async def call(self, called: str, *arguments: Any, **options: Any) -> Any:
            if called == step and not after:
                await end(self.address)
            answer = await super().call(called, *arguments, **options)
            if called == step and after:
                await end(self.address)
            return answer

    async def main() -> None:
        trainer = Trainer(bus, keep=True)
        async with EngineFleet([server(url) for url in urls], bus=bus, timeout=TIMEOUT_S) as fleet:
            await fleet.update(trainer, 1)
        async with EngineFleet([Ending(url) for url in urls], bus=bus, timeout=TIMEOUT_S) as fleet:
            if level:
                await fleet.sleep(level)
                await fleet.wake(trainer, 2)
            else:
                await fleet.update(trainer, 2)

    asyncio.run(main())
