"""The pieces of the loss, against their formulas written out token by token in plain Python."""

import itertools
import math
from typing import Any

import pytest
import torch
from loss_rows import BORDERS, CU_SEQLENS, POISON, TOKENS, Row, padded
from torch import Tensor

from trainer_adapter.corrections import importance_correction
from trainer_adapter.losses import LOG_RATIO_LIMIT, aggregate_loss, kl_estimate, policy_loss


def aggregated(losses: dict[int, float], normalisation: str, denominator: float | None) -> float:
    if normalisation == "sequence":
        means = []
        for start, end in itertools.pairwise(BORDERS):
            own = [losses[i] for i in range(start, end) if i in losses]
            if own:
                means.append(math.fsum(own) / len(own))
        return math.fsum(means) / (denominator or len(means))
    return math.fsum(losses.values()) / (denominator or len(losses))


@pytest.mark.parametrize(
    ("normalisation", "denominator"),
    [("token", None), ("token", 40.0), ("sequence", None), ("sequence", 8.0), ("constant", 64.0)],
)
def test_policy_loss_is_clipped(normalisation: Any, denominator: float | None, seed: int) -> None:
    row = Row(seed)
    got = policy_loss(
        row.new, row.old, row.advantages, row.mask, clip_low=0.2, clip_high=0.3,
        weights=row.weights, normalisation=normalisation, cu_seqlens=CU_SEQLENS,
        denominator=denominator,
    )  # fmt: skip
    losses, slopes, cut, ratios = {}, {}, 0, []
    for i in row.mask.nonzero().flatten().tolist():
        ratio = math.exp(row.new[i].item() - row.old[i].item())
        gain, weight = row.advantages[i].item(), row.weights[i].item()
        clipped = min(max(ratio, 0.8), 1.3)
        losses[i] = -min(ratio * gain, clipped * gain) * weight
        is_cut = clipped * gain < ratio * gain
        slopes[i] = 0.0 if is_cut else -ratio * gain * weight
        cut += is_cut
        ratios.append(ratio)
    assert got.loss.item() == pytest.approx(aggregated(losses, normalisation, denominator))
    assert got.clip_fraction.item() == pytest.approx(cut / len(losses))
    assert got.mean_ratio.item() == pytest.approx(math.fsum(ratios) / len(ratios))
    (gradient,) = torch.autograd.grad(got.loss, row.new)
    for i in range(TOKENS):
        alone = {j: (slopes[j] if j == i else 0.0) for j in slopes}
        expected = aggregated(alone, normalisation, denominator) if i in slopes else 0.0
        assert gradient[i].item() == pytest.approx(expected)


def test_padded_rows_and_packed_rows_give_the_same_loss(seed: int) -> None:
    row = Row(seed)
    operands = (row.new, row.old, row.advantages, row.mask)
    for normalisation in ("token", "sequence"):
        packed = policy_loss(*operands, normalisation=normalisation, cu_seqlens=CU_SEQLENS)
        rows = policy_loss(
            *(padded(x, 0.0 if x.dtype == torch.bool else math.nan) for x in operands),
            normalisation=normalisation,
        )
        torch.testing.assert_close(rows.loss, packed.loss.detach())


@pytest.mark.parametrize("poison", POISON, ids=str)
def test_filler_never_reaches_the_loss_or_a_gradient(poison: float, seed: int) -> None:
    row = Row(seed)

    def results(spoilt: bool) -> list[Tensor]:
        def operand(values: Tensor) -> Tensor:
            clean = values.detach().clone()
            if spoilt:
                clean[~row.mask] = poison
            return clean.requires_grad_()

        new, old, reference, advantages = map(
            operand, (row.new, row.old, row.reference, row.advantages)
        )
        weights = importance_correction(new, old, row.mask).weights
        loss = policy_loss(new, old, advantages, row.mask, weights=weights).loss
        kl = [kl_estimate(new, reference, row.mask, kind=kind) for kind in ("k1", "k2", "k3")]
        total = loss + sum(aggregate_loss(k, row.mask) for k in kl)
        return [loss, *kl, weights, *torch.autograd.grad(total, new)]

    for clean, spoilt in zip(results(False), results(True), strict=True):
        assert spoilt.isfinite().all()
        assert torch.equal(clean, spoilt)


@pytest.mark.parametrize(
    ("normalisation", "denominator"),
    [("token", None), ("sequence", None)]
    + [(kind, zero) for kind in ("token", "sequence", "constant") for zero in (0, torch.tensor(0))],
)
def test_a_batch_without_tokens_gives_zero(normalisation: Any, denominator: Any, seed: int) -> None:
    row = Row(seed)
    nothing = torch.zeros_like(row.mask)
    got = policy_loss(
        row.new, row.old, row.advantages, nothing,
        normalisation=normalisation, cu_seqlens=CU_SEQLENS, denominator=denominator,
    )  # fmt: skip
    assert [x.item() for x in got] == [0.0, 0.0, 0.0]
    assert not torch.autograd.grad(got.loss, row.new)[0].any()


def test_tokens_after_the_last_border_belong_to_no_sequence(seed: int) -> None:
    row = Row(seed)
    tail = torch.full((4,), 100.0, dtype=torch.float64)
    longer = torch.cat([row.advantages, tail])
    mask = torch.cat([row.mask, torch.ones(4, dtype=torch.bool)])
    got = aggregate_loss(longer, mask, normalisation="sequence", cu_seqlens=CU_SEQLENS)
    expected = aggregate_loss(
        row.advantages, row.mask, normalisation="sequence", cu_seqlens=CU_SEQLENS
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_estimators_are_schulmans(kind: Any, seed: int) -> None:
    row = Row(seed)
    got = kl_estimate(row.new, row.reference, row.mask, kind=kind)
    (slopes,) = torch.autograd.grad(got.sum(), row.new)
    for i in range(TOKENS):
        d = row.reference[i].item() - row.new[i].item()
        value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind]
        slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[kind]
        real = bool(row.mask[i])
        assert got[i].item() == pytest.approx(value if real else 0.0)
        assert slopes[i].item() == pytest.approx(slope if real else 0.0)


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    far = torch.tensor([0.0, -1e4, 0.0])
    near = torch.tensor([-1e4, 0.0, 0.0])
    mask = torch.ones(3, dtype=torch.bool)
    for gain in (-1.0, 0.0, 1.0):
        new = far.clone().requires_grad_()
        got = policy_loss(new, near, torch.full((3,), gain), mask)
        (gradient,) = torch.autograd.grad(got.loss, new)
        assert got.loss.isfinite()
        assert gradient.isfinite().all()
        assert got.mean_ratio <= math.exp(LOG_RATIO_LIMIT)
    weights = importance_correction(far, near, mask).weights
    assert weights.tolist() == pytest.approx([2.0, 0.0, 1.0], abs=1e-8)
    assert kl_estimate(near, far, mask).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_is_widened_before_any_arithmetic(dtype: torch.dtype, seed: int) -> None:
    row = Row(seed, dtype=dtype)
    got = policy_loss(row.new, row.old, row.advantages, row.mask)
    exact = policy_loss(*(x.double() for x in (row.new, row.old, row.advantages)), row.mask)
    assert got.loss.dtype == torch.float32
    assert got.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5, abs=1e-6)
