"""C programs of the benchmark: compiled when needed, by the compiler in ``CC`` or ``cc``."""

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
#: Where the C programs of the benchmark lie.
PROGRAMS: Final = Path(__file__).with_name("c")
#: As setup.py compiles the extension.
RING_FLAGS: Final = ("-O3", "-Ishmbus_ext", "-DNDEBUG")
#: Rooms of shmbus_ext that know no Python.
CORE: Final = ("base", "ring", "stash", "batch")
DEADLINE_S: Final = 300.0


class CannotRun(MeasurementError):
    """Something is missing here, or a program failed; the message says which."""


def compiler() -> list[str]:
    """Return the command of the compiler, the file itself and not a name such as ``cc``."""
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise CannotRun(f"CC is no command: {error}; name a compiler in it, or unset it") from error
    found = shutil.which(command[0])
    if found is None:
        raise CannotRun(f"there is no C compiler {command[0]!r}; install one, or name it in CC")
    return [str(Path(found).resolve()), *command[1:]]


def compile_program(source: Path, program: Path, rooms: Sequence[str] = ()) -> None:
    """Compile one file, with the rooms of the core (the sources without Python) that it calls.

    Raises
    ------
    CannotRun
        There is no compiler, or it refused; the message has its words.
    """
    linked = [str(path) for room in rooms for path in sorted(ROOT.glob(f"shmbus_ext/{room}/*.c"))]
    more = [*RING_FLAGS, *linked] if rooms else ["-O2"]
    run(
        [
            *compiler(), "-std=c11", "-pthread", "-o", str(program), str(source), *more,
            "-lrt", "-lm",
        ],
        # What a compiler that is ended leaves behind goes with the program's folder.
        TMPDIR=str(program.parent),
    )  # fmt: skip


def run(argv: list[str], given: str = "", **environment: str) -> tuple[str, str]:
    """Run a program in the checkout; return what it said on stdout and on stderr.

    Libraries that are preloaded into this process are not preloaded into the program.

    Raises
    ------
    CannotRun
        It failed, or came to no end.
    """
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | environment
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=env, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, heard = process.communicate(given, DEADLINE_S)
        except BaseException as error:
            # With all that it has started: a compiler is several programs.
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotRun(f"{shlex.join(argv)}: not done in {DEADLINE_S:g} s") from error
            raise
    if process.returncode:
        raise CannotRun(f"{shlex.join(argv)} ended with {process.returncode}: {heard[-2000:]}")
    return said, heard
