"""The policy's inference side: the same transformer as `policy.py`, in numpy, for rollout workers.

A numpy worker starts in a tenth of a second; importing torch takes a second or two of CPU time. So
a killed worker is soon replaced, and four workers leave most of a two-core machine to the trainer.
The weights are one flat float32 vector, with its layout defined here once
(`PolicyConfig.parameters`) and used by both sides.

Invariants:

- Nothing here imports torch.
- `logprobs[i]` is the logprob under the policy of `tokens[i]`, given the preceding tokens; it
  agrees with the packed torch forward to float32 rounding, for any further content of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_adapter.demo.task import EOS, VOCAB_SIZE, SortTask, reward, solved, split_of

#: Added to the mean square in every RMS norm; the torch side uses the same value.
NORM_EPS: Final = 1e-5

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PolicyConfig:
    """Shape of the policy, and so the layout of its flat weights."""

    #: Residual width, number of blocks, attention heads a block; the MLP is twice as wide.
    width: int = 64
    layers: int = 1
    heads: int = 8
    #: Positions with an embedding.
    max_len: int = SortTask().max_len

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each weight, in the order of the flat vector."""
        # Matrices are stored [in, out], since both sides compute ``x @ w``.
        w = self.width
        yield "token_embedding", (VOCAB_SIZE, w)
        yield "position_embedding", (self.max_len, w)
        for i in range(self.layers):
            yield f"block{i}_attn_norm", (w,)
            yield f"block{i}_qkv", (w, 3 * w)
            yield f"block{i}_attn_out", (w, w)
            yield f"block{i}_mlp_norm", (w,)
            yield f"block{i}_mlp_in", (w, 2 * w)
            yield f"block{i}_mlp_out", (2 * w, w)
        yield "final_norm", (w,)
        yield "head", (w, VOCAB_SIZE)

    @cached_property
    def num_parameters(self) -> int:
        """Length of the flat weight vector."""
        return sum(math.prod(shape) for _, shape in self.parameters())


class Sample(NamedTuple):
    """One sampled sequence of n tokens, in the fields of the bus."""

    #: ndarray, int32 [n]. Prompt, then completion.
    tokens: IntArray
    #: ndarray, uint8 [n]. 1 on the completion's tokens.
    loss_mask: npt.NDArray[np.uint8]
    #: ndarray, float32 [n]. Of each completion token under the policy; 0 on the prompt.
    logprobs: FloatArray
    prompt_len: int

    @property
    def completion(self) -> IntArray:
        """The sampled tokens, including an EOS if present."""
        return self.tokens[self.prompt_len :]

    def fields(self) -> dict[str, Any]:
        """Return the arrays to put: ``producer.put(..., **sample.fields())``."""
        return {"tokens": self.tokens, "loss_mask": self.loss_mask, "logprobs": self.logprobs}


