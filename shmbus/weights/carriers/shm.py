"""The carrier ``shm``, written: versions in a slot pool in host memory.

Each rank copies its pieces once, into their place; `shm_reader` has the other side.

Invariant: a slot that is given up leaves the version before it in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from shmbus.pool import (
    PoolPublisher,
    PoolSpec,
    VersionWrite,
    WhenHeld,
    has_patch,
    put_piece,
)
from shmbus.weights.carriers.base import Promises
from shmbus.weights.carriers.shm_lasting import LastingCopies, LastingPieces
from shmbus.weights.carriers.shm_patch import (
    ComparedPieces,
    PlacedBytes,
    contiguous_parts,
    placed_bytes,
)
from shmbus.weights.copies import target_of_piece
from shmbus.weights.manifest import Manifest, TensorPlace
from shmbus.weights.memory import copy_tensor, payload_tensor, tensor_at, unowned
from shmbus.weights.patches import PatchPolicy, patch_capacity
from shmbus.weights.registered import RegisteredSlots
from shmbus.weights.seen import are_same
from shmbus.weights.source import LocalPiece
from shmbus.weights.staging import cross

__all__ = ["KIND", "PROMISES", "ShmWriter", "WhenHeld"]

KIND: Final = "weights"

PROMISES: Final = Promises(
    whole_version=True,
    late_readers=True,
    survives_publisher=True,
    survives_reboot=False,
    views=True,
    ranks=True,
    memory="`slots` times the model, in /dev/shm",
)

#: Room for a manifest that grows by a few names before the pool has to be made again.
_META_SPARE: Final = 1.25
#: Bytes of a device's tensors that are gathered before they cross: temporary ones stay until then.
PENDING_BYTES: Final = 1 << 30


class ShmWriter:
    """A rank of the publisher.

    Parameters
    ----------
    bus : str
        The bus that the weights belong to.
    manifest : Manifest
        The same on every rank.
    slots, max_slots : int, int | None
        Versions that have memory, and to how many that may grow.
    rank, world_size : int
        Of the publisher.
    when_held : "wait" | "skip" | "grow"
        See `shmbus.pool.PoolPublisher`.
    timeout : float
        Seconds.
    digests : bool
        Whether each block gets a digest.
    patches : float
        Share of elements up to which a version gets a patch too; 0 for none.
    label : str
        For messages.
    """

    name = "shm"
    promises = PROMISES

    def __init__(
        self,
        bus: str,
        manifest: Manifest,
        *,
        slots: int = 2,
        max_slots: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        when_held: WhenHeld = "wait",
        timeout: float = 60.0,
        digests: bool = False,
        patches: float = 0.0,
        label: str = "",
    ) -> None:
        self._manifest = manifest
        self._meta = manifest.encode()
        self._places = manifest.by_name()
        self._digests = digests
        self._policy = PatchPolicy() if patches else None
        #: Where pieces are cast or put together before they are compared; made when first needed.
        self._scratch: torch.Tensor | None = None
        #: Slots that devices write directly.
        self.registered = RegisteredSlots()
        #: By slot, what was found out of the pieces that a source gives again.
        self.known: dict[int, LastingPieces] = {}
        #: The same of pieces that are compared, in whichever slot.
        self.compared: ComparedPieces | None = None
        spec = PoolSpec(
            slot_bytes=manifest.total,
            slots=slots,
            max_slots=max_slots,
            meta_bytes=int(len(self._meta) * _META_SPARE),
            patch_bytes=patch_capacity(manifest, patches, world_size),
        )
        self._publisher = PoolPublisher(
            bus,
            KIND,
            rank=rank,
            world_size=world_size,
            spec=spec if rank == 0 else None,
            label=label,
            when_held=when_held,
            timeout=timeout,
        )

    def begin(self, version: int, text: str) -> _ShmSink | None:
        """Take a slot, or join the version that rank 0 writes; None where it was skipped."""
        wants = self._policy is not None and self._policy.wants()
        write = self._publisher.begin(
            version, self._manifest.total, meta=self._meta, text=text, patch=wants
        )
        if write is None:
            return None
        return _ShmSink(self, write)

    def scratch(self, size: int) -> torch.Tensor:
        """Return so many bytes that stay with this writer."""
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def close(self, *, remove: bool) -> None:
        """Leave the pool."""
        self.known, self.compared = {}, None
        self.registered.close()
        self._publisher.close(remove=remove)


class _ShmSink:
    """A slot that is being written."""

    def __init__(self, writer: ShmWriter, write: VersionWrite) -> None:
        self._writer = writer
        self._write = write
        self._payload: torch.Tensor | None = payload_tensor(write.buffer)
        self._pending: dict[torch.device, list[tuple[LocalPiece, torch.Tensor]]] = {}
        self._pending_bytes = 0
        self._compared = has_patch(write)
        self._tried = self._compared
        self._changes = 0
        self.changed: int | None = None
        self._lasting = LastingCopies(writer.known, write.slot)

    def put(self, piece: LocalPiece) -> int:
        """Copy a piece to its place, cast if need be."""
        assert self._payload is not None
        target = self._target(self._payload, piece)
        if self._compared:
            self._compare(self._writer._places[piece.name], piece)
        else:
            self._copy(target, piece)
        return target.numel() * target.element_size()

    def foresee(self, pieces: Sequence[LocalPiece]) -> None:
        """Begin to copy pieces of devices that were put into this slot before."""
        if not self._compared:
            self._lasting.foresee(pieces, self._register)

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Copy pieces that their source gives again, those of a device together."""
        if self._compared:
            return self._put_compared(pieces)
        assert self._payload is not None
        # Their own views of the slot: the payload's would keep it from being finished.
        whole = unowned(self._payload)
        return self._lasting.copy(
            pieces,
            lambda: LastingPieces(
                pieces, [self._target(whole, piece) for piece in pieces], self._may_cross
            ),
            self._register,
        )

    def _put_compared(self, pieces: Sequence[LocalPiece]) -> int:
        """Compare pieces that their source gives again."""
        assert self._payload is not None
        known = self._writer.compared
        if known is None or not are_same(known.pieces, pieces):
            for piece in pieces:
                self._target(self._payload, piece)  # raises where it is not inside its place
            known = self._writer.compared = ComparedPieces(pieces, self._writer._places)
        for piece, parts in zip(pieces, known.parts, strict=True):
            if parts is None:
                self.put(piece)
            else:
                for part in parts:
                    self._put_part(part)
        return known.nbytes

    def _register(self) -> None:
        assert self._payload is not None
        self._writer.registered.add(self._payload)

    def _may_cross(self, piece: LocalPiece) -> bool:
        """Whether it crosses with its neighbours: whole tensors do."""
        whole = self._writer._places[piece.name].shape == tuple(piece.tensor.shape)
        return piece.tensor.is_cuda and whole

    def _target(self, payload: torch.Tensor, piece: LocalPiece) -> torch.Tensor:
        """View a piece's place."""
        place = self._writer._places.get(piece.name)
        whole = None if place is None else tensor_at(payload, place)
        return target_of_piece(place, whole, piece)

    def _copy(self, target: torch.Tensor, piece: LocalPiece) -> None:
        """Copy a piece; whole tensors of a device cross with their neighbours."""
        source = piece.tensor
        if source.is_cuda:
            self._register()
        if not self._may_cross(piece):
            copy_tensor(target, source)
            return
        self._pending.setdefault(source.device, []).append((piece, target))
        self._pending_bytes += target.numel() * target.element_size()
        if self._pending_bytes >= PENDING_BYTES:
            self.settle()

    def _compare(self, place: TensorPlace, piece: LocalPiece) -> None:
        """Copy a piece, and pack what differs from the version before."""
        own = getattr(torch, place.dtype)
        for start, part in contiguous_parts(own, piece, self._writer.scratch):
            for placed in placed_bytes(place, start, part):
                self._put_part(placed)

    def _put_part(self, part: PlacedBytes) -> None:
        """Write bytes to their place, and pack what differs where the version has a patch."""
        changes = put_piece(self._write, *part)
        if changes is None:
            self._compared = False
        else:
            self._changes += changes

    def settle(self) -> None:
        """Wait until all pieces are copied."""
        self._lasting.settle()
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        for device, found in pending.items():
            cross(device, [(target, piece.tensor) for piece, target in found])

    def finish(self) -> None:
        """Publish."""
        self._payload = None
        self._write.finish(digests=self._writer._digests)
        made = has_patch(self._write)
        self.changed = self._changes if made else None
        if self._writer._policy is not None:
            self._writer._policy.ended(begun=self._tried, made=made)

    def give_up(self, reason: str) -> None:
        """Leave what was newest in force."""
        self._pending = {}
        try:
            self._lasting.settle()
        finally:
            self._payload = None
            self._write.give_up(reason)
