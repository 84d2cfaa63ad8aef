"""Corrections and sequence-level losses, against their formulas in plain float64 Python."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_rows import CU_SEQLENS, TOKENS, Row, padded
from torch import Tensor

from trainer_adapter.corrections import (
    cispo_loss,
    gspo_loss,
    importance_correction,
    overlong_penalty,
    sequence_ratios,
)
from trainer_adapter.losses import policy_loss


def ratios_by_hand(row: Row, level: str) -> dict[int, float]:
    found = {}
    for tokens in row.trained():
        differences = [row.difference(i) for i in tokens]
        for i in tokens:
            total = math.fsum(differences)
            found[i] = math.exp(
                {
                    "token": row.difference(i),
                    "sequence": total,
                    "geometric": total / len(differences),
                }[level]
            )
    return found


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("low", [None, 0.7])
def test_a_correction_has_its_formula(level: Any, mode: Any, low: float | None, seed: int) -> None:
    row = Row(seed, 0.4).of_sequences()
    got = importance_correction(
        row.new, row.old, row.mask, level=level, mode=mode, high=1.3, low=low,
        cu_seqlens=CU_SEQLENS,
    )  # fmt: skip
    ratios = ratios_by_hand(row, level)
    least = low or 0.0
    for i in range(TOKENS):
        if i not in ratios:
            assert got.weights[i] == 1
            assert not got.kept[i]
            continue
        out = not least <= ratios[i] <= 1.3
        want = {
            "truncate": min(max(ratios[i], least), 1.3),
            "mask": 0.0 if out else ratios[i],
            "reject": 0.0 if out else 1.0,
        }[mode]
        assert got.weights[i].item() == pytest.approx(want)
        assert bool(got.kept[i]) == (want > 0)
    cut = sum(not least <= ratio <= 1.3 for ratio in ratios.values())
    assert got.cut_fraction.item() == pytest.approx(cut / len(ratios))
    assert got.mean_ratio.item() == pytest.approx(math.fsum(ratios.values()) / len(ratios))
    weights = [got.weights[i].item() for i in ratios]
    squares = math.fsum(w * w for w in weights)
    effective = math.fsum(weights) ** 2 / squares / len(weights) if squares else 0.0
    assert got.effective_fraction.item() == pytest.approx(effective)
    assert not got.weights.requires_grad
    rows = [padded(values) for values in (row.new, row.old, row.mask)]
    again = importance_correction(*rows, level=level, mode=mode, high=1.3, low=low)
    assert torch.allclose(again.weights[rows[2]], got.weights[row.mask])


def test_a_product_over_thousands_of_tokens_stays_finite() -> None:
    old = torch.zeros(4096)
    mask = torch.ones(4096, dtype=torch.bool)
    for shift in (1.0, -1.0):
        got = importance_correction(
            old + shift, old, mask, level="sequence", cu_seqlens=torch.tensor([0, 4096])
        )
        assert got.weights.isfinite().all() and got.mean_ratio.isfinite()


def test_nothing_to_train_gives_figures_of_zero() -> None:
    empty = torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    got = importance_correction(*empty, level="sequence", cu_seqlens=torch.tensor([0, 3]))
    assert [float(figure) for figure in got[2:]] == [0.0, 0.0, 0.0]
    assert not got.kept.any()


def gspo_by_hand(row: Row, low: float, high: float, weighed: bool) -> tuple[float, Tensor]:
    """Equation 5, sequence by sequence; a token's weight is a factor of its share of the mean."""
    new = row.new.detach().clone().requires_grad_()
    terms = []
    for tokens in row.trained():
        if tokens:
            s = (new[tokens] - row.old[tokens]).mean().exp()
            gain = row.advantages[tokens[0]]
            term = -torch.minimum(s * gain, s.clamp(1 - low, 1 + high) * gain)
            if weighed:
                own = s.detach() * (new[tokens] - new[tokens].detach()).exp()
                each = -torch.minimum(own * gain, own.clamp(1 - low, 1 + high) * gain)
                term = (each * row.weights[tokens]).mean()
            terms.append(term)
    loss = torch.stack(terms).mean()
    return loss.item(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.1, 0.3), (1.0, 9.0)])