class Sampler:
    """Sample completions from the policy with a key-value cache, in numpy."""

    def __init__(self, config: PolicyConfig, weights: FloatArray | None = None) -> None:
        self.config = config
        self._flat: FloatArray = np.zeros(config.num_parameters, np.float32)
        #: Views of the weights, by name.
        self._w: dict[str, FloatArray] = {}
        start = 0
        for name, shape in config.parameters():
            stop = start + math.prod(shape)
            self._w[name] = self._flat[start:stop].reshape(shape)
            start = stop
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
        self, prompts: Sequence[IntArray], max_completion_len: int, rng: np.random.Generator
    ) -> list[Sample]:
        """Sample a completion of each prompt, in one batch."""
        lens = np.array([len(p) for p in prompts])
        count, longest = len(prompts), int(lens.max())
        if longest + max_completion_len > self.config.max_len:
            raise ValueError(
                f"a prompt of {longest} tokens and {max_completion_len} more: this policy has "
                f"{self.config.max_len} positions; raise PolicyConfig.max_len"
            )
        # Prompts are padded on the right. The causal mask hides the padding from the real tokens,
        # and decoding overwrites its cache entries before it can see them.
        padded = np.full((count, longest), EOS, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        size = (2, count, self.config.heads, longest + max_completion_len, self.config.head_dim)
        cache = [np.zeros(size, np.float32) for _ in range(self.config.layers)]
        states = self._forward(padded, np.tile(np.arange(longest), (count, 1)), cache)
        states = states[np.arange(count), lens - 1]
        tokens = np.full((count, max_completion_len), EOS, np.int32)
        logprobs = np.zeros((count, max_completion_len), np.float32)
        # Finished rows leave the batch: `rows` maps the remaining rows to the rows of the result.
        rows = np.arange(count)
        for step in range(max_completion_len):
            token, logprob = _draw(self._norm(states, "final_norm") @ self._w["head"], rng)
            tokens[rows, step], logprobs[rows, step] = token, logprob
            going = np.flatnonzero(token != EOS)
            if step == max_completion_len - 1 or not len(going):
                break
            if len(going) < 0.75 * len(rows):
                cache = [layer[:, going] for layer in cache]
                rows, token = rows[going], token[going]
            states = self._forward(token[:, None], (lens[rows] + step)[:, None], cache)[:, 0]
        return [_cut(*each) for each in zip(prompts, tokens, logprobs, strict=True)]

    def _forward(
        self, tokens: IntArray, positions: npt.NDArray[np.int64], cache: list[FloatArray]
    ) -> FloatArray:
        """Add tokens [R, n] to a cache [2, R, H, L, D] a layer; return their states [R, n, W]."""
        rows, n = tokens.shape
        heads, dim = self.config.heads, self.config.head_dim
        seen = int(positions.max()) + 1
        hidden = np.where(
            np.arange(seen) <= positions[:, None, :, None], np.float32(0), np.float32(-np.inf)
        )
        x: FloatArray = (
            self._w["token_embedding"][tokens] + self._w["position_embedding"][positions]
        )
        for i, layer in enumerate(cache):
            prefix = f"block{i}_"
            qkv = self._norm(x, prefix + "attn_norm") @ self._w[prefix + "qkv"]
            q, k, v = qkv.reshape(rows, n, 3, heads, dim).transpose(2, 0, 1, 3, 4)
            layer[0, np.arange(rows)[:, None], :, positions] = k
            layer[1, np.arange(rows)[:, None], :, positions] = v
            keys, values = layer[:, :, :, :seen]
            scores = q.transpose(0, 2, 1, 3) @ keys.swapaxes(-1, -2) * np.float32(dim**-0.5)
            mixed = (_softmax(scores + hidden) @ values).transpose(0, 2, 1, 3)
            x = x + mixed.reshape(rows, n, -1) @ self._w[prefix + "attn_out"]
            inner = self._norm(x, prefix + "mlp_norm") @ self._w[prefix + "mlp_in"]
            x = x + np.maximum(inner, 0) @ self._w[prefix + "mlp_out"]
        return x

    def _norm(self, x: FloatArray, gain: str) -> FloatArray:
        """RMS norm over the last axis."""
        square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        normed: FloatArray = x * (self._w[gain] / np.sqrt(square + np.float32(NORM_EPS)))
        return normed


def _cut(prompt: IntArray, tokens: IntArray, logprobs: FloatArray) -> Sample:
    """Cut a completion after its EOS, and join it to its prompt."""
    ends = np.flatnonzero(tokens == EOS)
    n, m = len(prompt), int(ends[0]) + 1 if len(ends) else len(tokens)
    mask, padded = np.zeros(n + m, np.uint8), np.zeros(n + m, np.float32)
    mask[n:] = 1
    padded[n:] = logprobs[:m]
    return Sample(np.concatenate([prompt, tokens[:m]]), mask, padded, n)


def _softmax(x: FloatArray) -> FloatArray:
    e: FloatArray = np.exp(x - x.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    return e


def _draw(logits: FloatArray, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """Draw a token from each row; return tokens int32 [R] and their logprobs float32 [R]."""
    scaled = logits - logits.max(-1, keepdims=True)
    logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    # Gumbel's trick: the argmax of logprob plus Gumbel noise is a draw from the softmax.
    picked = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(-1)
    return picked.astype(np.int32), logprobs[np.arange(len(picked)), picked]


class Evaluation(NamedTuple):
    """Quality on held-out prompts: the mean reward, and the share of exactly right completions."""

    mean_reward: float
    solved_share: float


def evaluate(
    sampler: Sampler, task: SortTask, prompts: Sequence[IntArray], rng: np.random.Generator
) -> Evaluation:
    """Judge the sampler's weights on held-out prompts, sampled at temperature 1 as workers do."""
    for prompt in prompts:
        if split_of(prompt[:-1]) != "held_out":
            raise ValueError(f"prompt {prompt[:-1].tolist()} belongs to the training split")
    found = sampler.sample(prompts, task.max_completion_len, rng)
    pairs = zip(prompts, (sample.completion for sample in found), strict=True)
    judged = [(reward(*pair), solved(*pair)) for pair in pairs]
    return Evaluation(*(float(each) for each in np.mean(judged, axis=0)))
