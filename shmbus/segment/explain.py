"""Error texts that need a look at a segment: full, busy, of another layout, too large.

Invariant: messages escape every text of a segment, a label or the reason of a pause.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections import Counter
from typing import Final

from shmbus import errors
from shmbus._version import VERSION
from shmbus.base import limits
from shmbus.base.format import printable, several, show_count, show_duration, show_size, show_wait
from shmbus.segment.names import COLUMNS_INFIX, SHM_DIRECTORY, bus_names, shm_path
from shmbus_ext import _core

#: A daemon's label as the reader of its bus.
DAEMON_LABEL: Final = "shmbus serve"
#: Label of the relay that carries the bus's records to other buses.
RELAY_LABEL: Final = "shmbus relay"

#: Other buses named by an error, and the minimum similarity of a near name, from 0 to 1.
_OTHERS_NAMED: Final = 8
_ALIKE: Final = 0.6


class UnfinishedError(errors.LayoutMismatchError, documented=False):
    """The segment's creator has not stored the magic yet."""


def others_text(name: str) -> str:
    """Name the existing buses, nearly equal names first."""
    others = bus_names()
    near = difflib.get_close_matches(name, others, _OTHERS_NAMED, _ALIKE)
    shown = [*near, *(other for other in others if other not in near)][:_OTHERS_NAMED]
    there = f"there are: {', '.join(map(repr, shown))}" if shown else "there is none at all"
    if len(others) > len(shown):
        there += f" and {len(others) - len(shown)} more"
    return f"did you mean {near[0]!r}? {there}" if near else there


def not_found_error(name: str, waited_s: float | None = None) -> errors.BusNotFoundError:
    """Report a missing bus, and name the existing buses, nearly equal names first."""
    waited = "" if waited_s is None else f" after {show_wait(waited_s)} of waiting for it"
    wait = "" if waited_s is not None else " (a Producer or Consumer waits for it by wait=60.0)"
    bus, infix, columns = name.partition(COLUMNS_INFIX)
    make = f"create it with shmbus.Bus.create({name!r}){wait}"
    if infix:
        make = f"start the trainer of bus {bus!r} with shmbus.Columns for {columns}"
    return errors.BusNotFoundError(
        f"there is no bus {name!r}{waited} ({shm_path(name)} does not exist); "
        f"{others_text(name)}; {make}, or check the name and that both sides see the "
        f"same {SHM_DIRECTORY} (containers: --ipc or a shared mount)"
    )


def lead_text(segment: _core.Segment) -> str:
    """Describe the producers' lead and its bound."""
    limit, held, max_groups, max_versions, a_version = _core.lead_state(segment)
    bounds = [f"max_lead={max_groups}"] if max_groups else []
    if max_versions >= 0:
        bounds.append(f"max_lead_versions={max_versions}, {a_version} groups in the last version")
    begun = several(held, "group", "are")
    return f"{begun} begun and not delivered, of at most {limit} ({'; '.join(bounds)})"


def _lead_error(segment: _core.Segment, waited_s: float) -> errors.BusFullError:
    """Report a group that may not begin yet."""
    if not segment.has_collector():
        reader = "no consumer is attached now: start one"
    else:
        collector = segment.collector()
        reader = (
            f"consumer pid {collector['pid']} ({printable(collector['label'])}) has "
            f"{collector['stashed_groups']} of them, incomplete or not taken: wait for it, finish "
            "groups that are begun, or create the bus with a larger bound"
        )
    return errors.BusFullError(
        f"bus {segment.name!r}: producers are ahead as far as they may: {lead_text(segment)}, and "
        f"this sample would begin another; it waited {show_wait(waited_s)}; {reader}"
    )


