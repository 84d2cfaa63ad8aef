"""Sending tensors, and how a step's get to where the receiver reads them.

Invariants: a step is checked whole before a byte of it is written; each tensor is copied once. A
step is committed when all of its bytes are there, never before, so a sender that dies has sent a
step whole or not at all; a buffer is written only while no receiver reads it.
What follows a copy of a device runs after it, one at a time, in order, and none after one that has
raised until that was told; a process waits on events of its own only.
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
from shmbus._arguments import check_bytes, check_int64, is_text
from shmbus._closing import ClosedForReason
from shmbus.channel import ChannelSender
from shmbus.errors import ShmbusError
from shmbus.pool.lifecycle import copy_bytes
from shmbus.segment.names import memory_socket
from shmbus.tensors.agreement import (
    Agreement,
    SpecMismatchError,
    Statement,
    acked_step_of,
    is_there,
    parse_specs,
    specs_of,
    unsendable,
)
from shmbus.tensors.config import Carrier, CudaCarrier, HostCarrier
from shmbus.tensors.device.arena import Arena, BufferName, Memory, MemoryKind, allocator
from shmbus.tensors.device.driver import CudaDriverError
from shmbus.tensors.step_table import StepForm, encode_head, encode_meta
from shmbus.tensors.views import byte_view, copy_tensor, payload_tensor, tensor_at

#: Seconds that a caller waits itself for the end of a small copy: what a device takes to change
#: over from another process, and as much again.
SOON_S: Final = 0.00025

_Task: TypeAlias = tuple[torch.cuda.Event, Callable[[], None]]


class Completion:
    """Runs actions after copies."""

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.Lock())
        self._pending = 0
        self._idle: list[torch.cuda.Event] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Return how many actions are on their way."""
        return self._pending

    def after(
        self, device: torch.device, action: Callable[[], None], *, soon: bool = False
    ) -> None:
        """Run an action once a device has done what its current stream was asked to do."""
        event = self._record(device)
        self._settle(0 if event is None else self._depth - 1)
        if event is None:
            action()
            return
        if soon and not self._pending and _is_soon(event):
            self._idle.append(event)
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmbus-device", daemon=True)
            self._thread.start()
        with self._changed:
            self._pending += 1
        self._queue.put((event, action))

    def _record(self, device: torch.device) -> torch.cuda.Event | None:
        """Return what happens when the device has got so far; None where it has already."""
        if device.type != "cuda":
            return None
        # To make an event takes longer than to record one again.
        event = self._idle.pop() if self._idle else _new_event()
        event.record(torch.cuda.current_stream(device))
        return event

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        self._settle(0)

    def check(self) -> None:
        """Raise what an action has raised, without waiting where none has."""
        if self._error is not None:
            self._settle(0)

    def _settle(self, most: int) -> None:
        if self._pending > most or self._error is not None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._pending <= (most if self._error is None else 0)
                )
                error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for what is on its way, and end the thread; may be called twice."""
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
            except BaseException as raised:  # settle raises it, where the caller is
                error = raised
            self._idle.append(event)
            del event, action, task
            with self._changed:
                self._error = self._error or error
                self._pending -= 1
                self._changed.notify_all()
            del error


def _new_event() -> torch.cuda.Event:
    """Return an event for which a thread sleeps."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _is_soon(event: torch.cuda.Event) -> bool:
    deadline = time.perf_counter() + SOON_S
    while time.perf_counter() < deadline:
        if event.query():  # type: ignore[no-untyped-call]
            return True
    return False


#: Of a slot where the tensors lie elsewhere: a step's table, at most 16 MiB, on a page of its own.
TABLE_BYTES: Final = (16 << 20) + 4096


#: Of a step on a device that is copied, as a rule, before a thread could be asked to wait for it.
SOON_BYTES: Final = 1 << 20


def open_writer(
    name: str, carrier: Carrier, *, timeout: float, label: str
) -> tuple[ChannelSender, StepWriter]:
    """Become the sender of a channel, with what its carrier needs."""
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
        # What a dead sender had on its way lay in its memory; a living receiver may have mapped it.
        channel.withdraw()
        index = carrier.index if isinstance(carrier, CudaCarrier) else 0
        device = torch.device("cpu") if kind == "memfd" else torch.device("cuda", index)
        size = check_bytes("max_bytes", most)
        return channel, ExportedWriter(channel, device, allocator(kind, index), size)
    except BaseException:
        channel.close()
        raise


