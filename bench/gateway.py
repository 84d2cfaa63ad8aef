"""Processor time of the HTTP gateway, beside atroposlib's server: ``python -m bench.gateway``.

Where atroposlib is installed (``make test-peers`` makes such an environment). A round is one group
of 1.1 MB, posted as an environment does, with gzip or without, and taken as a trainer does, over
connections of their own. Both servers run at once and are asked in turn. What counts is the time
that all threads of a server were on a processor, from the kernel's own nanoseconds: the load of the
machine changes it little. Then environments that poll ``/status-env`` over new connections.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import http.client
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import shmbus
from bench import machine, program
from bench.contenders.base import free_port
from bench.processes import MeasurementError
from bench.row import Row, skipped
from bench.sending import bus_bytes

__all__ = ["CAPACITY", "REGISTRATION", "ask", "main", "removed", "server"]

CAPACITY: Final = "256MiB"
SEQUENCES: Final = 8
TOKENS: Final = 4042
ROUNDS: Final = 60
#: Rounds that are not counted: imports, memory, caches.
WARM_UP: Final = 5
#: Environments that poll, how often a second each does, and for how many seconds.
POLLERS: Final = 200
POLLS_HZ: Final = 10
POLL_SECONDS: Final = 5.0
#: Bytes of an answer to a poll, and more.
ANSWER_BYTES: Final = 4096
START_S: Final = 60.0
#: Seconds without work after which a server has ended it, and how long that may take.
SETTLED_S: Final = 0.003
SETTLE_S: Final = 1.0

REGISTRATION: Final = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": SEQUENCES, "max_token_len": 1 << 20,
    "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1 << 30,
}  # fmt: skip


def group() -> dict[str, Any]:
    """Return 8 sequences with 97,008 numbers, of which a third need all of their digits."""
    dice = random.Random(1)
    tokens = [[dice.randrange(150_000) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
    return {
        "tokens": tokens,
        "masks": [[-100] * 200 + row[200:] for row in tokens],
        "scores": [dice.random() for _ in tokens],
        "inference_logprobs": [[-dice.expovariate(1.0) for _ in row] for row in tokens],
    }


def cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have been on a processor, once they have ended work.

    A server works on when its answer has arrived, and the kernel counts what a thread has used only
    when it is interrupted or sleeps: read at once, a part of a request would count as the next's.
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
    """Ask once, over a new connection; returns the body as it came."""
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
    """Run a server; yields its pid."""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, *argv], stdout=subprocess.DEVNULL, stderr=said
        ) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise MeasurementError(f"{' '.join(argv)}: it does not answer: {last}")
                with suppress(OSError, http.client.HTTPException):
                    ask(port, "GET", "/info")
                    break
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()


@contextmanager
def removed(bus: str) -> Iterator[None]:
    """Remove what a gateway on this bus leaves behind."""
    try:
        yield
    finally:
        with suppress(shmbus.BusNotFoundError):
            shmbus.unlink(bus)
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/shmbus-gateway.{bus}")


Spent = dict[str, dict[str, list[float]]]


def _rounds(servers: dict[str, tuple[int, int]], rounds: int) -> Spent:
    """Return milliseconds of each server for each POST and batch, the servers asked in turn."""
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


async def _poll(port: int, seconds: float) -> int:
    """Have the environments poll; returns how many answers came.

    In the words of aiohttp, and as they do it: over a new connection, which they ask to be kept,
    and end after the answer.
    """
    answered = 0
    body = b'{"env_id": 0}'
    request = (
        b"GET /status-env HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: */*\r\n"
        b"Accept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11 aiohttp/3.14.5\r\n"
        b"Content-Length: %d\r\nContent-Type: application/json\r\n\r\n%s" % (port, len(body), body)
    )
    end = time.monotonic() + seconds

    async def one(number: int) -> None:
        nonlocal answered
        due = time.monotonic() + number / POLLERS / POLLS_HZ
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            if (await reader.read(ANSWER_BYTES)).startswith(b"HTTP/1.1 200 "):
                answered += 1
            writer.close()
            due += 1 / POLLS_HZ

    await asyncio.gather(*(one(number) for number in range(POLLERS)))
    return answered


def _poll_us(pid: int, port: int, seconds: float) -> float:
    """Return the microseconds of the server for a poll."""
    environment = {
        "max_token_length": 4096, "desired_name": "e", "weight": 1.0, "group_size": SEQUENCES,
    }  # fmt: skip
    ask(port, "POST", "/register-env", json.dumps(environment).encode())
    began = cpu_s(pid)
    answered = asyncio.run(_poll(port, seconds))
    return 1e6 * (cpu_s(pid) - began) / answered


TITLES: Final = {
    "post": "POST of a group, 1.1 MB",
    "post-gzip": "POST of a group, gzip",
    "batch": "GET of a batch",
}


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure both servers."""
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
        seconds = 0.2 if options.tiny else POLL_SECONDS
        polls = {name: _poll_us(*where, seconds) for name, where in servers.items()}
    rows = [
        Row(
            name=f"gateway-{what}", title=f"{title}, the server's processor time", unit="ms",
            values=tuple(spent["gateway"][what]), beside="atroposlib",
            beside_values=tuple(spent["atroposlib"][what]),
        )
        for what, title in TITLES.items()
    ]  # fmt: skip
    title = f"a poll of one of {POLLERS} environments, the server's processor time"
    return [
        *rows,
        Row(
            name="gateway-poll", title=title, unit="us", values=(polls["gateway"],),
            beside="atroposlib", beside_values=(polls["atroposlib"],),
        ),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("gateway", program.parser_of("gateway", __doc__), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
