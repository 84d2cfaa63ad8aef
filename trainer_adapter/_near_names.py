"""Options of a handler by the names that other libraries give them, and the right ones."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

__all__ = ["near_options"]

#: What TRL, verl, prime-rl and torch call them; an empty tuple where a name is none of the
#: handler's, whatever it is like.
SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "batch_size", "train_batch_size", "per_device_train_batch_size", "ppo_mini_batch_size",
            "generation_batch_size", "num_prompts", "num_groups",
        ),
        ("groups_per_batch", "tokens_per_batch"),
    ),
    **dict.fromkeys(
        ("max_tokens", "token_budget", "ppo_max_token_len_per_gpu"), ("tokens_per_batch",)
    ),
    **dict.fromkeys(
        ("adv_estimator", "advantage_estimator", "scale_rewards", "loss_type"), ("advantages",)
    ),
    **dict.fromkeys(
        (
            "max_staleness", "staleness", "staleness_threshold", "max_off_policy_steps",
            "max_async_level", "max_lag", "max_age",
        ),
        ("max_policy_lag",),
    ),
    **dict.fromkeys(
        ("reward", "rewards", "reward_fn", "reward_func", "reward_funcs", "score", "scorer"),
        ("score_group",),
    ),
    **dict.fromkeys(("filter_groups", "dynamic_sampling"), ("skip_zero_variance", "keep_group")),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), ("truncated",)),
    **dict.fromkeys(("retries", "max_retries"), ("sample_retries",)),
    **dict.fromkeys(("num_workers", "prefetch_factor"), ("prefetch",)),
    **dict.fromkeys(("packing", "padding", "use_remove_padding"), ("layout",)),
    **dict.fromkeys(("num_replicas", "dp_size"), ("world_size",)),
    **dict.fromkeys(("name", "bus_name"), ("bus",)),
    **dict.fromkeys(("group_size", "num_generations", "timeout"), ()),
}  # fmt: skip


def near_options(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the options that a name is probably meant for, the nearest first, of those known."""
    plain = name.lower()
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    return tuple(difflib.get_close_matches(plain, known, n=2))
