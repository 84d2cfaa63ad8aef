"""What the carriers of weights share: options of both sides, and the meta of a version.

Invariants of every carrier: a reader gets only finished versions; until then the previous version
stays the newest; a reader's views never change during their life.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import torch

from shmbus.data.encoding import decodable
from shmbus.errors import WeightsError
from shmbus.pool import WhenHeld
from shmbus.weights.errors import ManifestError
from shmbus.weights.manifest import Manifest

KIND: Final = "weights"
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


class LostVersionError(WeightsError, documented=False):
    """Version whose memory vanished with its publisher."""

    def __init__(self, message: str, sequence: int) -> None:
        super().__init__(message)
        self.sequence = sequence
