"""Rows of tokens for losses and corrections: packed, padded, masked, with poison as filler."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

LENGTHS = [5, 1, 0, 7, 3]
BORDERS = [0, *itertools.accumulate(LENGTHS)]
CU_SEQLENS = torch.tensor(BORDERS, dtype=torch.int32)
TOKENS = sum(LENGTHS)
POISON = [math.nan, math.inf, -math.inf, 1e30]


class Row:
    """Random logprobs, advantages and mask; the sequence of one token has no token to train."""

    def __init__(self, seed: int, spread: float = 0.3, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float = 1.0) -> Tensor:
            return (torch.randn(TOKENS, generator=generator, dtype=torch.float64) * scale).to(dtype)

        self.old = normal() - 3
        self.new = (self.old + normal(spread)).requires_grad_()
        self.reference = self.old + normal(0.5)
        self.advantages = normal()
        self.weights = normal().abs()
        self.mask = torch.rand(TOKENS, generator=generator) < 0.7
        self.mask[5] = False
        self.mask[[0, 7]] = True

    def poisoned(self) -> Row:
        """Poison the places outside of the mask."""
        for at, poison in zip((~self.mask).nonzero().flatten().tolist(), POISON, strict=False):
            self.old[at] = poison
        return self

    def trained(self) -> list[list[int]]:
        return [[i for i in range(a, b) if self.mask[i]] for a, b in itertools.pairwise(BORDERS)]


def padded(values: Tensor, filler: float = 0.0) -> Tensor:
    rows = torch.full((len(LENGTHS), max(LENGTHS)), filler).to(values.dtype)
    for row, (start, end) in zip(rows, itertools.pairwise(BORDERS), strict=True):
        row[: end - start] = values.detach()[start:end]
    return rows
