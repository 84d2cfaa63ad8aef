"""The command line, ``shmbus COMMAND``: a file per command, with ``add_parser`` and ``run``.

Upper packages add commands by the entry-point group ``shmbus.commands``: the entry's name is the
command, its object a module with ``add_parser``. So nothing here imports upwards.

Invariants:

- Exit status: 0 success, 1 failure, 2 usage. A known failure prints its message, not a traceback.
- A built-in command starts without the modules of other commands, and cannot be replaced.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

import shmbus
from shmbus.base.format import with_notes
from shmbus.cli._options import Commands, unknown_command

__all__ = ["main"]

#: The module of each command, in the order of the help.
_COMMANDS = {
    "serve": "serve",
    "status": "status",
    "top": "top",
    "list": "list",
    "rm": "rm",
    "gc": "gc",
    "doctor": "doctor",
    "inspect": "inspect",
    "events": "events",
    "trace": "trace",
    "metrics": "metrics",
    "pause": "pause",
    "resume": "pause",
    "snapshot": "snapshot",
    "restore": "snapshot",
    "weights": "weights",
    "colocate": "colocate",
    "bench": "bench",
}


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs; keeps the lines of laid-out text like examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(
        prog="shmbus",
        description="A shared-memory bus that brings complete groups of trajectories to a trainer.",
        epilog="example:\n  shmbus demo --workers 4",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"shmbus {shmbus.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = sys.argv[1:] if arguments is None else arguments
    built_in = bool(words) and words[0] in _COMMANDS
    # A module may serve several commands; add it once.
    for module in dict.fromkeys([_COMMANDS[words[0]]] if built_in else _COMMANDS.values()):
        importlib.import_module(f"{__name__}.{module}").add_parser(commands)
    if not built_in:
        _add_upper_commands(commands)
    for command in commands.choices.values():
        if command.formatter_class is argparse.HelpFormatter:
            command.formatter_class = _Help
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        parser.error(unknown_command(words[0], commands.choices))
    parsed = parser.parse_args(arguments)
    if sys.stdout is None:
        # Closed before the start, as by `>&-`: output without a reader counts as no error.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or a log that knows only ASCII gets escapes, and not a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        exit_status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The output's reader is gone; the flush at exit must still find an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (shmbus.ShmbusError, OSError, RuntimeError) as error:
        print(f"shmbus {parsed.command}: {with_notes(error)}", file=sys.stderr)
        return 1
    except UnicodeEncodeError as error:
        said = f"expected text that UTF-8 can encode, got {error.object!r}"
        print(f"shmbus {parsed.command}: {said}", file=sys.stderr)
        return 2
    except ValueError as error:  # a refused argument
        print(f"shmbus {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"shmbus {parsed.command}: interrupted", file=sys.stderr)
        return 1
    return exit_status


def _add_upper_commands(commands: Commands) -> None:
    import importlib.metadata

    entries = importlib.metadata.entry_points(group="shmbus.commands")
    for entry in sorted(entries, key=lambda entry: entry.name):
        entry.load().add_parser(commands)
