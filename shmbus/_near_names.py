"""Names that are nearly those of put's arguments, or of a handle's options, and the right ones.

Any other keyword of put is an array field. So ``reward=0.7`` would be a field that nobody reads,
and every score would be 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

__all__ = ["OPTIONS", "near_argument", "near_field", "near_options", "unknown_option"]

#: How much two names have to have in common, from 0 to 1: "timout" and "timeout" have 0.92.
ALIKE: Final = 0.8

ARGUMENTS: Final = (
    "instance_id", "group_size", "index", "score", "policy_version", "round", "meta", "timeout",
    "split", "need",
)  # fmt: skip

#: What other libraries call them.
SYNONYMS: Final[dict[str, str]] = {
    **dict.fromkeys(("prompt_id", "group_id", "problem_id", "question_id", "uid"), "instance_id"),
    **dict.fromkeys(("num_generations", "num_samples", "n_samples", "rollout_n"), "group_size"),
    **dict.fromkeys(("idx", "sample_index", "sample_idx", "sample_id"), "index"),
    **dict.fromkeys(("reward", "rewards", "scores", "ret", "return_"), "score"),
    **dict.fromkeys(
        ("version", "weight_version", "weights_version", "model_version", "policy_step", "policy"),
        "policy_version",
    ),
    **dict.fromkeys(("metadata", "extra_info"), "meta"),
    # Not put's own: a field of the trainer, with one number a token.
    **dict.fromkeys(("advantage", "adv"), "advantages"),
}


def near_argument(name: str) -> str | None:
    """Return the argument that a name is probably meant for; None where it is like none of them.

    Parameters
    ----------
    name : str
        As it was given to put.

    Returns
    -------
    str or None
    """
    plain = name.lower()
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    near = difflib.get_close_matches(plain, ARGUMENTS, n=1, cutoff=ALIKE)
    return near[0] if near else None


def near_field(name: str, fields: tuple[str, ...]) -> str | None:
    """Return the declared field that a name is probably meant for; None where none is like it.

    Parameters
    ----------
    name : str
        As it was given to put.
    fields : tuple of str
        The declared ones.

    Returns
    -------
    str or None
    """
    near = difflib.get_close_matches(name, fields, n=1, cutoff=ALIKE)
    return near[0] if near else None


#: What TRL, verl, prime-rl and torch call options of a handle; an empty tuple where a name is none
#: of them, whatever it is like.
OPTIONS: Final[dict[str, tuple[str, ...]]] = {
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
    **dict.fromkeys(("name", "bus_name"), ("bus", "name")),
    **dict.fromkeys(("group_size", "num_generations", "timeout"), ()),
}  # fmt: skip


def near_options(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the options that a name is probably meant for, the nearest first, of those known."""
    plain = name.lower()
    if plain in OPTIONS and plain not in known:
        return tuple(option for option in OPTIONS[plain] if option in known)
    return tuple(difflib.get_close_matches(plain, known, n=2))


def unknown_option(what: str, name: str, known: Collection[str], others: str = "") -> TypeError:
    """Say that a constructor has no such option, and the nearest, or else all that it has."""
    near = near_options(name, known)
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    return TypeError(
        f"{what} got an unexpected keyword argument {name!r}; "
        + (hint if near else f"expected one of {others or ', '.join(known)}")
    )
