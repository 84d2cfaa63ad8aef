"""What a machine refuses is said in a sentence: no traceback, no figure, nothing left behind."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until

import shmbus
from bench import (
    channel,
    command,
    cores,
    fitness,
    flame,
    gateway_clients,
    large,
    lead,
    native,
    page,
    processes,
    run,
    suite,
    weights,
)
from bench.failures import MeasurementError, sentence
from bench.fitness import Here, Need
from bench.native import CannotRun, compiler
from bench.processes import Role, run_alone, start_role
from bench.sending import bus_bytes

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 100.0


def program(*arguments: str, path: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of the benchmark, with what lies in `path` before anything else."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        **more,
    )


@pytest.mark.parametrize(
    "arguments", [["bench.fitness"], ["bench.run", "--tiny", "--only", "stash"]], ids=" ".join
)
def test_a_program_whose_reader_has_gone_ends_without_a_word(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = program("-m", *arguments, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "measuring" not in line] == []


@pytest.mark.parametrize("name", ["bench.fitness", "bench.cores"])
def test_a_stdout_that_is_full_is_said(name: str) -> None:
    with open("/dev/full", "w") as full:
        done = program("-m", name, *(["--tiny"] if name == "bench.cores" else []), stdout=full)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "raised, says",
    [("MemoryError()", "there is no more memory"), ("KeyboardInterrupt()", "interrupted")],
)
def test_what_ends_a_program_while_it_imports_is_said(
    raised: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "numpy.py").write_text(f"raise {raised}\n")
    done = program("-m", "bench.run", "--tiny", path=tmp_path)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("run: ") and says in line


@pytest.mark.parametrize(
    "error, says",
    [
        (OSError(errno.EMFILE, "Too many open files"), "allow more by ulimit -n"),
        (BlockingIOError(errno.EAGAIN, "busy"), "allow more by ulimit -u"),
        (RuntimeError("can't start new thread"), "allow more by ulimit -u"),
        (MemoryError(), "MemoryError: there is no more memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "there is no more memory"),
        (shmbus.CapacityError("does not fit"), "does not fit"),
        (MeasurementError("in vain"), "in vain"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "No such file: 'x'"),
    ],
)
def test_a_limit_is_told_with_what_to_do(error: Exception, says: str) -> None:
    assert says in sentence(error)


def test_a_mistake_of_the_benchmark_keeps_its_traceback() -> None:
    assert sentence(ZeroDivisionError("division by zero")) == ""
    with pytest.raises(MeasurementError, match=r"divide failed: Traceback[^$]*ZeroDivisionError"):
        run_alone(divide)


def divide(start: Callable[[], None]) -> float:
    return 1 / 0


def fill_memory(start: Callable[[], None]) -> None:
    raise MemoryError("16 GiB")


def test_a_limit_that_a_process_meets_is_told_without_a_traceback() -> None:
    with pytest.raises(MeasurementError, match=r"^fill_memory failed: 16 GiB: there is no more"):
        run_alone(fill_memory)


SECOND = """
import os, signal, sys
from bench import command

