"""RecordReader: a bus's records one by one, by origin, for a relay's source.

A Consumer groups samples and leases groups; a RecordReader hands out records, keeps them in the
ring, and releases them on request. Unreleased records stay for the bus's next reader, and no other
state must outlive the process.

Invariants
----------
- A polled record is held until its release; closing or dying returns every held record.
- A release ends every named record of a split or none, even if this process dies halfway.
- A group without records in this reader holds no producer back: neither by a row of the lead bound
  nor by a request.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from shmbus import errors
from shmbus.base import limits
from shmbus.base.closing import ClosedByWith
from shmbus.base.ledger import REASONS
from shmbus.data.keys import has_round, make_key, split_key
from shmbus.relay.messages import GroupName, Origin, name_origin
from shmbus.relay.splits import number_of
from shmbus.segment import lifecycle
from shmbus.segment.explain import RELAY_LABEL
from shmbus.stash.upkeep import Straggler, Upkeep
from shmbus_ext import _core

_KEY: Final = operator.attrgetter("key")
_SPLIT: Final = operator.attrgetter("split")


class RecordReader(ClosedByWith):
    """Reads a bus record by record, in its collector's place, from several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()
        self._held: dict[Origin, _core.Trajectory] = {}
        #: Held records by group.
        self._of_group: Counter[Hashable] = Counter()
        self._note: _core.GroupTable[_core.Trajectory] = _core.GroupTable()
        self._segment = lifecycle.open_segment(name)
        try:
            self._reader = _core.Reader(self._segment, RELAY_LABEL)
        except BaseException:
            self._segment.close()
            raise
        #: Above the number of every earlier RecordReader of this bus.
        self.incarnation: int = _core.relay_next_source(self._segment)
        self._upkeep = Upkeep(self._segment, self._reader)
        #: Groups with requests from another bus, and ended there.
        self.relayed: set[Hashable] = set()

    @property
    def identity(self) -> str:
        """The bus's identity, equal to `Bus.identity`."""
        return self._segment.identity

    @property
    def policy_version(self) -> int:
        """The policy version read by the bus's producers; settable."""
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._require_open()
        self._segment.policy_version = version
        self._upkeep.lead.follow(0)

    def _require_open(self) -> None:
        if not self._reader.attached or self._segment.closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this RecordReader is closed, or was made before a fork; make "
                "a new one"
            )

    # -- from the ring --------------------------------------------------------------------------

    def poll(self, max_records: int) -> tuple[list[Origin], list[_core.Trajectory]]:
        """Take unpolled records without waiting, each producer's in order."""
        with self._lock:
            self._require_open()
            self._upkeep.run(time.monotonic(), self._find_stragglers, 0)
            self._upkeep.begin_checks()
            found = self._reader.poll(max_records)
            origins = _core.record_origins(found)
            self._held.update(zip(origins, found, strict=True))
            self._of_group.update(map(_KEY, found))
            if found:
                self._note_held()
            if len(found) < max_records and self._upkeep.checks:
                self._upkeep.end_checks(
                    lambda: self._of_group,
                    self.holds,
                    lambda key: key in self._of_group or key in self.relayed,
                )
            return origins, found

    def _find_stragglers(self, stragglers: list[Straggler]) -> list[_core.Trajectory]:
        held = map(self._held.get, (origin for *_, origin in stragglers))
        return [each for each in held if each is not None]

    def export(self, origins: Iterable[Origin], into: bytearray | memoryview) -> memoryview:
        """Copy held records into a block in `into`, for another bus; the records stay held."""
        with self._lock:
            self._require_open()
            return memoryview(into)[: _core.export_block(self._find(origins), into)]

    def _find(self, origins: Iterable[Origin]) -> list[_core.Trajectory]:
        try:
            return list(map(self._held.__getitem__, origins))
        except KeyError as error:
            (origin,) = error.args
            raise KeyError(
                f"bus {self.name!r}: record {name_origin(origin)} is not held: it was released, or "
                "never polled"
            ) from None

    # -- its end --------------------------------------------------------------------------------

    def release(self, origins: Sequence[Origin], reason: str = "acknowledged") -> None:
        """End held records, each named once: their space returns to the producers."""
        if reason not in REASONS:
            raise ValueError(f"reason: expected one of {', '.join(REASONS)}, got {reason!r}")
        with self._lock:
            self._require_open()
            records = self._find(origins)
            _core.uninterrupted(self._release, origins, records, REASONS.index(reason))

    def _release(
        self, origins: Sequence[Origin], records: list[_core.Trajectory], reason: int
    ) -> None:
        for split in set(map(_SPLIT, records)):  # a release counts for a single split
            self._reader.release([t for t in records if t.split == split], reason)
        held, of_group = self._held, self._of_group
        for origin in origins:
            del held[origin]
        lead, ended = self._upkeep.lead, 0
        one_of = {t.key: t for t in records}
        for key, count in Counter(map(_KEY, records)).items():
            left = of_group[key] - count
            if left:
                of_group[key] = left
                continue
            del of_group[key]
            ended += 1
            if key not in self.relayed:
                self._upkeep.requests.ended([one_of[key]])
            if lead.bounded:
                _core.lead_leave(self._segment, *split_key(key))
        lead.follow(0, ended)
        self._note_held()

    def key_of(self, name: GroupName) -> Hashable:
        """Return a group name's key on this bus."""
        return make_key(name[0], name[1], number_of(self._segment, name[2]))

    def holds(self, key: Hashable) -> bool:
        """Return True if a record of a group is held."""
        return key in self._of_group

    def end_request(self, key: Hashable) -> None:
        """Stop the making of a group's samples, and tell producers."""
        with self._lock:
            self.cancel([key] if has_round(key) else [])
            self._upkeep.requests.end(key)
            self._upkeep.lead.doubt([key])
            self.relayed.discard(key)

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """Tell producers about groups that need no more samples."""
        with self._lock:
            self._require_open()
            self._note.cancelled.extend(keys)
            self._note_held()

    # -- state ----------------------------------------------------------------------------------

    def require_bus(self) -> None:
        """Raise BusRemovedError after the bus lost its name; held records can still be exported."""
        with self._lock:
            self._require_open()
            self._segment.require_name()

    def note(self, figures: tuple[int, ...]) -> None:
        """Write a relay's figures for `shmbus status`: at most 8 counts."""
        with self._lock:
            self._require_open()
            _core.relay_note(self._segment, 0, time.monotonic_ns(), figures)

    def _note_held(self) -> None:
        """Publish the number of held records, for other processes' messages."""
        self._note.failing_cells = len(self._held)
        self._reader.note(self._note)

    def close(self) -> None:
        """Leave the bus. Unreleased records stay for the next reader."""
        self._reader.wake()
        with self._lock:
            # The reader first: a record without its holder would give its space away.
            self._reader.close()
            self._held.clear()
            self._of_group.clear()


def reason_of(report: _core.Trajectory) -> str:
    """Return the reason in a failure report."""
    try:
        return str(report.meta)[: limits.STATUS_REASON_BYTES]
    except ValueError:
        return "a reason that cannot be read"
