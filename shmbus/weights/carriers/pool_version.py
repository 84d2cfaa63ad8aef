"""What a leased version of a pool says in the row of its reader, whichever memory its bytes are in.

Invariant: nothing is said, and nothing fails, once the reader has no row any more.
"""

from __future__ import annotations

from shmbus.pool import PoolReader, VersionLease
from shmbus.weights.errors import LOADING_CODE

__all__ = ["PoolVersion"]


class PoolVersion:
    """A leased version, and who has leased it."""

    _lease: VersionLease
    _reader: PoolReader

    def loading(self) -> None:
        """Say that this process has begun to load it, while it has a row."""
        if not self._reader.pool.closed:
            self._reader.loading(self._lease, LOADING_CODE)

    def applied(self) -> None:
        """Say that this process runs it, while it has a row."""
        if not self._reader.pool.closed:
            self._reader.applied(self._lease)

    def refused(self, code: int, reason: str) -> None:
        """Say that this process could not take it, while it has a row."""
        if not self._reader.pool.closed:
            self._reader.refused(self._lease, code, reason)
