"""Processor time of the HTTP gateway, and of atroposlib's server, for the same requests in one run.

``python -m bench.gateway [--rounds N] [--parts posts,...] [--output FILE.json]``, where atroposlib
is installed (``make test-peers`` makes such an environment).

A round is one group of 1.1 MB, posted as an environment does, and taken as a trainer does, over
connections of their own, with gzip both ways or without. What counts is the time that all threads
of the server were on a processor, from the kernel's own nanoseconds: the load of the machine
changes it little. Then environments that poll ``/status-env``, each time over a new connection; and
groups that go through the ring beside the server.

What a POST alone costs is measured with all servers at once, each asked in turn, so that nothing of
the machine is another's luck; and beside two servers that only receive a body, or receive and parse
it (`bench.receiver`), which nothing can undercut.
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import shmbus
from bench import command, machine
from bench.contenders.base import free_port
from bench.failures import MeasurementError
from bench.fitness import Need
from bench.sending import bus_bytes
from trainer_adapter.adapters.atropos import AtroposTrainer, ShmbusEnv

__all__ = ["main"]

CAPACITY: Final = "256MiB"
SEQUENCES: Final = 8
TOKENS: Final = 4042
#: Rounds that are not counted: imports, memory, caches.
WARM_UP: Final = 5
#: Environments that poll, how often a second each does, and for how many seconds.
POLLERS: Final = 200
POLLS_HZ: Final = 10
POLL_SECONDS: Final = 5
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


def round_trips(pid: int, port: int, rounds: int, packed: bool) -> dict[str, float]:
    """Return milliseconds of the server for a POST, and for a batch."""
    sent = group()
    body = json.dumps(sent).encode()
    wire = gzip.compress(body) if packed else body
    sending = {"Content_Encoding": "gzip"} if packed else {}
    accepting = {"Accept_Encoding": "gzip, deflate" if packed else "identity"}
    spent = [0.0, 0.0]
    for number in range(-WARM_UP, rounds):
        began = cpu_s(pid)
        ask(port, "POST", "/scored_data", wire, **sending)
        posted = cpu_s(pid)
        answer = ask(port, "GET", "/batch", None, **accepting)
        taken = cpu_s(pid)
        if number >= 0:
            spent[0] += posted - began
            spent[1] += taken - posted
        if number in (-WARM_UP, rounds - 1):
            [found] = json.loads(answer)["batch"]
            if any(found[key] != value for key, value in sent.items()):
                raise MeasurementError("the batch is another group")
    post_ms, batch_ms = (1e3 * seconds / rounds for seconds in spent)
    return {"post_ms": post_ms, "batch_ms": batch_ms, "together_ms": post_ms + batch_ms}


def posts_in_turn(argvs: dict[str, list[str]], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of each server for a POST, the servers asked in turn.

    `argvs` has the command of each but its port, where ``PORT`` stands. A server that answers
    batches is asked for one after each POST, so that it never has more than a group.
    """
    body = json.dumps(group()).encode()
    kinds: dict[str, tuple[bytes, dict[str, str]]] = {
        "plain": (body, {}),
        "gzip": (gzip.compress(body), {"Content_Encoding": "gzip"}),
    }
    spent: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in kinds} for name in argvs
    }
    with ExitStack() as stack:
        servers: dict[str, tuple[int, int]] = {}
        for name, argv in argvs.items():
            port = free_port()
            argv = [part.replace("PORT", str(port)) for part in argv]
            servers[name] = stack.enter_context(server(argv, port)), port
            if name in ("atroposlib", "gateway"):
                ask(port, "POST", "/register", json.dumps(REGISTRATION).encode())
                ask(port, "GET", "/batch")
        for number in range(-WARM_UP, rounds):
            for kind, (wire, headers) in kinds.items():
                for name, (pid, port) in servers.items():
                    if "parsed" in name and kind == "gzip":
                        continue
                    began = cpu_s(pid)
                    ask(port, "POST", "/scored_data", wire, **headers)
                    milliseconds = 1e3 * (cpu_s(pid) - began)
                    if number >= 0:
                        spent[name][kind].append(milliseconds)
                    if name in ("atroposlib", "gateway"):
                        ask(port, "GET", "/batch", None, Accept_Encoding="identity")
    return {
        name: {
            f"{kind}_{which}_ms": of(found)
            for kind, found in of_kinds.items()
            if found
            for which, of in (("mean", statistics.mean), ("median", statistics.median))
        }
        for name, of_kinds in spent.items()
    }


async def _poll(port: int) -> int:
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
    end = time.monotonic() + POLL_SECONDS

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


def polls(pid: int, port: int) -> dict[str, float]:
    """Return what a poll costs, and what the environments need of a core."""
    environment = {
        "max_token_length": 4096, "desired_name": "e", "weight": 1.0, "group_size": SEQUENCES,
    }  # fmt: skip
    ask(port, "POST", "/register-env", json.dumps(environment).encode())
    began = cpu_s(pid)
    answered = asyncio.run(_poll(port))
    spent = cpu_s(pid) - began
    us = 1e6 * spent / answered
    return {"poll_us": us, "polls": answered, "core_percent": us * POLLERS * POLLS_HZ / 1e4}


class _Env(ShmbusEnv):
    env_id = 0


