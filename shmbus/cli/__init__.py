"""The command line, ``shmbus COMMAND``: one file a command, each with ``add_parser`` and ``run``.

Exit status: 0 success, 1 failure, 2 usage. A known failure prints its message, not a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import shmbus
from shmbus.cli import (
    bench,
    demo,
    doctor,
    gc,
    inspect,
    metrics,
    pause,
    record,
    serve,
    snapshot,
    status,
    top,
)
from shmbus.cli import list as list_

__all__ = ["main"]

_COMMANDS = (
    serve,
    status,
    top,
    list_,
    gc,
    doctor,
    inspect,
    metrics,
    pause,
    snapshot,
    record,
    demo,
    bench,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        Exit status.
    """
    parser = argparse.ArgumentParser(
        prog="shmbus",
        description="A shared-memory bus that brings complete groups of trajectories to a trainer.",
        epilog="example:\n  shmbus demo --workers 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shmbus {shmbus.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or a log that knows only ASCII gets escapes, and not a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        exit_status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read the output has gone; what Python flushes at its end must have a place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (shmbus.ShmbusError, OSError, RuntimeError) as error:
        print(f"shmbus {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"shmbus {parsed.command}: interrupted", file=sys.stderr)
        return 1
    return exit_status
