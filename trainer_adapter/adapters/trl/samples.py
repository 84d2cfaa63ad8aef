"""Groups of a bus as TRL's rows: whole sequences, one advantage each, every doubt an error.

Invariants:

- What a row lacks is never filled in: an error names the group, the sample and the field.
- The arrays of a row are copies, so that a row never keeps space of the ring.
- A sample that cannot be scored has reward NaN and advantage 0, and counts for no other, as in
  TRL's own worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shmbus

__all__ = [
    "Advantages",
    "Expected",
    "RowArrays",
    "advantages_of",
    "check_size",
    "messages_of",
    "metrics_of",
    "read_row",
    "rewards_of",
    "scored",
]

Advantages = Literal["grpo", "dr_grpo", "rloo", "none"] | Callable[..., Any]

#: A key of a sample's meta: it has no reward. TRL's own word for such a sample.
UNSCORABLE: Final = "unscorable"
#: A key of a sample's meta: its advantage is 0, and its score counts for the others' baseline.
ZEROED: Final = "set_advantage_to_zero"
#: What TRL's own worker adds to a group's standard deviation.
TRL_EPS: Final = 1e-8
#: Kinds that compare across the groups of a batch, which a worker of TRL never sees.
_OF_A_BATCH: Final = ("batch", "batch_std")


class Expected(NamedTuple):
    """What the trainer's arguments say of a sample; None for what they do not say.

    Attributes
    ----------
    group_size : int | None
        Samples of a group.
    completion_tokens : int | None
        Tokens that one call of the model may give.
    row_tokens : int | None
        Tokens of a whole row.
    """

    group_size: int | None = None
    completion_tokens: int | None = None
    row_tokens: int | None = None


class RowArrays(NamedTuple):
    """A whole sequence of n tokens.

    Attributes
    ----------
    input_ids, completion_mask : int64 [n]
    old_log_probs : float32 [n]
        Each aligned to its own token; 0 where the mask is.
    """

    input_ids: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    old_log_probs: NDArray[np.float32]


def scored(reward: float | None, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return score and meta of a sample whose reward may be missing, for `shmbus.Producer.put`.

    Parameters
    ----------
    reward : float, optional
        None or NaN for a sample that cannot be scored, as TRL's reward functions give it.
    meta : mapping, optional
        What else goes with the sample.

    Returns
    -------
    dict
        "score" and "meta". A bus takes finite scores only, so the meta says that there is none.

    Raises
    ------
    ValueError
        The reward is infinite.

    Examples
    --------
    >>> scored(None)
    {'score': 0.0, 'meta': {'unscorable': True}}
    """
    if reward is not None and math.isinf(reward):
        raise ValueError(f"reward: expected a finite number, NaN or None, got {reward}; clip it")
    if reward is None or math.isnan(reward):
        return {"score": 0.0, "meta": {**(meta or {}), UNSCORABLE: True}}
    return {"score": float(reward), "meta": dict(meta) if meta is not None else None}


def check_size(group: shmbus.Group, expected: Expected) -> None:
    """Check that a group has as many samples as the trainer compares.

    Parameters
    ----------
    group : Group
    expected : Expected

    Raises
    ------
    ValueError
        It has another number.
    """
    wanted = expected.group_size
    if wanted is not None and wanted not in (group.size, len(group)):
        raise ValueError(
            f"group {group.instance_id!r}: expected {wanted} samples, which num_generations of the "
            f"trainer's arguments says, got {len(group)} of {group.size}; give both the same number"
        )


def rewards_of(group: shmbus.Group) -> tuple[NDArray[np.float64], list[bool]]:
    """Return the rewards of a group, and which samples asked for an advantage of 0.

    Parameters
    ----------
    group : Group

    Returns
    -------
    float64 [n], list of bool [n]
        NaN for a sample that cannot be scored.
    """
    rewards = np.array([t.score for t in group], np.float64)
    zeroed = []
    for position, t in enumerate(group):
        meta = t.meta
        asks = isinstance(meta, dict)
        if asks and meta.get(UNSCORABLE):
            rewards[position] = np.nan
        zeroed.append(bool(asks and meta.get(ZEROED)))
    return rewards, zeroed


