"""TRL's page, word for word: its installation, examples and blocks."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import doc_pages
import pytest
from tiny import make_model

import shmbus

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@contextmanager
def process(kind: str, bus: str, root: Path) -> Iterator[Any]:
    command = [sys.executable, "-W", "ignore", str(HERE / "page.py"), kind, bus, str(root)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def trained(bus: str, root: Path, trainer: str, workers: str) -> list[dict[str, float]]:
    make_model(root / "model")
    with process(workers, bus, root), process(trainer, bus, root) as running:
        errors = running.communicate(timeout=500)[1]
        assert running.returncode == 0, errors[-3000:]
    log = json.loads((root / "log.jsonl").read_text())
    return [step for step in log if "loss" in step]


@pytest.mark.parametrize(("trainer", "workers"), [("async", "rollouts"), ("sync", "answers")])
def test_the_page_trains(trainer: str, workers: str, bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB", max_lead=4) as bus:
        log = trained(bus_name, tmp_path, trainer, workers)
        counts = bus.stats()
    assert len(log) == 4 and all(math.isfinite(step["loss"]) for step in log)
    assert counts.acknowledged > 0 and counts.acknowledged % 8 == 0
    assert not sum(counts.dropped.values())


@pytest.mark.parametrize("line", doc_pages.block("trl.md", "pip install").splitlines()[1:])
def test_an_example_of_the_page_runs(line: str) -> None:
    python, *command = shlex.split(line, comments=True)
    assert python == "python"
    if "trl_async.py" in line:
        command.insert(0, str(HERE / "trl_on_a_cpu.py"))  # in place of its Hopper GPU
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True,
        timeout=590,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reward" in done.stdout
