"""C programs of the benchmark, compiled on demand by ``CC`` or ``cc``."""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.processes import MeasurementError

__all__ = ["CORE", "PROGRAMS", "ROOT", "CannotRun", "compile_program", "compiler", "run"]

ROOT: Final = Path(__file__).resolve().parents[1]
#: Folder of the benchmark's C programs.
PROGRAMS: Final = Path(__file__).with_name("c")
#: Flags of setup.py for the extension.
RING_FLAGS: Final = ("-O3", "-Ishmbus_ext", "-DNDEBUG")
#: Rooms of shmbus_ext without Python.
CORE: Final = ("base", "ring", "stash", "batch")
DEADLINE_S: Final = 300.0


class CannotRun(MeasurementError):
    """A missing tool or a failed program; the message names the cause."""


def compiler() -> list[str]:
    """Return the compiler's command with the resolved file in place of a name such as ``cc``."""
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise CannotRun(f"CC is no command: {error}; name a compiler in it, or unset it") from error
    found = shutil.which(command[0])
    if found is None:
        raise CannotRun(f"there is no C compiler {command[0]!r}; install one, or name it in CC")
    return [str(Path(found).resolve()), *command[1:]]


def compile_program(source: Path, program: Path, rooms: Sequence[str] = ()) -> None:
    """Compile a file with the Python-free rooms of the core under it.

    Raises
    ------
    CannotRun
        The compiler is missing or failed; the message quotes its output.
    """
    linked = [str(path) for room in rooms for path in sorted(ROOT.glob(f"shmbus_ext/{room}/*.c"))]
    more = [*RING_FLAGS, *linked] if rooms else ["-O2"]
    run(
        [
            *compiler(), "-std=c11", "-pthread", "-o", str(program), str(source), *more,
            "-lrt", "-lm",
        ],
        # The program's folder takes a killed compiler's leftovers along.
        TMPDIR=str(program.parent),
    )  # fmt: skip


def run(argv: list[str], given: str = "", **environment: str) -> tuple[str, str]:
    """Run a program in the checkout; return its stdout and stderr.

    Libraries preloaded into this process stay out of the program.

    Raises
    ------
    CannotRun
        The program failed or ran past the deadline.
    """
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | environment
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=env, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, heard = process.communicate(given, DEADLINE_S)
        except BaseException as error:
            # The whole process group: a compiler is several programs.
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotRun(f"{shlex.join(argv)}: not done in {DEADLINE_S:g} s") from error
            raise
    if process.returncode:
        raise CannotRun(f"{shlex.join(argv)} ended with {process.returncode}: {heard[-2000:]}")
    return said, heard
