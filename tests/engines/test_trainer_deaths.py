"""A trainer dies at each request of an update: the next caller ends the pause by equal rules."""

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from conftest import wait_until
from fork_server import TEMPLATE
from small_engine import Running
from trainers import TIMEOUT_S, assert_serving, end_in_an_update, fleet_of

from shmbus import Bus
from shmbus.engines.pause_note import paused_by
from shmbus.engines.resume import resume
from shmbus.inspect.leftovers import survey
from shmbus.segment.names import companion_name

pytest_plugins = ["engine_fixtures"]

STEPS = [
    *(("vllm", step) for step in ("prepare", "pause", "start", "update", "finish", "resume")),
    *(("sglang", step) for step in ("pause", "begin", "update", "end", "resume")),
]
POINTS = [
    (kind, step, after)
    for kind, step in STEPS
    for after in (False, True)
    if not after or step == "resume" or "SHMBUS_TEST_LONG" in os.environ
]


def start_trainer(
    bus: str, kind: str, running: list[Running], step: str, after: bool, number: int, level: int = 0
) -> Any:
    arguments = (bus, kind, [each.url for each in running], step, after, number, level)
    process = TEMPLATE.Process(target=end_in_an_update, args=arguments)
    process.start()
    return process


async def kill_trainer(
    bus: str, kind: str, running: list[Running], step: str, after: bool = False, level: int = 0
) -> None:
    process = start_trainer(bus, kind, running, step, after, signal.SIGKILL, level)
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("kind", "step", "after"), POINTS)
async def test_a_pause_that_a_killed_trainer_left_is_ended_with_whole_weights(
    kind: str, step: str, after: bool, bus: Bus, servers: Any
) -> None:
    running = [servers(1, kind), servers(2, kind)]
    await kill_trainer(bus.name, kind, running, step, after)
    async with fleet_of(bus.name, *running) as fleet:
        report = await fleet.recover()
        assert report is None or report.torn == []
    for each in running:
        assert not await each.paused()
        assert await each.tokens(2) in ([1.0, 1.0], [2.0, 2.0])
    assert paused_by(bus.name) is None


@pytest.mark.parametrize(("kind", "step"), [("vllm", "update")])
async def test_the_daemon_ends_the_pause_that_a_killed_trainer_left(
    kind: str, step: str, bus_name: str, servers: Any, daemon: Any
) -> None:
    daemon("--capacity", "1MiB")
    running = [servers(1, kind), servers(2, kind)]
    await kill_trainer(bus_name, kind, running, step)
    assert await running[0].paused()
    await asyncio.to_thread(wait_until, lambda: paused_by(bus_name) is None, 60.0)
    await assert_serving(2.0, *running)


async def test_a_server_that_has_ended_is_not_waited_for(bus: Bus, servers: Any) -> None:
    running = [servers(1), servers(1)]
    await kill_trainer(bus.name, "vllm", running, "update")
    running[1].kill()
    async with fleet_of(bus.name, *running) as fleet:
        report = await fleet.recover()
    assert report is not None and [each.state for each in report.servers] == ["serving", "gone"]
    assert paused_by(bus.name) is None


async def test_a_torn_server_is_named_until_the_command_resumes_it(bus: Bus, servers: Any) -> None:
    running = [servers(1), servers(1)]
    await kill_trainer(bus.name, "vllm", running, "update")
    await running[1].fault("update", "refuse")

    async def command() -> tuple[int | None, str]:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shmbus", "weights", bus.name, "--resume",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await child.communicate()
        return child.returncode, output.decode()

    report = await resume(bus.name, timeout=TIMEOUT_S)
    assert report is not None and report.torn == [running[1].url]
    assert not await running[0].paused() and await running[1].paused()
    note = companion_name("fleet", bus.name)[1:]
    verdicts = {each.path: each.verdict for each in survey() if each.name == bus.name}
    assert verdicts[f"/dev/shm/{note}"] == "unknown"
    status, said = await command()
    assert status == 0 and "serving, runs version 2" in said
    assert await running[1].tokens(1) == [2.0]
    assert await resume(bus.name) is None


@pytest.mark.parametrize(("kind", "step"), [("vllm", "update"), ("sglang", "end")])
async def test_a_stopped_trainer_is_awaited(kind: str, step: str, bus: Bus, servers: Any) -> None:
    running = [servers(1, kind)]
    process = start_trainer(bus.name, kind, running, step, False, signal.SIGSTOP)
    with open(f"/proc/{process.pid}/stat") as stat:

        def stopped() -> bool:
            stat.seek(0)
            return stat.read().rpartition(")")[2].split()[0] == "T"

        await asyncio.to_thread(wait_until, stopped)
    note = paused_by(bus.name)
    assert note is not None and note[1] and note[0].pid == process.pid
    async with fleet_of(bus.name, *running) as fleet:
        with pytest.raises(BlockingIOError, match=f"pid {process.pid} is updating"):
            await fleet.recover()
    assert await running[0].paused()
    os.kill(process.pid, signal.SIGCONT)
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == 0
    assert await running[0].tokens(2) == [2.0, 2.0]
    assert paused_by(bus.name) is None
