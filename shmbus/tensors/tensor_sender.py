"""Sender of tensors, and writers of a step into the memory read by the receiver.

Invariants: a step is checked whole before its first byte is written; every tensor is copied once. A
step is committed only after its last byte arrived: a dead sender sent a step whole or not at all; a
buffer is written only while no receiver reads it. Actions after a device copy run one at a time, in
order; after an exception no action runs until the exception was raised to the caller; a process
waits only on its own events.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from shmbus import CapacityError
from shmbus.base.arguments import check_bytes, check_int64, is_text
from shmbus.channel import ChannelSender
from shmbus.errors import ShmbusError
from shmbus.pool.pool_file import copy_bytes
from shmbus.segment.names import memory_socket
from shmbus.tensors.agreement import (
    Agreement,
    SpecMismatchError,
    Statement,
    TensorSide,
    acked_step_of,
    is_there,
    parse_specs,
    specs_of,
    unsendable,
)
from shmbus.tensors.carrier_types import Carrier, CudaCarrier, HostCarrier
from shmbus.tensors.device.arena import Arena, BufferName, Memory, MemoryKind, allocator
from shmbus.tensors.device.driver import CudaDriverError
from shmbus.tensors.step_table import StepForm, encode_head, encode_meta
from shmbus.tensors.views import byte_view, copy_tensor, payload_tensor, tensor_at

#: Seconds of the caller's own wait for a small copy: a device's switch from another process, twice.
SOON_S: Final = 0.00025

_Task: TypeAlias = tuple[torch.cuda.Event, Callable[[], None]]


class Completion:
    """Runs actions after copies."""

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.Lock())
        self.pending = 0
        self._idle: list[torch.cuda.Event] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def after(
        self, device: torch.device, action: Callable[[], None], *, soon: bool = False
    ) -> None:
        """Run an action after the work queued on the device's current stream."""
        event = self._record(device)
        self._settle(0 if event is None else self._depth - 1)
        if event is None:
            action()
            return
        if soon and not self.pending and _is_soon(event):
            self._idle.append(event)
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmbus-device", daemon=True)
            self._thread.start()
        with self._changed:
            self.pending += 1
        self._queue.put((event, action))

    def _record(self, device: torch.device) -> torch.cuda.Event | None:
        """Return an event at the end of the queued work; None without device work."""
        if device.type != "cuda":
            return None
        # Creating an event takes longer than recording an old one again.
        event = self._idle.pop() if self._idle else _new_event()
        event.record(torch.cuda.current_stream(device))
        return event

    def settle(self) -> None:
        """Wait for every pending action."""
        self._settle(0)

    def check(self) -> None:
        """Raise an action's exception, without a wait if no action failed."""
        if self._error is not None:
            self._settle(0)

    def _settle(self, most: int) -> None:
        if self.pending > most or self._error is not None:
            with self._changed:
                self._changed.wait_for(lambda: self.pending <= (most if self._error is None else 0))
                error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for pending actions and end the thread; idempotent."""
        try:
            self.settle()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
                thread.join()

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            event, action = task
            error: BaseException | None = None
            try:
                event.synchronize()
                if self._error is None:
                    action()
            except BaseException as raised:  # settle raises it in the caller
                error = raised
            self._idle.append(event)
            del event, action, task
            with self._changed:
                self._error = self._error or error
                self.pending -= 1
                self._changed.notify_all()
            del error


def _new_event() -> torch.cuda.Event:
    """Return an event whose wait sleeps instead of spinning."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _is_soon(event: torch.cuda.Event) -> bool:
    deadline = time.perf_counter() + SOON_S
    while time.perf_counter() < deadline:
        if event.query():  # type: ignore[no-untyped-call]
            return True
    return False


#: Slot bytes with tensors outside the segment: a step's table, at most 16 MiB, on a page of its
#: own.
TABLE_BYTES: Final = (16 << 20) + 4096


#: Size of a device step whose copy usually ends before a thread could take over the wait.
SOON_BYTES: Final = 1 << 20