@pytest.mark.parametrize("weighed", [False, True])
def test_gspo_clips_a_sequence_ratio(bounds: tuple[float, float], weighed: bool, seed: int) -> None:
    row = Row(seed, 0.4).of_sequences()
    low, high = bounds
    weights = row.weights if weighed else None
    got = gspo_loss(
        row.new, row.old, row.advantages, row.mask, cu_seqlens=CU_SEQLENS, clip_low=low,
        clip_high=high, weights=weights,
    )  # fmt: skip
    value, slopes = gspo_by_hand(row, low, high, weighed)
    assert got.loss.item() == pytest.approx(value)
    (gradient,) = torch.autograd.grad(got.loss, row.new)
    assert torch.allclose(gradient, slopes)
    ratios = sequence_ratios(row.new, row.old, row.mask, cu_seqlens=CU_SEQLENS)
    by_hand = [
        math.exp(math.fsum(row.difference(i) for i in tokens) / max(1, len(tokens)))
        for tokens in row.trained()
    ]
    assert ratios.tolist() == pytest.approx(by_hand)
    rows = [padded(values) for values in (row.new, row.old, row.advantages, row.mask)]
    again = gspo_loss(*rows, clip_low=low, clip_high=high)
    if not weighed:
        assert again.loss.item() == pytest.approx(got.loss.item())
    assert 0 <= float(got.clip_fraction) <= 1


def test_gspo_of_one_token_a_sequence_is_the_clipped_surrogate(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, gain = (torch.randn(9, 1, generator=generator, dtype=torch.float64) for _ in "ab")
    new = (old + 0.3 * gain.flip(0)).requires_grad_()
    mask = torch.ones(9, 1, dtype=torch.bool)
    got = gspo_loss(new, old, gain, mask, clip_low=0.2, clip_high=0.2)
    want = policy_loss(new, old, gain, mask)
    assert got.loss.item() == pytest.approx(want.loss.item())
    assert torch.allclose(*(torch.autograd.grad(one.loss, new)[0] for one in (got, want)))


@pytest.mark.parametrize("bounds", [(0.0, 5.0), (0.8, 1.2)])
@pytest.mark.parametrize("weighed", [False, True])
def test_cispo_weighs_clipped_ratios(bounds: tuple[float, float], weighed: bool, seed: int) -> None:
    row = Row(seed, 0.4).of_sequences()
    low, high = bounds
    got = cispo_loss(
        row.new, row.old, row.advantages, row.mask, low=low, high=high,
        weights=row.weights if weighed else None,
    )  # fmt: skip
    losses, slopes, cut = [], {}, 0
    count = int(row.mask.sum())
    for i in row.mask.nonzero().flatten().tolist():
        ratio = math.exp(row.difference(i))
        factor = min(max(ratio, low), high) * row.advantages[i].item()
        factor *= row.weights[i].item() if weighed else 1.0
        losses.append(-factor * row.new[i].item())
        slopes[i] = -factor / count
        cut += not low <= ratio <= high
    assert got.loss.item() == pytest.approx(math.fsum(losses) / count)
    assert got.clip_fraction.item() == pytest.approx(cut / count)
    (gradient,) = torch.autograd.grad(got.loss, row.new)
    assert gradient.tolist() == pytest.approx([slopes.get(i, 0.0) for i in range(TOKENS)])


@pytest.mark.parametrize("container", [list, np.asarray, torch.tensor])
def test_overlong_samples_are_punished_as_dapo_does(container: Any) -> None:
    lengths = [0, 16_384, 16_385, 18_432, 20_480, 20_481, 99_999]
    got = overlong_penalty(container(lengths), longest=20_480, buffer=4_096)
    want = [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]
    assert got.tolist() == pytest.approx(want)
    assert isinstance(got, Tensor) == (container is torch.tensor)
    half = overlong_penalty(container(lengths), longest=20_480, buffer=4_096, scale=0.5)
    assert half.tolist() == pytest.approx([value / 2 for value in want])
