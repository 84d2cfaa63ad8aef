"""Splits between buses: a number is one bus's own, so what crosses says labels.

Invariant: where a number crosses, in heads and in blocks, the labels of its bus are beside it.
"""

from __future__ import annotations

from collections.abc import Hashable

from shmbus._keys import make_key, split_key
from shmbus.relay.messages import GroupName
from shmbus_ext import _core


class Splits:
    """Numbers for labels of all buses, as many as a bus has."""

    def __init__(self) -> None:
        self.labels = [_core.TRAIN]
        #: Labels for which there was none left.
        self.left_out: set[str] = set()

    def number(self, label: str) -> int:
        """Return the number of a label, new if need be; MAX_SPLITS where all are taken."""
        if label not in self.labels:
            if not label or len(self.labels) == _core.MAX_SPLITS:
                self.left_out |= {label} - {""}
                return _core.MAX_SPLITS
            self.labels.append(label)
        return self.labels.index(label)

    def key(self, name: GroupName) -> Hashable:
        """Return the key of a group."""
        return make_key(name[0], name[1], self.number(name[2]))

    def name(self, key: Hashable) -> GroupName:
        """Return what all buses call the group of a key."""
        instance_id, round, split = split_key(key)
        return instance_id, round, self.labels[split]


def labels_of(segment: _core.Segment) -> tuple[str, ...]:
    """Return the labels of a bus by number, "" for a number that has none."""
    found = {row[0]: row[1] for row in _core.splits(segment)}
    return tuple(found.get(number, "") for number in range(max(found) + 1))


def number_of(segment: _core.Segment, label: str) -> int:
    """Return a bus's number of a label, new if need be; MAX_SPLITS where all are taken."""
    try:
        return _core.split_number(segment, label)
    except ValueError:
        return _core.MAX_SPLITS
