"""How a receiver gets at a step's tensors: in the segment, or in the sender's exported memory.

Invariants: what a caller keeps never changes; a buffer is given back to the sender only when this
process's device has read what it was asked to read of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from shmbus.channel import ChannelError, ChannelReceiver, Message, StepFailedError
from shmbus.errors import PeerGoneError, WaitTimeoutError
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import ArenaView, BufferLostError, BufferName, Memory
from shmbus.tensors.device.completion import SPIN_BYTES
from shmbus.tensors.device.completion import event as new_event
from shmbus.tensors.device.streams import current_stream
from shmbus.tensors.places import Places, check_places
from shmbus.weights.memory import payload_tensor, tensor_at

__all__ = ["Opened", "StepReader"]

#: A step's tensors, and what has to be done before its slot is given back.
Opened: TypeAlias = tuple[dict[str, torch.Tensor], Callable[[], None]]


class StepReader:
    """Opens the steps of a channel.

    Parameters
    ----------
    channel : ChannelReceiver
        Which receives them.
    device : torch.device, optional
        Which CUDA device reads exported memory; by default the one that has it.
    views : bool
        Whether tensors of exported memory are views, to be let go of within their step's context.
    """

    def __init__(
        self, channel: ChannelReceiver, *, device: torch.device | None, views: bool
    ) -> None:
        self._channel = channel
        self._views = views
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: dict[tuple[torch.device, bool], torch.cuda.Event] = {}
        self._payloads: dict[int, tuple[BufferName, torch.Tensor]] = {}
        index = None if device is None or device.type != "cuda" else device.index or 0
        self._buffers = ArenaView(memory_socket("channel", channel.name), device=index)

    def open(self, message: Message, places: Places) -> Opened:
        """Return a step's tensors.

        Raises
        ------
        DamagedError
            A tensor does not lie in its payload.
        StepFailedError
            Its memory went with the sender that had it; the step is acknowledged.
        WaitTimeoutError
            The sender does not answer.
        DeviceMismatchError, CudaDriverError, OSError
            This process cannot map it.
        """
        what = f"channel {self._channel.name!r}, step {message.step}"
        if places.buffer is None:
            assert message.memory is not None
            check_places(places, message.memory.bytes, what)
            if not places.tensors:
                return {}, _nothing
            # By a memoryview, which the tensors keep. Of the object alone torch keeps no export, by
            # which the channel knows that they outlive their step.
            payload = payload_tensor(memoryview(message.memory))
            return {each.name: tensor_at(payload, each) for each in places.tensors}, _nothing
        memory = self._map(message, places, what)
        check_places(places, memory.nbytes, what)
        if self._views:
            return self._in_place(memory, places, what)
        return self._copied(places.buffer, memory, places)

    def _map(self, message: Message, places: Places, what: str) -> Memory:
        assert places.buffer is not None
        try:
            return self._buffers.memory(places.buffer)
        except PeerGoneError as error:
            if self._channel.is_other_alive():
                raise WaitTimeoutError(
                    f"{what}: the sender lives, and does not give its memory: {error}. It is slow "
                    "or stopped; nothing is lost: call again"
                ) from error
            lost: Exception = error
        except BufferLostError as error:
            lost = error
        self._channel.ack()
        reason = "its memory went with the sender that had it"
        raise StepFailedError(
            f"{what} was sent, and {reason} ({lost}). It counts as acknowledged: receive the next, "
            "or resume both sides from a checkpoint to have it again",
            message.step,
            reason,
        ) from lost

    def _in_place(self, memory: Memory, places: Places, what: str) -> Opened:
        payload, life = memory.lend()
        tensors = {each.name: tensor_at(payload, each) for each in places.tensors}

        def finish() -> None:
            if memory.device.type == "cuda":
                self._end_of_work(memory.device)
            if life() is not None:
                raise ChannelError(
                    f"{what}: a view of it outlives its context, and would change with the step "
                    f"after next; views=True was asked for. Nothing is acknowledged: the step "
                    "comes again. Delete what was made of its views (also what autograd keeps), or "
                    "open the channel without views"
                )

        return tensors, finish

    def _copied(self, name: BufferName, memory: Memory, places: Places) -> Opened:
        size = max((each.offset + each.size for each in places.tensors), default=0)
        source = self._payload(name, memory)[:size]
        device = memory.device
        if device.type != "cuda":
            copy = source.clone()
            return {each.name: tensor_at(copy, each) for each in places.tensors}, _nothing
        event = self._event(device, sleeps=size > SPIN_BYTES)
        current = current_stream(device)
        if current.query():
            copy = source.clone()
            event.record(current)
        else:
            # Beside the caller's own work: the bytes are there, and nothing of that ends first.
            stream = self._stream(device)
            with torch.cuda.stream(stream):
                copy = source.clone()
            event.record(stream)
            current.wait_event(event)
            copy.record_stream(current)
        return {each.name: tensor_at(copy, each) for each in places.tensors}, event.synchronize

    def _payload(self, name: BufferName, memory: Memory) -> torch.Tensor:
        """Return a buffer's bytes, viewed once for each generation."""
        known, payload = self._payloads.get(name.number, (None, None))
        if payload is None or known != name:
            payload = memory.tensor()
            self._payloads[name.number] = name, payload
        return payload

    def _end_of_work(self, device: torch.device) -> None:
        """Wait for what the current stream was asked to do; no longer where it is done."""
        current = current_stream(device)
        if not current.query():
            event = self._event(device, sleeps=True)
            event.record(current)
            event.synchronize()

    def _event(self, device: torch.device, *, sleeps: bool) -> torch.cuda.Event:
        """Return an event of a device; of no more than one step at a time something is awaited."""
        found = self._events.get((device, sleeps))
        if found is None:
            found = self._events[device, sleeps] = new_event(sleeps=sleeps)
        return found

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        found = self._streams.get(device)
        if found is None:
            found = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return found

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._payloads.clear()
        self._buffers.close()


def _nothing() -> None:
    """Nothing has to be done."""
