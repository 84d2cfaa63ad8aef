"""The way back: new weights from the trainer to all workers, through a slot pool.

Invariants:

- A set of weights that `read` returns is one that `publish` was given, whole.
- A worker that dies keeps nothing; one that is stopped while it copies keeps a slot, and the pool
  grows around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from shmbus import WaitTimeoutError
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec

FloatArray = npt.NDArray[np.float32]

_KIND: Final = "weights"

#: Sets that are kept while workers are stopped: a set of the demo has some hundred kilobytes.
_MAX_SLOTS: Final = 8


class WeightsChannel:
    """One trainer publishes, any number of workers read."""

    def __init__(self, bus: str, size: int, *, create: bool = False) -> None:
        self._publisher: PoolPublisher | None = None
        self._reader: PoolReader | None = None
        self._bytes = 4 * size
        if create:
            spec = PoolSpec(slot_bytes=self._bytes, max_slots=_MAX_SLOTS)
            self._publisher = PoolPublisher(
                bus, _KIND, spec=spec, label="demo trainer", when_held="grow"
            )
        else:
            self._reader = PoolReader(bus, _KIND, label="demo worker")

    def publish(self, weights: FloatArray, version: int) -> None:
        """Write one set; the one before it stays readable until the next."""
        assert self._publisher is not None
        write = self._publisher.begin(version, self._bytes)
        assert write is not None
        with write:
            np.copyto(write.view().view(np.float32), weights)

    def read(self, version: int) -> FloatArray | None:
        """Copy one set."""
        found = self._copy(lambda newest: newest == version)
        return None if found is None else found[1]

    def newest(self, known: int = -1) -> tuple[int, FloatArray] | None:
        """Copy the newest set, whether the bus has announced it or not."""
        return self._copy(lambda newest: newest != known)

    def _copy(self, is_wanted: Callable[[int], bool]) -> tuple[int, FloatArray] | None:
        assert self._reader is not None
        try:
            lease = self._reader.latest(timeout=0)
        except WaitTimeoutError:
            return None
        with lease:
            if not is_wanted(lease.version) or lease.size != self._bytes:
                return None
            copy: FloatArray = lease.view().view(np.float32).copy()
            self._reader.applied(lease)
            return lease.version, copy

    def close(self) -> None:
        """Let go of the memory; the trainer's end removes the name."""
        if self._reader is not None:
            self._reader.close()
        if self._publisher is not None:
            self._publisher.close(remove=True)
