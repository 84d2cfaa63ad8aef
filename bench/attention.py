"""Attention on the CPU: `varlen_attention` beside the two plain strategies, on a grid of lengths.

The plain strategies are what people write: one SDPA call a sequence, and buckets of powers of two,
each padded to its longest. Causal, float32, one thread, forward and backward; the three take turns,
and the row stands beside the faster of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench import program
from bench.row import Row
from trainer_adapter import varlen_attention
from trainer_adapter.compat import pad_input, unpad_input

__all__ = ["main"]

TURNS: Final = 7
HEADS, HEAD_DIM = 4, 64

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixes() -> dict[str, NDArray[np.int64]]:
    """Lengths of the grid: few and many, short and long, alike and mixed."""
    rng = np.random.default_rng(0)
    return {
        "2 of 1,500": np.full(2, 1500),
        "8 of 512": np.full(8, 512),
        "64 of 64": np.full(64, 64),
        "512 of 16": np.full(512, 16),
        "16 log-normal, mean 250": np.maximum(1, rng.lognormal(5.2, 0.8, 16)).astype(np.int64),
        "64 log-normal, mean 90": np.maximum(1, rng.lognormal(4.2, 0.8, 64)).astype(np.int64),
        "300 of 1 to 32": rng.integers(1, 33, 300),
        "300 of 16 to 128": rng.integers(16, 129, 300),
        "one of 1,200 and 200 of 8 to 24": np.concatenate([[1200], rng.integers(8, 25, 200)]),
        "40 of 200 to 220": rng.integers(200, 221, 40),
        "1,000 of 1 to 8": rng.integers(1, 9, 1000),
    }


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure each mix, and the worst of them, which the target is about."""
    torch.set_num_threads(1)
    turns = options.repetitions or (1 if options.tiny else TURNS)
    chosen = dict(list(mixes().items())[6:7]) if options.tiny else mixes()
    rows = [_one_mix(name, lengths, turns) for name, lengths in chosen.items()]
    worst = max(rows, key=lambda row: row.ratio or 0.0)
    return [*rows, dataclasses.replace(worst, name="attention", title=f"the worst: {worst.title}")]


def _one_mix(name: str, lengths: NDArray[np.int64], turns: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    shape = (int(lengths.sum()), HEADS, HEAD_DIM)
    operands = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape, generator=generator)
    ways = {
        "the plan": _plan(lengths),
        "one by one": _one_by_one(lengths),
        "padded buckets": _buckets(lengths),
    }

    def step(attend: Attend) -> tuple[torch.Tensor, ...]:
        out = attend(*operands)
        return (out, *torch.autograd.grad(out, operands, upstream))

    wanted = step(ways["one by one"])
    took: dict[str, list[float]] = {way: [] for way in ways}
    for attend in ways.values():
        for mine, theirs in zip(step(attend), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    for _ in range(turns):
        for way, attend in ways.items():
            began = time.perf_counter()
            step(attend)
            took[way].append(1e3 * (time.perf_counter() - began))
    ours = took.pop("the plan")
    better = min(took, key=lambda way: statistics.median(took[way]))
    return Row(
        name=f"attention-{name}", title=f"attention over {name}", unit="ms", values=tuple(ours),
        beside=better, beside_values=tuple(took[better]),
    )  # fmt: skip


def _plan(lengths: NDArray[np.int64]) -> Attend:
    borders = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
    longest = int(lengths.max())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q, k, v, borders, borders, longest, longest, window_size=(-1, 0))

    return attend


def _one_by_one(lengths: NDArray[np.int64]) -> Attend:
    sizes = lengths.tolist()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for parts in zip(*(torch.split(x, sizes) for x in (q, k, v)), strict=True):
            rows, keys, values = (x.transpose(0, 1)[None] for x in parts)
            out = torch.nn.functional.scaled_dot_product_attention(
                rows, keys, values, is_causal=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


def _buckets(lengths: NDArray[np.int64]) -> Attend:
    """Sequences by the next power of two; causal, so that padding behind them changes nothing."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    buckets = []
    for power in np.unique(powers):
        members = np.flatnonzero(powers == power)
        own = lengths[members]
        mask = torch.from_numpy(np.arange(own.max()) < own[:, None])
        rows = np.concatenate(
            [np.arange(n) + at for at, n in zip(starts[members], own, strict=True)]
        )
        _, places, *_ = unpad_input(mask[..., None].float(), mask)
        buckets.append((torch.from_numpy(rows), places, tuple(mask.shape)))
    order = torch.cat([rows for rows, _, _ in buckets])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for rows, places, shape in buckets:
            queries, keys, values = (
                pad_input(x[rows], places, *shape).transpose(1, 2) for x in (q, k, v)
            )
            out = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True
            )
            outs.append(out.transpose(1, 2).flatten(0, 1)[places])
        return torch.cat(outs)[back]

    return attend


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("attention", program.parser_of("attention", __doc__), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
