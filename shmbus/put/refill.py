"""Refilling: how many groups of a bus had nothing to learn from.

Invariant: the count never falls, and is the whole bus's.
"""

from __future__ import annotations

from shmbus.put.attached import AttachedWriter
from shmbus_ext import _core

__all__ = ["RefillCount"]


class RefillCount(AttachedWriter):
    """`groups_useless`: what to sample again for."""

    @property
    def groups_useless(self) -> int:
        """Groups without variance, or refused by a filter, since the bus was created.

        A trainer that wants so many groups a step needs as many more as this grows by.
        """
        return _core.groups_useless(self._here())
