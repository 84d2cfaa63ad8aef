"""Added time of a call through the recorder, and its processor time: ``python -m bench.recorder``.

``--lengths 8192,32768,131072`` measures long streams instead, one after the other: processor time
of the recorder for each token, and the added time of another session's calls meanwhile.

An engine that answers as vLLM does after a fixed time, and many callers at once, who ask it in turn
directly and through `shmbus proxy`: at once, and as a stream, of which the first token counts. Each
side is a process of its own. What a caller waits beside the engine's time is its own client's and
the recorder's; the difference of the two ways is the recorder's. ``--sessions`` has so many
sessions open at once, each with calls of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

import shmbus
from bench import machine
from bench.contenders.base import free_port

__all__ = ["main"]

#: Tokens of a prompt and of an answer: a turn of an agent that has called tools for a while.
PROMPT, OUTPUT = 4096, 64
#: Seconds that the engine takes for an answer; of a stream, for each token's part of it.
ENGINE_S: Final = 1.0
SCHEMA: Final = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
CAPACITY: Final = "256MiB"
START_S: Final = 60.0


# -- the engine


def whole(body: dict[str, Any], ids: list[int], output: list[int]) -> dict[str, Any]:
    """Return an answer in vLLM's form, with what was asked for."""
    choice: dict[str, Any] = {
        "index": 0, "message": {"role": "assistant", "content": "x" * OUTPUT},
        "finish_reason": "stop", "logprobs": None, "token_ids": None,
    }  # fmt: skip
    if body.get("return_token_ids"):
        choice |= {"token_ids": output, "logprobs": {"content": [part(one) for one in output]}}
    return {
        "id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
        "prompt_token_ids": ids if body.get("return_token_ids") else None,
        "usage": {"prompt_tokens": len(ids), "completion_tokens": len(output)},
    }  # fmt: skip


def part(token: int) -> dict[str, Any]:
    """Return a token's logprob."""
    return {"token": f"token_id:{token}", "logprob": -0.5, "bytes": [120], "top_logprobs": []}


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer after the engine's time."""
    body = msgspec.json.decode(await request.read())
    ids = list(range(100, 100 + PROMPT))
    output = [random.randrange(150_000) for _ in range(OUTPUT)]
    if not body.get("stream"):
        await asyncio.sleep(ENGINE_S)
        return web.Response(
            body=msgspec.json.encode(whole(body, ids, output)), content_type="application/json"
        )
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    with_ids = body.get("return_token_ids")
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    long = body.get("long_tokens")
    if long:
        output = [random.randrange(150_000) for _ in range(long)]
    for number, token in enumerate(output):
        if not long or number % 16 == 0:
            await asyncio.sleep(0 if long else ENGINE_S / OUTPUT)
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None, "logprobs": None}
        chunk: dict[str, Any] = {**head, "choices": [choice], "sent_s": time.monotonic()}
        if with_ids:
            choice |= {"token_ids": [token], "logprobs": {"content": [part(token)]}}
            chunk |= {"prompt_token_ids": ids} if not number else {}
        if number == len(output) - 1:
            choice["finish_reason"] = "stop"
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def serve(port: int) -> None:
    """Be the engine's process."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)


# -- the callers


async def one(client: aiohttp.ClientSession, url: str, key: str, stream: bool) -> float:
    """Make a call; return the seconds that it took beside the engine's time."""
    messages = [{"role": "user", "content": f"{random.random()} " + "x" * PROMPT}]
    body = msgspec.json.encode({"model": "m", "messages": messages, "stream": stream})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began = time.monotonic()
    async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as found:
        assert found.status == 200, await found.text()
        if not stream:
            await found.read()
            return time.monotonic() - began - ENGINE_S
        first = b""
        while b"\n\n" not in first:
            first += await found.content.readany()
        came = time.monotonic()
        sent = msgspec.json.decode(first.split(b"\n\n")[0].removeprefix(b"data: "))["sent_s"]
        await found.read()
        return came - float(sent)


async def caller(
    client: aiohttp.ClientSession, ways: list[tuple[str, str]], rounds: int, stream: bool,
    found: list[list[float]], delay_s: float,
) -> None:  # fmt: skip
    """Ask both ways in turn."""
    await asyncio.sleep(delay_s)
    for _ in range(rounds):
        for way, (url, key) in enumerate(ways):
            found[way].append(await one(client, url, key, stream))


def percentile(values: list[float], part: float) -> float:
    """Return a percentile in milliseconds."""
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(part * len(ranked)))] * 1e3, 3)


