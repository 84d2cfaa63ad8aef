"""Carriers over a slot pool: ``shm``, ``cuda_vmm``, ``cuda_ipc`` and ``memfd``; one reader.

Invariants: an unusable version is refused in the reader's row, and its lease ends; a version whose
memory vanished with its publisher does not count: the reader waits for the next version, and the
error says so.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar, Final

import torch

from shmbus import BusNotFoundError, BusRemovedError
from shmbus.errors import DamagedError, WaitTimeoutError, WeightsError
from shmbus.pool import PoolReader, VersionLease
from shmbus.pool.server_rows import server_of_label
from shmbus.segment.room import shortage, tightest
from shmbus.tensors.device.arena import MemoryKind
from shmbus.tensors.device.memory import refusals
from shmbus.tensors.device.registration import RegisteredSlots
from shmbus.weights.carriers.base import Carrier, ReaderOptions, WriterOptions
from shmbus.weights.carriers.exported import ExportedReaders, ExportedWriter
from shmbus.weights.carriers.pool import (
    KIND,
    BorrowedTensors,
    LostVersionError,
    PooledVersion,
    PoolWriter,
    SlotReader,
    SlotWriter,
    VersionMemory,
    VersionMeta,
)
from shmbus.weights.errors import MANIFEST_CODE, TORN_CODE, UNUSABLE
from shmbus.weights.manifest import Manifest

#: Seconds between two attempts to open a missing pool.
_RETRY_S: Final = 0.05
_SHM: Final = Path("/dev/shm")


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


class ShmCarrier(Carrier):
    """Versions in the slots of a pool in /dev/shm."""

    why = ("/dev/shm is there", "whole versions, views without a copy, any death")
    takes_patches = True

    @classmethod
    def problem(cls, device: torch.device, size: int, directory: Path | str | None) -> str:
        """Return the shortage in /dev/shm, else an empty text."""
        del device, directory
        if not os.access(_SHM, os.W_OK):
            return f"{_SHM} is not writable"
        return shortage(size) if size > tightest().left else ""

    @classmethod
    def writer(cls, options: WriterOptions) -> PoolWriter:
        """Become a rank of the publisher."""
        return PoolWriter(options, SlotWriter(options))

    @classmethod
    def reader(cls, options: ReaderOptions) -> PooledReader:
        """Read a pool of any pooled carrier."""
        return PooledReader(options)


class _ExportedCarrier(Carrier):
    """Versions in memory of the publisher's own."""

    KIND: ClassVar[MemoryKind]
    by_name_only = "it takes `slots` times the model on the device; ask for it by name"

    @classmethod
    def problem(cls, device: torch.device, size: int, directory: Path | str | None) -> str:
        """Say why a device cannot export memory."""
        del size, directory
        if device.type != "cuda":
            return f"it needs a CUDA device, got {str(device)!r}"
        return refusals(device.index or 0).get(cls.KIND, "")

    @classmethod
    def writer(cls, options: WriterOptions) -> PoolWriter:
        """Become a rank of the publisher."""
        return PoolWriter(options, ExportedWriter(options, cls.KIND))

    @classmethod
    def reader(cls, options: ReaderOptions) -> PooledReader:
        """Read a pool of any pooled carrier."""
        return PooledReader(options)


class CudaVmmCarrier(_ExportedCarrier):
    """Device memory, exported by a file descriptor."""

    KIND = "vmm"


class CudaIpcCarrier(_ExportedCarrier):
    """Device memory, exported by a handle of 64 bytes."""

    KIND = "ipc"


class MemfdCarrier(_ExportedCarrier):
    """Host memory outside of /dev/shm."""

    KIND = "memfd"
    by_name_only = "its versions end with their publisher; ask for it by name"

    @classmethod
    def problem(cls, device: torch.device, size: int, directory: Path | str | None) -> str:
        """Refuse a CUDA device: the memory belongs to the host."""
        del size, directory
        return "" if device.type == "cpu" else f"its memory is the host's, not that of {device}"
