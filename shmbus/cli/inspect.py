"""``shmbus inspect``: a segment record by record, for a stuck, damaged or foreign bus."""

from __future__ import annotations

import argparse
import itertools

from shmbus.base import limits
from shmbus.base.format import show_count, show_duration, show_size, table
from shmbus.cli._options import Commands, add_command, print_json, whole
from shmbus.inspect.dump import Inspection, RecordView, RunView, inspect
from shmbus.inspect.groups import read_groups
from shmbus.inspect.text import groups_text, schema_text
from shmbus.inspect.undelivered import MAX_RECORDS

_DEFAULT_LIMIT = 20
_DEFAULT_GROUPS = 40
_ID_WIDTH = 32
#: Lines of runs for people; JSON lists all.
_RUNS_SHOWN = 40
_HEX = {"magic": 16, "layout_hash": 8, "geometry_crc": 8, "intent_crc": 8}


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "inspect",
        run,
        help="walk a segment read-only, record by record",
        description="Walks a segment without mapping or changing it: header, slots, runs, records "
        "with their checksums, and the obstacle to each run's reuse. For a stuck or damaged bus, "
        "or a bus of a different layout, live or not. Exit status 1 for a damaged segment, or for "
        "a segment unusable by this version.",
        examples=[
            "shmbus inspect run1",
            "shmbus inspect run1 --limit 100 --payload",
            "shmbus inspect run1 --groups 100 --json | jq '.groups[].cells'",
            "shmbus inspect run1 --json | jq '.runs[] | {extent, pinned_by}'",
        ],
        json=True,
    )
    parser.add_argument(
        "--limit",
        metavar="K",
        type=whole(0),
        default=_DEFAULT_LIMIT,
        help=f"records to show (default {_DEFAULT_LIMIT})",
    )
    parser.add_argument(
        "--groups",
        metavar="N",
        nargs="?",
        const=_DEFAULT_GROUPS,
        type=whole(1, limits.MAX_GROUPS_SHOWN),
        help="show incomplete groups sample by sample instead: producer and time, failures, retry "
        f"requests (N oldest, default {_DEFAULT_GROUPS})",
    )
    parser.add_argument(
        "--payload", action="store_true", help="verify payload checksums too, where there are any"
    )


def _run_groups(arguments: argparse.Namespace) -> int:
    """Print incomplete groups; 1 if unknown."""
    found = read_groups(arguments.name, arguments.groups, walk_records=MAX_RECORDS)
    if arguments.json:
        print_json(found)
    else:
        print(groups_text(found))
    if found.source == "none":
        raise RuntimeError(found.problem)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Print the segment, or its groups; 1 for a damaged segment."""
    if arguments.groups is not None:
        return _run_groups(arguments)
    found = inspect(arguments.name, limit=arguments.limit, payload=arguments.payload)
    if arguments.json:
        print_json(found)
    else:
        print("\n\n".join(_blocks(found)))
    unreadable = sum(run.unreadable for run in found.runs)
    damaged = sum(record.verdict != "ok" for record in found.records)
    if found.problem is not None:
        raise RuntimeError(found.problem)
    if unreadable or damaged:
        raise RuntimeError(
            f"{damaged} of the records shown are damaged, and {show_size(unreadable)} lie behind "
            "damaged frames; a consumer counts them as corrupt and goes on"
        )
    return 0


def _blocks(found: Inspection) -> list[str]:
    blocks = [_header(found)]
    schema = schema_text(found.schema, found.schema_problem)
    if schema:
        blocks.append(schema)
    if found.slots:
        blocks.append(_slots(found))
    if found.runs:
        blocks.append(_runs(found.runs))
    if found.records:
        blocks.append(_records(found.records, found.records_omitted))
    return blocks


def _header(found: Inspection) -> str:
    use = "open in a living process" if found.in_use else "open in no living process"
    rows = [
        (name, f"{value:#0{_HEX[name] + 2}x}" if name in _HEX else str(value))
        for name, value in found.header.items()
    ]
    half = (len(rows) + 1) // 2
    pairs = [
        (*left, *right)
        for left, right in itertools.zip_longest(rows[:half], rows[half:], fillvalue=("", ""))
    ]
    return (
        f"segment {found.path}  {show_size(found.file_bytes)}, {use}\n"
        f"{table(('header', '', '', ''), pairs)}"
    )


def _slots(found: Inspection) -> str:
    rows = [
        (
            str(slot.slot),
            str(slot.producer_id),
            str(slot.pid),
            slot.label,
            slot.state,
            "held" if slot.locked else "free",
            show_count(slot.committed),
            show_count(slot.aborted),
            "under way" if slot.commit_under_way else "",
        )
        for slot in found.slots
    ]
    head = ("slot>", "id>", "pid>", "label", "state", "lock", "committed>", "aborted>", "commit")
    return f"slots\n{table(head, rows)}"


def _runs(runs: list[RunView]) -> str:
    rows = [
        (
            "stragglers" if run.collector else f"slot {run.slot}",
            f"{run.extent}" if run.span == 1 else f"{run.extent}-{run.extent + run.span - 1}",
            str(run.producer_id),
            f"{show_size(run.used)} of {show_size(run.room)}",
            str(run.committed),
            str(run.reserved),
            str(run.released + run.aborted),
            _trouble(run),
            ", ".join(run.pinned_by),
        )
        for run in runs[:_RUNS_SHOWN]
    ]
    head = ("lane", "extent>", "id>", "used>", "live>", "open>", "done>", "damage", "kept by")
    hidden = len(runs) - len(rows)
    more = f"\n  and {show_count(hidden)} more: --json" if hidden else ""
    return f"runs\n{table(head, rows)}{more}"


def _trouble(run: RunView) -> str:
    parts = []
    if run.unknown:
        parts.append(f"{run.unknown} of no state")
    if run.unreadable:
        parts.append(f"{show_size(run.unreadable)} unreadable")
    return ", ".join(parts) or "-"


def _records(records: list[RecordView], omitted: int) -> str:
    rows = []
    for record in records:
        name = record.instance_id + ("" if record.round is None else f" round {record.round}")
        rows.append(
            (
                f"{record.extent}+{record.offset}",
                f"{record.producer_id}.{record.sequence}",
                name if len(name) <= _ID_WIDTH else name[: _ID_WIDTH - 3] + "...",
                f"{record.index}/{record.group_size}" if record.group_size else "",
                record.state + (" moved" if record.moved else ""),
                show_size(record.nbytes),
                "" if record.age_s is None else show_duration(record.age_s),
                record.verdict if record.verdict == "ok" else f"{record.verdict} damaged",
                ", ".join(record.fields),
            )
        )
    head = ("at>", "number>", "instance", "index", "state", "size>", "age>", "checks", "fields")
    more = f"\n  and {show_count(omitted)} more: --limit" if omitted else ""
    return f"records\n{table(head, rows)}{more}"
