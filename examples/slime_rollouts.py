"""slime on a bus: a rollout function that takes groups from the bus.

    SHMBUS_BUS=run1 ... --rollout-function-path slime_rollouts.generate_rollout

Rollout workers put samples by `put_sample`, from any process of this machine. slime installs with
CUDA only: the tests run against its published interface (624b824).

- slime takes samples one by one, and a group at its full size. Samples carry no number within their
  group: each becomes a bus group by itself, and the reader groups them by key.
- A sample unfit for slime is dropped and ends the call by name; the next call goes on.
- The call for the next step acknowledges its predecessor's groups, trained by slime meanwhile; the
  groups of a dead trainer come again.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import shmbus

_LOG = logging.getLogger("shmbus.slime")
_TAKE_GROUPS = 256
#: Seconds of a wait for groups, between two checks for Ctrl-C.
_WAIT_S = 1.0
#: Numbers of this process's samples; a producer's id is unique on its bus.
_numbers = itertools.count()
#: Key of the item in a record's meta.
ITEM_KEY = "slime"
#: Lists of numbers that become arrays: zero-copy views for a trainer on this machine.
_ARRAYS = (("tokens", np.int64), ("loss_mask", np.int64), ("rollout_log_probs", np.float64))
#: Python ints exceed floats; NaN and infinity fail the comparison, too.
_LARGEST_SCORE = sys.float_info.max


class Sample(NamedTuple):
    """An item with its bus group, waiting for its siblings."""

    item: dict[str, Any]
    group: shmbus.Group


def _array(item: Mapping[str, Any], name: str, dtype: type[np.generic]) -> Any:
    values = item.get(name)
    if not isinstance(values, list) or not values:
        return None
    wanted = (int,) if dtype is np.int64 else (int, float)
    if any(type(value) not in wanted for value in values):
        return None
    try:
        array = np.array(values, dtype)
    except OverflowError:
        return None
    # A list of mixed int and float stays in the meta: an array would lose the types.
    if dtype is np.float64 and any(type(value) is int for value in values):
        return None
    return array if np.isfinite(array).all() else None


def sample_of(item: Mapping[str, Any], *, policy_version: int = 0) -> dict[str, Any]:
    """Return an item as a sample of `Producer.put_group`; its reward is the score."""
    if not isinstance(item, Mapping):
        raise TypeError(f"item: expected a mapping, got {type(item).__name__}")
    key = item.get("instance_id")
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise ValueError(
            f"instance_id: expected the str or int of the sample's group, got {key!r}; add it to "
            "the item"
        )
    reward = item.get("reward", 0.0)
    if isinstance(reward, dict):
        # With several rewards the trainer chooses by its own option.
        score = 0.0
    elif isinstance(reward, (int, float)) and abs(reward) <= _LARGEST_SCORE:
        score = float(reward)
    else:
        raise ValueError(f"reward: expected a finite number, got {reward!r}; correct the item")
    arrays = {
        name: array for name, dtype in _ARRAYS if (array := _array(item, name, dtype)) is not None
    }
    rest = {name: value for name, value in item.items() if name not in arrays}
    return {
        "score": score, "policy_version": policy_version,
        "meta": {ITEM_KEY: rest, "order": list(item)}, **arrays,
    }  # fmt: skip


def is_slime(group: shmbus.Group) -> bool:
    """Whether `sample_of` made a bus group."""
    meta = group[0].meta if len(group) else None
    return isinstance(meta, dict) and isinstance(meta.get(ITEM_KEY), dict)


def item_of(group: shmbus.Group) -> dict[str, Any]:
    """Return the item of a record, its keys in their original order."""
    try:
        (sample,) = group.trajectories
        rest = sample.meta[ITEM_KEY]
        item = {
            name: rest[name] if name in rest else sample[name].tolist()
            for name in sample.meta["order"]
        }
        key = item["instance_id"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{ITEM_KEY!r} in its meta marks a sample of sample_of, which lacks something: {error}"
        ) from error
    if not isinstance(key, (str, int)):
        raise ValueError(f"instance_id: expected str or int, got {key!r}")
    return item


class SampleGroups:
    """Samples by key, in order of the keys' arrival; late samples join a whole group."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._groups: dict[str | int, list[Sample]] = {}
        self._uids: dict[str | int, set[str]] = {}

    def add(self, sample: Sample) -> bool:
        """Add a sample; return False for a repeated ``uid`` within a group, without adding."""
        key = sample.item["instance_id"]
        uid = sample.item.get("uid")
        if isinstance(uid, str):
            known = self._uids.setdefault(key, set())
            if uid in known:
                return False
            known.add(uid)
        self._groups.setdefault(key, []).append(sample)
        return True

    def complete(self) -> int:
        """Return the count of complete groups."""
        return sum(len(samples) >= self.group_size for samples in self._groups.values())

    def take(self, limit: int) -> list[list[Sample]]:
        """Take complete groups out."""
        keys = [k for k, samples in self._groups.items() if len(samples) >= self.group_size]
        for key in keys[:limit]:
            self._uids.pop(key, None)
        return [self._groups.pop(key) for key in keys[:limit]]


