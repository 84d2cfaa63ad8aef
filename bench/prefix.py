"""A training step with shared prefixes beside plain packing: ``python -m bench.prefix``.

A model of Qwen3-1.7B's shape with random weights takes one step of each layout by turns: forward,
policy loss, backward, AdamW. Both run the same groups off a bus, gradients by checkpointing of
layers, logits of trained tokens alone, bfloat16. What is told beside the seconds is the peak of
memory, and how near both gradients are. A second row has the keys of each path gathered for the
kernel of plain packing, in place of FlexAttention. Without a CUDA device, or with --tiny, it is a
tiny model.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import shmbus
from bench import program
from bench.processes import MeasurementError
from bench.row import Row, skipped
from trainer_adapter.attention import register_with_transformers, transformers_inputs
from trainer_adapter.batches.pack import pack
from trainer_adapter.logprobs import logit_rows, token_logprobs
from trainer_adapter.losses import policy_loss

__all__ = ["main"]

WARM_UP: Final = 2
REPETITIONS: Final = 5
VOCABULARY: Final = 151_936
#: How far the directions of both gradients may be apart: 1 - cosine.
APART: Final = 0.02
#: Ways of attention over shared prefixes, by the end of a row's name.
WAYS: Final = ("", "-paths")


class Mix(NamedTuple):
    """A group: samples, and tokens of its prompt and of each answer."""

    samples: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """For the row."""
        return f"{self.samples}x{self.prompt}+{self.answer}"


MIXES: Final = (Mix(8, 2048, 2048), Mix(16, 8192, 1024))
TINY: Final = (Mix(4, 256, 64),)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure each mix."""
    tiny = options.tiny or not torch.cuda.is_available()
    try:
        model = _model(tiny)
    except ImportError as error:
        return [skipped("prefix", "a step with shared prefixes", str(error))]
    repetitions = options.repetitions or (2 if tiny else REPETITIONS)
    rows = []
    for mix in TINY if tiny else MIXES:
        batches = _batches(mix, model.config.vocab_size, model.device)
        for way in WAYS:
            try:
                rows.append(_one_mix(model, mix, batches, way, repetitions))
            except (MeasurementError, RuntimeError) as error:
                what = f"a step of {mix.name} with shared prefixes{way}"
                rows.append(skipped(f"prefix-{mix.name}{way}", what, f"{error!s:.300}"))
                model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
    return rows


def _model(tiny: bool) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    }  # fmt: skip
    if tiny:
        shape |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**shape),
            attn_implementation=register_with_transformers(),
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _one_mix(model: Any, mix: Mix, batches: dict[str, Any], way: str, repetitions: int) -> Row:
    # By paths it is the kernel that packed rows get; SDPA's buckets where there is none.
    native = "native" if model.device.type == "cuda" else "sdpa"
    backend: Any = native if way else "auto"
    model.set_attn_implementation(register_with_transformers(f"shmbus{way}", backend=backend))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, weight_decay=0.0, fused=model.device.type == "cuda"
    )
    apart = _apart(model, batches)
    if not apart < APART:
        raise MeasurementError(f"{mix.name}: gradients of both layouts are {apart:.1e} apart")
    took: dict[str, list[float]] = {layout: [] for layout in batches}
    peaks = dict.fromkeys(batches, 0.0)
    for turn in range(WARM_UP + repetitions):
        for layout, batch in batches.items():
            seconds, peak = _timed(functools.partial(_step, model, optimizer, batch))
            if turn >= WARM_UP:
                took[layout].append(seconds)
                peaks[layout] = max(peaks[layout], peak)
    tree = batches["prefix"].prefix_tree
    tokens = batches["packed"].num_tokens
    return Row(
        name=f"prefix-{mix.name}{way}",
        title=f"a step of {mix.samples} samples, prompt {mix.prompt:,}, answers {mix.answer:,}"
        + (", keys gathered by paths" if way else ""),
        unit="steps/s",
        values=tuple(1 / each for each in took["prefix"]),
        beside="packed plainly",
        beside_values=tuple(1 / each for each in took["packed"]),
        note=f"{tree.num_rows:,} rows of {tokens:,}; peak {peaks['prefix']:.1f} of "
        f"{peaks['packed']:.1f} GiB",
        figures={
            "rows": tree.num_rows, "tokens": tokens, "peak_gib": peaks, "seconds": took,
            "gradients_apart": apart, "torch": torch.__version__,
        },
    )  # fmt: skip


def _batches(mix: Mix, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Put one group on a bus, and pack it in both layouts."""
    name = f"bench-prefix-{os.getpid()}-{secrets.token_hex(3)}"
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, vocabulary, mix.prompt, np.int32)
    mask = np.arange(mix.prompt + mix.answer) >= mix.prompt
    with (
        shmbus.Bus.create(name, "64MiB"),
        shmbus.Producer(name) as producer,
        shmbus.Consumer(name) as consumer,
    ):
        for index in range(mix.samples):
            answer = rng.integers(0, vocabulary, mix.answer, np.int32)
            producer.put(
                "p", group_size=mix.samples, index=index, score=float(index),
                tokens=np.concatenate([prompt, answer]), loss_mask=mask, timeout=10.0,
            )  # fmt: skip
        groups = consumer.take(1, 10.0)
        return {
            layout: pack(groups, layout=layout, device=device) for layout in ("packed", "prefix")
        }


def _loss(model: Any, batch: Any) -> torch.Tensor:
    rows = logit_rows(batch)
    logits = model(**transformers_inputs(batch), logits_to_keep=rows).logits[0]
    logprobs = token_logprobs(logits, batch, rows=rows)
    return policy_loss(logprobs, logprobs.detach(), batch.advantages, batch.loss_mask).loss


def _step(model: Any, optimizer: Any, batch: Any) -> None:
    _loss(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _apart(model: Any, batches: dict[str, Any]) -> float:
    """Return 1 - the cosine of the gradients of both layouts."""
    found: list[list[torch.Tensor]] = []
    for batch in batches.values():
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]
        found.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    sums = [0.0, 0.0, 0.0]
    for one, other in zip(*found, strict=True):
        a, b = one.float(), other.float()
        for at, product in enumerate((a * b, a * a, b * b)):
            sums[at] += float(product.sum())
    return 1 - sums[0] / math.sqrt(sums[1] * sums[2])


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of some work, and its peak of memory in GiB."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("prefix", program.parser_of("prefix", __doc__), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
