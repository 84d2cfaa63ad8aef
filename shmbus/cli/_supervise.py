"""Processes beside the daemon, kept running for ``shmbus serve --http`` and ``--web``.

Invariants:

- The process ends with the daemon, even a killed daemon: the daemon holds one end of a pair of
  sockets, and the process reads the end of the other.
- A dead process is started again. A gateway leaves its state in the bus and its companion file, and
  a page leaves none, so the successor goes on.
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

from shmbus.base.programs import program

logger = logging.getLogger("shmbus.serve")

#: Seconds before a restart of a dead process; doubled after every life shorter than
#: _SOUND_S, up to _MOST_S: a taken port is not tried a thousand times.
_PAUSE_S = 0.5
_SOUND_S = 30.0
_MOST_S = 30.0
#: Seconds for an orderly end.
_END_S = 10.0


@contextlib.contextmanager
def supervised(
    what: str, words: list[str], environment: dict[str, str] | None = None
) -> Iterator[Callable[[], None]]:
    """Run a command for the block; yield a function that ends it earlier, without a wait."""
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
        # A draining daemon ends a gateway first: the gateway holds leases, and gives them back.
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
    """Start the process, and restart it, until the stop."""
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
    """Return the command line that resumes inference servers left paused by a dead trainer."""
    return program("shmbus.engines.resume", name)
