"""A server that this process manages runs the newest checkpoint, and ends with this process."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from http_requests import free_port
from trainers import TIMEOUT_S, Trainer

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, ManagedServer, UpdateRolledBackError

PROGRAM = Path(__file__).with_name("small_restarted.py")
START_S = 60.0


@pytest.fixture
def trainer(writer: Trainer) -> Trainer:
    writer.publish(1)
    return writer


def server_of(checkpoint: Path) -> ManagedServer:
    port = free_port()
    command = [sys.executable, str(PROGRAM), "{checkpoint}", str(port)]
    return ManagedServer(
        command, url=f"http://127.0.0.1:{port}", checkpoint=checkpoint, start_timeout=START_S
    )


def says(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_it_runs_each_checkpoint_and_ends(bus: Bus, trainer: Trainer, tmp_path: Path) -> None:
    async with server_of(tmp_path / "latest") as server:
        assert says(server.address)["value"] == 1.0
        fleet = EngineFleet([server], bus=bus.name, mode="abort", timeout=TIMEOUT_S)
        for version in (2, 3):
            trainer.publish(version)
            report = await fleet.reload(tmp_path)
            assert [each.version for each in report.servers] == [version]
            assert says(server.address)["value"] == version
        assert bus.policy_version == 3
        with pytest.raises(EngineError, match="takes weights when it starts"):
            await fleet.update(trainer, 4)
        pid = says(server.address)["pid"]
    assert not is_alive(pid) and not server.running


async def test_a_dead_one_is_restarted_and_catches_up_first(
    bus: Bus, trainer: Trainer, tmp_path: Path
) -> None:
    async with server_of(tmp_path / "latest") as server:
        os.kill(says(server.address)["pid"], signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not server.running)
        await server.start()
        assert says(server.address)["value"] == 1.0
        fleet = EngineFleet([server], bus=bus.name, mode="abort", timeout=TIMEOUT_S)
        trainer.publish(2)
        await fleet.reload(tmp_path)
        assert await fleet.catch_up() is None
        os.kill(says(server.address)["pid"], signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not server.running)
        report = await fleet.catch_up()
        assert report is not None
        assert [(each.version, each.state) for each in report.servers] == [(2, "serving")]
        assert says(server.address)["value"] == 2.0


async def test_a_checkpoint_without_start_is_undone(
    bus: Bus, trainer: Trainer, tmp_path: Path
) -> None:
    async with server_of(tmp_path / "latest") as server:
        fleet = EngineFleet([server], bus=bus.name, mode="abort", timeout=TIMEOUT_S)
        await fleet.reload(tmp_path)
        trainer.publish(2)
        (tmp_path / "latest" / "model.safetensors").write_bytes(b"no weights")
        with pytest.raises(UpdateRolledBackError, match="version 1 again"):
            await fleet.reload(tmp_path)
        assert says(server.address)["value"] == 1.0
    with pytest.raises(EngineError, match="ended with status"):
        await server_of(tmp_path / "latest").start()


def test_it_ends_with_a_process_that_is_killed(trainer: Trainer, tmp_path: Path) -> None:
    port = free_port()
    code = f"""
import asyncio, os, sys, time
from shmbus.engines import ManagedServer
async def main():
    command = [sys.executable, {str(PROGRAM)!r}, "{{checkpoint}}", "{port}"]
    url = "http://127.0.0.1:{port}"
    async with ManagedServer(command, url=url, checkpoint={str(tmp_path / "latest")!r}):
        worker = os.fork()  # a DataLoader's, with all descriptors
        if worker:
            print(worker, flush=True)
        time.sleep(600)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    pid = says(f"http://127.0.0.1:{port}")["pid"]
    child.kill()
    child.wait()
    child.stdout.close()
    wait_until(lambda: not is_alive(pid))
    os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(("name", "wrong"), [
    ("command", 5), ("command", {"{checkpoint}": 1}), ("checkpoint", None), ("checkpoint", ""),
    ("health", None), ("health", "health"), ("environment", "A=1"), ("environment", {"A": 0}),
])  # fmt: skip
def test_a_wrong_argument_is_refused_before_a_start(name: str, wrong: Any) -> None:
    given = {"command": ["serve", "{checkpoint}"], "checkpoint": "/ckpt", "url": "http://h:1"}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        ManagedServer(**{**given, name: wrong})


async def test_a_start_without_patience_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "{checkpoint}"]
    server = ManagedServer(command, url=f"http://127.0.0.1:{free_port()}", checkpoint=tmp_path)
    entering = asyncio.ensure_future(server.__aenter__())
    await asyncio.to_thread(wait_until, lambda: server.running)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not server.running


@pytest.mark.parametrize("end_s", [0.0, 1.0])
async def test_a_foreign_answer_is_no_start(trainer: Trainer, tmp_path: Path, end_s: float) -> None:
    async with server_of(tmp_path / "latest") as stranger:
        code = f"import sys, time; time.sleep({end_s}); sys.exit(98)"
        command = [sys.executable, "-c", code, "{checkpoint}"]
        second = ManagedServer(command, url=stranger.address, checkpoint=tmp_path / "latest")
        with pytest.raises(EngineError) as failed:
            await second.start()
        assert failed.value.step == "start" and not second.running
        assert re.match(r"process \d+ ended with status 98;", failed.value.body)
        assert stranger.address in failed.value.body
        assert stranger.running
