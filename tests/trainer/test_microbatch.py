"""Micro-batches: every sequence once, unchanged; and losses that add up to the whole batch's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmbus import Bus, Consumer, Producer
from trainer_adapter import Batch, pack
from trainer_adapter.losses import policy_loss
from trainer_adapter.microbatch import MicroBatch, micro_batches

PER_TOKEN = ("tokens", "position_ids", "loss_mask", "logprobs", "advantages")


@pytest.fixture
def consumer(bus_name: str, seed: int) -> Iterator[Consumer]:
    rng = np.random.default_rng(seed)
    with Bus.create(bus_name, capacity="4MiB"), Producer(bus_name) as producer:
        for number in range(12):
            for index in range(4):
                n = int(rng.integers(0, 60))
                producer.put(
                    f"k{number}", group_size=4, index=index, score=float(rng.random()),
                    policy_version=number, tokens=rng.integers(0, 99, n),
                    loss_mask=rng.integers(0, 2, n), logprobs=-rng.random(n),
                )  # fmt: skip
        with Consumer(bus_name) as handle:
            yield handle


def sequences_of(batch: Batch | MicroBatch) -> list[dict[str, Any]]:
    lengths = batch.cu_seqlens.diff().tolist()
    found = []
    for i, n in enumerate(lengths):
        start = int(batch.cu_seqlens[i])
        one: dict[str, Any] = {
            name: getattr(batch, name)[i, :n].tolist()
            if batch.layout == "padded"
            else getattr(batch, name)[start : start + n].tolist()
            for name in PER_TOKEN
        }
        one["score"] = float(batch.scores[i])
        one["version"] = int(batch.policy_versions[i])
        one["id"] = batch.instance_ids[i]
        found.append(one)
    return found


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("cut", [{"max_tokens": 150}, {"max_tokens": 60}, {"count": 5}], ids=str)
def test_micro_batches_cover_it_once(consumer: Consumer, layout: Any, cut: dict[str, int]) -> None:
    batch = pack(consumer.take(64, 10), layout=layout)
    whole = sequences_of(batch)
    parts = micro_batches(batch, **cut)
    seen = [i for part in parts for i in part.sequence_indices.tolist()]
    assert sorted(seen) == list(range(batch.num_sequences))
    for part in parts:
        indices = part.sequence_indices.tolist()
        assert indices == sorted(indices) and indices
        assert sequences_of(part) == [whole[i] for i in indices]
        assert part.max_seqlen == int(part.cu_seqlens.diff().max())
        assert part.cu_seqlens.dtype == torch.int32
        if "max_tokens" in cut:
            assert part.tokens.numel() <= cut["max_tokens"]
    if "count" in cut:
        assert len(parts) == cut["count"]
        sums = [int(part.cu_seqlens[-1]) for part in parts]
        assert max(sums) - min(sums) <= batch.max_seqlen
    else:
        assert len(parts) >= batch.num_tokens / cut["max_tokens"]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_micro_batch_losses_sum_to_one(consumer: Consumer, normalisation: Any, layout: Any) -> None:
    batch = pack(consumer.take(64, 10), layout=layout)
    weight = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)

    def loss(part: Batch | MicroBatch, denominator: Any) -> torch.Tensor:
        return policy_loss(
            part.logprobs.double() * weight, part.logprobs, part.advantages, part.loss_mask,
            normalisation=normalisation, cu_seqlens=part.cu_seqlens, denominator=denominator,
        ).loss  # fmt: skip

    whole = loss(batch, 64.0 if normalisation == "constant" else None)
    (wanted,) = torch.autograd.grad(whole, weight)
    total, gradient = 0.0, 0.0
    for part in micro_batches(batch, max_tokens=200):
        denominator = {
            "token": part.batch_loss_tokens,
            "sequence": part.batch_sequences,
            "constant": 64.0,
        }[normalisation]
        one = loss(part, denominator)
        total += one.item()
        gradient += torch.autograd.grad(one, weight)[0].item()
    assert total == pytest.approx(whole.item())
    assert gradient == pytest.approx(wanted.item())
