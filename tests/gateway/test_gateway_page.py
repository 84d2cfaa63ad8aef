"""The steps of docs/gateway.md run as they stand, with another bus, port and capacity."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import doc_pages
import pytest
from conftest import wait_until
from gateways import Gateway
from http_requests import scored

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gateway.md").read_text()
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.M | re.S)

Start = Callable[[str, str], Gateway]


def blocks(heading: str) -> list[tuple[str, str]]:
    parts = dict(part.split("\n", 1) for part in f"\n#{PAGE}".split("\n## ")[1:])
    [text] = [text for name, text in parts.items() if heading in name]
    return [(language, dedent(code)) for language, code in BLOCK.findall(text)]


def commands(heading: str) -> list[str]:
    lines = [line for kind, code in blocks(heading) if kind == "sh" for line in code.splitlines()]
    return [line.partition("#")[0].strip() for line in lines]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a shell find `shmbus`, even without this environment's entry point."""
    (tmp_path / "shmbus").write_text(f'#!/bin/sh\nexec {sys.executable} -m shmbus "$@"\n')
    (tmp_path / "shmbus").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def start(program: None, tmp_path: Path, bus_name: str) -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def started(line: str, name: str) -> Gateway:
        line = re.sub(r"\brun1\b", name, line).replace("4GiB", "64MiB")
        line = re.sub(r":8\d\d\d\b", ":0", line)
        log = tmp_path / f"served-{len(running)}"
        with log.open("wb") as output:
            child = subprocess.Popen(["bash", "-c", f"exec {line}"], stdout=output, stderr=output)
        running.append(child)

        def port() -> int:
            assert child.poll() is None, log.read_text()
            found = re.search(r"http=http://[\d.]+:(\d+)", log.read_text())
            return int(found[1]) if found else 0

        gateway = Gateway.__new__(Gateway)
        gateway.name = name
        gateway.port = wait_until(port, what=f"{line} to serve")
        return gateway

    yield started
    for child in running:
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0


def shell(line: str, gateway: Gateway) -> str:
    line = re.sub(r"\brun1\b", gateway.name, line)
    line = re.sub(r"127\.0\.0\.1:8\d\d\d", f"127.0.0.1:{gateway.port}", line)
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("number", [0, 1], ids=["alone", "beside a daemon"])
def test_the_first_commands_serve(number: int, start: Start, bus_name: str) -> None:
    install, *serving = commands("The HTTP gateway")
    assert install == "pip install 'shmbus[gateway]'"
    assert len(serving) == 2
    assert start(serving[number], bus_name).get("/healthz").json()["status"] == "ok"


def test_the_five_minutes_of_atropos(start: Start, bus_name: str) -> None:
    [run, *watch] = commands("From atroposlib's")
    gateway = start(run, bus_name)
    gateway.register(batch_size=4)
    env = gateway.register_env()
    for number in range(2):
        group = scored([number], [number], env_id=env)
        assert gateway.post("/scored_data", group).status == 200
    assert len(gateway.batch()) == 2
    status, metrics, top = (shell(line, gateway) for line in watch)
    assert status == '{"current_step":1,"queue_size":0}'
    assert 'shmbus_gateway_requests_total{bus="' in metrics
    assert bus_name in top
    environment, trainer = (code for kind, code in blocks("From atroposlib's") if kind == "python")
    names: dict[str, Any] = {"BaseEnv": type("BaseEnv", (), {"env_id": env})}
    exec(environment.replace("run1", bus_name), names)
    sender = names["MyEnv"]()
    for group in [scored([number], [number], env_id=env) for number in range(2, 32)]:
        asyncio.run(sender._send_scored_data_to_api(group))
    sender._shmbus().close()
    names = {}
    exec(trainer.replace("run1", bus_name).replace("8000", str(gateway.port)), names)
    assert sorted([group["tokens"][0][0] for group in names["data"]["batch"]]) == list(range(32))
    assert gateway.get("/batch").status == 409


def test_a_trainer_of_the_page_waits_for_a_restart(start: Start, bus_name: str) -> None:
    names = {name: pytest.importorskip(name) for name in ("requests", "urllib3")}
    gateway = start(f"shmbus gateway {bus_name} --create 64MiB --http 127.0.0.1:8000", bus_name)
    gateway.register(batch_size=2)
    env = gateway.register_env()
    assert gateway.post("/scored_data", scored([1], [1], env_id=env)).status == 200
    wait_until(lambda: gateway.get("/status").json()["queue_size"] == 1)
    swap = {"127.0.0.1:8000": f"127.0.0.1:{gateway.port}"}
    space = doc_pages.run("docs/gateway.md", "urllib3.Retry", bus_name, swap=swap, **names)
    assert len(space["batch"]) == 1
    space["session"].close()


def test_each_option_that_the_page_names_is_one_of_the_command(program: None) -> None:
    named = set(re.findall(r"`(?:shmbus (\w+) )?(--[a-z-]+)", PAGE))
    assert len(named) >= 7
    commands = {command for command, _ in named if command} | {"gateway", "serve"}
    helps = {
        command: subprocess.run(
            ["bash", "-c", f"shmbus {command} --help"], capture_output=True, text=True
        ).stdout
        for command in commands
    }
    for command, option in named:
        # An option alone belongs to the gateway, or to `shmbus serve`.
        text = helps[command] if command else helps["gateway"] + helps["serve"]
        assert option in text, command
