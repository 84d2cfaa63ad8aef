"""A small server with vLLM's routes. Faults of its own: "lie" (200, and nothing done) and "refuse"
(half of it is loaded, and a row says why) of an update, and "lie" of a resume.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from aiohttp import web
from safetensors.torch import load_file
from small_engine import TOKEN_S, SmallEngine

from trainer_adapter.weights import Weights, WeightSubscriber


class SmallVllm(SmallEngine):
    steps: ClassVar[dict[str, str]] = {
        "/init_weight_transfer_engine": "init",
        "/start_weight_update": "start",
        "/update_weights": "update",
        "/finish_weight_update": "finish",
        "/collective_rpc": "reload",
    }

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.subscribers: list[WeightSubscriber] = []
        self.attached: dict[str, str] = {}
        self.weight_version = "default"
        self.updating = False  # one update at a time, as vLLM has it
        self.loading: list[Weights] = []

    async def init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        if self.subscribers and (self.subscribers[0].removed or info != self.attached):
            for subscriber in self.subscribers:
                subscriber.close()
            self.subscribers = []
        self.attached = info
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
        assert not any(model["value"].isnan().any() for model in self.models), "in mid-update"
        self.running.set()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.running.is_set()})

    async def start(self, request: web.Request) -> web.Response:
        assert not self.running.is_set(), "an update of a server that generates"
        if self.updating:
            return web.json_response({"error": "an update is active already"}, status=500)
        self.updating = True
        for subscriber, model in zip(self.subscribers, self.models, strict=True):
            with subscriber.latest(timeout=0) as newest:
                newest.loading()
            model["value"].fill_(float("nan"))  # vLLM's model has no memory from here on
        return web.json_response({"message": "Weight update started"})

    async def update(self, request: web.Request) -> web.Response:
        version = (await request.json())["update_info"]["version"]
        if self.take_fault("update", "lie"):
            return web.json_response({"message": "Weights updated"})
        refuse = self.take_fault("update", "refuse")
        for rank, (subscriber, model) in enumerate(zip(self.subscribers, self.models, strict=True)):
            weights = subscriber.at(version)
            weights.loading()
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

    async def rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        assert call["method"] == "reload_weights" and not self.running.is_set()
        if self.take_fault("reload", "half"):
            self.models[-1]["value"][:500] = -1.0
            return web.json_response({"error": "injected: half of it was loaded"}, status=500)
        read = load_file(f"{call['kwargs']['weights_path']}/model.safetensors")
        for model in self.models:
            model["value"].copy_(read["value"])
        return web.json_response({"results": [None] * self.ranks})

    async def set_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def world(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": self.ranks})

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weight_transfer_engine", self.init),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/start_weight_update", self.start),
            web.post("/update_weights", self.update),
            web.post("/finish_weight_update", self.finish),
            web.get("/get_world_size", self.world),
            web.post("/collective_rpc", self.rpc),
            web.post("/update_weight_version", self.set_version),
            web.get("/weight_info", self.weight_info),
        ]
