"""Tensors of a step, sent from one process to a second process on the same machine.

``TensorChannel.create`` opens the sending side, ``TensorChannel.open`` the receiving side. The
segment states both sides' expectations; a difference raises an error on both sides.
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
from shmbus.tensors.carrier_types import CudaCarrier, HostCarrier, MemfdCarrier
from shmbus.tensors.channel import TensorChannel
from shmbus.tensors.tensor_receiver import StepItem, TensorReceiver
from shmbus.tensors.tensor_sender import TensorSender

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
