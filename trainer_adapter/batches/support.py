"""Sampling masks: the candidate ids of each token, by top-k, top-p or a grammar.

Such a policy is the softmax over these ids alone; `token_logprobs(support=)` replays it.

Invariant: the ids of the tokens lie consecutively in the order of the packed tokens, and a mask
without the sampled token never reaches a loss.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.batches.extra_fields import COUNTS, ExtraFields
from trainer_adapter.batches.finite import SampleError

__all__ = ["join_support"]


class SupportError(SampleError):
    """A sample with an invalid sampling mask."""


def join_support(
    batch: Batch, wanted: ExtraFields, lengths: NDArray[np.int64], samples: list[shmbus.Trajectory]
) -> None:
    """Give each token of a packed batch its part of the "support" fields, after their checks."""
    for name, source in wanted.supports.items():
        ids, counts = batch.extra[name].numpy(), batch.extra[name + COUNTS].numpy()
        borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        if (at := _first(counts < 0)) >= 0:
            raise _error(samples, lengths, at, source + COUNTS, "0 or more", str(counts[at]))
        own = batch.extra_offsets[name].diff().numpy()
        ends = np.cumsum(lengths)
        for sample, (end, there) in enumerate(zip(ends.tolist(), own.tolist(), strict=True)):
            said = int(borders[end] - borders[end - lengths[sample]])
            if said != there:
                at = end - 1
                expected = f"{said} ids, the sum of {source + COUNTS}"
                raise _error(samples, lengths, at, source, expected, f"{there} of them")
        owners = np.repeat(np.arange(len(counts)), counts)
        tokens, mask = batch.tokens.numpy(), batch.loss_mask.numpy()
        found = np.zeros(len(counts), bool)
        found[owners[ids == tokens[owners]]] = True
        if (at := _first(mask & (counts > 0) & ~found)) >= 0:
            raise _error(
                samples, lengths, at, source, "the token that was sampled among its ids",
                f"{tokens[at]} among none of {counts[at]}",
            )  # fmt: skip
        batch.extra_offsets[name] = torch.from_numpy(borders)


def _first(wrong: NDArray[np.bool_]) -> int:
    at = int(wrong.argmax()) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else -1


def _error(
    samples: list[shmbus.Trajectory],
    lengths: NDArray[np.int64],
    token: int,
    field: str,
    expected: str,
    got: str,
) -> SupportError:
    ends = np.cumsum(lengths)
    sample = int(np.searchsorted(ends, token, side="right"))
    t = samples[sample]
    return SupportError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field {field!r}: "
        f"expected {expected}, got {got}, at token {token - int(ends[sample] - lengths[sample])}; "
        "put what the engine sampled from, or leave the field out of extra_fields",
        sample,
    )
