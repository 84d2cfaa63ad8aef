"""Groups of a bus in TRL's scoring: sizes, rewards, advantages, logged values.

Invariant: an unscorable sample gets reward NaN and advantage 0, and does not affect its group, as
in TRL's own worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.base.arguments import check_int

Advantages = Literal["grpo", "dr_grpo", "rloo", "none"] | Callable[..., Any]

#: A key of a sample's meta: no reward. TRL's own word for such a sample.
UNSCORABLE: Final = "unscorable"
#: A key of a sample's meta: advantage 0, while its score counts for the group's baseline.
ZEROED: Final = "set_advantage_to_zero"
#: Addend of TRL's own worker to a group's standard deviation.
TRL_EPS: Final = 1e-8
#: Counters of the ledger logged by TRL, as differences since the last step.
_DROPS: Final = ("stale", "failed", "timeout", "overflow", "zero_variance")
#: Comparisons across the groups of a batch; a worker of TRL never sees a batch.
_OF_A_BATCH: Final = ("batch", "batch_std")


class TrainerArguments(NamedTuple):
    """Arguments of AsyncGRPOConfig relevant for a bus; None for a missing argument."""

    num_generations: int | None
    max_completion_length: int | None
    token_budget: int | None
    max_staleness: int | None
    save_strategy: str


class Expected(NamedTuple):
    """Expectations of the trainer's arguments on a sample; None for unset arguments."""

    #: Samples of a group.
    group_size: int | None = None
    #: Most tokens of one call of the model.
    completion_tokens: int | None = None
    #: Tokens of a whole row.
    row_tokens: int | None = None

    def checked(self) -> Expected:
        """Return self after checking every given number for 1 or more."""
        names = ("num_generations", "max_completion_length", "token_budget")
        for name, value in zip(names, self, strict=True):
            if value is not None:
                check_int(name, value, 1)
        return self

    def or_of(self, arguments: TrainerArguments) -> Expected:
        """Return the own values, completed by the trainer's arguments."""
        return Expected(
            self.group_size or arguments.num_generations,
            self.completion_tokens or arguments.max_completion_length,
            self.row_tokens or (arguments.token_budget or None),
        )


def scored(reward: float | None, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return score and meta of a sample with a possibly missing reward, for `shmbus.Producer.put`.

    Parameters
    ----------
    reward : float, optional
        None or NaN for an unscorable sample, like in TRL's reward functions.
    meta : mapping, optional
        Further meta of the sample.

    Returns
    -------
    dict
        "score" and "meta". A bus takes finite scores only, so the meta marks the missing score.

    Raises
    ------
    TypeError
        The reward is no number, or the meta no mapping.
    ValueError
        The reward is infinite.

    Examples
    --------
    >>> scored(None)
    {'score': 0.0, 'meta': {'unscorable': True}}
    """
    if meta is not None and not isinstance(meta, Mapping):
        raise TypeError(f"meta: expected a mapping or None, got {type(meta).__name__}")
    if reward is not None:
        try:
            reward = float(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"reward: expected a finite number, NaN or None, got {reward!r:.80}"
            ) from error
    if reward is not None and math.isinf(reward):
        raise ValueError(f"reward: expected a finite number, NaN or None, got {reward}; clip it")
    if reward is None or math.isnan(reward):
        return {"score": 0.0, "meta": {**(meta or {}), UNSCORABLE: True}}
    return {"score": float(reward), "meta": dict(meta) if meta is not None else None}


def check_size(group: shmbus.Group, expected: Expected) -> None:
    """Check a group's number of samples against the trainer's."""
    wanted = expected.group_size
    if wanted is not None and wanted not in (group.size, len(group)):
        raise ValueError(
            f"group {group.instance_id!r}: expected {wanted} samples, which num_generations of the "
            f"trainer's arguments says, got {len(group)} of {group.size}; give both the same number"
        )


def rewards_of(group: shmbus.Group) -> tuple[NDArray[np.float64], list[bool]]:
    """Return the rewards of a group, and which samples asked for an advantage of 0."""
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
    """Compare the samples of one group."""
    advantages = np.zeros(len(rewards))
    known = ~np.isnan(rewards)
    values = rewards[known]
    std = float("nan")
    if len(values):
        # Equal to numpy's mean and std, to the bit, at a fifth of their time for a few values.
        centred = values - np.add.reduce(values) / len(values)
        std = math.sqrt(np.add.reduce(centred * centred) / len(values))
        if kind == "grpo":  # as AsyncRolloutWorker of TRL 1.16
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


def metrics_of(meta: dict[str, Any], reward: float, std: float) -> dict[str, float]:
    """Return TRL's logged values of a sample: its reward, and further rewards by name."""
    metrics = {"reward": reward, "reward_std": std}
    rewards = meta.get("rewards")
    if isinstance(rewards, dict):
        metrics |= {
            f"rewards/{name}": float(value)
            for name, value in rewards.items()
            if isinstance(value, (int, float))
        }
    return metrics


def ledger_metrics(
    ledger: shmbus.Ledger, logged: Mapping[str, int]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return TRL's logged values of a ledger: the additions since the last call."""
    found = {"acknowledged": ledger.acknowledged}
    found |= {reason: ledger.dropped.get(reason, 0) for reason in _DROPS}
    metrics = {"shmbus/groups_ready": float(ledger.groups_ready)}
    for name, count in found.items():
        metrics[f"shmbus/{name}_total"] = float(count - logged.get(name, count))
    return metrics, found


def messages_of(given: object) -> list[Any]:
    """Return the messages of a meta, for traces; an empty list without messages."""
    return given if isinstance(given, list) else []
