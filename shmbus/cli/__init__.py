"""The command line, ``shmbus COMMAND``: one file a command, each with ``add_parser`` and ``run``.

Exit status: 0 success, 1 failure, 2 usage. A known failure prints its message, not a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shmbus
from shmbus.cli import bench, demo, pause, serve

__all__ = ["main"]


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
    bench.add_parser(commands)
    demo.add_parser(commands)
    serve.add_parser(commands)
    pause.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except (shmbus.ShmbusError, OSError, RuntimeError) as error:
        print(f"shmbus {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"shmbus {parsed.command}: interrupted", file=sys.stderr)
        return 1
    return status
