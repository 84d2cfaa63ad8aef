"""``shmbus inspect``: a segment record by record, for a stuck, damaged or foreign bus."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shmbus.base import limits
from shmbus.base.format import show_count, show_size, table
from shmbus.cli._options import Commands, add_command, print_json, whole
from shmbus.inspect.dump import Inspection, inspect
from shmbus.inspect.groups import read_groups
from shmbus.inspect.text import groups_text, schema_text
from shmbus.inspect.undelivered import MAX_RECORDS

_DEFAULT_LIMIT = 20
_DEFAULT_GROUPS = 40
#: Lines of runs for people; JSON lists all.
_RUNS_SHOWN = 40


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


def _blocks(found: Inspection) -> Iterator[str]:
    use = "open in a living process" if found.in_use else "open in no living process"
    texts = [(name, str(value)) for name, value in found.header.items()]
    header = table(("header", ""), [pair for pair in texts if pair[1].strip("0")])
    yield f"segment {found.path}  {show_size(found.file_bytes)}, {use}\n{header}"
    if schema := schema_text(found.schema, found.schema_problem):
        yield schema
    yield from _rows("slots", found.slots, 0)
    yield from _rows("runs", found.runs[:_RUNS_SHOWN], len(found.runs) - _RUNS_SHOWN)
    yield from _rows("records", found.records, found.records_omitted)


def _rows(title: str, rows: Sequence[msgspec.Struct], omitted: int) -> Iterator[str]:
    """Print the fields of the rows, without those that are empty in every row."""
    if not rows:
        return
    columns = {
        name: [_cell(getattr(row, name)) for row in rows] for name in rows[0].__struct_fields__
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    more = f"\n  and {show_count(omitted)} more" if omitted > 0 else ""
    yield f"{title}\n{table([*columns], [*zip(*columns.values(), strict=True)])}{more}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None or value is False else str(value)
