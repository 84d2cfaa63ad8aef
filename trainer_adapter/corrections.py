"""Corrections for samples of another policy, and losses with other ratios than PPO's.

Two policies differ from the trainer's: an older version's, and the inference engine's, with the
same weights and other kernels. `importance_correction` weighs the second against the first;
`gspo_loss` and `cispo_loss` stand in for `losses.policy_loss`. Pure functions, no state.

Invariants:

- Filler, where `loss_mask` is False, is never exponentiated and never counted, nan included.
- At least float32 inside; gradients flow to the current policy's logprobs only.
- The host never waits for the device.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shmbus.base.arguments import check_choice, check_number
from trainer_adapter._masked import (
    LOG_RATIO_LIMIT,
    bounded_ratio,
    by_sequence,
    check_operands,
    log_ratio,
    real,
    sent,
    spread,
)
from trainer_adapter.losses import (
    Normalisation,
    PolicyLoss,
    Units,
    check_clip,
    checked_operands,
    clipped_loss,
    policy_mean,
)

__all__ = [
    "Correction",
    "cispo_loss",
    "gspo_loss",
    "importance_correction",
    "overlong_penalty",
    "sequence_ratios",
]

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "reject"]
_LEVELS: Final = ("token", "sequence", "geometric")
_MODES: Final = ("truncate", "mask", "reject")

Lengths = TypeVar("Lengths", Tensor, Any)


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
    level: Level = "token",
    mode: Mode = "truncate",
    high: float = 2.0,
    low: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Weigh tokens by the trainer's probability over the sampling engine's.

    Parameters
    ----------
    trainer_logprobs, inference_logprobs : Tensor [T] or [S, L], floating
        Natural logarithms of the same tokens under the same weights.
    loss_mask : Tensor, bool, same shape
    level : {"token", "sequence", "geometric"}
        The ratio of each token; the product over the trained tokens of a sequence, unbiased with a
        large variance; or their geometric mean, comparable between lengths.
    mode : {"truncate", "mask", "reject"}
        A ratio beyond its bounds becomes the bound (truncated importance sampling, TIS); or 0
        (masked, MIS); or it becomes 0, and every ratio within bounds 1: outliers are left out, and
        the rest is unweighted.
    high : float
        Largest ratio, more than 0. 2 is usual for tokens.
    low : float, optional
        Smallest ratio; "truncate" raises smaller ones to it.
    cu_seqlens : Tensor [S + 1], optional
        Borders of the sequences; packed rows need it for "sequence" and "geometric".

    Returns
    -------
    Correction

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments.

    Notes
    -----
    Sources: token-level TIS, F. Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (https://fengyao.notion.site/off-policy-rl); sequence-level TIS and MIS,
    and the geometric mean, J. Liu et al. 2025, "When Speed Kills Stability"
    (https://richardli.xyz/rl-collapse). Bounds on both sides of masked tokens are IcePop's (Ling
    Team 2025, arXiv:2510.18855). Reference: TRL's ``vllm_importance_sampling_mode``, with the equal
    modes "token_truncate", "token_mask", "sequence_truncate" and "sequence_mask", and verl's
    rollout correction.
    """
    check_choice("level", level, _LEVELS, "'token' is usual")
    check_choice("mode", mode, _MODES, "'truncate' is usual")
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
        if level == "token":
            ratio = bounded_ratio(trainer_logprobs, inference_logprobs, loss_mask)
        else:
            difference = log_ratio(trainer_logprobs, inference_logprobs, loss_mask)
            ratio = spread(
                _joined(difference, loss_mask, cu_seqlens, mean=level == "geometric").exp(),
                difference,
                cu_seqlens,
            )
        least = 0.0 if low is None else low
        out = loss_mask & ((ratio > high) | (ratio < least))
        if mode == "truncate":
            weights = ratio.clamp(least, high)
        else:
            inside = torch.ones_like(ratio) if mode == "reject" else ratio
            weights = torch.where(out, 0.0, inside)
        weights = torch.where(loss_mask, weights, 1.0)
        return _correction(weights, ratio, out, loss_mask)


def _correction(weights: Tensor, ratio: Tensor, out: Tensor, loss_mask: Tensor) -> Correction:
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