def open_writer(
    name: str, carrier: Carrier, *, timeout: float, label: str
) -> tuple[ChannelSender, StepWriter]:
    """Become the sender of a channel, with the memory of its carrier."""
    kind: MemoryKind = "memfd"
    if isinstance(carrier, CudaCarrier):
        kind = carrier.memory_kind()
    most = carrier.max_bytes
    within = most if isinstance(carrier, HostCarrier) else TABLE_BYTES
    channel = ChannelSender(
        name, slots=carrier.slots, max_bytes=within, timeout=timeout, label=label
    )
    if isinstance(carrier, HostCarrier):
        return channel, SlotWriter(channel)
    try:
        # A dead sender's unread steps lay in its memory; a living receiver may still map them.
        channel.withdraw()
        index = carrier.index if isinstance(carrier, CudaCarrier) else 0
        device = torch.device("cpu") if kind == "memfd" else torch.device("cuda", index)
        size = check_bytes("max_bytes", most)
        return channel, ExportedWriter(channel, device, allocator(kind, index), size)
    except BaseException:
        channel.close()
        raise


class SlotWriter:
    """Writer of steps into the segment: one copy in, zero-copy views for the receiver."""

    def __init__(self, channel: ChannelSender) -> None:
        self._channel = channel
        self.device = torch.device("cpu")

    @property
    def next_step(self) -> int:
        """Return the next step to write."""
        return self._channel.next_step

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        form: StepForm,
        more: bytes,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into a slot, and send the step."""
        table = encode_head(form) + more
        memory = self._channel.begin(form.size, len(table), timeout=timeout)
        if form.places:
            _copy_in(memory, form, tensors)
        self._channel.commit(table)

    def settle(self) -> None:
        """Do nothing: `write` already sent the step."""

    def close(self, *, drain: bool) -> None:
        """Do nothing: the segment keeps sent steps."""


def _copy_in(memory: Any, form: StepForm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy contiguous host tensors to their places; a view of a slot for each would take longer."""
    payload = payload_tensor(memory)
    flat = payload.numpy()
    for place in form.places:
        source = tensors[place.name].detach()
        if source.is_neg() or source.is_conj():
            copy_tensor(tensor_at(payload, place), source)
        else:
            copy_bytes(flat[place.offset : place.offset + place.size], byte_view(source))


class _Targets(NamedTuple):
    """Where the tensors of steps of a form go in a buffer, and the head of their meta."""

    form: StepForm
    name: BufferName
    head: bytes
    tensors: list[torch.Tensor]


