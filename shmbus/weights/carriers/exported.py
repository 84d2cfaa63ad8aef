"""Whole versions in exported memory: of a CUDA device, or a memfd of the host.

A pool's slot holds only the name of a buffer, exported once by rank 0; higher ranks map the buffer
and write their pieces in place, over peer access or from device to device.

Invariants: a version is published only after the device holds every byte; a slot's buffer is
written only under the slot's lock, held by readers until their device finished reading; a higher
rank writes only into buffers of the rank 0 that began the version, never of a predecessor or
successor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import torch

from shmbus import CapacityError
from shmbus.batch.uninterrupted import finalizer
from shmbus.data.encoding import decodable
from shmbus.errors import DamagedError, DeviceMismatchError, PeerGoneError, WeightsError
from shmbus.pool import VersionLease, VersionWrite
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import (
    Arena,
    ArenaView,
    BufferLostError,
    BufferName,
    Memory,
    MemoryKind,
    allocator,
)
from shmbus.tensors.device.driver import CudaDriverError
from shmbus.weights.carriers.interface import (
    KIND,
    LostVersionError,
    ReaderOptions,
    VersionMeta,
    WriterOptions,
)
from shmbus.weights.errors import ManifestError

#: Bytes of a slot, with MessagePack's longest numbers.
_PLACED_BYTES: Final = 64
_LENGTH_BYTES: Final = 4


@decodable
class Placed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content of a slot: place of the version's bytes."""

    buffer: BufferName
    total: int

    def encode(self) -> bytes:
        """Encode with a length prefix: a slot may be longer."""
        data = msgspec.msgpack.encode(self)
        return len(data).to_bytes(_LENGTH_BYTES, "little") + data

    @classmethod
    def decode(cls, data: bytes) -> Placed:
        """Decode a slot."""
        size = int.from_bytes(data[:_LENGTH_BYTES], "little")
        try:
            return msgspec.msgpack.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + size], type=cls)
        except msgspec.MsgspecError as error:
            raise DamagedError(
                f"the newest version's slot does not say where its bytes are ({error}); publish "
                "again, and look for a process that writes where it should not"
            ) from error


# -- writers --------------------------------------------------------------------------------------


