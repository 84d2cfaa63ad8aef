"""Splits between buses: a split number is local to a bus, so messages carry labels.

Invariant: numbers in heads and blocks travel with the labels of their bus.
"""

from __future__ import annotations

from collections.abc import Hashable

from shmbus.data.keys import make_key, split_key
from shmbus.relay.messages import GroupName
from shmbus_ext import _core


class Splits:
    """Numbers for the labels of every bus, up to a bus's limit."""

    def __init__(self) -> None:
        self.labels = [_core.TRAIN]
        #: Labels without a free number.
        self.left_out: set[str] = set()

    def number(self, label: str) -> int:
        """Return a label's number, new if needed; MAX_SPLITS without a free number."""
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
        """Return the shared name of a key's group."""
        instance_id, round, split = split_key(key)
        return instance_id, round, self.labels[split]


def labels_of(segment: _core.Segment) -> tuple[str, ...]:
    """Return a bus's labels by number, "" for an unlabelled number."""
    found = {row[0]: row[1] for row in _core.splits(segment)}
    return tuple(found.get(number, "") for number in range(max(found) + 1))


def number_of(segment: _core.Segment, label: str) -> int:
    """Return a bus's number of a label, new if needed; MAX_SPLITS without a free number."""
    try:
        return _core.split_number(segment, label)
    except ValueError:
        return _core.MAX_SPLITS
