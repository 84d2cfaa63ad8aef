"""The machine of a run: versions, processor, load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import shmbus
from shmbus_ext import _core

__all__ = ["describe", "summary"]

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """Return the facts of this machine and this moment, as what json can write.

    A copy of the tree without its history is told its commit by SHMBUS_COMMIT.
    """
    commit = os.environ.get("SHMBUS_COMMIT") or _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shmbus": shmbus.__version__,
        "layout_version": _core.LAYOUT_VERSION,
        "commit": commit,
        "commit_changed_since": None if status is None else bool(status),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "msgspec": _version("msgspec"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
    }


def summary(facts: dict[str, Any]) -> str:
    """Put the facts into a few lines of text."""
    changed = " with changes" if facts["commit_changed_since"] else ""
    load = ", ".join(f"{value:.2f}" for value in facts["load_average"])
    lines = [
        f"shmbus {facts['shmbus']}, commit {facts['commit'] or 'unknown'}{changed}",
        f"Python {facts['python']}, numpy {facts['numpy']}, torch {facts['torch'] or 'not there'}",
        f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']} {facts['machine']}",
        f"{facts['date_utc']}, load average at start {load}",
    ]
    # Another process that computes takes half a core from the producer and half from the consumer.
    if facts["load_average"][0] > 0.5:
        lines.append("NOTE: other work runs here, or did a minute ago; such figures are too low.")
    if facts["cores"] < 2:
        lines.append("NOTE: producer and consumer share one core; targets are for two.")
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    # Not by importing it: the parent of all measurements has no use for torch's threads.
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
    """Ask git about this tree, without touching its index; None where there is no answer."""
    if not (ROOT / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
