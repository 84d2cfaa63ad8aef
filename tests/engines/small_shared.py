"""A small server with vLLM's pause routes, whose model is the trainer's own memory."""

import torch
from aiohttp import web
from small_vllm import SmallVllm

from shmbus.weights import SharedModel, attach_model


class SmallShared(SmallVllm):
    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.shared: SharedModel | None = None

    async def attach(self, request: web.Request) -> web.Response:
        with torch.device("meta"):
            model = torch.nn.Module()
            model.value = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)
        self.shared = attach_model((await request.json())["bus"], model)
        self.models = [{"value": model.value.detach()}]
        return web.json_response({})

    async def pause(self, request: web.Request) -> web.Response:
        answer = await super().pause(request)
        self.seen.append(("paused to clear", request.query["clear_cache"]))
        return answer

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/attach", self.attach)]
