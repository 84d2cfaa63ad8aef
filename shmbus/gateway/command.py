"""``shmbus gateway NAME``: options and resources; registered by an entry point.

Invariant: importing this module loads nothing of the extra; `run` does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import socket
from typing import Final

import shmbus
from shmbus.cli._options import Commands, add_numbers, bus_name, require_extra
from shmbus.http.options import add_server_options, allow_connections, read_token, settings_of
from shmbus.segment.names import companion_name

#: Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

#: Options with a number: name, unit, default, meaning.
_NUMBERS: Final = (
    ("body-limit", "MIB", 64, "MiB of one body, inflated"),
    ("memory", "MIB", 256, "MiB of all bodies that are read or held"),
    ("hold", "SECONDS", 240, "how long a POST waits for room before it is answered 503; clients of "
     "Atropos wait 300, and give up after three quick ones"),
    ("keep-batches", "N", 1, "newest batches that come again when the trainer dies"),
)  # fmt: skip

_EXAMPLES = """\
examples:
  shmbus gateway run1 --create 4GiB
  shmbus serve run1 --capacity 4GiB --http 127.0.0.1:8000
  shmbus gateway run1 --http 0.0.0.0:8000 --token-file /etc/shmbus/token

The token may also be in the variable SHMBUS_GATEWAY_TOKEN. See docs/gateway.md.
"""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "gateway",
        help="let environments and trainers of Atropos use a bus over HTTP",
        description="Speaks the trajectory API of Atropos over a bus, until SIGTERM or SIGINT.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", type=bus_name, help="the bus")
    add_server_options(parser, 8000, "info", "clients send")
    parser.add_argument(
        "--create", metavar="CAPACITY", help="create a missing bus of this size, such as 4GiB"
    )
    add_numbers(parser, _NUMBERS)
    # For `shmbus serve --http`: groups come from the daemon, and the gateway ends with the daemon.
    parser.add_argument("--daemon", action="store_const", const=True, help=argparse.SUPPRESS)
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _keep_memory(spare_bytes: int, own_bytes: int) -> None:
    """Have glibc keep freed memory for the next body."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, spare_bytes)
        mallopt(_M_MMAP_THRESHOLD, own_bytes)


def run(arguments: argparse.Namespace) -> int:
    """Serve; return 1 with a hint if the extra is missing."""
    require_extra("gateway", "aiohttp")
    from shmbus.daemon import logs
    from shmbus.gateway.atropos_routes import serve
    from shmbus.gateway.settings import OWN_BYTES, SPARE_BYTES, Settings
    from shmbus.http.server import AddressError

    token = read_token(arguments.token_file, "SHMBUS_GATEWAY_TOKEN")
    settings = settings_of(Settings, arguments, bus=arguments.name, token=token)
    logs.set_up(settings.log_format, settings.log_level)
    created = arguments.create is not None and _create(arguments.name, arguments.create)
    allow_connections()
    _keep_memory(SPARE_BYTES, OWN_BYTES)
    parent = None if arguments.parent_fd is None else socket.socket(fileno=arguments.parent_fd)
    try:
        return serve(settings, parent)
    except AddressError:
        # No client was served: a failed start leaves no bus behind.
        if created:
            shmbus.unlink(arguments.name)
            os.unlink("/dev/shm" + companion_name("gateway", arguments.name))
        raise


def _create(name: str, capacity: str) -> bool:
    """Create the bus, which outlives this process; return False for an existing bus."""
    try:
        shmbus.Bus.create(name, capacity).close()
    except shmbus.BusExistsError:
        return False
    return True
