"""Servers that read a checkpoint by its path: the newest, or the one before, or paused."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fork_server import TEMPLATE
from small_engine import Running
from trainers import KINDS, TIMEOUT_S, Trainer, fleet_of

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, UpdateReport, UpdateRolledBackError
from shmbus.engines.pause_note import paused_by
from shmbus.engines.resume import resume
from shmbus.weights import WeightsError

pytest_plugins = ["engine_fixtures"]


async def reload(bus: str, directory: Path, *running: Running, **options: Any) -> UpdateReport:
    async with fleet_of(bus, *running, **options) as fleet:
        return await fleet.reload(directory)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_server_reads_the_newest_checkpoint(
    kind: str, bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    running = [servers(2, kind), servers(1, kind)]
    for version in (3, 4, 5):
        writer.publish(version)
        report = await reload(bus.name, tmp_path, *running)
        assert [each.version for each in report.servers] == [version, version]
        assert report.previous == (None if version == 3 else version - 1)
        assert [await each.tokens(3) for each in running] == [[float(version)] * 3] * 2
        assert bus.policy_version == version and paused_by(bus.name) is None


@pytest.mark.parametrize("fault", ["half", "500", "close"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_reload_that_fails_is_followed_by_one_of_the_checkpoint_before(
    kind: str, fault: str, bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    running = [servers(1, kind), servers(1, kind)]
    writer.publish(1)
    await reload(bus.name, tmp_path, *running)
    writer.publish(2)
    await running[0].fault("reload", fault)
    with pytest.raises(UpdateRolledBackError, match="every server runs version 1 again"):
        await reload(bus.name, tmp_path, *running)
    assert [await each.tokens(3) for each in running] == [[1.0] * 3] * 2
    assert bus.policy_version == 1 and paused_by(bus.name) is None


async def test_a_quorum_goes_on(bus: Bus, writer: Trainer, servers: Any, tmp_path: Path) -> None:
    running = [servers(1), servers(1)]
    writer.publish(1)
    await reload(bus.name, tmp_path, *running)
    writer.publish(2)
    await running[1].fault("reload", "half")
    report = await reload(bus.name, tmp_path, *running, quorum=1)
    assert [each.version for each in report.servers] == [2, 1]
    assert "half of it" in report.servers[1].error
    assert await running[0].tokens(3) == [2.0] * 3
    assert await running[1].tokens(3) == [1.0] * 3


@pytest.mark.parametrize(("kind", "ranks", "before"), [("vllm", 1, False), ("vllm", 2, True)])
async def test_a_server_that_cannot_go_back_stays_paused_and_is_named(
    kind: str, ranks: int, before: bool, bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    # Without a version before, or with answers that cannot be told apart: vLLM's of several ranks.
    running = servers(ranks, kind)
    if before:
        writer.publish(1)
        await reload(bus.name, tmp_path, running)
    writer.publish(2)
    await running.fault("reload", "half")
    with pytest.raises(EngineError, match=f"{running.url}.*half of it.*stays paused"):
        await reload(bus.name, tmp_path, running)
    assert await running.paused()
    assert paused_by(bus.name) is not None


@pytest.mark.parametrize("seconds", [np.float32(5), np.int64(5)])
async def test_a_timeout_is_any_number_of_seconds(
    seconds: Any, bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    running = servers(1)
    writer.publish(1)
    await reload(bus.name, tmp_path, running, timeout=seconds)
    assert await running.tokens(3) == [1.0] * 3


async def test_no_pause_no_reload(bus: Bus, writer: Trainer, servers: Any, tmp_path: Path) -> None:
    running = [servers(1), servers(1)]
    writer.publish(1)
    await running[0].fault("pause", "500")
    with pytest.raises(EngineError, match="the old weights are in force"):
        await reload(bus.name, tmp_path, *running)
    assert [await each.tokens(3) for each in running] == [[0.0] * 3] * 2
    with pytest.raises(WeightsError, match=r"publish first\. Nothing was touched"):
        await reload(bus.name, tmp_path / "none", *running)


def end_in_a_reload(bus: str, url: str, directory: str) -> None:
    class Ending(KINDS["vllm"]):  # type: ignore[misc]
        async def reload(self, *arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    async def main() -> None:
        torch.set_num_threads(1)
        async with EngineFleet([Ending(url)], bus=bus, timeout=TIMEOUT_S) as fleet:
            await fleet.reload(directory)

    asyncio.run(main())


async def test_a_resume_reads_it(bus: Bus, writer: Trainer, servers: Any, tmp_path: Path) -> None:
    running = servers(1)
    writer.publish(7)
    trainer = TEMPLATE.Process(target=end_in_a_reload, args=(bus.name, running.url, str(tmp_path)))
    trainer.start()
    trainer.join(30)
    assert trainer.exitcode == -signal.SIGKILL
    assert await running.paused()
    report = await resume(bus.name, timeout=TIMEOUT_S)
    assert report is not None and report.servers[0].version == 7
    assert await running.tokens(3) == [7.0] * 3
    assert paused_by(bus.name) is None
