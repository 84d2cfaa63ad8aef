"""Short changes that no signal's handler can interrupt, such as the one of Ctrl-C.

Most changes need no such thing: they build a new state and assign it, which is one step. What is
given to `call_uninterrupted` runs in a thread where no handler does: it neither waits for long nor
calls the user's code, and needs no lock that the caller holds.
"""

from shmbus_ext._core import ClosedByBlock
from shmbus_ext._core import uninterrupted as call_uninterrupted

__all__ = ["ClosedByBlock", "call_uninterrupted"]
