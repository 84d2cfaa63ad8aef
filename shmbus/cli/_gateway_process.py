"""The gateway of ``shmbus serve --http``: a process of its own, which is started again if it dies.

Invariants:

- It ends with the daemon, also with one that is killed: it holds one end of a pair of sockets, and
  reads the end of the other.
- What it leaves is in the bus and its companion file, so its successor goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["gateway_process", "require_extra"]

logger = logging.getLogger("shmbus.serve")

#: Seconds before a gateway that died is started again; doubled each time that it did not live
#: _SOUND_S, up to _MOST_S: a port that is taken is not asked for a thousand times.
_PAUSE_S = 0.5
_SOUND_S = 30.0
_MOST_S = 30.0
#: Seconds that it has to end in order.
_END_S = 10.0
_NEEDS = ("aiohttp", "isal")


@contextlib.contextmanager
def gateway_process(name: str, options: list[str]) -> Iterator[Callable[[], None]]:
    """Have a gateway of a bus for the block; yields what has it end earlier, without a wait.

    A daemon that drains has it end first: it holds leases, and gives them back.

    Parameters
    ----------
    name : str
        The bus, which is there.
    options : list of str
        Of ``shmbus gateway``.
    """
    ours, theirs = socket.socketpair()
    stopping = threading.Event()
    argv = [sys.executable, "-m", "shmbus", "gateway", name, "--daemon", *options]
    argv += ["--parent-fd", str(theirs.fileno())]
    thread = threading.Thread(
        target=_keep, args=(argv, theirs, stopping), name="shmbus-gateway", daemon=True
    )
    thread.start()
    try:
        yield stopping.set
    finally:
        stopping.set()
        ours.close()
        thread.join(_END_S + 1.0)
        theirs.close()


def _keep(argv: list[str], theirs: socket.socket, stopping: threading.Event) -> None:
    """Start it, and again, until it shall stop."""
    pause_s = _PAUSE_S
    while not stopping.is_set():
        began_s = time.monotonic()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        while process.poll() is None and not stopping.is_set():
            stopping.wait(0.1)
        if process.poll() is None:
            _end(process)
            return
        if time.monotonic() - began_s >= _SOUND_S:
            pause_s = _PAUSE_S
        logger.warning(
            "the gateway ended with status %s; it is started again in %g s",
            process.returncode, pause_s,
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


def require_extra() -> None:
    """Raise unless the gateway's extra is installed.

    Raises
    ------
    RuntimeError
        It is not; the message says what installs it.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"--http needs {', '.join(missing)}; install the extra: pip install 'shmbus[gateway]'"
        )
