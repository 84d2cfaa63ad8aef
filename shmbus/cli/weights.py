"""``shmbus weights``: versions of a bus's weights, who reads and holds them, and their bytes."""

from __future__ import annotations

import argparse
import subprocess
import time

from shmbus.base.format import show_duration, show_size, table
from shmbus.cli._options import (
    Commands,
    add_command,
    checked,
    print_json,
    refuse_given,
    require_extra,
    share,
)
from shmbus.cli._supervise import resume_program
from shmbus.pool.pool_status import PoolStatus, read_pool
from shmbus.segment.names import companion_name

#: Columns of a reader's error; --json prints the full text.
_ERROR_COLUMNS = 60
#: Share of an engine's time for --verify.
_SHARE = 0.05


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "weights",
        run,
        help="show published weights, and the version of each replica",
        description="Shows the slots of a bus's weights, the publishing ranks, and the readers: "
        "current version, refused version with the reason, held slots. Reads only the tables, "
        "without locks. Exit status 1 for a bus without weights.",
        examples=[
            "shmbus weights run1",
            "shmbus weights run1 --json | jq '.readers[].error'",
            "shmbus weights run1 --resume",
            "shmbus weights run1 --verify --server http://127.0.0.1:8000",
        ],
        json=True,
    )
    parser.add_argument(
        "--kind",
        type=checked(_kind),
        help="kind of the pool, as in /dev/shm/shmbus-KIND.NAME (default weights)",
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument(
        "--resume",
        action="store_true",
        help="resume the inference servers that a trainer left paused when it ended, with whole "
        "weights; exit status 1 where one stays paused",
    )
    actions.add_argument(
        "--verify",
        action="store_true",
        help="have each rank of vLLM's servers compare its weights with the version in force while "
        "the server generates; exit status 1 where a tensor differs or nothing was compared",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="with --verify: a server's address; every server with a row by default",
    )
    parser.add_argument(
        "--share",
        type=share,
        help=f"with --verify: the most that comparing takes of an engine's time (default {_SHARE})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or end a dead trainer's remains."""
    if not arguments.verify:
        refuse_given(arguments, ("server", "share"), "expected with --verify; add --verify")
    if arguments.verify or arguments.resume:
        refuse_given(arguments, ("kind",), "expected without --verify and --resume; leave it out")
    if arguments.resume:
        refuse_given(arguments, ("json",), "expected without --resume; leave it out")
        return subprocess.run(resume_program(arguments.name), check=False).returncode
    if arguments.verify:
        require_extra("engines", "aiohttp", "torch", option="--verify")
        from shmbus.engines.verify import report

        share_of_time = arguments.share or _SHARE
        return report(arguments.name, arguments.server, share_of_time, as_json=arguments.json)
    status = read_pool(arguments.name, arguments.kind or "weights")
    if arguments.json:
        print_json(status)
    else:
        print(_text(status, time.time()))
    return 0


def _kind(text: str) -> str:
    companion_name(text, "NAME")
    return text


def _text(status: PoolStatus, now_s: float) -> str:
    newest = "no version yet" if status.version is None else f"version {status.version}"
    lines = [
        f"{status.kind} of bus {status.bus}: {newest}, {status.published} published, "
        f"{status.skipped} skipped; {show_size(status.size)} in {status.slots_open} of "
        f"{status.max_slots} slots"
    ]
    head = ("slot>", "state", "version>", "size>", "ranks>", "age>", "patch from>", "held by")
    rows = [
        (
            str(slot.slot),
            "newest" if slot.newest and slot.state == "ready" else slot.state,
            str(slot.version) if slot.sequence else "-",
            show_size(slot.size) if slot.sequence else "-",
            str(slot.ranks) if slot.sequence else "-",
            _age(slot.published_unix_ns, now_s),
            "-" if slot.patch_from is None else str(slot.patch_from),
            ", ".join(slot.held_by) or "-",
        )
        for slot in status.slots[: status.slots_open]
    ]
    lines += ["", table(head, rows, indent="")]
    if status.ranks:
        rank_head = ("rank>", "state", "pid>", "label", "error")
        ranks = [
            (str(rank.rank), rank.state, str(rank.pid), rank.label, rank.error or "-")
            for rank in status.ranks
        ]
        lines += ["", table(rank_head, ranks, indent="")]
    else:
        lines += ["", "no publisher is attached"]
    if status.readers:
        reader_head = ("reader>", "state", "pid>", "label", "device", "runs>", "refused")
        readers = [
            (
                str(reader.reader),
                reader.state,
                str(reader.pid),
                reader.label,
                reader.device or "-",
                "-" if reader.applied_version is None else str(reader.applied_version),
                _refusal(reader.refused_version, reader.error),
            )
            for reader in status.readers
        ]
        lines += ["", table(reader_head, readers, indent="")]
    else:
        lines += ["", "no reader is attached"]
    return "\n".join(lines)


def _age(published_unix_ns: int, now_s: float) -> str:
    if published_unix_ns == 0:
        return "-"
    return show_duration(max(0.0, now_s - published_unix_ns / 1e9))


def _refusal(version: int | None, error: str) -> str:
    return "-" if version is None else f"{version}: {error[:_ERROR_COLUMNS]}"
