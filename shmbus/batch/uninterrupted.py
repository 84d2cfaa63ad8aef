"""Short changes no signal's handler can interrupt, for example the handler of Ctrl-C.

Most changes need no protection: they build a new state and assign it, in a single step. A function
given to `call_uninterrupted` runs in a thread without handlers. It must not wait for long, call the
user's code, or need a lock held by the caller.

A `__del__` under `finalizer` loses no exception of a handler: an interrupted `__del__` runs once
more, and then the main thread raises the exception. `__del__` must be idempotent.
"""

from shmbus_ext._core import ClosedByBlock, finalizer
from shmbus_ext._core import uninterrupted as call_uninterrupted

__all__ = ["ClosedByBlock", "call_uninterrupted", "finalizer"]
