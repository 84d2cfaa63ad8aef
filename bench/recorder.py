"""Added time of a call through the recorder, and its processor time: ``python -m bench.recorder``.

``--lengths 8192,32768,131072`` measures long streams instead, one by one: processor time of the
recorder for each token, and the added time of a second session's calls meanwhile.

An engine answers like vLLM after a fixed time; many callers ask the engine in turn directly and
through `shmbus proxy`, whole and streamed (the first token counts). The difference of both ways
belongs to the recorder. ``--sessions`` opens so many sessions at once.
"""

import argparse
import asyncio
import random
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

import shmbus
from bench import program
from bench.contenders.base import free_port, started
from bench.processes import processor_s
from bench.row import Row
from bench.sending import temporary_bus

__all__ = ["main"]

#: Tokens of a prompt and of an answer: a late turn of an agent with tool calls.
PROMPT, OUTPUT = 4096, 64
#: Seconds of the engine's answer; for a stream, each token's part.
ENGINE_S: Final = 1.0
#: Seconds of the engine's answer to a short call beside a long stream.
SHORT_S: Final = 0.02
SCHEMA: Final = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
CAPACITY: Final = "256MiB"
START_S: Final = 60.0


# -- the engine


def whole(body: dict[str, Any], ids: list[int], output: Sequence[int]) -> dict[str, Any]:
    """Return an answer in vLLM's form, with the requested fields."""
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
    output: Sequence[int] = [random.randrange(150_000) for _ in range(OUTPUT)]
    if not body.get("stream"):
        await asyncio.sleep(body.get("engine_s", ENGINE_S))
        return web.Response(
            body=msgspec.json.encode(whole(body, ids, output)), content_type="application/json"
        )
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    with_ids = body.get("return_token_ids")
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    long = body.get("long_tokens")
    if long:
        output = range(long)  # random numbers would stop this process for 40 ms
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


async def one(
    client: aiohttp.ClientSession, url: str, key: str, stream: bool, engine_s: float = ENGINE_S
) -> float:
    """Make a call; return its seconds beyond the engine's time."""
    messages = [{"role": "user", "content": f"{random.random()} " + "x" * PROMPT}]
    asked = {"model": "m", "messages": messages, "stream": stream, "engine_s": engine_s}
    body = msgspec.json.encode(asked)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began = time.monotonic()
    async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as found:
        assert found.status == 200, await found.text()
        if not stream:
            await found.read()
            return time.monotonic() - began - engine_s
        first = b""
        while b"\n\n" not in first:
            first += await found.content.readany()
        came = time.monotonic()
        sent = msgspec.json.decode(first.split(b"\n\n")[0].removeprefix(b"data: "))["sent_s"]
        await found.read()
        return came - float(sent)


async def caller(
    client: aiohttp.ClientSession, ways: Sequence[tuple[str, list[float]]], key: str, rounds: int,
    stream: bool, delay_s: float,
) -> None:  # fmt: skip
    """Ask both ways in turn."""
    await asyncio.sleep(delay_s)
    for _ in range(rounds):
        for url, found in ways:
            found.append(await one(client, url, key, stream))


def percentile_ms(values: list[float], part: float) -> float:
    """Return a percentile in milliseconds."""
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(part * len(ranked)))] * 1e3, 3)


