"""Small inference servers in forked processes: real sockets, real weights, faults on demand.

Each version fills the model with its number, and a completion is the numbers met. `POST /fault`
with {step: kind} has the next call of a step fail: "500", "503", "close", "hang", "die", "stop".
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import aiohttp
import torch
from aiohttp import web
from fork_server import TEMPLATE

from shmbus.engines import VllmServer

TOKEN_S = 0.002
START_S = 60.0
ASKED_S = 5.0


class SmallEngine:
    """A model for each rank, requests in flight, and a way to stop them."""

    steps: ClassVar[dict[str, str]] = {}
    client: ClassVar[type[Any]] = VllmServer

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.models = [{"value": torch.zeros(1000)} for _ in range(ranks)]
        self.running = asyncio.Event()
        self.running.set()
        self.faults: dict[str, str] = {}
        self.in_flight = 0
        self.aborted = 0
        self.seen: list[tuple[str, Any]] = []
        #: Kinds of memory that the device lacks.
        self.asleep: set[str] = set()

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def take_fault(self, step: str, *kinds: str) -> str:
        return self.faults.pop(step) if self.faults.get(step) in kinds else ""

    async def step_of(self, request: web.Request) -> str:
        return self.steps.get(request.path, request.path.strip("/"))

    def release(self, discards: bool) -> None:
        """Free the memory of weights and cache; the weights return unchanged, or torn."""
        for model in self.models if discards else ():
            model["value"].fill_(float("nan"))
        self.asleep = {"weights", "kv_cache"}

    def run_step(self) -> None:
        if self.asleep:
            os._exit(1)  # an illegal address ends an engine

    @web.middleware
    async def injected(self, request: web.Request, handler: Any) -> web.StreamResponse:
        step = await self.step_of(request)
        kind = self.take_fault(step, "500", "503", "close", "hang", "die", "stop")
        if kind in ("500", "503"):
            return web.Response(text="Internal Server Error", status=int(kind))
        if kind == "close":
            assert request.transport is not None
            request.transport.abort()
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        response: web.StreamResponse = await handler(request)
        return response

    async def fault(self, request: web.Request) -> web.Response:
        self.faults.update(await request.json())
        return web.json_response({})

    async def calls(self, request: web.Request) -> web.Response:
        return web.json_response(self.seen)

    async def complete(self, request: web.Request) -> web.Response:
        """Generate tokens equal to the elements of each rank's model."""
        length = (await request.json())["max_tokens"]
        self.in_flight += 1
        aborted = self.aborted
        tokens: list[float | str] = []
        try:
            for _ in range(length):
                await self.running.wait()
                if self.aborted != aborted:
                    return web.json_response({"tokens": tokens, "finish_reason": "abort"})
                self.run_step()
                seen = {
                    value for model in self.models for value in model["value"].unique().tolist()
                }
                token = seen.pop()
                tokens.append("torn" if seen or token != token else token)
                await asyncio.sleep(TOKEN_S)
        finally:
            self.in_flight -= 1
        return web.json_response({"tokens": tokens, "finish_reason": "length"})

    async def serve(self, ready: Connection, port: int) -> None:
        app = web.Application(middlewares=[self.injected])
        own = [
            web.post("/fault", self.fault),
            web.get("/calls", self.calls),
            web.post("/v1/completions", self.complete),
        ]
        app.add_routes([*self.routes(), *own])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        address = runner.addresses[0]
        ready.send(f"http://{address[0]}:{address[1]}")
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(ready.recv)  # ends with its starter
        os._exit(0)


class Configured(NamedTuple):
    """A kind of server with settings, for a separate process."""

    kind: type[SmallEngine]
    settings: dict[str, Any]

    @property
    def client(self) -> type[Any]:
        return self.kind.client

    def __call__(self, ranks: int) -> SmallEngine:
        made = self.kind(ranks)
        vars(made).update(self.settings)
        return made


def run(make: Callable[[int], SmallEngine], ranks: int, ready: Connection, port: int) -> None:
    """Serve until the starter closes the pipe: the process of `Running`."""
    torch.set_num_threads(1)

    async def main() -> None:
        await make(ranks).serve(ready, port)

    asyncio.run(main())


class Running:
    def __init__(self, make: Callable[[int], SmallEngine], ranks: int) -> None:
        self._make = make, ranks
        self._start(0)

    def _start(self, port: int) -> None:
        self._ours, theirs = TEMPLATE.Pipe()
        self.process = TEMPLATE.Process(target=run, args=(*self._make, theirs, port))
        self.process.start()
        theirs.close()
        assert self._ours.poll(START_S), "the server did not start"
        self.url: str = self._ours.recv()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json=body) as response,
        ):
            answer: dict[str, Any] = await response.json()
            return answer

    async def fault(self, step: str, kind: str) -> None:
        await self.post("/fault", {step: kind})

    async def complete(self, length: int) -> dict[str, Any]:
        return await self.post("/v1/completions", {"max_tokens": length})

    async def tokens(self, length: int) -> list[float | str]:
        found: list[float | str] = (await self.complete(length))["tokens"]
        return found

    def server(self) -> Any:
        return self._make[0].client(self.url)

    async def paused(self) -> bool:
        server = self.server()
        try:
            return bool(await server.paused(ASKED_S))
        finally:
            await server.close()

    async def calls(self) -> list[Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + "/calls") as response:
            answer: list[Any] = await response.json()
            return answer

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def start_anew(self) -> None:
        self.kill()
        self._start(int(self.url.rpartition(":")[2]))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._ours.close()
