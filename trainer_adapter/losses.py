"""Pieces of a policy-gradient loss on packed tensors: pure functions, no state, no model.

Invariants:

- Filler, where `loss_mask` is False, is never exponentiated and never counted, nan included:
  replaced by 0 before any arithmetic with a possible nan in result or gradient.
- At least float32 inside, for any dtype of the operands.
- The host never waits for the device.
- A mask without tokens gives a loss of 0 with gradients of 0, never nan.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, get_args

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
)

__all__ = [
    "PolicyLoss",
    "aggregate_loss",
    "kl_estimate",
    "policy_loss",
]

Normalisation = Literal["token", "sequence", "sample", "constant"]
_NORMALISATIONS: Final = get_args(Normalisation)


class PolicyLoss(NamedTuple):
    """A policy loss, and two figures to monitor.

    Attributes
    ----------
    loss : Tensor []
        To call ``backward`` on.
    clip_fraction : Tensor []
        Share of the tokens whose gradient was clipped to 0, in [0, 1]; no graph.
    mean_ratio : Tensor []
        Mean of new over old probability; no graph. Far from 1 means stale samples, or logprobs
        that are not aligned with their tokens.
    """

    loss: Tensor
    clip_fraction: Tensor
    mean_ratio: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
    normalisation: Normalisation = "token",
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
    sample_of: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> PolicyLoss:
    """Compute the clipped policy-gradient loss.

    For each token, ``-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`` with
    ``r = exp(logprobs - old_logprobs)`` (Schulman et al. 2017, arXiv:1707.06347; two bounds as in
    DAPO, Yu et al. 2025, arXiv:2503.14476). The logarithm of ``r`` is cut at 20 in size.

    Parameters
    ----------
    logprobs, old_logprobs : Tensor [T] or [S, L], floating
        Natural logarithms, aligned to their own token. Gradients flow to `logprobs` only. The None
        of a batch without logprobs is a ValueError.
    advantages : Tensor, same shape
    loss_mask : Tensor, bool, same shape
    clip_low, clip_high : float
        How far the ratio may fall below and rise above 1.
    weights : Tensor, same shape, optional
        Factor of each token's loss, for instance from `importance_correction`.
    normalisation, cu_seqlens, denominator, sample_of, sample_tokens
        As for `aggregate_loss`.

    Returns
    -------
    PolicyLoss

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit together.
    """
    check_clip(clip_low, clip_high)
    old_logprobs = sent("old_logprobs", old_logprobs)
    constants = {"old_logprobs": old_logprobs, "advantages": advantages}
    if weights is not None:
        constants["weights"] = weights
    check_operands(loss_mask, logprobs=logprobs, **constants)
    ratio = bounded_ratio(logprobs, old_logprobs.detach(), loss_mask)
    gain = real(advantages.detach(), loss_mask)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = -torch.minimum(ratio * gain, clipped * gain)
    if weights is not None:
        losses = losses * real(weights.detach(), loss_mask)
    loss = aggregate_loss(
        losses,
        loss_mask,
        normalisation=normalisation,
        cu_seqlens=cu_seqlens,
        denominator=denominator,
        sample_of=sample_of,
        sample_tokens=sample_tokens,
    )
    with torch.no_grad():
        count = loss_mask.sum().clamp(min=1)
        cut = loss_mask & (clipped * gain < ratio * gain)
        mean_ratio = torch.where(loss_mask, ratio, 0.0).sum() / count
    return PolicyLoss(loss, cut.sum() / count, mean_ratio)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for invalid bounds of a ratio."""
    check_number("clip_low", clip_low)
    check_number("clip_high", clip_high)
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(
            f"clip_low and clip_high: expected 0 <= clip_low <= 1 and clip_high >= 0, got "
            f"{clip_low} and {clip_high}; 0.2 is usual"
        )


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor | None,
    loss_mask: Tensor,
    *,
    kind: Literal["k1", "k2", "k3"] = "k3",
) -> Tensor:
    """Estimate KL(policy || reference) for each token sampled by the policy.

    With ``d = reference_logprobs - logprobs``: k1 is ``-d`` (unbiased, of either sign), k2 is ``d
    ** 2 / 2`` (biased, small variance), k3 is ``exp(d) - 1 - d`` (unbiased, not negative, used in
    GRPO). Source: J. Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.

    Parameters
    ----------
    logprobs, reference_logprobs : Tensor, one shape, floating
        Natural logarithms. Gradients flow to `logprobs` only.
    loss_mask : Tensor, bool, same shape
    kind : {"k1", "k2", "k3"}

    Returns
    -------
    Tensor, same shape, in nats
        0 at filler. Pass it to `aggregate_loss`.

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments.
    """
    check_choice("kind", kind, ("k1", "k2", "k3"), "'k3' is GRPO's")
    reference_logprobs = sent("reference_logprobs", reference_logprobs)
    check_operands(loss_mask, logprobs=logprobs, reference_logprobs=reference_logprobs)
    difference = log_ratio(reference_logprobs.detach(), logprobs, loss_mask)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return 0.5 * difference * difference
    bounded = difference.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(bounded) - bounded


