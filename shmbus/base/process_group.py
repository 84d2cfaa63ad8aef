"""A command in a session of its own, which ends with its parent, or at the end of a pipe.

``python -m shmbus.base.process_group DESCRIPTOR COMMAND...``: a trainer's death, also by SIGKILL,
ends the server and all processes of the server.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Final

#: Seconds a command gets for an orderly end.
END_S: Final = 10.0
#: Seconds for the end of the remaining processes after SIGTERM, and again after SIGKILL.
LEFT_S: Final = 2.0
#: Seconds between two polls of a running command.
ASK_S: Final = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Run a command until its end, its parent's end, or until the pipe's other end closes."""
    descriptor, *command = sys.argv[1:] if arguments is None else arguments
    parent = os.getppid()  # its forked children hold the pipe, too
    process = subprocess.Popen(command, start_new_session=True)
    with selectors.DefaultSelector() as ready:
        ready.register(int(descriptor), selectors.EVENT_READ)
        while process.poll() is None and os.getppid() == parent and not ready.select(ASK_S):
            pass
    _end(process)  # also processes left by an ended command
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, then the rest of its session, and resource trackers last."""
    process.terminate()  # alone: a server ends its own workers in order
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        # A resource tracker ignores SIGTERM, and removes shared memory after its users' end.
        _signal(number, [pid for pid, tracks in _members(process) if not tracks])
        deadline = time.monotonic() + LEFT_S
        while _members(process) and time.monotonic() < deadline:
            time.sleep(ASK_S / 10)
    _signal(signal.SIGKILL, [pid for pid, _ in _members(process)])
    process.wait()


def _signal(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(process: subprocess.Popen[bytes]) -> list[tuple[int, bool]]:
    """List the live processes of a command's group; True marks a child that ignores SIGTERM."""
    process.poll()
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            state, _, group = stat.read().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state not in "ZX":
                found.append((pid, pid != process.pid and _ignores_term(pid)))
    return found


def _ignores_term(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        ignored = next(line for line in status if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


if __name__ == "__main__":
    sys.exit(main())
