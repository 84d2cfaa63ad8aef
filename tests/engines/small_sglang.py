"""A small server with SGLang's routes, `sglang_types` and SGLang's real loader.

Faults: "lie" (no rank was told), "cache" (new weights, answer failure), "break" (a bad tensor).
"""

import asyncio
import os
import sys
import types
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from aiohttp import web
from safetensors.torch import load_file
from sglang_types import decode, named_tensors
from small_engine import TOKEN_S, Configured, SmallEngine

from shmbus.engines import SglangServer
from shmbus.engines.sglang_loader import load
from shmbus.engines.sglang_order import LOADER

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)


class Model(torch.nn.Module):
    """What SGLang hands a loader: it takes a checkpoint's tensors in order, and computes."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.values = values
        self.breaks = False

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if self.breaks:
                half = len(tensor) // 2
                self.values[name][:half].copy_(tensor[:half])
                raise RuntimeError("injected: half of it was loaded")
            self.values[name].copy_(tensor + 0)


class SmallSglang(SmallEngine):
    steps: ClassVar[dict[str, str]] = {
        "/pause_generation": "pause",
        "/begin_weight_update": "begin",
        "/update_weights_from_tensor": "update",
        "/end_weight_update": "end",
        "/update_weights_from_disk": "reload",
        "/continue_generation": "resume",
        "/flush_cache": "flush",
        "/release_memory_occupation": "sleep",
    }
    client: ClassVar[type[Any]] = SglangServer
    info: ClassVar[dict[str, Any]] = {}
    sees: ClassVar[bool] = False

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.modules = [Model(values) for values in self.models]
        self.session = False
        self.retracted = False
        self.loads = 0

    async def decoded(self, request: web.Request) -> dict[str, Any]:
        fields = decode(request.path, await request.json())
        shown = {key: value for key, value in fields.items() if key != "serialized_named_tensors"}
        self.seen.append((request.path, shown))
        return fields

    def said(self, success: bool, message: str) -> web.Response:
        answer = {"success": success, "message": message}
        return web.json_response(answer, status=200 if success else 400)

    async def encode(self, request: web.Request) -> web.Response:
        """Answer an image by what the encoder made of it, which SGLang keeps in this module."""
        module = sys.modules.setdefault(
            "sglang.srt.managers.mm_schedule", types.ModuleType("mm_schedule")
        )
        kept: dict[str, float] = module.__dict__.setdefault("embedding_cache", {})
        await self.running.wait()
        runs = float(self.models[0]["value"][0])
        image = (await request.json())["image"]
        return web.json_response({"encoded": kept.setdefault(image, runs), "runs": runs})

    async def server_info(self, request: web.Request) -> web.Response:
        answer = {
            "tp_size": self.ranks, "pp_size": 1, "dp_size": 1, "quantization": None,
            "custom_weight_loader": [LOADER], "version": "0.5.23", "enable_memory_saver": True,
            "enable_weights_cpu_backup": False, **self.info,
        }  # fmt: skip
        return web.json_response(answer)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"has_image_understanding": self.sees})

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.running.is_set() else 503)

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await self.decoded(request))["mode"]
        self.running.clear()
        self.retracted = mode == "retract"
        if mode == "abort":
            self.aborted += 1
            self.running.set()  # requests in flight see the abort
            while self.in_flight:
                await asyncio.sleep(TOKEN_S)
            self.running.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await self.decoded(request)
        assert not self.session, "it generates in mid-update"
        self.running.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def step_of(self, request: web.Request) -> str:
        if request.path != "/resume_memory_occupation":
            return await super().step_of(request)
        return f"wake {(await request.json())['tags'][0]}"

    async def release_memory(self, request: web.Request) -> web.Response:
        tags = (await self.decoded(request))["tags"]
        idle = not self.running.is_set() and (self.retracted or not self.in_flight)
        if not idle or self.asleep:
            os._exit(1)  # a failed assertion ends the scheduler
        self.release(discards=not self.info.get("enable_weights_cpu_backup"))
        self.asleep = set(tags)
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = set((await self.decoded(request))["tags"])
        if not tags <= self.asleep:
            os._exit(1)
        self.asleep -= tags
        return web.json_response(None)

    async def begin(self, request: web.Request) -> web.Response:
        await self.decoded(request)
        assert not self.running.is_set(), "an update of a server that generates"
        if self.session:
            return self.said(
                False, "a weight-update session is already open; call end_weight_update() first"
            )
        self.session = True
        return self.said(True, "Success")

    async def update(self, request: web.Request) -> web.Response:
        fields = await self.decoded(request)
        assert fields["load_format"] == LOADER
        assert "weights" not in self.asleep
        if not self.session:
            return self.said(
                False,
                "update_weights_from_tensor must run between begin_weight_update() and "
                "end_weight_update()",
            )
        if self.take_fault("update", "lie"):
            return self.said(True, "Success")
        payloads = fields["serialized_named_tensors"]
        assert len(payloads) == self.ranks
        breaks = bool(self.take_fault("update", "break"))
        for module, payload in zip(self.modules, payloads, strict=True):
            module.breaks = breaks and module is self.modules[-1]
            load(module, named_tensors(payload))  # type: ignore[arg-type]
        if self.take_fault("update", "cache"):
            return self.said(False, NOT_FLUSHED)
        version = fields["weight_version"]
        done = "" if version is None else f" Weight version updated to {version}."
        return self.said(True, f"Success{done}")

    async def from_disk(self, request: web.Request) -> web.Response:
        fields = await self.decoded(request)
        assert not self.running.is_set() and fields["keep_pause"]
        if self.take_fault("reload", "half"):
            self.models[-1]["value"][:500] = -1.0
            return self.said(False, "injected: half of it was loaded")
        read = load_file(f"{fields['model_path']}/model.safetensors")
        for model in self.models:
            model["value"].copy_(read["value"])
        return self.said(True, f"Success Weight version updated to {fields['weight_version']}.")

    async def end(self, request: web.Request) -> web.Response:
        await self.decoded(request)
        if not self.session:
            return self.said(
                False, "no weight-update session is open; call begin_weight_update() first"
            )
        self.session = False
        return self.said(True, "Success")

    async def flush(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, {}))
        if self.in_flight and not self.retracted:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/ready", self.ready),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/begin_weight_update", self.begin),
            web.post("/update_weights_from_tensor", self.update),
            web.post("/end_weight_update", self.end),
            web.post("/update_weights_from_disk", self.from_disk),
            web.post("/flush_cache", self.flush),
            web.post("/release_memory_occupation", self.release_memory),
            web.post("/resume_memory_occupation", self.resume_memory),
            web.post("/encode", self.encode),
        ]


def sglang(**info: Any) -> Configured:
    """Return a kind of server with further facts in its /server_info."""
    return Configured(SmallSglang, {"info": info})
