"""The common part of a channel's sides: file, waits, and leaving.

Invariants:

- Every wait has a deadline, and ends at once with the other side's death, end or statement.
- Only the lock proves a death. A death is reported once; a later call waits for a successor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

from shmbus import errors
from shmbus.base.arguments import check_timeout, fit_text, process_label
from shmbus.base.closing import ClosedForReason, LiveObjects
from shmbus.base.format import printable, show_wait
from shmbus.errors import ChannelError, DamagedError, PeerGoneError, WaitTimeoutError
from shmbus.segment.names import SHM_DIRECTORY, companion_name, leads_to, remove_dead_socket
from shmbus.segment.peer_wait import wait_for
from shmbus.segment.shared_file import Companion
from shmbus_ext import _core

#: The kind in channel file names: ``shmbus-channel.NAME``.
KIND = "channel"


def channel_path(name: str) -> str:
    """Return the file of a channel."""
    return f"{SHM_DIRECTORY}{companion_name(KIND, name)}"


def companion_of(name: str) -> Companion[_core.Channel]:
    """Return the companion that creates and opens a channel's file."""
    return Companion(
        _core.Channel,
        _core.CHANNEL_LAYOUT_VERSION,
        KIND,
        name,
        title=f"channel {name!r}",
        unlink=f"shmbus.channel.unlink_channel({name!r})",
        maker="sender",
    )


def living_statement(name: str) -> bytes | None:
    """Return the statement of a channel's living sender, without joining the channel."""
    try:
        handle = companion_of(name).open(name, read_only=True)
    except errors.BusNotFoundError:
        return None
    try:
        life = handle.look(_core.CHANNEL_SENDER)[0]
        found = handle.statement(_core.CHANNEL_SENDER)
    finally:
        handle.close()
    if life != _core.CHANNEL_ALIVE:
        return None
    if isinstance(found, tuple):
        return found[1]
    if found == _core.SHARED_NOTHING:
        return b""
    raise errors.DamagedError(
        f"channel {name!r}: the sender's statement does not match its checksum; remove the channel "
        f"with shmbus.channel.unlink_channel({name!r}), and resume both sides from a checkpoint"
    )


def unlink_channel(name: str) -> None:
    """Remove a channel's name; the memory stays until both sides close."""
    companion_of(name).unlink()


# -- errors of channels ----------------------------------------------------------------------------


class ChannelClosedError(ChannelError):
    """The peer closed the channel after its last step."""


class StepOrderError(ChannelError):
    """A step out of its order: sent or acknowledged already, or after a gap."""


class _StepError(ChannelError, documented=False):
    """A step without bytes: its number, and the sender's reason."""

    def __init__(self, message: str, step: int, reason: str) -> None:
        super().__init__(message)
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[_StepError], tuple[str, int, str]]:
        return type(self), (str(self), self.step, self.reason)


class StepSkippedError(_StepError):
    """The sender skipped a step; the step counts as acknowledged."""


class StepFailedError(_StepError):
    """The sender failed to make a step; the step counts as acknowledged."""


#: The two sides, by their number in the segment.
SIDES: Final = ("sender", "receiver")

_T = TypeVar("_T")


def _nothing() -> None:
    """Check nothing."""


