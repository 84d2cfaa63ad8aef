"""What can go wrong with weights.

::

    ShmbusError
     +-- WeightsError                base; the message says which weights are in force
          +-- ManifestError          what is published, and what a model wants, do not agree
          +-- TornWeightsError       bytes or a model of which not all is one version
          +-- PatchBaseError         a patch for another version than the one that is there
          +-- DeviceMismatchError    a device that is not here
          +-- PeerGoneError          another rank of the publisher has ended
          +-- VersionOrderError      a number that this publisher has used, or one below
          +-- WeightsBusyError       a second publisher, or no place for another reader
          +-- WeightsTimeoutError    a deadline passed; a TimeoutError too
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from shmbus import ShmbusError
from shmbus.pool import PeerGoneError as PoolPeerGoneError
from shmbus.pool import PoolBusyError, PoolDamagedError, PoolError, PoolTimeoutError

__all__ = [
    "LOADING_CODE",
    "LOAD_CODE",
    "MANIFEST_CODE",
    "TORN_CODE",
    "DeviceMismatchError",
    "ManifestError",
    "PatchBaseError",
    "PeerGoneError",
    "TornWeightsError",
    "VersionOrderError",
    "WeightsBusyError",
    "WeightsError",
    "WeightsTimeoutError",
    "translated",
]

#: What a reader's row says, for programs: why it could not take a version.
MANIFEST_CODE = 1
TORN_CODE = 2
LOAD_CODE = 3
#: It is being loaded, so that the reader runs no whole version now.
LOADING_CODE = 4

#: Faults that a message names; all of them are in the error's list.
FAULTS_SHOWN = 12


class WeightsError(ShmbusError):
    """Base class of the errors of weights."""


class ManifestError(WeightsError):
    """A manifest that contradicts itself, or does not fit the model.

    Attributes
    ----------
    faults : list[str]
        All of them; nothing was changed.
    """

    def __init__(self, what: str, faults: Sequence[str]) -> None:
        shown = "; ".join(faults[:FAULTS_SHOWN])
        more = len(faults) - FAULTS_SHOWN
        super().__init__(f"{what}: {shown}" + (f"; and {more} more" if more > 0 else ""))
        self.what = what
        self.faults = list(faults)

    def __reduce__(self) -> tuple[type[ManifestError], tuple[str, list[str]]]:
        return type(self), (self.what, self.faults)


class TornWeightsError(WeightsError):
    """Bytes that are not what was published, or a model that has only some of a version."""


class PatchBaseError(WeightsError):
    """There is no patch for the version that a model has; nothing was changed.

    Attributes
    ----------
    base : int | None
        What the patch is for; None where the version has none.
    """

    def __init__(self, message: str, base: int | None) -> None:
        super().__init__(message)
        self.base = base

    def __reduce__(self) -> tuple[type[PatchBaseError], tuple[str, int | None]]:
        return type(self), (str(self), self.base)


class DeviceMismatchError(WeightsError):
    """A device that this process does not have."""


class PeerGoneError(WeightsError):
    """Another rank of the publisher has ended.

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


class VersionOrderError(WeightsError):
    """A number of a version that is not above the one before; nothing was published."""


class WeightsBusyError(WeightsError):
    """Another process publishes these weights, or all places of readers are taken."""


class WeightsTimeoutError(WeightsError, TimeoutError):
    """What was waited for did not happen by the deadline."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise a pool's errors as those of weights, with their text."""
    try:
        yield
    except PoolPeerGoneError as error:
        raise PeerGoneError(str(error), error.rank) from error
    except PoolTimeoutError as error:
        raise WeightsTimeoutError(str(error)) from error
    except PoolBusyError as error:
        raise WeightsBusyError(str(error)) from error
    except PoolDamagedError as error:
        raise TornWeightsError(str(error)) from error
    except PoolError as error:
        raise WeightsError(str(error)) from error
