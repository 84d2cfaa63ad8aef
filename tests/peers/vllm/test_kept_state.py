"""No answer of a real vLLM has state of older weights: kinds of state by situations."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vision_model
from serving import post, serving

from shmbus import Bus, Producer
from shmbus.engines import EngineError, EngineFleet, VllmServer
from shmbus.engines.rows import RankRows
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]

#: Tokens of a block of vLLM's cache, on a CPU a multiple of 32; only whole blocks are cached.
OPTIONS = ("--block-size", "32", "--enable-prompt-tokens-details", "--enable-prefix-caching")
WORDS = " ".join(f"w{3 * k % 120}" for k in range(70))
#: Of a logprob: what another order of sums makes, far below what old weights make; a GPU has TF32.
CLOSE = 0.02 if torch.cuda.is_available() else 1e-4
TOKENS = 12


class Answer:
    """Tokens, their logprobs, and how much of the prompt came from a cache."""

    def __init__(self, said: dict[str, Any]) -> None:
        (choice,) = said["choices"]
        self.ids: list[int] = choice["token_ids"]
        self.logprobs = torch.tensor([one["logprob"] for one in choice["logprobs"]["content"]])
        self.cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def is_of(self, other: Answer) -> bool:
        off = float((self.logprobs - other.logprobs).abs().max())
        return self.ids == other.ids and off < CLOSE


async def ask(url: str, salt: str, *, sees: bool) -> Answer:
    content: list[dict[str, Any]] = [{"type": "text", "text": WORDS}]
    if sees:
        content.insert(0, {"type": "image_url", "image_url": {"url": vision_model.image()}})
    body = {
        "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS,
        "temperature": 0, "logprobs": True, "ignore_eos": True, "return_token_ids": True,
        "cache_salt": salt,
    }  # fmt: skip
    return Answer(await post(f"{url}/v1/chat/completions", body))


class Run:
    def __init__(self, bus: Bus, url: str) -> None:
        self.bus, self.url = bus, url
        self.model = vision_model.build(0)
        self.publisher = WeightPublisher(bus.name, ModuleSource(self.model))

    async def bring(self, version: int, seed: int, *, clear: bool = False) -> None:
        self.model.load_state_dict(vision_model.build(seed).state_dict())
        async with self.fleet(clear_cache=clear) as fleet:
            report = await fleet.update(self.publisher, version)
        assert (report.servers[0].version, report.servers[0].warning) == (version, "")

    def fleet(self, **options: Any) -> EngineFleet:
        return EngineFleet([VllmServer(self.url)], bus=self.bus.name, timeout=120, **options)


@pytest.mark.timeout(1800)
async def test_answers_are_those_of_a_fresh_server(bus: Bus, tmp_path: Path) -> None:
    folders, fresh = {}, {}
    for seed in (0, 1, 2):
        folders[seed] = tmp_path / str(seed)
        vision_model.save(str(folders[seed]), seed)
    for seed in (1, 2):
        async with serving(folders[seed], tmp_path / f"fresh-{seed}.log", 1, *OPTIONS) as server:
            fresh[seed] = [await ask(server.url, "fresh", sees=sees) for sees in (False, True)]
    assert not any(one.is_of(two) for one, two in zip(fresh[1], fresh[2], strict=True))
    cells: dict[str, list[tuple[bool, bool, bool]]] = {}

    async def look(situation: str, run: Run, seed: int) -> None:
        """Ask by text and by image, twice: nothing old the first time, a cache the second."""
        with Producer(run.bus.name) as producer:
            for sees in (False, True):
                first, second = [
                    await ask(run.url, producer.cache_salt, sees=sees) for _ in range(2)
                ]
                right = [each.is_of(fresh[seed][sees]) for each in (first, second)]
                cells.setdefault(situation, []).append(
                    (all(right), first.cached == 0, second.cached > 0)
                )

    with contextlib.ExitStack() as stack:
        async with serving(folders[0], tmp_path / "server.log", 1, *OPTIONS) as server:
            run = Run(bus, server.url)
            stack.callback(run.publisher.close)
            await run.bring(1, 1)
            await look("first update", run, 1)
            await run.bring(2, 2)
            await look("update in keep mode", run, 2)
            await run.bring(3, 1, clear=True)
            await look("update with cleared caches", run, 1)
            run.publisher.new_life()
            await run.bring(2, 1)
            await look("return to an older version", run, 1)
            await run.bring(3, 2)
            await look("the number after that", run, 2)
            other_bus = stack.enter_context(Bus.create(f"{bus.name}-b", "1MiB", max_producers=4))
            other = Run(other_bus, server.url)
            stack.callback(other.publisher.close)
            await other.bring(3, 1)
            await look("new run on the old server", other, 1)
            port = server.port
        async with serving(folders[0], tmp_path / "again.log", 1, *OPTIONS, port=port):
            async with other.fleet() as fleet:
                caught_up = await fleet.catch_up()
            assert caught_up is not None and caught_up.servers[0].version == 3
            await look("server restarted under a living run", other, 1)
    assert cells == dict.fromkeys(cells, [(True, True, True)] * 2)
    assert len(cells) == 7


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"enable_eplb": True}, "parallel_config.enable_eplb"),
        ({"ec": object()}, "ec_transfer_config"),
    ],
)
def test_the_backend_refuses_before_a_pause(given: dict[str, Any], named: str, bus: Bus) -> None:
    from shmbus.engines.vllm_backend import (
        ShmbusInitInfo,
        ShmbusUpdateInfo,
        ShmbusWeightTransferEngine,
    )

    parallel = SimpleNamespace(
        data_parallel_index=0, world_size=1, rank=0, enable_eplb=given.get("enable_eplb", False)
    )
    config = SimpleNamespace(
        parallel_config=parallel, model_config=None, ec_transfer_config=given.get("ec"),
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(inductor_compile_config={}),
    )  # fmt: skip
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    engine = ShmbusWeightTransferEngine(SimpleNamespace(), config, torch.device("cpu"), model)
    server = VllmServer("http://127.0.0.1:9")
    with WeightPublisher(bus.name, ModuleSource(torch.nn.Linear(2, 2))) as publisher:
        publisher.publish(version=1)
        engine.init_transfer_engine(ShmbusInitInfo(bus.name, server.address))
        with pytest.raises(EngineError, match=named) as caught:
            RankRows(bus.name).require_attached(server, 1, 1)
        assert caught.value.step == "prepare"
        # A trainer that loads all the same changes nothing, and no row says so.
        engine.start_weight_update()
        engine.receive_weights(ShmbusUpdateInfo(1))
        engine.finish_weight_update()
        assert torch.equal(model.weight, before)
        assert RankRows(bus.name).whole_version(server, 1) is None
        engine.shutdown()
