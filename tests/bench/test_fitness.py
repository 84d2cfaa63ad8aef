"""A machine that cannot measure something: the benchmark says what and why, and shows no ratio.

One core, a quota, little memory, a small /dev/shm and an emulator are real here where the machine
lets a test make them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner

import shmbus
from bench import fitness, run
from bench.fitness import MEMORY, TWO, Here, Need, why_not
from bench.sizes import TINY

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 100.0
FINE = Here(
    processors=2.0,
    processors_why="this process may run on 2",
    shm_bytes=1 << 30,
    memory_bytes=8 << 30,
    huge_pages="advise",
)


def fitness_of(*prefix: str) -> str:
    """What `python -m bench.fitness` says behind a command; no import beside the standard ones."""
    result = subprocess.run(
        [*prefix, sys.executable, "-I", "-S", str(ROOT / "bench" / "fitness.py")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """Make a group below this process's own; version 1, or 2 where its controllers are open."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        version_1 = controller in names.split(",")
        if version_1 or number == "0":
            top = fitness.CGROUPS / names if version_1 else fitness.CGROUPS
            group = top / path.lstrip("/") / f"shmbus-test-{os.getpid()}"
            break
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def in_group(group: Path, limits: dict[str, str]) -> str:
    """What the benchmark says within a group that has these limits, of files that there are."""
    found = {name: value for name, value in limits.items() if (group / name).exists()}
    if not found:
        pytest.skip(f"{group} has none of {', '.join(limits)}")
    for name, value in found.items():
        (group / name).write_text(value)
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    return fitness_of("sh", "-c", enter, "sh")


