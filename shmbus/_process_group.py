"""A command in a session of its own, which ends with the holder of the pipe's other end.

``python -m shmbus._process_group DESCRIPTOR COMMAND...``: a trainer's death, also by SIGKILL, ends
the server and all processes of the server.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from typing import Final

#: Seconds a command gets for an orderly end.
END_S: Final = 10.0
#: Seconds between two polls of a running command.
ASK_S: Final = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Run a command until its end, or until the pipe's other end closes."""
    descriptor, *command = sys.argv[1:] if arguments is None else arguments
    process = subprocess.Popen(command, start_new_session=True)
    with selectors.DefaultSelector() as ready:
        ready.register(int(descriptor), selectors.EVENT_READ)
        while process.poll() is None and not ready.select(ASK_S):
            pass
    _end(process)  # also processes left by an ended command
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all processes of its session."""
    for number, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


if __name__ == "__main__":
    sys.exit(main())
