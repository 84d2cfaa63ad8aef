"""Words of the command line: what a mistyped command was meant to be, and completion by the shell.

Completion is argcomplete's (extra `ops`); a shell asks for it by an environment variable, and in no
other case is it loaded.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable
from typing import Any, Final

from shmbus.segment.names import bus_names

__all__ = ["complete", "unknown_command"]

#: How much a word has in common with the command that it is taken for, from 0 to 1: "stats" and
#: "status" have 0.91.
_ALIKE: Final = 0.6

#: What other programs call them.
_SYNONYMS: Final = {
    "ls": "list", "ps": "list", "stat": "status", "info": "status", "watch": "top",
    "monitor": "top", "start": "serve", "daemon": "serve", "unlink": "rm", "remove": "rm",
    "delete": "rm", "del": "rm", "clean": "gc", "dump": "inspect", "backup": "snapshot",
}  # fmt: skip


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Say that there is no such command, and which one was probably meant."""
    known = list(commands)
    meant = difflib.get_close_matches(word.lower(), known, 1, _ALIKE)
    if word.lower() in _SYNONYMS:
        meant = [_SYNONYMS[word.lower()]]
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    return f"there is no command {word!r}; {hint}expected one of {', '.join(known)}"


def complete(parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser]) -> None:
    """Answer a shell that asks for completions, and exit; return where none asks."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return  # asked by a shell that knows another environment's; without it nothing completes
    for command in commands:
        for action in command._actions:
            if action.metavar == "NAME":
                action.completer = _existing_buses  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _existing_buses(**_: Any) -> list[str]:
    return bus_names()
