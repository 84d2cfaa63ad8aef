"""Which version of the weights an engine runs.

What ranks say in their rows of the bus's weights is believed first; without rows, the trainer's own
version. Both are reads of shared memory.
"""

from __future__ import annotations

import time
from typing import Final

import shmbus
from shmbus.pool.server_rows import LOADING_CODE, rows_of_server
from shmbus.recorder.transcript import Span

#: Seconds for which the rows at a call's begin may be older than it: an older version is the
#: careful one there. At its end they are read.
_FRESH_S: Final = 0.05
#: Seconds for which an engine without rows counts as one, at both ends: rows come with its first
#: update, and until then the trainer's version is what is known.
_ROWLESS_S: Final = 1.0


class EngineVersions:
    """The versions of the engines of one bus."""

    def __init__(self, producer: shmbus.Producer) -> None:
        self._producer = producer
        self._seen: dict[str, tuple[float, Span | None]] = {}

    def by_rows(self, url: str, *, at_end: bool = False) -> Span | None:
        """Return what the ranks of an engine run, or load; None where it has no rows."""
        now = time.monotonic()
        seen = self._seen.get(url)
        if seen is not None:
            at, span = seen
            if now - at < (_ROWLESS_S if span is None else 0.0 if at_end else _FRESH_S):
                return span
        span = None
        for row in rows_of_server(self._producer.name, url):
            if row.applied_version is not None:
                span = Span(row.applied_version, row.applied_version).join(span)
            if row.error_code == LOADING_CODE and row.refused_version is not None:
                span = Span(row.refused_version, row.refused_version).join(span)
        self._seen[url] = (now, span)
        return span

    def of(self, url: str, *, at_end: bool = False) -> Span:
        """Return what an engine may run now."""
        span = self.by_rows(url, at_end=at_end)
        if span is not None:
            return span
        version = self._producer.policy_version
        return Span(version, version)
