"""Making segments in /dev/shm: exclusively, or by the first of several processes.

Invariants:

- An error while making a segment first removes the segment, and no other file.
- A dead creator's unfinished segment is removed under a lock of its whole range of bytes; makers
  and users of the segment exclude the lock.
- A bus never gets fewer extents than producers: every producer holds an extent.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import LARGEST_SIZE, check_int, parse_size
from shmbus.base.format import show_size
from shmbus.data.schema import declared_schema, difference
from shmbus.segment.explain import UnfinishedError, no_default_error, space_error
from shmbus.segment.lifecycle import (
    ATTACH_WAIT_S,
    has_magic,
    open_file,
    open_once,
    open_segment,
)
from shmbus.segment.names import (
    check_name,
    identity,
    is_named,
    shm_path,
)
from shmbus.segment.room import tightest
from shmbus.segment.shared_file import create_file, remove_file
from shmbus_ext import _core


class Bounds(NamedTuple):
    """The bounds in the core's form; 0 for the core's own choice, or for no bound."""

    request_bytes: int = 0
    max_lead: int = 0
    #: `max_lead_versions` plus 1.
    max_versions: int = 0

    @classmethod
    def of(cls, segment: _core.Segment) -> Bounds:
        """Return the bounds of an existing bus."""
        _, _, max_lead, versions, _ = _core.lead_state(segment)
        return cls(_core.request_bytes(segment), max_lead, versions + 1)

    def misfits(self, segment: _core.Segment) -> list[str]:
        """Name the differences between an existing bus and the requested bounds."""
        wrong = []
        room, max_lead, versions = Bounds.of(segment)
        if self.max_lead and max_lead != self.max_lead:
            wrong.append(f"max_lead: expected {self.max_lead}, got {max_lead or None}")
        if self.max_versions and versions != self.max_versions:
            got = versions - 1 if versions else None
            wrong.append(f"max_lead_versions: expected {self.max_versions - 1}, got {got}")
        if room < self.request_bytes:
            wrong.append(
                f"request_capacity: expected {show_size(self.request_bytes)}, got {show_size(room)}"
            )
        return wrong


#: The core's choices.
NO_BOUNDS = Bounds()


def check_bounds(
    request_capacity: int | str | None = None,
    max_lead: int | None = None,
    max_lead_versions: int | None = None,
) -> Bounds:
    """Check arguments of `Bus.create` with these names."""
    requests = 0
    if request_capacity is not None:
        requests = parse_size(request_capacity, "request_capacity")
        if not _core.REQUEST_MIN_BYTES <= requests <= _core.REQUEST_MAX_BYTES:
            raise ValueError(
                f"request_capacity: expected {_core.REQUEST_MIN_BYTES} (64 KiB) to "
                f"{_core.REQUEST_MAX_BYTES} (4 GiB) bytes, got {requests}; leave it out for a 32nd "
                "of the capacity"
            )
    groups = 0 if max_lead is None else check_int("max_lead", max_lead, 1, _core.LEAD_ROWS)
    if max_lead_versions is None:
        return Bounds(requests, groups)
    versions = check_int("max_lead_versions", max_lead_versions, 0, _core.LEAD_ROWS - 1)
    return Bounds(requests, groups, versions + 1)


logger = logging.getLogger(__name__)

#: Seconds between two checks of a segment without magic and lock: a living creator locks it within
#: microseconds.
_UNFINISHED_WAIT_S: Final = 0.2
#: Seconds between two attempts to open a segment under construction.
_POLL_S: Final = 0.005
_MIB: Final = 1 << 20


def create_segment(
    name: str,
    capacity: int | str | None = None,
    max_producers: int | None = None,
    extent_bytes: int = 0,
    *,
    schema: _core.DeclaredSchema | None = None,
    crowded: bool = False,
    bounds: Bounds = NO_BOUNDS,
) -> _core.Segment:
    """Create, allocate and touch the whole segment, ready on return."""
    check_name(name)
    max_producers, extent_bytes = _check_sizes(capacity, max_producers, extent_bytes)
    if os.path.lexists(shm_path(name)):
        # Before checking for space: the very bus may occupy the space.
        raise _exists(name)
    size = _default_capacity(name) if capacity is None else parse_size(capacity, "capacity")
    max_producers = _producers_with_room(name, size, max_producers, extent_bytes, crowded)
    plan = _core.segment_plan(size, max_producers, extent_bytes)
    if plan is not None and plan[0] > tightest().left:
        # Before the kernel fills its memory, or kills a process of a full cgroup, to find out.
        raise space_error(name, plan[0])
    declared = b"" if schema is None else schema.encoded

    def create(fd: int) -> _core.Segment:
        return _core.Segment.create(fd, name, size, max_producers, extent_bytes, *bounds, declared)

    try:
        return create_file(shm_path(name), f"bus {name!r}", create)
    except FileExistsError as error:
        raise _exists(name) from error


def remove_made(segment: _core.Segment) -> None:
    """Close and remove a fresh segment, still unshared."""
    made = identity(segment.name)
    segment.close()
    if made is not None:
        remove_file(shm_path(segment.name), made)


def _check_sizes(
    capacity: object, max_producers: object, extent_bytes: object
) -> tuple[int | None, int]:
    """Check types and ranges, before anything is asked of the machine; the latter two as int."""
    if capacity is not None:
        parse_size(capacity, "capacity")  # type: ignore[arg-type]
    producers = None
    if max_producers is not None:
        producers = check_int("max_producers", max_producers, 1, _core.MAX_PRODUCERS)
    return producers, check_int("extent_bytes", extent_bytes, 0, LARGEST_SIZE)


def _default_capacity(name: str) -> int:
    """Choose 256 MiB, or half of the free space if less: other programs need the rest."""
    most = parse_size(limits.DEFAULT_CAPACITY)
    room = tightest()
    free = room.left
    size = min(most, free // 2 // _MIB * _MIB)
    if size < limits.SMALLEST_DEFAULT_CAPACITY:
        raise no_default_error(name)
    if size < most:
        logger.warning(
            "bus %r gets %s and not %s, since %s; give capacity=... to choose, or raise the limit "
            "(%s)", name, show_size(size), show_size(most), room, room.remedy,
        )  # fmt: skip
    return size


def _producers_with_room(
    name: str, size: int, max_producers: int | None, extent_bytes: int, crowded: bool
) -> int:
    """Return the bus's number of producers; refuse more than its extents."""
    wanted = limits.DEFAULT_MAX_PRODUCERS if max_producers is None else max_producers
    plan = _core.segment_plan(size, wanted, extent_bytes)
    if plan is None or crowded:
        return wanted  # the core reports the wrong numbers
    _, extent, extents, room = plan
    if wanted <= room:
        return wanted
    if max_producers is None:
        return room
    raise ValueError(
        f"bus {name!r}: capacity={show_size(size)} is too small for max_producers={wanted}: each "
        f"producer holds an extent of {show_size(extent)}, and of {extents} extents {room} are for "
        f"producers; expected a capacity of {show_size((wanted + 1) * extent)} or more, or at most "
        f"max_producers={room}"
    )


