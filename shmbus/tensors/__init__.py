"""Tensors of a step, from one process to one other on the same machine.

``TensorChannel.create`` is the sending side, ``TensorChannel.open`` the receiving one. What both
sides expect of the tensors is stated in the segment, so that a difference is an error on both.
"""

from __future__ import annotations

from shmbus.channel import (
    ChannelClosedError,
    ChannelError,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
)
from shmbus.tensors.agreement import SpecMismatchError
from shmbus.tensors.channel import TensorChannel
from shmbus.tensors.config import CudaCarrier, HostCarrier, MemfdCarrier
from shmbus.tensors.receiver import StepItem, TensorReceiver
from shmbus.tensors.sender import TensorSender

__all__ = [
    "ChannelClosedError",
    "ChannelError",
    "CudaCarrier",
    "HostCarrier",
    "MemfdCarrier",
    "SpecMismatchError",
    "StepFailedError",
    "StepItem",
    "StepOrderError",
    "StepSkippedError",
    "TensorChannel",
    "TensorReceiver",
    "TensorSender",
]
