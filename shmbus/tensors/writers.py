"""How a step's tensors get to where the receiver reads them: one class for each kind of memory.

Invariants: a step is committed when all of its bytes are there, never before, so a sender that dies
has sent a step whole or not at all; a buffer is written only while no receiver reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from shmbus import CapacityError
from shmbus._arguments import check_bytes
from shmbus.channel import ChannelSender
from shmbus.device_calls import DEVICE_MAX_COPIES, device_copy
from shmbus.errors import ShmbusError
from shmbus.pool.copying import copy_bytes
from shmbus.segment.names import memory_socket
from shmbus.tensors.config import Carrier, CudaCarrier, HostCarrier
from shmbus.tensors.device.arena import Arena, BufferName, Memory, MemoryKind, allocator
from shmbus.tensors.device.completion import Completion, Work
from shmbus.tensors.device.driver import CudaDriverError, address, check
from shmbus.tensors.device.streams import stream_number
from shmbus.tensors.places import StepForm, channel_form, encode_head
from shmbus.weights.memory import byte_view, copy_tensor, payload_tensor, tensor_at

__all__ = [
    "TABLE_BYTES",
    "ExportedWriter",
    "SendAlike",
    "SlotWriter",
    "StepWriter",
    "open_writer",
]

#: From a step's tensors, its meta (behind the head that came with this; None for none) and its
#: expected number to that with which it was sent; None where it has to be sent as any other.
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
    ValueError, BusBusyError, LayoutMismatchError, CapacityError
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
        size = check_bytes("max_bytes", most)
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
        more: bytes,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors, and send it once they are there; `more` follows its head."""

    def alike(
        self, form: StepForm, seen: int | None, looks: Callable[..., bool] | None
    ) -> tuple[bytes, SendAlike] | None:
        """Return what sends steps of a form faster, while the receiver states what it did.

        With it comes what their meta begins with. `looks` compares the tensors of a step with those
        of the form, in one call; None where that cannot be.
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
        more: bytes,
        timeout: float | None,
    ) -> None:
        """Copy a step's tensors into its slot, and send it."""
        table = encode_head(form) + more
        memory = self._channel.begin(form.size, len(table), timeout=timeout)
        if form.places:
            _copy_in(memory, form, tensors)
        self._channel.commit(table)

    def alike(
        self, form: StepForm, seen: int | None, looks: Callable[..., bool] | None
    ) -> tuple[bytes, SendAlike] | None:
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
    places: tuple[tuple[int, int], ...]  # address and bytes of each


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
        work = self._completion.begin(self.device, form.size)
        for target, tensor in zip(ready.tensors, tensors.values(), strict=True):
            plain = tensor.detach() if tensor.requires_grad else tensor
            if work is None:
                copy_tensor(target, plain)
            else:
                target.copy_(plain)
        if work is not None:
            work.end()
        self._hand_over(step, work, form, ready.head + more)

    def _hand_over(self, step: int, work: Work | None, form: StepForm, message: bytes) -> None:
        """Have a step sent once it is there."""
        self._written = step + 1
        self._completion.after(
            work, partial(self._channel.post, message), soon=form.size <= SOON_BYTES
        )

    def _targets_of(self, number: int, form: StepForm) -> _Targets:
        """Return where the tensors of a step go in a buffer."""
        name, payload = self._arena.buffer(number, max(form.size, 1))
        ready = self._targets.get(number)
        if ready is None or ready.form is not form or ready.name != name:
            tensors = [tensor_at(payload, place) for place in form.places]
            places = tuple((each.data_ptr(), each.nbytes) for each in tensors)
            ready = _Targets(form, name, encode_head(form, name), tensors, places)
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

    def alike(
        self, form: StepForm, seen: int | None, looks: Callable[..., bool] | None
    ) -> tuple[bytes, SendAlike] | None:
        """Return what sends steps of a form by the driver's own calls."""
        few = 0 < len(form.places) <= DEVICE_MAX_COPIES
        if self.device.type != "cuda" or seen is None or looks is None or not few:
            return None
        calls = address("cuMemcpyDtoDAsync_v2"), address("cuEventRecord")
        return b"", partial(self._send_alike, form, list(form.specs), seen, looks, calls)

    def _send_alike(
        self,
        form: StepForm,
        names: list[str],
        seen: int,
        looks: Callable[..., bool],
        calls: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        more: bytes | None,
        expected: int | None,
    ) -> int | None:
        """Send a step like the last ones; None where there is anything to be waited for or made.

        Whoever sends has slept since the step before, and each function is slow the first time
        after that: here are as few as can be.
        """
        completion, device = self._completion, self.device
        written = self._written if completion.pending else None
        step = self._channel.next_alike(written, seen)
        if step is None or completion.failed or self._arena.replaced:
            return None
        if type(tensors) is not dict or [*tensors] != names or not looks(*tensors.values()):
            return None
        ready = self._targets.get(step % self._channel.slots)
        if ready is None or ready.form is not form or (expected is not None and expected != step):
            return None
        if torch.cuda.current_device() != device.index:
            return None
        work = completion.begin(device, form.size)
        assert work is not None, "a CUDA device is never done at once"
        stream = stream_number(device)
        status = device_copy(*calls, stream, work.handle, tensors, ready.places)
        if status:
            torch.cuda.synchronize(device)  # torch has better words for it
            check("cuMemcpyDtoDAsync", status)
        self._hand_over(step, work, form, ready.head if more is None else ready.head + more)
        return step

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
