"""OriginReader: a bus's records one by one, each known by its origin, for a relay's source.

Where a Consumer groups samples and leases groups, this hands out records, keeps them in the ring,
and releases them when it is told to. So what was not released is there for whoever reads the bus
next, and nothing else has to outlive a process. An origin is 32 bytes: the identity of the bus,
producer id and sequence with their high bytes first. `RecordReader` is the same for people.

Invariants
----------
- A record that was polled is held until it is released; closing or dying gives all of them back.
- A release ends all records that it names, or none, though this process die in the midst of it.
- A group that this reader has no record of any more holds no producer back: neither a row of the
  bound on how far producers are ahead, nor a request.
"""

from __future__ import annotations

import operator
import struct
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn

from shmbus import errors, limits
from shmbus._arguments import check_timeout
from shmbus._keys import split_key
from shmbus.ledger import REASONS, Ledger
from shmbus.segment import lifecycle
from shmbus.segment.explain import RELAY_LABEL
from shmbus.segment.names import check_name
from shmbus.stash.lead import Lead
from shmbus.stash.requests import Requests
from shmbus_ext import _core

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OriginReader"]

#: Producer id and sequence, the second half of an origin.
_ID: Final = struct.Struct(">QQ")
_KEY: Final = operator.attrgetter("key")

#: Stragglers are moved when less than this fraction of the extents is free ...
_EVACUATE_FREE_FRACTION = 0.125
#: ... and at most this often, in seconds, since each attempt walks all held records.
_EVACUATE_INTERVAL_S = 0.05


