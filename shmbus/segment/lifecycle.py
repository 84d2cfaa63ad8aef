"""Names to segments: creating, opening and unlinking in /dev/shm, by posix_ipc.

Invariant: a segment that could not be finished is gone again when create_segment raises.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import sys
import time

import posix_ipc

from shmbus import errors, limits
from shmbus_ext import _core

_PREFIX = "/shmbus."
_SHM_DIRECTORY = "/dev/shm"
#: Bytes; more than any machine has, and little enough for all sums of the core.
_LARGEST_SIZE = 1 << 46
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[_letter] = 1024**_power


def check_name(name: object) -> str:
    """Return the name if it can name a bus; TypeError or ValueError say what is wrong with it."""
    if not isinstance(name, str):
        raise TypeError(f"bus name: expected a str, got {type(name).__name__}")
    encoded = name.encode("utf-8", "replace")
    if not encoded or len(encoded) > limits.MAX_NAME_BYTES or not {"/", "\0"}.isdisjoint(name):
        raise ValueError(
            f"bus name: expected 1 to {limits.MAX_NAME_BYTES} bytes without '/' and NUL, got "
            f"{name!r}; it becomes the file {_SHM_DIRECTORY}{_PREFIX}NAME"
        )
    if encoded != name.encode("utf-8", "surrogatepass"):
        raise ValueError(f"bus name: expected text that UTF-8 can encode, got {name!r}")
    return name


def parse_size(size: int | str, what: str = "size") -> int:
    """Bytes of a size such as 1048576, "256MiB" or "1GB"; errors call it `what`."""
    given = size
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise TypeError(
            f"{what}: expected bytes as an int, or a str such as '256MiB', "
            f"got {type(size).__name__}"
        )
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{what}: expected a number with KiB, MiB, GiB or TiB, got {size!r}")
        number = float(match[1]) * unit
        size = int(number) if math.isfinite(number) else _LARGEST_SIZE + 1
    else:
        size = operator.index(size)
    if not _core.PAGE <= size <= _LARGEST_SIZE:
        raise ValueError(
            f"{what}: expected {_core.PAGE} bytes to {show_size(_LARGEST_SIZE)}, got {given!r}"
        )
    return size


def check_policy_version(version: object) -> int:
    """Return the version as an int; TypeError or ValueError say what is wrong with it."""
    if isinstance(version, bool) or not hasattr(version, "__index__"):
        raise TypeError(f"policy_version: expected an int, got {type(version).__name__}")
    number = operator.index(version)
    if not 0 <= number < 2**63:
        raise ValueError(f"policy_version: expected 0 to 2**63 - 1, got {number}")
    return number


def shm_path(name: str) -> str:
    """Return the file that a bus name stands for."""
    return f"{_SHM_DIRECTORY}{_PREFIX}{name}"


def create_segment(
    name: str, capacity: int | str, max_producers: int, extent_bytes: int
) -> _core.Segment:
    """Create, allocate and touch the whole segment; it is ready when this returns."""
    check_name(name)
    size = parse_size(capacity, "capacity")
    for label, value in (("max_producers", max_producers), ("extent_bytes", extent_bytes)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{label}: expected an int, got {type(value).__name__}")
    max_producers, extent_bytes = operator.index(max_producers), operator.index(extent_bytes)
    if not 1 <= max_producers <= _core.MAX_PRODUCERS:
        raise ValueError(f"max_producers: expected 1 to {_core.MAX_PRODUCERS}, got {max_producers}")
    if not 0 <= extent_bytes <= _LARGEST_SIZE:
        raise ValueError(
            f"extent_bytes: expected 0 (choose) to {_LARGEST_SIZE}, got {extent_bytes}"
        )
    if os.path.lexists(shm_path(name)):
        # Before the room: what there is of it may well be this bus's own.
        raise _exists(name)
    _check_room(name, size)
    try:
        shm = posix_ipc.SharedMemory(_PREFIX + name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError as error:
        raise _exists(name) from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(
            f"bus {name!r}: may not create {shm_path(name)}; it belongs to another user, or "
            f"{_SHM_DIRECTORY} is not writable for uid {os.geteuid()}"
        ) from error
    identity = os.fstat(shm.fd)
    try:
        segment = _core.Segment.create(shm.fd, name, size, max_producers, extent_bytes)
    except BaseException:
        os.close(shm.fd)
        with contextlib.suppress(posix_ipc.ExistentialError):  # somebody has removed it already
            posix_ipc.unlink_shared_memory(_PREFIX + name)
        raise
    if not is_named(name, identity):
        segment.close()
        raise errors.BusNotFoundError(
            f"bus {name!r}: somebody removed {shm_path(name)} while it was being created; "
            "create it again"
        )
    return segment


def _exists(name: str) -> errors.BusExistsError:
    return errors.BusExistsError(
        f"bus {name!r} exists already ({shm_path(name)}); attach with "
        f"Bus.open({name!r}), or remove it with shmbus.unlink({name!r}) if nobody uses it"
    )


def identity(name: str) -> os.stat_result | None:
    """Tell the file that the name leads to; None where there is none."""
    try:
        return os.stat(shm_path(name))
    except FileNotFoundError:
        return None


def is_named(name: str, known: os.stat_result) -> bool:
    """Whether the name still leads to that file."""
    found = identity(name)
    return found is not None and os.path.samestat(found, known)


def _check_room(name: str, size: int) -> None:
    """Refuse what cannot fit before the kernel has filled its memory to find out."""
    room = os.statvfs(_SHM_DIRECTORY)
    if size > room.f_bavail * room.f_frsize:
        raise space_error(name, size)


def space_error(name: str, size: int) -> errors.CapacityError:
    """Say how large the segment was to be and how much there is."""
    room = os.statvfs(_SHM_DIRECTORY)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return errors.CapacityError(
        f"bus {name!r}: {show_size(size)} do not fit into {_SHM_DIRECTORY}, which has "
        f"{show_size(free)} free of {show_size(total)}; choose a smaller capacity, remove old "
        "segments, or enlarge it (docker run --shm-size=..., mount -o remount,size=...)"
    )


def open_segment(name: str, *, read_only: bool = False) -> _core.Segment:
    """Map a segment; waits shortly for a creator that is still allocating it."""
    check_name(name)
    deadline = time.monotonic() + limits.ATTACH_WAIT_S
    while True:
        try:
            return _open_once(name, read_only)
        except _Unfinished as error:
            if time.monotonic() > deadline:
                raise layout_error(name, "unfinished", 0, 0) from error
            time.sleep(0.005)


class _Unfinished(errors.LayoutMismatchError):
    """The segment's creator has not stored the magic yet."""


