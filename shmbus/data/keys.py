"""The key of a group, common to all its samples.

A key is an instance id; or (instance id, round) if producers give rounds; or, for a split other
than "train", (instance id, round or None, number of the split). The core makes the keys of
trajectories in the same form.
"""

from __future__ import annotations

from collections.abc import Hashable

from shmbus_ext import _core


def make_key(instance_id: str, round: int | None, split: int) -> Hashable:
    """Return the key of a group, in the core's form."""
    if split != _core.SPLIT_TRAIN:
        return (instance_id, round, split)
    return instance_id if round is None else (instance_id, round)


def split_key(key: Hashable) -> tuple[str, int | None, int]:
    """Return instance id, round and the number of the split."""
    if not isinstance(key, tuple):
        return str(key), None, _core.SPLIT_TRAIN
    return key[0], key[1], key[2] if len(key) > 2 else _core.SPLIT_TRAIN


def split_of(key: Hashable) -> int:
    """Return the number of the split."""
    return key[2] if isinstance(key, tuple) and len(key) > 2 else _core.SPLIT_TRAIN


def has_round(key: Hashable) -> bool:
    """Tell if a repetition of the prompt gets a key of its own."""
    return isinstance(key, tuple) and key[1] is not None
