"""What only a channel raises, beside the errors of `shmbus.errors`.

::

    ChannelError
     +-- ChannelClosedError    the other side has closed the channel, with its reason
     +-- StepOrderError        a step sent or acknowledged already, or after a gap
     +-- StepSkippedError      the sender has no tensors for this step, and says why
     +-- StepFailedError       the sender could not make this step, and says why
"""

from __future__ import annotations

from shmbus.errors import ChannelError

__all__ = ["ChannelClosedError", "StepFailedError", "StepOrderError", "StepSkippedError"]


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
