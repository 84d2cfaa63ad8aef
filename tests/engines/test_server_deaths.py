"""A server ends, or stops, at each request of an update: the others go on, and it is named."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from small_engine import Running
from small_sglang import SmallSglang
from small_vllm import SmallVllm
from trainers import KINDS, SHORT_S, Trainer

from shmbus import Bus
from shmbus.engines import EngineFleet
from shmbus.engines.pause_note import paused_by

pytest_plugins = ["engine_fixtures"]

MAKE: dict[str, Any] = {"vllm": SmallVllm, "sglang": SmallSglang}
STEPS = [
    *(("vllm", step) for step in ("init", "pause", "start", "update", "finish", "resume")),
    *(("sglang", step) for step in ("pause", "begin", "update", "end", "resume")),
]


def fleet_of(bus: str, kind: str, running: list[Running], **options: Any) -> EngineFleet:
    servers = [KINDS[kind](each.url) for each in running]
    return EngineFleet(servers, bus=bus, **{"timeout": 2.0, **options})


@pytest.mark.parametrize(("kind", "step"), STEPS)
async def test_a_server_that_is_killed_is_reported_gone_and_the_others_go_on(
    kind: str, step: str, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = [servers(1, MAKE[kind]), servers(2, MAKE[kind])]
    async with fleet_of(bus.name, kind, running, quorum=1) as fleet:
        await fleet.update(trainer, 1)
        await running[1].fault(step, "die")
        report = await fleet.update(trainer, 2)
        assert report.servers[0].version == 2 and report.servers[0].state == "serving"
        assert report.servers[1].version != 2 or step == "resume"
        assert report.servers[1].error and running[1].url in report.servers[1].error
        assert (await running[0].complete(2))["tokens"] == [2.0, 2.0]
        # It is not waited for again.
        report = await fleet.update(trainer, 3)
        assert report.servers[1].state == "gone" and report.torn == []
    assert paused_by(bus.name) is None
    assert (await running[0].complete(1))["tokens"] == [3.0]


@pytest.mark.parametrize(("kind", "step"), [("vllm", "update"), ("sglang", "update")])
async def test_a_server_that_is_stopped_costs_its_deadline_and_is_brought_back(
    kind: str, step: str, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = [servers(1, MAKE[kind]), servers(1, MAKE[kind])]
    async with fleet_of(bus.name, kind, running, quorum=1, timeout=SHORT_S) as fleet:
        await fleet.update(trainer, 1)
        await running[1].fault(step, "stop")
        report = await fleet.update(trainer, 2)
        assert report.servers[0].version == 2
        assert report.torn == [running[1].url]
        assert paused_by(bus.name) is not None
        running[1].signal(signal.SIGCONT)
    async with fleet_of(bus.name, kind, running, timeout=5.0) as fleet:
        await fleet.update(trainer, 3)
    for each in running:
        assert (await each.complete(2))["tokens"] == [3.0, 3.0]
    assert paused_by(bus.name) is None
