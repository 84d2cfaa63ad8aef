"""Polls of buses for watching pages: once a second, regardless of the number of pages.

Invariants:

- Polls stop without viewers.
- Every page first gets the whole picture, then differences. A slow page is closed, and gets the
  whole again on its return: the memory for a page stays bounded.
- A removed, damaged or remade bus gives a picture too; polling goes on.
- A group's history stays bounded, and reports omissions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from shmbus import errors
from shmbus.base.format import printable, unprinted
from shmbus.inspect.history import read_group
from shmbus.inspect.rates import Watcher
from shmbus.inspect.status import read_status
from shmbus.inspect.verdict import judge
from shmbus.segment.names import bus_names, check_name
from shmbus.web import settings
from shmbus.web.picture import NAMES, Curves, Picture, difference, missing, picture
from shmbus_ext import _core

#: Errors of an unreadable bus; further errors count as our mistakes.
CANNOT: Final = (errors.ShmbusError, OSError, ValueError)


class GroupName(msgspec.Struct, frozen=True):
    """Which group."""

    instance_id: str
    round: int | None
    split: str


def fits(about: GroupName) -> bool:
    """Tell if a group can carry this name, as given or in its escaped form."""
    try:
        size = len(unprinted(about.instance_id).encode())
        label = len(unprinted(about.split).encode())
    except UnicodeEncodeError:
        return False
    round = about.round or 0
    return (
        1 <= size <= _core.MAX_ID_BYTES
        and 1 <= label <= _core.SPLIT_LABEL_BYTES
        and -(2**63) < round < 2**63
    )


def read_history(name: str, about: GroupName) -> dict[str, Any]:
    """Read a group's place and history."""
    try:
        found = read_group(name, about.instance_id, round=about.round, split=about.split)
    except CANNOT as error:
        return {"state": "unknown", "events": [], "problem": printable(str(error))}
    if found.group is not None:
        cells = found.group.cells
        shown = [cell for cell in cells if cell.index < settings.CELLS]
        omitted = found.group.cells_omitted + len(cells) - len(shown)
        group = msgspec.structs.replace(found.group, cells=shown, cells_omitted=omitted)
        found = msgspec.structs.replace(found, group=group)
    told: dict[str, Any] = msgspec.to_builtins(found)
    return {**told, "now": time.time()}


logger = logging.getLogger(__name__)

#: Messages waiting for a page; their sizes stay below MAX_BEHIND_BYTES.
_WAITING: Final = 8
#: Seconds for which a remade bus carries the mark of another bus.
_REMADE_S: Final = 60.0

_encode = msgspec.json.Encoder().encode


def event(kind: str, value: Any) -> bytes:
    """Encode one server-sent event; JSON contains no line feed."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode(value) + b"\n\n"


class Viewer:
    """A watching page: its messages, until its end."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._bytes = 0
        self.closed = False
        #: True after a whole picture, the base of differences.
        self.has_whole = False

    def offer(self, message: bytes) -> None:
        """Queue a message, or close a page that falls behind."""
        if self.closed:
            return
        if self._queue.full() or self._bytes + len(message) > settings.MAX_BEHIND_BYTES:
            self.close()
            return
        self._bytes += len(message)
        self._queue.put_nowait(message)

    def close(self) -> None:
        """End the page and drop its waiting messages."""
        self.closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self) -> bytes | None:
        """Wait for the next message; None at its end."""
        message = await self._queue.get()
        self._bytes -= len(message or b"")
        return message


class Poll:
    """A bus, or the overview, polled for some viewers; a subclass reads it."""

    def __init__(self) -> None:
        self.viewers: set[Viewer] = set()
        self.picture: Picture | None = None
        self.task: asyncio.Task[None] | None = None
        #: Set by a first viewer: poll now.
        self.wanted = asyncio.Event()
        self._shown_s = 0.0

    def read(self) -> tuple[Picture, bool]:
        """Read a picture, in a thread; True if unrelated to the previous picture."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """Return the whole data for a new page."""
        return {"picture": self.picture}

    def changes(self) -> dict[str, Any]:
        """Return the data that accompanies a difference."""
        return {}

    def add(self, viewer: Viewer) -> None:
        """Let a page watch: send the whole as soon as a fresh picture exists."""
        if not self.viewers:
            self.wanted.set()
        self.viewers.add(viewer)
        if self.picture is not None and time.monotonic() - self._shown_s < settings.OLD_S:
            viewer.offer(event("whole", self.whole()))
            viewer.has_whole = True

    def show(self, new: Picture, *, afresh: bool) -> None:
        """Tell all viewers about a new picture."""
        old, self.picture = self.picture, new
        self._shown_s = time.monotonic()
        whole = change = None
        for viewer in list(self.viewers):
            if old is None or afresh or not viewer.has_whole:
                whole = whole or event("whole", self.whole())
                viewer.has_whole = True
                viewer.offer(whole)
            else:
                change = change or event(
                    "change", {"change": difference(old, new), **self.changes()}
                )
                viewer.offer(change)


class BusPoll(Poll):
    """One bus."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.curves = Curves()
        self._watcher = Watcher(
            name, groups=settings.GROUPS, events=settings.EVENTS, share=settings.WALK_SHARE
        )
        self._created = 0
        self._remade_s = 0.0
        self._point: list[float | None] | None = None

    def read(self) -> tuple[Picture, bool]:
        """Read the bus, or the reason of a failure."""
        self._point = None
        try:
            self._watcher.poll()
        except errors.BusNotFoundError:
            name = printable(self.name)
            if self._created:
                text = "was removed. If it is made again, this page goes on by itself."
                return missing(name, f"The bus {name!r} {text}", "removed"), False
            text = f"There is no bus {name!r} yet. When it is made, this page shows it."
            return missing(name, text, "absent"), False
        except CANNOT as error:
            return missing(printable(self.name), printable(str(error))), False
        now_s = time.time()
        created = self._watcher.created_unix_ns
        afresh = created != self._created
        if afresh:
            if self._created:
                self._remade_s = now_s
            self._created = created
            self.curves = Curves()
        new = picture(self._watcher, now_s)
        if self._remade_s and now_s - self._remade_s < _REMADE_S:
            new["note"] = "The bus was removed and made again: this is the new one."
        self._point = self.curves.add(new)
        return new, afresh

    def whole(self) -> dict[str, Any]:
        """Return the picture and all points."""
        curves = {"names": NAMES, "points": list(self.curves.points)}
        return {"picture": self.picture, "curves": curves}

    def changes(self) -> dict[str, Any]:
        """Return the newest point."""
        return {} if self._point is None else {"point": self._point}


