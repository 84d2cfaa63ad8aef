"""A server does what it was asked later than anybody waits: what comes next waits for its turn.

Between two requests a row says what is so; while one is under way it may say what was so before.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from small_vllm import SLOW_S
from test_client_updates import Client, bring, tokens
from trainers import TIMEOUT_S, Trainer

from shmbus import Bus
from shmbus.engines import (
    ClientUpdates,
    EngineError,
    EngineFleet,
    UpdateRolledBackError,
    VllmServer,
)
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by

pytest_plugins = ["engine_fixtures"]

#: Shorter than the step is late, and long enough for what comes after it.
PATIENCE_S = SLOW_S * 2 / 3
STEPS = ("start", "update", "finish")


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_nobody_waited_for_ends_before_what_ran_before_is_loaded(
    step: str, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = servers(2)
    async with EngineFleet([VllmServer(running.url)], bus=bus.name, timeout=PATIENCE_S) as fleet:
        await fleet.update(trainer, 1)
        await running.fault(step, "slow")
        with pytest.raises(UpdateRolledBackError, match="runs version 1 again"):
            await fleet.update(trainer, 2)
        assert (await running.complete(2))["tokens"] == [1.0, 1.0]
        assert paused_by(bus.name) is None
        await fleet.update(trainer, 3)
    assert (await running.complete(2))["tokens"] == [3.0, 3.0]


@pytest.mark.parametrize("step", STEPS)
async def test_what_a_dead_trainer_asked_last_ends_before_its_rows_are_believed(
    step: str, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = servers(2)
    server = VllmServer(running.url)
    async with EngineFleet([server], bus=bus.name, timeout=TIMEOUT_S) as fleet:
        await fleet.update(trainer, 1)
        trainer.publish(2)
        with PauseNote(bus.name) as note:
            note.write(PauseNotice(1, [("vllm", running.url)], 2, 1))
        await server.pause("keep", False, TIMEOUT_S)
        await running.fault(step, "slow")
        with contextlib.suppress(EngineError):
            await server.load(2, False, SLOW_S / 5)
        report = await fleet.recover()
    assert report is not None and report.torn == []
    assert (await running.complete(2))["tokens"] == [2.0, 2.0]
    assert paused_by(bus.name) is None


@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_gave_up_brings_back_what_ran_before(
    step: str, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = servers(2)
    client = Client(running, timeout=PATIENCE_S)
    trainer.publish(1)
    updates = ClientUpdates(bus.name, client, timeout=PATIENCE_S)
    bring(updates, trainer, 2)
    client.post("fault", {step: "slow"})
    in_force = 3
    try:
        bring(updates, trainer, 3)
    except UpdateRolledBackError as error:
        in_force = error.in_force or 0
    assert tokens(running) == [float(in_force)] * 3
    bring(updates, trainer, 4)
    assert tokens(running) == [4.0] * 3
