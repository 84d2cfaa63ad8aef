"""Groups of a bus as torchtitan's training samples, and its batcher's batches of these samples.

::

    batches = ShmbusBatches("run1", Batcher.Config(...).build(...))     # torchtitan.experiments.rl
    batch = batches.next(timeout=60.0); train(batch); batches.ack()

Invariants:

- torchtitan packs: the output comes from its Batcher and its own TrainingSampleGroup.
- A group is acknowledged only after `ShmbusBatches.ack`; groups collected for a never full batch
  stay leased.
- Importing this module loads neither torch nor torchtitan.
"""

from __future__ import annotations

import importlib
import time
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.base.arguments import check_choice, check_flag, check_timeout
from shmbus.batch.scores import are_equal
from trainer_adapter.adapters.optional_imports import Stack
from trainer_adapter.adapters.prompt_response import bad_field, checked_field
from trainer_adapter.adapters.requested_groups import still_leased

__all__ = ["ShmbusBatches", "sample_group"]

_TORCHTITAN: Final = Stack("torchtitan", {"torchtitan": "0.3.0"}, "torchtitan==0.3.0")
#: Seconds of one wait for groups; Ctrl-C takes effect between two waits.
_LOOK_S: Final = 1.0
_TYPES: Final = "torchtitan.experiments.rl.types"
_NEEDED: Final = ("RolloutTurnID", "TrainingSample", "TrainingSampleGroup")


def sample_group(
    group: shmbus.Group,
    group_id: int,
    *,
    advantages: str = "dr_grpo",
    drop_equal: bool = True,
    types: ModuleType | None = None,
) -> Any:
    """Make torchtitan's TrainingSampleGroup of a group.

    Parameters
    ----------
    group : Group
        Leased; the result holds copies. Each row of a sample becomes a TrainingSample.
    group_id : int
        Unique in the run.
    advantages : str
        "dr_grpo", torchtitan's default: the score minus the group's mean; or "grpo", "rloo" or
        "none", as for `trainer_adapter.group_advantages`.
    drop_equal : bool
        True to return no samples for a group of equal scores, as with torchtitan's
        ``drop_zero_std_reward_groups``.
    types : module, optional
        torchtitan's.

    Returns
    -------
    torchtitan.experiments.rl.types.TrainingSampleGroup

    Raises
    ------
    ValueError
        A sample with a missing or invalid field, named in the message. Or the kind compares across
        groups.
    ImportError
        torchtitan is missing, or uses different names.
    """
    from trainer_adapter.advantages import group_advantages

    found = types or _types()
    _check_kind(advantages)
    scores = np.array([t.score for t in group], np.float64)
    if drop_equal and len(scores) > 1 and are_equal(np.min(scores), np.max(scores)):
        return found.TrainingSampleGroup(group_id=group_id, training_samples=[], metrics=[])
    kind: Any = advantages
    of_group = np.asarray(group_advantages(scores, kind), np.float64)
    samples = []
    for t, advantage in zip(group, of_group.tolist(), strict=True):
        for place, row in enumerate(t.rows):
            tokens, mask, logprobs = (_field(t, row, name) for name in _FIELDS)
            sampled, own = mask != 0, row.get("advantages")
            credit = advantage if own is None else _own_advantages(t, own, sampled)
            samples.append(
                found.TrainingSample(
                    min_policy_version=t.policy_version,
                    max_policy_version=t.newest_policy_version,
                    rollout_id=found.RolloutTurnID(
                        group_id=group_id, rollout_id=t.index, turn_id=place
                    ),
                    token_ids=tokens.tolist(),
                    loss_mask=sampled.tolist(),
                    logprobs=np.where(sampled, logprobs, 0.0).tolist(),
                    advantage=np.where(sampled, credit, 0.0).tolist(),
                )
            )
    return found.TrainingSampleGroup(group_id=group_id, training_samples=samples, metrics=[])


_KINDS: Final = ("dr_grpo", "grpo", "rloo", "none")
_FIELDS: Final = ("tokens", "loss_mask", "logprobs")


