"""What can go wrong with a channel.

::

    ShmbusError
     +-- ChannelError               base; the message says whether the channel stays usable
          +-- ChannelBusyError      another living process is this side
          +-- ChannelTimeoutError   a deadline passed; names step, slot and side; a TimeoutError too
          +-- ChannelDamagedError   what the segment says of a message is not true
          +-- ChannelClosedError    the other side has closed the channel, with its reason
          +-- StepOrderError        a step sent or acknowledged already, or after a gap
          +-- StepSkippedError      the sender has no tensors for this step, and says why
          +-- StepFailedError       the sender could not make this step, and says why
          +-- PeerGoneError         the other side has died

A channel that is not there, was removed, has another layout or does not fit raises what a bus
raises: BusNotFoundError, BusRemovedError, LayoutMismatchError, CapacityError.
"""

from __future__ import annotations

from shmbus.errors import ShmbusError

__all__ = [
    "ChannelBusyError",
    "ChannelClosedError",
    "ChannelDamagedError",
    "ChannelError",
    "ChannelTimeoutError",
    "PeerGoneError",
    "StepFailedError",
    "StepOrderError",
    "StepSkippedError",
]


class ChannelError(ShmbusError):
    """Base class of a channel's errors."""


class ChannelBusyError(ChannelError):
    """Another living process is this side of the channel."""


class ChannelTimeoutError(ChannelError, TimeoutError):
    """What was waited for did not happen by the deadline; the message says what keeps it."""


class ChannelDamagedError(ChannelError):
    """What the segment says of a message is not what was sent."""


class ChannelClosedError(ChannelError):
    """The other side has closed the channel, and nothing is left in it."""


class StepOrderError(ChannelError):
    """A step out of its order: sent or acknowledged already, or after a gap."""


class _StepError(ChannelError):
    """A step that comes without its bytes.

    Attributes
    ----------
    step : int
        Which.
    reason : str
        Why, in the sender's words.
    """

    def __init__(self, message: str, step: int, reason: str) -> None:
        super().__init__(message)
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[_StepError], tuple[str, int, str]]:
        return type(self), (str(self), self.step, self.reason)


class StepSkippedError(_StepError):
    """The sender has nothing to send for a step; it counts as acknowledged."""


class StepFailedError(_StepError):
    """The sender could not make a step; it counts as acknowledged."""


class PeerGoneError(ChannelError):
    """The other side has died: the kernel has dropped its lock.

    It is raised once a death. Whoever calls again waits for the successor.

    Attributes
    ----------
    side : str
        "sender" or "receiver".
    pid : int
        Of the process that died.
    """

    def __init__(self, message: str, side: str, pid: int) -> None:
        super().__init__(message)
        self.side = side
        self.pid = pid

    def __reduce__(self) -> tuple[type[PeerGoneError], tuple[str, str, int]]:
        return type(self), (str(self), self.side, self.pid)
