"""Named points of the daemon and its clients, at which a test kills or stops the process.

`arm` wraps a function in the process that calls it. NAME:HIT:kill or NAME:HIT:stop as for points
of the core (shmbus_ext/base/failpoints.h), which has the names that are not listed here.
"""

import functools
import inspect
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shmbus.client import connection as client_connection
from shmbus.client import daemon_client
from shmbus.client import leases as client_leases
from shmbus.control import messages
from shmbus.daemon import connection, leases, recovery, server, service, steps
from shmbus.stash import collector, upkeep
from shmbus.store import directory, parts


def _any(arguments: tuple[Any, ...], result: object) -> bool:
    return True


def _fruitful(arguments: tuple[Any, ...], result: object) -> bool:
    """Count only passes with a result."""
    return bool(result)


def _about(kind: type, field: str) -> Callable[[tuple[Any, ...], object], bool]:
    """Count only nonempty messages of a kind."""

    def counts(arguments: tuple[Any, ...], result: object) -> bool:
        message = arguments[1]
        return isinstance(message, kind) and bool(getattr(message, field))

    return counts


class _Point(NamedTuple):
    owner: Any
    function: str
    before: bool = False
    counts: Callable[[tuple[Any, ...], object], bool] = _any


_LEASES = _about(messages.Leases, "groups")
_ENDED = _about(messages.Ended, "numbers")

POINTS = {
    # A daemon that starts takes over the leases of clients.
    "adopt-locks-read": _Point(service, "extents_of_clients"),
    "adopt-claim-heard": _Point(recovery.Claims, "add"),
    "adopt-diverted": _Point(recovery.Claims, "divert"),
    "adopt-claim-leased": _Point(leases.LeaseTable, "claimed"),
    "adopt-resolved": _Point(recovery.Claims, "resolve"),
    "adopt-withheld": _Point(recovery.Withheld, "begin"),
    "adopt-late-claim": _Point(recovery.InDoubt, "claim"),
    # Groups are leased, made into shards, and handed out.
    "lease-begun": _Point(collector.Collector, "lease", before=True),
    "lease-half": _Point(leases.LeaseTable, "lease_of"),
    "lease-made": _Point(leases.LeaseTable, "take", counts=_fruitful),
    "shard-formed": _Point(steps.StepPlanner, "_form", counts=_fruitful),
    "shard-taken": _Point(steps.StepPlanner, "take", counts=_fruitful),
    "deliver-begun": _Point(connection.Connection, "send", before=True, counts=_LEASES),
    "deliver-sent": _Point(connection.Connection, "send", counts=_LEASES),
    # Leases end, or come back.
    "ack-received": _Point(service.Service, "_end", before=True),
    "ack-half": _Point(leases.LeaseTable, "end"),
    "ack-ended": _Point(service.Service, "_end"),
    "ack-confirming": _Point(connection.Connection, "send", before=True, counts=_ENDED),
    "ack-confirmed": _Point(connection.Connection, "send", counts=_ENDED),
    "shard-back": _Point(steps.StepPlanner, "give_back"),
    "client-left": _Point(service.Service, "leave"),
    "relieve-begun": _Point(upkeep.Upkeep, "_free_space", before=True),
    # Shutdown.
    "drain-begun": _Point(server.Server, "_drain", before=True),
    "drain-over": _Point(server.Server, "_drain"),
    "drain-closing": _Point(collector.Collector, "close", before=True),
    "drain-closed": _Point(collector.Collector, "close"),
    # In a rank.
    "rank-dialled": _Point(client_connection.Wire, "__init__"),
    "rank-welcomed": _Point(client_connection.Connection, "_receive_welcome"),
    "rank-claiming": _Point(client_connection.Connection, "_claim", before=True),
    "rank-learned": _Point(client_leases.Leases, "learn"),
    "rank-received": _Point(daemon_client.DaemonClient, "borrow", before=True),
    "rank-borrowed": _Point(daemon_client.DaemonClient, "borrow"),
    "rank-ended": _Point(client_leases.Leases, "end_groups", counts=_fruitful),
    "rank-told": _Point(daemon_client.DaemonClient, "flush"),
    "rank-confirmed": _Point(client_connection.Connection, "_file", counts=_ENDED),
    "rank-leaving": _Point(client_connection.Connection, "close", before=True),
    # A snapshot.
    "snapshot-record": _Point(parts.PartWriter, "add"),
    "snapshot-parts": _Point(parts.PartWriter, "finish"),
    "snapshot-manifest": _Point(directory, "write_file"),
    "snapshot-synced": _Point(directory, "sync"),
}


def arm(failpoint: str) -> None:
    """Set a point; the empty text sets none."""
    name, _, rest = failpoint.partition(":")
    point = POINTS.get(name)
    if point is None:
        return
    hit, _, action = rest.partition(":")
    signs = _signals(int(hit), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
    setattr(point.owner, point.function, _around(point, signs))


def _signals(hit: int, number: int) -> Iterator[None]:
    """Count passes; on the `hit`-th one the process sends itself the signal."""
    for passed in itertools.count(1):
        if passed == hit:
            os.kill(os.getpid(), number)
        yield


def _around(point: _Point, passes: Iterator[None]) -> Callable[..., Any]:
    function = getattr(point.owner, point.function)

    def passed(arguments: tuple[Any, ...], result: object, before: bool) -> None:
        if before == point.before and point.counts(arguments, result):
            next(passes)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*arguments: Any, **named: Any) -> Any:
            passed(arguments, None, True)
            result = await function(*arguments, **named)
            passed(arguments, result, False)
            return result

        return later

    @functools.wraps(function)
    def now(*arguments: Any, **named: Any) -> Any:
        passed(arguments, None, True)
        result = function(*arguments, **named)
        passed(arguments, result, False)
        return result

    return now
