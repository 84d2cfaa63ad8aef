"""Interface of a carrier: its choice, a writer's side, a reader's side.

Invariants of every carrier: a reader gets only finished versions; until then the previous version
stays the newest; a reader's views never change during their life.
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

#: A slot for readers, and a slot for the writer.
DEFAULT_SLOTS: Final = 2


class WriterOptions(NamedTuple):
    """Options of a publisher; see `WeightPublisher`."""

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
    """Options of a subscriber; see `WeightSubscriber`."""

    bus: str
    device: torch.device
    label: str = ""
    directory: Path | str | None = None


class VersionSink(Protocol):
    """Version under construction."""

    #: Number of this rank's changed elements, set by `finish`; None without a patch.
    changed: int | None

    def put(self, piece: LocalPiece) -> int:
        """Copy a piece to its place; return its bytes."""

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Copy pieces that their source reuses for the next version; return their bytes."""

    def settle(self) -> None:
        """Wait until every piece is copied: from then on the parameters may change."""

    def finish(self) -> None:
        """Make the version the newest, after every rank wrote its pieces."""

    def give_up(self, reason: str) -> None:
        """Abandon the version; the previous one stays in force."""


class WriterCarrier(Protocol):
    """A publisher's side."""

    def begin(self, version: int, text: str) -> VersionSink | None:
        """Begin a version; return None if the policy skipped it."""

    def close(self, *, remove: bool) -> None:
        """Leave; with `remove`, hide the weights from later readers."""


class CarriedVersion(Protocol):
    """A reader's version, until closed; the carrier ignores unsupported calls."""

    version: int
    sequence: int
    origin: object
    text: str
    manifest: Manifest

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the manifest's tensors by name."""

    @property
    def cache(self) -> LoadCache | None:
        """Return earlier checks of the same memory; None if none of the memory lasts."""
        return None

    def borrow(self) -> dict[str, torch.Tensor]:
        """Return `tensors()`, valid until `close`."""
        return self.tensors()

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Speed up copies to the devices where possible; never fail."""
        return

    def patch(self) -> VersionChanges | None:
        """Return the changes since the previous version; None without a patch."""
        return None

    def verify(self, *, sample: bool) -> None:
        """Compare digests of some blocks, or of every block."""

    def report_loading(self) -> None:
        """Report the start of a load: this process runs no whole version now."""
        return

    def report_applied(self) -> None:
        """Report the version as running in this process."""
        return

    def report_refused(self, code: int, reason: str) -> None:
        """Report the version as refused by this process."""
        return

    def close(self) -> None:
        """Release the version; surviving tensors keep their memory."""


class ReaderCarrier(Protocol):
    """A subscriber's side."""

    def latest(self, after: int, timeout: float | None) -> CarriedVersion:
        """Wait for a version with a sequence above `after`."""

    def at(self, version: int) -> CarriedVersion:
        """Return a surviving version, not necessarily the newest."""

    def removed(self) -> bool:
        """Return whether the reader's source lost its name: no newer version will come."""

    def close(self) -> None:
        """Leave."""


class Carrier(ABC):
    """Carrier of weights: a check of this machine, and two sides; see `CARRIERS`."""

    #: Advantages, shown with the choice.
    why: ClassVar[tuple[str, ...]] = ()
    #: Reason against a choice by "auto"; empty if "auto" may choose the carrier.
    by_name_only: ClassVar[str] = ""
    #: True for a carrier with the option `directory`.
    takes_directory: ClassVar[bool] = False
    #: True for a carrier whose versions may carry patches.
    takes_patches: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def problem(cls, device: torch.device, size: int, directory: Path | str | None) -> str:
        """Return the reason against the carrier on this machine, or ""; allocate nothing."""

    @classmethod
    @abstractmethod
    def writer(cls, options: WriterOptions) -> WriterCarrier:
        """Make a publisher's side; raise for another carrier's option."""

    @classmethod
    @abstractmethod
    def reader(cls, options: ReaderOptions) -> ReaderCarrier:
        """Make a subscriber's side."""
