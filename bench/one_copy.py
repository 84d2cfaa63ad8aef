"""One model for trainer and engine on a device: ``python -m bench.one_copy --device cuda``.

An engine of fused layers (`bench.fused_engine`) has the parameters in memory that it exports once;
a stock ``LlamaForCausalLM`` opens them by name, and its optimizer writes in place between two
answers. The task is to say even tokens, by REINFORCE over groups. Each answer says which version
it had, and an exact sum of all bits of the weights before and after it: both must be the trainer's
sum after that version. What the device had in use is sampled at each step.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.nn.functional as F

from bench import program
from bench.fused_engine import FusedModel, Shape, parts
from bench.processes import MeasurementError, context
from bench.row import Row, skipped
from shmbus.weights import attach_model, share_model

__all__ = ["main"]

#: 0.7 billion parameters.
LARGE: Final = Shape(
    layers=12, hidden=2048, heads=16, kv_heads=8, head=128, inner=6144, vocab=32000
)
SMALL: Final = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head=16, inner=96, vocab=64)
PROMPTS, GROUP, PROMPT_TOKENS, ANSWER_TOKENS = 4, 16, 8, 8
LEARNING_RATE: Final = {True: 1e-2, False: 3e-4}
EPSILON: Final = 1e-6
THETA: Final = 10000.0
PATIENCE_S: Final = 240.0


def bits(model: torch.nn.Module) -> int:
    """Add up all bits of the weights, exactly."""
    return sum(int(each.detach().view(torch.int16).sum(dtype=torch.int64)) for each in
               sorted(model.parameters(), key=lambda p: p.data_ptr()))  # fmt: skip


def in_use(device: str) -> int:
    """Return the bytes that all processes use of a device."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


# -- the engine's process --------------------------------------------------------------------------


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn [B, H, T, D] by its positions, as Llama does."""
    half = x.shape[-1] // 2
    at = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)
    turns = THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(at, turns)
    cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (angle.cos(), angle.sin()))
    swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + swapped * sin


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the last token of each sequence, [B, V]."""
    shape: Shape = model.shape
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    batch, length = tokens.shape
    hidden = F.embedding(tokens, model.embed)
    for layer in model.layers:
        normed = F.rms_norm(hidden, (shape.hidden,), layer.input_norm, EPSILON)
        cut = torch.split(F.linear(normed, layer.qkv), [q, kv, kv], -1)
        heads = (each.view(batch, length, -1, shape.head).transpose(1, 2) for each in cut)
        query, key, value = heads
        seen = F.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
        )
        hidden = hidden + F.linear(seen.transpose(1, 2).reshape(batch, length, q), layer.o)
        normed = F.rms_norm(hidden, (shape.hidden,), layer.post_norm, EPSILON)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
    last = F.rms_norm(hidden[:, -1], (shape.hidden,), model.norm, EPSILON)
    return F.linear(last, model.head)[:, : shape.vocab]


def serve(pipe: Connection, bus: str, shape: Shape, device: str) -> None:
    """Be the engine: share, and answer prompts with tokens, by one version each."""
    torch.manual_seed(0)
    model = FusedModel(shape, device=device)
    for name, each in model.named_parameters():
        each.data.fill_(1) if "norm" in name else each.data.normal_(std=0.02)
        if name in ("embed", "head"):
            each.data[shape.vocab :] = 0
    with torch.no_grad(), share_model(
        bus, model, slices=parts(shape), version=0, writes=False
    ) as shared:  # fmt: skip
        pipe.send(in_use(device))
        while (prompts := pipe.recv()) is not None:
            with shared.reading(timeout=PATIENCE_S) as version:
                before = bits(model)
                tokens = prompts.to(device)
                for _ in range(ANSWER_TOKENS):
                    chance = logits_of(model, tokens).float().softmax(-1)
                    tokens = torch.cat([tokens, chance.multinomial(1)], 1)
                pipe.send((version, before, bits(model), tokens.cpu()))


# -- the trainer's process -------------------------------------------------------------------------


