"""What a carrier offers that knows patches: a publisher's side, and a version as a reader has it.

Invariant: whoever cannot use a patch has the whole version, from the same carrier.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CarriedPatch", "PatchedVersion", "PatchingSink"]


class CarriedPatch(Protocol):
    """What changed since another version."""

    base_sequence: int
    base_version: int
    changes: int
    size: int

    def changed(self, name: str) -> bool:
        """Whether anything of a tensor changed."""

    def apply(self, name: str, memory: npt.NDArray[np.uint8]) -> bool:
        """Change a tensor's bytes, which are the base's; False where they were not."""

    def same(self, name: str, target: torch.Tensor) -> bool:
        """Compare a contiguous CPU tensor with what was published."""


@runtime_checkable
class PatchedVersion(Protocol):
    """A version that may have a patch.

    `origin` says what its sequence counts: numbers of another origin mean other versions.
    """

    sequence: int
    origin: object

    def patch(self) -> CarriedPatch | None:
        """Return what changed since the version before, where the publisher has made that."""


@runtime_checkable
class PatchingSink(Protocol):
    """A version that is being written, maybe with a patch."""

    #: Elements of this rank that changed, once it is finished; None where there is no patch.
    changed: int | None
