"""Errors of weights, beside the errors of `shmbus.errors`.

::

    WeightsError
     +-- ManifestError          the published tensors and the model disagree
     +-- VersionOrderError      a version number not above the publisher's last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shmbus.errors import DamagedError, DeviceMismatchError, WeightsError

#: Code of a reader's row, for programs: the reason for a refusal.
MANIFEST_CODE = 1
TORN_CODE = 2
LOAD_CODE = 3

#: Errors of an unusable version, which the reader refuses in its row.
UNUSABLE: Final = (WeightsError, DamagedError, DeviceMismatchError)

#: Limit of faults in a message; the error's list holds every fault.
FAULTS_SHOWN = 12


class ManifestError(WeightsError):
    """A manifest that contradicts itself, or does not fit the model.

    Attributes
    ----------
    faults : list[str]
        Every fault; nothing was changed.
    """

    def __init__(self, what: str, faults: Sequence[str]) -> None:
        shown = "; ".join(faults[:FAULTS_SHOWN])
        more = len(faults) - FAULTS_SHOWN
        super().__init__(f"{what}: {shown}" + (f"; and {more} more" if more > 0 else ""))
        self.what = what
        self.faults = list(faults)

    def __reduce__(self) -> tuple[type[ManifestError], tuple[str, list[str]]]:
        return type(self), (self.what, self.faults)


class VersionOrderError(WeightsError):
    """A version number at or below the previous number; nothing was published."""
