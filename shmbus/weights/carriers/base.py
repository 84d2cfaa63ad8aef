"""The interface of a carrier: how it is chosen, a writer's side, a reader's side.

Invariants that every carrier keeps: a version that a reader gets was finished by its writer; what
was newest stays so until then; a reader's views do not change for as long as it has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol

import torch

from shmbus.pool import WhenHeld
from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest
from shmbus.weights.patches import VersionChanges
from shmbus.weights.source import LocalPiece

#: One that is read, and one that is written.
DEFAULT_SLOTS: Final = 2


class WriterOptions(NamedTuple):
    """What a publisher was told; see `WeightPublisher`."""

    bus: str
    manifest: Manifest
    device: torch.device
    slots: int = DEFAULT_SLOTS
    max_slots: int | None = None
    rank: int = 0
    world_size: int = 1
    when_held: WhenHeld = "wait"
    timeout: float = 60.0
    digests: bool = False
    patches: bool | float = False
    directory: Path | str | None = None
    label: str = ""


class ReaderOptions(NamedTuple):
    """What a subscriber was told; see `WeightSubscriber`."""

    bus: str
    device: torch.device
    label: str = ""
    directory: Path | str | None = None


class VersionSink(Protocol):
    """A version that is being written."""

    #: Elements of this rank that changed, once it is finished; None where there is no patch.
    changed: int | None

    def put(self, piece: LocalPiece) -> int:
        """Copy a piece to its place; its bytes there."""

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Copy pieces that their source gives again for the next version; their bytes there."""

    def settle(self) -> None:
        """Wait until all pieces are copied: the parameters may change then."""

    def finish(self) -> None:
        """Make the version the newest, once all ranks have written theirs."""

    def give_up(self, reason: str) -> None:
        """Leave what was newest in force."""


class WriterCarrier(Protocol):
    """A publisher's side."""

    def begin(self, version: int, text: str) -> VersionSink | None:
        """Begin a version; None where the policy skipped it."""

    def close(self, *, remove: bool) -> None:
        """Leave; remove: nobody is to find the weights any more."""


class CarriedVersion(Protocol):
    """A version of a reader, until it is closed; nothing comes of what its carrier has not."""

    version: int
    sequence: int
    origin: object
    text: str
    manifest: Manifest

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the manifest's tensors by name."""

    @property
    def cache(self) -> LoadCache | None:
        """Return what was checked of the same memory before; None where none of it lasts."""
        return None

    def borrow(self) -> dict[str, torch.Tensor]:
        """Return the same, for as long as this object is open."""
        return self.tensors()

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Have copies to those devices be as fast as they can; what cannot be is no error."""
        return

    def patch(self) -> VersionChanges | None:
        """Return what changed since the version before, where the publisher has made that."""
        return None

    def base(self, patch: VersionChanges) -> torch.Tensor | None:
        """Return the bytes of the version that a patch was made from, where they are still here."""
        return None

    def verify(self, *, sample: bool) -> None:
        """Compare digests, of some blocks or of all."""

    def report_loading(self) -> None:
        """Say that this process has begun to load it, and runs no whole version now."""
        return

    def report_applied(self) -> None:
        """Say that this process runs it."""
        return

    def report_refused(self, code: int, reason: str) -> None:
        """Say that this process could not take it."""
        return

    def close(self) -> None:
        """Let go; tensors that are left keep what they need."""


class ReaderCarrier(Protocol):
    """A subscriber's side."""

    def latest(self, after: int, timeout: float | None) -> CarriedVersion:
        """Wait for a version whose sequence is above `after`."""

    def at(self, version: int) -> CarriedVersion:
        """Return a version that is still there, newest or not."""

    def removed(self) -> bool:
        """Whether what it reads has lost its name, so that nothing newer comes there."""

    def close(self) -> None:
        """Leave."""


class Carrier(ABC):
    """A way for weights to travel: whether it serves here, and its two sides; see `CARRIERS`."""

    #: What speaks for it where it serves.
    why: ClassVar[tuple[str, ...]] = ()
    #: Why "auto" does not choose it; empty where it may.
    by_name_only: ClassVar[str] = ""
    #: Whether it takes `directory`.
    takes_directory: ClassVar[bool] = False
    #: Whether its versions may have patches.
    takes_patches: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def problem(cls, device: torch.device, size: int, directory: Path | str | None) -> str:
        """Say why it cannot serve here, empty where it can; nothing is allocated to find out."""

    @classmethod
    @abstractmethod
    def writer(cls, options: WriterOptions) -> WriterCarrier:
        """Make a publisher's side; raise where an option is another carrier's."""

    @classmethod
    @abstractmethod
    def reader(cls, options: ReaderOptions) -> ReaderCarrier:
        """Make a subscriber's side."""
