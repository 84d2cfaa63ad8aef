"""Sampling masks: the candidate ids of each token, by top-k, top-p or a grammar.

Such a policy is the softmax over these ids alone; `token_logprobs(support=)` replays it.

Invariant: the ids of the tokens lie consecutively in the order of the packed tokens, and a mask
without the sampled token never reaches a loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbus.batch.gather import PackPlan
from trainer_adapter.batches.extra_fields import COUNTS, ExtraFields
from trainer_adapter.batches.finite import SampleError

__all__ = ["support_offsets"]


class SupportError(SampleError):
    """A sample with an invalid sampling mask."""


def support_offsets(
    wanted: ExtraFields,
    extra: dict[str, Any],
    offsets: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    plan: PackPlan,
) -> dict[str, torch.Tensor]:
    """Return the start of each token's part of the "support" fields, after their checks."""
    found = {}
    lengths = plan.samples[3]
    for name, source in wanted.supports.items():
        ids, counts = extra[name].numpy(), extra[name + COUNTS].numpy()
        borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        if (at := _first(counts < 0)) >= 0:
            raise _error(plan, at, source + COUNTS, "0 or more", str(counts[at]))
        own = offsets[name].diff().numpy()
        ends = np.cumsum(lengths)
        for sample, (end, there) in enumerate(zip(ends.tolist(), own.tolist(), strict=True)):
            said = int(borders[end] - borders[end - lengths[sample]])
            if said != there:
                expected = f"{said} ids, the sum of {source + COUNTS}"
                raise _error(plan, end - 1, source, expected, f"{there} of them")
        owners = np.repeat(np.arange(len(counts)), counts)
        tokens, mask = tensors["tokens"].numpy(), tensors["loss_mask"].numpy()
        sampled = np.zeros(len(counts), bool)
        sampled[owners[ids == tokens[owners]]] = True
        if (at := _first(mask & (counts > 0) & ~sampled)) >= 0:
            raise _error(
                plan, at, source, "the token that was sampled among its ids",
                f"{tokens[at]} among none of {counts[at]}",
            )  # fmt: skip
        found[name] = torch.from_numpy(borders)
    return found


def _first(wrong: NDArray[np.bool_]) -> int:
    at = int(wrong.argmax()) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else -1


def _error(plan: PackPlan, token: int, field: str, expected: str, got: str) -> SupportError:
    ends = np.cumsum(plan.samples[3])
    sample = int(np.searchsorted(ends, token, side="right"))
    t = plan.trajectories[sample]
    at = token - int(ends[sample] - plan.samples[3][sample])
    return SupportError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field {field!r}: "
        f"expected {expected}, got {got}, at token {at}; put what "
        "the engine sampled from, or leave the field out of extra_fields",
        sample,
    )
