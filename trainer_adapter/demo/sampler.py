"""The policy's inference side: the same transformer as `policy.py`, in numpy, for rollout workers.

A worker that samples with numpy starts in a tenth of a second where one that imports torch takes
a second or two of CPU time. So a killed worker is soon replaced, and four workers leave most of a
two-core machine to the trainer. The weights are one flat float32 vector, whose layout is defined
here once (`PolicyConfig.parameters`) and used by both sides.

Invariants:

- Nothing here imports torch.
- `logprobs[i]` is the logprob under the *sampling* distribution of `tokens[i]`, given the tokens
  before it; it agrees with the packed torch forward to float32 rounding.
- Rows of a batch never influence one another, at any lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from trainer_adapter.demo.task import EOS, VOCAB_SIZE, SortTask

NORM_EPS: Final = 1e-5
"""Added to the mean square in every RMS norm; the torch side uses the same value."""

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PolicyConfig:
    """Shape of the policy, and so the layout of its flat weights."""

    #: Residual width, number of blocks, attention heads a block.
    width: int = 64
    layers: int = 1
    heads: int = 8
    #: Hidden width of the MLP over `width`.
    mlp_ratio: int = 2
    #: Tokens known, and positions that have an embedding.
    vocab_size: int = VOCAB_SIZE
    max_len: int = SortTask().max_len

    def __post_init__(self) -> None:
        """Check that the heads divide the width."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width}: expected a multiple of heads {self.heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each weight, in the order of the flat vector."""
        # Matrices are stored [in, out], so that both sides compute ``x @ w``.
        w = self.width
        yield "token_embedding", (self.vocab_size, w)
        yield "position_embedding", (self.max_len, w)
        for i in range(self.layers):
            yield f"block{i}_attn_norm", (w,)
            yield f"block{i}_qkv", (w, 3 * w)
            yield f"block{i}_attn_out", (w, w)
            yield f"block{i}_mlp_norm", (w,)
            yield f"block{i}_mlp_in", (w, self.mlp_ratio * w)
            yield f"block{i}_mlp_out", (self.mlp_ratio * w, w)
        yield "final_norm", (w,)
        yield "head", (w, self.vocab_size)

    @cached_property
    def num_parameters(self) -> int:
        """Length of the flat weight vector."""
        return sum(math.prod(shape) for _, shape in self.parameters())


