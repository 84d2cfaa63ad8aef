"""Asking a daemon for its status: one connection, one question, one answer, one deadline.

Invariant: an observer leases nothing and waits for nothing; a daemon that is stopped, away or of
another version costs it a second, and is an answer too.
"""

from __future__ import annotations

import contextlib
import os
import time

from shmbus import errors, limits, messages
from shmbus.daemon.dialing import Away, Wire

__all__ = ["ask_status"]


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
    except (Away, ValueError):
        return None
    except OSError as error:
        return f"its daemon cannot be asked: {error}"
    with contextlib.ExitStack() as stack:
        stack.callback(wire.end)
        try:
            wire.send(
                messages.Hello(
                    version=messages.VERSION,
                    bus=name,
                    pid=os.getpid(),
                    label="shmbus status",
                    observer=True,
                ),
                messages.GetStatus(id=1, oldest=oldest),
            )
            deadline = time.monotonic() + limits.OBSERVE_WAIT_S
            while (left := deadline - time.monotonic()) > 0:
                for reply in wire.receive(left):
                    if isinstance(reply, messages.StatusReply):
                        wire.send(messages.Bye())
                        return reply
                    if isinstance(reply, messages.Refused):
                        return f"its daemon (pid {wire.pid}) refuses: {reply.message}"
        except (Away, errors.ProtocolError) as error:
            return f"its daemon (pid {wire.pid}) was asked, and gave no status: {error}"
    return f"its daemon (pid {wire.pid}) does not answer within {limits.OBSERVE_WAIT_S:g} s"
