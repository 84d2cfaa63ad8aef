"""A channel: steps of bytes from one process to one other, in order and acknowledged.

It is a companion segment, as a slot pool is, with a protocol of its own (``shmbus_ext/channel``,
with its LAYOUT.md): here are files, deadlines and words. ``shmbus.tensors`` sends tensors.

Invariants:

- Each step is delivered until it is acknowledged, and never afterwards; none is left out.
- Neither side waits without a deadline, nor after the other one has died, ended, or refused.
"""

from __future__ import annotations

from shmbus.channel.endpoint import (
    ChannelClosedError,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
    unlink_channel,
)
from shmbus.channel.receiver import ChannelReceiver, Message
from shmbus.channel.sender import ChannelSender
from shmbus.errors import ChannelError

__all__ = [
    "ChannelClosedError",
    "ChannelError",
    "ChannelReceiver",
    "ChannelSender",
    "Message",
    "StepFailedError",
    "StepOrderError",
    "StepSkippedError",
    "unlink_channel",
]