class OriginReader:
    """What a `RecordReader` is but for its heads; parameters and errors are described there.

    Parameters
    ----------
    name : str
    wait : float, optional
    """

    def __init__(self, name: str, *, wait: float | None = 0.0) -> None:
        self.name: str = check_name(name)
        lifecycle.wait_for_bus(name, check_timeout(wait, "wait"))
        self._lock = threading.RLock()
        self._held: dict[bytes, _core.Trajectory] = {}
        #: How many records of each group are held.
        self._of_group: Counter[Hashable] = Counter()
        self._note: _core.GroupTable[_core.Trajectory] = _core.GroupTable()
        self._next_sweep_s = 0.0
        self._next_evacuation_s = 0.0
        self._segment = lifecycle.open_segment(name)
        try:
            self._reader = _core.Reader(self._segment, RELAY_LABEL)
        except BaseException:
            self._segment.close()
            raise
        self._attach_epoch = self._segment.attach_epoch
        #: Greater than that of any earlier reader of this kind of this bus.
        self.incarnation: int = _core.relay_next_source(self._segment)
        self._lead = Lead(self._segment)
        self._requests = Requests(self._segment)

    @property
    def identity(self) -> str:
        """The identity of its bus, as `Bus.identity` says it."""
        return self._segment.identity

    @property
    def policy_version(self) -> int:
        """The policy version that the producers of its bus read; settable."""
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._require_open()
        self._segment.policy_version = version
        self._lead.follow(0)

    def _require_open(self) -> None:
        if not self._reader.attached or self._segment.closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this {type(self).__name__} is closed, or was made before a "
                "fork; make a new one"
            )

    # -- from the ring --------------------------------------------------------------------------

    def poll_records(self, max_records: int) -> tuple[list[bytes], list[_core.Trajectory]]:
        """Take records that were not polled yet, each producer's in its order, without waiting.

        Parameters
        ----------
        max_records : int
            At most so many.

        Returns
        -------
        tuple[list[bytes], list[Trajectory]]
            Their origins, and the records as they lie in the ring: to be read while they are held.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            self._run_maintenance(time.monotonic())
            return self._poll_once(max_records)

    def _poll_once(self, max_records: int) -> tuple[list[bytes], list[_core.Trajectory]]:
        self._lead.begin_check()
        self._requests.begin_check()
        found = self._reader.poll(max_records)
        origins = _core.record_origins(found)
        self._held.update(zip(origins, found, strict=True))
        self._of_group.update(map(_KEY, found))
        if found:
            self._note_held()
        if len(found) < max_records:
            self._end_checks()
        return origins, found

    def _end_checks(self) -> None:
        """Clear up after deaths, with all that was committed before in hand."""
        if self._lead.checks:
            self._lead.end_check([*self._of_group, *self._requests.handed_out()])
        if self._requests.checks:
            self._requests.end_check(lambda key: key in self._of_group)

    def export_records(self, origins: Iterable[bytes], into: bytearray | memoryview) -> memoryview:
        """Copy records into a block, for another bus. They stay where they are.

        Parameters
        ----------
        origins : iterable of bytes
            Of records that are held, 1 to 16384.
        into : bytearray or memoryview
            Room for the block, to be used again and again; a new one each time costs as much as
            the copy.

        Returns
        -------
        memoryview
            The block, in `into`.

        Raises
        ------
        KeyError
            A record is not held.
        ValueError
            There are too few or too many, they do not fit `into`, or one is damaged in the ring.
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            return memoryview(into)[: _core.export_block(self._find(origins), into)]

    def _find(self, origins: Iterable[bytes]) -> list[_core.Trajectory]:
        try:
            return list(map(self._held.__getitem__, origins))
        except KeyError as error:
            (origin,) = error.args
            raise KeyError(
                f"bus {self.name!r}: record {_ID.unpack_from(origin, _ID.size)!r} is not held: it "
                "was released, or never polled; heads() says which are"
            ) from None

    # -- its end --------------------------------------------------------------------------------

    def release_records(self, origins: Sequence[bytes], reason: str = "acknowledged") -> None:
        """End records: their space is the producers' again.

        Parameters
        ----------
        origins : sequence of bytes
            Of records that are held, each once, at most 16384.
        reason : str
            Under which reason of the ledger they are counted.

        Raises
        ------
        KeyError
            A record is not held; then none is released.
        ValueError
            There is no such reason.
        BusClosedError
            It is closed, or was made before a fork.
        """
        if reason not in REASONS:
            raise ValueError(f"reason: expected one of {', '.join(REASONS)}, got {reason!r}")
        with self._lock:
            self._require_open()
            records = self._find(origins)
            _core.uninterrupted(self._release, origins, records, REASONS.index(reason))

    def _release(
        self, origins: Sequence[bytes], records: list[_core.Trajectory], reason: int
    ) -> None:
        self._reader.release(records, reason)
        held, of_group = self._held, self._of_group
        for origin in origins:
            del held[origin]
        ended = 0
        one_of = {t.key: t for t in records}
        for key, count in Counter(map(_KEY, records)).items():
            left = of_group[key] - count
            if left:
                of_group[key] = left
                continue
            del of_group[key]
            ended += 1
            if self._lead.bounded:
                _core.lead_leave(self._segment, *split_key(key))
            self._requests.ended([one_of[key]])
        self._lead.follow(0, ended)
        self._note_held()

    # -- maintenance and state ------------------------------------------------------------------

    def require_bus(self) -> None:
        """Make sure that the bus still has its name.

        Raises
        ------
        BusRemovedError
            It was removed; what is held can still be exported.
        BusClosedError
            This is closed.
        """
        with self._lock:
            self._require_open()
            self._segment.require_name()

    def note(self, figures: tuple[int, ...]) -> None:
        """Write what `shmbus status` says of a relay.

        Parameters
        ----------
        figures : tuple of int
            At most 8 counts.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            _core.relay_note(self._segment, 0, time.monotonic_ns(), figures)

    def _note_held(self) -> None:
        """Publish what this process holds, for messages of others."""
        self._note.failing_cells = len(self._held)
        self._reader.note(self._note)

    def _run_maintenance(self, now: float) -> None:
        """Sweep for dead producers and free space, each at its interval."""
        reader, segment = self._reader, self._segment
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + limits.SWEEP_INTERVAL_S
            reader.sweep()
            self._lead.follow(0)
            if segment.attach_epoch != self._attach_epoch:
                self._attach_epoch = segment.attach_epoch
                self._lead.doubt()
                self._requests.doubt()
        if now >= self._next_evacuation_s:
            self._next_evacuation_s = now + _EVACUATE_INTERVAL_S
            reader.tidy()
            few = segment.extent_count * _EVACUATE_FREE_FRACTION
            if segment.space_wanted() or segment.free_extents() < few:
                reader.sweep()
                reader.evacuate(list(self._held.values()))

    def stats(self) -> Ledger:
        """Return the ledger of its bus: what this holds counts as stashed.

        Returns
        -------
        Ledger
            As of one instant.

        Raises
        ------
        BusClosedError
            It is closed, or was made before a fork.
        """
        with self._lock:
            self._require_open()
            self._reader.sweep()
            committed, in_ring = self._reader.count_unread()
            segment = self._segment
            return Ledger.from_counts(
                segment.released(),
                committed=committed,
                in_ring=in_ring,
                leased=0,
                stashed=len(self._held),
                moved=self._reader.moves,
                policy_version=segment.policy_version,
                producers=sum(row[1] == _core.SLOT_ACTIVE for row in segment.producers()),
                capacity=segment.capacity,
                free=segment.free_extents() * segment.extent_bytes,
            )

    def close(self) -> None:
        """Leave the bus. What was not released stays for whoever reads it next."""
        self._reader.wake()
        with self._lock:
            # The reader first: a record whose holder is gone under it would give its space away.
            self._reader.close()
            self._held.clear()
            self._of_group.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"bus {self.name!r}: a {type(self).__name__} cannot be copied or pickled: it is its "
            "process's place at the bus; make another one where this one was closed"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
