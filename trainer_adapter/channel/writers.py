"""How a step's tensors get to where the receiver reads them: one class for each kind of memory.

Invariants: a step is committed when all of its bytes are there, never before, so a sender that dies
has sent a step whole or not at all; a buffer is written only while no receiver reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import torch

from shmbus import BusClosedError, BusRemovedError, CapacityError
from shmbus.channel import ChannelError, ChannelSender
from shmbus.pool.lifecycle import bytes_of
from shmbus.segment.names import memory_socket
from trainer_adapter.channel.config import Carrier, CudaCarrier, HostCarrier
from trainer_adapter.channel.places import StepForm, channel_form, encode_head, encode_meta
from trainer_adapter.device.arena import Arena, BufferName, Memory, MemoryKind, allocator
from trainer_adapter.device.completion import Completion
from trainer_adapter.device.driver import CudaDriverError
from trainer_adapter.weights.memory import copy_tensor, payload_tensor, tensor_at

__all__ = [
    "TABLE_BYTES",
    "ExportedWriter",
    "SendAlike",
    "SlotWriter",
    "StepWriter",
    "open_writer",
]

#: From a step's tensors, all of its meta (None for the head) and its expected number to that with
#: which it was sent; None where it has to be sent as any other.
SendAlike: TypeAlias = Callable[[Mapping[str, torch.Tensor], bytes | None, int | None], int | None]

#: What a slot of the segment may have where the tensors lie elsewhere: a step's table, of at most
#: 16 MiB, on a page of its own.
TABLE_BYTES: Final = (16 << 20) + 4096


#: Of a step that is copied by the call that sends it, without giving way to other threads.
MAX_ALIKE_BYTES: Final = 256 << 10

#: Of a step on a device that is copied, as a rule, before a thread could be asked to wait for it.
SOON_BYTES: Final = 1 << 20


def open_writer(
    name: str, carrier: Carrier, *, timeout: float, label: str
) -> tuple[ChannelSender, StepWriter]:
    """Become the sender of a channel, with what its carrier needs.

    Parameters
    ----------
    name : str
        Of the channel.
    carrier : Carrier
        Which memory.
    timeout : float
        Seconds that a wait lasts where nothing else is said.
    label : str
        For messages.

    Returns
    -------
    (ChannelSender, StepWriter)

    Raises
    ------
    ValueError, ChannelBusyError, LayoutMismatchError, CapacityError
        As `TensorChannel.create` says.
    """
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
        size = bytes_of(most, "max_bytes")
        return channel, ExportedWriter(channel, device, allocator(kind, index), size)
    except BaseException:
        channel.close()
        raise


class StepWriter(Protocol):
    """Writes steps of a channel into one kind of memory."""

    device: torch.device

    @property
    def growths(self) -> int:
        """Return how often a buffer got more memory."""

    @property
    def next_step(self) -> int:
        """Return the step that is written next; raises what kept an earlier one from being sent."""

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        form: StepForm,
        meta: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors, and send it once they are there."""

    def alike(self, form: StepForm, seen: int | None) -> tuple[bytes, SendAlike] | None:
        """Return what sends steps of a form in one call, while the receiver states what it did.

        With it comes the head of their meta.
        """

    def settle(self) -> None:
        """Wait until what was written is sent; raises what kept it from being so."""

    def close(self, *, drain: bool) -> None:
        """Let go of the memory; drain: not before the receiver has had all of it."""


class SlotWriter:
    """Steps lie in the segment: one copy, and the receiver's views are in place.

    Parameters
    ----------
    channel : ChannelSender
        Which sends them.
    """

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
        meta: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into its slot, and send it."""
        table = encode_head(form) + encode_meta(meta)
        memory = self._channel.begin(form.size, len(table), timeout=timeout)
        payload = payload_tensor(memory)
        for place in form.places:
            copy_tensor(tensor_at(payload, place), tensors[place.name].detach())
        del payload
        self._channel.commit(table)

    def alike(self, form: StepForm, seen: int | None) -> tuple[bytes, SendAlike] | None:
        """Return what sends small steps of a form in one call."""
        head = encode_head(form)
        known = channel_form(form.places, form.size, head)
        if known is None or seen is None or form.size > MAX_ALIKE_BYTES:
            return None
        return head, self._channel.alike(known, seen)

    def settle(self) -> None:
        """Do nothing: a step is sent when `write` returns."""

    def close(self, *, drain: bool) -> None:
        """Do nothing: the segment keeps what was sent."""


class ExportedWriter:
    """Steps lie in memory of the sender's own, exported once: one copy in, and at most one out.

    The channel's slots have the tables only. Step after step goes to the next of as many buffers;
    the step is committed by a thread once the device has copied it, so that nobody waits for that,
    nor the copies of the next step for those of this one.

    Parameters
    ----------
    channel : ChannelSender
        Which sends them.
    device : torch.device
        Where tensors come from.
    allocate : callable
        From bytes to Memory.
    max_bytes : int
        Of a step.
    """

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
        self._targets: dict[int, tuple[StepForm, BufferName, bytes, list[torch.Tensor]]] = {}
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
        meta: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into the next buffer, and have it sent when they are there."""
        step = self.next_step
        number = step % self._channel.slots
        more = encode_meta(meta)
        self._make_room(step, form.size, timeout)
        self._channel.await_slot(step, timeout=timeout)
        head, targets = self._targets_of(number, form)
        work = self._completion.begin(self.device, form.size)
        for target, tensor in zip(targets, tensors.values(), strict=True):
            plain = tensor.detach() if tensor.requires_grad else tensor
            if work is None:
                copy_tensor(target, plain)
            else:
                target.copy_(plain)
        self._written = step + 1
        self._completion.after(
            work,
            partial(self._channel.post, head + more),
            soon=form.size <= SOON_BYTES,
        )

    def _targets_of(self, number: int, form: StepForm) -> tuple[bytes, list[torch.Tensor]]:
        """Return the head of a step in a buffer, and where its tensors go."""
        name, payload = self._arena.buffer(number, max(form.size, 1))
        known, where, head, targets = self._targets.get(number, (None, None, b"", []))
        if known is not form or where != name:
            head = encode_head(form, name)
            targets = [tensor_at(payload, place) for place in form.places]
            self._targets[number] = form, name, head, targets
        return head, targets

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

    def alike(self, form: StepForm, seen: int | None) -> tuple[bytes, SendAlike] | None:
        """Return None: its copies are made by the device's library."""
        return None

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
                with contextlib.suppress(ChannelError, BusClosedError, BusRemovedError):
                    self._channel.wait_acked(self._channel.sent_step)
        finally:
            self._targets.clear()
            self._arena.close()
