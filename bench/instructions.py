"""Instructions of the C core's hot path, counted by callgrind: independent of the machine's load.

``python -m bench.instructions check`` compiles ``c/hot_path.c`` with the core, counts, and compares
with ``baselines.json``: exit status 1 and the operation's name for a count of more than `TOLERANCE`
above its baseline. ``record`` stores the counts as the new baseline.

Counts depend on compiler and C library: the file keeps a baseline for each compiler, and an unknown
compiler ends with a message. Counts say nothing about caches or time (see `bench.suite`).
"""

import argparse
import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.native import CORE, PROGRAMS, CannotRun, compile_program, compiler, run

__all__ = ["OPERATIONS", "built", "compare", "count", "count_one", "main"]

SOURCE: Final = PROGRAMS / "hot_path.c"
BASELINES: Final = Path(__file__).with_name("baselines.json")
#: Functions of hot_path.c with their calls a round.
OPERATIONS: Final = {
    "op_put": 32,
    "op_reserve_and_commit": 32,
    "op_read": 64,
    "op_look_in_vain": 64,
    "op_stash": 64,
    "op_release_a_group": 8,
    "op_gather": 1,
}
#: Counted rounds: enough to lease and free extents several times, and to fill every group of the
#: stash once.
ROUNDS: Final = 640
#: Allowed growth over the baseline, as a share.
TOLERANCE: Final = 0.03


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and compare or record."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions",
        description="Count the instructions of the C core's hot path.",
        epilog="example: python -m bench.instructions check",
    )
    parser.add_argument("what", choices=("check", "record"))
    parser.add_argument(
        "--baselines", type=Path, default=BASELINES, metavar="PATH",
        help="of all toolchains, by compiler (default: those of the repository)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        key, counts = toolchain(), count()
    except CannotRun as error:
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
    """Return a line for each count beside its baseline, and the counts above `TOLERANCE`."""
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
    """Name the conditions of a count: compiler with version, C library, architecture."""
    compiles = compiler()
    version = run([*compiles, "-dumpfullversion", "-dumpversion"])[0].strip()
    libc = "-".join(platform.libc_ver())
    return f"{Path(compiles[0]).name} {version}, {libc}, {platform.machine()}"


def count(rounds: int = ROUNDS, operations: Mapping[str, int] = OPERATIONS) -> dict[str, float]:
    """Return the instructions of a call of each operation, over so many rounds."""
    with built() as program:
        return {name: count_one(program, name, c, rounds) for name, c in operations.items()}


@contextmanager
def built() -> Iterator[Path]:
    """Compile the hot path; yield the program, and remove its folder at the end.

    Raises
    ------
    CannotRun
        The compiler or valgrind is missing.
    """
    if shutil.which("valgrind") is None:
        raise CannotRun("there is no valgrind here; install it (Debian: apt-get install valgrind)")
    with tempfile.TemporaryDirectory(prefix="shmbus-instructions-") as directory:
        program = Path(directory, "hot_path")
        compile_program(SOURCE, program, CORE)
        yield program


def count_one(program: Path, name: str, calls: int, rounds: int) -> float:
    """Count the instructions of a function and its callees."""
    output = program.with_name(f"{name}.out")
    said, heard = run(
        [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={output}",
            f"--toggle-collect={name}", str(program), str(rounds),
        ]
    )  # fmt: skip
    found = re.search(r"Collected *: *(\d+)", said + heard)
    if found is None or int(found[1]) == 0:
        raise CannotRun(f"valgrind counted nothing within {name}; it said: {heard[-500:]}")
    return round(int(found[1]) / (calls * rounds), 1)


if __name__ == "__main__":
    sys.exit(main())