def _open_once(name: str, read_only: bool) -> _core.Segment:
    try:
        shm = posix_ipc.SharedMemory(_PREFIX + name, read_only=read_only)
    except posix_ipc.ExistentialError as error:
        raise errors.BusNotFoundError(
            f"there is no bus {name!r} ({shm_path(name)} does not exist); create it with "
            f"shmbus.Bus.create({name!r}), or check the name and that both sides see the same "
            f"{_SHM_DIRECTORY} (containers: --ipc or a shared mount)"
        ) from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(
            f"bus {name!r}: may not open {shm_path(name)} as uid {os.geteuid()}; a bus is for the "
            "user who created it"
        ) from error
    identity = os.fstat(shm.fd)
    try:
        if not read_only:
            _check_owner(name, identity.st_uid)
        segment = _core.Segment.open(shm.fd, name, read_only)
    except BaseException:
        os.close(shm.fd)
        raise
    if not is_named(name, identity):
        # Removed between opening and saying so by a lock: what has no name is no bus any more.
        segment.close()
        raise _Unfinished(f"bus {name!r}: {shm_path(name)} was removed while it was being opened")
    return segment


def _check_owner(name: str, owner: int) -> None:
    """Refuse what another user has put under this name: they could read all, and truncate it."""
    if owner != os.geteuid():
        raise PermissionError(
            f"bus {name!r}: {shm_path(name)} belongs to uid {owner}, this process runs as uid "
            f"{os.geteuid()}; a bus is for the user who created it: run as that user, or choose "
            "another name"
        )


def layout_error(name: str, status: str, found: int, expected: int) -> errors.LayoutMismatchError:
    """Explain why a file is not taken for a segment."""
    path = shm_path(name)
    if status == "unfinished":
        return _Unfinished(
            f"bus {name!r}: {path} was never finished; its creator died, or still allocates it. "
            f"Try again, or remove it with shmbus.unlink({name!r})"
        )
    text = {
        "magic": f"{path} is not a shmbus segment, or its header was overwritten",
        "version": f"layout version {found}, this process needs {expected}; restart the "
        "processes that run another shmbus",
        "hash": f"layout hash {found:#010x}, this process needs {expected:#010x}; both sides must "
        "run the same build of shmbus",
        "geometry": f"the header of {path} is damaged (its checksum or sizes are wrong)",
        "truncated": f"{path} has {found} bytes, fewer than its header says; it was truncated",
    }[status]
    hint = "" if status in ("version", "hash") else f"; remove it with shmbus.unlink({name!r})"
    return errors.LayoutMismatchError(f"bus {name!r}: {text}{hint}")


