"""The task of a chat model: "Which number is larger, a or b?"; workers answer through vLLM.

Invariant: tokens and logprobs are the engine's own; the text is decoded for the score alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import torch

import shmbus
from shmbus.base.programs import program
from shmbus.engines import ManagedServer
from trainer_adapter.attention import transformers_inputs
from trainer_adapter.logprobs import token_logprobs

SCHEMA: Final = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
GROUP_SIZE: Final = 8
IN_FLIGHT: Final = 256
ANSWER_TOKENS: Final = 16
#: Seed of the held-out questions.
HELD_OUT_SEED: Final = 1_000_003
#: Length of a question with its answer, and of a long chat template around the question.
MAX_MODEL_LEN: Final = 256


def questions(seed: int) -> Iterator[tuple[str, int]]:
    """Draw questions and right answers."""
    rng = random.Random(seed)
    while True:
        a, b = rng.sample(range(10, 1000), 2)
        yield f"Which number is larger, {a} or {b}? Reply with the number only.", max(a, b)


def score(text: str, right: int) -> float:
    """Return 1 for the number alone, 0.5 if the first number of the reply is right, else 0."""
    if text.strip() == str(right):
        return 1.0
    numbers = re.findall(r"\d+", text)
    return 0.5 if numbers and numbers[0] == str(right) else 0.0


def prompts(tokenizer: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Yield prompts as token ids."""
    for text, right in questions(seed):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        yield {"prompt": np.array(ids, np.int32), "meta": {"right": right}}


async def work(producer: shmbus.Producer, client: openai.AsyncOpenAI, tokenizer: Any) -> None:
    """Answer requests one after the other."""
    while (request := await producer.requests.anext()) is not None:
        prompt = request["prompt"].tolist()
        try:
            version = producer.policy_version
            completion = await client.completions.create(
                model="policy", prompt=prompt, logprobs=0, max_tokens=ANSWER_TOKENS,
                temperature=0.0 if request.split == "eval" else 1.0,
                extra_body={"return_token_ids": True, "cache_salt": request.cache_salt},
            )  # fmt: skip
        except (
            openai.APIConnectionError, openai.InternalServerError, shmbus.VersionUnknownError,
        ):  # fmt: skip
            producer.requests.release(request, reason="the server is away")
            continue
        choice: Any = completion.choices[0]
        if choice.finish_reason == "abort":  # ended early for new weights
            producer.requests.release(request)
            continue
        text = tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        await asyncio.to_thread(
            producer.requests.answer, request,
            score=score(text, request.meta["right"]), policy_version=version,
            tokens=prompt + choice.token_ids,
            logprobs=[0.0] * len(prompt) + choice.logprobs.token_logprobs,
            loss_mask=[0] * len(prompt) + [1] * len(choice.token_ids),
        )  # fmt: skip


def be_workers(bus: str, url: str, folder: str) -> None:
    """Keep `IN_FLIGHT` requests at the engine until the trainer's process ends."""
    from transformers import AutoTokenizer

    def end_with_trainer() -> None:
        sys.stdin.read()  # a pipe of the trainer, closed by the trainer's end
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client, await shmbus.Producer.awaited(bus) as producer:
            await asyncio.gather(*(work(producer, client, tokenizer) for _ in range(IN_FLIGHT)))

    asyncio.run(run())


def logprobs_of(model: Any, batch: Any, dtype: str = "float32") -> torch.Tensor:
    """Return each token's logprob, [T], by a forward pass at a dtype."""
    low = dtype != "float32"
    with torch.autocast(batch.tokens.device.type, getattr(torch, dtype), enabled=low):
        logits = model(**transformers_inputs(batch)).logits[0]
    return token_logprobs(logits.float(), batch)


def server_of(
    folder: Path, port: int, dtype: str, more: list[str], log: Path | None = None, gpu: str = ""
) -> ManagedServer:
    """Describe a vLLM server of a folder's model, with the weight transfer of shmbus."""
    command = [] if log is None else ["sh", "-c", 'exec "$@" >> "$0" 2>&1', str(log)]
    command += [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{checkpoint}",
        "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN),
        "--weight-transfer-config", '{"backend": "shmbus"}', *more,
    ]  # fmt: skip
    environment = {"VLLM_SERVER_DEV_MODE": "1"} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    if not torch.cuda.is_available():
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    return ManagedServer(
        command, url=f"http://127.0.0.1:{port}", checkpoint=folder, environment=environment
    )


def start_workers(bus: str, url: str, folder: str) -> subprocess.Popen[bytes]:
    """Start a process of workers, which ends when its standard input closes."""
    return subprocess.Popen(
        program("trainer_adapter.demo.chat_task", bus, url, folder), stdin=subprocess.PIPE
    )


if __name__ == "__main__":
    be_workers(*sys.argv[1:])
