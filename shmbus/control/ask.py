"""Single requests to a daemon: a connection, a request, a reply.

Invariant: an observer holds no lease. A status request to an unresponsive or incompatible daemon
times out after one second, and reports the timeout.
"""

from __future__ import annotations

import math
import os
import time
from typing import TypeVar

from shmbus import errors
from shmbus.base import limits
from shmbus.control import messages
from shmbus.control.wire import DaemonUnreachable, Wire, refusal

#: Seconds for a status reply: a healthy daemon answers within milliseconds.
_STATUS_WAIT_S = 1.0

_Answer = TypeVar("_Answer", bound=messages.Reply)


def ask_status(name: str) -> messages.StatusReply | str | None:
    """Ask the daemon of a bus for its status."""
    return _look(name, messages.GetStatus(id=1), messages.StatusReply, "status")


def ask_groups(
    name: str, groups: int, cells: int = limits.MAX_CELLS_SHOWN
) -> messages.GroupsReply | str | None:
    """Ask the daemon of a bus for its oldest incomplete groups, sample by sample."""
    request = messages.GetGroups(id=1, groups=groups, cells=cells)
    return _look(name, request, messages.GroupsReply, "groups")


def ask_group(
    name: str, instance_id: str, round: int | None, split: str
) -> messages.GroupReply | str | None:
    """Ask the daemon of a bus for a group's state and history."""
    request = messages.GetGroup(id=1, instance_id=instance_id, round=round, split=split)
    return _look(name, request, messages.GroupReply, "group")


def ask_events(
    name: str, after: int, limit: int, *, groups: bool = True, trace: bool = False
) -> messages.EventsReply | str | None:
    """Ask the daemon of a bus for its events."""
    request = messages.GetEvents(id=1, after=after, limit=limit, groups=groups, trace=trace)
    return _look(name, request, messages.EventsReply, "events")


def _look(
    name: str, request: messages.Request, answer: type[_Answer], what: str
) -> _Answer | str | None:
    """Send a read-only request; return None without a daemon, a str without a reply."""
    try:
        wire = Wire(name)
    except (DaemonUnreachable, ValueError):
        return None
    except OSError as error:
        return f"its daemon cannot be asked: {error}"
    try:
        reply = _ask(wire, name, request, "shmbus status", _STATUS_WAIT_S)
    except (DaemonUnreachable, errors.ProtocolError) as error:
        return f"its daemon (pid {wire.pid}) gave no {what}: {error}"
    if isinstance(reply, messages.Refused):
        return f"its daemon (pid {wire.pid}) refuses: {reply.message}"
    if reply is None:
        return f"its daemon (pid {wire.pid}) does not answer within {_STATUS_WAIT_S:g} s"
    assert isinstance(reply, answer)
    return reply


def ask_snapshot(name: str, directory: str) -> bytes | None:
    """Have the daemon of a bus write everything undelivered to a new directory."""
    try:
        wire = Wire(name)
    except (DaemonUnreachable, ValueError, PermissionError):
        return None  # another user's bus: reading it raises the right error
    request = messages.TakeSnapshot(id=1, directory=os.path.abspath(directory))
    try:
        reply = _ask(wire, name, request, "shmbus snapshot", None)
    except DaemonUnreachable as error:
        raise RuntimeError(
            f"bus {name!r}: its daemon (pid {wire.pid}) ended before the snapshot was complete "
            f"({error}), and left no files; see the daemon's log, and try again"
        ) from None
    if reply is None:
        raise errors.DaemonUnavailableError(
            f"bus {name!r}: its daemon (pid {wire.pid}) does not answer within "
            f"{limits.HELLO_WAIT_S:g} s, and wrote nothing; `shmbus status {name}` names the reason"
        )
    if isinstance(reply, messages.Refused):
        raise refusal(reply)
    assert isinstance(reply, messages.SnapshotTaken)
    return reply.manifest


def _ask(
    wire: Wire, name: str, request: messages.Request, label: str, wait_s: float | None
) -> messages.Reply | None:
    """Send a request and wait for its reply, as long as a daemon works if `wait_s` is None."""
    hello = messages.Hello(
        version=messages.VERSION, bus=name, pid=os.getpid(), label=label, observer=True
    )
    try:
        wire.send(hello)
        deadline = time.monotonic() + (limits.HELLO_WAIT_S if wait_s is None else wait_s)
        while (left_s := deadline - time.monotonic()) > 0:
            for reply in wire.receive(min(left_s, limits.TAKE_SLICE_S)):
                if not isinstance(reply, messages.Welcome):
                    wire.send(messages.Bye())
                    return reply
                wire.send(request)
                if wait_s is None:
                    deadline = math.inf
        return None
    finally:
        wire.end()
