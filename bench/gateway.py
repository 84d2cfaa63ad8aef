"""Processor time and memory of the HTTP gateway: ``python -m bench.gateway``.

Needs atroposlib (``make test-peers`` makes such an environment). A round posts a group of 1.1 MB,
plain and gzipped, like an environment, and takes the group like a trainer, at both servers in turn.
Figure: processor time of all threads of a server.

``--clients N`` measures memory instead: N clients post a group each at once, and a trainer takes
batches of a single group. Row: peak of the gateway's private memory, without the pages of the bus.
"""

import argparse
import asyncio
import gzip
import http.client
import json
import os
import random
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import shmbus
from bench import machine, program
from bench.contenders.base import free_port, started
from bench.processes import MeasurementError
from bench.row import Row, skipped
from bench.sending import bus_bytes

__all__ = ["main", "peak"]

CAPACITY: Final = "256MiB"
SEQUENCES: Final = 8
TOKENS: Final = 4042
ROUNDS: Final = 60
#: Uncounted rounds: imports, memory, caches.
WARM_UP: Final = 5
START_S: Final = 60.0
#: Idle seconds after which a server's work counts as ended; longest wait for them.
SETTLED_S: Final = 0.003
SETTLE_S: Final = 1.0
#: Bytes of a client's single write to its socket.
PIECE: Final = 256 << 10
#: Minutes, for a busy machine; a client answered with 503 sends its group again.
CLIENT_TIMEOUT_S: Final = 1200.0
#: Marker before the first token of a batch with a single group, and its longest distance in bytes.
HEAD_BYTES: Final = 200
FIRST_TOKEN: Final = re.compile(rb'"tokens":\[\[(\d+)')
SAMPLE_S: Final = 0.05

REGISTRATION: Final = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": SEQUENCES, "max_token_len": 1 << 20,
    "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1 << 30,
}  # fmt: skip


