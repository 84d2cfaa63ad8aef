"""Commands of the benchmark refuse what cannot end well before they measure, and end in order."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner, wait_until

from bench import command, fitness
from bench import run as bench_run
from bench.fitness import Need
from shmbus import LayoutMismatchError
from shmbus.pool import read_pool

ROOT = Path(__file__).resolve().parents[2]
#: A command, what is wrong with its arguments, and what its message has to name.
REFUSED = [
    ("run", ["--repetitions", "two"], "expected a whole number, 1 or more, got 'two'"),
    ("run", ["--repetitions", "0"], "expected a whole number, 1 or more, got '0'"),
    ("weights", ["--size", "0"], "expected a number above 0, got '0'"),
    ("weights", ["--size", "nan"], "expected a number above 0, got 'nan'"),
    ("weights", ["--size", "0.001"], "expected 0.0037 or more, got 0.001"),
    ("weights", ["--rounds", "0"], "got '0'"),
    ("weights", ["--readers", "0"], "got '0'"),
    ("weights", ["--device", "tpu"], "expected one that torch knows, got 'tpu'"),
    ("channel", ["--rounds", "-1"], "got '-1'"),
    ("channel", ["--device", "tpu"], "expected one that torch knows, got 'tpu'"),
    ("gateway", ["--rounds", "0"], "got '0'"),
    ("gateway", ["--parts", "post"], "expected some of posts, trips, polls, ring, got post"),
    ("cores", ["--seconds", "inf"], "expected a number above 0, got 'inf'"),
    ("cores", ["--producers", "0"], "got '0'"),
    ("cores", ["--capacity", "3"], "--capacity: expected 4096 bytes to"),
    ("large", ["--group", "3"], "choose from 1, 8, 64"),
    ("large", ["--seconds", "0"], "expected a number above 0, got '0'"),
    ("flame", ["puts"], "expected some of put, take, pack, lease, got puts"),
    ("lead", ["--steps", "0"], "got '0'"),
    ("lead", ["--step-s", "nan"], "expected a number, 0 or more, got 'nan'"),
    ("page", ["--seconds", "0"], "expected a number above 0, got '0'"),
    ("page", ["--browser-s", "-1"], "expected a number, 0 or more, got '-1'"),
    ("trainer", ["--capacity", "x"], "--capacity: expected"),
    ("trainer", ["--capacity", "64MiB"], "--capacity: expected 192 MiB or more"),
    ("trainer", ["--plot", "figures.nope"], "expected a name that ends in .png, .svg, .pdf"),
    ("threads", ["--capacity", "64"], "--capacity: expected 4096 bytes to"),
    ("threads", ["--threads", "0"], "got '0'"),
    ("ranks", ["--capacity", "-1"], "--capacity: expected a number with KiB"),
    ("ranks", ["--seconds", "nan"], "expected a number above 0, got 'nan'"),
    ("suite", ["--capacity", "1"], "--capacity: expected 4096 bytes to"),
    ("attention", ["--heads", "0"], "got '0'"),
]
WRITERS = (
    "run", "suite", "weights", "channel", "gpu", "gateway", "gateway_clients", "cores", "large",
    "flame", "lead", "page", "trainer", "attention", "threads", "ranks",
)  # fmt: skip


def main_of(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    try:
        return importlib.import_module(f"bench.{name}").main()
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("name, arguments, says", REFUSED)
def test_a_wrong_option_is_refused_with_what_was_expected_and_what_came(
    name: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as refused:
        main_of(name, arguments, monkeypatch)
    said = capsys.readouterr()
    assert refused.value.code == 2 and said.out == ""
    assert says in said.err
    shown = "shmbus bench" if name == "suite" else f"python -m bench.{name}"
    assert f"usage: {shown}" in said.err


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ["none/figures.json", "wrong kind", "/proc/figures.json"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / place
    if place == "wrong kind":
        # Where a file is expected a directory, and the other way round.
        path.touch() if name in ("suite", "flame") else path.mkdir()
    with pytest.raises(SystemExit) as refused:
        main_of(name, ["--output", str(path)], monkeypatch)
    said = capsys.readouterr()
    assert refused.value.code == 2 and said.out == ""
    assert "argument --output: " in said.err
    assert str(path if place == "wrong kind" else path.parent) in said.err


WITHOUT_TORCH = """
import runpy, sys