async def call_rows(engine: str, proxy: str, keys: list[str], rounds: int, pid: int) -> list[Row]:
    """Measure both forms of an answer."""
    rows = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for name, title in (("call", "a call at once"), ("stream", "first token of a stream")):
            direct: list[float] = []
            through: list[float] = []
            ways = ((engine, direct), (proxy, through))
            before = processor_s(pid)
            # Starts spread over the engine's time, as calls of agents spread.
            starts = [2 * ENGINE_S * number / len(keys) for number in range(len(keys))]
            await asyncio.gather(
                *(
                    caller(client, ways, key, rounds, name == "stream", start)
                    for key, start in zip(keys, starts, strict=True)
                )
            )
            cpu_us = 1e6 * (processor_s(pid) - before) / len(through)
            p99 = percentile_ms(through, 0.99), percentile_ms(direct, 0.99)
            rows.append(
                Row(
                    name=f"recorder-{name}", title=f"{title}, {len(keys)} callers, p50", unit="ms",
                    values=(percentile_ms(through, 0.5),), beside="without a recorder",
                    beside_values=(percentile_ms(direct, 0.5),),
                    note=f"p99 {p99[0]:.1f}, without a recorder {p99[1]:.1f}; processor "
                    f"{cpu_us / 1e3:.2f} ms a call, {cpu_us / OUTPUT:.1f} us a token",
                    figures={"calls": len(through), "p99_ms": p99, "cpu_us_a_call": cpu_us},
                )
            )  # fmt: skip
    return rows


async def length_rows(
    engine: str, proxy: str, keys: list[str], lengths: list[int], pid: int
) -> list[Row]:
    """Measure streams of any length, beside short calls of another session."""
    rows = []
    async with aiohttp.ClientSession(read_bufsize=1 << 18) as client:
        for length, key in zip(lengths, keys[1:], strict=False):
            message = {"role": "user", "content": "x"}
            body = {"model": "m", "messages": [message], "stream": True, "long_tokens": length}
            ways: list[tuple[str, list[float]]] = [(proxy, []), (engine, [])]
            over = asyncio.Event()

            async def others(
                ways: list[tuple[str, list[float]]] = ways, over: asyncio.Event = over
            ) -> None:
                while not over.is_set():
                    for url, waits in ways:
                        waits.append(await one(client, url, keys[0], False, SHORT_S))

            beside = asyncio.ensure_future(others())
            before = processor_s(pid)
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(
                f"{proxy}/v1/chat/completions", json=body, headers=headers, timeout=None
            ) as found:
                async for _ in found.content.iter_any():
                    pass
            cpu_us = 1e6 * (processor_s(pid) - before) / length
            over.set()
            await beside
            p99, direct = (percentile_ms(waits, 0.99) for _, waits in ways)
            rows.append(
                Row(
                    name=f"recorder-long-{length}", unit="us", values=(cpu_us,),
                    title=f"a token of a stream of {length:,}, processor",
                    note=f"{len(ways[0][1])} other calls, p99 {p99} ms, without a recorder "
                    f"{direct} ms",
                )
            )  # fmt: skip
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


def listens(port: int) -> bool:
    """Tell whether a server accepts connections at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measure(options: argparse.Namespace) -> list[Row]:
    """Start engine and recorder, and measure calls or long streams."""
    lengths = [int(length) for length in (options.lengths or "").split(",") if length]
    sessions, rounds = (4, 1) if options.tiny else (options.sessions, options.rounds)
    port, at = free_port(), free_port()
    engine, proxy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{at}"
    with temporary_bus(CAPACITY, schema=SCHEMA) as bus, ExitStack() as stack:
        pid = 0
        for place, words in (
            (port, ["bench.recorder", "--engine-port", str(port)]),
            (at, ["shmbus", "proxy", bus, "--engine", engine, "--http", f"127.0.0.1:{at}"]),
        ):
            command = [sys.executable, "-m", *words]
            pid = stack.enter_context(started(command, partial(listens, place))).pid
        keys, opened_sessions = opened(bus, max(sessions, len(lengths) + 1))
        stack.enter_context(opened_sessions)
        if lengths:
            return asyncio.run(length_rows(engine, proxy, keys, lengths, pid))
        return asyncio.run(call_rows(engine, proxy, keys[:sessions], rounds, pid))


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("recorder", __doc__)
    made.add_argument("--sessions", type=int, default=200, help="callers at once (default 200)")
    made.add_argument("--rounds", type=int, default=10, help="calls of each, each way")
    made.add_argument("--lengths", metavar="N,N", help="measure streams of so many tokens")
    made.add_argument("--engine-port", type=int, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parser().parse_args(argv)
    if options.engine_port is not None:
        serve(options.engine_port)
        return 0
    return program.run("recorder", parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
