"""Processes forked by storms, kill points and tests: faults by a seed, restarts, a clean end.

Invariant: no process outlives the program that forked the process.
"""

import contextlib
import ctypes
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

#: Seconds without progress after which a case fails.
DEADLINE_S = 30.0 * float(os.environ.get("SHMBUS_TEST_PATIENCE", "1"))
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _MS_REC_PRIVATE, _MNT_DETACH = 0x20000, 0x4000 | 0x40000, 2
_libc = ctypes.CDLL(None, use_errno=True)


def deadline(awaited: str) -> Iterator[None]:
    """Loop until the deadline, then raise `TimeoutError`."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        yield
    raise TimeoutError(f"no progress: {awaited}")


class Child:
    """A forked process: stops, signals, exit status. `failpoint` names a point of the core."""

    def __init__(self, program: Callable[[], object], failpoint: str = "") -> None:
        self.stopped = False
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if failpoint:
                    os.environ["SHMBUS_FAILPOINT"] = failpoint
                program()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                # The parent's finalizers must not run here.
                os._exit(status)

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    def look(self) -> bool:
        """Note a stop; return whether the process ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self.stopped = True
            elif pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> int:
        for _ in deadline("the end of a child"):
            if self.look():
                break
            time.sleep(0.002)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """Kill the process if it still runs, and reap it."""
        if not self.look():
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def forked(program: Callable[[], object]) -> int:
    """Run a program in a forked child to its end; return the exit status."""
    child = Child(program)
    try:
        return child.wait()
    finally:
        child.kill()


class Supervisor:
    """Named processes of a storm; `done` counts the faults by kind."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.children: dict[str, Child] = {}
        self.starts = 0
        self.programs: dict[str, Callable[[int], None]] = {}

    def start(self, name: str, program: Callable[[int], None] | None = None) -> None:
        """Fork a process, or its successor; the program gets the number of the start."""
        program = self.programs.setdefault(name, program or self.programs[name])
        number, self.starts = self.starts, self.starts + 1
        self.children[name] = Child(lambda: program(number))

    def kill(self, *names: str) -> None:
        """Kill processes that stay dead until `start`."""
        for name in names:
            self.children.pop(name).kill()

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def pause(self, name: str, longest_s: float = 1.0) -> None:
        """Stop a process for a while."""
        self.children[name].stop()
        time.sleep(self.rng.random() * longest_s)
        self.children[name].go_on()

    def named(self, kind: str) -> list[str]:
        return [name for name in self.children if name.startswith(kind)]

    def replace_finished(self) -> None:
        """Start finished processes again; a failed process is an error."""
        for name, child in [*self.children.items()]:
            if child.look():
                assert child.status == 0, f"{name} ended with status {child.status}"
                self.start(name)

    def end(self) -> None:
        for name in [*self.children]:
            with contextlib.suppress(ProcessLookupError):
                self.children[name].go_on()
            self.kill(name)


def own_tmpfs(place: Path, nbytes: int) -> bool:
    """Mount a small tmpfs for the process and its children; False without permission."""
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(None, b"/", None, _MS_REC_PRIVATE, None):
        return False
    return not _libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=%d" % nbytes)


def unmount(place: Path) -> None:
    _libc.umount2(bytes(place), _MNT_DETACH)
