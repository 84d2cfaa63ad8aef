"""Corrections for samples of an engine whose probabilities differ from the trainer's.

`importance_correction` weighs the engine's probabilities against the trainer's, with the same
weights and other kernels. Pure functions, no state.

Invariants:

- Filler, where `loss_mask` is False, is never exponentiated and never counted, nan included.
- At least float32 inside; the weights carry no graph.
- The host never waits for the device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shmbus.base.arguments import check_choice, check_number
from trainer_adapter._masked import bounded_ratio, check_operands, sent

__all__ = ["Correction", "importance_correction"]

Mode = Literal["truncate", "mask"]


class Correction(NamedTuple):
    """Weights of tokens, and figures to monitor, detached from the graph.

    Attributes
    ----------
    weights : Tensor [T] or [S, L]
        For `policy_loss(weights=)`; 1 at filler.
    kept : Tensor, bool, same shape
        The loss mask without the tokens of weight 0. Pass it as `loss_mask` to leave them out of
        the loss's divisor, too.
    mean_ratio : Tensor []
        Mean over the trained tokens of the uncut ratio.
    cut_fraction : Tensor []
        Share of the trained tokens with a ratio out of bounds.
    effective_fraction : Tensor []
        Effective sample size of the weights over the trained tokens, ``sum(w) ** 2 / sum(w ** 2)``
        (Kish 1965), as a share of them. Far below 1, a few tokens decide the step.
    """

    weights: Tensor
    kept: Tensor
    mean_ratio: Tensor
    cut_fraction: Tensor
    effective_fraction: Tensor


def importance_correction(
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor | None,
    loss_mask: Tensor,
    *,
    mode: Mode = "truncate",
    high: float = 2.0,
    low: float | None = None,
) -> Correction:
    """Weigh tokens by the trainer's probability over the sampling engine's.

    Parameters
    ----------
    trainer_logprobs, inference_logprobs : Tensor [T] or [S, L], floating
        Natural logarithms of the same tokens under the same weights.
    loss_mask : Tensor, bool, same shape
    mode : {"truncate", "mask"}
        A ratio beyond its bounds becomes the bound (truncated importance sampling, TIS), or 0
        (masked, MIS).
    high : float
        Largest ratio, more than 0. 2 is usual for tokens.
    low : float, optional
        Smallest ratio; "truncate" raises smaller ones to it.

    Returns
    -------
    Correction

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments.

    Notes
    -----
    Sources: TIS, F. Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (https://fengyao.notion.site/off-policy-rl). Bounds on both sides of masked tokens are
    IcePop's (Ling Team 2025, arXiv:2510.18855). Reference: TRL's
    ``vllm_importance_sampling_mode``, with the equal modes "token_truncate" and "token_mask".
    """
    check_choice("mode", mode, ("truncate", "mask"), "'truncate' is usual")
    check_number("high", high)
    if low is not None:
        check_number("low", low)
    if not high > 0 or (low is not None and not 0 <= low <= high):
        raise ValueError(
            f"high and low: expected high > 0 and 0 <= low <= high, got {high} and {low}; 2 and "
            "None are usual"
        )
    inference_logprobs = sent("inference_logprobs", inference_logprobs)
    check_operands(
        loss_mask, trainer_logprobs=trainer_logprobs, inference_logprobs=inference_logprobs
    )
    with torch.no_grad():
        ratio = bounded_ratio(trainer_logprobs, inference_logprobs, loss_mask)
        least = 0.0 if low is None else low
        out = loss_mask & ((ratio > high) | (ratio < least))
        weights = ratio.clamp(least, high) if mode == "truncate" else torch.where(out, 0.0, ratio)
        weights = torch.where(loss_mask, weights, 1.0)
        count = loss_mask.sum().clamp(min=1)
        trained = torch.where(loss_mask, weights, 0.0)
        squares = (trained * trained).sum()
        effective = trained.sum() ** 2 / squares.clamp(min=torch.finfo(squares.dtype).tiny)
        return Correction(
            weights,
            loss_mask & (weights > 0),
            torch.where(loss_mask, ratio, 0.0).sum() / count,
            out.sum() / count,
            effective / count,
        )