with command.orderly("here"):
    try:
        os.kill(os.getpid(), signal.{first})
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned up")
"""


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_second_signal_does_not_cut_short_what_cleans_up(first: str) -> None:
    done = program("-c", SECOND.format(first=first), stdout=subprocess.PIPE)
    assert done.returncode == 128 + getattr(signal, first)
    assert done.stdout == "cleaned up\n" and "Traceback" not in done.stderr


def test_a_signal_waits_until_a_process_has_started() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), processes._put_off():
        # To any thread: which one hears it is the kernel's choice.
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        reached.append("started")
    assert reached == ["started"]


@pytest.mark.parametrize("capacity", ["64KiB", "1MiB", "64MiB"])
def test_what_a_bus_takes_is_no_more_than_what_is_asked_for(bus_name: str, capacity: str) -> None:
    with shmbus.Bus.create(bus_name, capacity):
        taken = os.stat(f"/dev/shm/shmbus.{bus_name}").st_blocks * 512
    assert taken <= bus_bytes(capacity) <= 2 * taken + (1 << 20)


def die(pipe: Connection) -> None:
    os._exit(3)


def refuse(pipe: Connection) -> None:
    raise MemoryError("no view")


@pytest.mark.parametrize("function, says", [(die, "died without a word"), (refuse, "no view")])
def test_a_receiver_that_dies_is_not_waited_for(
    function: Callable[[Connection], None], says: str
) -> None:
    pipe, other = get_context("spawn").Pipe()
    child = channel._receiver(function, other)
    with pytest.raises(MeasurementError, match=f"the receiver failed: .*{says}"):
        channel._heard(pipe, child)


def test_readers_that_end_are_told_and_no_figure_stands_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "READER", "raise SystemExit('no such weights')")
    with pytest.raises(MeasurementError, match="a reader has ended: no such weights"):
        weights.with_readers("none", 2, 1, lambda: None)


def test_readers_that_were_started_are_ended_where_a_further_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[str]] = []

    def popen(*arguments: Any, **more: Any) -> subprocess.Popen[str]:
        if len(started) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(real(*arguments, **more))
        return started[-1]

    real = subprocess.Popen
    monkeypatch.setattr(weights, "READER", "import time; time.sleep(100)")
    monkeypatch.setattr(weights.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="Too many open files"):
        weights.with_readers("none", 3, 1, lambda: None)
    assert [one.returncode for one in started] == [-signal.SIGKILL] * 2


class InVain:
    """A handler that never has a batch."""

    def next_batch(self, timeout: float) -> None:
        raise TimeoutError


def fail() -> None:
    raise MemoryError("no sampler")


def test_a_worker_that_fails_is_told_at_once() -> None:
    worker = start_role(Role(fail))
    worker.join(DEADLINE_S)
    handler: Any = InVain()
    with pytest.raises(MeasurementError, match="worker 0 failed: no sampler"):
        lead._next_batch(handler, [worker])


def test_memory_is_looked_at_however_short_the_run_is() -> None:
    memory = gateway_clients.Memory(os.getpid())
    memory.start()
    memory.stop()
    assert memory.most_bytes > 0


def test_a_small_shm_is_said_before_a_gateway_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "here", small)
    monkeypatch.setattr(command, "lacks", lambda *_: False)
    monkeypatch.setattr(sys, "argv", ["gateway_clients"])
    assert gateway_clients.main() == 1
    assert "cannot be measured here: needs 273 MiB in /dev/shm" in capsys.readouterr().err


def small() -> Here:
    return Here(processors=2.0, processors_why="", shm_bytes=32 << 20, memory_bytes=float(1 << 40))


def test_where_nothing_can_be_measured_the_exit_status_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "here", small)
    assert cores.main(["--tiny"]) == 1
    assert "cores: nothing could be measured" in capsys.readouterr().err
    assert large.main(["--payload", "16 MiB", "--group", "64"]) == 1
    assert "or ask for less by a smaller --payload or --group" in capsys.readouterr().out


def test_what_lies_in_shm_is_counted_as_memory_too() -> None:
    found = Here(processors=2.0, processors_why="", shm_bytes=1 << 40, memory_bytes=600 * 2.0**20)
    assert fitness.why_not(Need(), found) == ""
    assert fitness.why_not(Need(shm_bytes=256 << 20, less="--capacity"), found) == (
        "needs 768 MiB of memory, 256 of it in /dev/shm, 600 may be used; end other programs, or "
        "allow more in the control group, or ask for less by --capacity"
    )


def test_with_too_little_memory_nothing_is_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def create(*_: object) -> None:
        raise AssertionError("a bus was created")

    less = Here(processors=2.0, processors_why="", shm_bytes=1 << 40, memory_bytes=2.0**20)
    monkeypatch.setattr(fitness, "here", lambda: less)
    monkeypatch.setattr(processes, "TEMPLATE", "SHMBUS_BENCH_TEMPLATE_OF_A_TEST")
    monkeypatch.setenv("SHMBUS_BENCH_TEMPLATE_OF_A_TEST", "")
    monkeypatch.setattr(shmbus.Bus, "create", create)
    monkeypatch.setattr(processes, "run_together", create)
    assert run.main(["--tiny", "--only", "hop-2048"]) == 1
    assert "bench: nothing could be measured here" in capsys.readouterr().err
    assert suite.main(["--tiny", "--only", "hop-2048", "--output", str(tmp_path)]) == 1


def test_too_few_files_for_all_producers_are_told_before_a_page_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "lacks", lambda *_: False)
    monkeypatch.setattr(command, "refused", lambda *_: False)
    monkeypatch.setattr(page.resource, "getrlimit", lambda _: (256, 1024))
    assert page.main([]) == 1
    assert "needs 4352 files open at once, 1024 may be" in capsys.readouterr().err


def test_a_tiny_run_of_large_payloads_needs_little_room() -> None:
    point = large.Point("64 KiB", 1)
    tiny = large._need(point, point.workload(0.001, large.TINY_MIB))
    assert tiny.shm_bytes < 64 << 20 < large._need(point, point.workload(1.0)).shm_bytes


def test_a_compiler_that_is_no_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(CannotRun, match="CC is no command: No closing quotation"):
        compiler()


@pytest.mark.parametrize("name", ["attention", "trainer"])
def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        importlib.import_module(f"bench.{name}").main(["--plot", "figures.png"])
    assert "--plot: there is no matplotlib here; pip install" in capsys.readouterr().err


def test_what_perf_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perf = tmp_path / "perf"
    perf.write_text("#!/bin/sh\necho 'No permission' >&2\nexit 255\n")
    perf.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MeasurementError, match="perf record ended with 255: No permission; where"):
        flame._perf("record")


def test_without_a_chromium_a_page_says_which_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "lacks", lambda *_: False)
    monkeypatch.setenv("SHMBUS_CHROMIUM", "/nowhere/chromium")
    assert page.browser(1.0) is None
    assert "there is no /nowhere/chromium; name a Chromium in SHMBUS_CHROMIUM" in (
        capsys.readouterr().err
    )


COMPILER = """#!/bin/sh
# In the manner of gcc: a part of it writes where temporary files go, and ends when it is done.
echo begun >"$TMPDIR/part.s"
sh -c 'echo $$ >{pids}; exec sleep 100' &
wait
"""


def test_a_compiler_is_ended_with_its_parts_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pids = tmp_path / "folder", tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "cc"
    script.write_text(COMPILER.format(pids=pids))
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(native, "DEADLINE_S", 1.0)
    with pytest.raises(CannotRun, match="not done in 1 s"):
        native.compile_program(folder / "source.c", folder / "program")
    assert [path.name for path in folder.iterdir()] == ["part.s"]
    part = Path("/proc") / pids.read_text().strip() / "stat"
    wait_until(
        lambda: not part.exists() or part.read_text().rpartition(")")[2].split()[0] == "Z",
        what="the compiler's part to end",
    )
