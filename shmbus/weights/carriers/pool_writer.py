"""A publisher's ranks on a slot pool, for any place of a version's bytes: `SlotWriter`, `exported`.

Invariant: an abandoned slot leaves the previous version in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from shmbus.pool import PoolPublisher, PoolSpec, VersionWrite
from shmbus.tensors.copy_plan import CopyPlan, settle_devices
from shmbus.tensors.copy_table import Pair
from shmbus.tensors.device.registration import RegisteredSlots
from shmbus.tensors.tensor_cache import are_same
from shmbus.tensors.views import copy_tensor, payload_tensor, tensor_at, unowned
from shmbus.weights.carriers.exported import ExportedWriter
from shmbus.weights.carriers.interface import KIND, VersionMeta, WriterOptions
from shmbus.weights.patch_policy import (
    ComparedPieces,
    PatchPolicy,
    PlacedBytes,
    contiguous_parts,
    patch_capacity,
    patch_share,
    placed_bytes,
)
from shmbus.weights.weight_source import LocalPiece, target_of_piece
from shmbus_ext import _core

#: Spare room: a manifest may gain a few names before the pool must be recreated.
_META_SPARE: Final = 1.25
#: Bytes of a version's meta beside the manifest.
_META_BYTES: Final = 64
#: Limit for device tensors created for this version and kept for a joint copy, in bytes.
PENDING_BYTES: Final = 64 << 20


class SlotWriter:
    """Memory of versions inside the slots."""

    def __init__(self, options: WriterOptions) -> None:
        manifest = options.manifest
        self._digests = options.digests
        #: Slots registered for direct device writes.
        self._registered = RegisteredSlots()
        self.meta = VersionMeta(manifest.encode()).encode()
        self.slot_bytes = manifest.total
        share = patch_share(options.patches)
        self.patch_bytes = patch_capacity(manifest, share, options.world_size)

    def open(self) -> None:
        """Do nothing: the pool has the memory."""

    def payload(self, write: VersionWrite) -> torch.Tensor:
        """View the slot."""
        return payload_tensor(write.buffer)

    def lasting(self, payload: torch.Tensor) -> torch.Tensor:
        """View the slot without blocking its completion."""
        return unowned(payload)

    def register(self, payload: torch.Tensor) -> None:
        """Register the slot with CUDA, once."""
        self._registered.add(payload)

    def finish(self, write: VersionWrite) -> None:
        """Publish."""
        write.finish(digests=self._digests)

    def close(self) -> None:
        """Unregister the slots."""
        self._registered.close()


#: Memory for a rank's writes of versions.
WriteMemory: TypeAlias = SlotWriter | ExportedWriter


class _LastingCopies(NamedTuple):
    """Reusable pieces of a source, with the copies into one slot."""

    pieces: Sequence[LocalPiece]  # kept alive: no new object may reuse their ids
    address: int
    plan: CopyPlan


class PoolWriter:
    """A rank of the publisher."""

    def __init__(self, options: WriterOptions, memory: WriteMemory) -> None:
        self.memory = memory
        self.places = options.manifest.by_name()
        self.policy = PatchPolicy() if memory.patch_bytes else None
        #: By slot.
        self.known: dict[int, _LastingCopies] = {}
        #: Reusable compared pieces, independent of the slot.
        self.compared: ComparedPieces | None = None
        #: Scratch memory for casts and joins before a comparison; allocated on first use.
        self._scratch: torch.Tensor | None = None
        said = len(options.manifest.encode())
        spec = PoolSpec(
            slot_bytes=memory.slot_bytes,
            slots=options.slots,
            max_slots=options.max_slots,
            meta_bytes=int((said + _META_BYTES) * _META_SPARE),
            patch_bytes=memory.patch_bytes,
        )
        self._publisher = PoolPublisher(
            options.bus,
            KIND,
            rank=options.rank,
            world_size=options.world_size,
            spec=spec if options.rank == 0 else None,
            label=options.label,
            when_held=options.when_held,
            timeout=options.timeout,
        )
        try:
            memory.open()
        except BaseException:
            self.close(remove=True)
            raise

    def begin(self, version: int, text: str) -> PoolSink | None:
        """Take a slot, or join rank 0's version; return None for a skipped version."""
        memory = self.memory
        wants = self.policy is not None and self.policy.wants()
        write = self._publisher.begin(
            version, memory.slot_bytes, meta=memory.meta, text=text, patch=wants
        )
        if write is None:
            return None
        try:
            return PoolSink(self, write, memory.payload(write))
        except BaseException as error:
            write.give_up(str(error))
            raise

    def scratch(self, size: int) -> torch.Tensor:
        """Return scratch memory of the given bytes, reused by this writer."""
        if self._scratch is None or self._scratch.numel() < size:
            # The target of copies from a device.
            pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._scratch = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._scratch[:size]

    def close(self, *, remove: bool) -> None:
        """Leave the pool, and let go of the memory."""
        self.known, self.compared = {}, None
        self.memory.close()
        self._publisher.close(remove=remove)


