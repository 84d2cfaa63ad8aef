"""Interfaces of a carrier: its choice, a writer's side, a reader's side; memory of versions.

Invariants of every carrier: a reader gets only finished versions; until then the previous version
stays the newest; a reader's views never change during their life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
import torch

from shmbus.data.encoding import decodable
from shmbus.errors import WeightsError
from shmbus.pool import VersionWrite, WhenHeld
from shmbus.weights.errors import ManifestError
from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest
from shmbus.weights.weight_source import LocalPiece

KIND: Final = "weights"
#: A slot for readers, and a slot for the writer.
DEFAULT_SLOTS: Final = 2
#: Blocks compared by a sample: a scribble over a hundredth of the bytes is found once in three
#: times, and each block costs a hundredth of reading a model of a hundred blocks.
SAMPLED_BLOCKS: Final = 4


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


class Carrier(NamedTuple):
    """Carrier of weights: a check of this machine, and two sides."""

    #: From a device, bytes of every slot and a directory: the reason against the carrier on this
    #: machine, or ""; allocates nothing.
    problem: Callable[[torch.device, int, Path | str | None], str]
    #: Raises for another carrier's option.
    writer: Callable[[WriterOptions], WriterCarrier]
    reader: Callable[[ReaderOptions], ReaderCarrier]
    #: Advantages, shown with the choice.
    why: tuple[str, ...] = ()
    #: Reason against a choice by "auto"; empty if "auto" may choose the carrier.
    by_name_only: str = ""
    takes_directory: bool = False
    takes_patches: bool = False


# -- places of versions in a slot pool ------------------------------------------------------------


@decodable
class VersionMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="weights"):
    """Meta of a version."""

    manifest: bytes
    memory: Literal["slot", "exported"] = "slot"
    owner: int = 0

    def encode(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> VersionMeta:
        """Decode; raise ManifestError for invalid data."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ManifestError(
                "the manifest of these weights cannot be used, and nothing was read of them",
                [str(error)],
            ) from error


class WriteMemory:
    """Memory for a rank's writes of versions."""

    #: Meta of a version; None until rank 0 supplies it.
    meta: bytes | None = None
    slot_bytes: int
    patch_bytes = 0

    def open(self) -> None:
        """Acquire resources, once this process is a rank of the pool."""

    def payload(self, write: VersionWrite) -> torch.Tensor:
        """Return the bytes of the version under construction."""
        raise NotImplementedError

    def lasting(self, payload: torch.Tensor) -> torch.Tensor:
        """View the same bytes, valid while this memory is open."""
        return payload

    def register(self, payload: torch.Tensor) -> None:
        """Let devices write host memory directly where possible."""

    def finish(self, write: VersionWrite) -> None:
        """Publish the version; this process no longer touches its slot."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the memory; idempotent."""


class LostVersionError(WeightsError, documented=False):
    """Version whose memory vanished with its publisher."""

    def __init__(self, message: str, sequence: int) -> None:
        super().__init__(message)
        self.sequence = sequence


class VersionMemory:
    """Memory of a leased version's bytes."""

    total: int
    #: Key of the memory, stable across versions, and a value that reveals a change of it.
    key: object
    identity: object

    def payload(self) -> torch.Tensor:
        """View the bytes; the views keep the slot."""
        raise NotImplementedError

    def borrowed(self) -> torch.Tensor:
        """View the bytes, valid during the lease."""
        raise NotImplementedError

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Speed up copies to the devices where possible."""

    def verify(self, *, sample: bool) -> None:
        """Compare digests of some blocks, or of every block."""
        raise NotImplementedError

    def close(self) -> None:
        """Keep the slot no longer than the views do."""


def no_digests(version: int) -> WeightsError:
    """Build the error of an unverifiable version."""
    return WeightsError(
        f"version {version} was published without digests, so nothing can be verified; make the "
        "publisher with digests=True, or subscribe with verify='off'"
    )
