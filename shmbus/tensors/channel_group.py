"""Channels between ranks of an engine and ranks of a trainer, with the order of turns.

Invariants:

- Every pair of ranks owns a channel, ``NAME.sender.receiver``. A sender's step belongs to one of
  its receivers by number, independent of the remaining receivers.
- A dead receiver is reported once; then its steps wait for its successor while the remaining
  receivers continue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from shmbus.base.arguments import check_count, check_int
from shmbus.base.closing import ClosedForReason
from shmbus.channel import ChannelClosedError, StepFailedError, StepOrderError, StepSkippedError
from shmbus.errors import WaitTimeoutError
from shmbus.tensors.tensor_receiver import StepItem, TensorReceiver
from shmbus.tensors.tensor_sender import TensorSender

#: Seconds to wait for one of several channels before polling the rest again.
TURN_S: Final = 0.005


class ChannelGroup:
    """Map of channels between senders and receivers; opens no channel by itself."""

    def __init__(
        self,
        name: str,
        senders: int,
        receivers: int,
        create: Callable[..., TensorSender],
        open: Callable[..., TensorReceiver],
    ) -> None:
        self.name = name
        self.senders = check_count("senders", senders)
        self.receivers = check_count("receivers", receivers)
        self._create, self._open = create, open
        many = max(self.senders, self.receivers)
        if many % min(self.senders, self.receivers):
            raise ValueError(
                f"group {name!r}: expected the number of senders or receivers to be a multiple of "
                f"the opposite number, got {senders} and {receivers}: uneven shares of the ranks"
            )
        self._pairs = [(i * self.senders // many, i * self.receivers // many) for i in range(many)]

    def sender(self, rank: int, **options: Any) -> GroupSender:
        """Become a sender for one or more receivers; options as of `TensorChannel.create`."""
        rank = check_int("rank", rank, 0, self.senders - 1)
        names = [f"{self.name}.{s}.{r}" for s, r in self._pairs if s == rank]
        return GroupSender(self.name, _all(self._create, names, options))

    def receiver(self, rank: int, **options: Any) -> GroupReceiver:
        """Become a receiver from one or more senders; options as of `TensorChannel.open`."""
        rank = check_int("rank", rank, 0, self.receivers - 1)
        names = [f"{self.name}.{s}.{r}" for s, r in self._pairs if r == rank]
        return GroupReceiver(self.name, _all(self._open, names, options))


def _all(make: Callable[..., Any], names: Sequence[str], options: Mapping[str, Any]) -> list[Any]:
    """Open a side of every channel, or of none."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(make(name, **options)) for name in names]
        stack.pop_all()
    return made


class _Side(ClosedForReason):
    """Channel sides of a single rank."""

    def __init__(self, name: str, channels: Sequence[Any]) -> None:
        self.name = name
        self._channels = channels

    def state_dict(self) -> dict[str, int]:
        """Return the last acknowledged step of every channel, for a checkpoint."""
        return {each.name: each.acked_step for each in self._channels}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after a checkpoint's steps, of either side; ranks' states may be joined."""
        for each in self._channels:
            if each.name not in state:
                raise ValueError(
                    f"state: expected a step of channel {each.name!r}, got {sorted(state)}; join "
                    "the states of all ranks of one side"
                )
        for each in self._channels:
            each.load_state_dict({"acked_step": state[each.name]})

    def close(self, reason: str = "") -> None:
        """Leave every channel, with a reason for the peers."""
        with contextlib.ExitStack() as stack:
            for each in self._channels:
                stack.callback(each.close, reason)


class GroupSender(_Side):
    """Sending rank of a group; deals steps to the receivers in turn."""

    _channels: Sequence[TensorSender]

    @property
    def next_step(self) -> int:
        """Return this rank's next step with a living or future receiver."""
        steps = [self._step_of(each) for each in self._channels if _may_receive(each)]
        return min(steps or map(self._step_of, self._channels))

    def send(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send a step to its receiver by `TensorSender.send`; `step` counts this rank's steps.

        PeerGoneError reports a dead receiver once: nothing was sent, and `next_step` names the next
        step of a living receiver, until a successor runs.
        """
        return self._deal(step, lambda each: each.send(tensors, meta=meta, timeout=timeout))

    def skip(self, *, reason: str, step: int | None = None, timeout: float | None = None) -> int:
        """Announce a step without tensors; its receiver gets StepSkippedError."""
        return self._deal(step, lambda each: each.skip(reason=reason, timeout=timeout))

    def fail(self, *, reason: str, step: int | None = None, timeout: float | None = None) -> int:
        """Announce a failed step; its receiver gets StepFailedError."""
        return self._deal(step, lambda each: each.fail(reason=reason, timeout=timeout))

    def _deal(self, step: int | None, action: Callable[[TensorSender], int]) -> int:
        for each in self._channels:
            end = each._channel.end_of_other()
            if end is not None and not isinstance(end, ChannelClosedError):
                raise end
        number = self.next_step if step is None else check_int("step", step, 0)
        channel = self._channels[number % len(self._channels)]
        if number != self._step_of(channel):
            raise StepOrderError(
                f"channel {channel.name!r}: expected step {self._step_of(channel)} of the group's, "
                f"got step {number}. Nothing was sent, and the group stays usable"
            )
        action(channel)
        return number

    def _step_of(self, channel: TensorSender) -> int:
        """Return the rank's number of a channel's next step."""
        place = self._channels.index(channel)
        return channel._writer.next_step * len(self._channels) + place


def _may_receive(channel: TensorSender) -> bool:
    """Return whether a channel's receiver lives, or never came yet."""
    alive, claims = channel._channel.presence("receiver")
    return alive or claims == 0


class GroupReceiver(_Side):
    """A receiving rank of a group: steps of its senders in turn."""

    _channels: Sequence[TensorReceiver]

    def __init__(self, name: str, channels: Sequence[TensorReceiver]) -> None:
        super().__init__(name, channels)
        self._item: StepItem | None = None
        self._turn = 0

    def recv(self, timeout: float | None = None) -> StepItem:
        """Wait for a step of the sender in turn, or of another sender with a step.

        PeerGoneError reports a dead sender once; a repeated call serves the remaining senders.
        ChannelClosedError: every sender ended.
        """
        if self._item is not None:
            self._item.drop()
        self._item = self._next(timeout)
        return self._item

    def _next(self, timeout: float | None) -> StepItem:
        if len(self._channels) == 1:
            return self._channels[0].recv(timeout)
        deadline = self._deadline(timeout)
        awaited: TensorReceiver | None = None
        while True:
            left = deadline - time.monotonic()
            late: dict[TensorReceiver, WaitTimeoutError] = {}
            ended: list[ChannelClosedError] = []
            for place in range(self._turn, self._turn + len(self._channels)):
                each = self._channels[place % len(self._channels)]
                try:
                    item = each.recv(max(min(left, TURN_S), 0.0) if each is awaited else 0.0)
                except WaitTimeoutError as error:
                    late[each] = error
                except ChannelClosedError as error:
                    ended.append(error)
                except (StepSkippedError, StepFailedError):
                    self._turn = place + 1
                    raise
                else:
                    self._turn = place + 1
                    return item
            if not late:
                raise ChannelClosedError("; ".join(map(str, ended)))
            if left <= 0:
                raise WaitTimeoutError("; ".join(map(str, late.values())))
            awaited = next(iter(late))

    def _deadline(self, timeout: float | None) -> float:
        channel = self._channels[0]._channel
        channel.require_timeout(0.0 if timeout is None else timeout)
        return time.monotonic() + float(channel.timeout if timeout is None else timeout)