class PoolSink:
    """Version under construction."""

    def __init__(self, writer: PoolWriter, write: VersionWrite, payload: torch.Tensor) -> None:
        self._writer, self._write = writer, write
        self._payload: torch.Tensor | None = payload
        #: Copies from and to devices, each with a flag for a whole tensor.
        self._pending: list[tuple[Pair, bool]] = []
        self._pending_bytes = 0
        self._compared = _core.pool_patch_is_made(write.buffer)
        self._tried = self._compared
        self._changes = 0
        self._settled = False
        self.changed: int | None = None

    def put(self, piece: LocalPiece) -> int:
        """Copy a piece to its place, cast if needed; collect device pieces for a joint copy."""
        assert self._payload is not None
        target = self._target(self._payload, piece)
        size = target.numel() * target.element_size()
        if self._compared:
            place = self._writer.places[piece.name]
            own: torch.dtype = getattr(torch, place.dtype)
            for start, part in contiguous_parts(own, piece, self._writer.scratch):
                for placed in placed_bytes(place, start, part):
                    self._put_part(placed)
        elif not (target.is_cuda or piece.tensor.is_cuda):
            copy_tensor(target, piece.tensor)
        else:
            self._pending.append(((target, piece.tensor), self._is_whole(piece)))
            self._pending_bytes += size
            if self._pending_bytes >= PENDING_BYTES:
                self._flush()
        return size

    def put_lasting(self, pieces: Sequence[LocalPiece]) -> int:
        """Copy a source's reusable pieces, together."""
        assert self._payload is not None
        if self._compared:
            return self._put_compared(pieces)
        known = self._writer.known.get(self._write.slot)
        address = self._payload.data_ptr()
        if known is None or known.address != address or not are_same(known.pieces, pieces):
            whole = self._writer.memory.lasting(self._payload)
            pairs = [(self._target(whole, piece), piece.tensor) for piece in pieces]
            plan = CopyPlan(pairs, whole=[*map(self._is_whole, pieces)])
            known = self._writer.known[self._write.slot] = _LastingCopies(pieces, address, plan)
        self._begin(known.plan)
        return known.plan.nbytes

    def _put_compared(self, pieces: Sequence[LocalPiece]) -> int:
        assert self._payload is not None
        known = self._writer.compared
        if known is None or not are_same(known.pieces, pieces):
            for piece in pieces:
                self._target(self._payload, piece)  # raises for a piece outside its place
            known = self._writer.compared = ComparedPieces(pieces, self._writer.places)
        for piece, parts in zip(pieces, known.parts, strict=True):
            if parts is None:
                self.put(piece)
            else:
                for part in parts:
                    self._put_part(part)
        return known.nbytes

    def _target(self, payload: torch.Tensor, piece: LocalPiece) -> torch.Tensor:
        place = self._writer.places.get(piece.name)
        whole = None if place is None else tensor_at(payload, place)
        return target_of_piece(place, whole, piece)

    def _is_whole(self, piece: LocalPiece) -> bool:
        return self._writer.places[piece.name].shape == tuple(piece.tensor.shape)

    def _put_part(self, part: PlacedBytes) -> None:
        """Write bytes to their place; if the version carries a patch, pack the differences."""
        changes = self._write.put_piece(*part)
        if changes is None:
            self._compared = False
        else:
            self._changes += changes

    def _begin(self, plan: CopyPlan) -> None:
        assert self._payload is not None
        if plan.crossing:
            self._writer.memory.register(self._payload)
        plan.begin()

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if pending:
            pairs, whole = zip(*pending, strict=True)
            self._begin(CopyPlan(pairs, whole=whole))

    def settle(self) -> None:
        """Wait until every piece is copied."""
        self._flush()
        if self._payload is not None:
            settle_devices([self._payload])
        self._settled = True

    def finish(self) -> None:
        """Publish in rank 0; report finished pieces in a higher rank."""
        if not self._settled:
            self.settle()
        self._payload = None
        self._writer.memory.finish(self._write)
        made = _core.pool_patch_is_made(self._write.buffer)
        self.changed = self._changes if made else None
        if self._writer.policy is not None:
            self._writer.policy.ended(begun=self._tried, made=made)

    def give_up(self, reason: str) -> None:
        """Keep the previous version in force; free the slot only after the device released it."""
        self._pending = []
        try:
            if self._payload is not None:
                settle_devices([self._payload])
        finally:
            self._payload = None
            self._write.give_up(reason)
