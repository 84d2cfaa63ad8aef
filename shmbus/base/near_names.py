"""Near misses of put's arguments and of a handle's options, with the right names.

Every unknown keyword of put names an array field. So ``reward=0.7`` would silently become an
unused field, and every score would be 0.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Final

#: Minimum similarity of two names, from 0 to 1: "timout" and "timeout" share 0.92.
ALIKE: Final = 0.8

ARGUMENTS: Final = (
    "instance_id", "group_size", "index", "score", "policy_version", "round", "meta", "timeout",
    "split", "need",
)  # fmt: skip

#: Names used by other libraries.
SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("prompt_id", "group_id", "problem_id", "question_id", "uid"), ("instance_id",)
    ),
    **dict.fromkeys(("num_generations", "num_samples", "n_samples", "rollout_n"), ("group_size",)),
    **dict.fromkeys(("idx", "sample_index", "sample_idx", "sample_id"), ("index",)),
    **dict.fromkeys(("reward", "rewards", "scores", "ret", "return_"), ("score",)),
    **dict.fromkeys(
        ("version", "weight_version", "weights_version", "model_version", "policy_step", "policy"),
        ("policy_version",),
    ),
    **dict.fromkeys(("metadata", "extra_info"), ("meta",)),
    # Not put's own: a field of the trainer, with one number a token.
    **dict.fromkeys(("advantage", "adv"), ("advantages",)),
}


def near(
    name: str,
    known: Collection[str],
    synonyms: Mapping[str, tuple[str, ...]] | None = None,
    *,
    most: int = 1,
    alike: float = ALIKE,
) -> tuple[str, ...]:
    """Return the known names a user probably means, the nearest first."""
    if synonyms is not None and name not in known and name.lower() in synonyms:
        return synonyms[name.lower()]
    return tuple(difflib.get_close_matches(name, known, n=most, cutoff=alike))


def near_argument(name: str) -> str | None:
    """Return the argument of put a user probably means."""
    return next(iter(near(name.lower(), ARGUMENTS, SYNONYMS)), None)


#: Option names of TRL, verl, prime-rl and torch, with the handle's options. An empty tuple
#: suppresses suggestions for a name without a counterpart.
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
    **dict.fromkeys(("filter_groups", "dynamic_sampling"), ("skip_zero_variance",)),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), ("truncated",)),
    **dict.fromkeys(("retries", "max_retries"), ("sample_retries",)),
    **dict.fromkeys(("num_workers", "prefetch_factor"), ("prefetch",)),
    **dict.fromkeys(("packing", "padding", "use_remove_padding"), ("layout",)),
    **dict.fromkeys(("num_replicas", "dp_size"), ("world_size",)),
    **dict.fromkeys(("name", "bus_name"), ("bus", "name")),
    **dict.fromkeys(("group_size", "num_generations", "timeout"), ()),
}  # fmt: skip


def unknown_option(what: str, name: str, known: Collection[str], others: str = "") -> TypeError:
    """Report a constructor's unknown option, with the nearest options or the full list."""
    near_ones = near(name.lower(), known, OPTIONS, most=2, alike=0.6)
    found = [option for option in near_ones if option in known]
    hint = f"did you mean {' or '.join(map(repr, found))}?"
    return TypeError(
        f"{what} got an unexpected keyword argument {name!r}; "
        + (hint if found else f"expected one of {others or ', '.join(known)}")
    )


#: Similar names shown by the error for an unknown name; also names shown if no name is similar.
_NEAR_SHOWN: Final = 3
_NAMES_SHOWN: Final = 5


class UnknownNameError(KeyError):
    """A lookup of a missing name; a KeyError, to support `in` and `get` of a mapping."""

    def __init__(self, what: str, name: object, names: Iterable[str]) -> None:
        super().__init__(name)
        self._what = what
        self._names = list(names)

    def __str__(self) -> str:
        # Deferred until display: comparing the names of a large model takes most of a second, and
        # `get` and `in` display nothing.
        name = self.args[0]
        found = near(str(name), self._names, most=_NEAR_SHOWN, alike=0.6)
        if found:
            return f"{name!r}: {self._what}: no such name; did you mean {_listed(found)}?"
        shown = _listed(self._names[:_NAMES_SHOWN]) or "none"
        more = len(self._names) - _NAMES_SHOWN
        return f"{name!r}: {self._what}: no such name; there is {shown}" + (
            f" and {more} more" if more > 0 else ""
        )

    def __reduce__(self) -> tuple[type[KeyError], tuple[str]]:
        return KeyError, (str(self),)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
