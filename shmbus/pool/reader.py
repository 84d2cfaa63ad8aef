"""Reader of a slot pool: leases of the newest version, and the reader's row in the segment.

Invariants:

- A leased version is whole; the lease lasts until it and every array of its buffer are gone.
- A wait has a deadline and notices the pool's removal.
"""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from shmbus import errors
from shmbus.base.arguments import check_int64, check_timeout, fit_text
from shmbus.base.format import show_wait
from shmbus.errors import BusBusyError, DamagedError, WaitTimeoutError
from shmbus.pool.pool_file import identity_of, open_pool, pool_path
from shmbus.pool.pool_status import RESTARTED_CODE, status_of_pool
from shmbus.segment.names import leads_to
from shmbus.segment.peer_wait import SLICE_S, wait_for
from shmbus_ext import _core

#: Longest single sleep in seconds; between two sleeps the reader rechecks the pool's name.
_SLEEP_S: Final = 10 * SLICE_S


class PoolReader(_core.ClosedByBlock):
    """Lease versions of a pool, and report the running version in the reader's row."""

    def __init__(
        self, bus: str, kind: str, *, label: str = "", device: str = "", keeps_row: bool = False
    ) -> None:
        label = fit_text("label", label, _core.POOL_LABEL_BYTES) or f"reader of pid {os.getpid()}"
        device = fit_text("device", device, _core.POOL_DEVICE_BYTES)
        self.bus, self.kind = bus, kind
        self._path = pool_path(bus, kind)
        self.pool = open_pool(bus, kind)
        self._identity = identity_of(self._path)
        self._said_refused = False
        try:
            ran = self._ran_before(label) if keeps_row else None
            claimed = self.pool.claim_reader(label, device, keeps_row)
        except BaseException:
            self.pool.close()
            raise
        if not claimed:
            self.pool.close()
            raise BusBusyError(
                f"pool {kind!r} of bus {bus!r}: all {_core.POOL_MAX_READERS} rows of readers are "
                "taken by living processes; share one reader among the threads of a process"
            )

        if ran is not None:
            self._said_refused = True
            said = f"the server restarted and has loaded no version; before, it ran {ran}"
            self.pool.refused(1, ran, RESTARTED_CODE, said)

    def _ran_before(self, label: str) -> int | None:
        """Return the version of a dead reader with the label; None without a reader."""
        for row in status_of_pool(self.bus, self.kind, self.pool).readers:
            if row.label == label and row.state == "dead":
                return row.refused_version if row.applied_version is None else row.applied_version
        return None

    @property
    def identity(self) -> tuple[int, int | None]:
        """Return the pool's creation time and inode: sequences compare only within one identity."""
        inode = None if self._identity is None else self._identity.st_ino
        return self.pool.created_unix_ns, inode

    @property
    def newest(self) -> int:
        """Return the sequence of the newest version; 0 before the first."""
        return self.pool.newest()

    def latest(self, *, after: int = 0, timeout: float | None = None) -> VersionLease:
        """Lease the newest version."""
        check_timeout(timeout)
        after = check_int64("after", after)

        def ready() -> VersionLease | None:
            got = _core.pool_lease(self.pool, after)
            if isinstance(got, _core.PoolLease):
                return VersionLease(self, got)
            if got == _core.SHARED_DAMAGED:
                raise DamagedError(
                    f"pool {self.kind!r} of bus {self.bus!r}: the newest version's row is damaged; "
                    "publish again, and look for a process that writes where it should not"
                )
            return None

        return wait_for(
            ready,
            announce=lambda: self.pool.announce(_core.POOL_BELL_VERSION),
            sleep=lambda ticket, left: self.pool.wait(_core.POOL_BELL_VERSION, ticket, left),
            gone=self._removed,
            late=lambda: WaitTimeoutError(self._nothing_came(after, timeout or 0.0)),
            deadline=None if timeout is None else time.monotonic() + timeout,
            slice_s=_SLEEP_S,
        )

    def at(self, version: int) -> VersionLease:
        """Lease a version by number; an old version lasts while a reader leases it."""
        got = _core.pool_lease(self.pool, 0, check_int64("version", version))
        if isinstance(got, _core.PoolLease):
            return VersionLease(self, got)
        status = status_of_pool(self.bus, self.kind, self.pool)
        there = [str(slot.version) for slot in status.slots if slot.state == "ready"]
        raise WaitTimeoutError(
            f"pool {self.kind!r} of bus {self.bus!r}: no slot has version {version}; there are: "
            f"{', '.join(there) or 'none'}. A version stays while a reader leases it: take the "
            "newest, or publish it again"
        )

    def is_removed(self) -> bool:
        """Return whether the pool lost its name: no further version will come."""
        return self._identity is None or not leads_to(self._path, self._identity)

    def _removed(self) -> errors.BusRemovedError | None:
        if not self.is_removed():
            return None
        return errors.BusRemovedError(
            f"pool {self.kind!r} of bus {self.bus!r} was removed: no version follows. What is "
            "leased stays readable; make a new reader once it is published again"
        )

    def _nothing_came(self, after: int, timeout: float) -> str:
        status = status_of_pool(self.bus, self.kind, self.pool)
        publisher = [rank for rank in status.ranks if rank.rank == 0]
        state = "there is no publisher: start it"
        if publisher and publisher[0].state == "alive":
            state = f"its publisher (pid {publisher[0].pid}) lives"
        elif publisher:
            state = f"its publisher (pid {publisher[0].pid}) has died: start it again"
        what = "no version" if after == 0 else "no newer version"
        newest = "there was none before" if status.version is None else f"newest: {status.version}"
        return (
            f"pool {self.kind!r} of bus {self.bus!r}: {what} came in {show_wait(timeout)} "
            f"({newest}); {state}"
        )

    def applied(self, lease: VersionLease) -> None:
        """Report a version as the only one running in this process."""
        self.pool.applied(lease.sequence, lease.version)
        if self._said_refused:  # after the refusal of a newer version, the way back
            self._said_refused = False
            self.pool.refused(0, 0, 0, "")

    def loading(self, lease: VersionLease, code: int) -> None:
        """Report the start of a load: the process runs no whole version until `applied`."""
        self.refused(lease, code, "it is being loaded")
        # The previous version is gone, even if it was this version or a newer one.
        self.pool.applied(0, 0)

    def refused(self, lease: VersionLease, code: int, reason: str) -> None:
        """Report a version as refused; the running one stays."""
        self._said_refused = True
        text = fit_text("reason", reason, _core.POOL_ERROR_BYTES)
        self.pool.refused(lease.sequence, lease.version, code, text)

    def close(self) -> None:
        """Leave the pool; leases keep their slots, and `keeps_row` the row as after a death."""
        self.pool.close()


