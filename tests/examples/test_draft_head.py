"""The draft head's loss falls, with the gradients of tensors that never left a process."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import Spawner, wait_until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "draft_head.py"
DEADLINE_S = 200
LAST_LINE = (
    r"(\d+) steps, (\d+) skipped, every gradient as of tensors made here, "
    r"loss (\d\.\d+) -> (\d\.\d+)"
)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_loss_falls_with_gradients_that_stayed_inside(bus_name: str, spawn: Spawner) -> None:
    said = spawn.file(EXAMPLE, "--quick", "--name", bus_name).finish(DEADLINE_S)
    found = re.fullmatch(LAST_LINE, said.splitlines()[-1])
    assert found, said
    steps, skipped, first, last = (float(each) for each in found.groups())
    assert steps + skipped == 80 and skipped > 0
    assert last < first / 3


def test_the_engine_ends_with_a_trainer_killed_at_the_start(bus_name: str, spawn: Spawner) -> None:
    trainer = spawn.file(EXAMPLE, "--name", bus_name)
    engines = wait_until(lambda: psutil.Process(trainer.pid).children()[1:])
    trainer.kill()
    psutil.wait_procs(engines, timeout=DEADLINE_S)
    assert not [*Path("/dev/shm").glob(f"shmbus-channel.{bus_name}*")]


FORKS = """
import multiprocessing, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from eagle_head import end_with_trainer

threading.Thread(target=end_with_trainer, args=(threading.Event(),), daemon=True).start()
time.sleep(0.2)
core = multiprocessing.get_context("fork").Process(target=print)
core.start()
core.join(20)
print("forked", core.exitcode, flush=True)
core.kill()
os._exit(0)
"""


def test_the_engine_of_the_eagle_head_forks_beside_its_watch_of_the_trainer() -> None:
    # As vLLM does on a GPU; on a CPU it spawns.
    command = [sys.executable, "-c", FORKS, str(EXAMPLE.parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.read().split() == ["forked", "0"]
