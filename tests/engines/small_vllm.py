"""A small server with vLLM's routes, which runs steps in their order, also of lost callers.

Faults: "lie" (200 without effect), "refuse" (a partial load), "slow" (a start after `SLOW_S`),
"aside" (a late lookup of a rank).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import torch
from aiohttp import web
from fused_model import FusedModel, Shape
from safetensors.torch import load_file
from small_engine import TOKEN_S, Configured, SmallEngine

from shmbus.engines.rank_check import answer
from shmbus.engines.rank_loader import PlannedLoader
from shmbus.engines.vllm_plugin import VERIFY
from shmbus.weights import Weights, WeightSubscriber

Handler = Callable[[web.Request], Awaitable[web.Response]]

SLOW_S = 1.5


class SmallVllm(SmallEngine):
    steps: ClassVar[dict[str, str]] = {
        "/init_weight_transfer_engine": "init",
        "/start_weight_update": "start",
        "/update_weights": "update",
        "/finish_weight_update": "finish",
        "/collective_rpc": "reload",
        "/reset_encoder_cache": "encoder",
        "/sleep": "sleep",
    }
    drafts: ClassVar[bool] = False

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.subscribers: list[WeightSubscriber] = []
        self.attached: dict[str, str] = {}
        self.weight_version = "default"
        self.updating = False
        self.turn = asyncio.Lock()
        self.out_of_step = False
        self.loading: list[Weights] = []
        self.problem = ""
        self.aside: Weights | None = None
        self.encoded: dict[str, float] = {}

    async def encode(self, request: web.Request) -> web.Response:
        """Answer an image by the encoder's output, cached as in vLLM."""
        await self.running.wait()
        runs = float(self.models[0]["value"][0])
        image = (await request.json())["image"]
        return web.json_response({"encoded": self.encoded.setdefault(image, runs), "runs": runs})

    async def reset_encoder(self, request: web.Request) -> web.Response:
        self.encoded.clear()
        return web.Response()

    def in_turn(self, step: Handler) -> Handler:
        async def taken(request: web.Request) -> web.Response:
            await request.read()  # a request from a gone client comes no more
            async with self.turn:
                if self.out_of_step and request.path in self.steps:
                    return self.raised("the answer of another call")
                if self.take_fault(self.steps.get(request.path, ""), "slow"):
                    await asyncio.sleep(SLOW_S)
                return await step(request)

        return taken

    def raised(self, said: str) -> web.Response:
        self.out_of_step = self.ranks > 1
        return web.json_response({"error": said}, status=500)

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
        if self.take_fault("init", "aside"):
            self.aside = self.subscribers[-1].latest(timeout=10)
            asyncio.get_running_loop().call_later(SLOW_S, self.end_aside)
        if self.updating:
            self.mark()
        return web.json_response({"message": "Weight transfer initialized"})

    def end_aside(self) -> None:
        assert self.aside is not None
        self.aside.close()
        self.aside = None

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query["mode"]
        self.seen.append(("paused while it looks up", self.aside is not None))
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
        if any(model["value"].isnan().any() for model in self.models):
            self.seen.append(("resumed torn", None))
            raise AssertionError("in mid-update")
        self.running.set()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.running.is_set()})

    async def step_of(self, request: web.Request) -> str:
        wakes = request.path == "/wake_up"
        return f"wake {request.query['tags']}" if wakes else await super().step_of(request)

    async def sleep(self, request: web.Request) -> web.Response:
        """Free memory; sleeping memory sleeps on, whatever the configuration."""
        level = int(request.query["level"])
        self.seen.append(("sleep", (level, request.query["mode"])))
        self.running.clear()
        if "weights" not in self.asleep:
            self.release(discards=level == 2)
        return web.json_response({"status": "sleeping", "level": level})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.asleep) or not self.running.is_set()})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Take memory again, and resume with the whole of it, whatever its content."""
        tags = set(request.query.getall("tags", ["weights", "kv_cache"]))
        self.seen.append(("wake", sorted(tags)))
        if tags <= self.asleep:
            self.asleep -= tags
        if not self.asleep:
            self.running.set()
        return web.json_response({"status": "sleeping" if self.asleep else "awake"})

    async def start(self, request: web.Request) -> web.Response:
        assert not self.running.is_set(), "an update of a server that generates"
        assert "weights" not in self.asleep
        if self.updating:
            return self.raised("an update is active already")
        self.updating, self.problem = True, "no version came"
        self.mark()
        for model in self.models:
            model["value"].fill_(float("nan"))  # vLLM's model loses its memory here
        return web.json_response({"message": "Weight update started"})

    def mark(self) -> None:
        for subscriber in self.subscribers:
            with subscriber.latest(timeout=0) as newest:
                newest.report_loading()

    async def update(self, request: web.Request) -> web.Response:
        version = (await request.json())["update_info"]["version"]
        if self.take_fault("update", "lie"):
            return web.json_response({"message": "Weights updated"})
        refuse = self.take_fault("update", "refuse")
        self.problem = "injected: half of it was loaded" if refuse else ""
        for rank, (subscriber, model) in enumerate(zip(self.subscribers, self.models, strict=True)):
            weights = subscriber.at(version)
            weights.report_loading()
            if refuse and rank == self.ranks - 1:
                model["value"][: len(model["value"]) // 2] = weights["value"][0]
            else:
                model["value"].copy_(weights["value"])
            self.loading.append(weights)
        return web.json_response({"message": "Weights updated"})

    async def finish(self, request: web.Request) -> web.Response:
        named = (await request.json()).get("weight_version")
        assert named is None or named.isdigit()
        if not self.updating:
            return self.raised("no update is active")
        self.updating = False
        leased = self.loading or [each.latest(timeout=0) for each in self.subscribers]
        for rank, weights in enumerate(leased):
            # The last rank loads a half; without a load, no rank does.
            if self.problem and (rank == self.ranks - 1 or not self.loading):
                weights.report_refused(self.problem)
            else:
                weights.report_applied()
            weights.close()
        self.loading.clear()
        return web.json_response({"message": "Weight update finished"})

    async def rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        if call["method"] == "supports_draft_weight_updates":
            return web.json_response({"results": [str(self.drafts)] * self.ranks})
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
            web.post("/init_weight_transfer_engine", self.in_turn(self.init)),
            web.post("/pause", self.pause),
            web.post("/resume", self.in_turn(self.resume)),
            web.get("/is_paused", self.is_paused),
            web.post("/start_weight_update", self.in_turn(self.start)),
            web.post("/update_weights", self.in_turn(self.update)),
            web.post("/finish_weight_update", self.in_turn(self.finish)),
            web.get("/get_world_size", self.world),
            web.post("/collective_rpc", self.in_turn(self.rpc)),
            web.post("/update_weight_version", self.set_version),
            web.get("/weight_info", self.weight_info),
            web.post("/reset_encoder_cache", self.in_turn(self.reset_encoder)),
            web.post("/sleep", self.in_turn(self.sleep)),
            web.post("/wake_up", self.in_turn(self.wake_up)),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/encode", self.encode),
        ]


class CachingVllm(SmallVllm):
    """Has a prefix cache: a prompt's first token tells the model at its caching."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.cached: dict[tuple[str, str], float] = {}
        self.clears = 0

    async def pause(self, request: web.Request) -> web.Response:
        if request.query["clear_cache"] == "true":
            self.cached.clear()
            self.clears += 1
        return await super().pause(request)

    async def complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        arrived = float(self.models[0]["value"][0])
        await self.running.wait()
        runs = float(self.models[0]["value"][0])
        found = self.cached.setdefault((asked.get("cache_salt", ""), asked["prompt"]), runs)
        said = {"cached": found, "arrived": arrived, "runs": runs, "clears": self.clears}
        return web.json_response(said)