class OverviewPoll(Poll):
    """Selected buses, or every bus of this user, a line per bus."""

    def __init__(self, names: Callable[[], list[str]]) -> None:
        super().__init__()
        self._names = names

    def read(self) -> tuple[Picture, bool]:
        """Read a line per bus."""
        names = self._names()
        shown = names[: settings.BUSES]
        found = {printable(name): line for name in shown if (line := _line(name)) is not None}
        return {"buses": found, "omitted": len(names) - len(shown), "now": time.time()}, False


def _line(name: str) -> Picture | None:
    """Show a bus in a line; None after its removal."""
    try:
        status = read_status(name, walk=False)
    except errors.BusNotFoundError:
        return None
    except CANNOT as error:
        return {"state": "unreadable", "sentence": printable(str(error)), "level": "trouble"}
    verdict = judge(status)
    return {
        "state": "live" if status.collector.alive else "unread" if status.in_use else "unused",
        "level": verdict.level,
        "sentence": verdict.sentence,
        "capacity": status.capacity,
        "used": status.capacity - status.free,
        "undelivered": status.ledger.undelivered,
        "committed": status.ledger.committed,
        "acknowledged": status.ledger.acknowledged,
        "producers": sum(each.state == "alive" for each in status.producers),
        "policy_version": status.policy_version,
    }


class Polls:
    """The polls of a server."""

    def __init__(self, buses: tuple[str, ...]) -> None:
        self._buses = buses
        self._polls: dict[str, Poll] = {}
        # A bus with a stuck daemon delays its poll by seconds; the other polls go on.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="shmbus-poll")
        self.watching = 0
        self._questions = 0
        #: Own address.
        self.url = ""
        #: Never set: the page outlives its buses.
        self.gone = asyncio.Event()

    def names(self) -> list[str]:
        """Return the buses open to pages."""
        return list(self._buses) if self._buses else bus_names()

    def may_watch(self, name: str) -> bool:
        """Tell if a page may watch this bus."""
        if name in self._polls:
            return True
        return name in self.names() and len(self._polls) < settings.MAX_BUSES

    def may_await(self, name: str) -> bool:
        """Tell if a page may await this missing bus: not with a fixed list of buses."""
        if self._buses or len(self._polls) >= settings.MAX_BUSES:
            return False
        try:
            check_name(name)
        except ValueError:
            return False
        return True

    async def group(self, name: str, about: GroupName) -> Picture | None:
        """Return the history of a group; None during too many requests."""
        if self._questions >= settings.QUESTIONS:
            return None
        self._questions += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, read_history, name, about)
        finally:
            self._questions -= 1

    def watch(self, name: str) -> Viewer:
        """Begin to watch a bus, or with "" the overview."""
        poll = self._polls.get(name)
        if poll is None:
            poll = self._polls[name] = BusPoll(name) if name else OverviewPoll(self.names)
        viewer = Viewer()
        poll.add(viewer)
        self.watching += 1
        if poll.task is None:
            poll.task = asyncio.get_running_loop().create_task(self._keep(name, poll))
        return viewer

    def leave(self, name: str, viewer: Viewer) -> None:
        """End a page's watching."""
        self._polls[name].viewers.discard(viewer)
        self.watching -= 1

    async def _keep(self, name: str, poll: Poll) -> None:
        """Poll once a second while anybody watches."""
        loop = asyncio.get_running_loop()
        idle = 0
        try:
            while poll.viewers or idle < settings.HISTORY:
                # Without viewers the poll waits for their return, and reads nothing.
                idle = 0 if poll.viewers else idle + 1
                began_s = loop.time()
                if poll.viewers:
                    new, afresh = await loop.run_in_executor(self._threads, poll.read)
                    poll.show(new, afresh=afresh)
                poll.wanted.clear()
                rest_s = max(0.1, settings.POLL_S - (loop.time() - began_s))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(poll.wanted.wait(), rest_s)
        except Exception:
            logger.exception("polling %r failed", name)
            for viewer in list(poll.viewers):
                viewer.close()
        finally:
            if self._polls.get(name) is poll and not poll.viewers:
                del self._polls[name]
            poll.task = None

    async def start(self) -> None:
        """Do nothing: a first viewer starts a poll."""

    async def close(self) -> None:
        """End the polls and viewers."""
        for poll in list(self._polls.values()):
            for viewer in list(poll.viewers):
                viewer.close()
            if poll.task is not None:
                poll.task.cancel()
                await asyncio.gather(poll.task, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