def sequence_ratios(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute GSPO's ratio of each sequence: the geometric mean of those of its tokens.

    ``s = exp(mean(logprobs - old_logprobs))`` over the trained tokens (Zheng et al. 2025, "Group
    Sequence Policy Optimization", arXiv:2507.18071, equation 7).

    Parameters
    ----------
    logprobs, old_logprobs : Tensor [T] or [S, L], floating
        Natural logarithms. Gradients flow to `logprobs` only.
    loss_mask : Tensor, bool, same shape
    cu_seqlens : Tensor [S + 1], optional
        Borders of the sequences; packed rows need it.

    Returns
    -------
    Tensor [S]
        1 for a sequence that trains no token.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit together.
    """
    old_logprobs = sent("old_logprobs", old_logprobs)
    check_operands(loss_mask, logprobs=logprobs, old_logprobs=old_logprobs)
    difference = log_ratio(logprobs, old_logprobs.detach(), loss_mask)
    return _joined(difference, loss_mask, cu_seqlens, mean=True).exp()


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Tensor | None = None,
    normalisation: Normalisation = "sequence",
    denominator: float | Tensor | None = None,
    sample_of: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> PolicyLoss:
    """Compute the policy loss of GSPO: a clipped ratio per sequence.

    ``-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)`` with `sequence_ratios` as ``s`` (Zheng
    et al. 2025, arXiv:2507.18071, equation 5). Computed by tokens as GSPO-token (equations 13 and
    14): with equal advantages within a sequence, value and gradient are GSPO's; with different
    advantages each token uses its own.

    Parameters
    ----------
    logprobs, old_logprobs, advantages, loss_mask, weights : Tensor [T] or [S, L]
        As for `policy_loss`.
    cu_seqlens : Tensor [S + 1], optional
        Borders of the sequences; packed rows need it.
    clip_low, clip_high : float
        Limits of a sequence's ratio below and above 1; by default from the paper, section 5.1.
    normalisation, denominator, sample_of, sample_tokens
        As for `aggregate_loss`; "sequence" is GSPO's.

    Returns
    -------
    PolicyLoss

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments.
    """
    check_clip(clip_low, clip_high, "3e-4 and 4e-4 are GSPO's")
    old_logprobs = checked_operands(logprobs, old_logprobs, advantages, loss_mask, weights)
    present = real(logprobs, loss_mask)
    with torch.no_grad():
        ratios = sequence_ratios(logprobs, old_logprobs, loss_mask, cu_seqlens=cu_seqlens)
        fixed = spread(ratios, present, cu_seqlens)
    # Value: the sequence's ratio. Gradient: the gradient of the token's logprob, times the ratio.
    ratio = fixed * (present - present.detach()).exp()
    units = Units(normalisation, cu_seqlens, denominator, sample_of, sample_tokens)
    return clipped_loss(ratio, advantages, loss_mask, (clip_low, clip_high), weights, units)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    high: float = 5.0,
    low: float = 0.0,
    weights: Tensor | None = None,
    normalisation: Normalisation = "token",
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
    sample_of: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> PolicyLoss:
    """Compute the policy loss of CISPO: clipped ratios weigh log probabilities.

    ``-sg(clip(r, low, high)) * A * logprobs`` for each token, with ``r = exp(logprobs -
    old_logprobs)`` and no gradient through the clipped ratio: no token loses its gradient, as a
    clipped token does in `policy_loss` (MiniMax 2025, "MiniMax-M1", arXiv:2506.13585, equations 4
    and 5). The paper has no lower bound.

    Parameters
    ----------
    logprobs, old_logprobs, advantages, loss_mask, weights : Tensor [T] or [S, L]
        As for `policy_loss`.
    high, low : float
        Bounds of the ratio itself: the paper's 1 + epsilon_high and 1 - epsilon_low. TRL calls the
        upper one ``epsilon_high``.
    normalisation, cu_seqlens, denominator, sample_of, sample_tokens
        As for `aggregate_loss`; "token" is CISPO's.

    Returns
    -------
    PolicyLoss
        `clip_fraction` is the share of tokens whose ratio was cut.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit together.
    """
    check_number("low", low)
    check_number("high", high)
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low and high: expected 0 <= low <= 1 <= high, got {low} and {high}; 0 and 5 are usual"
        )
    old_logprobs = checked_operands(logprobs, old_logprobs, advantages, loss_mask, weights)
    with torch.no_grad():
        ratio = bounded_ratio(logprobs, old_logprobs, loss_mask)
        factor = ratio.clamp(low, high) * real(advantages, loss_mask)
        if weights is not None:
            factor = factor * real(weights, loss_mask)
        cut = loss_mask & ((ratio < low) | (ratio > high))
    losses = -factor * real(logprobs, loss_mask)
    units = Units(normalisation, cu_seqlens, denominator, sample_of, sample_tokens)
    return policy_mean(losses, cut, ratio, loss_mask, units)


def overlong_penalty(lengths: Lengths, *, longest: int, buffer: int, scale: float = 1.0) -> Lengths:
    """Compute DAPO's soft punishment of overlong samples, to add to their scores.

    0 up to ``longest - buffer`` tokens, then falling in a straight line to ``-scale`` at `longest`,
    constant beyond (Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13, with L_max = `longest` and
    L_cache = `buffer`; there 20,480 and 4,096).

    Parameters
    ----------
    lengths : Tensor, array or sequence of int
        Tokens of the samples' completions.
    longest : int
        From here on a sample gets the full punishment.
    buffer : int
        Number of tokens of its growth before `longest`; 1 to `longest`.
    scale : float
        The largest punishment, in units of the score.

    Returns
    -------
    Tensor or array
        The same number of values, 0 or less; float64, a tensor for a tensor.

    Raises
    ------
    ValueError
        For a buffer not below `longest`, or a non-positive scale.
    """
    for name, value in (("longest", longest), ("buffer", buffer), ("scale", scale)):
        check_number(name, value)
    if not 0 < buffer <= longest or not scale > 0:
        raise ValueError(
            f"buffer and scale: expected 0 < buffer <= {longest} and scale > 0, got {buffer} and "
            f"{scale}; a fifth of longest and 1 are DAPO's"
        )
    if isinstance(lengths, Tensor):
        over = lengths.to(torch.float64) - (longest - buffer)
        return -scale * (over / buffer).clamp(0.0, 1.0)
    counted = np.asarray(lengths, np.float64) - (longest - buffer)
    return -scale * np.clip(counted / buffer, 0.0, 1.0)


# --- shared parts


def _joined(
    difference: Tensor, loss_mask: Tensor, cu_seqlens: Tensor | None, *, mean: bool
) -> Tensor:
    """Sum the log ratios of each sequence, or take their mean, cut in size."""
    sums, counts = by_sequence(difference, loss_mask, cu_seqlens)
    joined = sums / counts.clamp(min=1) if mean else sums
    return joined.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