class VersionLease(_core.ClosedByBlock):
    """A whole version, unchanged while this object or an array of its bytes lives."""

    def __init__(self, reader: PoolReader, lease: _core.PoolLease) -> None:
        self._reader = reader
        self._lease: _core.PoolLease | None = lease
        self.version: Final = lease.version
        self.sequence: Final = lease.sequence
        self.size: Final = lease.bytes
        self.text: Final = lease.text
        self.digests: Final = lease.digests
        self.published_unix_ns: Final = lease.published_unix_ns

    @property
    def buffer(self) -> _core.PoolLease:
        """Return the payload as an object with a read-only buffer."""
        if self._lease is None:
            raise errors.BusClosedError(
                f"the lease of version {self.version} is closed; take the latest again"
            )
        return self._lease

    def view(self) -> npt.NDArray[np.uint8]:
        """View the payload as a read-only array of bytes."""
        return np.frombuffer(memoryview(self.buffer), np.uint8)

    def meta(self) -> bytes:
        """Return the version's own meta, copied and checked."""
        found = self.buffer.meta()
        if found is None:
            raise DamagedError(
                f"version {self.version}: its meta does not match its checksum; publish again"
            )
        return found

    def check(self, first: int = 0, count: int = 1 << 31) -> None:
        """Compare blocks with their digests; a version without digests passes."""
        wrong = self.buffer.check(first, count)
        if wrong is not None:
            block = self._reader.pool.block_bytes
            raise DamagedError(
                f"version {self.version}: bytes {wrong * block} to "
                f"{min(self.size, (wrong + 1) * block)} do not match their digest; do not load "
                "it: publish again, and look for a process that writes where it should not"
            )

    def close(self) -> None:
        """End the lease; surviving arrays keep the slot until their release."""
        self._lease = None
