"""``shmbus bench``: measure this machine, by ``bench/`` of the source checkout.

The package omits the benchmark, because of its C sources and contenders. In a checkout the command
runs the benchmark in a separate interpreter; elsewhere the command prints the remedy. Importing the
module loads nothing of the benchmark.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import shmbus
from shmbus.cli._options import Commands

_SUITE = Path("bench", "suite.py")
_HELP = """usage: shmbus bench [options]

Measure shmbus and the other ways to move a trajectory on this machine. It runs from a source
checkout, which this is not:

  git clone <the repository of shmbus> && cd shmbus
  make bench                    # --quick: under five minutes
  make bench ARGS=--full        # what figures are kept of

example: shmbus bench --quick"""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, beside other ways to move a trajectory",
        # The benchmark parses its options and prints their help.
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("options", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark of this package's checkout; return the exit status."""
    root = Path(shmbus.__file__).resolve().parents[1]
    if not (root / _SUITE).is_file():
        wants_help = {"-h", "--help"} & set(arguments.options)
        print(_HELP, file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 1
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments.options], env={**os.environ, "PYTHONPATH": path}
    )
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # Ctrl-C reaches both processes: the benchmark ends its children; this process waits.
            continue
