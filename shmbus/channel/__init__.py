"""A channel: steps of bytes from one process to one other, in order and acknowledged.

It is a companion segment, as a slot pool is, with a protocol of its own (``shmbus_ext/channel``,
with its LAYOUT.md): here are files, deadlines and words. ``shmbus.tensors`` sends tensors.

Invariants:

- Each step is delivered until it is acknowledged, and never afterwards; none is left out.
- Neither side waits without a deadline, nor after the other one has died, ended, or refused.
"""

from __future__ import annotations

from shmbus.channel.endpoint import Endpoint
from shmbus.channel.errors import (
    ChannelClosedError,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
)
from shmbus.channel.lifecycle import living_statement, unlink_channel
from shmbus.channel.receiver import ChannelReceiver, Message
from shmbus.channel.sender import DEFAULT_MAX_BYTES, DEFAULT_TIMEOUT_S, ChannelSender
from shmbus.errors import ChannelError
from shmbus_ext._core import ChannelForm

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_TIMEOUT_S",
    "ChannelClosedError",
    "ChannelError",
    "ChannelForm",
    "ChannelReceiver",
    "ChannelSender",
    "Endpoint",
    "Message",
    "StepFailedError",
    "StepOrderError",
    "StepSkippedError",
    "living_statement",
    "unlink_channel",
]
