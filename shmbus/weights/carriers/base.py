"""The interface of a carrier: a writer's side, a reader's side, and what is promised.

Invariants that every carrier keeps: a version that a reader gets was finished by its writer; what
was newest stays so until then; a reader's views do not change for as long as it has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import torch

from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest
from shmbus.weights.source import LocalPiece

__all__ = [
    "CarriedVersion",
    "Promises",
    "ReaderCarrier",
    "RepeatingSink",
    "VersionSink",
    "WriterCarrier",
]


class Promises(msgspec.Struct, frozen=True, kw_only=True):
    """What a carrier keeps.

    Attributes
    ----------
    whole_version : bool
        A reader never sees a part of a version, whoever dies.
    late_readers : bool
        A reader that comes later gets the newest version without the publisher's help.
    survives_publisher : bool
        The newest version stays readable when the publisher has died.
    survives_reboot : bool
        It also stays when the machine was restarted.
    views : bool
        Tensors are views of shared memory: attaching copies no byte.
    ranks : bool
        Several ranks may write one version.
    memory : str
        What it costs.
    """

    whole_version: bool
    late_readers: bool
    survives_publisher: bool
    survives_reboot: bool
    views: bool
    ranks: bool
    memory: str


class VersionSink(Protocol):
    """A version that is being written."""

    def put(self, piece: LocalPiece) -> int:
        """Copy a piece to its place; its bytes there."""

    def settle(self) -> None:
        """Wait until all pieces are copied: the parameters may change then."""

    def finish(self) -> None:
        """Make the version the newest, once all ranks have written theirs."""

    def give_up(self, reason: str) -> None:
        """Leave what was newest in force."""


@runtime_checkable
class RepeatingSink(Protocol):
    """A version whose pieces may be those of the last version in the same slot."""

    def foresee(self, pieces: Sequence[LocalPiece]) -> None:
        """Begin to copy what will probably be put; a device does so while the rest is found out.

        Whatever is put afterwards is written later.
        """

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Copy pieces that their source gives again; their bytes there.

        What was found out about the same ones is not found out again.
        """


class WriterCarrier(Protocol):
    """A publisher's side."""

    name: str
    promises: Promises

    def begin(self, version: int, text: str) -> VersionSink | None:
        """Begin a version; None where the policy skipped it."""

    def close(self, *, remove: bool) -> None:
        """Leave; remove: nobody is to find the weights any more."""


class CarriedVersion(Protocol):
    """A version that a reader has, until it is closed.

    `origin` says what its sequence counts: numbers of another origin mean other versions.
    """

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

    def borrow(self) -> dict[str, torch.Tensor]:
        """Return the same, for as long as this object is open."""

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Have copies to those devices be as fast as they can; what cannot be is no error."""

    def verify(self, *, sample: bool) -> None:
        """Compare digests, of some blocks or of all."""

    def loading(self) -> None:
        """Say that this process has begun to load it, and runs no whole version now."""

    def applied(self) -> None:
        """Say that this process runs it."""

    def refused(self, code: int, reason: str) -> None:
        """Say that this process could not take it."""

    def close(self) -> None:
        """Let go; tensors that are left keep what they need."""


class ReaderCarrier(Protocol):
    """A subscriber's side."""

    name: str
    promises: Promises

    def latest(self, after: int, timeout: float | None) -> CarriedVersion:
        """Wait for a version whose sequence is above `after`."""

    def at(self, version: int) -> CarriedVersion:
        """Return a version that is still there, newest or not."""

    def removed(self) -> bool:
        """Whether what it reads has lost its name, so that nothing newer comes there."""

    def close(self) -> None:
        """Leave."""
