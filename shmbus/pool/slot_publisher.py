"""Publication into a slot pool: deadlines, policies and ranks around the protocol in C.

Invariants:

- A `VersionWrite` ends in exactly one way: readers get the whole version, or the previous version
  stays the newest.
- Every wait has a deadline, rechecks the locks of the awaited processes, and names them.
- Rank 0 creates the pool, and never replaces a pool with a living participant.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shmbus import errors
from shmbus.base.arguments import (
    check_bytes,
    check_choice,
    check_flag,
    check_int,
    check_int64,
    check_timeout,
    fit_text,
)
from shmbus.base.format import printable, show_wait
from shmbus.errors import BusBusyError, PeerGoneError, WaitTimeoutError, WeightsError
from shmbus.pool.pool_file import (
    PoolSpec,
    companion_of,
    create_handle,
    identity_of,
    open_pool,
    pool_path,
    sizes_of,
    unlink_pool,
)
from shmbus.pool.pool_status import describe_holders, status_of_pool
from shmbus.segment.names import leads_to
from shmbus.segment.peer_wait import SLICE_S, wait_for
from shmbus_ext import _core


def attach(
    bus: str, kind: str, rank: int, spec: PoolSpec | None, timeout: float
) -> tuple[_core.SlotPool, bool]:
    """Open or create a pool; return the pool, and True for a new file."""
    deadline = time.monotonic() + timeout
    sizes = None if spec is None else sizes_of(spec)
    while True:
        try:
            pool = open_pool(bus, kind)
        except errors.BusNotFoundError:
            if rank == 0 and spec is None:
                raise
            if rank == 0 and spec is not None:
                with contextlib.suppress(errors.BusExistsError):  # a concurrent creator was faster
                    return create_handle(bus, kind, spec), True
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"pool {kind!r} of bus {bus!r}: rank 0 did not create it in "
                    f"{show_wait(timeout)} ({pool_path(bus, kind)} does not exist)"
                ) from None
            time.sleep(SLICE_S)
            continue
        small = [] if rank or sizes is None else shortages(pool, sizes)
        if not small:
            return pool, False
        _remove_small(bus, kind, pool, small)


def shortages(pool: _core.SlotPool, sizes: Mapping[str, int]) -> list[str]:
    """Name a pool's sizes below the wanted sizes."""
    return [
        f"{name} is {found}, expected {sizes[name]}"
        for name in ("slot_bytes", "meta_bytes", "patch_bytes", "max_slots")
        if (found := getattr(pool, name)) < sizes[name]
    ]


def _remove_small(bus: str, kind: str, pool: _core.SlotPool, small: list[str]) -> None:
    """Remove a pool of insufficient size, unless a living process takes part."""
    status = status_of_pool(bus, kind, pool)
    users = [f"rank {rank.rank} (pid {rank.pid})" for rank in status.ranks if rank.state == "alive"]
    users += [f"{it.label} (pid {it.pid})" for it in status.readers if it.state == "alive"]
    pool.close()
    if users:
        raise BusBusyError(
            f"pool {kind!r} of bus {bus!r} is too small: {'; '.join(small)}; "
            f"{', '.join(users[:4])} use it. Close those, or publish under another name"
        )
    with contextlib.suppress(errors.BusNotFoundError):  # a concurrent process removed it first
        unlink_pool(bus, kind)


_T = TypeVar("_T")

WhenHeld: TypeAlias = Literal["wait", "skip", "grow"]

#: Seconds for readers to let go of a slot, and for ranks to write their pieces.
DEFAULT_TIMEOUT_S: Final = 60.0

#: Final states of a piece without data.
_FINAL: Final = (_core.PIECE_DEAD, _core.PIECE_FAILED)


