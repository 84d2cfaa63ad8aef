"""Corrections against their formulas in plain float64 Python."""

import math
from typing import Any

import pytest
import torch
from loss_rows import TOKENS, Row, padded

from trainer_adapter.corrections import importance_correction


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("low", [None, 0.7])
def test_a_correction_has_its_formula(mode: Any, low: float | None, seed: int) -> None:
    row = Row(seed, 0.4).poisoned()
    got = importance_correction(row.new, row.old, row.mask, mode=mode, high=1.3, low=low)
    trained = row.mask.nonzero().flatten().tolist()
    ratios = {i: math.exp(row.new[i].item() - row.old[i].item()) for i in trained}
    least = low or 0.0
    for i in range(TOKENS):
        if i not in ratios:
            assert got.weights[i] == 1
            assert not got.kept[i]
            continue
        out = not least <= ratios[i] <= 1.3
        cut = min(max(ratios[i], least), 1.3)
        want = cut if mode == "truncate" else (0.0 if out else ratios[i])
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
    again = importance_correction(*rows, mode=mode, high=1.3, low=low)
    assert torch.allclose(again.weights[rows[2]], got.weights[row.mask])


def test_nothing_to_train_gives_figures_of_zero() -> None:
    got = importance_correction(*[torch.zeros(3)] * 2, torch.zeros(3, dtype=torch.bool))
    assert [float(figure) for figure in got[2:]] == [0.0, 0.0, 0.0]
    assert not got.kept.any()
