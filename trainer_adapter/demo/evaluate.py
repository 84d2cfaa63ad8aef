"""Quality of the policy on prompts that training never drew.

There are two figures: the mean reward gives partial credit, the solved share does not. And there
are two ways to sample: at temperature 1, as the rollout workers do, or greedily. The demo's target
is the harder one: the mean reward of completions sampled at temperature 1.

Invariants:

- Only held-out prompts are asked, each the same number of times.
- Nothing here imports torch or changes a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_adapter.demo.sampler import IntArray, Sampler
from trainer_adapter.demo.task import SortTask, reward, solved, split_of


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    #: Mean of `task.reward`, partial credit included, in [0, 1].
    mean_reward: float
    #: Share of completions that are exactly right, in [0, 1].
    solved_share: float
    #: Completions judged.
    completions: int
    #: True if the likeliest token was taken each time, False if sampled at temperature 1.
    greedy: bool


def evaluate(
    sampler: Sampler,
    task: SortTask,
    prompts: Sequence[IntArray],
    rng: np.random.Generator,
    *,
    greedy: bool = False,
    samples: int = 1,
) -> Evaluation:
    """Judge the sampler's weights on held-out prompts."""
    if not prompts:
        raise ValueError("no prompts: expected at least one held-out prompt")
    for prompt in prompts:
        if split_of(prompt[:-1]) != "held_out":
            raise ValueError(f"prompt {prompt[:-1].tolist()} belongs to the training split")
    groups = sampler.sample(
        prompts, samples, task.max_completion_len, rng, temperature=0.0 if greedy else 1.0
    )
    judged = [
        (reward(prompt, sample.completion), solved(prompt, sample.completion))
        for prompt, group in zip(prompts, groups, strict=True)
        for sample in group
    ]
    return Evaluation(
        mean_reward=float(np.mean([r for r, _ in judged])),
        solved_share=float(np.mean([s for _, s in judged])),
        completions=len(judged),
        greedy=greedy,
    )