def _check_kind(advantages: str) -> None:
    check_choice("advantages", advantages, _KINDS, "torchtitan compares within a group")


def _own_advantages(
    t: shmbus.Trajectory, own: NDArray[Any], sampled: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the sample's own advantages, one for each token."""
    if own.shape != sampled.shape or own.dtype.kind not in "biuf":
        got = f"{own.dtype} in shape {own.shape}"
    else:
        values = own.astype(np.float64)
        if np.isfinite(values[sampled]).all():
            return values
        got = "others"
    expected = f"a finite number for each of {len(sampled)} tokens"
    raise bad_field(t, "advantages", expected, got, "correct it, or leave it out")


def _field(t: shmbus.Trajectory, row: Any, name: str) -> Any:
    array = checked_field(t, row, name)
    # torchtitan's lists contain int and float.
    if name == "tokens" and array.dtype.kind == "b":
        return array.astype(np.int64)
    return array.astype(np.float64) if name == "logprobs" and array.dtype.kind != "f" else array


def _types() -> ModuleType:
    _TORCHTITAN.needed(_TYPES, *_NEEDED)
    return importlib.import_module(_TYPES)


class ShmbusBatches:
    """torchtitan batches of a bus's groups.

    Parameters
    ----------
    bus : str
    batcher : torchtitan.experiments.rl.components.batcher.Batcher
        Built like its controller's; sets the number of groups per batch.
    advantages : str
    drop_equal : bool
        As for `sample_group`.
    types : module, optional
        torchtitan's.
    **options : object
        Of `shmbus.Consumer`, for example `max_policy_lag`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, or unknown advantages.
    ImportError
        torchtitan is missing, or uses different names.
    """

    def __init__(
        self,
        bus: str,
        batcher: Any,
        *,
        advantages: str = "dr_grpo",
        drop_equal: bool = True,
        types: ModuleType | None = None,
        **options: Any,
    ) -> None:
        self._types = types or _types()
        _check_kind(advantages)
        check_flag("drop_equal", drop_equal)
        if not hasattr(batcher, "add_training_samples"):
            raise TypeError(
                "batcher: expected torchtitan's Batcher, got "
                f"{type(batcher).__name__} without add_training_samples"
            )
        self._batcher = batcher
        self._advantages = advantages
        self._drop_equal = drop_equal
        self._number = 0
        self._collected: list[shmbus.Group] = []
        self._given: list[shmbus.Group] = []
        self._consumer = shmbus.Consumer(bus, **{"label": "torchtitan", **options})

    def next(self, timeout: float | None = None) -> Any:
        """Return the next batch.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for its groups; None waits for ever.

        Returns
        -------
        TrainingBatch or None
            None for missing groups; groups already here stay for the next call.

        Raises
        ------
        ValueError
            As for `sample_group`; the group stays leased, and comes again to a next trainer.
        """
        check_timeout(timeout, "timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            for group in self._consumer.take(1, max(0.0, left_s)):
                made = sample_group(
                    group, self._number, advantages=self._advantages,
                    drop_equal=self._drop_equal, types=self._types,
                )  # fmt: skip
                self._number += 1
                if not made.training_samples:
                    self._consumer.drop(group, reason="filtered")
                    continue
                self._collected.append(group)
                batch = self._batcher.add_training_samples(training_sample_group=made)
                if batch is not None:
                    self._given += self._collected
                    self._collected = []
                    return batch
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def ack(self, policy_version: int | None = None) -> None:
        """Acknowledge the groups of every batch returned, after training.

        Parameters
        ----------
        policy_version : int, optional
            The version made by the step, for the workers.
        """
        if self._given:
            self._consumer.ack(still_leased(self._given))
            self._given = []
        if policy_version is not None:
            self._consumer.policy_version = policy_version

    def close(self) -> None:
        """Leave the bus; unacknowledged groups are delivered to the next trainer."""
        self._consumer.close()