def _exists(name: str) -> errors.BusExistsError:
    return errors.BusExistsError(
        f"bus {name!r} exists already ({shm_path(name)}); attach with "
        f"Bus.open({name!r}), or by Bus.ensure({name!r}), which creates it only where there is "
        f"none; or remove it with shmbus.unlink({name!r}) if no process uses it"
    )


# -- by the first process -----------------------------------------------------------------------


def ensure_segment(
    name: str,
    capacity: int | str | None = None,
    max_producers: int | None = None,
    extent_bytes: int = 0,
    *,
    bounds: Bounds = NO_BOUNDS,
    schema: _core.DeclaredSchema | None = None,
) -> _core.Segment:
    """Open a segment that fits, or create a missing segment; callable from many processes."""
    check_name(name)
    max_producers, extent_bytes = _check_sizes(capacity, max_producers, extent_bytes)
    deadline = time.monotonic() + ATTACH_WAIT_S
    create = functools.partial(
        create_segment, name, capacity, max_producers, extent_bytes, bounds=bounds, schema=schema
    )
    while True:
        segment = _open_or_create(name, create)
        if segment is not None:
            break
        if time.monotonic() > deadline:
            # Reports the obstacle, or that the segment vanished again.
            segment = open_segment(name)
            break
        if remove_unfinished(name):
            logger.warning("removed what a creator that died had left of bus %r", name)
        time.sleep(_POLL_S)
    try:
        _require_fit(segment, capacity, max_producers, extent_bytes, bounds, schema)
    except BaseException:
        segment.close()
        raise
    return segment


