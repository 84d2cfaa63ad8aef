"""Memory of the HTTP gateway while many clients post large groups at once.

``python -m bench.gateway_clients [--clients N] [--megabytes M] [--output FILE.json]``.

Each client posts one group of so many megabytes of JSON over a connection of its own, all of them
at once; a trainer takes them in batches of one, and each has to come once. What counts is the most
memory of the gateway's own, without the pages of the bus, against the bound that docs/gateway.md
states.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import shmbus
from bench import command, machine
from bench.contenders.base import free_port
from bench.failures import MeasurementError, sentence
from bench.fitness import Need
from bench.gateway import CAPACITY, REGISTRATION, ask, server
from bench.sending import bus_bytes

__all__ = ["main", "measure"]

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


@contextmanager
def _gateway(bus: str, capacity: str) -> Iterator[tuple[int, int]]:
    port = free_port()
    argv = ["-m", "shmbus", "gateway", bus, "--create", capacity, "--http", f"127.0.0.1:{port}"]
    try:
        with server([*argv, "--log-level", "warning"], port) as pid:
            yield pid, port
    finally:
        with suppress(shmbus.BusNotFoundError):
            shmbus.unlink(bus)
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/shmbus-gateway.{bus}")


def measure(clients: int, megabytes: float, capacity: str = CAPACITY) -> dict[str, Any]:
    """Measure, and return everything; each group has to come once."""
    found: list[int] = []
    with _gateway(f"bench-clients-{secrets.token_hex(4)}", capacity) as (pid, port):
        ask(port, "POST", "/register", json.dumps({**REGISTRATION, "batch_size": 1}).encode())
        ask(port, "GET", "/batch")
        memory = Memory(pid)
        before = memory.own_bytes()
        memory.start()
        posted: list[list[bytes]] = []
        failed: list[Exception] = []

        def post() -> None:
            try:
                posted.append(asyncio.run(_post_all(port, clients, megabytes)))
            except Exception as error:
                failed.append(error)

        # A daemon, so that an interrupt need not wait for clients that nobody answers.
        posting = threading.Thread(target=post, daemon=True)
        began_s = time.monotonic()
        posting.start()
        while len(found) < clients:
            numbers = FIRST_TOKEN.findall(ask(port, "GET", "/batch", None)[:HEAD_BYTES])
            found += map(int, numbers)
            if not numbers:
                if not posting.is_alive():
                    break
                time.sleep(0.01)
        posting.join()
        seconds = time.monotonic() - began_s
        memory.stop()
    if failed:
        if not (why := sentence(failed[0])):
            raise failed[0]
        raise MeasurementError(f"the clients: {why}")
    statuses = sorted({status.decode() for status in posted[0]}) if posted else []
    if sorted(found) != list(range(clients)):
        raise MeasurementError(
            f"{len(found)} of {clients} groups came, {len(set(found))} different ones, answers "
            f"{statuses}, {memory.most_bytes >> 20} MiB at the most"
        )
    return {
        "machine": machine.describe(), "clients": clients, "megabytes": megabytes,
        "capacity": capacity, "seconds": seconds, "statuses": statuses, "before_bytes": before,
        "most_bytes": memory.most_bytes,
    }  # fmt: skip


@command.orderly("gateway_clients")
def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway_clients", description=__doc__)
    parser.add_argument(
        "--clients", type=command.at_least_one, default=1000, help="at once (default 1000)"
    )
    parser.add_argument(
        "--megabytes", type=command.positive, default=10.0, help="of JSON each (default 10)"
    )
    parser.add_argument("--output", type=command.file, help="where the figures go as JSON")
    arguments = parser.parse_args()
    if command.lacks(("aiohttp",), "gateway_clients", "pip install 'shmbus[gateway]'"):
        return 1
    if command.refused(Need(shm_bytes=bus_bytes(CAPACITY), timed=False), "gateway_clients"):
        return 1
    found = measure(arguments.clients, arguments.megabytes)
    print(
        f"{found['clients']} clients with {found['megabytes']:g} MB each: the gateway had "
        f"{found['before_bytes'] >> 20} MiB of its own before, {found['most_bytes'] >> 20} MiB at "
        f"the most; every group came once, in {found['seconds']:.0f} s"
    )
    return command.keep(arguments.output, found, "gateway_clients")


if __name__ == "__main__":
    sys.exit(main())
