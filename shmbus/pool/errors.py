"""What can go wrong with a slot pool.

::

    ShmbusError
     +-- PoolError               base; also a version that was given up
          +-- PoolBusyError      a second publisher, or no reader's row left; names the holder
          +-- PoolTimeoutError   a deadline passed; names who holds what was waited for
          +-- PoolDamagedError   what a slot says of itself is not true
          +-- PeerGoneError      a process that takes part in a version has ended

A pool that is not there, exists already, was removed, has another layout or does not fit raises
what a bus raises: BusNotFoundError, BusExistsError, BusRemovedError, LayoutMismatchError,
CapacityError.
"""

from __future__ import annotations

from shmbus.errors import ShmbusError

__all__ = ["PeerGoneError", "PoolBusyError", "PoolDamagedError", "PoolError", "PoolTimeoutError"]


class PoolError(ShmbusError):
    """Base class of a slot pool's errors; by itself, a version that was given up."""


class PoolBusyError(PoolError):
    """Another living process is this rank, or all rows of readers are taken."""


class PoolTimeoutError(PoolError, TimeoutError):
    """What was waited for did not happen by the deadline; the message says who holds it."""


class PoolDamagedError(PoolError):
    """A slot's row or bytes are not what was published."""


class PeerGoneError(PoolError):
    """A process that takes part in writing a version has ended.

    Attributes
    ----------
    rank : int
        Which one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerGoneError], tuple[str, int]]:
        return type(self), (str(self), self.rank)