class ConfiguredVllm(SmallVllm):
    told: ClassVar[dict[str, Any]] = {}

    async def server_info(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        config = {
            "parallel_config": {"enable_eplb": False}, "ec_transfer_config": None,
            "kv_transfer_config": None, "device_config": {"device_type": "cuda"},
            "compilation_config": {"inductor_compile_config": {}}, "speculative_config": None,
        }  # fmt: skip
        return web.json_response({"vllm_config": config | self.told})

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/server_info", self.server_info)]


def vllm(drafts: bool = False, **told: Any) -> Configured:
    """Return a kind of server with further parts in its /server_info."""
    return Configured(ConfiguredVllm, {"drafts": drafts, "told": told})


class VerifiedVllm(SmallVllm):
    """Ranks of a tensor-parallel decoder that answer weight checks; `kind` loads a checkpoint."""

    kind: ClassVar[type[FusedModel]] = FusedModel

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.fused = [self.kind(Shape(), rank, ranks) for rank in range(ranks)]
        self.loaders = [
            PlannedLoader(
                model,
                torch.device("cpu"),
                lambda tensors, _, into=model: into.load_weights(tensors),
            )
            for model in self.fused
        ]

    async def update(self, request: web.Request) -> web.Response:
        version = (await request.json())["update_info"]["version"]
        self.problem = ""
        for subscriber, loader, model in zip(
            self.subscribers, self.loaders, self.models, strict=True
        ):
            weights = subscriber.at(version)
            weights.report_loading()
            loader.load(weights)
            model["value"].fill_(version)
            self.loading.append(weights)
        return web.json_response({})

    async def rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        if call["method"] != VERIFY:
            return await super().rpc(request)
        self.seen.append(("verify", call["kwargs"]["asked"]))
        results = [
            answer(
                call["kwargs"]["asked"], rank, self.attached["bus"], subscriber, loader,
                updating=self.updating,
            )
            for rank, (subscriber, loader) in enumerate(
                zip(self.subscribers, self.loaders, strict=True)
            )
        ]  # fmt: skip
        return web.json_response(
            {"results": results[:1] if self.take_fault("rpc", "few") else results}
        )

    async def flip(self, request: web.Request) -> web.Response:
        asked = await request.json()
        parameter = self.fused[asked["rank"]].get_parameter(asked["parameter"])
        parameter.data.view(torch.int16)[tuple(asked["index"])] ^= 1
        return web.json_response({})

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/flip", self.flip)]


def logprob_of(value: float) -> float:
    return -(value + 2) / 8


def value_of(logprob: float) -> int:
    return round(-logprob * 8) - 2


class LabelledVllm(SmallVllm):
    """Logprobs tell the weights of each token; the first token's, of the cached prompt."""

    #: Whether requests of different salts share cached prompts.
    salted: ClassVar[bool] = True

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.cached: dict[tuple[str, str], float] = {}

    def runs(self) -> float:
        return float(self.models[0]["value"][0])

    async def pause(self, request: web.Request) -> web.Response:
        if request.query["clear_cache"] == "true":
            self.cached.clear()
        return await super().pause(request)

    async def complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        arrived, aborted = self.runs(), self.aborted
        await self.running.wait()
        runs, key = self.runs(), (asked["cache_salt"] if self.salted else "", asked["prompt"])
        hit, found = key in self.cached, self.cached.setdefault(key, runs)
        logprobs = [logprob_of(found)]
        self.in_flight += 1
        try:
            for _ in range(asked["max_tokens"]):
                await self.running.wait()
                if self.aborted != aborted:
                    break
                logprobs.append(logprob_of(self.runs()))
                await asyncio.sleep(TOKEN_S)
        finally:
            self.in_flight -= 1
        # A request in flight during the pause goes on with states of older weights.
        stale = hit and found != runs and arrived == runs
        return web.json_response({"logprobs": logprobs, "hit": hit, "stale": stale})


class UnsaltedVllm(LabelledVllm):
    """Ignores salts, like an engine before vLLM 0.9."""

    salted: ClassVar[bool] = False
