"""The sample as the unit: losses of samples of several rows, and samples without a part in them."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import wait_until

from shmbus import Bus, Consumer, Producer
from trainer_adapter import OnlineDataHandler
from trainer_adapter.advantages import group_advantages
from trainer_adapter.logprobs import logit_rows, token_logprobs
from trainer_adapter.losses import aggregate_loss, policy_loss
from trainer_adapter.microbatch import micro_batches

SIZES = {"rows": [20, 1], "lengths": [3, 5]}


def put_rows(producer: Producer, key: str = "q") -> None:
    for index, (rows, length) in enumerate(zip(*SIZES.values(), strict=True)):
        fields = {
            "tokens": np.arange(length, dtype=np.int32),
            "logprobs": np.full(length, -1.0, np.float32),
        }
        producer.put(key, group_size=2, index=index, score=float(index), rows=[fields] * rows)


def put(producer: Producer, key: str, samples: list[dict[str, Any]]) -> None:
    for index, sample in enumerate(samples):
        tokens = np.arange(4, dtype=np.int32)
        producer.put(
            key, group_size=len(samples), index=index, tokens=tokens,
            logprobs=np.full(4, -1.0, np.float32), **sample,
        )  # fmt: skip


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_many_rows_of_a_sample_are_1(bus: Bus, producer: Producer, layout: Any) -> None:
    put_rows(producer)
    with OnlineDataHandler(bus.name, groups_per_batch=1, layout=layout) as handler:
        batch = handler.next_batch(30)
        new = (torch.randn(batch.tokens.shape) * 0.1 - 1.0).double().requires_grad_()
        given = new, batch.logprobs.double(), batch.advantages.double(), batch.loss_mask
        borders = {"cu_seqlens": batch.cu_seqlens}
        unit = {"normalisation": "sample", **borders}
        whole = policy_loss(*given, **unit, sample_of=batch.sample_of).loss
        assert not torch.isclose(whole, policy_loss(*given, **borders, normalisation="token").loss)
        (wanted,) = torch.autograd.grad(whole, new)
        means = []
        for sample in (0, 1):
            own = batch.sample_of == sample
            mask = (
                own[:, None]
                if layout == "padded"
                else own.repeat_interleave(batch.cu_seqlens.long().diff())
            )
            means.append(
                policy_loss(
                    *given[:3], batch.loss_mask & mask, **borders, normalisation="token"
                ).loss
            )
        assert torch.allclose(whole, torch.stack(means).mean())
        for parts in (micro_batches(batch, count=5), micro_batches(batch, count=1)):
            got = torch.zeros_like(new)
            for part in parts:
                (piece,) = torch.autograd.grad(part_loss(part, batch, new), new)
                got += piece
            assert torch.allclose(got, wanted)
            assert parts[0].batch_samples == 2


def part_loss(part: Any, batch: Any, new: torch.Tensor) -> torch.Tensor:
    if part.layout == "padded":
        own = new[part.sequence_indices][:, : part.max_seqlen]
    else:
        starts = batch.cu_seqlens.long()
        at = [torch.arange(starts[i], starts[i + 1]) for i in part.sequence_indices.tolist()]
        own = new[torch.cat(at)]
    return policy_loss(
        own, part.logprobs.double(), part.advantages.double(), part.loss_mask,
        cu_seqlens=part.cu_seqlens, normalisation="sample",
        sample_tokens=part.sample_tokens, denominator=part.batch_samples,
    ).loss  # fmt: skip


def test_rows_of_a_sample_may_lie_anywhere_and_rows_without_tokens_count_for_nothing() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    borders = torch.tensor([0, 1, 3, 4, 5])
    mask = torch.tensor([True, True, True, False, True])
    got = aggregate_loss(
        losses, mask, normalisation="sample", cu_seqlens=borders,
        sample_of=torch.tensor([7, 2, 2, 7]),
    )  # fmt: skip
    assert got == pytest.approx(((1 + 5) / 2 + (2 + 3) / 2) / 2)


@pytest.mark.parametrize("given", [None, torch.zeros(3, dtype=torch.int32)])
def test_a_loss_by_sample_without_the_samples_is_named(given: Any) -> None:
    losses, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    borders = torch.tensor([0, 2, 4])
    for name, wrong in (("sample_of", given), ("sample_tokens", torch.ones(3))):
        more = {"normalisation": "sample", "cu_seqlens": borders, name: wrong}
        with pytest.raises(ValueError, match=name):
            aggregate_loss(losses, mask, **more)


def test_a_batch_with_an_empty_mask_has_zero_logprobs(bus: Bus, producer: Producer) -> None:
    put(producer, "q", [{"loss_mask": np.zeros(4, np.bool_), "score": 1.0}] * 2)
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        batch = handler.next_batch(30)
        rows = logit_rows(batch)
        logits = torch.zeros(len(rows), 9, requires_grad=True)
        found = token_logprobs(logits, batch, rows=rows)
        assert len(rows) == 0 and found.shape == batch.tokens.shape and not found.any()
        found.sum().backward()
        assert logits.grad is not None


CUT = {"meta": {"finish_reason": "length"}}


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("how", "baseline"), [("keep", [1, 3, 8]), ("mask", [1, 3, 8]), ("exclude", [1, 3])]
)
@pytest.mark.parametrize("why", ["truncated", "stale_samples"])
def test_a_sample_is_withheld_without_its_group(
    bus: Bus, producer: Producer, why: str, how: str, baseline: list[float], prefetch: int
) -> None:
    options: dict[str, Any] = {why: how}
    if why == "stale_samples":
        if how == "keep":
            options = {}
        else:
            options["max_policy_lag"] = 2
    cut = CUT if why == "truncated" else {"policy_version": 1}
    samples = [{"score": float(score), "policy_version": 5} for score in (1, 3)]
    put(producer, "q", [*samples, {"score": 8.0, "policy_version": 5} | cut])
    with Consumer(bus.name) as first:
        first.policy_version = 5
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, advantages="dr_grpo", prefetch=prefetch, **options
    ) as handler:
        batch = handler.next_batch(30)
        mean = np.mean(baseline)
        got = batch.advantages.reshape(3, 4)[:, 0].tolist()
        assert got[:2] == pytest.approx([1 - mean, 3 - mean])
        assert batch.loss_mask.reshape(3, 4).any(1).tolist() == [True, True, how == "keep"]
        assert batch.scores.tolist() == [1, 3, 8]
        handler.ack(batch)
        assert handler.stats().acknowledged == 3


def test_an_advantage_callable_sees_no_excluded_sample(bus: Bus, producer: Producer) -> None:
    seen: list[list[float]] = []

    def kind(scores: Any, group: Any) -> Any:
        seen.append(scores.tolist())
        assert len(group.lengths) == len(scores)
        return scores

    put(producer, "a", [{"score": 1.0}, {"score": 2.0} | CUT])
    put(producer, "b", [{"score": 3.0} | CUT, {"score": 4.0} | CUT])
    with OnlineDataHandler(
        bus.name, groups_per_batch=2, advantages=kind, truncated="exclude"
    ) as handler:
        batch = handler.next_batch(30)
        assert seen == [[1.0]]
        assert batch.advantages.reshape(4, 4)[:, 0].tolist() == [1, 0, 0, 0]


def test_a_limit_for_stale_samples_is_required(bus: Bus) -> None:
    with pytest.raises(ValueError, match="max_policy_lag"):
        OnlineDataHandler(bus.name, groups_per_batch=1, stale_samples="mask")


ROUNDED = [0.1 + 0.2, 0.3, float(np.float32(0.3)), 0.3]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "batch_std"])
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-30, 1e30])
def test_scores_that_are_equal_up_to_rounding_teach_nothing(kind: Any, scale: float) -> None:
    scores = np.array(ROUNDED) * scale
    assert not group_advantages(scores, kind).any()
    apart = scores.copy()
    apart[0] *= 1 + 1e-5
    assert group_advantages(apart, kind).any() or kind == "batch_std"


@pytest.mark.parametrize("scored_by", ["producer", "score_group"])
def test_rounded_scores_have_zero_variance(bus: Bus, producer: Producer, scored_by: str) -> None:
    late = scored_by == "score_group"
    put(producer, "q", [{"score": None if late else score} for score in ROUNDED])
    options: dict[str, Any] = {"score_group": lambda group: ROUNDED} if late else {}
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, skip_zero_variance=True, **options
    ) as handler:

        def dropped() -> Any:
            with pytest.raises(TimeoutError):
                handler.next_batch(0.05)
            return handler.stats().dropped

        assert wait_until(dropped) == {"filtered" if late else "zero_variance": len(ROUNDED)}


def test_the_figures_count_rounded_scores_as_equal(bus: Bus, producer: Producer) -> None:
    put(producer, "q", [{"score": score} for score in ROUNDED])
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        handler.next_batch(30)
        assert handler.metrics()["share/zero_variance"] == 1.0