class Endpoint(ClosedForReason):
    """One side of a channel, over an open handle without a side."""

    SIDE: ClassVar[int]
    OTHER: ClassVar[int]

    def __init__(self, name: str, handle: _core.Channel, timeout: float) -> None:
        check_deadline("timeout", timeout)
        self.name: Final = name
        self.timeout = timeout
        #: Called before each wait and after each wake-up; an exception from it ends the wait.
        self.on_wake: Callable[[], None] = _nothing
        self._handle = handle
        self._path = channel_path(name)
        self._identity = os.fstat(handle.fd)
        self._lock = threading.RLock()
        _endpoints.add(self)
        life, _, claims, _, _ = handle.look(self.OTHER)
        # Wait for, and do not mourn, a peer gone before this side joined.
        self._mourned = claims if life in (_core.CHANNEL_DEAD, _core.CHANNEL_LEFT) else 0

    @property
    def slots(self) -> int:
        """Return the limit of steps under way."""
        return self._handle.slots

    @property
    def max_bytes(self) -> int:
        """Return the byte limit of a step."""
        return self._handle.max_bytes

    @property
    def acked_step(self) -> int:
        """Return the last acknowledged step; before that, the first step minus 1."""
        _, acked, base, _ = self._counts()
        return base + acked - 1

    @property
    def sent_step(self) -> int:
        """Return the last sent step."""
        sent, _, base, _ = self._counts()
        return base + sent - 1

    def presence(self, side: str) -> tuple[bool, int]:
        """Return the side's state: a living holder, and the number of holders so far."""
        life, _, claims, _, _ = self._handle.look(SIDES.index(side))
        return life == _core.CHANNEL_ALIVE, claims

    def state(self, data: bytes) -> None:
        """Replace this side's statement, at most 64 KiB, readable after the process's end."""
        self._handle.state(data)

    def statement(self, side: str) -> tuple[int, bytes]:
        """Return a side's statement with its version; 0 and b"" without a statement."""
        found = self._handle.statement(SIDES.index(side))
        if isinstance(found, tuple):
            return found
        if found == _core.SHARED_NOTHING:
            return 0, b""
        raise self._damaged()

    def stated(self, side: str) -> int:
        """Return the version of a side's statement: cheap, and different after each change."""
        return self._handle.stated(SIDES.index(side))

    def close(self, reason: str = "") -> None:
        """Leave the channel in order; the last side to leave removes an empty channel."""
        if self._handle.closed:
            return
        text = fit_text("reason", reason, _core.CHANNEL_REASON_BYTES)
        try:
            self._leave(text)
        finally:
            # A handle without a side must close, despite any exception.
            self._handle.close()

    def _leave(self, reason: str) -> None:
        with contextlib.suppress(errors.BusClosedError):  # of before a fork
            self._handle.leave(reason)
            life = self._handle.look(self.OTHER)[0]
            sent, acked, _, _ = self._counts()
            # Leave before the look: at least one side then sees the peer gone.
            over = life in (_core.CHANNEL_LEFT, _core.CHANNEL_ABSENT) and sent == acked
            if over and leads_to(self._path, self._identity):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                remove_dead_socket("channel", self.name)

    def __repr__(self) -> str:
        try:
            state = "closed" if self._handle.closed else f"acknowledged up to {self.acked_step}"
        except errors.BusClosedError:  # of before a fork
            state = "closed"
        return f"<{type(self).__name__} {self.name!r} {state}>"

    def _counts(self) -> tuple[int, int, int, int]:
        found = _core.channel_counts(self._handle)
        if isinstance(found, tuple):
            return found
        raise self._damaged()

    def _damaged(self) -> DamagedError:
        return DamagedError(
            f"channel {self.name!r}: what its segment says of a message is not true; it is not "
            "usable any more: look for a process that writes where it should not, remove it with "
            f"shmbus.channel.unlink_channel({self.name!r}), and resume both sides from a checkpoint"
        )

    def require_timeout(self, timeout: object) -> None:
        """Raise TypeError or ValueError unless `timeout` is at least 0 seconds, or None."""
        # A fast path for each step: usually a plain float.
        if not (type(timeout) is float and timeout >= 0):
            check_timeout(timeout)

    def _wait(
        self, ready: Callable[[], _T | None], timeout: float | None, what: Callable[[], str]
    ) -> _T:
        """Call `ready` until it returns a value; `what` names the value in messages."""
        if timeout is not None:
            self.require_timeout(timeout)
        # Narrow NumPy floats lack the precision of a clock.
        limit = float(self.timeout if timeout is None else timeout)

        def woken() -> _T | None:
            self.on_wake()
            return ready()

        got = woken()
        if got is not None:
            return got
        return wait_for(
            woken,
            announce=lambda: self._handle.announce(self.OTHER),
            sleep=lambda ticket, left: self._handle.wait(self.OTHER, ticket, left),
            gone=lambda: self.end_of_other() or self._removal(what),
            late=lambda: WaitTimeoutError(self._stall(limit, what())),
            deadline=time.monotonic() + limit,
        )

    def _removal(self, what: Callable[[], str]) -> errors.BusRemovedError | None:
        if leads_to(self._path, self._identity):
            return None
        return errors.BusRemovedError(
            f"channel {self.name!r} was removed while this process waited for {what()}; create it "
            "again, and resume both sides"
        )

    def end_of_other(self) -> Exception | None:
        """Return the other side's end, a death once; None while the side may come or continue."""
        life, pid, claims, label, reason = self._handle.look(self.OTHER)
        other = SIDES[self.OTHER]
        who = f"{other} {printable(label)!r} (pid {pid})"
        if life == _core.CHANNEL_ALIVE or life == _core.CHANNEL_ABSENT:
            return None
        if life == _core.CHANNEL_LEFT and self._is_final(claims):
            why = f": {printable(reason)}" if reason else ""
            return ChannelClosedError(
                f"channel {self.name!r}: the {who} has closed it after step {self.sent_step}{why}"
            )
        if claims == self._mourned:
            return None
        self._mourned = claims
        return PeerGoneError(
            f"channel {self.name!r}: the {who} has died; sent up to step {self.sent_step}, "
            f"acknowledged up to step {self.acked_step}. Nothing is lost: start it again, and call "
            "again here to go on with its successor",
            side=other,
            pid=pid,
        )

    def _is_final(self, claims: int) -> bool:
        """Return True if an orderly end closes the channel for this side."""
        return claims != self._mourned

    def _stall(self, waited_s: float, what: str) -> str:
        life, pid, _, label, _ = self._handle.look(self.OTHER)
        other = SIDES[self.OTHER]
        state = {
            _core.CHANNEL_ABSENT: f"no {other} has come yet: start it",
            _core.CHANNEL_ALIVE: f"the {other} {printable(label)!r} (pid {pid}) lives, and is slow "
            "or stopped: look at it (py-spy dump)",
            _core.CHANNEL_DEAD: f"the {other} (pid {pid}) has died, and no successor has come: "
            "start it again",
            _core.CHANNEL_LEFT: f"the {other} (pid {pid}) has left, and no successor has come",
        }[life]
        return (
            f"channel {self.name!r}: the {SIDES[self.SIDE]} waited {show_wait(waited_s)} for "
            f"{what} (sent up to step {self.sent_step}, acknowledged up to step "
            f"{self.acked_step}); {state}. Nothing is lost: call again"
        )


_endpoints: LiveObjects[Endpoint] = LiveObjects()


def _after_fork_in_child() -> None:
    # A parent's thread may have held the lock; the child's handle is unusable anyway.
    for endpoint in _endpoints:
        endpoint._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def own_label(label: str) -> str:
    """Return this process's label for the other side's messages; the script's name by default."""
    most = _core.CHANNEL_LABEL_BYTES
    return fit_text("label", label, most) or fit_text("label", process_label(), most)


def check_deadline(name: str, timeout: object) -> None:
    """Raise TypeError or ValueError for a wait without an end."""
    check_timeout(timeout, name)
    if timeout is None:
        raise TypeError(f"{name}: expected seconds, got None; each wait needs an end")
