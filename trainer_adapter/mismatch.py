"""Difference between the engine's and the trainer's logprobs: policy change and precision gap.

An engine in bfloat16 and a trainer in float32 disagree about the same tokens under the same
weights. PPO's clip takes that precision gap for a policy change and removes gradients.

Invariants: filler, where the mask is False, is never exponentiated and never counted, nan included;
nothing makes the host wait for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_adapter._masked import bounded_ratio, check_operands, log_ratio, sent
from trainer_adapter.losses import check_clip

__all__ = ["LogprobMismatch", "logprob_mismatch"]


class LogprobMismatch(NamedTuple):
    """Differences of logprobs over the trained tokens of a batch; 0-d tensors without a graph.

    Attributes
    ----------
    mean, p99 : Tensor []
        Mean and 99th percentile of ``|trainer - engine|``, in nats a token.
    k3 : Tensor []
        Estimate of the KL divergence of the trainer's policy from the engine's, ``mean(r - 1 -
        log r)`` with ``r`` the trainer's over the engine's probability (Schulman 2020,
        "Approximating KL Divergence").
    clipped : Tensor []
        Share of the tokens whose gradient `policy_loss` clips to 0.
    policy_change, precision_gap : Tensor []
        Mean absolute difference by cause, over the tokens with a logprob at the engine's dtype: new
        weights, and rounding under equal weights; nan without such a token.
    gap_share : Tensor []
        ``precision_gap / (precision_gap + policy_change)``, in [0, 1]; nan if both are 0 or nan.
    """

    mean: Tensor
    p99: Tensor
    k3: Tensor
    clipped: Tensor
    policy_change: Tensor
    precision_gap: Tensor
    gap_share: Tensor

    def metrics(self, prefix: str = "mismatch/") -> dict[str, float]:
        """Return the figures as floats for a logger; waits for the device.

        Parameters
        ----------
        prefix : str
            Before each name.

        Returns
        -------
        dict of str to float
            Without figures of nan.
        """
        values = torch.stack([value.float() for value in self]).tolist()
        named = zip(self._fields, values, strict=True)
        return {prefix + name: value for name, value in named if value == value}


def logprob_mismatch(
    logprobs: Tensor,
    batch: Any,
    *,
    at_engine_dtype: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LogprobMismatch:
    """Compare the trainer's logprobs of a batch with those that the engine recorded.

    Parameters
    ----------
    logprobs : Tensor [T] or [S, L], floating
        The trainer's natural logarithms, aligned to their own token.
    batch : Batch or MicroBatch
        Its `logprobs`, `loss_mask` and `advantages` count.
    at_engine_dtype : Tensor, same shape, optional
        Logprobs of a second forward pass of the same weights at the engine's dtype, for instance
        under ``torch.autocast(device, torch.bfloat16)``; nan where not computed. Splits the
        difference into policy change and precision gap. A micro-batch every 50 steps is enough.
    clip_low, clip_high : float
        As for `policy_loss`.

    Returns
    -------
    LogprobMismatch

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit together; a batch without logprobs.

    Notes
    -----
    Sources: Qi et al. 2025, "Defeating the Training-Inference Mismatch via FP16"
    (arXiv:2510.26788); the k3 estimate as in `kl_estimate`.

    Examples
    --------
    >>> with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    ...     low = logprobs_of(model, part)
    >>> wandb.log(logprob_mismatch(logprobs, part, at_engine_dtype=low).metrics())
    """
    check_clip(clip_low, clip_high)
    recorded, mask = sent("batch.logprobs", batch.logprobs), batch.loss_mask
    check_operands(mask, logprobs=logprobs, recorded=recorded, advantages=batch.advantages)
    with torch.no_grad():
        difference = log_ratio(logprobs, recorded, mask)
        ratio = bounded_ratio(logprobs, recorded, mask)
        up = (batch.advantages > 0) & (ratio > 1 + clip_high)
        down = (batch.advantages < 0) & (ratio < 1 - clip_low)
        change = gap = difference.new_tensor(torch.nan)
        if at_engine_dtype is not None:
            check_operands(mask, at_engine_dtype=at_engine_dtype)
            both = mask & at_engine_dtype.isfinite()
            change = _mean(log_ratio(at_engine_dtype, recorded, both).abs(), both, empty=torch.nan)
            gap = _mean(log_ratio(logprobs, at_engine_dtype, both).abs(), both, empty=torch.nan)
        return LogprobMismatch(
            mean=_mean(difference.abs(), mask),
            p99=_percentile(difference.abs(), mask, 0.99),
            k3=_mean(ratio - 1 - ratio.log(), mask),
            clipped=_mean((up | down).to(ratio.dtype), mask),
            policy_change=change,
            precision_gap=gap,
            gap_share=gap / (gap + change),
        )


def _mean(values: Tensor, mask: Tensor, empty: float = 0.0) -> Tensor:
    count = mask.sum()
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    return torch.where(count > 0, mean, empty)


def _percentile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the value not exceeded by `share` of the masked values; 0 without values."""
    padded = torch.nn.functional.pad(torch.where(mask, values, -1.0).flatten(), (1, 0), value=-1.0)
    ordered = padded.sort().values
    above = ((1 - share) * mask.sum()).floor().long()
    return ordered.gather(0, (len(ordered) - 1 - above).clamp(min=0)[None])[0].clamp(min=0)
