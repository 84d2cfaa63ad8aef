"""Hidden states of a real vLLM server equal those of transformers (SHMBUS_TEST_SEQUENCES)."""

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from serving import SERVER_OPTIONS, post, serving, shared_memory
from transformers import AutoModelForCausalLM

from shmbus import PeerGoneError, WaitTimeoutError
from shmbus.tensors import ChannelClosedError, StepFailedError, TensorChannel, TensorReceiver

pytest_plugins = ["vllm_fixtures"]

SEQUENCES = int(os.environ.get("SHMBUS_TEST_SEQUENCES", "200"))
LAYERS = [1 if SERVER_OPTIONS else 0, 2, 4]  # a GPU's vLLM overwrites layer 0
WIDTH = 128
LONGEST = 128
#: Of a state: below the distance of another row, above TF32's rounding in a GPU's attention.
CLOSE = 1e-2 if SERVER_OPTIONS else 1e-4
SPECS = {"hidden": ("float32", (None, len(LAYERS), WIDTH)), "token_ids": ("int64", (None,))}


def options(channel: str, **extra: Any) -> list[str]:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "shmbus.engines.hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"channel": channel, **extra},
    }
    return [
        "--speculative-config", json.dumps(speculative),
        "--kv-transfer-config", json.dumps(transfer),
        "--max-model-len", str(LONGEST),
        # Prompts in chunks, and fewer blocks than the requests at a time want.
        "--max-num-batched-tokens", "64", "--max-num-seqs", "16",
        "--num-gpu-blocks-override", "16", "--block-size", "32",
    ]  # fmt: skip


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.last: list[torch.Tensor] = []
        layers = self.model.model.layers
        layers[-1].register_forward_hook(lambda _m, _i, out: self.last.append(out))

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.last.clear()
        states = self.model(ids[None], output_hidden_states=True).hidden_states
        last = self.last[0][0] if isinstance(self.last[0], tuple) else self.last[0]
        return torch.stack([*(states[i][0] for i in LAYERS[:-1]), last.view(-1, WIDTH)], 1)

    @torch.no_grad()
    def next_token(self, hidden: torch.Tensor) -> int:
        return int(self.model.lm_head(self.model.model.norm(hidden[-1, -1])).argmax())


class Trainer(threading.Thread):
    def __init__(self, receiver: TensorReceiver, reference: Reference) -> None:
        super().__init__()
        self.receiver, self.reference = receiver, reference
        self.seen: list[int] = []
        self.failed: list[str] = []
        self.gone: list[str] = []
        self.is_over = threading.Event()
        self.wrong: list[str] = []
        self.sizes: dict[int, tuple[int, list[int], int]] = {}

    def run(self) -> None:
        torch.set_num_threads(1)  # the engine's cores are the engine's
        while not self.is_over.is_set():
            try:
                with self.receiver.recv(0.5) as item:
                    self.check(item)
            except StepFailedError as error:
                self.failed.append(error.reason)
            except PeerGoneError as error:
                self.gone.append(str(error))
            except ChannelClosedError:
                return
            except WaitTimeoutError:
                continue

    def end(self) -> None:
        self.is_over.set()
        self.join(60)
        self.receiver.close()

    def check(self, item: Any) -> None:
        hidden, ids, meta = item["hidden"].cpu(), item["token_ids"].cpu(), item.meta
        index = meta["params"]["index"]
        self.seen.append(index)
        self.sizes[index] = meta["prompt"], [*ids.tolist(), meta["next"]], len(hidden)
        want = self.reference(ids)
        if not torch.allclose(hidden, want, rtol=CLOSE, atol=CLOSE):
            rows = (hidden - want).abs().amax((1, 2)) > CLOSE
            self.wrong.append(f"{index}: rows {rows.nonzero().flatten().tolist()} of {len(hidden)}")
        if self.reference.next_token(hidden) != meta["next"]:
            self.wrong.append(f"{index}: the next token")


