"""Options of commands that serve HTTP, and their limit of open files."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
from typing import TypeVar

import msgspec

from shmbus.base.arguments import check_path

_SettingsT = TypeVar("_SettingsT", bound=msgspec.Struct)


#: Settings that the command line gives in MiB.
_IN_MIB = ("body_limit", "memory")


def settings_of(
    kind: type[_SettingsT], arguments: argparse.Namespace, **more: object
) -> _SettingsT:
    """Return settings with the values of the arguments of their names, and `more`."""
    more["host"], more["port"] = arguments.http
    for name, value in vars(arguments).items():
        if name in kind.__struct_fields__:
            more[name] = value << 20 if name in _IN_MIB else value
    return kind(**more)


def address(text: str) -> tuple[str, int]:
    """Take HOST:PORT from the command line."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # A URL is the likeliest mistake.
    is_number = port.isascii() and port.isdecimal()
    if not (colon and host and is_number) or "/" in host or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"expected HOST:PORT, such as 127.0.0.1:8000, got {text!r}"
        )
    return host, int(port)


def add_server_options(parser: argparse.ArgumentParser, port: int, level: str, opens: str) -> None:
    """Add the common options of servers; `opens` describes the use of the token."""
    parser.add_argument(
        "--http", metavar="HOST:PORT", type=address, default=("127.0.0.1", port),
        help=f"where to listen (default 127.0.0.1:{port}); port 0 for any free one",
    )  # fmt: skip
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file with the token that {opens}, as 'Authorization: Bearer TOKEN'",
    )
    parser.add_argument("--log-format", choices=("json", "text"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=level)


def read_token(path: str | None, variable: str) -> str | None:
    """Return a token from a file, or else a variable; None without either."""
    if path is None:
        found = os.environ.get(variable)
        if found is None:
            return None
        where, remedy = variable, "unset it, or give it one"
    else:
        check_path("--token-file", path)
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                found = file.read()
        except OSError as error:
            raise RuntimeError(
                f"--token-file: cannot read {path!r}: {error.strerror}; give a readable file"
            ) from error
        where, remedy = f"--token-file {path}", "write one into it"
    token = found.strip()
    # Other characters fail in a header, or change on the way.
    if not token or not all(" " <= letter <= "~" for letter in token):
        got = "characters besides" if token else "nothing"
        raise RuntimeError(
            f"{where}: expected a token of ASCII letters, digits and marks, found {got}; {remedy}"
        )
    return token


def allow_connections() -> None:
    """Raise this process's limit of open files to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
