"""The work of a closed loop: a stock Qwen3 that generates by a plain loop, and trains packed.

What does not depend on weights is made of the seed: prompts, log-normal lengths, payloads. So each
arm generates and trains the same numbers of tokens, whatever its timing does to the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from bench.processes import MeasurementError
from trainer_adapter.attention import register_with_transformers, transformers_inputs
from trainer_adapter.losses import policy_loss
from trainer_adapter.microbatch import micro_batches

__all__ = ["PAYLOADS", "WORKS", "Sample", "Setup", "Work", "check", "generated", "make", "step"]

#: Of the lengths' logarithms.
SIGMA: Final = 0.6
#: Fields beside tokens, mask and logprobs: a row's shape, dtype, and the kind of the batch's field.
#: 1.5 KB and 0.5 KB a token; an image of 602 KB.
PAYLOADS: Final[Mapping[str, Mapping[str, tuple[tuple[int, ...], str, str]]]] = {
    "text": {},
    "experts": {"experts": ((96, 8), "int16", "token")},
    "top64": {"top_ids": ((64,), "int32", "token"), "top": ((64,), "float32", "token")},
    "image": {"image": ((448, 448, 3), "uint8", "sequence")},
}


class Work(NamedTuple):
    """How much a step is: groups of answers, their tokens, tokens of a part of a step.

    `shape` is layers, hidden size, heads, heads of keys, head size, inner size, vocabulary.
    """

    shape: tuple[int, int, int, int, int, int, int]
    groups: int
    group: int
    prompt: int
    median: int
    longest: int
    part: int
    rate: float


WORKS: Final = {
    "tiny": Work((1, 32, 2, 1, 16, 48, 64), 2, 4, 4, 8, 16, 4096, 1e-2),
    "cpu": Work((2, 256, 8, 2, 32, 768, 512), 8, 8, 64, 24, 64, 8192, 1e-3),
    "cuda": Work((28, 2048, 16, 8, 128, 6144, 151_936), 8, 8, 1024, 48, 96, 8192, 1e-5),
}


class Setup(NamedTuple):
    """What all arms of a comparison have in common; two processes make the same work of it."""

    work: Work
    payload: str
    seed: int
    steps: int = 1
    lag: int = 1
    generator: str = "cpu"
    trainer: str = "cpu"
    threads: int = 1

    def prompts(self, batch: int) -> NDArray[np.int64]:
        """Return a prompt for each answer of a batch; those of a group are alike."""
        rng, work = np.random.default_rng((self.seed, batch, 0)), self.work
        return rng.integers(0, work.shape[-1], (work.groups, work.prompt)).repeat(work.group, 0)

    def lengths(self, batch: int) -> NDArray[np.int64]:
        """Return the tokens of each answer of a batch."""
        rng, work = np.random.default_rng((self.seed, batch, 1)), self.work
        drawn = rng.lognormal(np.log(work.median), SIGMA, work.groups * work.group)
        return np.clip(drawn, 1, work.longest).astype(np.int64)

    def room(self, batches: int, versions: int) -> int:
        """Return the most bytes of batches on their way, and of versions of the weights."""
        tokens = np.zeros(self.work.prompt + self.work.longest, np.int32)
        fields = Sample.made(self, ("", 0), 0, tokens, tokens).fields
        sample = sum(x.nbytes for x in fields.values()) + (1 << 14)
        layers, hidden, heads, keys, head, inner, vocab = self.work.shape
        elements = vocab + layers * (2 * (heads + keys) * head + 3 * inner)
        return (
            batches * self.work.groups * self.work.group * sample
            + versions * hidden * elements * (4 if self.trainer == "cpu" else 2)
        )


class Sample(NamedTuple):
    """An answer that is ready to travel."""

    group_id: str
    member: int
    version: int
    score: float
    fields: dict[str, NDArray[Any]]

    @classmethod
    def made(cls, setup: Setup, key: Any, version: int, tokens: Any, logprobs: Any) -> Sample:
        """Make all fields, as an engine hands them out: each extra row carries its token."""
        mask = (np.arange(len(tokens)) >= setup.work.prompt).astype(np.uint8)
        fields = {"tokens": tokens, "logprobs": logprobs, "loss_mask": mask}
        for name, (shape, dtype, kind) in PAYLOADS[setup.payload].items():
            rows = len(tokens) if kind == "token" else 1
            made = np.full((rows, int(np.prod(shape))), 7, dtype)
            made[:, 0] = tokens[-rows:] % 128
            fields[name] = made.reshape((rows, *shape) if kind == "token" else shape)
        score = float(np.mean(tokens[setup.work.prompt :] % 2 == 0))
        return cls(key[0], key[1], version, score, fields)


def make(setup: Setup, device: str) -> Any:
    """Make the policy, in float32 on a CPU; it trains packed rows, and generates by SDPA."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    layers, hidden, heads, keys, head, inner, vocab = setup.work.shape
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, head_dim=head,
        num_key_value_heads=keys, intermediate_size=inner, vocab_size=vocab,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    register_with_transformers("packed")
    torch.set_num_threads(setup.threads)
    torch.manual_seed(setup.seed)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@torch.no_grad()
