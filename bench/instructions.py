"""Instructions of the C core's hot path, counted by callgrind: they don't move with the machine.

``python -m bench.instructions check`` compiles ``c/hot_path.c`` with the ring, counts, and compares
with ``baselines.json``: exit status 1, and the operation's name, if one takes more than `TOLERANCE`
above its baseline. ``record`` makes what was counted the baseline.

Counts depend on what compiled them and on the C library; a baseline is kept for each compiler, and
with another one there is nothing to compare with, which is said. They say nothing about caches,
nor about time: `bench.run` does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["OPERATIONS", "compare", "count", "main"]

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = Path("bench", "c", "hot_path.c")
BASELINES: Final = Path(__file__).with_name("baselines.json")
#: As setup.py compiles the extension.
FLAGS: Final = ("-std=c11", "-O3", "-pthread", "-Ishmbus_ext", "-DNDEBUG")
#: Functions of hot_path.c, and how often a round calls each.
OPERATIONS: Final = {
    "op_put": 32,
    "op_reserve_and_commit": 32,
    "op_read": 64,
    "op_look_in_vain": 64,
    "op_release_a_group": 8,
    "op_gather": 1,
}
#: Rounds that are counted: enough to lease and free extents several times.
ROUNDS: Final = 400
#: A regression: so much more than the baseline.
TOLERANCE: Final = 0.03
DEADLINE_S: Final = 300.0


class CannotCount(Exception):
    """There is no valgrind or no compiler here, or one of them failed; the message says which."""


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and compare or record."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions",
        description="Count the instructions of the C core's hot path.",
        epilog="example: python -m bench.instructions check",
    )
    parser.add_argument("what", choices=("check", "record"))
    parser.add_argument("--baselines", type=Path, default=BASELINES, metavar="PATH")
    options = parser.parse_args(argv)
    try:
        key, counts = toolchain(), count()
    except CannotCount as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 1
    known = json.loads(options.baselines.read_text()) if options.baselines.exists() else {}
    if options.what == "record":
        known[key] = counts
        options.baselines.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        print(f"recorded for {key}: {counts}")
        return 0
    if key not in known:
        print(f"{key} has no baseline, only {sorted(known)}; counted {counts}")
        return 0
    lines, regressions = compare(known[key], counts)
    print(f"instructions a call, {key}\n" + "\n".join(lines))
    for name in regressions:
        print(f"REGRESSION: {name}", file=sys.stderr)
    return 1 if regressions else 0


def compare(baseline: dict[str, float], counts: dict[str, float]) -> tuple[list[str], list[str]]:
    """Say how each count stands to its baseline, and which are more than `TOLERANCE` above it."""
    lines, regressions = [], []
    for name, value in counts.items():
        if name not in baseline:
            lines.append(f"  {name:24} {value:10.1f}  new")
            continue
        change = value / baseline[name] - 1
        lines.append(f"  {name:24} {value:10.1f}  {change:+.1%} of {baseline[name]:.1f}")
        if change > TOLERANCE:
            regressions.append(
                f"{name}: {value:.1f} instructions a call, {baseline[name]:.1f} before"
            )
    return lines, regressions


def toolchain() -> str:
    """Name what the counts depend on: compiler with version, C library, architecture."""
    compiler = _compiler()
    version = _run([*compiler, "-dumpfullversion", "-dumpversion"]).strip()
    libc = "-".join(platform.libc_ver())
    return f"{Path(compiler[0]).name} {version}, {libc}, {platform.machine()}"


def count(rounds: int = ROUNDS) -> dict[str, float]:
    """Return the instructions of one call of each operation, over so many rounds."""
    if shutil.which("valgrind") is None:
        raise CannotCount(
            "there is no valgrind here; install it (Debian: apt-get install valgrind)"
        )
    with tempfile.TemporaryDirectory(prefix="shmbus-instructions-") as directory:
        program = Path(directory, "hot_path")
        # The ring alone: what knows neither Python nor its headers.
        ring = [
            str(path.relative_to(ROOT))
            for path in sorted(ROOT.glob("shmbus_ext/*.c"))
            if path.name != "module.c" and not path.name.startswith("py_")
        ]
        _run([*_compiler(), *FLAGS, "-o", str(program), str(SOURCE), *ring, "-lrt"])
        return {name: _count(program, name, calls, rounds) for name, calls in OPERATIONS.items()}


def _count(program: Path, name: str, calls: int, rounds: int) -> float:
    """Count what lies within one function, with all that it calls."""
    output = program.with_name(f"{name}.out")
    said = _run(
        [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={output}",
            f"--toggle-collect={name}", str(program), str(rounds),
        ]
    )  # fmt: skip
    found = re.search(r"Collected *: *(\d+)", said)
    if found is None or int(found[1]) == 0:
        raise CannotCount(f"valgrind counted nothing within {name}; it said: {said[-500:]}")
    return round(int(found[1]) / (calls * rounds), 1)


def _compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    found = shutil.which(compiler[0])
    if found is None:
        raise CannotCount(f"there is no C compiler {compiler[0]!r}; install one, or name it in CC")
    # `cc` says nothing about which one it is.
    return [str(Path(found).resolve()), *compiler[1:]]


def _run(argv: Sequence[str]) -> str:
    result = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if result.returncode:
        raise CannotCount(f"{shlex.join(argv)} failed: {(result.stdout + result.stderr)[-2000:]}")
    return result.stdout + result.stderr


if __name__ == "__main__":
    sys.exit(main())