def unlink(name: str) -> None:
    """Remove a bus's name; its memory goes when the last process has let go of it.

    Parameters
    ----------
    name : str
        The bus.

    Raises
    ------
    BusNotFoundError
        There is no such bus.
    """
    check_name(name)
    try:
        posix_ipc.unlink_shared_memory(_PREFIX + name)
    except posix_ipc.ExistentialError as error:
        raise errors.BusNotFoundError(
            f"there is no bus {name!r} to remove ({shm_path(name)} does not exist): it was removed "
            "already, or is called otherwise; `shmbus list` shows what there is"
        ) from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(f"bus {name!r}: may not remove {shm_path(name)}") from error


def show_size(size: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_wait(seconds: float) -> str:
    """Time waited, for people: 5 s, and 0 s rather than powers of ten."""
    return f"{seconds:.3g} s" if seconds >= 0.001 else "0 s"


def full_error(segment: _core.Segment, size: int, waited_s: float) -> errors.BusFullError:
    """Say who holds the space that a record of `size` bytes did not get."""
    extent = segment.extent_bytes
    paused = segment.paused()
    if paused is not None:
        reason, version, _ = paused
        return errors.BusFullError(
            f"bus {segment.name!r} is paused at policy version {version} "
            f"({reason or 'no reason'}): producers wait, and this one did for "
            f"{show_wait(waited_s)}; resume it with `shmbus resume {segment.name}`, or wait longer"
        )
    held: dict[int, int] = segment.holders()
    free = segment.free_extents()
    wanted = -(-size // extent)
    collector = segment.collector()
    parts = []
    attached = segment.has_collector()
    if attached and collector["leased_groups"]:
        parts.append(
            f"consumer pid {collector['pid']} ({collector['label']}) holds "
            f"{collector['leased_groups']} unacknowledged groups "
            f"({collector['leased_records']} trajectories): ack() or give_back() them"
        )
    if attached and collector["stashed_records"]:
        parts.append(
            f"{collector['stashed_records']} trajectories of {collector['stashed_groups']} "
            "incomplete or untaken groups are stashed"
        )
    lag_s = (_core.monotonic_ns() - collector["seen_ns"]) / 1e9
    if not collector["seen_ns"]:
        parts.append("no consumer has ever read this bus: start one")
    elif not attached:
        parts.append("no consumer is attached now: start one")
    elif lag_s > 1:
        parts.append(f"consumer pid {collector['pid']} last looked {lag_s:.1f} s ago")
    names = {slot: f"{label} (pid {pid})" for slot, _, _, pid, label, _, _ in segment.producers()}
    names[segment.max_producers] = "the collector, for stragglers"
    top = sorted(held.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{show_size(n * extent)} by {names.get(s, s)}" for s, n in top)
    parts.append(f"lanes with the most: {shares}")
    return errors.BusFullError(
        f"bus {segment.name!r} is full: a record of {show_size(size)} needs {wanted} free "
        f"neighbouring extents of {show_size(extent)}, {free} of {segment.extent_count} are free "
        f"after {show_wait(waited_s)}; {'; '.join(parts)}"
    )


def busy_error(segment: _core.Segment, what: str) -> errors.BusBusyError:
    """Name who is in the way."""
    if what == "collector":
        holder = segment.collector()
        return errors.BusBusyError(
            f"bus {segment.name!r} is read by pid {holder['pid']} ({holder['label']}) already; "
            "a bus has one collector: close that one first, or use another bus"
        )
    rows = segment.producers()
    alive = sum(state == _core.SLOT_ACTIVE for _, state, *_ in rows)
    return errors.BusBusyError(
        f"bus {segment.name!r}: all {segment.max_producers} producer slots are taken ({alive} "
        f"active); close producers, or create the bus with max_producers above "
        f"{segment.max_producers}"
    )


def process_label() -> str:
    """Name this process for the messages of others: the script and the host."""
    script = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    return f"{script}@{os.uname().nodename}"