def aggregate_loss(
    losses: Tensor,
    loss_mask: Tensor,
    *,
    normalisation: Normalisation = "token",
    cu_seqlens: Tensor | None = None,
    denominator: float | Tensor | None = None,
    sample_of: Tensor | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """Reduce losses of tokens to one number.

    Parameters
    ----------
    losses : Tensor [T] or [S, L], floating
    loss_mask : Tensor, bool, same shape
    normalisation : {"token", "sequence", "sample", "constant"}
        "token": the sum over the number of tokens, with equal weight per token (DAPO,
        arXiv:2503.14476). "sequence": the mean over sequences of the mean over their tokens (GRPO,
        arXiv:2402.03300); a sequence without tokens counts for nothing. "sample": the same over
        samples, possibly of several sequences, like an agent's. "constant": the sum over
        `denominator`, independent of lengths (Dr. GRPO, arXiv:2503.20783).
    cu_seqlens : Tensor [S + 1], int32 or int64, optional
        Borders of the sequences; "sequence" and "sample" need it for packed losses. Tokens after
        the last border belong to no sequence.
    denominator : float or Tensor [], optional
        Divisor in place of the tokens, sequences or samples here: their number over the ranks and
        micro-batches of a step, for exact gradient accumulation. 0 is allowed for a mask without
        tokens.
    sample_of : Tensor [S], integers, optional
        The sample of each sequence, from `Batch.sample_of`; "sample" needs `sample_of` or
        `sample_tokens`.
    sample_tokens : Tensor [S], optional
        The trained tokens of each sequence's sample, if some of its sequences lie elsewhere: from
        `MicroBatch.sample_tokens`.

    Returns
    -------
    Tensor []

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments.
    """
    hint = "'token' weighs all tokens the same"
    check_choice("normalisation", normalisation, _NORMALISATIONS, hint)
    check_operands(loss_mask, losses=losses)
    kept = real(losses, loss_mask)
    if normalisation == "token":
        total, count = kept.sum(), loss_mask.sum()
    elif normalisation == "sequence":
        sums, counts = by_sequence(kept, loss_mask, cu_seqlens)
        total, count = (sums / counts.clamp(min=1)).sum(), (counts > 0).sum()
    elif normalisation == "sample":
        sums, counts = by_sequence(kept, loss_mask, cu_seqlens)
        whole = _whole_samples(counts, sample_of) if sample_tokens is None else sample_tokens
        if whole.shape != counts.shape:
            raise ValueError(
                f"sample_tokens: expected one number for each of {len(counts)} sequences, got "
                f"shape {tuple(whole.shape)}; pass part.sample_tokens"
            )
        whole = whole.clamp(min=1)
        # A sample with sequences elsewhere counts by its share here.
        total, count = (sums / whole).sum(), (counts / whole).sum()
    else:
        if denominator is None:
            raise ValueError(
                "denominator: expected a number with normalisation='constant', got None; "
                "pass for instance sequences * longest completion"
            )
        total, count = kept.sum(), loss_mask.sum()
    if denominator is None:
        return total / torch.where(count > 0, count, 1)
    if not isinstance(denominator, Tensor):
        check_number("denominator", denominator, "a number or a tensor")
        if not (math.isfinite(denominator) and denominator >= 0):
            raise ValueError(
                f"denominator: expected a finite number from 0 on, got {denominator}; "
                "pass for instance part.batch_loss_tokens"
            )
        denominator = total.new_full((), denominator)
    elif denominator.numel() != 1:
        raise ValueError(
            f"denominator: expected a tensor of one element, got shape {tuple(denominator.shape)}"
        )
    # Without trained tokens, the whole batch's number of tokens may be 0 too.
    return total / torch.where(count > 0, denominator, 1)


def _whole_samples(counts: Tensor, sample_of: Tensor | None) -> Tensor:
    """Return for each sequence the trained tokens of its sample."""
    if sample_of is None or sample_of.shape != counts.shape:
        got = "None" if sample_of is None else f"shape {tuple(sample_of.shape)}"
        raise ValueError(
            f"sample_of: expected the sample of each of {len(counts)} sequences with "
            f"normalisation='sample', got {got}; pass batch.sample_of"
        )
    return samples_sum(counts, sample_of)


def samples_sum(values: Tensor, sample_of: Tensor) -> Tensor:
    """Return for each sequence a value's sum over the sequences of its sample."""
    ordered, order = torch.sort(sample_of)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    number = torch.empty_like(order)
    number[order] = first.cumsum(0) - 1
    return values.new_zeros(len(values)).index_add(0, number, values)[number]
