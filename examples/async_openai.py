"""Rollouts from an OpenAI-compatible server, many at once.

    pip install 'shmbus[train]' aiohttp openai
    python examples/async_openai.py            # a minute on two cores; --quick for less

A worker keeps 32 chat completions under way in a single event loop, as beside vLLM or SGLang:
``requests.anext`` for the next sample, the ``openai`` client for the answer, ``requests.answer``
for the result. Token ids come from the server (``return_token_ids``, as in vLLM). The server in
this file is real: HTTP, a table as its policy, the newest weights between two answers.

Task: answer "repeat 7" with "7 7 7 7". The reward is the share of right digits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import secrets
import sys
from typing import Any

import numpy as np
import openai
import torch

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler
from trainer_adapter.losses import policy_loss

DIGITS, ANSWER_TOKENS, GROUP_SIZE, GROUPS_PER_BATCH, AT_ONCE = 10, 4, 8, 16, 32
SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}


def policy() -> torch.nn.Embedding:
    """Make the table: logits of the next digit, given its predecessor."""
    return torch.nn.Embedding(DIGITS, DIGITS, _weight=torch.zeros(DIGITS, DIGITS))


class Server:
    """Answers ``/v1/chat/completions``."""

    def __init__(self, bus: str) -> None:
        self.table, self.version, self.rng = policy(), -1, np.random.default_rng(0)
        self.weights = WeightSubscriber(bus, label="server")

    async def keep_up(self) -> None:
        """Load each version of the weights, between two answers."""
        while True:
            await asyncio.to_thread(self.weights.wait, newer_than=self.version)
            with self.weights.latest(timeout=5.0) as newest:
                newest.load_into(self.table)
                self.version = newest.version

    async def answer(self, http: Any) -> Any:
        """Sample an answer."""
        from aiohttp import web

        asked = await http.json()
        ids, logprobs = [int(asked["messages"][-1]["content"].split()[-1])], []
        for _ in range(asked["max_tokens"]):
            log_p = self.table.weight[ids[-1]].log_softmax(-1).detach().numpy()
            ids.append(int(np.argmax(log_p + self.rng.gumbel(size=DIGITS))))
            logprobs.append({"token": str(ids[-1]), "logprob": float(log_p[ids[-1]])})
        message = {"role": "assistant", "content": " ".join(map(str, ids[1:]))}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids[1:]}
        choice["logprobs"] = {"content": [{**one, "top_logprobs": []} for one in logprobs]}
        body = {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}
        body |= {"model": f"table-v{self.version}", "prompt_token_ids": ids[:1]}
        return web.json_response(body)

    async def start(self) -> str:
        """Start, and return the address."""
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def sample(producer: shmbus.Producer, client: Any) -> None:
    """Answer requests one by one."""
    while (request := await producer.requests.anext()) is not None:
        ask = {"messages": request.meta, "max_tokens": ANSWER_TOKENS, "logprobs": True}
        try:
            # The salt hides cached keys and values of older weights; SGLang's name is extra_key.
            more = {"return_token_ids": True, "cache_salt": request.cache_salt}
            completion = await client.chat.completions.create(model="table", **ask, extra_body=more)
        except (openai.APIConnectionError, openai.InternalServerError):
            producer.requests.release(request, reason="the engine is away")  # this worker waits
            continue
        except Exception as error:
            producer.requests.fail(request, repr(error))  # the sample is requested again
            continue
        choice, prompt = completion.choices[0], completion.prompt_token_ids
        answer = {
            "score": np.mean([token == prompt[-1] for token in choice.token_ids]),
            "policy_version": int(completion.model.partition("-v")[2]),
            "tokens": prompt + choice.token_ids,
            "logprobs": [0.0] * len(prompt) + [one.logprob for one in choice.logprobs.content],
            "loss_mask": [0] * len(prompt) + [1] * len(choice.token_ids),
            "meta": {"finish_reason": choice.finish_reason},
        }
        await asyncio.to_thread(producer.requests.answer, request, **answer)  # waits on a full bus


async def roll_out(bus: str) -> None:
    """Run the server, and a worker beside it."""
    server = Server(bus)
    client = openai.AsyncOpenAI(base_url=await server.start(), api_key="none")
    async with client, await shmbus.Producer.awaited(bus, wait=60.0) as producer:
        work = [sample(producer, client) for _ in range(AT_ONCE)]
        await asyncio.gather(server.keep_up(), *work)


def run_worker(bus: str) -> None:
    """Run as the worker's process."""
    torch.set_num_threads(1)
    asyncio.run(roll_out(bus))


def train(bus: str, steps: int) -> list[float]:
    """Offer prompts without end, and train."""
    model, rewards, rng = policy(), [], np.random.default_rng(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    asked = (f"repeat {rng.integers(DIGITS)}" for _ in itertools.count())
    prompts = ({"meta": [{"role": "user", "content": text}]} for text in asked)
    with (
        WeightPublisher(bus, ModuleSource(model)) as publisher,
        OnlineDataHandler(bus, groups_per_batch=GROUPS_PER_BATCH, sample_retries=2) as handler,
    ):
        publisher.publish(version=0)
        handler.offer(prompts, ahead=2, group_size=GROUP_SIZE)  # replaces failed groups
        for step in range(1, steps + 1):
            batch = handler.next_batch(60.0)
            # Each token predicts the next.
            picked = model(batch.tokens[:-1]).log_softmax(-1).gather(1, batch.tokens[1:, None])
            logprobs = torch.nn.functional.pad(picked[:, 0], (1, 0))
            loss = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
            optimizer.zero_grad()
            loss.loss.backward()
            optimizer.step()
            publisher.publish(version=step)
            handler.set_policy_version(step)
            handler.ack(batch)
            rewards.append(float(batch.scores.mean()))
            print(f"step {step}: reward {rewards[-1]:.2f}", flush=True)
    return rewards


def main() -> int:
    """Run the worker's process and the trainer; return 0 after a rise of the reward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 10 if parser.parse_args().quick else 40
    bus = f"openai-{os.getpid()}-{secrets.token_hex(3)}"
    torch.set_num_threads(1)
    worker = multiprocessing.get_context("spawn").Process(target=run_worker, args=(bus,))
    with shmbus.Bus.create(bus, "16MiB", schema=SCHEMA):
        worker.start()
        try:
            rewards = train(bus, steps)
        finally:
            worker.kill()  # safe at any instant
            worker.join()
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    print(f"reward {first:.2f} -> {last:.2f}")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
