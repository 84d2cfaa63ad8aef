"""A server's draft model gets a draft trainer's versions, while the server generates."""

import pytest
import torch
from aiohttp import web
from small_vllm import SmallVllm
from trainers import Scene

from shmbus.engines import EngineError, VllmDraft
from shmbus.engines.rank_loader import shared_parameters
from shmbus.engines.vllm_plugin import LOAD_DRAFT
from shmbus.pool import read_pool

pytest_plugins = ["engine_fixtures"]


class DraftingVllm(SmallVllm):
    drafts = True
    client = VllmDraft

    async def rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        if call["method"] != LOAD_DRAFT:
            return await super().rpc(request)
        assert self.running.is_set() and self.attached["draft"]
        for subscriber, model in zip(self.subscribers, self.models, strict=True):
            with subscriber.at(*call["args"]) as weights:
                model["value"].copy_(weights["value"])
                weights.report_applied()
        return web.json_response({"results": ["True"] * self.ranks})


class Undrafting(SmallVllm):
    client = VllmDraft


@pytest.mark.parametrize("ranks", [1, 2])
async def test_every_rank_loads_and_no_request_waits(ranks: int, scene: Scene) -> None:
    server = scene.servers(ranks, DraftingVllm)
    for version in (1, 2):
        report = await scene.update(version, server)
        assert [each.version for each in report.servers] == [version]
        assert not report.servers[0].warning
        assert set(await server.tokens(3)) == {float(version)}
    rows = read_pool(scene.bus.name, "weights").readers
    assert [row.applied_version for row in rows] == [2] * ranks


async def test_a_server_that_cannot_take_drafts_is_refused_untouched(scene: Scene) -> None:
    undrafting, sleeping = scene.servers(1, Undrafting), scene.servers(1, DraftingVllm)
    await sleeping.post("/sleep?level=1&mode=keep", {})
    for server, said in ((undrafting, "no draft model"), (sleeping, "sleeps")):
        with pytest.raises(EngineError, match=said) as caught:
            await scene.update(1, server)
        assert caught.value.step == "prepare"
    draft = sleeping.server()
    for step, call in (
        ("reload", draft.reload("/nowhere", 1, False, 1.0)),
        ("verify", draft.verify({}, 1.0)),
        ("sleep", draft.check_sleep(1, 1.0)),
    ):
        with pytest.raises(EngineError, match="VllmServer") as caught:
            await call
        assert caught.value.step == step


def test_parameters_of_both_models_are_found_by_the_ends_of_their_names() -> None:
    target, draft = torch.nn.Module(), torch.nn.Module()
    target.embed_tokens = draft.embed_tokens = torch.nn.Embedding(2, 2)
    draft.fc = torch.nn.Linear(2, 2, bias=False)
    draft.empty, target.empty = (torch.nn.Parameter(torch.empty(0)) for _ in range(2))
    holder = torch.nn.ModuleDict({"model": draft})
    assert shared_parameters(holder, target) == {"embed_tokens.weight"}