class SlotWriter:
    """Steps lie in the segment: one copy, and the receiver's views are in place."""

    def __init__(self, channel: ChannelSender) -> None:
        self._channel = channel
        self.device = torch.device("cpu")

    @property
    def growths(self) -> int:
        """Return how often a slot got more memory."""
        return self._channel.growths

    @property
    def next_step(self) -> int:
        """Return the step that is written next."""
        return self._channel.next_step

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        form: StepForm,
        more: bytes,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into its slot, and send it."""
        table = encode_head(form) + more
        memory = self._channel.begin(form.size, len(table), timeout=timeout)
        if form.places:
            _copy_in(memory, form, tensors)
        self._channel.commit(table)

    def settle(self) -> None:
        """Do nothing: a step is sent when `write` returns."""

    def close(self, *, drain: bool) -> None:
        """Do nothing: the segment keeps what was sent."""


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
    """Steps lie in memory of the sender's own, exported once: one copy in, and at most one out."""

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
        # What was made for the last step of each buffer.
        self._targets: dict[int, _Targets] = {}
        self.growths = 0
        self.device = device
        self._arena = Arena(memory_socket("channel", channel.name), allocate)
        self._completion = Completion(channel.slots)

    @property
    def next_step(self) -> int:
        """Return the step that is written next; raises what kept an earlier one from being sent."""
        self._completion.check()
        # With an action on its way this side alone knows how many steps there are.
        return self._written if self._completion.pending else self._channel.next_step

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        form: StepForm,
        more: bytes,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into the next buffer, and have it sent when they are there."""
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
        """Return where the tensors of a step go in a buffer."""
        name, payload = self._arena.buffer(number, max(form.size, 1))
        ready = self._targets.get(number)
        if ready is None or ready.form is not form or ready.name != name:
            tensors = [tensor_at(payload, place) for place in form.places]
            ready = _Targets(form, name, encode_head(form, name), tensors)
            self._targets[number] = ready
        return ready

    def _make_room(self, step: int, size: int, timeout: float | None) -> None:
        """Have the next buffer be large enough; no receiver reads what is freed for that."""
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
        self._targets.pop(number, None)  # they look into what was replaced
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
        """Let go of the buffers, once the receiver has had what is in them."""
        if self._closed:
            return
        self._closed = True
        try:
            self._completion.close()
            if drain:
                # Its end, or none by the deadline: what it has not opened is lost to it then.
                with contextlib.suppress(ShmbusError):
                    self._channel.wait_acked(self._channel.sent_step)
        finally:
            self._targets.clear()
            self._arena.close()


#: Writes steps of a channel into one kind of memory, and sends each once it is there.
StepWriter: TypeAlias = SlotWriter | ExportedWriter


class TensorSender(ClosedForReason):
    """The sending side of a channel of tensors."""

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
        # Of the last step: what was checked and computed for it holds for those that are like it.
        self._form: StepForm | None = None
        self._form_key: list[tuple[str, torch.dtype, torch.Size]] = []
        if declared is not None:
            try:
                self._agreement.state(declared)
            except BaseException as error:
                self.close(f"{type(error).__name__}: {error}")
                raise

    @property
    def name(self) -> str:
        """Return the channel's name."""
        return self._channel.name

    @property
    def next_step(self) -> int:
        """Return the step that is sent next."""
        self._writer.settle()
        return self._channel.next_step

    @property
    def acked_step(self) -> int:
        """Return the last step that the receiver has acknowledged."""
        return self._channel.acked_step

    def send(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copy a step's tensors into a slot and send them; they may be changed afterwards.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            Contiguous, not empty, with memory, on the carrier's device; of a CUDA device they may
            be changed on the stream that is current now. A step may have a meta alone.
        step : int, optional
            Which step it is, to be sure.
        meta : mapping, optional
            What MessagePack can hold, of at most 16 MiB.
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
            The step is not what was agreed, or the receiver expects something else.
        StepOrderError
            Another step is next.
        WaitTimeoutError, PeerGoneError, ChannelClosedError
            No slot became free, and why.
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
            raise  # both sides are held to what has contradicted each other
        except BaseException:
            if undeclared:
                self._agreement.forget_own()
            raise
        return number

    def _send(
        self,
        tensors: dict[str, torch.Tensor],
        number: int,
        extra: bytes,
        timeout: float | None,
    ) -> None:
        form = self._form if self._is_like_the_last(tensors) else None
        self._agreement.check()
        if form is None or not self._agreement.has_passed(form.specs):
            form = self._agreed_form(tensors, number)
        self._writer.write(tensors, form, extra, timeout)

    def _is_like_the_last(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a step can be sent as the last one was: it has the same tensors to look at."""
        key = self._form_key
        device = self._writer.device
        if len(key) != len(tensors):
            return False
        tensor: Any  # whatever the caller gave
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
        """Check a step against what was agreed."""
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
        """Say that a step has no tensors: the receiver gets StepSkippedError for it.

        Parameters
        ----------
        reason : str
            Its first 159 bytes are kept.
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
        """Say that a step could not be made: the receiver gets StepFailedError for it.

        Parameters
        ----------
        reason : str
            Its first 159 bytes are kept.
        step, timeout
            As for `send`.

        Returns
        -------
        int
            The step.
        """
        self._writer.settle()
        return self._channel.fail(reason, step=step, timeout=timeout)

    def state_dict(self) -> dict[str, int]:
        """Return the last acknowledged step, for a checkpoint."""
        return {"acked_step": self._channel.acked_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after a checkpoint's last acknowledged step; `next_step` says with which.

        Parameters
        ----------
        state : mapping
            Of `state_dict`, of either side.

        Raises
        ------
        ChannelError
            A living receiver has steps on their way which the checkpoint does not know.
        """
        self._writer.settle()
        self._channel.resume_after(acked_step_of(state))

    def close(self, reason: str = "") -> None:
        """End the channel; the receiver gets what is on its way, and then ChannelClosedError.

        Memory of this process's own goes with it: without a reason, the receiver is waited for
        first, up to the channel's timeout.

        Parameters
        ----------
        reason : str
            For the receiver.
        """
        try:
            self._writer.close(drain=not reason)
        finally:
            self._channel.close(reason)

    def __repr__(self) -> str:
        return f"<TensorSender over {self._channel!r}>"

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
