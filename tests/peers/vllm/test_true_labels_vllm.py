"""A real vLLM under 64 requests, updates and restarts: labels agree with its logprobs.

The check recomputes each answer's logprobs with the weights of each version, outside of vLLM.
`SHMBUS_TEST_UPDATES` sets the updates, `SHMBUS_TEST_RESTART_EVERY` the updates between two
restarts, `SHMBUS_TEST_LONG_S` the seconds after which no further update begins.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import vllm_model as tiny
from serving import SERVER_OPTIONS, Server

from shmbus import Bus, Producer, VersionUnknownError
from shmbus.engines import EngineError, EngineFleet, UpdateRolledBackError, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]

UPDATES = int(os.environ.get("SHMBUS_TEST_UPDATES", "6"))
RESTART_EVERY = int(os.environ.get("SHMBUS_TEST_RESTART_EVERY", "8"))
LONG_S = float(os.environ.get("SHMBUS_TEST_LONG_S", "480"))
IN_FLIGHT = 64
TOKENS = 4
#: Tokens of a prompt: more than a block of vLLM's cache, with its 32.
PROMPT = 40
#: Of a logprob: far above a different order of sums, far below different weights.
CLOSE = 0.02 if SERVER_OPTIONS else 1e-3
OPTIONS = ("--block-size", "32", "--enable-prompt-tokens-details", "--enable-prefix-caching")


class Answer:
    def __init__(self, prompt: list[int], label: tuple[int, int], said: dict[str, Any]) -> None:
        (choice,) = said["choices"]
        self.prompt, self.label = prompt, label
        self.ids: list[int] = choice["token_ids"]
        self.logprobs = torch.tensor(choice["logprobs"]["token_logprobs"])
        details = said["usage"].get("prompt_tokens_details") or {}
        self.cached: int = details.get("cached_tokens") or 0


class Load:
    """Requests in flight, each labelled by the server's rows before and after."""

    def __init__(self, producer: Producer, url: str, seed: int) -> None:
        self.producer, self.url, self.rng = producer, url, random.Random(seed)
        self.prompts = [[3 + self.rng.randrange(120) for _ in range(PROMPT)] for _ in range(4)]
        self.answers: list[Answer] = []
        self.counts: Counter[str] = Counter()

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            prompt = self.rng.choice(self.prompts)
            try:
                begun = self.producer.version_of(self.url)
                body = {
                    "model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
                    "logprobs": 0, "ignore_eos": True, "return_token_ids": True,
                    "cache_salt": self.producer.cache_salt,
                }  # fmt: skip
                async with session.post(f"{self.url}/v1/completions", json=body) as response:
                    said = await response.json()
                ended = self.producer.version_of(self.url)
            except (VersionUnknownError, aiohttp.ClientError) as error:
                self.counts[type(error).__name__] += 1
                await asyncio.sleep(0.05)
                continue
            assert response.status == 200, said
            self.answers.append(Answer(prompt, (begun, ended), said))


@torch.no_grad()
def off(model: torch.nn.Module, answers: list[Answer]) -> list[float]:
    """Return the distance of each answer's logprobs from a model's."""
    ids = torch.tensor([each.prompt + each.ids for each in answers])
    logits = model(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    own = logits.gather(-1, ids[:, PROMPT:, None])[..., 0]
    said = torch.stack([each.logprobs for each in answers])
    return [float(each) for each in (own - said).abs().amax(1)]


def weights_of(version: int) -> torch.nn.Module:
    return tiny.build(version).eval()


@pytest.mark.timeout(LONG_S + 900)
async def test_labels_are_what_a_real_vllms_logprobs_say(
    folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    server = Server(folders[0], tmp_path / "server.log", 1, *OPTIONS)
    model, rng, restarts, begun_s = tiny.build(1), random.Random(1), 0, time.monotonic()
    version = 1
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        await server.started()
        async with (
            EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=120) as fleet,
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        ):
            with WeightPublisher(bus.name, ModuleSource(model)) as publisher:
                await fleet.update(publisher, 1)
                with Producer(bus.name) as producer:
                    load = Load(producer, server.url, 1)
                    tasks = [asyncio.create_task(load.run(session)) for _ in range(IN_FLIGHT)]
                    try:
                        while version <= UPDATES and time.monotonic() - begun_s < LONG_S:
                            await answered(load, version, tasks)
                            version += 1
                            model.load_state_dict(tiny.build(version).state_dict())
                            if version % RESTART_EVERY == RESTART_EVERY // 2:
                                restarts += 1
                                await asyncio.sleep(rng.uniform(0, 0.5))
                                server.end()
                                server = Server(
                                    folders[0], tmp_path / f"{version}.log", 1, *OPTIONS,
                                    port=server.port,
                                )  # fmt: skip
                                await server.started()
                                publisher.publish(version)
                                await caught_up(fleet, load, version)
                                continue
                            await fleet.update(publisher, version)
                        await answered(load, version, tasks)
                    finally:
                        for task in tasks:
                            task.cancel()
                        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        server.end()
    found = checked(load.answers, version)
    print(f"\n{version - 1} updates, {restarts} restarts: {dict(found)}, {dict(load.counts)}")
    assert found["wrong"] == 0 and found["stale"] == 0 and found["hits"] > version, found
    assert restarts and found["equal"] > found["wider"]


async def answered(load: Load, version: int, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for answers of a version from every worker on the average."""
    seen = len(load.answers)
    while sum(each.label == (version, version) for each in load.answers[seen:]) < IN_FLIGHT:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.05)


async def caught_up(fleet: EngineFleet, load: Load, version: int) -> None:
    while True:
        with contextlib.suppress(VersionUnknownError):
            if load.producer.version_of(load.url) == version:
                return
        with contextlib.suppress(EngineError, UpdateRolledBackError):
            await fleet.catch_up()
        await asyncio.sleep(0.1)


def checked(answers: list[Answer], newest: int) -> Counter[str]:
    """Compare labels with the versions whose weights give an answer's logprobs."""
    found: Counter[str] = Counter()
    right: list[set[int]] = [set() for _ in answers]
    for version in range(1, newest + 1):
        near = [
            at
            for at, each in enumerate(answers)
            if each.label[0] - 1 <= version <= each.label[1] + 1
        ]
        for first in range(0, len(near), 256):
            part = near[first : first + 256]
            for at, distance in zip(
                part, off(weights_of(version), [answers[at] for at in part]), strict=True
            ):
                if distance < CLOSE:
                    right[at].add(version)
    for each, versions in zip(answers, right, strict=True):
        found["hits"] += each.cached > 0
        if each.label[0] != each.label[1]:
            # A pause of the answer: its first tokens are of the older weights.
            found["wider"] += 1
        elif versions == {each.label[0]}:
            found["equal"] += 1
        else:
            found["wrong"] += 1
            found["stale"] += each.cached > 0
    return found
