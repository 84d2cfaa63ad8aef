"""The closed loops of `bench.loop`, tiny: real processes, and no figure is asserted to be good."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Child, Spawner, wait_until

from bench.loop import audited, duration
from bench.processes import MeasurementError, descendants
from bench.row import Row

ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
DEADLINE_S = 100.0
ARMS = ("alternating", "files", "shmbus")
TINY = ["--tiny", "--payloads", "text"]


def left_of(child: Child) -> list[str]:
    prefix = f"bench-loop-{child.pid}-"
    files = [path.name for path in Path("/dev/shm").iterdir() if prefix in path.name]
    return files + [str(pid) for pid in descendants(child.pid)]


@pytest.fixture
def rows_of(spawn: Spawner, tmp_path: Path, seed: int) -> Iterator[Any]:
    """Run the program to its end, and return its rows by name; it leaves nothing behind."""

    def run(*arguments: object) -> dict[str, Row]:
        output = tmp_path / "figures.json"
        more = [*arguments, "--seed", seed % 1000, "--output", output]
        child = spawn.module("bench.loop", *more, env=PATH)
        child.finish(DEADLINE_S)
        assert left_of(child) == []
        rows = [Row.from_json(each) for each in json.loads(output.read_text())["rows"]]
        return {row.name: row for row in rows}

    yield run


def test_arms_train_the_same_answers_once_each(rows_of: Any) -> None:
    rows = rows_of(*TINY, "--arms", *ARMS, "--steps", 4)
    names = [f"loop-text-{arm}{end}" for end in ("", "-wait") for arm in ARMS]
    assert sorted(rows) == sorted(names)
    for row in rows.values():
        assert row.value is not None and row.beside and row.ratio, row
    for arm in ARMS:
        (run,) = rows[f"loop-text-{arm}"].figures["runs"]
        assert run["goodput"] == 1 and not run["twice"] and run["lag"] <= 1, run
        assert "idle trainer" in rows[f"loop-text-{arm}"].note


def test_a_payload_arrives_as_it_was_sent(rows_of: Any) -> None:
    arms = ["queue", "shmbus", "shmbus-device"]
    rows = rows_of("--tiny", "--payloads", "experts", "--arms", *arms)
    assert rows["loop-experts-queue"].value and rows["loop-experts-shmbus"].value
    assert rows["loop-experts-shmbus-device"].skipped == "needs --device cuda"


def test_an_arm_without_its_package_is_skipped_and_others_go_on(spawn: Spawner) -> None:
    lines = [
        "import sys; from bench import loop",
        "loop.ARMS['files'].needs = ('no_such_package',)",
        "if __name__ == '__main__':",
        f"    sys.exit(loop.main({[*TINY, '--arms', 'files', 'alternating']}))",
    ]
    said = spawn.script("\n".join(lines), env=PATH).finish(DEADLINE_S)
    assert "skipped: there is no no_such_package here" in said
    assert "text, alternating, a step" in said and "idle trainer" in said


def test_an_arm_that_hangs_is_ended_and_others_go_on(spawn: Spawner) -> None:
    arguments = [*TINY, "--arms", "queue", "alternating", "--patience", 7]
    child = spawn.module("bench.loop", *arguments, env=PATH)

    def roles() -> list[int]:
        children = [pid for pid in descendants(child.pid) if parent_of(pid) == child.pid]
        return [pid for each in children for pid in descendants(each)]

    wait_until(roles)
    for pid in roles():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    said = child.finish(DEADLINE_S)
    assert "text, queue, a step" in said and "skipped: ended: not done in 7 s" in said
    assert "idle trainer" in said and left_of(child) == []


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def test_ctrl_c_leaves_nothing(spawn: Spawner) -> None:
    child = spawn.module("bench.loop", *TINY, "--arms", "shmbus", "--steps", 10**6, env=PATH)
    wait_until(lambda: len(left_of(child)) > 4)
    child.send_signal(signal.SIGINT)
    assert child.wait() == 128 + signal.SIGINT
    wait_until(lambda: not left_of(child))


def test_a_soak_trains_each_prompt_once_though_workers_and_trainers_die(rows_of: Any) -> None:
    row = rows_of("--soak", "6s", "--every", 0.5)["loop-soak"]
    print(row)
    assert "workers" in row.note and "trainers" in row.note and " 0 lost" in row.note
    assert row.figures["trained"] == row.figures["offered"] and not row.figures["in_flight"]


@pytest.mark.parametrize(
    ("times", "offered", "balanced", "said"),
    [
        (b"\1\2\1", 4, True, "trained twice 1, lost 0"),
        (b"\1\0\1", 4, True, "trained twice 0, lost 1"),
        (b"\1\1\1", 4, False, "trained twice 0, lost 0"),
    ],
)
def test_an_account_that_does_not_balance_ends_the_soak(
    tmp_path: Path, times: bytes, offered: int, balanced: bool, said: str
) -> None:
    account = {"times": times, "offered": offered, "in_flight": [3, 7], "balanced": balanced}
    (tmp_path / "checkpoint").write_bytes(pickle.dumps((None, None, None, account)))
    with pytest.raises(MeasurementError, match=said):
        audited(tmp_path / "checkpoint")


def test_a_duration_has_a_unit() -> None:
    assert (duration("90s"), duration("10m"), duration("2h")) == (90, 600, 7200)
