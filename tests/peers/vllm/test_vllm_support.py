"""Logprobs over a real vLLM's sampled-from tokens equal its own processed logprobs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_model as tiny
from serving import Server, post, serving

from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler
from trainer_adapter.logprobs import token_logprobs

pytest_plugins = ["vllm_fixtures"]
TEMPERATURE, TOP_K, TOP_P, SAMPLES, TOKENS = 0.7, 20, 0.8, 8, 40
#: vLLM's JSON for an excluded token.
EXCLUDED = -9000.0


async def sampled(server: Server) -> list[dict[str, Any]]:
    body = {
        "model": "m", "prompt": "w1 w2 w3", "max_tokens": TOKENS, "n": SAMPLES, "seed": 1,
        "temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "ignore_eos": True,
        "logprobs": TOP_K, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    choices: list[dict[str, Any]] = (await post(f"{server.url}/v1/completions", body))["choices"]
    return choices


def sample_of(choice: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """Return a worker's arrays of an answer, and vLLM's logprobs."""
    prompt, answer = choice["prompt_token_ids"], choice["token_ids"]
    found = choice["logprobs"]
    ids = [
        sorted(
            int(name.removeprefix("token_id:"))
            for name, logprob in tops.items()
            if logprob > EXCLUDED
        )
        for tops in found["top_logprobs"]
    ]
    sample = {
        "tokens": np.array([*prompt, *answer], np.int32),
        "loss_mask": np.array([0] * len(prompt) + [1] * len(answer), np.uint8),
        "support_counts": np.array([0] * len(prompt) + [len(one) for one in ids], np.int32),
        "support": np.concatenate([np.array(one, np.int32) for one in ids]),
    }
    return sample, found["token_logprobs"]


@pytest.mark.timeout(600)
async def test_replayed_masks_are_vllms(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    async with serving(
        folders[0], tmp_path / "log", 1, "--logprobs-mode", "processed_logprobs"
    ) as server:
        choices = await sampled(server)
    made = [sample_of(choice) for choice in choices]
    with (
        OnlineDataHandler(
            bus.name, groups_per_batch=1, extra_fields={"support": "support"}
        ) as handler,
        Producer(bus.name) as producer,
    ):
        producer.put_group("q", [sample for sample, _ in made])
        batch = handler.next_batch(30.0)
        with torch.no_grad():
            logits = torch.cat(
                [
                    tiny.build(0)(torch.from_numpy(sample["tokens"]).long()[None]).logits[0]
                    for sample, _ in made
                ]
            )
        ours = token_logprobs(logits, batch, temperature=TEMPERATURE, support="support")
        plain = token_logprobs(logits, batch, temperature=TEMPERATURE)
        handler.ack(batch)
    theirs = torch.tensor([one for _, logprobs in made for one in logprobs])
    trained = batch.loss_mask.bool()
    torch.testing.assert_close(ours[trained], theirs, rtol=0, atol=2e-4)
    assert (ours - plain)[trained].max() > 0.05, "the masks of this model exclude nothing"
