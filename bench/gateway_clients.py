"""Memory of the HTTP gateway: ``python -m bench.gateway_clients``, many post large groups at once.

Each client posts one group of so many megabytes of JSON over a connection of its own, all of them
at once; a trainer takes them in batches of one, and each has to come once. What counts is the most
memory of the gateway's own, without the pages of the bus, against the bound that docs/gateway.md
states.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from bench import machine, program
from bench.contenders.base import free_port
from bench.gateway import CAPACITY, REGISTRATION, ask, removed, server
from bench.processes import MeasurementError
from bench.row import Row, skipped
from bench.sending import bus_bytes

__all__ = ["main", "peak"]

#: Bytes that a client hands to its socket at once.
PIECE: Final = 256 << 10
#: A busy machine takes minutes; a client that is answered 503 sends its group again.
CLIENT_TIMEOUT_S: Final = 1200.0
#: Where a batch of one group has its first token, and how many bytes from its beginning that is.
HEAD_BYTES: Final = 200
FIRST_TOKEN: Final = re.compile(rb'"tokens":\[\[(\d+)')
SAMPLE_S: Final = 0.05


def body_of(megabytes: float) -> tuple[bytes, bytes]:
    """Return a group of one sequence, cut where its first token is; all clients share the rest."""
    count = max(1, int(megabytes * 1e6 / 16))
    rest = ", ".join(str(100_000 + at % 50_000) for at in range(count))
    head, tail = b'{"scores": [1.0], "tokens": [[', f', {rest}]], "masks": [[0, {rest}]]}}'
    return head, tail.encode()


class Memory(threading.Thread):
    """Watches how much memory a process has of its own."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self.most_bytes = 0

    def own_bytes(self) -> int:
        """Return what it has now, without files and shared memory."""
        for line in self._status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0

    def run(self) -> None:
        """Look until `stop`, and then once more, or until it has gone."""
        with suppress(OSError):
            while True:
                ended = self._ended.wait(SAMPLE_S)
                self.most_bytes = max(self.most_bytes, self.own_bytes())
                if ended:
                    return

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join()


async def _post(port: int, head: bytes, tail: bytes) -> bytes:
    """Post once; returns the status line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = (
        "POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(head) + len(tail)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(lines.encode() + head)
    view = memoryview(tail)
    for at in range(0, len(view), PIECE):
        # A copy of a piece at a time: the transports of all clients hold as many.
        writer.write(bytes(view[at : at + PIECE]))
        await writer.drain()
    status = await reader.readline()
    writer.close()
    return status.strip()


async def _post_all(port: int, clients: int, megabytes: float) -> list[bytes]:
    head, tail = body_of(megabytes)

    async def one(number: int) -> bytes:
        while True:
            # A 503 that comes before the body was read may arrive as a reset: both are tried again.
            with suppress(ConnectionError):
                status = await _post(port, head + str(number).encode(), tail)
                if status and b" 503 " not in status:
                    return status

    posts = asyncio.gather(*(one(number) for number in range(clients)))
    return await asyncio.wait_for(posts, CLIENT_TIMEOUT_S)


def peak(clients: int, megabytes: float, capacity: str = CAPACITY) -> tuple[int, int]:
    """Have clients post; return the gateway's own bytes before, and at the most.

    Raises
    ------
    MeasurementError
        A group did not come, or came twice.
    """
    found: list[int] = []
    bus, port = f"bench-clients-{secrets.token_hex(4)}", free_port()
    argv = ["-m", "shmbus", "gateway", bus, "--create", capacity, "--http", f"127.0.0.1:{port}"]
    with (
        removed(bus),
        server([*argv, "--log-level", "warning"], port) as pid,
        ThreadPoolExecutor(1) as posting,
    ):
        ask(port, "POST", "/register", json.dumps({**REGISTRATION, "batch_size": 1}).encode())
        ask(port, "GET", "/batch")
        memory = Memory(pid)
        before = memory.own_bytes()
        memory.start()
        posted = posting.submit(lambda: asyncio.run(_post_all(port, clients, megabytes)))
        while len(found) < clients:
            numbers = FIRST_TOKEN.findall(ask(port, "GET", "/batch", None)[:HEAD_BYTES])
            found += map(int, numbers)
            if not numbers:
                if posted.done():
                    break
                time.sleep(0.01)
        statuses = {status.decode() for status in posted.result()}
        memory.stop()
    if sorted(found) != list(range(clients)):
        raise MeasurementError(
            f"{len(found)} of {clients} groups came, {len(set(found))} different ones, answers "
            f"{sorted(statuses)}, {memory.most_bytes >> 20} MiB at the most"
        )
    return before, memory.most_bytes


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the most memory, beside that of a gateway that has just begun."""
    title = (
        f"the gateway's own memory, {options.clients} clients post {options.megabytes:g} MB each"
    )
    if why := machine.lacks(shm_bytes=bus_bytes(CAPACITY), modules=("aiohttp",)):
        return [skipped("gateway-clients", title, why)]
    clients, megabytes = (4, 0.1) if options.tiny else (options.clients, options.megabytes)
    turns = [peak(clients, megabytes) for _ in range(options.repetitions or 1)]
    return [
        Row(
            name="gateway-clients", title=title, unit="MiB",
            values=tuple(most / 2**20 for _, most in turns), beside="before",
            beside_values=tuple(before / 2**20 for before, _ in turns),
        )
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = program.parser_of("gateway_clients", __doc__)
    parser.add_argument("--clients", type=program.at_least_one, default=1000, help="at once (1000)")
    parser.add_argument("--megabytes", type=float, default=10.0, help="of JSON each (10)")
    return program.run("gateway_clients", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
