"""Groups of a dead gateway that are in the bus, as an observer sees them.

Invariant: nothing is written, and no group that this names lacks a sample.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection

from shmbus.inspect.dump import inspect

__all__ = ["committed_by", "whole_groups"]


def whole_groups(bus: str, keys: Collection[str]) -> list[str]:
    """Return the keys of groups of which every sample was committed.

    Parameters
    ----------
    bus : str
        The bus.
    keys : collection of str
        Which groups to look for.

    Returns
    -------
    list of str
    """
    indices: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for record in inspect(bus, limit=sys.maxsize).records if keys else ():
        if record.instance_id in keys and record.state in ("committed", "released"):
            indices[record.instance_id].add(record.index)
            sizes[record.instance_id] = record.group_size
    return [key for key, size in sizes.items() if len(indices[key]) == size]


def committed_by(bus: str) -> dict[int, int]:
    """Return how many records each producer's slot has committed, by the producer's number.

    A producer that died may be among them, until another one has its slot. One that died in the
    middle of a commit is not: whether that counts is decided later.

    Parameters
    ----------
    bus : str
        The bus.

    Returns
    -------
    dict of int to int
        The slot's own count, also of the producers that had it before.
    """
    return {
        slot.producer_id: slot.committed
        for slot in inspect(bus, limit=0).slots
        if not slot.commit_under_way
    }
