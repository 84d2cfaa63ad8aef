"""``python -m bench.report``: make the tables and plots of a run again; fold several reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import command
from bench.report import fold, reading
from bench.report.blocks import replace_blocks
from bench.report.report import write

__all__ = ["main"]


@command.orderly("report")
def main(argv: Sequence[str] | None = None) -> int:
    """Make the report of a directory again, or fold several."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "fold":
        return fold.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description="Make tables and plots of a run's results.json.",
        epilog="example: python -m bench.report bench/results/two-cores --readme README.md "
        "bench/README.md",
    )
    parser.add_argument("directory", type=Path, help="that holds results.json, and folded.json")
    parser.add_argument(
        "--readme", type=Path, nargs="+", default=[], metavar="PAGE",
        help="Markdown pages whose blocks are replaced",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        result = reading.result(options.directory)
        write(result, options.directory)
        for page in options.readme:
            replace_blocks(result, options.directory, page)
    except (reading.CannotRead, OSError) as error:
        parser.exit(1, f"report: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
