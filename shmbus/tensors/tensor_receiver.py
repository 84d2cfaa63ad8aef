"""Receiver of tensors, from the segment or from the sender's exported memory.

Invariants: a step is acknowledged exactly when its context ends without an exception. Its
tensors are views, or copies; tensors that outlive the context keep their values. A buffer returns
to the sender only after this process's device finished its queued reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch

from shmbus.base.near_names import UnknownNameError
from shmbus.channel import ChannelError, ChannelReceiver, Message, StepFailedError
from shmbus.errors import PeerGoneError, WaitTimeoutError
from shmbus.segment.names import memory_socket
from shmbus.tensors.agreement import (
    Agreement,
    Statement,
    TensorSide,
    TensorSpec,
    acked_step_of,
    parse_specs,
)
from shmbus.tensors.device.arena import ArenaView, BufferLostError, BufferName, Memory
from shmbus.tensors.step_table import Places, check_places, decode_meta, decode_places, head_of
from shmbus.tensors.views import payload_tensor, tensor_at

#: A step's tensors, and the action before its slot is returned.
Opened: TypeAlias = tuple[dict[str, torch.Tensor], Callable[[], None]]


class StepReader:
    """Opens the steps of a channel."""

    def __init__(
        self, channel: ChannelReceiver, *, device: torch.device | None, views: bool
    ) -> None:
        self._channel = channel
        self._views = views
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._payloads: dict[int, tuple[BufferName, torch.Tensor]] = {}
        index = None if device is None or device.type != "cuda" else device.index or 0
        self._buffers = ArenaView(memory_socket("channel", channel.name), device=index)

    def open(self, message: Message, places: Places) -> Opened:
        """Return a step's tensors."""
        what = f"channel {self._channel.name!r}, step {message.step}"
        if places.buffer is None:
            check_places(places, message.memory.bytes, what)
            if not places.tensors:
                return {}, _nothing
            # The tensors keep the memoryview. From the bare object torch would keep no export, and
            # the channel detects surviving tensors by the export.
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
            if self._channel.presence("sender")[0]:
                raise WaitTimeoutError(
                    f"{what}: the living sender does not share its memory: {error}. The sender is "
                    "slow or stopped; no step is lost: call again"
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
        event = self._event(device)
        current = torch.cuda.current_stream(device)
        if current.query():
            copy = source.clone()
            event.record(current)
        else:
            # A separate stream beside the caller's queued work: the bytes already arrived.
            stream = self._stream(device)
            with torch.cuda.stream(stream):
                copy = source.clone()
            event.record(stream)
            current.wait_event(event)
            copy.record_stream(current)
        return {each.name: tensor_at(copy, each) for each in places.tensors}, event.synchronize

    def _payload(self, name: BufferName, memory: Memory) -> torch.Tensor:
        """Return a buffer's bytes, viewed once per generation."""
        known, payload = self._payloads.get(name.number, (None, None))
        if payload is None or known != name:
            payload = memory.tensor()
            self._payloads[name.number] = name, payload
        return payload

    def _end_of_work(self, device: torch.device) -> None:
        """Wait for the current stream's queued work, without delay on an idle stream."""
        current = torch.cuda.current_stream(device)
        if not current.query():
            event = self._event(device)
            event.record(current)
            event.synchronize()

    def _event(self, device: torch.device) -> torch.cuda.Event:
        """Return the device's event; at most one step at a time awaits it."""
        found = self._events.get(device)
        if found is None:
            found = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._events[device] = found
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
    """Do nothing."""


#: Limit of a stated refusal's bytes: a statement holds 64 KiB, mostly for specs.
_REFUSED_BYTES = 2000

#: Cached heads: one per slot buffer for uniform steps, plus an equal reserve.
_HEADS: Final = 16


class StepItem(Mapping[str, torch.Tensor]):
    """Mapping of a step's tensors by name; leaving the context acknowledges the step."""

    def __init__(
        self,
        channel: ChannelReceiver,
        step: int,
        tensors: dict[str, torch.Tensor],
        meta: dict[str, Any],
        finish: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._tensors = tensors
        self._finish = finish
        self._open = True
        self.step = step
        self.meta = meta

    def ack(self) -> None:
        """Acknowledge the step, once; its slot may be rewritten.

        Raises
        ------
        ChannelError
            A view of exported memory survives; the step comes again.
        """
        if self._open:
            self._open = False
            self._tensors = {}
            try:
                self._finish()
            except BaseException:
                self._channel.drop()
                raise
            self._channel.ack()

    def drop(self) -> None:
        """Return the step without an acknowledgement: it comes again."""
        if self._open:
            self._open = False
            self._tensors = {}
            self._channel.drop()

    def __getitem__(self, name: str) -> torch.Tensor:
        if not self._open:
            raise KeyError(
                f"{name!r}: step {self.step} is over; take its tensors inside of its context"
            )
        if name not in self._tensors:
            what = f"step {self.step} of channel {self._channel.name!r}"
            raise UnknownNameError(what, name, self._tensors)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<StepItem {self.step} of {self._channel.name!r}: {', '.join(self._tensors)}>"

    def __enter__(self) -> StepItem:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.ack()
        else:
            self.drop()


class TensorReceiver(TensorSide):
    """The receiving side of a channel of tensors."""

    _channel: ChannelReceiver

    def __init__(
        self,
        name: str,
        *,
        specs: Mapping[str, Any],
        timeout: float,
        wait: float,
        label: str,
        device: torch.device | None = None,
        views: bool = False,
    ) -> None:
        expected = Statement(parse_specs(specs))
        self._channel = ChannelReceiver(name, timeout=timeout, wait=wait, label=label)
        self._reader = StepReader(self._channel, device=device, views=views)
        try:
            self._agreement = Agreement(self._channel, "receiver")
            self._agreement.state(expected)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        self._item: StepItem | None = None
        # Recent heads with their decoded places and specs; the next step usually reuses a head.
        self._heads: dict[bytes, tuple[Places, dict[str, TensorSpec]]] = {}

    def recv(self, timeout: float | None = None, *, step: int | None = None) -> StepItem:
        """Wait for the oldest unacknowledged step.

        Parameters
        ----------
        timeout : float, optional
            Seconds.
        step : int, optional
            Expected step, as a check.

        Returns
        -------
        StepItem
            A context; leaving it acknowledges, an exception in it does not.

        Raises
        ------
        SpecMismatchError
            Sent and expected tensors differ; the sender gets the error too.
        StepSkippedError, StepFailedError
            The step comes without tensors, for the stated reason; the next call returns the next
            step.
        DeviceMismatchError
            This process does not see the tensors' device, or cannot read it.
        StepOrderError
            `step` was acknowledged already, or is not the next.
        WaitTimeoutError, PeerGoneError, ChannelClosedError
            No step came; the message gives the reason.
        DamagedError
            The received step is damaged.
        """
        if self._item is not None:
            self._item.drop()
        self._item = self._open_step(self._channel.receive(step=step, timeout=timeout))
        return self._item

    def _open_step(self, message: Message) -> StepItem:
        what = f"channel {self.name!r}, step {message.step}"
        head = head_of(message.meta)
        places, specs = self._heads.get(head, (None, None))
        if places is None or specs is None:
            places = decode_places(head, what)
            specs = {place.name: TensorSpec(place.dtype, place.shape) for place in places.tensors}
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            self._heads[head] = places, specs
        meta = decode_meta(message.meta[len(head) :], what)
        self._agreement.check()
        found = self._agreement.differences_of(specs)
        if found:
            self._channel.drop()
            assert self._agreement.own is not None
            text = f"step {message.step}: {'; '.join(found)}"[:_REFUSED_BYTES]
            self._agreement.state(Statement(self._agreement.own.specs, refused=text))
            raise self._agreement.mismatch([text])
        try:
            tensors, finish = self._reader.open(message, places)
        except BaseException:
            self._channel.drop()  # comes again, unless acknowledged as lost
            raise
        return StepItem(self._channel, message.step, tensors, meta, finish)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after a checkpoint's last acknowledged step.

        Parameters
        ----------
        state : mapping
            Result of `state_dict`. Repeated earlier steps are acknowledged unseen; a step beyond
            the next raises StepOrderError.
        """
        self._channel.resume_after(acked_step_of(state))

    def close(self, reason: str = "") -> None:
        """Leave the channel; an unacknowledged step stays for a successor.

        Parameters
        ----------
        reason : str
            Text for the sender.
        """
        try:
            self._channel.close(reason)
        finally:
            self._reader.close()
