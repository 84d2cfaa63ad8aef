"""The demo as a user starts it: real workers, a real trainer, real signals."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from conftest import SHM_DIR, Child, Spawner, wait_until

pytest.importorskip("torch", reason="the demo trains")


def has_stepped(child: Child) -> bool:
    """Whether a progress line names a step beyond the 0 that the demo starts from."""
    return re.search(r"step +[1-9]", child.output()) is not None


def segments_of(child: Child) -> list[Path]:
    return sorted(SHM_DIR.glob(f"shmbus*.demo-{child.pid}-*"))


def workers_of(child: Child) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == child.pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_short_run_reports_balances_and_leaves_nothing(spawn: Spawner, tmp_path: Path) -> None:
    child = spawn.module("shmbus.cli", "demo", "--steps", 12, "--workers", 2, "--output", tmp_path)
    output = child.finish(timeout=100)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 12 and summary["workers"] == 2
    assert summary["groups"] == 12 * 48 and summary["trajectories"] == 12 * 48 * 8
    ledger = summary["ledger"]
    assert summary["ledger_balanced"] and ledger["acknowledged"] == summary["trajectories"]
    assert "balances" in output
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert segments_of(child) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupting_it_leaves_no_process_and_no_segment(
    spawn: Spawner, tmp_path: Path, number: int
) -> None:
    child = spawn.module("shmbus.cli", "demo", "--chaos", "--workers", 2, "--output", tmp_path)
    wait_until(lambda: has_stepped(child), 60, "the first step")
    workers = workers_of(child)
    assert workers and segments_of(child)
    child.send_signal(number)
    assert child.wait(60) == 1
    assert "Interrupted" in child.output() and "balances" in child.output()
    assert segments_of(child) == []
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_by_themselves_when_the_trainer_is_killed(
    spawn: Spawner, tmp_path: Path
) -> None:
    child = spawn.module("shmbus.cli", "demo", "--workers", 2, "--output", tmp_path)
    wait_until(lambda: has_stepped(child), 60, "the first step")
    workers = workers_of(child)
    assert len(workers) == 2
    child.kill()
    for path in segments_of(child):
        path.unlink()  # no process remains to do so

    def gone() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in workers)

    wait_until(gone, 60, "the workers to notice that the trainer is gone")


def test_wrong_arguments_are_usage_errors(spawn: Spawner) -> None:
    child = spawn.module("shmbus.cli", "demo", "--workers", 0)
    assert child.wait() == 2
    assert "expected 1 to 1000, got 0" in child.output()


@pytest.mark.parametrize("options", [["--model", "m"], ["--engine", "vllm"]])
def test_an_engine_and_a_model_come_together(spawn: Spawner, options: list[str]) -> None:
    child = spawn.module("shmbus.cli", "demo", *options)
    assert child.wait(60) == 2
    assert "shmbus demo" in child.output() and "vllm" in child.output()