def generated(
    policy: Any, prompts: NDArray[Any], lengths: NDArray[Any], goes_on: Callable[[int], bool]
) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.float32]]]:
    """Sample an answer to each prompt; gives row, tokens and logprobs when it has its length.

    `goes_on` is told how many tokens each pass makes, before it, and may end all of it.
    """
    from transformers import DynamicCache

    policy.set_attn_implementation("sdpa")
    order = np.argsort(-lengths, kind="stable")  # those that go on are the first rows
    rows, begin, start = len(order), 0, prompts.shape[1]
    tokens = torch.zeros((rows, start + int(lengths.max())), dtype=torch.int64)
    tokens[:, :start] = torch.from_numpy(prompts[order])
    tokens = tokens.to(policy.device)
    logprobs, cache = torch.zeros(tokens.shape, device=policy.device), DynamicCache()
    for end in range(start, tokens.shape[1]):
        if not goes_on(rows):
            return
        given = tokens[:rows, begin:end]
        logits = policy(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        said = logits[:, -1].float().log_softmax(-1)
        tokens[:rows, end : end + 1] = drawn = said.exp().multinomial(1)
        logprobs[:rows, end : end + 1] = said.gather(1, drawn)
        begin, left = end, int((lengths > end + 1 - start).sum())
        for row in range(left, rows):
            done = tokens[row, : end + 1].int().cpu().numpy()
            yield int(order[row]), done, logprobs[row, : end + 1].cpu().numpy()
        if left < rows:
            cache.batch_select_indices(torch.arange(left, device=policy.device))
        rows = left


def check(batch: Any, setup: Setup) -> None:
    """Raise unless each extra row is that of its token."""
    for name, (_, _, kind) in PAYLOADS[setup.payload].items():
        of = batch.tokens if kind == "token" else batch.tokens[batch.cu_seqlens[1:].long() - 1]
        if not torch.equal(batch.extra[name].flatten(1)[:, 0].long(), of % 128):
            raise MeasurementError(f"the field {name!r} of a batch has rows of other tokens")


def step(policy: Any, optimizer: torch.optim.Optimizer, batch: Any, setup: Setup) -> None:
    """Take an optimizer's step on a batch."""
    policy.set_attn_implementation("packed")
    optimizer.zero_grad()
    for part in micro_batches(batch, max_tokens=setup.work.part):
        logits = policy(**transformers_inputs(part)).logits[0, :-1].float()
        logprobs = F.pad(-F.cross_entropy(logits, part.tokens[1:], reduction="none"), (1, 0))
        operands = (logprobs, part.logprobs, part.advantages, part.loss_mask)
        loss: Any = policy_loss(*operands, denominator=part.batch_loss_tokens).loss
        loss.backward()
    optimizer.step()
    if setup.trainer != "cpu":
        torch.cuda.synchronize(setup.trainer)
