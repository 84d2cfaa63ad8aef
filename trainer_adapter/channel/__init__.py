"""Tensors of a step, from one process to one other on the same machine.

``TensorChannel.create`` is the sending side, ``TensorChannel.open`` the receiving one. What both
sides expect of the tensors is stated in the segment, so that a difference is an error on both.
"""

from __future__ import annotations

from shmbus.channel import (
    ChannelBusyError,
    ChannelClosedError,
    ChannelDamagedError,
    ChannelError,
    ChannelTimeoutError,
    PeerGoneError,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
)
from trainer_adapter.channel.channel import TensorChannel
from trainer_adapter.channel.config import CudaCarrier, HostCarrier, MemfdCarrier
from trainer_adapter.channel.receiver import StepItem, TensorReceiver
from trainer_adapter.channel.sender import TensorSender
from trainer_adapter.channel.specs import SpecMismatchError, TensorSpec
from trainer_adapter.device.handles import DeviceMismatchError

__all__ = [
    "ChannelBusyError",
    "ChannelClosedError",
    "ChannelDamagedError",
    "ChannelError",
    "ChannelTimeoutError",
    "CudaCarrier",
    "DeviceMismatchError",
    "HostCarrier",
    "MemfdCarrier",
    "PeerGoneError",
    "SpecMismatchError",
    "StepFailedError",
    "StepItem",
    "StepOrderError",
    "StepSkippedError",
    "TensorChannel",
    "TensorReceiver",
    "TensorSender",
    "TensorSpec",
]
