"""A small inference server with vLLM's routes: real sockets, real weights, faults on demand.

    python small_server.py NAME-OF-BUS RANKS

It prints its address. Each rank is a reader of its own in this process. The model is one vector
that each version fills with its number: a completion is the numbers that a request met while it was
generated, so a mix of versions shows. `POST /fault` with {step: kind} has the next call of a step
fail: "500", "lie" (200, and nothing done), "refuse" (a row says why), "close", "hang", "die".
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import torch
from aiohttp import web

from trainer_adapter.weights import Weights, WeightSubscriber

TOKEN_S = 0.002


class Server:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.models = [{"value": torch.zeros(1000)} for _ in range(ranks)]
        self.subscribers: list[WeightSubscriber] = []
        self.running = asyncio.Event()
        self.running.set()
        self.faults: dict[str, str] = {}
        self.updating = False  # one update at a time, as vLLM has it
        self.loading: list[Weights] = []
        self.in_flight = 0
        self.aborted = 0

    def take_fault(self, step: str, *kinds: str) -> str:
        return self.faults.pop(step) if self.faults.get(step) in kinds else ""

    @web.middleware
    async def injected(self, request: web.Request, handler: Any) -> web.StreamResponse:
        step = request.path.strip("/").replace("_weight_transfer_engine", "")
        step = step.replace("_weight_update", "").replace("_weights", "")
        kind = self.take_fault(step, "500", "close", "hang", "die", "lie-early")
        if kind == "500":
            return web.json_response({"error": "injected"}, status=500)
        if kind == "close":
            assert request.transport is not None
            request.transport.abort()
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        response: web.StreamResponse = await handler(request)
        return response

    async def init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        if not self.subscribers:
            self.subscribers = [
                WeightSubscriber(info["bus"], label=f"{info['server']} rank {rank}")
                for rank in range(self.ranks)
            ]
        for subscriber in self.subscribers:
            subscriber.latest(timeout=10).close()
        return web.json_response({"message": "Weight transfer initialized"})

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query["mode"]
        assert request.query["clear_cache"] in ("true", "false")
        if mode == "wait":
            while self.in_flight:
                await asyncio.sleep(TOKEN_S)
        if mode == "abort":
            self.aborted += 1
        self.running.clear()
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        if self.take_fault("resume", "lie"):
            return web.json_response({"status": "resumed"})
        self.running.set()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.running.is_set()})

    async def start(self, request: web.Request) -> web.Response:
        assert not self.running.is_set(), "an update of a server that generates"
        if self.updating:
            return web.json_response({"error": "an update is active already"}, status=500)
        self.updating = True
        return web.json_response({"message": "Weight update started"})

    async def update(self, request: web.Request) -> web.Response:
        version = (await request.json())["update_info"]["version"]
        if self.take_fault("update", "lie"):
            return web.json_response({"message": "Weights updated"})
        refuse = self.take_fault("update", "refuse")
        for rank, (subscriber, model) in enumerate(zip(self.subscribers, self.models, strict=True)):
            weights = subscriber.at(version)
            if refuse and rank == self.ranks - 1:
                model["value"][: len(model["value"]) // 2] = weights["value"][0]
                weights.refused("injected: half of it was loaded")
                weights.close()
            else:
                model["value"].copy_(weights["value"])
                self.loading.append(weights)
        return web.json_response({"message": "Weights updated"})

    async def finish(self, request: web.Request) -> web.Response:
        assert (await request.json())["weight_version"].isdigit()
        if not self.updating:
            return web.json_response({"error": "no update is active"}, status=500)
        self.updating = False
        for weights in self.loading:
            weights.applied()
            weights.close()
        self.loading.clear()
        return web.json_response({"message": "Weight update finished"})

    async def world(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": self.ranks})

    async def fault(self, request: web.Request) -> web.Response:
        self.faults.update(await request.json())
        return web.json_response({})

    async def complete(self, request: web.Request) -> web.Response:
        """Generate: each token is what every element of every rank's model is."""
        length = (await request.json())["max_tokens"]
        self.in_flight += 1
        aborted = self.aborted
        tokens = []
        try:
            for _ in range(length):
                await self.running.wait()
                if self.aborted != aborted:
                    return web.json_response({"tokens": tokens, "finish_reason": "abort"})
                seen = {value for model in self.models for value in model["value"].tolist()}
                tokens.append(seen.pop() if len(seen) == 1 else "torn")
                await asyncio.sleep(TOKEN_S)
        finally:
            self.in_flight -= 1
        return web.json_response({"tokens": tokens, "finish_reason": "length"})


async def main() -> None:
    server = Server(int(sys.argv[2]))
    app = web.Application(middlewares=[server.injected])
    app.add_routes(
        [
            web.post("/init_weight_transfer_engine", server.init),
            web.post("/pause", server.pause),
            web.post("/resume", server.resume),
            web.get("/is_paused", server.is_paused),
            web.post("/start_weight_update", server.start),
            web.post("/update_weights", server.update),
            web.post("/finish_weight_update", server.finish),
            web.get("/get_world_size", server.world),
            web.post("/fault", server.fault),
            web.post("/v1/completions", server.complete),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    print(f"http://{address[0]}:{address[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with whoever started it


if __name__ == "__main__":
    asyncio.run(main())