def advantages_of(
    rewards: NDArray[np.float64], zeroed: list[bool], kind: Advantages
) -> tuple[NDArray[np.float64], float]:
    """Compare the samples of one group.

    Parameters
    ----------
    rewards : float64 [n]
        NaN for those that cannot be scored.
    zeroed : list of bool [n]
    kind : str or callable
        "grpo" is TRL's own: ``(reward - mean) / (std + 1e-8)``, with the deviation of the whole
        group (``AsyncRolloutWorker``, TRL 1.16). All others are those of
        `trainer_adapter.group_advantages`.

    Returns
    -------
    float64 [n], float
        The advantages, and the rewards' deviation; NaN where none can be scored.

    Raises
    ------
    ValueError
        The kind is unknown, or compares across groups.
    """
    advantages = np.zeros(len(rewards))
    known = ~np.isnan(rewards)
    values = rewards[known]
    std = float("nan")
    if len(values):
        # What numpy's mean and std do, to the bit, at a fifth of their time for a few values.
        centred = values - np.add.reduce(values) / len(values)
        std = math.sqrt(np.add.reduce(centred * centred) / len(values))
        if kind == "grpo":
            advantages[known] = centred / (std + TRL_EPS)
        elif kind in _OF_A_BATCH:
            raise ValueError(
                f"advantages: expected a kind that compares within a group, got {kind!r}, which "
                "needs the whole batch; TRL's worker gives samples one by one: use 'grpo'"
            )
        else:
            from trainer_adapter.advantages import group_advantages

            advantages[known] = group_advantages(values, kind)
    if any(zeroed):
        advantages[np.array(zeroed)] = 0.0
    return advantages, std


def read_row(t: shmbus.Trajectory, expected: Expected) -> RowArrays:
    """Copy a sample out of the ring.

    Parameters
    ----------
    t : Trajectory
        Leased.
    expected : Expected

    Returns
    -------
    RowArrays

    Raises
    ------
    ValueError
        A field is missing, fits no other or no limit, or is not finite; or there is a field that
        TRL has no place for.
    """
    fields = {name: t.get(name) for name in ("tokens", "loss_mask", "logprobs")}
    for name, array in fields.items():
        if array is None:
            raise _bad(t, name, "this field", "none", _FILL[name])
        if array.ndim != 1 or array.shape != fields["tokens"].shape or not array.size:
            raise _bad(t, name, "[n], one value a token", f"shape {array.shape}", _FILL[name])
    if "advantages" in t:
        raise _bad(
            t, "advantages", "no such field", "one",
            "TRL has one advantage a sample: leave it out, or name a kind of advantages",
        )  # fmt: skip
    ids = np.array(fields["tokens"], np.int64)
    mask = (fields["loss_mask"] != 0).astype(np.int64)
    logprobs = np.array(fields["logprobs"], np.float32)
    # One pass finds that all is well; the exact look is for the rest.
    if not math.isfinite(np.dot(logprobs, logprobs)) and not np.isfinite(logprobs).all():
        raise _bad(t, "logprobs", "finite numbers", "others", _FILL["logprobs"])
    if expected.row_tokens is not None and len(ids) > expected.row_tokens:
        raise _bad(
            t, "tokens", f"at most {expected.row_tokens}, the trainer's token_budget",
            str(len(ids)), "raise token_budget, or make shorter samples",
        )  # fmt: skip
    limit = expected.completion_tokens
    if limit is not None and int(mask.sum()) > limit:
        longest = _longest_run(mask)
        if longest > limit:
            raise _bad(
                t, "tokens", f"at most {limit} sampled in a turn, max_completion_length",
                str(longest), "raise max_completion_length, or lower the workers' limit",
            )  # fmt: skip
    return RowArrays(ids, mask, logprobs)


#: What to do about a missing field.
_FILL: Final = {
    "tokens": "put the prompt's and the completion's token ids",
    "loss_mask": "put 1 for each token that the model sampled, 0 for prompt and tools",
    "logprobs": "put the sampler's logprob of each token: TRL's ratio starts from them",
}


def _bad(t: shmbus.Trajectory, field: str, expected: str, got: str, step: str) -> ValueError:
    return ValueError(
        f"group {t.instance_id!r}, sample {t.index}, field {field!r}: expected {expected}, got "
        f"{got}; {step}"
    )


def _longest_run(mask: NDArray[np.int64]) -> int:
    borders = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    return int((borders[1::2] - borders[::2]).max(initial=0))


def metrics_of(meta: dict[str, Any], reward: float, std: float) -> dict[str, float]:
    """Return what TRL logs of a sample: its reward, and further ones by their names."""
    metrics = {"reward": reward, "reward_std": std}
    rewards = meta.get("rewards")
    if isinstance(rewards, dict):
        metrics |= {
            f"rewards/{name}": float(value)
            for name, value in rewards.items()
            if isinstance(value, (int, float))
        }
    return metrics


def messages_of(given: object) -> list[Any]:
    """Return the messages of a meta, for traces; none where there are none."""
    return given if isinstance(given, list) else []
