"""An agent with only the ``openai`` client learns to use a tool, through the recorder alone.

    pip install 'shmbus[train,proxy]' openai
    python examples/agents.py                  # a minute on two cores; --quick for less

`shmbus proxy` stands between agent and engine, and keeps token ids, logprobs and versions of each
call; the worker opens a session for each sample, and sets a score. The engine in this file is a
real server: HTTP, a table as its policy, the newest weights between two answers.

Task: name a hidden digit. A guess succeeds in a quarter of the samples, an answer after a call of
the tool always.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import numpy as np
import openai
import torch
from aiohttp import web

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler
from trainer_adapter.losses import policy_loss

DIGITS, LOOK, START, SAW, TOKENS = 4, 4, 5, 6, 7
GROUP_SIZE, GROUPS_PER_BATCH, AT_ONCE, MOST_TURNS = 8, 8, 24, 3
SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def run_agent(client: openai.AsyncOpenAI, hidden: int) -> float:
    """Ask until the digit comes; return 1 for the right digit. The agent never meets shmbus."""
    messages: list[Any] = [{"role": "user", "content": "Which digit is hidden?"}]
    for _ in range(MOST_TURNS):
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(message.content == str(hidden))
        saw = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": str(hidden)}
        messages += [message.model_dump(exclude_none=True), saw]
    return 0.0


async def work(producer: shmbus.Producer, client: openai.AsyncOpenAI) -> None:
    """Make samples one by one."""
    while (request := await producer.requests.anext()) is not None:
        async with producer.session(request, wait=60.0) as session:
            own = client.with_options(base_url=session.base_url, api_key=session.api_key)
            await session.afinish(await run_agent(own, request.meta["hidden"]))


async def run_workers(bus: str) -> None:
    """Run many agents at once, over the connections of a single client."""
    client = openai.AsyncOpenAI(api_key="each session has its own")
    async with client, await shmbus.Producer.awaited(bus) as producer:
        await asyncio.gather(*(work(producer, client) for _ in range(AT_ONCE)))


def policy() -> torch.nn.Embedding:
    """Make the table: logits of the next token, given the last two."""
    return torch.nn.Embedding(TOKENS**2, TOKENS, _weight=torch.zeros(TOKENS**2, TOKENS))


class Engine:
    """Answers ``/v1/chat/completions`` with token ids, like vLLM; an answer is a single token."""

    def __init__(self, bus: str, url: str) -> None:
        self.table, self.version, self.rng = policy(), -1, np.random.default_rng()
        self.weights = WeightSubscriber(bus, label=f"{url} rank 0")  # for `shmbus status`

    async def keep_up(self) -> None:
        """Load each version of the weights, between two answers."""
        while True:
            await asyncio.to_thread(self.weights.wait, newer_than=self.version)
            with self.weights.latest(timeout=5.0) as newest:
                newest.load_into(self.table)
                self.version = newest.version

    async def answer(self, http: Any) -> Any:
        """Sample a token: a digit as the answer, or a call of the tool."""
        ids = [START]
        for message in (await http.json())["messages"][1:]:
            ids += [SAW, int(message["content"])] if message["role"] == "tool" else [LOOK]
        before = ids[-2] * TOKENS + ids[-1] if len(ids) > 1 else START
        log_p = self.table.weight[before, : LOOK + 1].log_softmax(-1).detach().numpy()
        token = int(np.argmax(log_p + self.rng.gumbel(size=len(log_p))))
        message: dict[str, Any] = {"role": "assistant", "content": str(token)}
        if token == LOOK:
            call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            message |= {"content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [token]}
        choice["logprobs"] = {"content": [{"token": str(token), "logprob": float(log_p[token])}]}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response({**body, "choices": [choice], "prompt_token_ids": ids})


async def run_engine(bus: str, ready: Any) -> None:
    """Serve, and send the address."""
    runner = web.AppRunner(app := web.Application())
    app.router.add_post("/v1/chat/completions", lambda http: engine.answer(http))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = Engine(bus, url := f"http://127.0.0.1:{runner.addresses[0][1]}")
    ready.put(url)
    await engine.keep_up()


def be(party: Any, *arguments: Any) -> None:
    """Run as the process of the workers, or of the engine."""
    torch.set_num_threads(1)
    asyncio.run(party(*arguments))


def train(bus: str, steps: int) -> list[float]:
    """Offer prompts without end, and train."""
    model, rewards, rng = policy(), [], np.random.default_rng(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    prompts = iter(lambda: {"meta": {"hidden": int(rng.integers(DIGITS))}}, None)
    with (
        WeightPublisher(bus, ModuleSource(model)) as publisher,
        OnlineDataHandler(bus, groups_per_batch=GROUPS_PER_BATCH, sample_retries=2) as handler,
    ):
        publisher.publish(version=0)
        handler.offer(prompts, ahead=2, group_size=GROUP_SIZE)
        for step in range(1, steps + 1):
            batch = handler.next_batch(120.0)
            optimizer.zero_grad()
            # The two preceding tokens of a sequence predict the next.
            last, older = (batch.tokens.roll(back) for back in (1, 2))
            older = older.where(batch.position_ids > 1, 0)
            logits = model(older * TOKENS + last)[:, : LOOK + 1].log_softmax(-1)
            logprobs = logits.gather(1, batch.tokens.clamp(max=LOOK)[:, None])[:, 0]
            loss = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
            loss.loss.backward()
            optimizer.step()
            publisher.publish(version=step)
            handler.set_policy_version(step)
            handler.ack(batch)
            rewards.append(float(batch.scores.mean()))
            print(f"step {step}: reward {rewards[-1]:.2f}", flush=True)
    return rewards


def main() -> int:
    """Run engine, recorder, workers and trainer; return 0 after a rise of the reward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 24 if parser.parse_args().quick else 40
    bus = f"agents-{os.getpid()}"
    spawn = multiprocessing.get_context("spawn")
    engine = spawn.Process(target=be, args=(run_engine, bus, ready := spawn.Queue()))
    worker = spawn.Process(target=be, args=(run_workers, bus))
    with shmbus.Bus.create(bus, "16MiB", schema=SCHEMA):
        engine.start()
        proxy = ["-m", "shmbus", "proxy", bus, "--engine", ready.get(timeout=120)]
        recorder = subprocess.Popen([sys.executable, *proxy, "--http", "127.0.0.1:0"])
        worker.start()
        try:
            rewards = train(bus, steps)
        finally:
            worker.kill()
            recorder.terminate()
            recorder.wait()
            engine.kill()
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    print(f"reward {first:.2f} -> {last:.2f}")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