def put_sample(producer: shmbus.Producer, item: Mapping[str, Any]) -> None:
    """Put a sample: `instance_id` names its group, `reward` becomes its score."""
    key = f"slime-{producer.producer_id}-{next(_numbers)}"
    producer.put_group(key, [sample_of(item, policy_version=producer.policy_version)])


def _fill(sample: Any, item: Mapping[str, Any]) -> Any:
    """Set an item's known fields on a Sample; the default status is completed."""
    try:
        sample.status = type(sample).Status(item.get("status", "completed"))
    except ValueError as error:
        raise ValueError(
            f"status of a sample of group {item.get('instance_id')!r}, uid {item.get('uid')!r}: "
            f"{error}; report what slime knows"
        ) from error
    # Only fields: an item must never replace a method.
    known = vars(sample)
    for name, value in item.items():
        if name != "status" and name in known:
            setattr(sample, name, value)
    if not getattr(sample, "response_length", 0) and isinstance(item.get("loss_mask"), list):
        sample.response_length = len(item["loss_mask"])
    return sample


class SlimeRollouts:
    """Groups of a bus as slime's Samples."""

    def __init__(
        self, name: str, group_size: int, make_sample: Callable[[], Any] | None = None
    ) -> None:
        self._make = make_sample
        self._groups = SampleGroups(group_size)
        self._given: list[shmbus.Group] = []
        self._next_index = 0
        self._consumer = shmbus.Consumer(name)

    def take(self, count: int, timeout: float | None = None) -> list[list[Any]]:
        """Return groups of Samples, fewer only at the timeout; acknowledges the last call's."""
        self.ack()
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._groups.complete() < count:
            left = _WAIT_S if deadline is None else min(_WAIT_S, deadline - time.monotonic())
            problem: ValueError | None = None
            for group in self._consumer.take(_TAKE_GROUPS, timeout=max(0.0, left)):
                try:
                    self._collect(group)
                except ValueError as error:
                    self._consumer.drop(group)
                    _LOG.warning("dropped: %s", error)
                    problem = problem or error
            if problem is not None:
                raise problem
            if deadline is not None and time.monotonic() >= deadline:
                break
        found = []
        for number, samples in enumerate(self._groups.take(count)):
            self._given += [sample.group for sample in samples]
            found.append([self._sample(each.item, number) for each in samples])
        return found

    def _collect(self, group: shmbus.Group) -> None:
        item = item_of(group) if is_slime(group) else None
        if item is not None:
            _fill(self._empty(), item)
        if item is None or not self._groups.add(Sample(item, group)):
            self._consumer.drop(group)

    def _empty(self) -> Any:
        if self._make is None:
            from slime.utils.types import Sample as SlimeSample

            self._make = SlimeSample
        return self._make()

    def _sample(self, item: Mapping[str, Any], group_index: int) -> Any:
        sample = _fill(self._empty(), item)
        sample.group_index, sample.index = group_index, self._next_index
        self._next_index += 1
        return sample

    def ack(self) -> None:
        """Acknowledge the last call's groups, trained by now."""
        # An interrupted call may have acknowledged a part.
        self._consumer.ack([group for group in self._given if group.state == "leased"])
        self._given = []

    def close(self) -> None:
        """Leave the bus; the next trainer gets the unacknowledged groups."""
        self._consumer.close()


_rollouts: SlimeRollouts | None = None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the next step's groups, as slime calls ``--rollout-function-path``."""
    global _rollouts
    if evaluation:
        raise ValueError("a bus has no evaluation prompts; give slime --eval-function-path")
    from slime.rollout.base_types import RolloutFnTrainOutput

    if _rollouts is None:
        name = getattr(args, "shmbus_bus", None) or os.environ["SHMBUS_BUS"]
        _rollouts = SlimeRollouts(name, args.n_samples_per_prompt)
    return RolloutFnTrainOutput(samples=_rollouts.take(args.rollout_batch_size), metrics=None)


if __name__ == "__main__":
    print(__doc__)
