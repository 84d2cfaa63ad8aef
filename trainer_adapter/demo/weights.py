"""The way back: new weights from the trainer to all workers, through shared memory.

Two buffers, used in turn, each with a checksum of its content and version. A worker copies the
buffer of the version that the bus announces, and takes it if the checksum holds; if not, the
trainer was writing it, and the next look finds the newer one. No lock, so no death can block it.

Invariants:

- A set of weights that `read` returns is one that `publish` was given, whole.
- Each user holds a shared lock on the file, so that `shmbus gc` removes an abandoned one only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt
import posix_ipc

from shmbus.segment.names import companion_name

FloatArray = npt.NDArray[np.float32]

_HEADER: Final = np.dtype([("version", "<i8"), ("crc", "<u4"), ("unused", "<u4")])


class WeightsChannel:
    """One trainer publishes, any number of workers read.

    Parameters
    ----------
    bus : str
        The bus that the weights belong to; their segment is its companion "weights".
    size : int
        Weights in one set, float32.
    create : bool
        True in the trainer, which also removes the segment when it closes.
    """

    def __init__(self, bus: str, size: int, *, create: bool = False) -> None:
        self._name = companion_name("weights", bus)
        self._created = create
        stride = _HEADER.itemsize + 4 * size
        flags = posix_ipc.O_CREX if create else 0
        self._fd = posix_ipc.SharedMemory(self._name, flags, mode=0o600).fd
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if not os.fstat(self._fd).st_nlink:  # `shmbus gc` was faster than the lock
                raise FileNotFoundError(
                    f"the weights of bus {bus!r} were removed while they were opened; start again"
                )
            if create:
                os.posix_fallocate(self._fd, 0, 2 * stride)
            self._memory = mmap.mmap(self._fd, 2 * stride)
        except BaseException:
            os.close(self._fd)
            if create:
                with contextlib.suppress(posix_ipc.ExistentialError):  # it is gone already
                    posix_ipc.unlink_shared_memory(self._name)
            raise
        raw = np.frombuffer(self._memory, np.uint8)
        self._headers = [
            raw[i * stride : i * stride + _HEADER.itemsize].view(_HEADER) for i in (0, 1)
        ]
        self._weights: list[FloatArray] = [
            raw[i * stride + _HEADER.itemsize : (i + 1) * stride].view(np.float32) for i in (0, 1)
        ]

    def publish(self, weights: FloatArray, version: int) -> None:
        """Write one set; the one before it stays readable until the next.

        Parameters
        ----------
        weights : float32 [size]
        version : int
            Announce it on the bus afterwards.
        """
        which = version % 2
        np.copyto(self._weights[which], weights)
        self._headers[which]["crc"] = _checksum(weights, version)
        self._headers[which]["version"] = version

    def read(self, version: int) -> FloatArray | None:
        """Copy one set.

        Parameters
        ----------
        version : int
            As the bus announces it.

        Returns
        -------
        float32 [size] or None
            None if that version is not there any more, or was being overwritten.
        """
        which = version % 2
        if int(self._headers[which]["version"][0]) != version:
            return None
        copy = self._weights[which].copy()
        holds = int(self._headers[which]["crc"][0]) == _checksum(copy, version)
        return copy if holds else None

    def close(self) -> None:
        """Let go of the memory; the trainer's end removes the name."""
        self._headers, self._weights = [], []
        self._memory.close()
        if self._created:
            posix_ipc.unlink_shared_memory(self._name)
        os.close(self._fd)


def _checksum(weights: FloatArray, version: int) -> int:
    return zlib.crc32(weights.tobytes(), version & 0xFFFFFFFF)
