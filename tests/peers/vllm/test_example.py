"""examples/vllm_grpo.py learns, goes on after a kill of all of it, and trains each group once."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from http_requests import free_port
from serving import kill_all

import shmbus

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/vllm_grpo.py"
START_S, LEARN_S = 180.0, 900.0


@pytest.fixture
def port() -> str:
    return str(free_port())


def begun(output: Path, port: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    said = output.with_suffix(f".{time.monotonic_ns()}")
    command = [sys.executable, str(EXAMPLE), "--output", str(output), "--port", port, *options]
    with said.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True), said


def wait_for(words: str, process: subprocess.Popen[bytes], said: Path) -> None:
    end = time.monotonic() + START_S
    while words not in said.read_text():
        assert process.poll() is None and time.monotonic() < end, said.read_text()[-3000:]
        time.sleep(0.1)


def ended(process: subprocess.Popen[bytes], output: Path) -> None:
    if process.poll() is None:
        kill_all(process)
    with contextlib.suppress(shmbus.BusNotFoundError):  # a run that is done removes its bus
        shmbus.unlink(f"vllm-{output.name}")


@pytest.mark.timeout(1500)
def test_it_trains_each_group_once_over_kills(tmp_path: Path, port: str) -> None:
    output = tmp_path / f"{os.getpid()}"
    process, said = begun(output, port, "--save-steps", "5")
    try:
        wait_for("step 8:", process, said)
        kill_all(process)
        process, said = begun(output, port)
        process.wait(LEARN_S)
        text = said.read_text()
        assert process.returncode == 0, text[-3000:]
        assert "resumed after step 5\n" in text
        steps = max(int(each) for each in re.findall(r"step (\d+): reward", text))
        evaluations = 1 + len(re.findall(r"step \d+: evaluation", text))
        done = re.search(r"evaluation (0\.9\d*|1\.0+), (\d+) samples", text)
        assert done
        assert int(done[2]) == steps * 16 * 8 + evaluations * 64
    finally:
        ended(process, output)
    assert not list(Path("/dev/shm").glob(f"*vllm-{output.name}*"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("weights", ["lora", "checkpoint", "restart"])
def test_each_way_for_weights_comes_to_the_server(weights: str, tmp_path: Path, port: str) -> None:
    output = tmp_path / f"{os.getpid()}"
    process, said = begun(output, port, "--weights", weights, "--steps", "3", "--save-steps", "9")
    try:
        process.wait(600)
        assert process.returncode == 1, "it cannot have learned in three steps"
        assert "\nstep 3: reward" in said.read_text(), said.read_text()[-3000:]
    finally:
        ended(process, output)
