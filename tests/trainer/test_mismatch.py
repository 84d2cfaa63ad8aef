"""The difference of engine and trainer: figures of plain float64 arithmetic, and its two causes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer_adapter import logprob_mismatch
from trainer_adapter.losses import policy_loss


def batch_of(recorded: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> Any:
    return SimpleNamespace(logprobs=recorded, loss_mask=mask, advantages=advantages)


def drawn(seed: int, *shape: int) -> tuple[torch.Tensor, Any]:
    made = torch.Generator().manual_seed(seed)
    recorded = -torch.rand(shape, generator=made) * 3
    mask = torch.rand(shape, generator=made) < 0.7
    mask.view(-1)[0] = True
    trainer = recorded + torch.randn(shape, generator=made) * 0.2
    recorded, trainer = (torch.where(mask, each, torch.nan) for each in (recorded, trainer))
    return trainer, batch_of(recorded, mask, torch.randn(shape, generator=made))


@pytest.mark.parametrize("shape", [(1,), (257,), (5, 300)])
def test_the_figures_are_those_of_float64(seed: int, shape: tuple[int, ...]) -> None:
    trainer, batch = drawn(seed, *shape)
    found = logprob_mismatch(trainer, batch)
    kept = batch.loss_mask.numpy()
    d = (trainer.double() - batch.logprobs.double()).numpy()[kept]
    k3 = np.exp(d) - 1 - d
    expected = [np.abs(d).mean(), np.percentile(np.abs(d), 99, method="inverted_cdf"), k3.mean()]
    assert np.allclose([float(each) for each in found[:3]], expected, rtol=1e-4, atol=1e-7)
    loss = policy_loss(trainer, batch.logprobs, batch.advantages, batch.loss_mask)
    assert float(found.clipped) == pytest.approx(float(loss.clip_fraction))
    assert np.isnan([float(each) for each in found[4:]]).all()
    assert set(found.metrics()) == {f"mismatch/{name}" for name in found._fields[:4]}


def test_rounding_and_new_weights_are_told_apart() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50, bias=False))
    tokens = torch.randint(0, 50, (400,))

    def logprobs(module: torch.nn.Module) -> torch.Tensor:
        return module(tokens).float().log_softmax(-1)[:, 7].detach()

    def low() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return logprobs(model)

    batch = batch_of(low(), torch.ones(400, dtype=torch.bool), torch.ones(400))
    same = logprob_mismatch(logprobs(model), batch, at_engine_dtype=low())
    assert float(same.policy_change) == 0 and float(same.precision_gap) > 0
    assert float(same.gap_share) == 1
    with torch.no_grad():
        model[1].weight += torch.randn_like(model[1].weight) * 0.1
    part = low()
    part[100:] = torch.nan  # computed for some sequences alone
    moved = logprob_mismatch(logprobs(model), batch, at_engine_dtype=part)
    assert float(moved.policy_change) > 10 * float(moved.precision_gap)
    assert 0 < float(moved.gap_share) < 0.1
    assert "mismatch/gap_share" in moved.metrics()


def test_a_batch_without_trained_tokens_has_figures_of_zero() -> None:
    empty = torch.zeros(3, dtype=torch.bool)
    found = logprob_mismatch(torch.zeros(3), batch_of(torch.zeros(3), empty, torch.zeros(3)))
    assert [float(each) for each in found[:4]] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("batch.logprobs", {"recorded": None}),
        ("logprobs", {"logprobs": torch.zeros(4)}),
        ("at_engine_dtype", {"at_engine_dtype": torch.zeros(3, dtype=torch.int64)}),
        ("clip_low", {"clip_low": -1.0}),
    ],
)
def test_arguments_that_do_not_fit_are_named(field: str, given: dict[str, Any]) -> None:
    mask = torch.ones(3, dtype=torch.bool)
    recorded = given.pop("recorded", torch.zeros(3))
    logprobs = given.pop("logprobs", torch.zeros(3))
    with pytest.raises((TypeError, ValueError), match=field):
        logprob_mismatch(logprobs, batch_of(recorded, mask, torch.zeros(3)), **given)
