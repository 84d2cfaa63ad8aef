"""Sampling masks: carried with samples and rows, replayed in logprobs, refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import train_next

from shmbus import Bus, Consumer, Producer
from trainer_adapter import OnlineDataHandler, pack
from trainer_adapter.batches import prefix_tree
from trainer_adapter.logprobs import token_logprobs
from trainer_adapter.microbatch import micro_batches

VOCABULARY = 20
FIELDS: Any = {"support": "support"}


def row(rng: np.random.Generator, prompt: int) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    length = prompt + int(rng.integers(1, 8))
    tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
    tokens[:prompt] = np.arange(prompt)
    mask = np.arange(length) >= prompt
    ids = []
    for at in range(length):
        more = rng.choice(VOCABULARY, int(rng.integers(0, 6)), replace=False)
        kept = mask[at] and rng.random() < 0.8
        ids.append(np.unique([tokens[at], *more]) if kept else np.empty(0, np.int64))
    counts = np.array([len(one) for one in ids], np.int32)
    return {"tokens": tokens, "loss_mask": mask, "support_counts": counts}, ids


def put(producer: Producer, rng: np.random.Generator, rows: bool) -> list[np.ndarray[Any, Any]]:
    samples, every = [], []
    for _ in range(3):
        made = [row(rng, 3) for _ in range(2 if rows else 1)]
        ids = [one for _, own in made for one in own]
        every += ids
        flat = np.concatenate(ids).astype(np.int32)
        if rows:
            samples.append({"rows": [fields for fields, _ in made], "support": flat})
        else:
            samples.append({**made[0][0], "support": flat})
    producer.put_group("q", samples)
    return every


@pytest.mark.parametrize("layout", ["packed", "prefix"])
@pytest.mark.parametrize("rows", [False, True])
def test_logprobs_are_those_of_logits_that_are_masked_as_a_sampler_masks_them(
    bus: Bus, rows: bool, layout: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "LEAST_SAVED", 1)
    rng = np.random.default_rng(seed)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        ids = put(producer, rng, rows)
        batch = pack(consumer.take(1, 10), extra_fields=FIELDS, layout=layout)
        assert batch.extra_offsets["support"].diff().tolist() == list(map(len, ids))
        assert batch.extra["support"].tolist() == np.concatenate(ids).tolist()
        logits = torch.randn(batch.num_tokens, VOCABULARY, dtype=torch.float64, requires_grad=True)
        allowed = torch.zeros(batch.num_tokens, VOCABULARY, dtype=torch.bool)
        for at, one in enumerate(ids):
            allowed[at, torch.from_numpy(one).long() if len(one) else slice(None)] = True
        shifted = torch.cat([logits[:1], logits[:-1]]) / 0.8
        if layout == "prefix":
            assert batch.prefix_tree is not None
            logits = torch.randn(batch.prefix_tree.num_rows, VOCABULARY, dtype=torch.float64)
            logits.requires_grad_()
            before = batch.prefix_tree.of_tokens(batch.prefix_tree.predictors)
            shifted = logits[before.clamp(min=0)] / 0.8
        wanted = shifted.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        wanted = wanted.gather(1, batch.tokens[:, None]).squeeze(1)
        wanted = torch.where(batch.loss_mask, wanted, 0)
        got = token_logprobs(logits, batch, temperature=0.8, support="support")
        torch.testing.assert_close(got, wanted)
        upstream = torch.randn_like(got)
        (right,) = torch.autograd.grad(wanted, logits, upstream)
        (mine,) = torch.autograd.grad(got, logits, upstream)
        torch.testing.assert_close(mine, right)
        for part in micro_batches(batch, count=2):
            sequences = part.sequence_indices.tolist()
            borders = batch.cu_seqlens.tolist()
            places = torch.cat([torch.arange(borders[s], borders[s + 1]) for s in sequences])
            of_part = logits[places] if part.prefix_tree is None else logits
            if part.prefix_tree is not None:
                whole = batch.prefix_tree
                assert whole is not None
                of_part = logits[whole.segments.select(sequences)[1]]
            again = token_logprobs(of_part, part, temperature=0.8, support="support")
            torch.testing.assert_close(again, wanted[places])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda one: one["support"].__setitem__(slice(None), VOCABULARY + 1),
            r"'wrong'\[1\] of producer \d+: field 'support': expected the token that was sampled "
            r"among its ids, got \d+ among none of \d+, at token \d+; put what the engine",
        ),
        (
            lambda one: one.__setitem__("support", one["support"][:-1]),
            r"'wrong'\[1\] .* field 'support': expected \d+ ids, the sum of support_counts, got",
        ),
        (
            lambda one: one["support_counts"].__setitem__(0, -1),
            r"'wrong'\[1\] .* field 'support_counts': expected 0 or more, got -1, at token 0",
        ),
    ],
)
def test_a_wrong_mask_is_named_and_costs_its_group(
    bus: Bus, producer: Producer, change: Any, message: str
) -> None:
    def sample() -> dict[str, Any]:
        return {
            "tokens": np.array([1, 2, 3], np.int32),
            "loss_mask": np.array([0, 1, 1], np.uint8),
            "support": np.array([2, 5, 3, 9, 11], np.int32),
            "support_counts": np.array([0, 2, 3], np.int32),
        }

    wrong = [sample() for _ in range(3)]
    change(wrong[1])
    with OnlineDataHandler(bus.name, groups_per_batch=1, extra_fields=FIELDS) as handler:
        producer.put_group("wrong", wrong)
        producer.put_group("right", [sample() for _ in range(3)])
        with pytest.raises(ValueError, match=message):
            handler.next_batch(10)
        assert train_next(handler) == ["right"]
        assert handler.stats().dropped["malformed"] == 3


def test_a_field_of_another_kind_and_a_padded_layout_are_refused(bus: Bus) -> None:
    with pytest.raises(ValueError, match=r"expected no 'support' with layout='padded', got \['sup"):
        OnlineDataHandler(bus.name, layout="padded", extra_fields=FIELDS)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", [{"tokens": [1, 2]}])
        batch = pack(consumer.take(1, 10))
        with pytest.raises(ValueError, match="expected an extra field of kind 'support', got 'x'"):
            token_logprobs(torch.zeros(2, VOCABULARY), batch, support="x")
