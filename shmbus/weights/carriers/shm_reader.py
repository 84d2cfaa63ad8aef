"""The carrier ``shm``, read: versions in the slots of a pool, as views or copied.

A reader's tensors are views of the slot, leased until the last of them is gone.

Invariant: a version that cannot be used is refused in the reader's row, and its lease ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Final

import torch

from shmbus import BusNotFoundError, BusRemovedError
from shmbus.errors import DamagedError, WaitTimeoutError, WeightsError
from shmbus.pool import PoolReader, VersionLease
from shmbus.weights.carriers.base import CarriedVersion
from shmbus.weights.carriers.pool_version import PoolVersion
from shmbus.weights.carriers.shm import KIND, PROMISES
from shmbus.weights.carriers.shm_patch import ShmPatch
from shmbus.weights.errors import MANIFEST_CODE, TORN_CODE, UNUSABLE
from shmbus.weights.loading import LoadCache
from shmbus.weights.manifest import Manifest
from shmbus.weights.memory import payload_tensor, tensor_at
from shmbus.weights.registered import RegisteredSlots

__all__ = ["ShmReader", "ShmVersion"]

#: Blocks that a sample compares: a scribble over a hundredth of the bytes is found once in three
#: times, and each costs a hundredth of reading a model of a hundred blocks.
SAMPLED_BLOCKS: Final = 4
#: Seconds between two attempts to find a pool that is not there yet.
_RETRY_S: Final = 0.05


class ShmVersion(PoolVersion):
    """A leased version.

    Parameters
    ----------
    lease : VersionLease
        Of a pool.
    reader : PoolReader
        Which has leased it.
    registered : RegisteredSlots, optional
        Slots that devices read directly.
    manifest : Manifest, optional
        The version's, where it was decoded and checked before.
    """

    def __init__(
        self,
        lease: VersionLease,
        reader: PoolReader,
        registered: RegisteredSlots | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self._lease = lease
        self._reader = reader
        self._registered = registered
        self.version = lease.version
        self.sequence = lease.sequence
        self.text = lease.text
        self.origin: object = reader.identity
        if manifest is None:
            manifest = Manifest.decode(lease.meta(), lease.size)
        self.manifest = manifest

    def patch(self) -> ShmPatch | None:
        """Return what changed since the version before; None also where that is damaged."""
        try:
            found = self._lease.patch()
        except DamagedError:
            return None
        return None if found is None else ShmPatch(found, self.manifest, self._lease)

    def tensors(self) -> dict[str, torch.Tensor]:
        """View every tensor; no byte is copied."""
        payload = payload_tensor(self._lease.buffer)
        return {place.name: tensor_at(payload, place) for place in self.manifest.tensors}

    @property
    def cache(self) -> LoadCache | None:
        """Return None: its views are made for each lease."""

    def borrow(self) -> dict[str, torch.Tensor]:
        """Return `tensors()`."""
        return self.tensors()

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Register the slot with CUDA, once, where it goes to a device."""
        if any(device.type == "cuda" for device in devices) and self._registered is not None:
            self._registered.add(payload_tensor(self._lease.buffer), read_only=True)

    def verify(self, *, sample: bool) -> None:
        """Compare digests."""
        blocks = self._lease.digests
        if blocks == 0:
            raise WeightsError(
                f"version {self.version} was published without digests, so nothing can be "
                "verified; make the publisher with digests=True, or subscribe with verify='off'"
            )
        if not sample:
            self._lease.check()
            return
        for block in random.sample(range(blocks), min(SAMPLED_BLOCKS, blocks)):
            self._lease.check(block, 1)

    def close(self) -> None:
        """Let go of the lease; views that are left keep the slot."""
        self._lease.close()


class ShmReader:
    """A subscriber.

    Parameters
    ----------
    bus : str
        The bus that the weights belong to.
    label, device : str
        For messages.
    """

    name = "shm"
    promises = PROMISES

    def __init__(self, bus: str, *, label: str = "", device: str = "") -> None:
        self._bus, self._label, self._device = bus, label, device
        self._reader: PoolReader | None = None
        self._registered = RegisteredSlots()

    def latest(self, after: int, timeout: float | None) -> CarriedVersion:
        """Wait for a version; one that is removed and made again begins anew.

        Parameters
        ----------
        after : int
            A sequence.
        timeout : float | None
            Seconds.

        Returns
        -------
        CarriedVersion

        Raises
        ------
        WaitTimeoutError
            None came.
        DamagedError, ManifestError
            It cannot be used; the reader's row says so.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            reader = self._reader or self._attach(left)
            self._reader = reader
            try:
                lease = reader.latest(after=after, timeout=left)
            except BusRemovedError:
                self._registered.close()
                reader.close()
                self._reader = None
                after = 0  # the pool that follows counts from 1
                continue
            return self._checked(lease, reader)

    def at(self, version: int) -> CarriedVersion:
        """Lease a version that is still there, newest or not.

        Parameters
        ----------
        version : int
            The publisher's number of it.

        Returns
        -------
        CarriedVersion

        Raises
        ------
        WaitTimeoutError
            No slot has it.
        DamagedError, ManifestError
            It cannot be used; the reader's row says so.
        """
        reader = self._reader or self._attach(0.0)
        self._reader = reader
        lease = reader.at(version)
        return self._checked(lease, reader)

    def removed(self) -> bool:
        """Whether the pool that it reads has lost its name."""
        return self._reader is not None and self._reader.is_removed()

    def open_version(self, lease: VersionLease, reader: PoolReader) -> CarriedVersion:
        """Check a version; what a slot holds is its payload."""
        return ShmVersion(lease, reader, self._registered)

    def _checked(self, lease: VersionLease, reader: PoolReader) -> CarriedVersion:
        try:
            return self.open_version(lease, reader)
        except UNUSABLE as error:
            code = TORN_CODE if isinstance(error, DamagedError) else MANIFEST_CODE
            reader.refused(lease, code, str(error))
            lease.close()  # now, not with the error's traceback
            raise

    def _attach(self, timeout: float | None) -> PoolReader:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return PoolReader(self._bus, KIND, label=self._label, device=self._device)
            except BusNotFoundError as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"no weights of bus {self._bus!r} in {timeout:.3g} s: {error}"
                    ) from error
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """Leave the pool; versions that are out keep what they need."""
        self._registered.close()
        if self._reader is not None:
            self._reader.close()