async def ask(url: str, index: int, prompt: list[int], tokens: int) -> list[int]:
    body = {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "kv_transfer_params": {"index": index}, "return_token_ids": True,
    }  # fmt: skip
    (choice,) = (await post(f"{url}/v1/completions", body))["choices"]
    return list(choice["token_ids"])


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for the trainer; only a lost sequence meets the deadline."""
    deadline = time.monotonic() + 120.0
    while not is_so() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)


def beyond(trainer: Trainer) -> list[int]:
    return [index for index in trainer.seen if index >= SEQUENCES]


async def drive(url: str, aborted: set[int], seed: int) -> dict[int, list[int]]:
    """Ask for all sequences, of odd lengths, many with a common prefix; give up some half way."""
    print("seed", seed)
    random.seed(seed)
    prefixes = [[random.randrange(3, 128) for _ in range(48)] for _ in range(4)]
    room = asyncio.Semaphore(24)
    asked: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        prompt = [random.randrange(3, 128) for _ in range(random.randrange(1, 60))]
        if index % 3 == 0:
            prompt = random.choice(prefixes)[: random.randrange(1, 48)] + prompt
        tokens = 1 if index % 2 else min(random.randrange(20, 60), LONGEST - len(prompt))
        async with room:
            asking = asyncio.ensure_future(ask(url, index, prompt, tokens))
            if index in aborted:
                await asyncio.sleep(random.random() * 0.2)
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    asked[index] = prompt + await asking
            else:
                asked[index] = prompt + await asking

    await asyncio.gather(*(one(index) for index in range(SEQUENCES)))
    return asked


@pytest.mark.timeout(1800)
async def test_rows_are_exact(folders: dict[int, Path], tmp_path: Path, channel: str) -> None:
    async with serving(folders[1], tmp_path / "log", 1, *options(channel)) as server:
        receiver = TensorChannel.open(channel, specs=SPECS)
        trainer = Trainer(receiver, Reference(folders[1]))
        trainer.start()
        aborted = set(range(7, SEQUENCES, 11))
        asked = await drive(server.url, aborted, seed=1)
        await asyncio.gather(
            ask(server.url, SEQUENCES, [5] * (LONGEST - 4), 4),
            *(ask(server.url, SEQUENCES + 1 + i, [6 + i] * 9, 12) for i in range(8)),
        )
        await until(lambda: set(asked) - aborted <= set(trainer.seen))
        await until(lambda: len(beyond(trainer)) == 9)
        async with aiohttp.ClientSession() as session:
            metrics = await (await session.get(f"{server.url}/metrics")).text()
    trainer.end()
    print(len(trainer.seen), "received of", SEQUENCES + 9, "with", len(aborted), "to be aborted")
    for line in metrics.splitlines():
        if line.startswith(("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total")):
            print(line)
            assert float(line.split()[-1]) > 0
    assert trainer.wrong == trainer.failed == []
    assert len(trainer.seen) == len(set(trainer.seen))
    whole = set(trainer.seen) - set(beyond(trainer))
    assert set(range(SEQUENCES)) - aborted <= whole <= set(asked) | aborted
    for index in whole & set(asked):
        _, tokens, rows = trainer.sizes[index]
        assert tokens == asked[index] and rows == len(tokens) - 1
    assert trainer.sizes[SEQUENCES][2] == LONGEST - 1 and len(beyond(trainer)) == 9


@pytest.mark.timeout(1800)
async def test_tp_2_sends_once(folders: dict[int, Path], tmp_path: Path, channel: str) -> None:
    async with serving(folders[1], tmp_path / "log", 2, *options(channel, receivers=2)) as server:
        group = TensorChannel.group(channel, senders=1, receivers=2)
        trainers = []
        for rank in (0, 1):
            trainers.append(Trainer(group.receiver(rank, specs=SPECS), Reference(folders[1])))  # type: ignore[arg-type]
            trainers[-1].start()
        asked = await drive(server.url, set(), seed=2)
        await until(lambda: sum(len(each.seen) for each in trainers) == SEQUENCES)
    seen = []
    for trainer in trainers:
        trainer.end()
        assert trainer.wrong == [] and trainer.failed == []
        seen += trainer.seen
    assert sorted(seen) == sorted(asked) == list(range(SEQUENCES))
    assert abs(len(trainers[0].seen) - len(trainers[1].seen)) <= 1


@pytest.mark.timeout(1800)
async def test_a_killed_engine_is_1(folders: dict[int, Path], tmp_path: Path, channel: str) -> None:
    async with serving(folders[1], tmp_path / "first", 1, *options(channel)) as first:
        receiver = TensorChannel.open(channel, specs=SPECS)
        trainer = Trainer(receiver, Reference(folders[1]))
        trainer.start()
        await asyncio.gather(*(ask(first.url, i, [3 + i] * (5 + i), 3) for i in range(20)))
        await until(lambda: len(trainer.seen) == 20)
        files = shared_memory(first._members())
        os.killpg(first.process.pid, signal.SIGKILL)
        for file in files:
            Path(file).unlink(missing_ok=True)
        await until(lambda: bool(trainer.gone))
    async with serving(folders[1], tmp_path / "second", 1, *options(channel)) as second:
        await asyncio.gather(*(ask(second.url, i, [3 + i] * (5 + i), 3) for i in range(20, 40)))
        await until(lambda: len(trainer.seen) == 40)
        (gone,) = trainer.gone
    trainer.end()
    assert f"channel '{channel}': the sender 'vllm rank 0'" in gone and "has died" in gone
    assert trainer.wrong == trainer.failed == []
    assert sorted(trainer.seen) == list(range(40))
