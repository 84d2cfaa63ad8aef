"""Asking a daemon: one connection, one question, one answer.

Invariant: an observer leases nothing and waits for nothing; a daemon that is stopped, away or of
another version costs who asks for its status a second, and is an answer too.
"""

from __future__ import annotations

import os
import time

from shmbus import errors, limits
from shmbus.control import messages
from shmbus.control.wire import DaemonUnreachable, Wire, refusal

__all__ = ["ask_snapshot", "ask_status"]

#: Seconds that a daemon has for its status: a healthy one answers within milliseconds.
_STATUS_WAIT_S = 1.0


def ask_status(name: str, oldest: int = limits.STATUS_GROUPS) -> messages.StatusReply | str | None:
    """Ask the daemon of a bus for its status.

    Parameters
    ----------
    name : str
        The bus.
    oldest : int
        Incomplete groups to name.

    Returns
    -------
    StatusReply, str or None
        None where no daemon serves the bus; a str says why one that does gave no status.
    """
    try:
        wire = Wire(name)
    except (DaemonUnreachable, ValueError):
        return None
    except OSError as error:
        return f"its daemon cannot be asked: {error}"
    question = messages.GetStatus(id=1, oldest=oldest)
    try:
        reply = _ask(wire, name, question, "shmbus status", _STATUS_WAIT_S)
    except (DaemonUnreachable, errors.ProtocolError) as error:
        return f"its daemon (pid {wire.pid}) was asked, and gave no status: {error}"
    if isinstance(reply, messages.Refused):
        return f"its daemon (pid {wire.pid}) refuses: {reply.message}"
    if isinstance(reply, messages.StatusReply):
        return reply
    return f"its daemon (pid {wire.pid}) does not answer within {_STATUS_WAIT_S:g} s"


def ask_snapshot(name: str, directory: str) -> bytes | None:
    """Have the daemon of a bus write everything undelivered to a new directory.

    Parameters
    ----------
    name : str
        The bus.
    directory : str
        As `shmbus.store.snapshot.take` takes it; the daemon writes it.

    Returns
    -------
    bytes or None
        The manifest as JSON (`store.snapshot.Manifest`); None where no daemon serves the bus.

    Raises
    ------
    RuntimeError
        It could not be written, or the daemon went away; nothing is left behind.
    BusBusyError
        The daemon takes one already, or has just begun.
    """
    try:
        wire = Wire(name)
    except (DaemonUnreachable, ValueError, PermissionError):
        return None  # where it is another user's, so is the bus, and who reads that says so
    question = messages.TakeSnapshot(id=1, directory=os.path.abspath(directory))
    try:
        reply = _ask(wire, name, question, "shmbus snapshot", None)
    except DaemonUnreachable as error:
        raise RuntimeError(
            f"bus {name!r}: its daemon (pid {wire.pid}) went away before the snapshot was whole "
            f"({error}); there is none: see the daemon's log, and try again"
        ) from None
    if isinstance(reply, messages.Refused):
        raise refusal(reply)
    assert isinstance(reply, messages.SnapshotTaken)
    return reply.manifest


def _ask(
    wire: Wire, name: str, question: messages.Request, label: str, wait_s: float | None
) -> messages.Reply | None:
    """Ask, and wait for the answer; None where it does not come in time. Ends the connection."""
    hello = messages.Hello(
        version=messages.VERSION, bus=name, pid=os.getpid(), label=label, observer=True
    )
    try:
        wire.send(hello, question)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left = limits.TAKE_SLICE_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            for reply in wire.receive(left):
                if not isinstance(reply, messages.Welcome):
                    wire.send(messages.Bye())
                    return reply
    finally:
        wire.end()
