"""examples/eagle_head.py learns beside a real vLLM, and after a kill trains each sequence once."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import kill_all

from shmbus.channel import unlink_channel

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/eagle_head.py"
RUN_S = 900.0


@pytest.fixture
def runs() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        kill_all(process)
        for file in Path("/dev/shm").glob(f"shmbus-channel.eagle-head-{process.pid}"):
            unlink_channel(file.name.removeprefix("shmbus-channel."))


def begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), "--folder", str(folder), "--compare"]
    command += ["--sequences", "400", "--save-every", "10"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(1800)
def test_a_killed_head_goes_on(tmp_path: Path, runs: list[subprocess.Popen[str]]) -> None:
    runs.append(begin(tmp_path))
    end = time.monotonic() + RUN_S
    while not (tmp_path / "eagle_head.pt").exists():
        assert runs[0].poll() is None and time.monotonic() < end
        time.sleep(0.02)
    kill_all(runs[0])
    runs.append(begin(tmp_path))
    said, _ = runs[1].communicate(timeout=RUN_S)
    print(said)
    assert runs[1].returncode == 0  # asserts a single training of each sequence
    kept = re.search(r"goes on after (\d+) sequences", said)
    learnt = re.search(r"(\d+) sequences, loss (\S+) -> (\S+), .* length (\S+) -> (\S+)", said)
    apart = re.search(r"first gradient: (\S+) from", said)
    assert kept and learnt and apart
    assert int(kept[1]) + int(learnt[1]) == 400
    assert float(learnt[3]) < float(learnt[2])
    assert float(learnt[5]) > float(learnt[4]) + 0.2
    assert float(apart[1]) < 1e-4
