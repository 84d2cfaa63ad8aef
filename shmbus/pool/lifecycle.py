"""A slot pool as a file: creating, opening and removing it.

Invariants:

- A pool that could not be completed is removed before create_pool raises.
- What is read was opened as a file of this user (`shmbus.segment.own_file`).
"""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

from shmbus import errors
from shmbus._arguments import check_int, parse_size
from shmbus._format import show_size
from shmbus.segment.made_or_removed import made_or_removed
from shmbus.segment.names import SHM_DIRECTORY, companion_name, leads_to, remove_dead_socket
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

__all__ = ["PoolSpec", "create_pool", "open_pool", "pool_path", "unlink_pool"]

#: Bytes whose digest is one number: a wrong one is named to within this much.
DEFAULT_BLOCK_BYTES = 16 << 20

#: Seconds that opening waits for a pool whose creator is still allocating it: zeroing tens of GiB
#: takes as long.
OPEN_WAIT_S = 30.0

#: Seconds between two looks at it.
_POLL_S = 0.005


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool is to be.

    Attributes
    ----------
    slot_bytes : int | str
        Bytes of one version, such as "2GiB".
    slots : int
        Slots that get their memory now: two for one that is read and one that is written.
    max_slots : int | None
        Slots that it may grow to; `slots` by default.
    meta_bytes : int | str
        Bytes that a version may say of itself, such as a manifest.
    block_bytes : int | str
        Bytes that one digest covers: a power of two from 1 to 64 MiB.
    patch_bytes : int | str
        Bytes of each slot for patches, of all ranks together; see `shmbus.pool.patches`.
    """

    slot_bytes: int | str
    slots: int = 2
    max_slots: int | None = None
    meta_bytes: int | str = 65536
    block_bytes: int | str = DEFAULT_BLOCK_BYTES
    patch_bytes: int | str = 0


def bytes_of(size: int | str, name: str) -> int:
    """Take a size as a number, of any size, or as a text such as "2GiB"."""
    if isinstance(size, (str, bool)) or not hasattr(size, "__index__"):
        return parse_size(size, name)
    number = check_int(name, size)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name}: expected a number of bytes, 0 to 2**63 - 1, got {number}")
    return number


def _checked_slots(name: str, value: object) -> int:
    slots = check_int(name, value)
    if not 1 <= slots <= _core.POOL_MAX_SLOTS:
        raise ValueError(
            f"{name}: expected 1 to {_core.POOL_MAX_SLOTS}, got {slots}: no pool can be laid out so"
        )
    return slots


def pool_path(bus: str, kind: str) -> str:
    """Return the file of a pool."""
    return f"{SHM_DIRECTORY}{companion_name(kind, bus)}"


def create_pool(bus: str, kind: str, spec: PoolSpec) -> None:
    """Create a pool, with all memory of its first slots.

    Parameters
    ----------
    bus : str
        The bus that it goes with; that need not exist.
    kind : str
        What it holds, in lower-case letters, such as "weights".
    spec : PoolSpec
        Its sizes.

    Raises
    ------
    TypeError, ValueError
        A name or size is none.
    BusExistsError
        There is such a pool, or another file of its name.
    CapacityError
        It does not fit /dev/shm; the message has the bytes that are needed.
    PermissionError
        This user may not create files there.
    """
    create_handle(bus, kind, spec).close()


def create_handle(bus: str, kind: str, spec: PoolSpec) -> _core.SlotPool:
    """Create a pool and return a handle without a role."""
    path = pool_path(bus, kind)
    if not isinstance(spec, PoolSpec):
        raise TypeError(f"spec: expected a PoolSpec, got {type(spec).__name__}")
    slots = _checked_slots("slots", spec.slots)
    most = slots if spec.max_slots is None else _checked_slots("max_slots", spec.max_slots)
    slot_bytes = bytes_of(spec.slot_bytes, "slot_bytes")
    patch_bytes = bytes_of(spec.patch_bytes, "patch_bytes")
    needed = (slot_bytes + patch_bytes) * slots
    if os.path.lexists(path):
        raise _exists(bus, kind, path)
    room = os.statvfs(SHM_DIRECTORY)
    if needed > room.f_bavail * room.f_frsize:
        raise _no_space(path, needed)
    sizes = (
        slots,
        most,
        slot_bytes,
        bytes_of(spec.meta_bytes, "meta_bytes"),
        bytes_of(spec.block_bytes, "block_bytes"),
        patch_bytes,
    )

    def remove(pool: _core.SlotPool) -> None:
        pool.close()
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            os.unlink(path)

    return made_or_removed(_create_into, remove, bus, kind, path, needed, sizes)


def _create_into(
    made: list[_core.SlotPool],
    bus: str,
    kind: str,
    path: str,
    needed: int,
    sizes: tuple[int, int, int, int, int, int],
) -> None:
    """Create the file and the pool in it, for `create_handle`; where that fails, neither."""
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _title(bus, kind))
    except FileExistsError as error:
        raise _exists(bus, kind, path) from error
    try:
        pool = _core.SlotPool.create(fd, f"{bus}:{kind}", *sizes)
        if not isinstance(pool, _core.SlotPool):
            raise _no_space(path, needed)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            os.unlink(path)
        raise
    made.append(pool)


def _title(bus: str, kind: str) -> str:
    return f"pool {kind!r} of bus {bus!r}"


def _exists(bus: str, kind: str, path: str) -> errors.BusExistsError:
    return errors.BusExistsError(
        f"pool {kind!r} of bus {bus!r} exists already ({path}); open it, or remove it with "
        f"shmbus.pool.unlink_pool({bus!r}, {kind!r}) if no process uses it"
    )


def _no_space(path: str, needed: int) -> errors.CapacityError:
    room = os.statvfs(SHM_DIRECTORY)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return errors.CapacityError(
        f"{path}: its slots need {show_size(needed)}, {SHM_DIRECTORY} has {show_size(free)} free "
        f"of {show_size(total)}; choose fewer slots, remove old segments (`shmbus gc`), or enlarge "
        "it (docker run --shm-size=..., mount -o remount,size=...)"
    )


def open_pool(
    bus: str, kind: str, *, read_only: bool = False, wait_s: float | None = None
) -> _core.SlotPool:
    """Open a pool; waits for a creator that is still allocating it."""
    path = pool_path(bus, kind)
    deadline = time.monotonic() + (OPEN_WAIT_S if wait_s is None else wait_s)
    while True:
        found = _core.uninterrupted(_open_once, bus, kind, path, read_only)
        if isinstance(found, _core.SlotPool):
            return found
        status, number = found
        if status != _core.POOL_UNFINISHED or time.monotonic() > deadline:
            raise _layout_error(bus, kind, path, status, number)
        time.sleep(_POLL_S)


def _open_once(bus: str, kind: str, path: str, read_only: bool) -> _core.SlotPool | tuple[int, int]:
    try:
        fd = open_own(path, os.O_RDONLY if read_only else os.O_RDWR, _title(bus, kind))
    except FileNotFoundError as error:
        raise errors.BusNotFoundError(
            f"there is no pool {kind!r} of bus {bus!r} ({path} does not exist): nobody has "
            "published yet, it was removed, or this container has another /dev/shm; start the "
            "publisher, or check the name with `shmbus gc`, which lists all files"
        ) from error
    try:
        identity = os.fstat(fd)
        opened = _core.SlotPool.open(fd, f"{bus}:{kind}", read_only)
    except BaseException:
        os.close(fd)
        raise
    if not isinstance(opened, _core.SlotPool):
        os.close(fd)
        return opened
    if not leads_to(path, identity):
        # Removed between opening and locking: without a name it is no pool any more.
        opened.close()
        return _core.POOL_UNFINISHED, 0
    return opened


def _layout_error(
    bus: str, kind: str, path: str, status: int, found: int
) -> errors.LayoutMismatchError:
    text = {
        _core.POOL_UNFINISHED: f"{path} was never finished; its creator died, or still works",
        _core.POOL_BAD_MAGIC: f"{path} is no slot pool, or its header was overwritten",
        _core.POOL_BAD_VERSION: f"{path} has layout version {found}, this process needs "
        f"{_core.POOL_LAYOUT_VERSION}; restart the processes that run another shmbus",
        _core.POOL_BAD_GEOMETRY: f"the header of {path} is damaged (its checksum or sizes are "
        "wrong)",
        _core.POOL_TRUNCATED: f"{path} has {found} bytes, fewer than its header says",
    }[status]
    return errors.LayoutMismatchError(
        f"pool {kind!r} of bus {bus!r}: {text}; remove it with "
        f"shmbus.pool.unlink_pool({bus!r}, {kind!r}) once nothing uses it, and publish again"
    )


def unlink_pool(bus: str, kind: str) -> None:
    """Remove a pool's name; its memory is freed when the last process has closed it.

    Parameters
    ----------
    bus, kind : str
        As for `create_pool`.

    Raises
    ------
    BusNotFoundError
        There is none.
    PermissionError
        It belongs to another user.
    """
    path = pool_path(bus, kind)
    try:
        os.unlink(path)
    except FileNotFoundError as error:
        raise errors.BusNotFoundError(
            f"there is no pool {kind!r} of bus {bus!r} to remove ({path} does not exist)"
        ) from error
    remove_dead_socket(kind, bus)
