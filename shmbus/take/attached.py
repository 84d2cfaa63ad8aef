"""A consumer that is attached to its source when it is first used, and once.

Every verb of a Consumer is a base class upon this one.

Invariant: after an exception in attaching nothing is attached.
"""

from __future__ import annotations

import time

from shmbus import errors
from shmbus.client.daemon_client import DaemonClient
from shmbus.group import Group
from shmbus.source import AttachOptions, attach
from shmbus.stall import Watch
from shmbus.stash.collector import Collector
from shmbus_ext import _core

__all__ = ["AttachedConsumer", "seconds_left"]


class AttachedConsumer(_core.ConsumerBase[Group]):
    """A consumer of the core with its options, and the source of its groups."""

    name: str
    _options: AttachOptions
    _watch: Watch

    def _begin(self) -> None:
        self._lock = _core.RecursiveLock()
        self._source: Collector | DaemonClient | None = None
        # The last one that this handle set.
        self._policy_version = 0
        self._closed = False

    def _require_source(self) -> Collector | DaemonClient:
        if self._closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer is closed; make a new one"
            )
        source = self._source
        if source is None:
            # An unpickled handle attaches in the first thread that uses it.
            with self._lock:
                source = self._source
                if source is None:
                    source = self._attach()
        source.require()
        return source

    @property
    def served(self) -> bool:
        """Whether it leases from a daemon; False where it reads the ring itself."""
        return isinstance(self._require_source(), DaemonClient)

    def _attach(self) -> Collector | DaemonClient:
        """Attach, or, after an exception, leave nothing attached."""
        opened: list[Collector | DaemonClient] = []
        try:
            source = attach(self._options, opened)
            if isinstance(source, Collector):
                self._split = _core.split_number(source.segment, self._options.split)
                self._intake = source.intake(Group, self._watch)
            self._source = source
        except BaseException:
            self._source = self._intake = None
            for each in opened:
                each.close()
            raise
        return source


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds until a time of the monotonic clock, 0 after it; None for none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