@dataclass(frozen=True)
class Sample:
    """One sampled sequence, in the fields that go through the bus."""

    #: ndarray, int32 [n]. Prompt, then completion.
    tokens: IntArray
    #: ndarray, uint8 [n]. 1 on the completion's tokens.
    loss_mask: npt.NDArray[np.uint8]
    #: ndarray, float32 [n]. Logprob of each completion token under the policy that sampled it; 0 on
    #: the prompt.
    logprobs: FloatArray
    #: Tokens of the prompt.
    prompt_len: int

    @property
    def completion(self) -> IntArray:
        """The sampled tokens, with the EOS if there is one."""
        return self.tokens[self.prompt_len :]

    def fields(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays to put: ``producer.put(..., **sample.fields())``."""
        return {"tokens": self.tokens, "loss_mask": self.loss_mask, "logprobs": self.logprobs}


@dataclass(frozen=True)
class _Block:
    """Views of one block's weights in the flat vector."""

    attn_norm: FloatArray
    qkv: FloatArray
    attn_out: FloatArray
    mlp_norm: FloatArray
    mlp_in: FloatArray
    mlp_out: FloatArray


class Sampler:
    """Sample completions from the policy with a key-value cache, in numpy."""

    def __init__(self, config: PolicyConfig, weights: FloatArray | None = None) -> None:
        self.config = config
        self._flat: FloatArray = np.zeros(config.num_parameters, np.float32)
        by_name: dict[str, FloatArray] = {}
        start = 0
        for name, shape in config.parameters():
            stop = start + math.prod(shape)
            by_name[name] = self._flat[start:stop].reshape(shape)
            start = stop
        self._tokens = by_name["token_embedding"]
        self._positions = by_name["position_embedding"]
        self._blocks = [
            _Block(*(by_name[f"block{i}_{field}"] for field in _Block.__dataclass_fields__))
            for i in range(config.layers)
        ]
        self._final_norm = by_name["final_norm"]
        self._head = by_name["head"]
        if weights is not None:
            self.load(weights)

    def load(self, weights: FloatArray) -> None:
        """Copy new weights in, in one pass."""
        if weights.shape != self._flat.shape or weights.dtype != np.float32:
            raise ValueError(
                f"flat weights are {weights.dtype} {weights.shape}, this policy needs float32 "
                f"{self._flat.shape}; give trainer and workers the same PolicyConfig"
            )
        np.copyto(self._flat, weights)

    def sample(
        self,
        prompts: Sequence[IntArray],
        group_size: int,
        max_completion_len: int,
        rng: np.random.Generator,
        *,
        temperature: float = 1.0,
    ) -> list[list[Sample]]:
        """Sample `group_size` completions of each prompt, all in one batch."""
        prompt_lens = np.array([len(p) for p in prompts])
        longest = int(prompt_lens.max())
        if longest + max_completion_len > self.config.max_len:
            raise ValueError(
                f"a prompt of {longest} tokens and {max_completion_len} more: this policy has "
                f"{self.config.max_len} positions; raise PolicyConfig.max_len"
            )
        logits, cache = self._prefill(prompts, prompt_lens, longest + max_completion_len)
        logits = np.repeat(logits, group_size, axis=0)
        cache = [np.repeat(layer, group_size, axis=1) for layer in cache]
        lens = np.repeat(prompt_lens, group_size)
        rows = np.arange(len(lens))
        tokens = np.full((len(lens), max_completion_len), EOS, np.int32)
        logprobs = np.zeros((len(lens), max_completion_len), np.float32)
        # Finished rows leave the batch: `rows` maps what is left to the rows of the result.
        for step in range(max_completion_len):
            token, logprob = _draw(logits, rng, temperature)
            tokens[rows, step] = token
            logprobs[rows, step] = logprob
            going = np.flatnonzero(token != EOS)
            if step == max_completion_len - 1 or not len(going):
                break
            if len(going) < 0.75 * len(rows):
                cache = [layer[:, going] for layer in cache]
                rows, lens, token = rows[going], lens[going], token[going]
            logits = self._decode(token, lens + step, cache)
        return self._collect(prompts, group_size, tokens, logprobs)

    def _prefill(
        self, prompts: Sequence[IntArray], prompt_lens: npt.NDArray[np.int64], cache_len: int
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Run the prompts; return logits [P, V] after each, and a cache [2, P, H, L, D] a layer."""
        # Short prompts are padded on the right. The causal mask hides the padding from the real
        # tokens, and decoding overwrites its cache entries before it can see them.
        config = self.config
        count, longest = len(prompts), int(prompt_lens.max())
        padded = np.full((count, longest), EOS, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        x: FloatArray = self._tokens[padded] + self._positions[:longest]
        hidden = np.triu(np.full((longest, longest), -np.inf, np.float32), 1)
        cache = []
        for block in self._blocks:
            qkv = _norm(x, block.attn_norm) @ block.qkv
            q, k, v = qkv.reshape(count, longest, 3, config.heads, config.head_dim).transpose(
                2, 0, 3, 1, 4
            )
            layer = np.zeros((2, count, config.heads, cache_len, config.head_dim), np.float32)
            layer[0, :, :, :longest] = k
            layer[1, :, :, :longest] = v
            cache.append(layer)
            weights = _softmax(q @ k.swapaxes(-1, -2) * config.head_dim**-0.5 + hidden)
            mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(count, longest, config.width)
            x = x + mixed @ block.attn_out
            x = x + _mlp(x, block)
        last = x[np.arange(count), prompt_lens - 1]
        return _norm(last, self._final_norm) @ self._head, cache

    def _decode(
        self, tokens: IntArray, positions: npt.NDArray[np.int64], cache: list[FloatArray]
    ) -> FloatArray:
        """Add one token a row to the cache, at its own position; return the logits [R, V]."""
        config = self.config
        count = len(tokens)
        rows = np.arange(count)
        seen = int(positions.max()) + 1
        hidden = np.where(np.arange(seen) <= positions[:, None], np.float32(0), np.float32(-np.inf))
        hidden = hidden[:, None, None]
        x: FloatArray = self._tokens[tokens] + self._positions[positions]
        for block, layer in zip(self._blocks, cache, strict=True):
            qkv = _norm(x, block.attn_norm) @ block.qkv
            q, k, v = qkv.reshape(count, 3, config.heads, config.head_dim).transpose(1, 0, 2, 3)
            layer[0, rows, :, positions] = k
            layer[1, rows, :, positions] = v
            scores = q[:, :, None] @ layer[0, :, :, :seen].swapaxes(-1, -2)
            weights = _softmax(scores * config.head_dim**-0.5 + hidden)
            mixed: FloatArray = (weights @ layer[1, :, :, :seen]).reshape(count, config.width)
            x = x + mixed @ block.attn_out
            x = x + _mlp(x, block)
        return _norm(x, self._final_norm) @ self._head

    @staticmethod
    def _collect(
        prompts: Sequence[IntArray], group_size: int, tokens: IntArray, logprobs: FloatArray
    ) -> list[list[Sample]]:
        """Cut each row after its EOS, and join it to its prompt."""
        ended = tokens == EOS
        lengths = np.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1])
        groups = []
        for p, prompt in enumerate(prompts):
            group = []
            for row in range(p * group_size, (p + 1) * group_size):
                n, m = len(prompt), int(lengths[row])
                mask = np.zeros(n + m, np.uint8)
                mask[n:] = 1
                padded = np.zeros(n + m, np.float32)
                padded[n:] = logprobs[row, :m]
                group.append(Sample(np.concatenate([prompt, tokens[row, :m]]), mask, padded, n))
            groups.append(group)
        return groups


def _norm(x: FloatArray, gain: FloatArray) -> FloatArray:
    """RMS norm over the last axis."""
    square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    normed: FloatArray = x * (gain / np.sqrt(square + np.float32(NORM_EPS)))
    return normed


def _mlp(x: FloatArray, block: _Block) -> FloatArray:
    """Return the block's MLP, with ReLU, of the normed input."""
    out: FloatArray = np.maximum(_norm(x, block.mlp_norm) @ block.mlp_in, 0) @ block.mlp_out
    return out


def _softmax(x: FloatArray) -> FloatArray:
    """Softmax over the last axis."""
    e: FloatArray = np.exp(x - x.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    return e


def _draw(
    logits: FloatArray, rng: np.random.Generator, temperature: float
) -> tuple[IntArray, FloatArray]:
    """Draw a token from each row; return tokens int32 [R] and their logprobs float32 [R]."""
    scaled = logits / np.float32(temperature) if temperature > 0 else logits
    scaled = scaled - scaled.max(-1, keepdims=True)
    logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    if temperature > 0:
        # Gumbel's trick: the argmax of logprob plus Gumbel noise is a draw from the softmax.
        picked = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(-1)
    else:
        picked = logprobs.argmax(-1)
    return picked.astype(np.int32), logprobs[np.arange(len(picked)), picked]
