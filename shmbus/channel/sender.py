"""The sending side of a channel.

Invariants:

- Steps are consecutive; each step is sent, skipped or failed, once.
- A step waits only for the acknowledgement of the step `slots` before it.
- After an exception the step was not sent, and the same call may be repeated.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

from shmbus.base.arguments import check_bytes, check_int, check_int64, fit_text
from shmbus.channel.endpoint import (
    Endpoint,
    StepOrderError,
    check_deadline,
    companion_of,
    own_label,
)
from shmbus.errors import BusBusyError, BusExistsError, CapacityError, ChannelError
from shmbus.pool import copy_bytes
from shmbus.segment.room import tightest
from shmbus_ext import _core

#: The layout's limit; C would truncate larger numbers.
_MOST_SLOTS = 8
_MOST_BYTES = 1 << 44

#: Byte limit of a step: address space of a sparse file, without memory before use.
DEFAULT_MAX_BYTES = 16 << 30

#: Default seconds of a wait: above a trainer's longest step.
DEFAULT_TIMEOUT_S = 60.0

#: Seconds to wait for a channel under creation by another process.
_CREATION_S = 5.0


class ChannelSender(Endpoint):
    """Sends steps of bytes. Creates the channel, or continues after a dead sender."""

    SIDE: ClassVar[int] = _core.CHANNEL_SENDER
    OTHER: ClassVar[int] = _core.CHANNEL_RECEIVER
    #: Bytes of the largest step so far.
    _largest = 0

    def __init__(
        self,
        name: str,
        *,
        slots: int = 2,
        max_bytes: int | str = DEFAULT_MAX_BYTES,
        timeout: float = DEFAULT_TIMEOUT_S,
        label: str = "",
    ) -> None:
        slots = check_int("slots", slots, 1, _MOST_SLOTS)
        most = check_int("max_bytes", check_bytes("max_bytes", max_bytes), 1, _MOST_BYTES)
        check_deadline("timeout", timeout)
        label = own_label(label)
        companion = companion_of(name)
        try:
            handle = companion.create(name, 0, slots, most)
        except BusExistsError:
            deadline = time.monotonic() + _CREATION_S
            handle = companion.open(name, deadline=deadline, awaited=True)
            if (handle.slots, handle.max_bytes) != (slots, most):
                found = (handle.slots, handle.max_bytes)
                handle.close()
                raise ValueError(
                    f"channel {name!r} is there with slots={found[0]}, max_bytes={found[1]}, and "
                    f"slots={slots}, max_bytes={most} were asked for; use its own, or remove it "
                    f"first with shmbus.channel.unlink_channel({name!r})"
                ) from None
        super().__init__(name, handle, timeout)
        if not handle.claim(self.SIDE, label):
            _, pid, _, other, _ = handle.look(self.SIDE)
            handle.close()
            raise BusBusyError(
                f"channel {name!r} has a living sender, {other!r} (pid {pid}); a channel has one: "
                "end that process, or choose another name"
            )

    @property
    def next_step(self) -> int:
        """Return the number of the next step."""
        return self.sent_step + 1

    def check_step(self, step: int | None) -> int:
        """Return the number of the next step; StepOrderError for another number."""
        expected = self.next_step
        if step is None or check_int64("step", step) == expected:
            return expected
        why = (
            "it was sent already, and is sent once"
            if step < expected
            else f"steps {expected} to {step - 1} would be left out: skip() or fail() them"
        )
        raise StepOrderError(
            f"channel {self.name!r}: expected step {expected}, got step {step}: {why}. Nothing was "
            "sent, and the channel stays usable"
        )

    def begin(
        self, size: int, meta_size: int = 0, *, timeout: float | None = None
    ) -> _core.ChannelMemory:
        """Wait for a slot, and return the memory of the next step, to be filled and committed."""
        step = self.next_step
        if size + meta_size + _core.CHANNEL_META_ALIGN > self.max_bytes:
            raise CapacityError(
                f"channel {self.name!r}: step {step} has {size} bytes and {meta_size} of meta, a "
                f"slot may grow to max_bytes={self.max_bytes}; nothing was sent, and the channel "
                "stays usable: send less, or create it with a larger max_bytes"
            )

        def take() -> _core.ChannelMemory | None:
            return self._begin(step, size, meta_size)

        with self._lock:
            return self._wait(take, timeout, lambda: self._slot_for(step))

    def await_slot(self, step: int, *, timeout: float | None = None) -> None:
        """Wait for the slot of a future step, whatever steps are sent before."""
        self._await_acked(step - self.slots, timeout, lambda: self._slot_for(step))

    def post(self, meta: Any) -> None:
        """Send a step of meta alone, into a free slot."""
        with self._lock:
            step = self.next_step
            if self._begin(step, 0, memoryview(meta).nbytes) is None:
                raise ChannelError(
                    f"channel {self.name!r}: no {self._slot_for(step)}; expected await_slot() first"
                )
            self.commit(meta)

    def _begin(self, step: int, size: int, meta_size: int) -> _core.ChannelMemory | None:
        if self._has_room(size + meta_size):
            got = _core.channel_begin(self._handle, size, meta_size)
        else:
            got = _core.SHARED_NO_SPACE
        if got == _core.SHARED_NO_SPACE:
            raise CapacityError(
                f"{companion_of(self.name).no_space(size + meta_size)}. Step {step} was not sent, "
                "and the channel stays usable"
            )
        if isinstance(got, int):
            raise self._damaged()
        return got

    def _has_room(self, size: int) -> bool:
        """Return True if each slot may grow to the size of a new largest step."""
        if size > self._largest:
            with contextlib.suppress(FileNotFoundError):
                allocated = os.stat(companion_of(self.name).path).st_blocks * 512
                if size * self.slots - allocated > tightest().left:
                    return False
            self._largest = size
        return True

    def _slot_for(self, step: int) -> str:
        slot = self._counts()[0] % self.slots
        return f"slot {slot} for step {step}, which step {step - self.slots} still has"

    def commit(self, meta: Any = b"") -> None:
        """Send the step filled after `begin`; release the memory's views first."""
        self._send(_core.CHANNEL_STEP, meta, "")

    def send(
        self,
        payload: Any,
        *,
        meta: Any = b"",
        step: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copy a step's bytes into a slot and send them, with at most 16 MiB of meta."""
        with self._lock:
            number = self.check_step(step)
            source = memoryview(payload).cast("B")
            memory = self.begin(source.nbytes, memoryview(meta).nbytes, timeout=timeout)
            copy_bytes(memory, source)
            self.commit(meta)
            return number

    def skip(self, reason: str, *, step: int | None = None, timeout: float | None = None) -> int:
        """Skip a step without bytes: the receiver gets StepSkippedError."""
        return self._message(_core.CHANNEL_SKIP, reason, step, timeout)

    def fail(self, reason: str, *, step: int | None = None, timeout: float | None = None) -> int:
        """Fail a step: the receiver gets StepFailedError."""
        return self._message(_core.CHANNEL_FAIL, reason, step, timeout)

    def wait_acked(self, step: int, *, timeout: float | None = None) -> None:
        """Wait until the receiver acknowledged a step."""
        self._await_acked(step, timeout, lambda: f"the acknowledgement of step {step}")

    def _await_acked(self, step: int, timeout: float | None, what: Callable[[], str]) -> None:
        def acked() -> bool | None:
            return True if self.acked_step >= step else None

        self._wait(acked, timeout, what)

    def withdraw(self) -> bool:
        """Withdraw unacknowledged steps, to send them again; False if a receiver holds steps."""
        with self._lock:
            if self.sent_step == self.acked_step:
                return True
            status = _core.channel_begin_at(self._handle, self.acked_step + 1)
            if status not in (0, _core.SHARED_HELD):
                raise self._damaged()
            return status == 0

    def resume_after(self, step: int) -> None:
        """Continue after a checkpoint's last acknowledged step; later steps are withdrawn."""
        step = check_int64("step", step)
        with self._lock:
            if self.acked_step == step:
                return
            status = _core.channel_begin_at(self._handle, step + 1)
            if status == _core.SHARED_HELD:
                raise ChannelError(
                    f"channel {self.name!r}: expected to resume after step {self.acked_step}, got "
                    f"step {step}, and a living receiver still has steps up to {self.sent_step}; "
                    "resume the sender before the receiver opens the channel"
                )
            if status != 0:
                raise self._damaged()

    def _message(self, kind: int, reason: str, step: int | None, timeout: float | None) -> int:
        with self._lock:
            number = self.check_step(step)
            self.begin(0, 0, timeout=timeout)
            self._send(kind, b"", fit_text("reason", reason, _core.CHANNEL_REASON_BYTES))
            return number

    def _send(self, kind: int, meta: Any, reason: str) -> None:
        if _core.channel_send(self._handle, kind, meta, reason) != 0:
            raise self._damaged()