class PoolPublisher(_core.ClosedByBlock):
    """Rank 0 publishes; other ranks write pieces of the same versions."""

    def __init__(
        self,
        bus: str,
        kind: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        spec: PoolSpec | None = None,
        label: str = "",
        when_held: WhenHeld = "wait",
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        rank, world_size = check_int("rank", rank), check_int("world_size", world_size)
        if not 1 <= world_size <= _core.POOL_MAX_RANKS or not 0 <= rank < world_size:
            raise ValueError(
                f"rank, world_size: expected 0 <= rank < world_size <= {_core.POOL_MAX_RANKS}, "
                f"got {rank} and {world_size}"
            )
        check_choice("when_held", when_held, ("wait", "skip", "grow"))
        if timeout is None:
            raise TypeError("timeout: expected seconds, got None; a wait needs an end")
        check_timeout(timeout)
        label = fit_text("label", label, _core.POOL_LABEL_BYTES)
        label = label or f"rank {rank} of pid {os.getpid()}"
        self.bus, self.kind = bus, kind
        self.rank, self.world_size = rank, world_size
        self._pid = os.getpid()
        self.when_held, self.timeout = when_held, timeout
        # Ranks seen alive by this process; a rank dead since before may be restarting.
        self._seen: set[int] = set()
        self._path = pool_path(bus, kind)
        self.pool, made = attach(bus, kind, rank, spec, timeout)
        try:
            self._identity = identity_of(self._path)
            claimed = self.pool.claim_writer(rank, label)
            if claimed and rank == 0 and spec is not None:
                # The pool of an earlier run may have fewer open slots.
                while self._slots_open() < spec.slots and self._grow():
                    pass
        except BaseException:
            # A pool created by this call is empty.
            self._identity = identity_of(self._path)
            self.close(remove=made)
            raise
        if not claimed:
            pid, holder = self._holder()
            self.pool.close()
            again = (
                ". That is this process: where a notebook's cell makes its publisher again, have "
                "its first line close() the one before"
            )
            raise BusBusyError(
                f"pool {kind!r} of bus {bus!r}: {holder} is rank {rank} already; a pool has one "
                "process a rank: close that one first, or publish under another name"
                + (again if pid == os.getpid() else "")
            )

    def _holder(self) -> tuple[int, str]:
        for rank in status_of_pool(self.bus, self.kind, self.pool).ranks:
            if rank.rank == self.rank:
                return rank.pid, f"pid {rank.pid} ({rank.label})"
        return 0, "another process"

    def begin(
        self,
        version: int,
        size: int,
        *,
        meta: bytes | None = b"",
        text: str = "",
        patch: bool = False,
    ) -> VersionWrite | None:
        """Begin to write a version; ranks above 0 join the version of rank 0."""
        version, size = check_int64("version", version), check_bytes("size", size)
        if meta is not None and not isinstance(meta, bytes):
            raise TypeError(f"meta: expected bytes or None, got {type(meta).__name__}")
        patch = check_flag("patch", patch)
        if self.rank == 0:
            self._require_name(version)
            fitted = fit_text("text", text, _core.POOL_TEXT_BYTES)
            write = self._begin(version, size, meta or b"", fitted, patch)
        else:
            write = self._join()
            same = meta is None or write.meta == meta
            if not same or (write.version, write.bytes) != (version, size):
                said = (
                    f"rank {self.rank} has version {version} of {size} bytes, rank 0 publishes "
                    f"version {write.version} of {write.bytes} bytes"
                )
                said += "" if same else ", with another manifest"
                write.give_up(fit_text("reason", said, _core.POOL_ERROR_BYTES))
                raise WeightsError(
                    f"pool {self.kind!r} of bus {self.bus!r}: {said}; let every rank publish the "
                    "same"
                )
        return None if write is None else VersionWrite(self, write)

    def _require_name(self, version: int) -> None:
        if not self._has_name() and not self.pool.closed:
            raise errors.BusRemovedError(
                f"pool {self.kind!r} of bus {self.bus!r} was removed: no new reader would find "
                f"version {version}. Leased versions stay readable; make a new publisher"
            )

    def _has_name(self) -> bool:
        return self._identity is not None and leads_to(self._path, self._identity)

    def _begin(
        self, version: int, size: int, meta: bytes, text: str, patch: bool
    ) -> _core.PoolWrite | None:
        def ready() -> _core.PoolWrite | Literal[False] | None:
            while True:
                got = _core.pool_begin(self.pool, version, size, meta, text, self.world_size, patch)
                if isinstance(got, _core.PoolWrite):
                    return got
                if self.when_held == "skip":
                    self.pool.count_skipped()
                    return False
                if self.when_held != "grow" or not self._grow():
                    return None

        def late() -> Exception:
            status = status_of_pool(self.bus, self.kind, self.pool)
            return WaitTimeoutError(
                f"pool {self.kind!r} of bus {self.bus!r}: no slot became free for version "
                f"{version} in {show_wait(self.timeout)}; held: {describe_holders(status)}. "
                f"Version {status.version} stays the newest; let readers close what they "
                "leased, or choose more slots, when_held='skip' or when_held='grow'"
            )

        got = self.wait(_core.POOL_BELL_SPACE, ready, late)
        return got if isinstance(got, _core.PoolWrite) else None

    def wait(
        self,
        bell: int,
        ready: Callable[[], _T | None],
        late: Callable[[], Exception],
        gone: Callable[[], Exception | None] = lambda: None,
    ) -> _T:
        """Wait by a bell of the pool, for as long as the publisher's timeout."""
        return wait_for(
            ready,
            announce=lambda: self.pool.announce(bell),
            sleep=lambda ticket, seconds: self.pool.wait(bell, ticket, seconds),
            gone=gone,
            late=late,
            deadline=time.monotonic() + self.timeout,
        )

    def _slots_open(self) -> int:
        return status_of_pool(self.bus, self.kind, self.pool).slots_open

    def _grow(self) -> bool:
        try:
            if self._slots_open() < self.pool.max_slots:
                companion_of(self.bus, self.kind).require_room(self.pool.slot_stride)
            return self.pool.grow()
        except OSError as error:
            raise errors.CapacityError(
                f"pool {self.kind!r} of bus {self.bus!r}: no memory for another slot of "
                f"{self.pool.slot_stride} bytes ({error.strerror}); published versions stay. "
                "Enlarge /dev/shm, or let readers close their leases"
            ) from error

    def _join(self) -> _core.PoolWrite:
        def ready() -> _core.PoolWrite | None:
            got = _core.pool_join(self.pool)
            return got if isinstance(got, _core.PoolWrite) else None

        def late() -> Exception:
            return WaitTimeoutError(
                f"pool {self.kind!r} of bus {self.bus!r}: rank 0 began no version in "
                f"{show_wait(self.timeout)}; every rank publishes each version"
            )

        def gone() -> Exception | None:
            return self._leader_gone("before it began a version")

        got = self.wait(_core.POOL_BELL_RANKS, ready, late, gone)
        self._seen.add(0)
        return got

    def _leader_gone(self, when: str) -> PeerGoneError | None:
        rows = {row["rank"]: row for row in _core.pool_rows(self.pool)["ranks"]}
        row = rows.get(0)
        if row is not None and row["life"] == _core.ROW_ALIVE:
            self._seen.add(0)
        elif 0 in self._seen:
            self._seen.discard(0)
            who = f" (pid {row['pid']}, {printable(row['label'])})" if row else ""
            return PeerGoneError(
                f"pool {self.kind!r} of bus {self.bus!r}: rank 0{who} has ended {when}; the newest "
                "whole version stays",
                0,
            )
        return None

    def close(self, *, remove: bool = False) -> None:
        """Leave the pool."""
        if self.pool.closed:
            return
        # Only while this process holds the rank: no successor has taken over the pool. A forked
        # child holds no rank, and a recreated pool of the same name belongs to its new publisher.
        if remove and os.getpid() == self._pid and self._has_name():
            with contextlib.suppress(errors.BusNotFoundError):  # already removed
                unlink_pool(self.bus, self.kind)
        self.pool.close()


class Piece(NamedTuple):
    """Place of elements in a version's bytes."""

    offset: int
    rows: int
    row_bytes: int
    stride: int
    width: int


class VersionWrite:
    """Version under construction: a ``with`` block publishes it at its end."""

    def __init__(self, publisher: PoolPublisher, write: _core.PoolWrite) -> None:
        self._publisher = publisher
        self._write = write
        self.version: Final = write.version
        self.sequence: Final = write.sequence
        self.slot: Final = write.slot

    @property
    def meta(self) -> bytes:
        """Return rank 0's meta of the version."""
        return self._write.meta

    @property
    def buffer(self) -> _core.PoolWrite:
        """Return the payload as an object with a writable buffer."""
        return self._write

    def view(self) -> npt.NDArray[np.uint8]:
        """View the payload as an array of bytes, to write into."""
        return np.frombuffer(memoryview(self._write), np.uint8)

    def put_piece(self, piece: Piece, source: Any) -> int | None:
        """Write a piece, and pack its changes since the previous version; None without a patch."""
        return _core.pool_patch_put(self._write, *piece, source)

    def finish(self, *, digests: bool = False) -> None:
        """Publish the version, after every rank's piece arrived; readers get it at return."""
        if self._publisher.rank == 0:
            try:
                self._await_pieces()
            except BaseException:
                self._write.give_up("")
                raise
            self._write.finish(digests)
        else:
            self._write.finish(False)
            self._await_outcome()

    def give_up(self, reason: str = "") -> None:
        """Abandon the version; the previous one stays in force."""
        self._write.give_up(fit_text("reason", reason, _core.POOL_ERROR_BYTES))

    def _await_pieces(self) -> None:
        publisher, pool = self._publisher, self._publisher.pool
        waiting = list(range(1, publisher.world_size))
        states: dict[int, int] = {}

        def ready() -> bool | None:
            nonlocal states, waiting
            states = {rank: pool.piece_state(self.sequence, rank) for rank in waiting}
            waiting = [rank for rank, state in states.items() if state != _core.PIECE_DONE]
            away = {_core.PIECE_ABSENT, *_FINAL}
            publisher._seen.update(rank for rank, state in states.items() if state not in away)
            return None if waiting else True

        def gone() -> Exception | None:
            for rank in waiting:
                state = states[rank]
                if state in _FINAL or (state == _core.PIECE_ABSENT and rank in publisher._seen):
                    publisher._seen.discard(rank)  # the next version may wait for a successor
                    return self._piece_error(rank, state)
            return None

        def late() -> Exception:
            return WaitTimeoutError(
                f"{self._name()}: ranks {waiting} did not write their pieces in "
                f"{show_wait(publisher.timeout)}; the version before it stays the newest"
            )

        publisher.wait(_core.POOL_BELL_RANKS, ready, late, gone)

    def _piece_error(self, rank: int, state: int) -> errors.ShmbusError:
        rows = _core.pool_rows(self._publisher.pool)["ranks"]
        row = next((row for row in rows if row["rank"] == rank), None)
        who = f"rank {rank}" + (f" (pid {row['pid']}, {printable(row['label'])})" if row else "")
        stays = "; the version before it stays the newest"
        if state == _core.PIECE_FAILED:
            reason = printable(row["error"]) if row else ""
            return WeightsError(f"{self._name()}: {who} could not write its piece: {reason}{stays}")
        return PeerGoneError(
            f"{self._name()}: {who} has ended before its piece was written{stays}", rank
        )

    def _await_outcome(self) -> None:
        publisher, pool = self._publisher, self._publisher.pool

        def ready() -> bool | None:
            return pool.outcome(self.sequence) or None

        def gone() -> Exception | None:
            if pool.outcome(self.sequence) is None:
                return None
            publisher._seen.add(0)
            return publisher._leader_gone("before the version was whole") or WeightsError(
                f"{self._name()}: rank 0 gave it up; the version before it stays the newest"
            )

        def late() -> Exception:
            return WaitTimeoutError(
                f"{self._name()}: rank 0 did not finish it in {show_wait(publisher.timeout)}"
            )

        publisher.wait(_core.POOL_BELL_RANKS, ready, late, gone)

    def _name(self) -> str:
        return (
            f"pool {self._publisher.kind!r} of bus {self._publisher.bus!r}, version {self.version}"
        )

    def __enter__(self) -> VersionWrite:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._write.ended:
            return
        if error is not None:
            self.give_up(f"{type(error).__name__}: {error}")
        else:
            self.finish()
