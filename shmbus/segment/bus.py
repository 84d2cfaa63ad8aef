"""Bus: the segment itself, to create, inspect or remove.

Producers and consumers need only its name; they open handles of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from shmbus import errors
from shmbus.base.arguments import check_policy_version
from shmbus.base.format import show_size
from shmbus.base.ledger import REASONS
from shmbus.data.schema import Schema, declared_schema, mapping_of, parse
from shmbus.segment import creation, lifecycle
from shmbus.segment.creation import check_bounds
from shmbus.segment.names import identity, is_named
from shmbus_ext import _core


class ProducerInfo(msgspec.Struct, frozen=True):
    """A used producer slot.

    Attributes
    ----------
    producer_id, pid : int
        Its number on the bus, and its process, as numbered in its own pid namespace.
    label : str
        The producer's own name.
    state : "free" | "active" | "closed"
        Also "active" for a dead producer not reaped yet.
    committed, aborted : int
        By all producers that ever owned the slot.
    """

    producer_id: int
    pid: int
    label: str
    state: str
    committed: int
    aborted: int


class BusStats(msgspec.Struct, frozen=True):
    """The counters of a bus, read without disturbing the bus.

    Attributes
    ----------
    committed, acknowledged : int
        Trajectories committed by producers, and acknowledged by trainers.
    dropped : dict[str, int]
        Trajectories released without acknowledgement, by reason.
    undelivered : int
        Committed and neither acknowledged nor dropped.
    capacity, free : int
        Bytes for records, and bytes in free extents.
    producers : list[ProducerInfo]
        Used slots.
    collector_pid : int
        The process that reads the bus; 0 without collector.
    policy_version : int
        The trainer's current version.
    """

    committed: int
    acknowledged: int
    dropped: dict[str, int]
    undelivered: int
    capacity: int
    free: int
    producers: list[ProducerInfo]
    collector_pid: int
    policy_version: int


_STATES = {_core.SLOT_FREE: "free", _core.SLOT_ACTIVE: "active", _core.SLOT_CLOSED: "closed"}


class Bus:
    """A bus in /dev/shm. Use `Bus.create`, `Bus.open` or `Bus.ensure`.

    As a context manager, a bus made by `create` is removed at the end of the block, in the process
    that made it; a bus from `open` or `ensure` is only closed. Outside a ``with`` block a bus stays
    until `unlink`. A handle pickles by name, and attaches on unpickling.

    Attributes
    ----------
    name : str
        Its name.
    """

    def __init__(self, segment: _core.Segment, *, owned: bool) -> None:
        self.name: str = segment.name
        self._segment = segment
        self._owner_pid = os.getpid() if owned else 0
        self._made = identity(segment.name) if owned else None
        self._closed = False

    @classmethod
    def create(
        cls,
        name: str,
        capacity: int | str | None = None,
        *,
        max_producers: int | None = None,
        extent_bytes: int = 0,
        request_capacity: int | str | None = None,
        max_lead: int | None = None,
        max_lead_versions: int | None = None,
        schema: Schema | None = None,
    ) -> Bus:
        """Create a bus: mode 0600, exclusively, with all its memory allocated and touched.

        Parameters
        ----------
        name : str
            1 to 200 bytes without "/".
        capacity : int or str, optional
            Bytes for records, or a str such as "256MiB". A record may take a quarter of the
            capacity. None for 256 MiB, or half of the free /dev/shm if less, as in a container.
        max_producers : int, optional
            Producers attached at once, each with an extent of its own. None for 64, or as
            many as fit.
        extent_bytes : int
            A producer's unit of lease, a multiple of 4096; 0 chooses.
        request_capacity : int or str, optional
            Bytes for requests (`Feeder`), 64 KiB to 4 GiB; by default a 32nd of the capacity.
        max_lead : int, optional
            Maximum number of groups begun and not delivered yet, 1 to 4096. A `put` that would
            begin a further group waits, as on a full bus; puts for begun groups never wait. None
            for no bound but the capacity. If workers share groups without the request lane, all
            workers must begin groups in the same order; else they may all wait for each other.
        max_lead_versions : int, optional
            The same bound in policy versions, 0 or more: the number of groups the trainer takes in
            the current version and this many further versions, at the last version's rate. Both
            bounds may be given.
        schema : mapping of str to dtype or (dtype, shape), optional
            The fields of every sample, kept in the segment: every producer's `put` checks samples
            and converts lists by it. A name with a final "?" may be missing. A shape is a tuple of
            sizes, of names such as "T" with the same size in all fields of a sample, and of None
            for an arbitrary size; ``...`` stands for an arbitrary shape. Without a shape, tokens,
            loss_mask, logprobs and advantages get ("T",), and further fields an arbitrary shape.

        Returns
        -------
        Bus

        Raises
        ------
        BusExistsError
            The name is taken.
        CapacityError
            /dev/shm cannot hold the bus, or lacks free space for a default (also a ValueError).
        TypeError, ValueError
            A bad name, size or schema, or more producers than the capacity's extents.

        Examples
        --------
        >>> import shmbus
        >>> schema = {"tokens": "int32", "logprobs": "float32", "experts?": ("uint8", ("T", 48, 8))}
        >>> with shmbus.Bus.create("run1", "1MiB", schema=schema), shmbus.Producer("run1") as p:
        ...     p.put("q1", group_size=1, index=0, tokens=[1, 2, 3], logprobs=[-0.1, -0.2, -0.3])
        """
        bounds = check_bounds(request_capacity, max_lead, max_lead_versions)
        declared = None if schema is None else parse(schema)
        segment = creation.create_segment(
            name, capacity, max_producers, extent_bytes, bounds=bounds, schema=declared
        )
        try:
            return cls(segment, owned=True)
        except BaseException:
            creation.remove_made(segment)
            raise

    @classmethod
    def ensure(
        cls,
        name: str,
        capacity: int | str | None = None,
        *,
        max_producers: int | None = None,
        extent_bytes: int = 0,
        request_capacity: int | str | None = None,
        max_lead: int | None = None,
        max_lead_versions: int | None = None,
        schema: Schema | None = None,
    ) -> Bus:
        """Create a bus, or open an existing bus that fits: in every order, from many processes.

        The first process creates the bus. No process owns the bus: it stays after a ``with`` block,
        and after the death of its creator, until `unlink`. Undelivered records of an earlier run
        are delivered. The unfinished bus of a killed creator is made again.

        Parameters
        ----------
        name : str
            1 to 200 bytes without "/".
        capacity, max_producers, request_capacity : object, optional
            As for `create`; an existing bus fits with as much or more. None accepts every value.
        extent_bytes, max_lead, max_lead_versions, schema : object, optional
            As for `create`; an existing bus fits with exactly these. None, or 0 bytes, accepts
            every value.

        Returns
        -------
        Bus

        Raises
        ------
        BusExistsError
            The existing bus does not fit; the message names the property and both figures.
        LayoutMismatchError
            The existing bus has another layout, is damaged, or was not finished within 10 s.
        CapacityError, TypeError, ValueError
            As for `create`.

        Examples
        --------
        The same line in trainer and workers, whichever starts first::

            shmbus.Bus.ensure("run1", capacity="1GiB", max_producers=128)
        """
        bounds = check_bounds(request_capacity, max_lead, max_lead_versions)
        declared = None if schema is None else parse(schema)
        segment = creation.ensure_segment(
            name, capacity, max_producers, extent_bytes, bounds=bounds, schema=declared
        )
        return cls(segment, owned=False)

    @classmethod
    def open(cls, name: str) -> Bus:
        """Attach to an existing bus.

        Parameters
        ----------
        name : str
            The bus.

        Returns
        -------
        Bus

        Raises
        ------
        BusNotFoundError
            The bus does not exist.
        LayoutMismatchError
            The bus has another layout, is truncated or damaged; the message names both sides'
            versions.
        """
        return cls(lifecycle.open_segment(name), owned=False)

    @property
    def capacity(self) -> int:
        """Bytes for records."""
        return self._segment.capacity

    @property
    def max_producers(self) -> int:
        """Maximum number of producers attached at once."""
        return self._segment.max_producers

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record, header and padding included."""
        return self._segment.record_limit

    @property
    def created_unix_ns(self) -> int:
        """Creation time, nanoseconds since 1970; distinguishes buses of the same name."""
        return self._segment.created_unix_ns

    @property
    def identity(self) -> str:
        """128 random bits as 32 hexadecimal digits, made with the bus and unique to it.

        A bus made again under the same name, or restored from a snapshot, gets new bits.
        """
        return self._segment.identity

    @property
    def extent_bytes(self) -> int:
        """Bytes a producer leases at a time."""
        return self._segment.extent_bytes

    @property
    def policy_version(self) -> int:
        """The trainer's current policy version; settable."""
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._require_open()
        self._segment.policy_version = check_policy_version(version)

    @property
    def schema(self) -> dict[str, tuple[str, Any]] | None:
        """The declared schema, by name (dtype, shape), for `schema=` again; None without."""
        declared = declared_schema(self._segment)
        return None if declared is None else mapping_of(declared)

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise errors.BusClosedError(f"bus {self.name!r}: this handle is closed; open a new one")

    def pause(self, reason: str = "") -> None:
        """Make producers wait until `resume`, as if the bus were full; consumers go on.

        Parameters
        ----------
        reason : str
            The reason shown to producers, up to 119 bytes of UTF-8.

        Raises
        ------
        TypeError
            The reason is no str.
        ValueError
            The reason is longer, or holds a NUL.
        """
        self._require_open()
        if not isinstance(reason, str):
            raise TypeError(f"reason: expected a str, got {type(reason).__name__}")
        if len(reason.encode("utf-8", "replace")) > _core.PAUSE_REASON_BYTES or "\0" in reason:
            raise ValueError(
                f"reason: expected at most {_core.PAUSE_REASON_BYTES} bytes of UTF-8 without NUL, "
                f"got {reason!r}; say it shorter"
            )
        reason = reason.encode("utf-8", "replace").decode()
        self._segment.pause(reason, self._segment.policy_version)

    def resume(self) -> None:
        """End a pause begun by an arbitrary process."""
        self._require_open()
        self._segment.resume()

    @property
    def paused(self) -> str | None:
        """The reason of the pause, maybe empty; None without a pause."""
        pause = self._segment.paused()
        return None if pause is None else pause[0]

    def stats(self) -> BusStats:
        """Read the counters of the segment.

        Returns
        -------
        BusStats
            Each counter of its own moment, not of a common moment.
        """
        self._require_open()
        segment = self._segment
        rows = segment.producers()
        released = segment.released()
        committed = sum(row[5] for row in rows)
        return BusStats(
            committed=committed,
            acknowledged=released[0],
            dropped={r: n for r, n in zip(REASONS[1:], released[1:], strict=True) if n},
            undelivered=committed - sum(released),
            capacity=segment.capacity,
            free=segment.free_extents() * segment.extent_bytes,
            producers=[
                ProducerInfo(pid_, pid, label, _STATES.get(state, "damaged"), done, aborted)
                for _, state, pid_, pid, label, done, aborted in rows
            ],
            collector_pid=segment.collector()["pid"] if segment.has_collector() else 0,
            policy_version=segment.policy_version,
        )

    def unlink(self) -> None:
        """Remove the name; the memory is freed with the last handle and the last view.

        Raises
        ------
        BusNotFoundError
            The bus was removed already.
        """
        lifecycle.unlink(self.name)
        self._owner_pid = 0

    def close(self) -> None:
        """Close this handle. The bus stays."""
        self._closed = True
        self._segment.close()

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A forked child leaves this block too, and did not create the bus.
        if self._owner_pid == os.getpid():
            self._remove_own()
        self.close()

    def _remove_own(self) -> None:
        """Remove the bus, unless the name vanished or leads to another bus now."""
        self._owner_pid = 0
        with contextlib.suppress(errors.BusNotFoundError):
            if self._made is not None and is_named(self.name, self._made):
                lifecycle.unlink(self.name)

    def __reduce__(self) -> tuple[Callable[[str], Bus], tuple[str]]:
        return Bus.open, (self.name,)

    def __repr__(self) -> str:
        return f"<Bus {self.name!r} {show_size(self.capacity)}>"
