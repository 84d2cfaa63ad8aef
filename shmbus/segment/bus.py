"""Bus: the segment itself, to create, inspect or remove it.

Producers and consumers need only its name; they open handles of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from shmbus import errors
from shmbus._arguments import check_policy_version
from shmbus._format import show_size
from shmbus._schema import Schema, declared_schema, mapping_of, parse
from shmbus.ledger import REASONS
from shmbus.segment import creation, lifecycle
from shmbus.segment.bounds import check_bounds
from shmbus.segment.names import identity, is_named
from shmbus_ext import _core


class ProducerInfo(msgspec.Struct, frozen=True):
    """One producer slot that has been used.

    Attributes
    ----------
    producer_id, pid : int
        Its number on the bus, and its process, as numbered in its own pid namespace.
    label : str
        The name that it gave itself.
    state : "free" | "active" | "closed"
        Also "active" for one that died and was not reaped yet.
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
    """The counters of a bus, read without disturbing it.

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
        Slots that have been used.
    collector_pid : int
        The process that reads the bus; 0 where none does.
    policy_version : int
        The trainer's current one.
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

    As a context manager, a bus that `create` made is removed at the end of the block, in the
    process that made it; one of `open` or `ensure` is only closed. Outside a ``with`` block a bus
    stays until `unlink`. A handle pickles by name, and attaches where it is loaded.

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
        """Create a bus: mode 0600, exclusively, with all of its memory allocated and touched.

        Parameters
        ----------
        name : str
            1 to 200 bytes without "/".
        capacity : int or str, optional
            Bytes for records, or a str such as "256MiB". One record may take a quarter of it. None
            for 256 MiB, or half of what /dev/shm has free where that is less, as in a container.
        max_producers : int, optional
            How many may be attached at once, each with an extent of its own. None for 64, or as
            many as have room.
        extent_bytes : int
            What a producer leases at a time, a multiple of 4096; 0 chooses.
        request_capacity : int or str, optional
            Bytes for requests (`Feeder`), 64 KiB to 4 GiB; by default a 32nd of the capacity.
        max_lead : int, optional
            How many groups may be begun and not delivered yet, 1 to 4096. A `put` that would begin
            another waits, as on a full bus; those of groups that were begun never do. None for no
            bound but the capacity. Where workers share groups without the request lane, all of them
            begin groups in the same order, or every one may wait for the others.
        max_lead_versions : int, optional
            The same in policy versions, 0 or more: as many groups as the trainer takes in this and
            so many further versions, as it took them in the last one. Both bounds may be given.
        schema : mapping of str to dtype or (dtype, shape), optional
            The fields that every sample has, kept in the segment: each `put` of each producer is
            checked by it, and converts lists by it. A name that ends in "?" may be missing. A shape
            is a tuple of sizes, of names such as "T" that have one size in all fields of a sample,
            and of None for any size; ``...`` is any shape. Without a shape, tokens, loss_mask,
            logprobs and advantages have ("T",), and others any shape.

        Returns
        -------
        Bus

        Raises
        ------
        BusExistsError
            There is one of that name.
        CapacityError
            /dev/shm cannot hold it, or has too little free to choose (also a ValueError).
        TypeError, ValueError
            A bad name, size or schema, or more producers than the capacity has extents for.

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
        """Create a bus, or open the one that is there if it fits: in any order, by any number.

        Whoever comes first creates it. Nobody owns it: it stays after a ``with`` block, and after
        the death of its creator, until `unlink`. What an earlier run left in it undelivered is
        delivered. What a creator that was killed left unfinished is made again.

        Parameters
        ----------
        name : str
            1 to 200 bytes without "/".
        capacity, max_producers, request_capacity : object, optional
            As for `create`; a bus that is there fits with as much or more. None takes any.
        extent_bytes, max_lead, max_lead_versions, schema : object, optional
            As for `create`; a bus that is there fits with exactly these. None, or 0 bytes, takes
            any.

        Returns
        -------
        Bus

        Raises
        ------
        BusExistsError
            There is one that does not fit; the message says in what, and both figures.
        LayoutMismatchError
            There is one of another layout, damaged, or not finished within 10 s.
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
        """Attach to a bus that exists.

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
            There is none.
        LayoutMismatchError
            It is of another layout, truncated or damaged; the message says both sides' versions.
        """
        return cls(lifecycle.open_segment(name), owned=False)

    @property
    def capacity(self) -> int:
        """Bytes for records."""
        return self._segment.capacity

    @property
    def max_producers(self) -> int:
        """How many producers may be attached at once."""
        return self._segment.max_producers

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record, header and padding included."""
        return self._segment.record_limit

    @property
    def created_unix_ns(self) -> int:
        """When it was created, nanoseconds since 1970; tells buses of one name apart."""
        return self._segment.created_unix_ns

    @property
    def identity(self) -> str:
        """128 random bits as 32 hexadecimal digits, made with the bus: no other bus has them.

        A bus that is made again under the same name, or restored from a snapshot, has new ones.
        """
        return self._segment.identity

    @property
    def extent_bytes(self) -> int:
        """Bytes that a producer leases at a time."""
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
        """What it was created with, by name (dtype, shape), for `schema=` again; None without."""
        declared = declared_schema(self._segment)
        return None if declared is None else mapping_of(declared)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise errors.BusClosedError(f"bus {self.name!r}: this handle is closed; open a new one")

    def pause(self, reason: str = "") -> None:
        """Make producers wait until `resume`, as if the bus were full; consumers go on.

        Parameters
        ----------
        reason : str
            The reason that producers see, up to 119 bytes of UTF-8.

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
        """End a pause, whichever process began it."""
        self._require_open()
        self._segment.resume()

    @property
    def paused(self) -> str | None:
        """The reason of the pause, which may be empty; None without a pause."""
        pause = self._segment.paused()
        return None if pause is None else pause[0]

    def stats(self) -> BusStats:
        """Read the counters of the segment.

        Returns
        -------
        BusStats
            As of one moment for each counter, not for all of them together.
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
            It was removed already.
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
        """Remove the bus, unless the name is gone or leads to another one now."""
        self._owner_pid = 0
        with contextlib.suppress(errors.BusNotFoundError):
            if self._made is not None and is_named(self.name, self._made):
                lifecycle.unlink(self.name)

    def __reduce__(self) -> tuple[Callable[[str], Bus], tuple[str]]:
        return Bus.open, (self.name,)

    def __repr__(self) -> str:
        return f"<Bus {self.name!r} {show_size(self.capacity)}>"
