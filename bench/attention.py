"""Attention on the CPU: the plan against the two plain strategies, on a grid of length mixes.

``python -m bench.attention --output bench/results/NAME.json``. The plain strategies are what people
write: one SDPA call a sequence, and buckets of powers of two, each padded to its longest. The plan
of `varlen_attention` has to be at most 1.05 times the better of them, forward and backward, on
every mix.

Method: causal, float32, one thread. The three take turns, and each figure is the smallest of its
turns: what disturbs a turn only ever makes it slower.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench import command, machine
from bench.fitness import Need
from bench.needs_torch import torch
from trainer_adapter import pad_input, unpad_input, varlen_attention

__all__ = ["main", "plot"]

TARGET: Final = 1.05
#: Seconds that one mix may take.
MIX_SECONDS: Final = 4.0
MIN_TURNS: Final = 5

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


@command.orderly("attention")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the JSON; exit status 1 where a mix misses the target."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    parser.add_argument("--plot", type=command.picture, help="where a picture goes")
    parser.add_argument("--heads", type=command.at_least_one, default=4)
    parser.add_argument("--head-dim", type=command.at_least_one, default=64)
    parser.add_argument(
        "--seconds", type=command.positive, default=MIX_SECONDS, help="for each mix"
    )
    options = parser.parse_args(argv)
    if command.refused(Need(), "attention"):
        return 1
    torch.set_num_threads(1)
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    rows = []
    for name, lengths in mixes().items():
        row = {"mix": name, **_one_mix(lengths, options)}
        rows.append(row)
        print(
            f"{name:34} plan {row['plan_ms']:7.2f} ms   one by one {row['one_by_one_ms']:7.2f}   "
            f"buckets {row['buckets_ms']:7.2f}   {row['ratio']:.3f} of the better",
            flush=True,
        )
    met = all(row["ratio"] <= TARGET for row in rows)
    print(f"target: at most {TARGET} on every mix: {'met' if met else 'NOT met'}")
    result = {
        "machine": facts,
        "settings": {"heads": options.heads, "head_dim": options.head_dim, "threads": 1},
        "target": TARGET,
        "rows": rows,
    }
    if status := command.keep(options.output, result, "attention"):
        return status
    if options.plot:
        plot(result, options.plot)
    return 0 if met else 1


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw each strategy's time over that of the better plain one, a mix a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for key, marker in (("plan", "o"), ("one_by_one", "|"), ("buckets", "x")):
        better = [min(row["one_by_one_ms"], row["buckets_ms"]) for row in rows]
        ratios = [row[f"{key}_ms"] / least for row, least in zip(rows, better, strict=True)]
        axes.plot(ratios, range(len(rows)), marker, label=key.replace("_", " "))
    axes.axvline(result["target"], color="C3", linestyle=":", label="target of the plan")
    axes.set_yticks(range(len(rows)), [row["mix"] for row in rows], fontsize=8)
    axes.set(xlabel="time over the better plain strategy", xscale="log")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _one_mix(lengths: NDArray[np.int64], options: argparse.Namespace) -> dict[str, Any]:
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(0)
    shape = (total, options.heads, options.head_dim)
    operands = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape, generator=generator)
    ways = {
        "plan": _plan(lengths),
        "one_by_one": _one_by_one(lengths),
        "buckets": _buckets(lengths),
    }

    def step(attend: Attend) -> tuple[torch.Tensor, ...]:
        out = attend(*operands)
        return (out, *torch.autograd.grad(out, operands, upstream))

    wanted = step(ways["one_by_one"])
    for attend in ways.values():
        for mine, theirs in zip(step(attend), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    best = dict.fromkeys(ways, float("inf"))
    began = time.perf_counter()
    turns = 0
    while turns < MIN_TURNS or time.perf_counter() - began < options.seconds:
        turns += 1
        for name, attend in ways.items():
            start = time.perf_counter()
            step(attend)
            best[name] = min(best[name], time.perf_counter() - start)
    better = min(best["one_by_one"], best["buckets"])
    return {
        "sequences": len(lengths),
        "tokens": total,
        "turns": turns,
        **{f"{name}_ms": seconds * 1e3 for name, seconds in best.items()},
        "ratio": best["plan"] / better,
    }


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


if __name__ == "__main__":
    sys.exit(main())