class OwnBuffers:
    """Buffers of rank 0, one per slot; never replaced."""

    def __init__(self, path: str, kind: MemoryKind, device: torch.device) -> None:
        self._device = device
        self._arena = Arena(path, allocator(kind, device.index or 0))
        self.owner = self._arena.owner

    def buffer(self, owner: int, slot: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a slot's buffer; allocate it on first use."""
        assert owner == self.owner
        try:
            return self._arena.buffer(slot, nbytes)
        except (CudaDriverError, OSError) as error:
            raise CapacityError(
                f"no memory on {self._device} for a version of {nbytes} bytes ({error}); the "
                "weights that were published stay in force. Choose fewer slots, free some, or the "
                "carrier 'shm'"
            ) from error

    def close(self) -> None:
        """Stop listening and release the buffers; readers keep their mappings."""
        self._arena.close()


class LeadersBuffers:
    """Rank 0's buffers, mapped for writing by a higher rank."""

    def __init__(self, path: str, device: torch.device, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._index = (device.index or 0) if device.type == "cuda" else None
        self._owner = 0
        self._found: dict[int, tuple[BufferName, torch.Tensor]] = {}
        self._view = self._new_view()

    def _new_view(self) -> ArenaView:
        return ArenaView(
            self._path, device=self._index, or_owner=True, timeout=self._timeout, writable=True
        )

    def buffer(self, owner: int, slot: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a slot's buffer; map it on first use."""
        if owner != self._owner:
            self.close()
            self._owner, self._view = owner, self._new_view()
        if slot not in self._found:
            name = BufferName(slot, owner)
            memory = self._mapped(name)
            if memory.numel() < nbytes:
                raise WeightsError(
                    f"expected a buffer of {nbytes} bytes in rank 0, got one of {memory.numel()}; "
                    "let every rank publish the same"
                )
            self._found[slot] = name, memory
        return self._found[slot]

    def _mapped(self, name: BufferName) -> torch.Tensor:
        stays = "the version before it stays the newest"
        try:
            return self._view.memory(name).tensor()
        except (PeerGoneError, BufferLostError) as error:
            raise PeerGoneError(
                f"rank 0, which has the memory of this version, has ended ({error}); {stays}", 0
            ) from error
        except DeviceMismatchError as error:
            raise DeviceMismatchError(
                f"this rank cannot write to rank 0's device: {error}"
            ) from error
        except (CudaDriverError, OSError, ValueError) as error:
            raise WeightsError(
                f"rank 0's memory cannot be mapped here: {error}; {stays}. Use the carrier 'shm'"
            ) from error

    def close(self) -> None:
        """Release every buffer."""
        self._found = {}
        self._view.close()


class ExportedWriter:
    """Memory of versions in rank 0's buffers."""

    #: Meta of a version; None until rank 0 supplies it.
    meta: bytes | None = None
    patch_bytes = 0
    slot_bytes = _PLACED_BYTES

    def __init__(self, options: WriterOptions, kind: MemoryKind) -> None:
        self._options, self._kind = options, kind
        self._total = options.manifest.total
        self._said = VersionMeta(options.manifest.encode(), "exported")
        # Higher ranks adopt rank 0's `meta`: only rank 0 knows the memory's owner in advance.
        self.buffers: OwnBuffers | LeadersBuffers | None = None

    def open(self) -> None:
        """Allocate the buffers of every slot, in rank 0: fail now rather than during a step."""
        path, device = memory_socket(KIND, self._options.bus), self._options.device
        if self._options.rank:
            self.buffers = LeadersBuffers(path, device, self._options.timeout)
            return
        self.buffers = own = OwnBuffers(path, self._kind, device)
        self._said = VersionMeta(self._said.manifest, "exported", own.owner)
        self.meta = self._said.encode()
        for slot in range(self._options.slots):
            own.buffer(own.owner, slot, self._total)

    def _buffer(self, write: VersionWrite) -> tuple[BufferName, torch.Tensor]:
        assert self.buffers is not None
        said = self._said if self._options.rank == 0 else self._checked(write)
        return self.buffers.buffer(said.owner, write.slot, self._total)

    def payload(self, write: VersionWrite) -> torch.Tensor:
        """Return the slot's buffer."""
        return self._buffer(write)[1]

    def lasting(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the buffer, valid while this memory is open."""
        return payload

    def register(self, payload: torch.Tensor) -> None:
        """Do nothing: the device owns the buffer."""

    def _checked(self, write: VersionWrite) -> VersionMeta:
        """Return rank 0's meta after a comparison of the manifests."""
        try:
            said = VersionMeta.decode(write.meta)
        except ManifestError:
            said = None
        if said is None or said.memory != "exported" or said.manifest != self._said.manifest:
            other = said is None or said.memory != "exported"
            what = "by another carrier" if other else "with another manifest"
            raise WeightsError(
                f"rank {self._options.rank}: rank 0 publishes version {write.version} {what}; let "
                "every rank publish the same"
            )
        return said

    def finish(self, write: VersionWrite) -> None:
        """Publish in rank 0; report finished pieces in a higher rank."""
        if self._options.rank:
            write.finish()
            return
        name, _ = self._buffer(write)
        said = Placed(name, self._total).encode()
        memoryview(write.buffer)[: len(said)] = said
        # Digests of the small slot: they reveal a scribble over the buffer's name.
        write.finish(digests=True)

    def close(self) -> None:
        """Release the buffers; readers keep their mappings."""
        if self.buffers is not None:
            self.buffers.close()


# -- readers --------------------------------------------------------------------------------------


class ExportedReaders:
    """Maps the buffers of a publisher."""

    def __init__(self, options: ReaderOptions) -> None:
        device = options.device
        # A CUDA device also reads a peer device's memory, given peer access.
        index = device.index or 0 if device.type == "cuda" else None
        self._buffers = ArenaView(memory_socket(KIND, options.bus), device=index, or_owner=True)

    def open(self, lease: VersionLease) -> ExportedReader:
        """Map a version's buffer."""
        lease.check(0, 1)
        placed = Placed.decode(bytes(memoryview(lease.buffer)))
        try:
            memory = self._buffers.memory(placed.buffer)
        except (PeerGoneError, BufferLostError) as error:
            raise LostVersionError(
                f"version {lease.version} lay in the memory of its publisher, which has ended or "
                f"replaced it ({error}); start the publisher again, or use the carrier 'shm', "
                "whose versions outlive it",
                lease.sequence,
            ) from error
        except DeviceMismatchError as error:
            raise DeviceMismatchError(
                f"version {lease.version}: {error}. The weights that this process runs stay"
            ) from error
        except (CudaDriverError, OSError, ValueError) as error:
            raise WeightsError(
                f"version {lease.version} cannot be mapped here: {error}. The weights that this "
                "process runs stay; use the carrier 'shm'"
            ) from error
        if memory.nbytes < placed.total:
            raise WeightsError(
                f"version {lease.version}: expected a buffer of {placed.total} bytes, got one of "
                f"{memory.nbytes}; publish again"
            )
        return ExportedReader(lease, placed, memory)

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers.close()


class ExportedReader:
    """A version's bytes in a buffer of its publisher."""

    def __init__(self, lease: VersionLease, placed: Placed, memory: Memory) -> None:
        self._version, self._placed, self._memory = lease.version, placed, memory
        self._held: _Held | None = _Held(lease.buffer, memory.device)
        self.total = placed.total
        self.key = placed.buffer.number
        self.identity = placed.buffer

    def payload(self) -> torch.Tensor:
        """View the buffer; the views keep the slot."""
        payload, life = self._memory.lend()
        span: Any = life()
        span.held = self._held
        return payload

    def borrowed(self) -> torch.Tensor:
        """View the buffer."""
        return self._memory.tensor()

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Do nothing: the mapping is ready for copies."""

    def close(self) -> None:
        """Keep the slot no longer than the views do."""
        self._held = None


class _Held:
    """A slot's lock, dropped after the device finished the stream's queued work."""

    def __init__(self, buffer: object, device: torch.device) -> None:
        self._buffer, self._device, self._pid = buffer, device, os.getpid()

    @finalizer
    def __del__(self) -> None:
        # A forked child lacks the context; the parent owns the lease.
        if self._device.type == "cuda" and os.getpid() == self._pid and not sys.is_finalizing():
            torch.cuda.current_stream(self._device).synchronize()