class ExportedWriter:
    """Writer of steps into the sender's exported memory: one copy in, and at most one out."""

    def __init__(
        self,
        channel: ChannelSender,
        device: torch.device,
        allocate: Callable[[int], Memory],
        max_bytes: int,
    ) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._closed = False
        self._grown_at = 0
        self._written = 0
        # Targets of the last step by buffer.
        self._targets: dict[int, _Targets] = {}
        self.growths = 0
        self.device = device
        self._arena = Arena(memory_socket("channel", channel.name), allocate)
        self._completion = Completion(channel.slots)

    @property
    def next_step(self) -> int:
        """Return the next step to write; raise the error of an unsent earlier step."""
        self._completion.check()
        # While an action is pending, only this side knows the number of steps.
        return self._written if self._completion.pending else self._channel.next_step

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        form: StepForm,
        more: bytes,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into the next buffer, and send the step after their arrival."""
        step = self.next_step
        number = step % self._channel.slots
        self._make_room(step, form.size, timeout)
        self._channel.await_slot(step, timeout=timeout)
        ready = self._targets_of(number, form)
        copy = torch.Tensor.copy_ if self.device.type == "cuda" else copy_tensor
        for target, tensor in zip(ready.tensors, tensors.values(), strict=True):
            copy(target, tensor.detach())
        self._written = step + 1
        self._completion.after(
            self.device,
            partial(self._channel.post, ready.head + more),
            soon=form.size <= SOON_BYTES,
        )

    def _targets_of(self, number: int, form: StepForm) -> _Targets:
        name, payload = self._arena.buffer(number, max(form.size, 1))
        ready = self._targets.get(number)
        if ready is None or ready.form is not form or ready.name != name:
            tensors = [tensor_at(payload, place) for place in form.places]
            ready = _Targets(form, name, encode_head(form, name), tensors)
            self._targets[number] = ready
        return ready

    def _make_room(self, step: int, size: int, timeout: float | None) -> None:
        """Make the next buffer large enough; free only buffers without readers."""
        if size > self._max_bytes:
            raise CapacityError(
                f"channel {self._channel.name!r}: step {step} has {size} bytes, a buffer may grow "
                f"to max_bytes={self._max_bytes}; nothing was sent, and the channel stays usable: "
                "send less, or create it with a larger max_bytes"
            )
        number = step % self._channel.slots
        grows = not self._arena.fits(number, max(size, 1))
        if self._arena.replaced:
            if grows and self._arena.has(number):
                self._channel.wait_acked(self._grown_at, timeout=timeout)
            if self._channel.acked_step >= self._grown_at:
                self._arena.let_go()
        if not grows:
            return
        try:
            self._arena.buffer(number, max(size, 1))
        except (CudaDriverError, OSError) as error:
            raise CapacityError(
                f"channel {self._channel.name!r}: no memory on {self.device} for step {step} of "
                f"{size} bytes ({error}); nothing was sent, and the channel stays usable: free "
                "some, or send less"
            ) from error
        self._targets.pop(number, None)  # the old targets point into the replaced buffer
        self._grown_at = step
        self.growths += 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        return self._arena.nbytes

    def settle(self) -> None:
        """Wait until the last step is sent."""
        self._completion.settle()

    def close(self, *, drain: bool) -> None:
        """Release the buffers after the receiver acknowledged their steps."""
        if self._closed:
            return
        self._closed = True
        try:
            self._completion.close()
            if drain:
                # After the deadline, or the receiver's end, unopened steps are lost.
                with contextlib.suppress(ShmbusError):
                    self._channel.wait_acked(self._channel.sent_step)
        finally:
            self._targets.clear()
            self._arena.close()


#: Writer of a channel's steps into one kind of memory; sends every step after its bytes arrived.
StepWriter: TypeAlias = SlotWriter | ExportedWriter


class TensorSender(TensorSide):
    """The sending side of a channel of tensors."""

    _channel: ChannelSender

    def __init__(
        self,
        name: str,
        carrier: Carrier,
        *,
        specs: Mapping[str, Any] | None,
        timeout: float,
        label: str,
    ) -> None:
        self.carrier = carrier
        declared = None if specs is None else Statement(parse_specs(specs))
        self._channel, self._writer = open_writer(name, carrier, timeout=timeout, label=label)
        self._agreement = Agreement(self._channel, "sender")
        # Form of the last step; its checks and results also hold for uniform successors.
        self._form: StepForm | None = None
        self._form_key: list[tuple[str, torch.dtype, torch.Size]] = []
        if declared is not None:
            try:
                self._agreement.state(declared)
            except BaseException as error:
                self.close(f"{type(error).__name__}: {error}")
                raise

    @property
    def next_step(self) -> int:
        """Return the next step to send."""
        self._writer.settle()
        return self._channel.next_step

    def send(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copy a step's tensors into a slot and send them; the caller may change them afterwards.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            Contiguous, not empty, with memory, on the carrier's device. CUDA tensors may be changed
            on the stream current at the call. A step may consist of a meta alone.
        step : int, optional
            Expected step, as a check.
        meta : mapping, optional
            Values for MessagePack, at most 16 MiB.
        timeout : float, optional
            Seconds to wait for a slot.

        Returns
        -------
        int
            The step.

        Raises
        ------
        ValueError, TypeError
            A tensor cannot be sent; the message names it. Nothing was sent.
        SpecMismatchError
            The step differs from the agreement, or from the receiver's expectation.
        StepOrderError
            Another step is next.
        WaitTimeoutError, PeerGoneError, ChannelClosedError
            No slot became free; the message gives the reason.
        CapacityError
            The memory is full, or the step is larger than `max_bytes`.
        """
        if step is not None and type(step) is not int:
            step = check_int64("step", step)
        if timeout is not None:
            self._channel.require_timeout(timeout)
        extra = encode_meta(meta)
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"channel {self.name!r}: expected tensors by name, got {type(tensors).__name__}; "
                "nothing was sent"
            )
        number = self._writer.next_step
        if step is not None and step != number:
            self._writer.settle()
            self._channel.check_step(step)
        undeclared = self._agreement.own is None
        try:
            self._send(dict(tensors), number, extra, timeout)
        except SpecMismatchError:
            raise  # the contradicting statements bind both sides
        except BaseException:
            if undeclared:
                self._agreement.forget_own()
            raise
        return number

    def _send(
        self, tensors: dict[str, torch.Tensor], number: int, extra: bytes, timeout: float | None
    ) -> None:
        form = self._form if self._is_like_the_last(tensors) else None
        self._agreement.check()
        if form is None or not self._agreement.has_passed(form.specs):
            form = self._agreed_form(tensors, number)
        self._writer.write(tensors, form, extra, timeout)

    def _is_like_the_last(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a step matches the last form: names, dtypes, shapes and layout."""
        key = self._form_key
        device = self._writer.device
        if len(key) != len(tensors):
            return False
        tensor: Any  # any value from the caller
        for (name, tensor), (known, dtype, shape) in zip(tensors.items(), key, strict=True):
            if not (
                name == known
                and isinstance(tensor, torch.Tensor)
                and tensor.dtype is dtype
                and tensor.shape == shape
                and tensor.device == device
                and tensor.is_contiguous()
                and is_there(tensor)
            ):
                return False
        return True

    def _agreed_form(self, tensors: Mapping[str, torch.Tensor], step: int) -> StepForm:
        self._check_tensors(tensors, step)
        specs = specs_of(tensors)
        if self._agreement.own is None:
            self._agreement.state(Statement(specs, exact=False))
            self._agreement.check()
        found = self._agreement.differences_of(specs)
        if found:
            raise self._agreement.mismatch([f"step {step}: {each}" for each in found])
        self._form = StepForm(specs)
        self._form_key = [(name, each.dtype, each.shape) for name, each in tensors.items()]
        return self._form

    def skip(self, *, reason: str, step: int | None = None, timeout: float | None = None) -> int:
        """Announce a step without tensors: the receiver gets StepSkippedError.

        Parameters
        ----------
        reason : str
            Text, cut to its first 159 bytes.
        step, timeout
            As for `send`.

        Returns
        -------
        int
            The step.
        """
        self._writer.settle()
        return self._channel.skip(reason, step=step, timeout=timeout)

    def fail(self, *, reason: str, step: int | None = None, timeout: float | None = None) -> int:
        """Announce a failed step by StepFailedError, as `TensorSender.skip` does."""
        self._writer.settle()
        return self._channel.fail(reason, step=step, timeout=timeout)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after a checkpoint's last acknowledged step; `next_step` names the next.

        Parameters
        ----------
        state : mapping
            Result of `state_dict`, of either side.

        Raises
        ------
        ChannelError
            A living receiver holds steps in flight unknown to the checkpoint.
        """
        self._writer.settle()
        self._channel.resume_after(acked_step_of(state))

    def close(self, reason: str = "") -> None:
        """End the channel; the receiver gets the steps in flight, and then ChannelClosedError.

        Memory exported by this process ends with the channel: without a reason, the call first
        waits for the receiver, up to the channel's timeout.

        Parameters
        ----------
        reason : str
            Text for the receiver.
        """
        try:
            self._writer.close(drain=not reason)
        finally:
            self._channel.close(reason)

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"channel {self.name!r}, step {step}: expected texts as names, got {name!r}; "
                    "nothing was sent"
                )
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"channel {self.name!r}, step {step}: {name!r}: expected a tensor, got "
                    f"{type(tensor).__name__}; nothing was sent"
                )
            problem = unsendable(tensor, self._writer.device)
            if not is_text(name):
                problem = "expected a name that UTF-8 can encode"
            if problem:
                raise ValueError(
                    f"channel {self.name!r}, step {step}, tensor {name!r}: {problem}; nothing was "
                    "sent, and the channel stays usable"
                )
