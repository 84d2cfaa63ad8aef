"""The receiving side of a channel.

Invariants:

- Steps come in order. An unacknowledged step comes again, to this process or its successor.
- An acknowledged step never comes again; a missing step always raises an error.
- A view never changes: after its step's acknowledgement a living view gets a copy at its address.
"""

from __future__ import annotations

import time
from typing import ClassVar, TypeAlias

import msgspec

from shmbus.base.arguments import check_int64
from shmbus.channel.endpoint import (
    Endpoint,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
    check_deadline,
    companion_of,
    own_label,
)
from shmbus.channel.sender import DEFAULT_TIMEOUT_S
from shmbus.errors import BusBusyError
from shmbus_ext import _core

_Taken: TypeAlias = tuple[int, int, _core.ChannelMemory, bytes, str]


class Message(msgspec.Struct, frozen=True):
    """A step's number, its memory in place, read-only, and its meta, until the acknowledgement."""

    step: int
    memory: _core.ChannelMemory
    meta: bytes


class ChannelReceiver(Endpoint):
    """Receives steps of bytes, from the oldest unacknowledged step."""

    SIDE: ClassVar[int] = _core.CHANNEL_RECEIVER
    OTHER: ClassVar[int] = _core.CHANNEL_SENDER

    def __init__(
        self, name: str, *, timeout: float = DEFAULT_TIMEOUT_S, wait: float = 0.0, label: str = ""
    ) -> None:
        check_deadline("timeout", timeout)
        check_deadline("wait", wait)
        label = own_label(label)
        deadline = time.monotonic() + float(wait)
        handle = companion_of(name).open(name, deadline=deadline, awaited=True)
        super().__init__(name, handle, timeout)
        self._resumed: int | None = None
        if not handle.claim(self.SIDE, label):
            _, pid, _, other, _ = handle.look(self.SIDE)
            handle.close()
            raise BusBusyError(
                f"channel {name!r} has a living receiver, {other!r} (pid {pid}); a channel has "
                "one: end that process, or make a channel for each receiver"
            )

    def receive(self, *, step: int | None = None, timeout: float | None = None) -> Message:
        """Wait for the oldest unacknowledged step; `step` checks the number."""
        with self._lock:
            if step is not None and check_int64("step", step) <= self.acked_step:
                raise StepOrderError(
                    f"channel {self.name!r}: expected a step after {self.acked_step}, got step "
                    f"{step}, which was acknowledged already and comes once; resume both sides "
                    "from a checkpoint to have it again. The channel stays usable"
                )
            while True:
                kind, number, memory, meta, reason = self._wait(self._take, timeout, self._awaited)
                if self._resumed is not None and number <= self._resumed:
                    self.ack()  # sent again, and known to the checkpoint
                    continue
                self._check_order(number, step)
                self._resumed = None
                if kind == _core.CHANNEL_STEP:
                    return Message(number, memory, meta)
                skipped = kind == _core.CHANNEL_SKIP
                error = (StepSkippedError if skipped else StepFailedError)(
                    f"channel {self.name!r}: step {number} was "
                    f"{'skipped' if skipped else 'not made'}: {reason}. It is acknowledged: "
                    "receive the next",
                    number,
                    reason,
                )
                try:
                    # Last: after an earlier exception the step comes again.
                    self.ack()
                    raise error
                finally:
                    del error  # the traceback refers to this frame

    def ack(self) -> None:
        """Acknowledge the last received step, and free its slot."""
        with self._lock:
            _core.channel_ack(self._handle)

    def drop(self) -> None:
        """Return the received step without an acknowledgement: it comes again."""
        with self._lock:
            _core.channel_drop(self._handle)

    def resume_after(self, step: int) -> None:
        """Continue after a checkpoint's last step: earlier steps are acknowledged unseen."""
        self._resumed = check_int64("step", step)

    def _is_final(self, claims: int) -> bool:
        """Return True: a sender that closed sends no more."""
        return True

    def _awaited(self) -> str:
        return f"step {self.acked_step + 1} in slot {self._counts()[1] % self.slots}"

    def _take(self) -> _Taken | None:
        got = _core.channel_receive(self._handle)
        if isinstance(got, int):
            raise self._damaged()
        return got

    def _check_order(self, number: int, step: int | None) -> None:
        wanted = step if self._resumed is None else self._resumed + 1
        if wanted is None or wanted == number:
            return
        self.drop()
        if wanted < number:
            why = f"step {wanted} was acknowledged already; resume the sender from the checkpoint"
        else:
            why = f"step {wanted} comes after it"
        raise StepOrderError(
            f"channel {self.name!r}: expected step {wanted}, got step {number}: {why}. Nothing was "
            "acknowledged, and the channel stays usable"
        )