def train(pipe: Connection, bus: str, shape: Shape, device: str, steps: int) -> dict[str, Any]:
    """Train what the engine has, and hold each answer against the weights of its version."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head, rms_norm_eps=EPSILON,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    started = in_use(device)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(shape.dtype)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(config=config).to(device)
    rng = torch.Generator().manual_seed(1)
    rewards: list[float] = []
    seconds: list[float] = []
    stepping: list[float] = []
    with attach_model(bus, model, writable=True) as shared:
        attached = most = in_use(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE[shape is SMALL])
        shared.guard_optimizer(optimizer)
        sums = {0: bits(model)}
        for step in range(1, steps + 1):
            began = time.perf_counter()
            prompts = torch.randint(0, shape.vocab, (PROMPTS, PROMPT_TOKENS), generator=rng)
            pipe.send(prompts.repeat_interleave(GROUP, 0))
            if not pipe.poll(PATIENCE_S):
                raise MeasurementError(f"the engine said nothing in {PATIENCE_S:g} s")
            version, before, after, tokens = pipe.recv()
            if version != step - 1 or before != sums[version] or after != before:
                raise MeasurementError(f"step {step}: an answer of other weights than {version}'s")
            answers = tokens[:, PROMPT_TOKENS:]
            reward = (answers % 2 == 0).float().mean(1)
            grouped = reward.view(PROMPTS, GROUP)
            advantages = (grouped - grouped.mean(1, keepdim=True)).flatten().to(device)
            tokens = tokens.to(device)
            logits = model(tokens[:, :-1]).logits[:, PROMPT_TOKENS - 1 :].float()
            logprobs = -F.cross_entropy(
                logits.transpose(1, 2), tokens[:, PROMPT_TOKENS:], reduction="none"
            )
            optimizer.zero_grad()
            (-(logprobs.mean(1) * advantages).sum() / PROMPTS).backward()
            stopped = time.perf_counter()
            with shared.stepping(step):
                optimizer.step()
            sums = {step: bits(model)}
            rewards.append(float(reward.mean()))
            now = time.perf_counter()
            seconds.append(now - began)
            stepping.append(now - stopped)
            most = max(most, in_use(device))
        size = sum(each.nbytes for each in model.parameters())
        beside = sum(
            each.nbytes for state in optimizer.state.values() for each in state.values()
            if each.device.type == torch.device(device).type
        )  # fmt: skip
        beside += sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    return {
        "rewards": rewards, "step_s": seconds, "pause_s": stepping, "model_bytes": size,
        "optimizer_and_gradients_bytes": beside, "before_attaching_bytes": started,
        "attached_bytes": attached, "most_bytes": most,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    """Train, and tell what was in use."""
    if options.device != "cpu" and not torch.cuda.is_available():
        return [skipped("one-copy", "one copy of a model", "torch sees no CUDA device")]
    small = options.tiny or options.device == "cpu"
    shape = SMALL if small else LARGE
    steps = options.repetitions or (40 if options.tiny else 500)
    bus = f"bench-one-copy-{os.getpid()}-{secrets.token_hex(3)}"
    empty = in_use(options.device)
    pipe, there = context().Pipe()
    process = context().Process(target=serve, args=(there, bus, shape, options.device), daemon=True)
    process.start()
    there.close()
    try:
        if not pipe.poll(PATIENCE_S):
            raise MeasurementError(f"the engine was not there in {PATIENCE_S:g} s")
        engine = pipe.recv()
        found = train(pipe, bus, shape, options.device, steps)
    except EOFError:
        raise MeasurementError("the engine died") from None
    finally:
        process.kill()
        process.join()
    rewards = found["rewards"]
    tenth = max(1, steps // 10)
    found |= {"empty_bytes": empty, "engine_bytes": engine}
    rows = [
        Row(
            name="one-copy-reward", title=f"{steps} steps in the engine's memory, last reward",
            values=(statistics.mean(rewards[-tenth:]),), beside="first",
            beside_values=(statistics.mean(rewards[:tenth]),), figures=found,
        ),
        Row(
            name="one-copy-pause", title="one copy, an optimizer's step", unit="ms",
            values=(1e3 * statistics.median(found["pause_s"]),),
        ),
    ]  # fmt: skip
    if options.device != "cpu":
        added = found["attached_bytes"] - found["before_attaching_bytes"]
        rows.append(
            Row(
                name="one-copy-memory", title="one copy, memory that the trainer's attach adds",
                unit="MB", values=(added / 1e6,), beside="the model",
                beside_values=(found["model_bytes"] / 1e6,),
            )
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = program.parser_of("one_copy", __doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return program.run("one_copy", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