sys.modules["torch"] = None
for name in sys.argv[1:]:
    sys.argv = [f"bench/{name}.py"]
    try:
        runpy.run_module(f"bench.{name}", run_name="__main__")
    except SystemExit as end:
        print(name, end.code)
"""


def test_without_torch_what_measures_it_says_what_to_install() -> None:
    names = ["attention", "channel", "gpu", "lead", "ranks", "threads", "trainer", "weights"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "".join(f"{name} 1\n" for name in names), done.stderr
    hint = "there is no torch here; pip install 'shmbus[train]'"
    assert done.stderr.splitlines() == [f"{name}: {hint}" for name in names]


def test_figures_that_cannot_be_written_in_the_end_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gone" / "figures.json"
    output.parent.mkdir()

    def measured(*_: object) -> list[Any]:
        # A disk that went away while it was measured.
        output.parent.rmdir()
        return []

    monkeypatch.setattr(bench_run, "measure", measured)
    assert main_of("run", ["--only", "idle", "--output", str(output)], monkeypatch) == 1
    said = capsys.readouterr()
    assert f"cannot write {output}" in said.err and "the figures are on stdout" in said.err
    assert json.loads(said.out[said.out.index("\n{") :])["rows"] == []


def test_what_is_no_plain_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert command.file(str(pipe)) == pipe
        command.write(pipe, "figures")
        assert os.read(reader, 100) == b"figures" and pipe.is_fifo()
    finally:
        os.close(reader)


@pytest.mark.parametrize("name", ["channel", "lead"])
def test_on_one_core_what_takes_two_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert main_of(name, [], monkeypatch) == 1
    said = capsys.readouterr()
    assert f"{name}: cannot be measured here: needs 2 processors, there is 1" in said.err
    assert said.out == ""


def test_on_one_core_only_a_full_ring_is_read(spawn: Spawner) -> None:
    code = "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    code += "from bench.cores import main; sys.exit(main())"
    said = spawn.script(code, "--tiny", "--runs", 1, env={"PYTHONPATH": str(ROOT)}).finish(60.0)
    assert "1 producers, 1 a call, to groups: cannot be measured here: needs 2 processors" in said
    measured = [line for line in said.splitlines() if "GB/s" not in line and "put_many of" in line]
    assert measured and all(line.strip().startswith("(filled)") for line in measured)


def test_too_little_of_dev_shm_is_said_before_weights_are_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "here", lambda: small)
    small = fitness.Here(
        processors=2.0, processors_why="", shm_bytes=1 << 20, memory_bytes=float(1 << 40)
    )
    assert main_of("weights", ["--size", "0.1"], monkeypatch) == 1
    assert "weights: cannot be measured here: needs 286 MiB in /dev/shm" in capsys.readouterr().err
    assert command.refused(Need(), "weights") is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_that_leaves_nothing_behind(
    number: signal.Signals, spawn: Spawner
) -> None:
    child = spawn.module(
        "bench.weights", "--size", 0.01, "--part", "load", "--rounds", 1_000_000,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    mine = f"shmbus-weights.bench-weights-{child.popen.pid}-"

    def there() -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]

    def published() -> bool:
        for name in there():
            with contextlib.suppress(LayoutMismatchError):  # it is being made
                found = read_pool(name.removeprefix("shmbus-weights."), "weights")
                return any(slot.newest for slot in found.slots)
        return False

    wait_until(lambda: published() or not child.running, what="weights that are published")
    assert child.running, child.output()
    child.popen.send_signal(number)
    wait_until(lambda: not child.running, what="the command to end")
    assert child.popen.returncode == 128 + number, child.output()
    assert there() == [] and "Traceback" not in child.output()


def test_the_hot_calls_say_who_runs_them(spawn: Spawner) -> None:
    child = spawn.module("bench.calls")
    wait_until(lambda: not child.running, what="the command to end")
    assert child.popen.returncode == 1 and "make bench-calls" in child.output()