def full_error(segment: _core.Segment, size: int, waited_s: float) -> errors.BusFullError:
    """Name the processes that hold the space a record lacked; size 0 for the lead."""
    extent = segment.extent_bytes
    paused = segment.paused()
    if paused is not None:
        reason, version, _ = paused
        return errors.BusFullError(
            f"bus {segment.name!r} is paused at policy version {version} "
            f"({printable(reason) or 'no reason'}): producers wait, and this one did for "
            f"{show_wait(waited_s)}; resume it with `shmbus resume {segment.name}`, or wait longer"
        )
    if not size:
        return _lead_error(segment, waited_s)
    held = Counter(slot for slot in segment.holders() if 0 <= slot <= segment.max_producers)
    free = segment.free_extents()
    wanted = -(-size // extent)
    collector = segment.collector()
    parts = []
    attached = segment.has_collector()
    if attached and collector["leased_groups"]:
        parts.append(
            f"consumer pid {collector['pid']} ({printable(collector['label'])}) holds "
            f"{several(collector['leased_groups'], 'unacknowledged group')} "
            f"({several(collector['leased_records'], 'trajectory')}): ack() or give_back() them"
        )
    if attached and collector["stashed_records"]:
        parts.append(
            f"{several(collector['stashed_records'], 'trajectory')} of "
            f"{several(collector['stashed_groups'], 'incomplete or untaken group')} stashed"
        )
    parts += [
        f"split {printable(label)!r} has {several(ready, 'complete group')}: take them with "
        f"take(split=...) or Consumer({segment.name!r}, split=...)"
        for number, label, _, _, _, ready, _ in _core.splits(segment)
        if attached and ready and number != _core.SPLIT_TRAIN
    ]
    lag_s = (time.monotonic_ns() - collector["seen_ns"]) / 1e9
    if not collector["seen_ns"]:
        parts.append("no consumer has ever read this bus: start one")
    elif not attached:
        parts.append("no consumer is attached now: start one")
    elif lag_s > 1:
        parts.append(f"consumer pid {collector['pid']} last polled {lag_s:.1f} s ago")
    names = {
        slot: f"{printable(label)} (pid {pid})"
        for slot, _, _, pid, label, _, _ in segment.producers()
    }
    names[segment.max_producers] = "the collector, for stragglers"
    top = held.most_common(3)
    shares = ", ".join(f"{show_size(n * extent)} by {names.get(s, s)}" for s, n in top)
    parts.append(f"lanes with the most: {shares}")
    return errors.BusFullError(
        f"bus {segment.name!r} is full: a record of {show_size(size)} needs {wanted} free "
        f"neighbouring extents of {show_size(extent)}, {free} of {segment.extent_count} are free "
        f"after {show_wait(waited_s)}; {'; '.join(parts)}"
    )


def requests_text(segment: _core.Segment) -> str:
    """Describe the request lane's contents and its workers."""
    _, open_, claimed, _, _, groups, taken_ns, free, room = _core.request_totals(segment)
    workers, _, _ = segment.tally()
    if taken_ns:
        ago_s = (time.monotonic_ns() - taken_ns) / 1e9
        served = f"a worker took the last sample {show_duration(max(0.0, ago_s))} ago"
    else:
        served = "nobody has ever taken a sample: start workers that call Producer.requests.next"
    return (
        f"{several(groups, 'group', 'are')} in the lane, {several(open_, 'sample')} of them open "
        f"and {claimed} in the hands of workers, {show_size(free)} of {show_size(room)} for "
        f"prompts are free; {several(workers, 'producer', 'are')} attached, {served}"
    )


def requests_full_error(segment: _core.Segment, size: int, waited_s: float) -> errors.BusFullError:
    """Say why the request lane has no room for a prompt of `size` bytes."""
    paused = segment.paused()
    hint = "" if paused is None else f"; resume it with `shmbus resume {segment.name}`"
    return errors.BusFullError(
        f"bus {segment.name!r}: the request lane has no room for a group with a prompt of "
        f"{show_size(size)} after {show_wait(waited_s)}: {requests_text(segment)}{hint}; a request "
        f"leaves the lane when its group is acknowledged: wait for that, or {_more_room(segment)}"
    )


def _more_room(segment: _core.Segment) -> str:
    """Name the exceeded limit of the request lane, and the number to set."""
    rows, most = _core.request_row_count(segment), _core.REQUEST_MAX_ROWS
    if _core.request_totals(segment)[5] < rows:
        return "create the bus with a larger request_capacity"
    if rows >= most:
        return (
            f"share the prompts among several buses: {show_count(most)} groups a bus are the most"
        )
    wanted = min(2 * rows, most) * _core.REQUEST_ROW_SHARE
    return (
        f"create the bus with request_capacity={wanted} or more: all {show_count(rows)} rows, a "
        f"group each, are taken, and a row comes with {_core.REQUEST_ROW_SHARE} bytes"
    )


def busy_error(segment: _core.Segment, what: str) -> errors.BusBusyError:
    """Name the process that holds a role this process wants."""
    if what == "collector":
        holder = segment.collector()
        label = printable(holder["label"])
        head = f"bus {segment.name!r} is read by pid {holder['pid']} ({label}) already; "
        if label == DAEMON_LABEL:
            return errors.BusBusyError(
                f"{head}the reader is the daemon: lease groups from it, without daemon=False"
            )
        if label == RELAY_LABEL:
            return errors.BusBusyError(
                f"{head}the reader is a relay, which carries records to a trainer's bus: take the "
                "groups there, or end the relay first"
            )
        return errors.BusBusyError(
            f"{head}a bus has a single reader: close that reader first, or use a second bus; for "
            f"several readers end that reader and start `shmbus serve {segment.name}`"
        )
    alive, _, _ = segment.tally()
    return errors.BusBusyError(
        f"bus {segment.name!r}: all {segment.max_producers} producer slots are taken ({alive} "
        f"active); close producers, or create the bus with max_producers above "
        f"{segment.max_producers}"
    )


def layout_error(name: str, status: str, found: int, expected: int) -> errors.LayoutMismatchError:
    """Explain why a file does not count as a segment."""
    path = shm_path(name)
    if status == "unfinished":
        return UnfinishedError(
            f"bus {name!r}: {path} was never finished; its creator died, or still allocates it. "
            f"Try again, or remove it with shmbus.unlink({name!r})"
        )
    if status in ("version", "hash"):
        shown = (
            f"version {found}, this process needs {expected}"
            if status == "version"
            else f"hash {found:#010x}, this process needs {expected:#010x}"
        )
        return errors.LayoutMismatchError(
            f"bus {name!r}: layout {shown} (shmbus {VERSION}); {_other_layout_hint(name)}"
        )
    text = {
        "magic": f"{path} is not a shmbus segment, or its header was overwritten",
        "geometry": f"the header of {path} is damaged (its checksum or sizes are wrong)",
        "truncated": f"{path} has {found} bytes, fewer than its header says; it was truncated",
    }[status]
    return errors.LayoutMismatchError(
        f"bus {name!r}: {text}; remove it with shmbus.unlink({name!r})"
    )


def _other_layout_hint(name: str) -> str:
    """Name the processes with a segment of another shmbus open, and the remedy."""
    users = _users(shm_path(name))
    if users:
        shown = ", ".join(
            f"pid {pid}{f' (shmbus {version})' * bool(version)}" for pid, version in users
        )
        return (
            f"{shown} {'has' if len(users) == 1 else 'have'} it open: use that shmbus here, or end "
            "those processes and start them again with this one on a new bus"
        )
    return (
        "no process that can be seen has it open: it is left from another shmbus, and only that "
        f"one can read it. To keep what is in it, `shmbus snapshot {name} DIR` with that version "
        f"and `shmbus restore DIR` with this one; else remove it: `shmbus gc`, or "
        f"shmbus.unlink({name!r})"
    )


def _users(path: str) -> list[tuple[int, str]]:
    """Find processes that map a file, and the version of their shmbus if known."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as lines:
                mapped = {line.rstrip("\n").partition("/")[2] for line in lines}
        except OSError:  # the process ended, or belongs to another user
            continue
        if path[1:] in mapped:
            core = next((file for file in mapped if "/shmbus_ext/_core" in file), "")
            found.append((int(entry), _version_beside("/" + core)))
    return found[:_OTHERS_NAMED]


def _version_beside(core: str) -> str:
    """Read the version of the package whose extension a process loaded; "" if unknown."""
    source = os.path.join(os.path.dirname(core), os.pardir, "shmbus", "_version.py")
    try:
        with open(source, encoding="utf-8") as file:
            found = re.search(r'VERSION = "([0-9a-zA-Z.+-]{1,40})"', file.read(4096))
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


def no_default_error(name: str) -> errors.CapacityError:
    """Report that /dev/shm lacks space for a bus without a given capacity."""
    from shmbus.segment import room  # a producer makes no bus, and does not load the module

    least = limits.SMALLEST_DEFAULT_CAPACITY
    return errors.CapacityError(
        f"bus {name!r}: a bus by default takes half of the free space, {show_size(least)} at "
        f"least; {room.shortage(2 * least)}; or give the capacity yourself"
    )


def space_error(name: str, size: int) -> errors.CapacityError:
    """Report the segment's intended size and the lower limits."""
    from shmbus.segment import room

    return errors.CapacityError(f"bus {name!r}: {room.shortage(size)}")


def memory_error(name: str, size: int) -> errors.CapacityError:
    """Report that the kernel refused this process a mapping, and name the kernel's count."""
    return errors.CapacityError(
        f"bus {name!r}: this process cannot map {show_size(size)}: the kernel gives it no more "
        f"memory or mappings ({_mappings()}). Let go of arrays and of Consumers that are closed, "
        "raise vm.max_map_count (sysctl -w vm.max_map_count=1048576) or the process's limit of "
        "address space (ulimit -v), or give its container more memory; what is on the bus stays"
    )


def _mappings() -> str:
    """Return this process's number of mappings, and the limit."""
    try:
        with open("/proc/self/maps", "rb") as maps, open("/proc/sys/vm/max_map_count") as most:
            return f"it has {sum(1 for _ in maps)} of vm.max_map_count = {int(most.read())}"
    except (OSError, ValueError):
        return "vm.max_map_count bounds their number"


def removed_error(segment: _core.Segment, removed_unix_ns: int) -> errors.BusRemovedError:
    """Report a bus's removal time, and a new bus of that name if present."""
    name = segment.name
    ago = (
        f" {show_duration(max(0.0, time.time() - removed_unix_ns / 1e9))} ago"
        if removed_unix_ns
        else ""
    )
    there = os.path.lexists(shm_path(name))
    follow = (
        "a new bus of that name exists: close this handle and make a new one"
        if there
        else "there is no bus of that name now: make a new handle once it has been created again"
    )
    return errors.BusRemovedError(
        f"bus {name!r} was removed{ago} (by shmbus.unlink, or since {shm_path(name)} was deleted), "
        f"and nothing is committed into it any more; {follow}"
    )
