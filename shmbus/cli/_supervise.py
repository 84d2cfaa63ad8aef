"""What ``shmbus serve --http`` and ``--web`` start: processes beside the daemon, kept running.

Invariants:

- It ends with the daemon, also with one that is killed: it holds one end of a pair of sockets, and
  reads the end of the other.
- One that dies is started again. What a gateway leaves is in the bus and its companion file, and a
  page leaves nothing, so its successor goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from shmbus._programs import program

logger = logging.getLogger("shmbus.serve")

#: Seconds before a process that died is started again; doubled each time that it did not live
#: _SOUND_S, up to _MOST_S: a port that is taken is not asked for a thousand times.
_PAUSE_S = 0.5
_SOUND_S = 30.0
_MOST_S = 30.0
#: Seconds that it has to end in order.
_END_S = 10.0


@contextlib.contextmanager
def supervised(
    what: str, words: list[str], environment: dict[str, str] | None = None
) -> Iterator[Callable[[], None]]:
    """Have a command run for the block; yields what has it end earlier, without a wait."""
    ours, theirs = socket.socketpair()
    stopping = threading.Event()
    argv = program("shmbus", *words, "--parent-fd", str(theirs.fileno()))
    variables = {**os.environ, **(environment or {})}
    thread = threading.Thread(
        target=_keep,
        args=(what, argv, variables, theirs, stopping),
        name=f"shmbus-{what}",
        daemon=True,
    )
    thread.start()
    try:
        # A daemon that drains has a gateway end first: it holds leases, and gives them back.
        yield stopping.set
    finally:
        stopping.set()
        ours.close()
        thread.join(_END_S + 1.0)
        theirs.close()


def _keep(
    what: str,
    argv: list[str],
    variables: dict[str, str],
    theirs: socket.socket,
    stopping: threading.Event,
) -> None:
    """Start it, and again, until it shall stop."""
    pause_s = _PAUSE_S
    while not stopping.is_set():
        began_s = time.monotonic()
        process = subprocess.Popen(
            argv, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        while process.poll() is None and not stopping.is_set():
            stopping.wait(0.1)
        if process.poll() is None:
            _end(process)
            return
        if time.monotonic() - began_s >= _SOUND_S:
            pause_s = _PAUSE_S
        logger.warning(
            "the %s ended with status %s; it is started again in %g s",
            what, process.returncode, pause_s,
        )  # fmt: skip
        stopping.wait(pause_s)
        pause_s = min(_MOST_S, 2 * pause_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def resume_program(name: str) -> list[str]:
    """Return the command line that resumes inference servers which a dead trainer left paused."""
    return program("shmbus.engines.resume", name)