def group() -> dict[str, Any]:
    """Return 8 sequences with 97,008 numbers; a third of the numbers need all of their digits."""
    dice = random.Random(1)
    tokens = [[dice.randrange(150_000) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
    return {
        "tokens": tokens,
        "masks": [[-100] * 200 + row[200:] for row in tokens],
        "scores": [dice.random() for _ in tokens],
        "inference_logprobs": [[-dice.expovariate(1.0) for _ in row] for row in tokens],
    }


def cpu_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, after the end of their work.

    A server works on after its answer, and the kernel adds a thread's time only at interrupts and
    sleeps: an early read would move time from this request to the next.
    """
    deadline = time.monotonic() + SETTLE_S
    before = -1
    while True:
        total = 0
        asleep = True
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError):
                total += int((task / "schedstat").read_text().split()[0])
                asleep &= (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
        if (asleep and total == before) or time.monotonic() > deadline:
            return total / 1e9
        before = total
        time.sleep(SETTLED_S)


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """Send a request over a new connection; return the raw body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        found = response.read()
        if response.status != http.client.OK:
            raise MeasurementError(f"{method} {path}: {response.status} {found[:300]!r}")
        if response.headers.get("Content-Encoding") == "gzip":
            found = gzip.decompress(found)
        return found
    finally:
        connection.close()


@contextmanager
def server(argv: list[str], port: int) -> Iterator[int]:
    """Run a server; yield the process id."""

    def answers() -> bool:
        with suppress(OSError, http.client.HTTPException):
            ask(port, "GET", "/info")
            return True
        return False

    with started([sys.executable, *argv], answers) as process:
        yield process.pid


@contextmanager
def removed(bus: str) -> Iterator[None]:
    """Remove the files of a gateway on this bus."""
    try:
        yield
    finally:
        with suppress(shmbus.BusNotFoundError):
            shmbus.unlink(bus)
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/shmbus-gateway.{bus}")


Spent = dict[str, dict[str, list[float]]]


def _rounds(servers: dict[str, tuple[int, int]], rounds: int) -> Spent:
    """Return milliseconds of each server for each POST and batch, with servers in turn."""
    sent = group()
    body = json.dumps(sent).encode()
    kinds: dict[str, tuple[bytes, dict[str, str]]] = {
        "post": (body, {}),
        "post-gzip": (gzip.compress(body), {"Content_Encoding": "gzip"}),
    }
    spent: Spent = {name: {what: [] for what in (*kinds, "batch")} for name in servers}
    for number in range(-WARM_UP, rounds):
        for kind, (wire, headers) in kinds.items():
            for name, (pid, port) in servers.items():
                began = cpu_s(pid)
                ask(port, "POST", "/scored_data", wire, **headers)
                posted = cpu_s(pid)
                answer = ask(port, "GET", "/batch", None, Accept_Encoding="identity")
                taken = cpu_s(pid)
                if number >= 0:
                    spent[name][kind].append(1e3 * (posted - began))
                    spent[name]["batch"].append(1e3 * (taken - posted))
                if number in (-WARM_UP, rounds - 1):
                    [found] = json.loads(answer)["batch"]
                    if any(found[key] != value for key, value in sent.items()):
                        raise MeasurementError(f"{name}: the batch is another group")
    return spent


TITLES: Final = {
    "post": "POST of a group, 1.1 MB",
    "post-gzip": "POST of a group, gzip",
    "batch": "GET of a batch",
}


# -- memory ----------------------------------------------------------------------------------------


def body_of(megabytes: float) -> tuple[bytes, bytes]:
    """Return a group of a single sequence, cut at its first token; clients share the rest."""
    count = max(1, int(megabytes * 1e6 / 16))
    rest = ", ".join(str(100_000 + at % 50_000) for at in range(count))
    head, tail = b'{"scores": [1.0], "tokens": [[', f', {rest}]], "masks": [[0, {rest}]]}}'
    return head, tail.encode()


class Memory(threading.Thread):
    """Watches the private memory of a process."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self.most_bytes = 0

    def own_bytes(self) -> int:
        """Return the private bytes now, without files and shared memory."""
        for line in self._status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0

    def run(self) -> None:
        """Look until `stop` and once more, or until the process ends."""
        with suppress(OSError):
            while True:
                ended = self._ended.wait(SAMPLE_S)
                self.most_bytes = max(self.most_bytes, self.own_bytes())
                if ended:
                    return

    def stop(self) -> None:
        """End the looks."""
        self._ended.set()
        self.join()


async def _post(port: int, head: bytes, tail: bytes) -> bytes:
    """Send a POST; return the status line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = (
        "POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(head) + len(tail)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(lines.encode() + head)
    view = memoryview(tail)
    for at in range(0, len(view), PIECE):
        # A piece at a time: the transports of all clients hold a copy of their piece.
        writer.write(bytes(view[at : at + PIECE]))
        await writer.drain()
    status = await reader.readline()
    writer.close()
    return status.strip()


async def _post_all(port: int, clients: int, megabytes: float) -> list[bytes]:
    head, tail = body_of(megabytes)

    async def one(number: int) -> bytes:
        while True:
            # An early 503 may arrive as a reset: the client repeats after both.
            with suppress(ConnectionError):
                status = await _post(port, head + str(number).encode(), tail)
                if status and b" 503 " not in status:
                    return status

    posts = asyncio.gather(*(one(number) for number in range(clients)))
    return await asyncio.wait_for(posts, CLIENT_TIMEOUT_S)


def peak(clients: int, megabytes: float, capacity: str = CAPACITY) -> tuple[int, int]:
    """Have clients post; return the gateway's private bytes before the posts, and at their peak.

    Raises
    ------
    MeasurementError
        A group was lost or doubled.
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


def memory_rows(options: argparse.Namespace) -> list[Row]:
    """Measure the peak of memory beside the memory of an idle gateway."""
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


# -- the program -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure both servers, or the memory of the gateway."""
    if options.clients:
        return memory_rows(options)
    why = machine.lacks(shm_bytes=bus_bytes(CAPACITY), modules=("aiohttp", "atroposlib", "uvicorn"))
    if why:
        return [skipped("gateway", "the gateway beside atroposlib's server", why)]
    rounds = options.repetitions or (2 if options.tiny else ROUNDS)
    bus = f"bench-gateway-{secrets.token_hex(4)}"
    argvs = {
        "atroposlib": ["uvicorn", "atroposlib.api:app", "--port", "PORT", "--log-level", "warning"],
        "gateway": ["shmbus", "gateway", bus, "--create", CAPACITY, "--http", "127.0.0.1:PORT"],
    }
    with removed(bus), ExitStack() as stack:
        servers: dict[str, tuple[int, int]] = {}
        for name, argv in argvs.items():
            port = free_port()
            argv = ["-m", *(part.replace("PORT", str(port)) for part in argv)]
            servers[name] = stack.enter_context(server(argv, port)), port
            ask(port, "POST", "/register", json.dumps(REGISTRATION).encode())
            ask(port, "GET", "/batch")
        spent = _rounds(servers, rounds)
    return [
        Row(
            name=f"gateway-{what}", title=f"{title}, the server's processor time", unit="ms",
            values=tuple(spent["gateway"][what]), beside="atroposlib",
            beside_values=tuple(spent["atroposlib"][what]),
        )
        for what, title in TITLES.items()
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("gateway", __doc__)
    made.add_argument("--clients", type=program.at_least_one, metavar="N", help="measure memory")
    made.add_argument("--megabytes", type=float, default=10.0, help="of JSON of a client (10)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("gateway", parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
