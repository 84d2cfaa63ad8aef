"""Weights versions of the engines before a call and after its answer.

Invariants:

- Rows of an engine's ranks say the version. An engine without rows counts as version 0 until the
  trainer's version rises.
- The trainer's version labels a sample only under `Settings.assume_trainer_version`, and never a
  sample of an engine with rows.
- An answer has a version only if the same processes had known versions at begin and end of a call.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import shmbus
from shmbus.pool.server_rows import NO_ROW, ServerRows, row_name
from shmbus.recorder.engine_api import BadAnswer
from shmbus.recorder.transcript import Span


class EngineVersion(NamedTuple):
    """The version of one engine at one moment, with the source; no span for an unknown version."""

    span: Span | None
    by: Literal["rows", "start", "trainer", "unknown", "asleep"]
    why: str = ""
    #: Row and pid of each rank of the engine.
    processes: tuple[tuple[int, int], ...] = ()


class EngineVersions:
    """The versions of the engines of one bus."""

    def __init__(self, producer: shmbus.Producer, assume_trainer_version: bool) -> None:
        self._producer = producer
        self._assumes = assume_trainer_version
        self._rows = ServerRows(producer.name)

    @property
    def trainers(self) -> int:
        """The trainer's policy version."""
        return self._producer._segment.policy_version

    def of(self, url: str, *, afresh: bool = False, ended: bool = False) -> EngineVersion:
        """Return the version of an engine for a call that begins now, or has `ended`."""
        version = self.trainers
        found = self._rows.read(version, afresh=afresh).get(row_name(url))
        if found is not None:
            if found.sleeps and not ended:  # no answer comes before the wake
                return EngineVersion(None, "asleep", found.why, found.processes)
            if found.oldest is None or found.newest is None:
                return EngineVersion(None, "unknown", found.why, found.processes)
            return EngineVersion(Span(found.oldest, found.newest), "rows", "", found.processes)
        if version == 0:
            return EngineVersion(Span(0, 0), "start")
        if self._assumes:
            return EngineVersion(Span(version, version), "trainer")
        return EngineVersion(None, "unknown", NO_ROW)

    def is_known(self, url: str) -> bool:
        """Return whether calls may go to an engine now."""
        return self.of(url).span is not None

    def is_assumed(self, url: str, begun: EngineVersion) -> bool:
        """Return True for a call that ends now with the trainer's version by assumption."""
        return "trainer" in (begun.by, self.of(url).by)

    def met(self, url: str, begun: EngineVersion, said: int | None) -> Span:
        """Return an answer's versions, `said` by itself; BadAnswer for an unknown version."""
        now = self.of(url, afresh=True, ended=True)
        if begun.span is None or now.span is None:
            raise BadAnswer(f"its weights are unknown: {now.why or begun.why}", engine_gone=True)
        if begun.processes and now.processes != begun.processes:
            raise BadAnswer("it was started again during the call", engine_gone=True)
        met = begun.span.join(now.span)
        if said is None:
            return met
        least = 0 if now.by == "trainer" else met.oldest
        if not least <= said <= met.newest:
            raise BadAnswer(
                f"its answer says version {said}, {now.by} say {met.oldest} to {met.newest}; "
                "expected a published version"
            )
        return Span(min(said, begun.span.oldest), said)

    def close(self) -> None:
        """Let go of the rows."""
        self._rows.close()