def cpu_s(pid: int) -> float:
    """Return the seconds that a process has been on a processor."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    engine: str, proxy: str, keys: list[str], rounds: int, pid: int
) -> list[dict[str, Any]]:
    """Measure both forms of an answer."""
    rows = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        for stream in (False, True):
            found: list[list[float]] = [[], []]
            before = cpu_s(pid)
            await asyncio.gather(
                *(
                    # Spread over the engine's time, as calls of agents are.
                    caller(
                        client, [(engine, key), (proxy, key)], rounds, stream, found,
                        2 * ENGINE_S * number / len(keys),
                    )
                    for number, key in enumerate(keys)
                )
            )  # fmt: skip
            used = cpu_s(pid) - before
            calls = len(found[1])
            direct, through = found
            rows.append(
                {
                    "what": "first token of a stream" if stream else "a call at once",
                    "calls_at_once": len(keys),
                    "calls": calls,
                    **{
                        f"{name}_p{round(100 * at)}_ms": percentile(values, at)
                        for name, values in (("direct", direct), ("through", through))
                        for at in (0.5, 0.99)
                    },
                    "cpu_ms_a_call": round(1e3 * used / calls, 3),
                    "cpu_us_a_token": round(1e6 * used / calls / OUTPUT, 2),
                }
            )
    return rows


async def measure_lengths(
    proxy: str, keys: list[str], lengths: list[int], pid: int
) -> list[dict[str, Any]]:
    """Measure streams of any length, beside short calls of another session."""
    rows = []
    async with aiohttp.ClientSession(read_bufsize=1 << 18) as client:
        for length, key in zip(lengths, keys[1:], strict=False):
            message = {"role": "user", "content": "x"}
            body = {"model": "m", "messages": [message], "stream": True, "long_tokens": length}
            waits: list[float] = []
            over = asyncio.Event()

            async def others(waits: list[float] = waits, over: asyncio.Event = over) -> None:
                while not over.is_set():
                    waits.append(await one(client, proxy, keys[0], False))

            beside = [asyncio.ensure_future(others()) for _ in range(8)]
            before = cpu_s(pid)
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(
                f"{proxy}/v1/chat/completions", json=body, headers=headers, timeout=None
            ) as found:
                async for _ in found.content.iter_any():
                    pass
            used = cpu_s(pid) - before
            over.set()
            await asyncio.gather(*beside)
            rows.append(
                {
                    "what": "a long stream",
                    "tokens": length,
                    "cpu_us_a_token": round(1e6 * used / length, 2),
                    "other_calls": len(waits),
                    "other_p99_ms": percentile(waits, 0.99),
                }
            )
    return rows


def opened(bus: str, count: int) -> tuple[list[str], ExitStack]:
    """Open sessions of a worker."""
    stack = ExitStack()
    producer = stack.enter_context(shmbus.Producer(bus))
    with shmbus.Feeder(bus) as feeder:
        sent = 0
        keys: list[str] = []
        while len(keys) < count:
            while sent < count and sent - len(keys) < 64:
                feeder.request(f"q{sent}", group_size=1)
                sent += 1
            request = producer.requests.next(START_S)
            assert request is not None
            keys.append(producer.session(request, wait=START_S).api_key)
    return keys, stack


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=200, help="callers at once (default 200)")
    parser.add_argument("--rounds", type=int, default=10, help="calls of each, each way")
    parser.add_argument("--lengths", metavar="N,N", help="measure streams of so many tokens")
    parser.add_argument("--output", metavar="FILE", help="JSON")
    parser.add_argument("--engine-port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.engine_port is not None:
        serve(given.engine_port)
        return 0
    bus = f"bench-recorder-{os.getpid()}-{secrets.token_hex(2)}"
    port = free_port()
    engine, proxy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{(at := free_port())}"
    with ExitStack() as stack:
        stack.enter_context(shmbus.Bus.create(bus, CAPACITY, schema=SCHEMA))
        for words in (
            ["-m", "bench.recorder", "--engine-port", str(port)],
            ["-m", "shmbus", "proxy", bus, "--engine", engine, "--http", f"127.0.0.1:{at}"],
        ):
            process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        keys, sessions = opened(bus, given.sessions)
        stack.enter_context(sessions)
        if given.lengths:
            lengths = [int(length) for length in given.lengths.split(",")]
            rows = asyncio.run(measure_lengths(proxy, keys, lengths, process.pid))
        else:
            rows = asyncio.run(measure(engine, proxy, keys, given.rounds, process.pid))
    report = {"machine": machine.describe(), "rows": rows}
    text = json.dumps(report, indent=2, default=str)
    print(text)
    if given.output:
        with open(given.output, "w") as file:
            file.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
