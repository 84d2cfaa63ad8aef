"""The blocks of docs/first-hour.md run as they stand, and print what the page says."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until

import shmbus
from trainer_adapter import Batch, OnlineDataHandler

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "first-hour.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", PAGE, re.M | re.S)
CODE = re.compile(r"`([^`]+)`")
DEADLINE_S = 240

PROGRAMS = {"python": '"$@"', "shmbus": '-m shmbus "$@"'}


def write_programs(folder: Path, bus_name: str) -> None:
    for language, name, text in BLOCKS:
        if language == "python":
            (folder / name).write_text(text.replace("first-hour", bus_name))


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_page_runs_from_first_to_resumed_block(tmp_path: Path, bus_name: str) -> None:
    assert {language for language, *_ in BLOCKS} == {"sh", "python", "text"}
    write_programs(tmp_path, bus_name)
    script = "".join(text for language, _, text in BLOCKS if language == "sh")
    install, script = script.split("shmbus doctor", 1)
    assert "\npip install 'shmbus[train]'" in install
    for program, arguments in PROGRAMS.items():
        (tmp_path / program).write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        (tmp_path / program).chmod(0o755)
    script = f"set -u\ntrap 'kill $workers' EXIT\nworkers=\n: shmbus doctor{script}"
    result = subprocess.run(
        ["bash", "-c", script.replace("first-hour", bus_name)],
        cwd=tmp_path,
        env={**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    said = result.stdout + result.stderr
    assert "exit status 137" in result.stdout, said
    before, after = result.stdout.split("exit status 137", 1)
    assert "resumed after step 10\nstep 11: reward" in after, said
    rewards = [float(text) for text in re.findall(r"^step \d+: reward (\S+)$", result.stdout, re.M)]
    assert len(rewards) == 30, said
    assert len(re.findall("^step", before, re.M)) == 10, said
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.6, said
    assert "Traceback" not in said, said
    with pytest.raises(shmbus.BusNotFoundError):
        shmbus.Bus.open(bus_name)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_programs_of_the_page_end_though_samples_fail(tmp_path: Path, bus_name: str) -> None:
    """A fiftieth of the samples fails for good: a seventh of the groups is given up."""
    steps, rate, dies = 100, 0.02, 40
    write_programs(tmp_path, bus_name)
    for program, line, new in (
        (
            "worker.py",
            "        tokens, logprobs = request",
            f"        if rng.random() < {rate}:\n"
            '            producer.requests.fail(request, "sandbox timed out")\n'
            "            continue\n        tokens, logprobs = request",
        ),
        ("trainer.py", "16, 30", f"16, {steps}"),
        ("trainer.py", "size=(1000, 1)", f"size=({steps * 20}, 1)"),
        ("trainer.py", "handler.ack(batch)", "print(*batch.instance_ids[::8]); handler.ack(batch)"),
    ):
        text = (tmp_path / program).read_text()
        assert line in text
        (tmp_path / program).write_text(text.replace(line, new))
    options: Any = {"cwd": tmp_path, "env": environment(), "text": True}
    worker = subprocess.Popen([sys.executable, "worker.py"], **options)
    try:
        said = [
            subprocess.run(
                [sys.executable, "trainer.py", *life],
                stdout=subprocess.PIPE,
                timeout=DEADLINE_S,
                **options,
            ).stdout
            for life in ([str(dies)], [])
        ]
        with shmbus.Bus.open(bus_name), shmbus.Consumer(bus_name) as consumer:
            # Its trainer's last drops end their requests after a read of the ring.
            groups: list[shmbus.Group] = []

            def all_read() -> bool:
                groups.extend(consumer.take(64, timeout=0.1))
                return consumer.stats().requests.groups <= len(groups)

            wait_until(all_read)
            ledger = consumer.stats()
    finally:
        worker.kill()
        worker.wait()
        with contextlib.suppress(shmbus.BusNotFoundError):
            shmbus.unlink(bus_name)
    assert f"resumed after step {dies}\n" in said[1]
    assert f"step {steps}: reward" in said[1]
    trained = re.findall(r"prompt-(\d+)", "".join(said))
    assert len(trained) == len(set(trained)) == 16 * steps, "none twice"
    assert ledger.balanced and ledger.dropped["failed"] > 17 * 8, "more than a batch's worth"
    left = ledger.groups_dropped + ledger.requests.groups
    assert ledger.requests.offered == 8 * (len(trained) + left), "none skipped but those given up"


def test_the_everyday_lines_name_what_there_is() -> None:
    """Methods and keywords of the tables belong to the class of their line."""
    owners = {
        "producer": shmbus.Producer,
        "consumer": shmbus.Consumer,
        "handler": OnlineDataHandler,
        "batch": Batch,
        "group": shmbus.Group,
        "trajectory": shmbus.Trajectory,
        "request": shmbus.Request,
        "shmbus": shmbus,
        "shmbus.Bus": shmbus.Bus,
    }
    tables = PAGE.partition("## Everyday lines")[2].partition("\n## ")[0]
    named = re.findall(r"\b(shmbus\.Bus|[a-z]+)\.([A-Za-z_]+)\b", " ".join(CODE.findall(tables)))
    named = [(owner, name) for owner, name in named if owner in owners]
    assert len(named) >= 20
    assert [
        f"{owner}.{name}"
        for owner, name in named
        if not hasattr(owners[owner], name)
        and name not in getattr(owners[owner], "__annotations__", {})
    ] == []