def needing(*command: str) -> list[str]:
    """A command, if it works here."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    if subprocess.run([*command, "true"], capture_output=True, timeout=DEADLINE_S).returncode:
        pytest.skip(f"{' '.join(command)} does not work here")
    return list(command)


# --- what the machine is


def test_one_core_is_found() -> None:
    said = fitness_of(*needing("taskset", "-c", str(min(os.sched_getaffinity(0)))))
    assert "needs 2 processors, there is 1 (this process may run on 1)" in said


def test_a_quota_of_a_control_group_is_found() -> None:
    with control_group("cpu") as group:
        said = in_group(group, {"cpu.cfs_quota_us": "50000", "cpu.max": "50000 100000"})
    assert said.startswith("0.5 processors (the quota of its control group)")
    assert "cannot measure calls of one process: needs 1 processors, there is 0.5" in said


def test_a_limit_of_memory_is_found() -> None:
    with control_group("memory") as group:
        limit = str(256 << 20)
        said = in_group(group, {"memory.limit_in_bytes": limit, "memory.max": limit})
    assert "cannot measure calls of one process: needs 512 MiB of memory" in said


def test_a_quota_above_this_group_counts_in_both_versions(tmp_path: Path) -> None:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for number, names, _ in lines:
        name = names if "cpu" in names.split(",") else "" if number == "0" else None
        if name is None:
            continue
        top = tmp_path / name
        top.mkdir(exist_ok=True)
        file, text = ("cpu.cfs_quota_us", "25000") if name else ("cpu.max", "25000 100000")
        (top / file).write_text(text)
        (top / "cpu.cfs_period_us").write_text("100000")
        assert fitness.here(tmp_path).processors == 0.25
        (top / file).write_text("max 100000" if file == "cpu.max" else "-1")
        assert fitness.here(tmp_path).processors >= 1.0


@pytest.mark.parametrize(
    "prefix",
    [("valgrind", "-q", "--tool=none"), (f"qemu-{os.uname().machine}",)],
    ids=["valgrind", "qemu"],
)
def test_an_emulator_is_found(prefix: tuple[str, ...]) -> None:
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"there is no {prefix[0]}")
    said = fitness_of(*prefix)
    assert f"cannot measure calls of one process: this runs under {prefix[0][:4]}" in said


def test_a_kernel_without_huge_pages_for_shared_memory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "shmem_enabled"
    for text, chosen in (("always [advise] never", "advise"), ("advise [never] deny", "never")):
        file.write_text(text)
        assert fitness._huge_pages(file) == chosen
    assert fitness._huge_pages(tmp_path / "none") == "unknown"


@pytest.mark.parametrize(
    ("setting", "release", "mounted", "why"),
    [
        ("never", "6.18.44-fc", "rw,nosuid", ""),
        ("advise", "6.1", "rw", ""),
        ("deny", "6.18.44", "rw,huge=always", "shmem_enabled is deny"),
        ("unknown", "6.18.44", "rw", "shmem_enabled is unknown"),
        ("never", "5.15.0-91-generic", "rw,huge=within_size", ""),
        ("never", "5.15.0-91-generic", "rw,huge=never", "Linux 5.15.0-91-generic gives them only"),
        ("never", "6.0-rc3", "rw", "Linux 6.0-rc3 gives them only"),
    ],
)
def test_a_note_of_small_pages_is_there_only_where_a_bus_lies_in_them(
    setting: str, release: str, mounted: str, why: str, tmp_path: Path
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs {mounted} 0 0\n")
    found = fitness._no_huge_pages(setting, release, mounts)
    assert found.startswith(why) and bool(found) == bool(why)


def test_huge_pages_are_said_as_a_bus_has_them(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "8MiB"):
        _, _, ours = Path("/proc/self/smaps").read_text().partition(f"shmbus.{bus_name}")
    mapped = re.search(r"^ShmemPmdMapped: +(\d+) kB$", ours, re.MULTILINE)
    assert mapped is not None
    if int(mapped[1]):
        assert fitness.here().no_huge_pages == ""


# --- what follows from it


@pytest.mark.parametrize(
    ("need", "lacks", "says"),
    [
        (Need(processors=TWO), {"processors": 1.0}, "needs 2 processors"),
        (Need(processors=TWO), {"processors": 1.5}, "there is 1.5"),
        (Need(), {"processors": 0.5}, "needs 1 processors"),
        (Need(shm_bytes=64 << 20), {"shm_bytes": 1 << 20}, "needs 64 MiB in /dev/shm, 1.0 are"),
        (Need(memory_bytes=1 << 30), {"memory_bytes": 2.0**20}, "needs 1024 MiB of memory"),
        (Need(), {"emulator": "valgrind"}, "runs under valgrind"),
        (Need(timed=False), {"emulator": "qemu"}, ""),
    ],
)
def test_what_is_missing_is_said(need: Need, lacks: dict[str, Any], says: str) -> None:
    assert why_not(need, FINE) == ""
    found = why_not(need, Here(**{**vars(FINE), **lacks}))
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize(
    "lacks",
    [
        {"emulator": "qemu", "shm_bytes": 0},
        {"memory_bytes": float(MEMORY - 1)},
        {"processors": 0.1, "processors_why": "a quota", "shm_bytes": 0},
    ],
)
def test_where_nothing_can_be_measured_no_row_has_a_figure(lacks: dict[str, Any]) -> None:
    said: list[str] = []
    here = Here(**{**vars(FINE), **lacks})
    rows = run.measure(run.NAMES, TINY, "8MiB", said.append, here)
    assert len(rows) == len(run.NAMES) and said == []
    for row in rows:
        assert row.skipped and row.value is None and row.measured == "", row
        assert row.verdict == f"skipped: {row.skipped}"


def printed(spawn: Spawner, prefix: list[str], *command: object, status: int = 0) -> str:
    """Run a module behind another command to this exit status, and return what it printed."""
    code = (
        "import subprocess, sys; sys.exit(subprocess.run("
        f"{prefix!r} + [sys.executable, '-m', *sys.argv[1:]]).returncode)"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    child = spawn.script(code, *command, env={"PYTHONPATH": path})
    assert child.wait(DEADLINE_S) == status, child.output()
    return child.output()


def bench(spawn: Spawner, prefix: list[str], output: Path, *rows: str) -> dict[str, dict[str, Any]]:
    """Run the benchmark behind a command, and return its rows by name."""
    only = [word for row in rows for word in ("--only", row)]
    printed(spawn, prefix, "bench.run", "--tiny", *only, "--output", output)
    return {row["name"]: row for row in json.loads(output.read_text())["rows"]}


def test_on_one_core_what_takes_two_has_no_ratio_and_the_rest_is_measured(
    spawn: Spawner, tmp_path: Path
) -> None:
    prefix = needing("taskset", "-c", str(min(os.sched_getaffinity(0))))
    rows = bench(spawn, prefix, tmp_path / "a.json", "hop-2048", "polled", "requests", "idle")
    for name in ("hop-2048", "polled", "requests"):
        assert "needs 2 processors" in rows[name]["skipped"] and rows[name]["value"] is None
    assert rows["idle"]["value"] is not None and not rows["idle"]["skipped"]
    assert "memcpy" not in rows


def test_in_a_small_shm_what_needs_a_ring_is_skipped_and_the_rest_is_measured(
    spawn: Spawner, tmp_path: Path
) -> None:
    mount = 'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"'
    prefix = needing("unshare", "-m", "sh", "-c", mount, "sh")
    rows = bench(spawn, prefix, tmp_path / "a.json", "packed", "idle", "stash", "stash-memory")
    for name in ("packed", "idle", "stash-memory"):
        assert "in /dev/shm, 4.0 are free" in rows[name]["skipped"], rows[name]
        assert rows[name]["value"] is None
    assert rows["stash-scrambled"]["value"] is not None


def test_on_one_core_nothing_is_set_beside_other_ways(spawn: Spawner, tmp_path: Path) -> None:
    prefix = needing("taskset", "-c", str(min(os.sched_getaffinity(0))))
    output = tmp_path / "report"
    arguments = ["--tiny", "--contender", "multiprocessing.Queue", "--output", output]
    said = printed(spawn, prefix, "bench.suite", *arguments, status=1)
    assert "bench: nothing could be measured here" in said
    assert "nothing was set beside other ways to move a trajectory: needs 2 processors" in said
    result = json.loads((output / "results.json").read_text())
    assert result["contest"] == {} and result["rows"] == []
    assert "times" not in (output / "report.md").read_text()


def test_in_a_small_shm_nothing_is_set_beside_other_ways(spawn: Spawner, tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"'
    prefix = needing("unshare", "-m", "sh", "-c", mount, "sh")
    output = tmp_path / "report"
    arguments = ["--tiny", "--contender", "multiprocessing.Queue", "--output", output]
    said = printed(spawn, prefix, "bench.suite", *arguments, status=1)
    assert "needs 69 MiB in /dev/shm, 4.0 are free; enlarge it\n" in said
    assert json.loads((output / "results.json").read_text())["contest"] == {}


def test_an_option_that_asks_for_less_is_named_where_there_is_one() -> None:
    found = Here(**{**vars(FINE), "shm_bytes": 1 << 20})
    need = Need(shm_bytes=64 << 20)
    assert why_not(need, found).endswith("; enlarge it")
    assert why_not(replace(need, less="--size"), found).endswith("or ask for less by --size")
