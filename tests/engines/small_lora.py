"""A small server that loads adapters by path; its fault "lie" answers 200 without a load."""

import asyncio
import json
from pathlib import Path
from typing import ClassVar

import torch
from aiohttp import web
from safetensors.torch import load_file
from small_engine import TOKEN_S, SmallEngine


class SmallLora(SmallEngine):
    steps: ClassVar[dict[str, str]] = {
        "/v1/load_lora_adapter": "load", "/v1/unload_lora_adapter": "unload",
        "/load_lora_adapter": "load", "/unload_lora_adapter": "unload",
    }  # fmt: skip

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.loaded: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) == {"lora_name", "lora_path"}
        if self.take_fault("load", "lie"):
            return web.Response(text="Success")
        folder = Path(body["lora_path"])
        assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
        if body["lora_name"] in self.loaded:
            return web.json_response({"error": "it is loaded already"}, status=400)
        tensors = load_file(folder / "adapter_model.safetensors")
        self.loaded[body["lora_name"]] = (str(folder), tensors)
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.loaded.pop(body["lora_name"], None) is None:
            return web.json_response({"error": "there is no such adapter"}, status=404)
        return web.Response(text="Success")

    async def models_list(self, request: web.Request) -> web.Response:
        cards = [{"id": "base", "root": "/base", "object": "model"}]
        cards += [{"id": name, "root": path} for name, (path, _) in self.loaded.items()]
        return web.json_response({"object": "list", "data": cards})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] not in self.loaded:
            return web.json_response({"error": "no such model"}, status=404)
        self.seen.append((request.path, body["model"]))
        _, tensors = self.loaded[body["model"]]
        tokens = []
        for _ in range(body["max_tokens"]):
            seen = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
            tokens.append(seen.pop() if len(seen) == 1 else "torn")
            await asyncio.sleep(TOKEN_S)
        return web.json_response({"tokens": tokens})

    def routes(self) -> list[web.RouteDef]:
        return [
            *(
                web.post(path, self.load)
                for path in ("/v1/load_lora_adapter", "/load_lora_adapter")
            ),
            web.post("/v1/unload_lora_adapter", self.unload),
            web.post("/unload_lora_adapter", self.unload),
            web.get("/v1/models", self.models_list),
            web.post("/v1/generate", self.generate),
        ]
