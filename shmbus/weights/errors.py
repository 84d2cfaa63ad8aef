"""What only weights raise, beside the errors of `shmbus.errors`.

::

    WeightsError
     +-- ManifestError          what is published, and what a model wants, do not agree
     +-- PatchBaseError         a patch for another version than the one that is there
     +-- VersionOrderError      a number that this publisher has used, or one below
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shmbus.errors import DamagedError, DeviceMismatchError, WeightsError

#: What a reader's row says, for programs: why it could not take a version.
MANIFEST_CODE = 1
TORN_CODE = 2
LOAD_CODE = 3

#: What a version raises that a reader cannot take, and refuses in its row.
UNUSABLE: Final = (WeightsError, DamagedError, DeviceMismatchError)

#: Faults that a message names; all of them are in the error's list.
FAULTS_SHOWN = 12


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


class VersionOrderError(WeightsError):
    """A number of a version that is not above the one before; nothing was published."""
