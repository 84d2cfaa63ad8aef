"""The matrix of ends: kind of end, party, holdings, and action of the other side.

Invariant: every cell of the product either runs or names its obstacle, never both; a new value of
an axis fails test_ends.py until its cells do either.
"""

import itertools
import os
from typing import NamedTuple

#: Whether every cell runs, each by itself.
LONG = os.environ.get("SHMBUS_TEST_ENDS") == "all"

#: How a life ends.
HOWS = {
    "close": "close(), and the process lives on",
    "with": "the end of a `with` block, and the process lives on",
    "raise": "an exception that nobody catches, while frames hold everything",
    "raise-in-with": "an exception that leaves a `with` block, and the process",
    "end": "the end of the script; its names go in any order",
    "sys.exit": "sys.exit() in a function whose frame holds everything",
    "os._exit": "os._exit()",
    "del": "the last references go in any order; the process lives on",
    "cycle": "the collector of garbage finds everything in one cycle; the process lives on",
    "teardown": "the end of the script while daemon threads wait in calls of the handles",
    "fork, sys.exit": "a forked child ends by sys.exit(); then the parent is killed",
    "fork, os._exit": "a forked child ends by os._exit(); then the parent is killed",
    "fork, del": "a forked child drops all that it has; then the parent is killed",
    "SIGTERM": "SIGTERM in the midst of a call that waits",
    "SIGINT": "Ctrl-C in the midst of a call that waits",
    "SIGKILL": "SIGKILL in the midst of a call that waits",
    "malloc": "calls whose memory fails at random allocations; the last MemoryError is not caught",
    "exec": "os.execv() of another program, which lives on under the same pid",
    "loader, 0": "the end of the script in the midst of a DataLoader without workers",
    "loader, 1": "a DataLoader asks for a worker, and says what to do; then the process is killed",
    "cancel": "a task is cancelled while it awaits; then the script ends",
    "again": "a notebook's cell runs again: the names are bound anew in the same process",
}

#: Ending parties.
WHOS = {
    "producer": "a Producer",
    "consumer": "a Consumer that reads the ring itself",
    "leaser": "a Consumer that leases from a daemon",
    "feeder": "a Feeder",
    "handler": "an OnlineDataHandler",
    "prefetch": "an OnlineDataHandler with prefetch",
    "daemon": "shmbus serve",
    "publisher": "a WeightPublisher",
    "subscriber": "a WeightSubscriber",
    "sender": "the sending side of a TensorChannel",
    "receiver": "the receiving side of a TensorChannel",
    "gateway": "shmbus gateway",
    "relay source": "the relay's party beside a source bus",
    "relay sink": "the relay's party beside a trainer's bus",
    "relay coordinator": "the relay's coordinator",
}

#: Holdings; for foreign holdings, the reason against them.
HELD = {
    "nothing": "",
    "reservation": "only a Producer reserves records",
    "lease": "only who takes groups or records has leases",
    "views": "only who reads shared memory has views of it",
    "batch": "only a handler and a gateway give batches out",
    "request": "only a Producer takes samples of the lane into its hands; what was offered is the "
    "lane's at once",
    "version": "only publishers and subscribers know versions of weights",
    "step": "only the sides of a channel know steps",
}

#: Actions of the other side during the hold.
OTHER_SIDES = {
    "open": "it goes on",
    "closed": "it has closed in order",
    "dead": "it was killed",
}

#: Holdings of each party.
HOLDS = {
    "producer": ("nothing", "reservation", "request"),
    "consumer": ("nothing", "lease", "views"),
    "leaser": ("nothing", "lease", "views"),
    "feeder": ("nothing",),
    "handler": ("nothing", "lease", "batch", "views"),
    "prefetch": ("nothing", "lease", "batch", "views"),
    "daemon": ("nothing", "lease"),
    "publisher": ("nothing", "version"),
    "subscriber": ("nothing", "version", "views"),
    "sender": ("nothing", "step"),
    "receiver": ("nothing", "step", "views"),
    "gateway": ("nothing", "batch"),
    "relay source": ("nothing", "lease"),
    "relay sink": ("nothing", "lease"),
    "relay coordinator": ("nothing", "lease"),
}

#: Programs of their own.
PROGRAMS = ("daemon", "gateway", "relay source", "relay sink", "relay coordinator")
SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL")
LOADED = ("handler", "prefetch")
WITH_TORCH = ("handler", "prefetch", "publisher", "subscriber", "sender", "receiver")
AWAITED = ("producer", "consumer", "leaser")


class Cell(NamedTuple):
    how: str
    who: str
    held: str
    other: str


def cells() -> list[Cell]:
    """Return the whole product, possible or not."""
    return [Cell(*each) for each in itertools.product(HOWS, WHOS, HELD, OTHER_SIDES)]


def why_not(cell: Cell) -> str:
    """Return the obstacle to an end; "" for a running cell."""
    if cell.held not in HOLDS[cell.who]:
        return HELD[cell.held]
    if cell.who in PROGRAMS and cell.how not in SIGNALS:
        return "a program of its own: no code but its own runs there, and it ends by a signal"
    if cell.who.startswith("relay"):
        return "tests/relay/test_relay_storm.py kills each party at random instants, many at once"
    if (cell.how, cell.who) == ("malloc", "leaser"):
        return "msgspec, which its messages are made by, crashes itself where its memory fails"
    if cell.how == "malloc" and cell.who in WITH_TORCH:
        return "torch itself crashes where Python's memory fails; see the Consumer for the bus"
    if cell.how.startswith("loader") and cell.who not in LOADED:
        return "only a handler is a data set"
    if cell.how == "cancel" and cell.who not in AWAITED:
        return "it has no coroutine that a task could await"
    return ""
