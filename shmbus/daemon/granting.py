"""The service's lock, and what the ring's thread may grant without a line of Python.

A client that sleeps waits for as long as the daemon needs to wake up, to lease and to reply. In the
plain case, a group is complete and one request is the next, the middle is C (`_core.Granter`). What
is plain is decided here, whenever the lock is released, so that nothing is left to decide later.

Invariants:

- Whoever enters the service disarms the granter; whoever leaves it last arms it again, for what is
  true then. So nothing that C relies on changes unseen.
- What C has granted is in the service's books before anybody else is in the service.
"""

from __future__ import annotations

from types import TracebackType
from typing import TypeAlias

from shmbus import limits
from shmbus.daemon.leases import MAX_GRANT_TRAJECTORIES
from shmbus.daemon.plain import Entry, PlainGrants
from shmbus_ext import _core

__all__ = ["Granted", "Granting"]

#: What is left for a policy, the entries that were leased, and the end of a reply that the client's
#: socket did not take.
Granted: TypeAlias = "tuple[list[Entry | tuple[int, _core.Trajectory]], list[Entry], bytes]"


class Granting:
    """A recursive lock around a service, which has the next request granted while it is free.

    Parameters
    ----------
    service : PlainGrants
        The service.
    """

    def __init__(self, service: PlainGrants) -> None:
        self._service = service
        self._lock = _core.RecursiveLock()
        self._depth = 0
        self._over = False
        collector = service.collector
        self._granter = _core.Granter(
            collector.reader,
            collector.stash.table,
            self._lock,
            portion=limits.POLL_RECORDS,
            records=MAX_GRANT_TRAJECTORIES,
        )

    def __enter__(self) -> Granting:
        self._lock.__enter__()
        self._depth += 1
        self._granter.disarm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        try:
            if not self._depth and error is None:
                self._arm()
        finally:
            self._lock.__exit__(kind, error, traceback)

    def _arm(self) -> None:
        self._granter.splits = self._service.splits
        self._granter.others = self._service.has_returned
        request = None if self._over else self._service.next_plain()
        if request is not None:
            self._granter.arm(*request)

    def stop(self) -> None:
        """Grant nothing more: the service has failed. This thread is in it."""
        self._over = True

    def wait(self) -> Granted | None:
        """Sleep until the ring may have records; in the ring's thread.

        Returns
        -------
        Granted | None
            None where nothing was read. Else this thread is in the service: it notes what was
            granted, and leaves with `__exit__`.
        """
        granted = self._granter.wait()
        if granted is not None:
            self._depth = 1
        return granted
