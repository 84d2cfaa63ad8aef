"""Reading whichever carrier of a pool the publisher chose: slots in /dev/shm, or exported memory.

Invariant: a version whose memory went with its publisher is no version: what follows it is waited
for, and the error says so.
"""

from __future__ import annotations

import time

import msgspec
import torch

from shmbus.errors import DeviceMismatchError, PeerGoneError, WaitTimeoutError, WeightsError
from shmbus.pool import PoolReader, VersionLease
from shmbus.segment.names import memory_socket
from shmbus.tensors.device.arena import (
    ArenaView,
    BufferLostError,
    BufferName,
    Memory,
)
from shmbus.tensors.device.driver import CudaDriverError
from shmbus.tensors.device.streams import wake
from shmbus.weights.carriers.base import CarriedVersion
from shmbus.weights.carriers.exported import (
    KIND,
    Borrowed,
    ExportedVersion,
    Placed,
    Said,
)
from shmbus.weights.carriers.shm_reader import ShmReader, ShmVersion
from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest
from shmbus.weights.memory import payload_tensor, unowned

__all__ = ["PooledReader"]


class _LostVersionError(WeightsError):
    """A version whose memory went with its publisher."""

    def __init__(self, message: str, sequence: int) -> None:
        super().__init__(message)
        self.sequence = sequence


class _Slot:
    """A slot's bytes, as `Borrowed` takes memory; the pool's mapping keeps them."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._payload = payload

    def tensor(self) -> torch.Tensor:
        """Return all of them."""
        return self._payload


class _SlotVersion(ShmVersion):
    """A version in a slot, of which what was checked is kept."""

    borrowed: Borrowed

    @property
    def cache(self) -> LoadCache:
        """Return what was checked of this slot before."""
        return self.borrowed.cache

    def borrow(self) -> dict[str, torch.Tensor]:
        """View every tensor for as long as this object is open: made once for each slot."""
        return self.borrowed.tensors


class PooledReader(ShmReader):
    """A subscriber of a pool.

    Parameters
    ----------
    bus : str
        The bus that the weights belong to.
    label, device : str
        For messages; a CUDA device also reads what lies on another one, where it has peer access.
    """

    def __init__(self, bus: str, *, label: str = "", device: str = "") -> None:
        super().__init__(bus, label=label, device=device)
        wanted = torch.device(device or "cpu")
        index = wanted.index or 0 if wanted.type == "cuda" else None
        self._buffers = ArenaView(memory_socket(KIND, bus), device=index, or_owner=True)
        self._decoded: tuple[bytes, Manifest] | None = None
        self._borrowed: dict[int, Borrowed] = {}
        self._in_slots: dict[int, Borrowed] = {}
        self._slots_of: PoolReader | None = None

    def latest(self, after: int, timeout: float | None) -> CarriedVersion:
        """Wait for a version, as `ShmReader.latest` does; one that is lost does not count.

        Raises
        ------
        WaitTimeoutError
            None came.
        WeightsError
            The newest one is lost, and none came after it.
        DamagedError, ManifestError, DeviceMismatchError
            It cannot be used; the reader's row says so.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        lost: _LostVersionError | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return super().latest(after if lost is None else lost.sequence, left)
            except _LostVersionError as error:
                lost = error
            except WaitTimeoutError as error:
                if lost is None:
                    raise
                raise WeightsError(str(lost)) from error

    def open_version(self, lease: VersionLease, reader: PoolReader) -> CarriedVersion:
        """Check a version, and map what it lies in."""
        meta = lease.meta()
        lease.check(0, 0 if not lease.digests else 1)
        try:
            said = msgspec.msgpack.decode(meta, type=Said)
        except msgspec.MsgspecError:
            return self._in_slot(lease, reader, self._manifest(meta, lease.size))
        placed = Placed.decode(bytes(memoryview(lease.buffer)))
        manifest = self._manifest(said.manifest, placed.total)
        try:
            memory = self._buffers.memory(placed.buffer)
        except (PeerGoneError, BufferLostError) as error:
            raise _LostVersionError(
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
        if memory.nbytes < manifest.total:
            raise WeightsError(
                f"version {lease.version}: expected a buffer of {manifest.total} bytes, got one of "
                f"{memory.nbytes}; publish again"
            )
        wake(memory.device)  # what it is leased for is to read it
        borrowed = self._borrowed_of(placed.buffer, memory, manifest)
        return ExportedVersion(lease, reader, manifest, placed, memory, borrowed)

    def _in_slot(
        self, lease: VersionLease, reader: PoolReader, manifest: Manifest
    ) -> CarriedVersion:
        """Return a version of the carrier "shm"; what was checked of its slot is kept."""
        version = _SlotVersion(lease, reader, self._registered, manifest)
        if reader is not self._slots_of:  # the pool was made again: other memory
            self._slots_of, self._in_slots = reader, {}
        payload = payload_tensor(lease.buffer)
        address = payload.data_ptr()
        found = self._in_slots.get(address)
        if found is None or found.manifest is not manifest:
            found = Borrowed(BufferName(0, 0), _Slot(unowned(payload)), manifest)
            self._in_slots[address] = found
        version.borrowed = found
        return version

    def _borrowed_of(self, name: BufferName, memory: Memory, manifest: Manifest) -> Borrowed:
        """Return a buffer's tensors, made once for each generation and manifest."""
        found = self._borrowed.get(name.number)
        if found is None or found.name != name or found.manifest is not manifest:
            found = self._borrowed[name.number] = Borrowed(name, memory, manifest)
        return found

    def _manifest(self, data: bytes, total: int) -> Manifest:
        """Return a manifest, decoded and checked once for all versions that have the same."""
        if self._decoded is None or self._decoded[0] != data or self._decoded[1].total != total:
            self._decoded = data, Manifest.decode(data, total)
        return self._decoded[1]

    def close(self) -> None:
        """Leave the pool; versions that are out keep what they need."""
        super().close()
        self._borrowed, self._in_slots = {}, {}
        self._buffers.close()
