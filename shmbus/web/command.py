"""``shmbus web [NAME...]``: its options, and its needs; found by its entry point.

Invariant: importing this module loads nothing of the extra; `run` loads it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket

from shmbus.cli._options import Commands, bus_name, host, require_extra, whole

_EXAMPLES = """\
examples:
  shmbus web run1
  shmbus web                      # all buses of this user, an overview first
  shmbus web run1 --port 8123     # then, elsewhere: ssh -L 8123:localhost:8123 this-machine
  shmbus serve run1 --web 8123    # beside a daemon, in a process of its own

The token of the printed address is made anew each time, unless SHMBUS_WEB_TOKEN has one. See
docs/page.md.
"""
#: Minimum letters of a given token: as good as an unguessable password.
_TOKEN_LETTERS = 16


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "web",
        help="show buses at work on a page in a browser",
        description="Prints an address on loopback, and serves a page there that shows a bus at "
        "work: the limiting process, groups filling up, rates, rewards, producers and holders. "
        "Read-only, without leases or locks; until SIGTERM or SIGINT.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", type=bus_name, help="the buses (default: all)"
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=0, help="where to listen (default 0: any free port)"
    )
    parser.add_argument(
        "--host",
        type=host,
        default="127.0.0.1",
        help="the address to listen at (default 127.0.0.1)",
    )
    # For `shmbus serve --web`: the page ends with the daemon.
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the end."""
    require_extra("web", "aiohttp")
    from shmbus.web.server import serve
    from shmbus.web.settings import Settings

    token = os.environ.get("SHMBUS_WEB_TOKEN") or secrets.token_urlsafe(24)
    names = tuple(dict.fromkeys(arguments.names))
    plain = token.isascii() and token.replace("-", "").replace("_", "").isalnum()
    if len(token) < _TOKEN_LETTERS or not plain:
        raise ValueError(
            f"SHMBUS_WEB_TOKEN: expected {_TOKEN_LETTERS} or more ASCII letters and digits, got "
            f"{len(token)}{'' if plain else ' with others'}; unset it to have one made"
        )
    settings = Settings(buses=names, host=arguments.host, port=arguments.port, token=token)
    parent = None if arguments.parent_fd is None else socket.socket(fileno=arguments.parent_fd)
    return serve(settings, parent, lambda address: print(f"the page: {address}", flush=True))
