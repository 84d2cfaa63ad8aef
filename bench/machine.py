"""Machine of a run: versions, processor, load, and missing parts."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import shmbus
from shmbus_ext import _core

__all__ = ["describe", "lacks", "summary"]

ROOT: Final = Path(__file__).resolve().parents[1]
SHM: Final = "/dev/shm"
#: Load above which foreign work distorts a measurement.
QUIET_LOAD: Final = 0.5


def describe() -> dict[str, Any]:
    """Return the facts of the machine at this moment, ready for json.

    SHMBUS_COMMIT names the commit of a tree without history.
    """
    status = _git("status", "--porcelain")
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shmbus": shmbus.__version__,
        "layout_version": _core.LAYOUT_VERSION,
        "commit": os.environ.get("SHMBUS_COMMIT") or _git("rev-parse", "HEAD"),
        "commit_changed_since": None if status is None else bool(status),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
    }


def summary(facts: dict[str, Any]) -> str:
    """Return the facts as lines of text, with a note about a busy machine."""
    changed = " with changes" if facts["commit_changed_since"] else ""
    load = ", ".join(f"{value:.2f}" for value in facts["load_average"])
    lines = [
        f"shmbus {facts['shmbus']}, commit {facts['commit'] or 'unknown'}{changed}",
        f"Python {facts['python']}, numpy {facts['numpy']}, torch {facts['torch'] or 'not there'}",
        f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']} {facts['machine']}",
        f"{facts['date_utc']}, load average at start {load}",
    ]
    if facts["load_average"][0] > QUIET_LOAD:
        lines.append("NOTE: other work runs here, or did a minute ago; such figures are too low.")
    return "\n".join(lines)


def lacks(*, cores: int = 1, shm_bytes: int = 0, modules: Sequence[str] = ()) -> str:
    """Return the obstacle to a row on this machine; "" without an obstacle."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        return f"there is no {', '.join(missing)} here; pip install 'shmbus[bench-all,train]'"
    there = len(os.sched_getaffinity(0))
    if there < cores:
        return f"needs {cores} cores, this process may run on {there}"
    shm = os.statvfs(SHM)
    free = shm.f_bavail * shm.f_frsize
    if free < shm_bytes:
        return f"needs {shm_bytes >> 20} MiB in {SHM}, {free >> 20} are free; enlarge it"
    return ""


def _version(distribution: str) -> str | None:
    # Without an import: torch's threads would burden the parent of every measurement.
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown processor"


def _git(*arguments: str) -> str | None:
    """Ask git about this tree, without touching its index; return None without an answer."""
    if not (ROOT / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
