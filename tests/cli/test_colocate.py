"""``shmbus colocate``: shares, the environment of MPS, and a daemon that a script stands in for."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until
from operators import Result, cli

from shmbus.cli import colocate

FAKE = """#!/bin/sh
# The daemon is a process of the same name, with the environment that it was started with.
case "$1" in
  -d) "$0" serve >/dev/null 2>&1 & exit 0 ;;
  serve) cd "$CUDA_MPS_PIPE_DIRECTORY"; mkfifo control; echo $$ >pid; read word <control ;;
  *) read word; [ "$word" = quit ] && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")" ;;
esac
"""
SHARES = ("--train", "0.3", "--infer", "0.5")


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    pipe = tmp_path / "pipe"
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipe))
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(tmp_path / "log"))
    yield pipe
    if (pipe / "pid").exists() and colocate._is_here():
        os.kill(int((pipe / "pid").read_text()), 15)


def colocated(*options: str) -> Result:
    names = ("PATH", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    variables = {name: os.environ[name] for name in names}
    return cli("colocate", *options, env={**variables, "CUDA_VISIBLE_DEVICES": "1"})


def test_mps_is_started_once_printed_for_a_shell_and_ended(mps: Path) -> None:
    told = colocated(*SHARES)
    assert "# no MPS: it does not run: add --start; both sides work all the same" in told.out
    for _ in range(2):
        told = colocated(*SHARES, "--start")
        assert f"export CUDA_MPS_PIPE_DIRECTORY={mps}\n" in told.out
        assert "set_per_process_memory_fraction(0.3)" in told.out
        assert "--gpu-memory-utilization 0.5" in told.out
        assert len([place for _, _, place in colocate._daemons() if place == str(mps)]) == 1
    assert mps.stat().st_mode & 0o777 == 0o700
    # A client with CUDA_VISIBLE_DEVICES=1 finds that device only in an MPS of all devices.
    variables = Path(f"/proc/{(mps / 'pid').read_text().strip()}/environ").read_bytes()
    assert b"CUDA_VISIBLE_DEVICES" not in variables
    assert colocated("--stop").status == 0
    wait_until(lambda: not colocate._is_here())
    assert colocated("--stop").status == 1


def test_shares_of_more_than_there_is_are_refused() -> None:
    told = cli("colocate", "--train", "0.5", "--infer", "0.45")
    assert told.status == 2 and "0.90, got 0.5 and 0.45" in told.err
    assert cli("colocate", "--train", "0.5", "--infer", "0.4").status == 0
    assert cli("colocate", "--train", "1.5", "--infer", "0.4").status == 2
    assert cli("colocate", "--train", "0.5").status == 2


def test_a_driver_without_mps_is_named(mps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    told = colocated(*SHARES, "--start")
    assert told.status == 0 and "nvidia-cuda-mps-control is not installed" in told.out


@pytest.mark.parametrize(
    ("user", "why"),
    [
        (os.getuid() + 1, "a device serves one user's: ask to end it"),
        (os.getuid(), "it runs elsewhere .pid 7.: set CUDA_MPS_PIPE_DIRECTORY=/tmp/other"),
    ],
)
def test_another_mps_stays(mps: Path, monkeypatch: pytest.MonkeyPatch, user: int, why: str) -> None:
    monkeypatch.setattr(colocate, "_daemons", lambda: iter([(7, user, "/tmp/other")]))
    problem = colocate._start()
    assert not mps.exists()
    assert re.search(why, problem)
