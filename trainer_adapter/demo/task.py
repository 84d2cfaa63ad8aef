"""The demo's verifiable task: put the digits of a prompt in ascending order.

A prompt is a row of digits followed by ``SEP``; the right completion is the same digits, sorted,
followed by ``EOS``. The reward pays for each right position, not only for a perfect answer, so even
a policy of random weights can climb it.

Invariants:

- A prompt belongs to one split for ever, by a hash of its digits *as a multiset*: the answers of
  the held-out split are never seen in training, in any order of the digits.
- The reward lies in [0, 1], and reaches 1 only for the right answer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

#: The first ends the prompt, from where on the policy writes; the second ends the completion.
SEP: Final = 10
EOS: Final = 11
VOCAB_SIZE: Final = 12
#: Share of the digit multisets never seen in training.
HELD_OUT_SHARE: Final = 0.2

Split = Literal["train", "held_out"]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SortTask:
    """Sort between `min_digits` and `max_digits` digits; their number is drawn uniformly."""

    min_digits: int = 4
    max_digits: int = 8

    @property
    def max_completion_len(self) -> int:
        """Limit of a completion's tokens: one more than the longest answer with EOS."""
        return self.max_digits + 2

    @property
    def max_len(self) -> int:
        """Tokens in the longest sequence, prompt and completion together."""
        return self.max_digits + 1 + self.max_completion_len

    def sample_prompt(self, rng: np.random.Generator, split: Split = "train") -> IntArray:
        """Draw a prompt of a split."""
        while True:
            n = int(rng.integers(self.min_digits, self.max_digits + 1))
            digits = rng.integers(0, 10, size=n, dtype=np.int32)
            if split_of(digits) == split:
                return np.append(digits, np.int32(SEP))

    def held_out_prompts(self, count: int) -> list[IntArray]:
        """Return the fixed evaluation set: `count` distinct held-out prompts."""
        rng = np.random.default_rng(0xE7A1)
        chosen: dict[bytes, IntArray] = {}
        while len(chosen) < count:
            prompt = self.sample_prompt(rng, "held_out")
            chosen.setdefault(prompt.tobytes(), prompt)
        return list(chosen.values())


def split_of(digits: IntArray) -> Split:
    """Return the split of a row of digits, for any order of the digits."""
    key = bytes(np.sort(digits).astype(np.uint8))
    return "held_out" if zlib.crc32(key) < HELD_OUT_SHARE * 2**32 else "train"


def answer(prompt: IntArray) -> IntArray:
    """Return the right completion of a prompt."""
    return np.append(np.sort(prompt[:-1]), np.int32(EOS))


def reward(prompt: IntArray, completion: IntArray) -> float:
    """Score a completion: the share of its positions with the right token."""
    # A completion with one wrong digit of six still earns most of it, so a mean of 0.9 does not
    # mean 90 % of the prompts solved: see `solved`.
    right = answer(prompt)
    shared = min(len(right), len(completion))
    hits = int(np.count_nonzero(right[:shared] == completion[:shared]))
    return hits / max(len(right), len(completion))


def solved(prompt: IntArray, completion: IntArray) -> bool:
    """Return True for an exactly right completion, without partial credit."""
    return bool(np.array_equal(answer(prompt), completion))


def text_of(tokens: IntArray) -> str:
    """Write tokens for a human: ``3142> 1234.``, with ``>`` for ``SEP`` and ``.`` for ``EOS``."""
    return "".join(("0123456789>."[int(t)] + (" " if t == SEP else "")) for t in tokens).rstrip()
