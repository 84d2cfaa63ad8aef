"""A channel: acknowledged, ordered steps of bytes from a process to a single receiver.

The channel's segment is a companion, like a slot pool, with a separate protocol
(``shmbus_ext/channel``, see the LAYOUT.md there). This room adds files, deadlines and messages.
``shmbus.tensors`` sends tensors.

Invariants:

- Each step is delivered until the acknowledgement, and never afterwards; no step gets lost.
- Every wait has a deadline, and ends at the peer's death, end or refusal.
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