def _open_or_create(name: str, create: Callable[[], _core.Segment]) -> _core.Segment | None:
    """Return a segment, made or found; None if a second process won or makes the segment."""
    try:
        return _core.uninterrupted(open_once, name, False)
    except UnfinishedError:
        return None
    except errors.BusNotFoundError:
        pass
    try:
        return create()
    except (errors.BusExistsError, errors.BusNotFoundError):
        return None
    except errors.CapacityError:
        # A second process may have taken the space, for this very bus.
        if os.path.lexists(shm_path(name)):
            return None
        raise
    except OSError as error:
        # A second process took the file for a dead creator's, and holds its lock.
        if error.errno == errno.EBUSY:
            return None
        raise


def _require_fit(
    segment: _core.Segment,
    capacity: int | str | None,
    max_producers: int | None,
    extent_bytes: int,
    bounds: Bounds,
    schema: _core.DeclaredSchema | None,
) -> None:
    """Refuse a bus below the requested size, or with other extents or another schema."""
    wrong = []
    if capacity is not None and segment.capacity < (size := parse_size(capacity, "capacity")):
        wrong.append(f"capacity: expected {show_size(size)}, got {show_size(segment.capacity)}")
    if max_producers is not None and segment.max_producers < max_producers:
        wrong.append(f"max_producers: expected {max_producers}, got {segment.max_producers}")
    if extent_bytes and segment.extent_bytes != extent_bytes:
        wrong.append(f"extent_bytes: expected {extent_bytes}, got {segment.extent_bytes}")
    wrong += bounds.misfits(segment)
    if schema is not None:
        found = declared_schema(segment)
        differs = (
            "the bus declares none"
            if found is None
            else difference(schema, found, "schema=", "the bus")
        )
        if differs is not None:
            wrong.append(f"schema: {differs}")
    if wrong:
        name = segment.name
        raise errors.BusExistsError(
            f"bus {name!r} exists already and does not fit: {'; '.join(wrong)}; ask for no more "
            f"than the bus offers, or remove the unused bus with shmbus.unlink({name!r}), which "
            "loses undelivered trajectories"
        )


def remove_unfinished(name: str) -> bool:
    """Remove an unfinished segment of a dead creator."""
    found = _unfinished(name)
    if found is None:
        return False
    time.sleep(_UNFINISHED_WAIT_S)
    with contextlib.ExitStack() as stack:
        try:
            fd = open_file(name, os.O_RDWR)
        except (errors.ShmbusError, OSError):
            return False
        stack.callback(os.close, fd)
        same = os.path.samestat(found, os.fstat(fd))
        if not same or not _core.lock_all(fd) or has_magic(fd) or not is_named(name, found):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(shm_path(name))
        return True


def _unfinished(name: str) -> os.stat_result | None:
    """Return the file of an unfinished segment without a living creator."""
    try:
        fd = open_file(name, os.O_RDONLY)
    except (errors.ShmbusError, OSError):
        return None
    try:
        found = os.fstat(fd)
        return None if has_magic(fd) or _core.lock_held(fd, 0, 0) else found
    except (errors.ShmbusError, OSError):
        return None
    finally:
        os.close(fd)
