"""A sample of slime's rollout buffer as a record of a bus, and groups of samples by their key.

slime's buffer takes samples one by one and gives a group out once it has enough of them. Nobody
numbers the samples of a group, so each is a bus group of one, and the reader groups them: nothing
is forgotten when a writer or the reader dies.

Invariants:

- `item_of` gives what `sample_of` was given.
- An item is in one group of a `SampleGroups`, until `take` hands it out or `clear` forgets it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

import shmbus

__all__ = ["ITEM_KEY", "Sample", "SampleGroups", "is_slime", "item_of", "sample_of"]

#: Where the meta of a record has the item.
ITEM_KEY: Final = "slime"
#: Lists of numbers that become arrays, so that a trainer on this machine reads views of them.
_ARRAYS: Final = (("tokens", np.int64), ("loss_mask", np.int64), ("rollout_log_probs", np.float64))
#: Ints have no end; NaN and infinity are beyond it, too.
_LARGEST_SCORE: Final = sys.float_info.max


class Sample(NamedTuple):
    """An item that waits for the others of its group, and whatever the caller keeps of it."""

    item: dict[str, Any]
    group: Any


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
    # A list that mixes int and float stays as it is, in the meta: an array would not give it back.
    if dtype is np.float64 and any(type(value) is int for value in values):
        return None
    return array if np.isfinite(array).all() else None


def sample_of(item: Mapping[str, Any], *, policy_version: int = 0) -> dict[str, Any]:
    """Return an item as one sample of `Producer.put_group`.

    Parameters
    ----------
    item : mapping
        What was written: ``instance_id`` says its group, ``reward`` is its score.
    policy_version : int
        Of the sample.

    Returns
    -------
    dict

    Raises
    ------
    TypeError
        It is no mapping.
    ValueError
        There is no instance_id of str or int, or the reward is no finite number.
    """
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
        # With several rewards the trainer chooses one by its own option.
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
    """Whether a bus group was made by `sample_of`."""
    meta = group[0].meta if len(group) else None
    return isinstance(meta, dict) and isinstance(meta.get(ITEM_KEY), dict)


def item_of(group: shmbus.Group) -> dict[str, Any]:
    """Return the item that a record was made of.

    Parameters
    ----------
    group : Group
        Leased, and of `sample_of`.

    Returns
    -------
    dict
        Its keys in the order in which they came.

    Raises
    ------
    ValueError
        It has the mark of `sample_of`, and not all that belongs to it.
    """
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
    """Samples by their key, in the order in which the keys came; late ones join a whole group."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._groups: dict[str | int, list[Sample]] = {}
        self._uids: dict[str | int, set[str]] = {}

    def __len__(self) -> int:
        return sum(len(samples) for samples in self._groups.values())

    def add(self, sample: Sample) -> bool:
        """Add a sample; False for a second one of its group with the same ``uid``, which is not."""
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
        """Return how many groups are complete."""
        return sum(len(samples) >= self.group_size for samples in self._groups.values())

    def take(self, limit: int | None = None) -> list[list[Sample]]:
        """Take complete groups out, `limit` at the most."""
        keys = [k for k, samples in self._groups.items() if len(samples) >= self.group_size]
        for key in keys[:limit]:
            self._uids.pop(key, None)
        return [self._groups.pop(key) for key in keys[:limit]]

    def clear(self) -> list[Sample]:
        """Forget all samples, and return them."""
        found = [sample for samples in self._groups.values() for sample in samples]
        self._groups.clear()
        self._uids.clear()
        return found

    def summary(self) -> dict[str, Any]:
        """Return what slime's buffer says of the samples that wait."""
        rewards = [
            reward
            for samples in self._groups.values()
            for sample in samples
            if isinstance(reward := sample.item.get("reward"), (int, float))
        ]
        groups = len(self._groups)
        return {
            "total_samples": len(self),
            "num_groups": groups,
            "avg_group_size": len(self) / groups if groups else 0,
            "avg_reward": sum(rewards) / len(rewards) if rewards else 0,
        }
