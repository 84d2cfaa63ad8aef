"""Reader of a slot pool, for any place of a version's bytes: `SlotReader`, `exported`.

Invariants: an unusable version is refused in the reader's row, and its lease ends; a version whose
memory vanished with its publisher does not count: the reader waits for the next version, and the
error says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, TypeAlias

import torch

from shmbus import BusNotFoundError, BusRemovedError
from shmbus.errors import DamagedError, WaitTimeoutError, WeightsError
from shmbus.pool import PoolReader, VersionLease
from shmbus.pool.pool_status import LOADING_CODE
from shmbus.pool.server_rows import server_of_label
from shmbus.tensors.device.registration import RegisteredSlots
from shmbus.tensors.views import payload_tensor, tensor_at, unowned
from shmbus.weights.carriers.exported import ExportedReader, ExportedReaders
from shmbus.weights.carriers.interface import KIND, LostVersionError, ReaderOptions, VersionMeta
from shmbus.weights.errors import MANIFEST_CODE, TORN_CODE, UNUSABLE
from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest

#: Seconds between two attempts to open a missing pool.
_RETRY_S: Final = 0.05


class SlotReader:
    """A version's bytes in its slot."""

    def __init__(
        self, lease: VersionLease, reader: PoolReader, registered: RegisteredSlots
    ) -> None:
        self._lease, self._registered = lease, registered
        self.total = lease.size
        self.key: object = payload_tensor(lease.buffer).data_ptr()
        self.identity: object = reader

    def payload(self) -> torch.Tensor:
        """View the slot."""
        return payload_tensor(self._lease.buffer)

    def borrowed(self) -> torch.Tensor:
        """View the slot without keeping it."""
        return unowned(payload_tensor(self._lease.buffer))

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Register the slot with CUDA, once, for copies to a device."""
        if any(device.type == "cuda" for device in devices):
            self._registered.add(payload_tensor(self._lease.buffer), read_only=True)

    def close(self) -> None:
        """Do nothing: the views alone keep the slot."""


#: Memory of a leased version's bytes. `key` names the memory across versions, and `identity`
#: reveals a change of the memory.
VersionMemory: TypeAlias = SlotReader | ExportedReader


class BorrowedTensors:
    """Lease-free tensors of a slot, with earlier checks of them."""

    def __init__(self, memory: VersionMemory, manifest: Manifest) -> None:
        payload = memory.borrowed()
        self.identity, self.manifest = memory.identity, manifest
        self.tensors = {place.name: tensor_at(payload, place) for place in manifest.tensors}
        self.cache = LoadCache()


class PooledVersion:
    """Leased version in any memory; the reader's row records the outcome."""

    def __init__(
        self,
        lease: VersionLease,
        reader: PoolReader,
        manifest: Manifest,
        memory: VersionMemory,
        borrowed: BorrowedTensors,
    ) -> None:
        self._lease, self._reader = lease, reader
        self._memory, self._borrowed = memory, borrowed
        self.version, self.sequence, self.text = lease.version, lease.sequence, lease.text
        self.origin = reader.identity
        self.manifest = manifest

    def tensors(self) -> dict[str, torch.Tensor]:
        """View every tensor, zero-copy. The views keep the slot."""
        payload = self._memory.payload()
        return {place.name: tensor_at(payload, place) for place in self.manifest.tensors}

    @property
    def cache(self) -> LoadCache:
        """Return earlier checks of this slot."""
        return self._borrowed.cache

    def borrow(self) -> dict[str, torch.Tensor]:
        """View every tensor while this object is open; the views are cached per slot."""
        return self._borrowed.tensors

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Speed up copies to the devices where possible."""
        self._memory.prepare(devices)

    # Without a reader row the reports do nothing.

    def report_loading(self) -> None:
        """Report the start of a load."""
        if not self._reader.pool.closed:
            self._reader.loading(self._lease, LOADING_CODE)

    def report_applied(self) -> None:
        """Report the version as running in this process."""
        if not self._reader.pool.closed:
            self._reader.applied(self._lease)

    def report_refused(self, code: int, reason: str) -> None:
        """Report the version as refused by this process."""
        if not self._reader.pool.closed:
            self._reader.refused(self._lease, code, reason)

    def close(self) -> None:
        """Release the lease; surviving views keep the slot."""
        self._memory.close()
        self._lease.close()


class PooledReader:
    """Reader of a pool, for any carrier of its publisher."""

    def __init__(self, options: ReaderOptions) -> None:
        self._options = options
        self._reader: PoolReader | None = None
        self._registered = RegisteredSlots()
        #: Maps of exported memory; created for the first exported version.
        self._exports: ExportedReaders | None = None
        self._decoded: tuple[bytes, Manifest] | None = None
        self._borrowed: dict[object, BorrowedTensors] = {}

    def latest(self, after: int, timeout: float | None) -> PooledVersion:
        """Wait for a version; after a recreation of the pool, any version counts."""
        deadline = None if timeout is None else time.monotonic() + timeout
        lost: LostVersionError | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                reader = self._reader = self._reader or self._attach(left)
                lease = reader.latest(after=after if lost is None else lost.sequence, timeout=left)
                return self._opened(lease, reader)
            except BusRemovedError:
                self._forget_pool()
                after, lost = 0, None  # a new pool counts from 1
            except LostVersionError as error:
                lost = error
            except WaitTimeoutError as error:
                if lost is None:
                    raise
                raise WeightsError(str(lost)) from error

    def at(self, version: int) -> PooledVersion:
        """Lease a surviving version, not necessarily the newest."""
        reader = self._reader = self._reader or self._attach(0.0)
        lease = reader.at(version)
        return self._opened(lease, reader)

    def removed(self) -> bool:
        """Return whether the reader's pool lost its name."""
        return self._reader is not None and self._reader.is_removed()

    def _forget_pool(self) -> None:
        reader, self._reader = self._reader, None
        self._registered.close()
        self._borrowed = {}
        if reader is not None:
            reader.close()

    def _opened(self, lease: VersionLease, reader: PoolReader) -> PooledVersion:
        """Check a version; record an unusable version in the reader's row."""
        try:
            return self._checked(lease, reader)
        except UNUSABLE as error:
            code = TORN_CODE if isinstance(error, DamagedError) else MANIFEST_CODE
            reader.refused(lease, code, str(error))
            lease.close()  # now, not with the error's traceback
            raise

    def _checked(self, lease: VersionLease, reader: PoolReader) -> PooledVersion:
        said = VersionMeta.decode(lease.meta())
        memory: VersionMemory
        if said.memory == "slot":
            memory = SlotReader(lease, reader, self._registered)
        else:
            self._exports = self._exports or ExportedReaders(self._options)
            memory = self._exports.open(lease)
        manifest = self._manifest(said.manifest, memory.total)
        found = self._borrowed.get(memory.key)
        if found is None or found.identity != memory.identity or found.manifest is not manifest:
            found = self._borrowed[memory.key] = BorrowedTensors(memory, manifest)
        return PooledVersion(lease, reader, manifest, memory, found)

    def _manifest(self, data: bytes, total: int) -> Manifest:
        """Return a manifest, decoded and checked once for every version with the same bytes."""
        if self._decoded is None or self._decoded[0] != data or self._decoded[1].total != total:
            self._decoded = data, Manifest.decode(data, total)
        return self._decoded[1]

    def _attach(self, timeout: float | None) -> PoolReader:
        bus, device, label, _ = self._options
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                # A rank's row outlives the process: the server's next process lacks weights.
                keeps_row = bool(server_of_label(label))
                return PoolReader(bus, KIND, label=label, device=str(device), keeps_row=keeps_row)
            except BusNotFoundError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"no weights of bus {bus!r} in {timeout:.3g} s: {error}"
                    ) from error
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """Leave the pool; open versions keep their memory."""
        self._registered.close()
        if self._reader is not None:
            self._reader.close()
        self._borrowed = {}
        if self._exports is not None:
            self._exports.close()