def through_the_ring(pid: int, bus: str, rounds: int) -> dict[str, float]:
    """Return what the gateway's process spends on a group that goes beside it."""
    environment = _Env()
    environment.shmbus_bus = bus  # type: ignore[misc]
    sent = group()
    with AtroposTrainer(bus, SEQUENCES) as trainer:
        began, began_s = cpu_s(pid), time.monotonic()
        for _ in range(rounds):
            asyncio.run(environment._send_scored_data_to_api(sent))
            [found] = trainer.get_batch(timeout=START_S)["batch"]
            if found["tokens"] != sent["tokens"]:
                raise MeasurementError("the batch is another group")
        spent, seconds = cpu_s(pid) - began, time.monotonic() - began_s
    environment._shmbus().close()
    return {"server_ms": 1e3 * spent / rounds, "seconds": seconds, "groups": rounds}


#: What is measured, where nothing else is asked for.
PARTS: Final = ("posts", "trips", "polls", "ring")


def measure(rounds: int, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Measure both, and return everything."""
    found: dict[str, Any] = {"machine": machine.describe(), "rounds": rounds}
    bus = f"bench-gateway-{secrets.token_hex(4)}"
    theirs = ["-m", "uvicorn", "atroposlib.api:app", "--port", "PORT", "--log-level", "warning"]
    ours = ["-m", "shmbus", "gateway", bus, "--create", CAPACITY, "--http", "127.0.0.1:PORT"]
    both = {"atroposlib": theirs, "gateway": ours}
    try:
        if "posts" in parts:
            bounds = {
                "received": ["-m", "bench.receiver", "PORT"],
                "received, parsed": ["-m", "bench.receiver", "PORT", "--parse"],
            }
            found["posts"] = posts_in_turn({**both, **bounds}, rounds)
            shmbus.unlink(bus)
        if "trips" in parts or "polls" in parts:
            for name, argv in both.items():
                found[name] = _one_server(argv, rounds, parts)
        if "ring" in parts:
            # A gateway that is no consumer: the trainer reads the bus itself.
            with suppress(shmbus.BusNotFoundError):
                shmbus.unlink(bus)
            port = free_port()
            argv = [part.replace("PORT", str(port)) for part in ours]
            with server([*argv, "--log-level", "warning"], port) as pid:
                found["ring"] = through_the_ring(pid, bus, rounds)
    finally:
        with suppress(shmbus.BusNotFoundError):
            shmbus.unlink(bus)
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/shmbus-gateway.{bus}")
    return found


def _one_server(argv: list[str], rounds: int, parts: tuple[str, ...]) -> dict[str, Any]:
    port = free_port()
    with server([part.replace("PORT", str(port)) for part in argv], port) as pid:
        ask(port, "POST", "/register", json.dumps(REGISTRATION).encode())
        ask(port, "GET", "/batch")
        found: dict[str, Any] = {}
        if "trips" in parts:
            found["plain"] = round_trips(pid, port, rounds, packed=False)
            found["gzip"] = round_trips(pid, port, rounds, packed=True)
        if "polls" in parts:
            found["polls"] = polls(pid, port)
        return found


def show(found: dict[str, Any]) -> str:
    """Return the measurement as a table."""
    lines = []
    if set(found) & {"posts", "gateway"}:
        lines.append(
            f"{'ms of the server a group':28}{'atroposlib':>12}{'gateway':>12}{'ratio':>8}"
        )

    def row(label: str, theirs: float, ours: float, digits: int = 2) -> None:
        numbers = f"{theirs:12.{digits}f}{ours:12.{digits}f}"
        lines.append(f"{label:28}{numbers}{theirs / ours:8.1f}")

    if "posts" in found:
        both = [found["posts"][name] for name in ("atroposlib", "gateway")]
        for key in both[0]:
            kind, which, _ = key.split("_")
            row(f"POST alone, {kind}, {which}", both[0][key], both[1][key])
        for name, bound in found["posts"].items():
            if name not in ("atroposlib", "gateway"):
                numbers = (f"{key.removesuffix('_ms')} {value:.2f}" for key, value in bound.items())
                lines.append(f"only {name}: {', '.join(numbers)}")
    servers = [found[name] for name in ("atroposlib", "gateway") if name in found]
    for kind in ("plain", "gzip"):
        for part in ("post_ms", "batch_ms", "together_ms"):
            if servers and kind in servers[0]:
                theirs, ours = (each[kind][part] for each in servers)
                row(f"{kind}, {part.removesuffix('_ms')}", theirs, ours)
    if servers and "polls" in servers[0]:
        theirs, ours = (each["polls"] for each in servers)
        row("us a poll of /status-env", theirs["poll_us"], ours["poll_us"], 0)
        lines.append(
            f"{POLLERS} environments at {POLLS_HZ} Hz: {ours['core_percent']:.0f} % of a core, "
            f"atroposlib {theirs['core_percent']:.0f} %"
        )
    if "ring" in found:
        ms = found["ring"]["server_ms"]
        lines.append(f"through the ring: {ms:.4f} ms of the gateway a group")
    return "\n".join(lines)


@command.orderly("gateway")
def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument(
        "--rounds", type=command.at_least_one, default=60, help="groups of each kind (default 60)"
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="what is measured (default %(default)s)"
    )
    parser.add_argument("--output", type=command.file, help="where the figures go as JSON")
    arguments = parser.parse_args()
    parts = tuple(arguments.parts.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    theirs = () if parts == ("ring",) else ("atroposlib", "uvicorn")
    if command.lacks(("aiohttp", *theirs), "gateway", "make test-peers makes an environment of it"):
        return 1
    if command.refused(Need(shm_bytes=bus_bytes(CAPACITY)), "gateway"):
        return 1
    found = measure(arguments.rounds, parts)
    print(show(found))
    return command.keep(arguments.output, found, "gateway")


if __name__ == "__main__":
    sys.exit(main())
