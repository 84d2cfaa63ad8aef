"""Rounds: epochs that producers get without thinking, and how many more rounds are wanted.

Invariants:

- A number is handed out once on a bus, and never by the bus that takes its place.
- The count of useless groups never falls, and is the whole bus's.
"""

from __future__ import annotations

from shmbus.put.attached import AttachedWriter
from shmbus_ext import _core

__all__ = ["RoundPuts"]


class RoundPuts(AttachedWriter):
    """`next_round` and `groups_useless`."""

    @property
    def groups_useless(self) -> int:
        """Groups without variance, or refused by a filter, since the bus was created.

        A trainer that wants so many groups a step needs as many more as this grows by.
        """
        return _core.groups_useless(self._here())

    def next_round(self) -> int:
        """Return a number that nobody else gets on this bus, for the `epoch` of one round.

        Ask once for each time that a prompt is sampled, and pass it as `epoch=` with all samples of
        that round: they are a group of their own then, also while another round of the same prompt
        is under way. Where several workers sample one round, one asks and tells the others.

        Returns
        -------
        int
            Greater than all that were handed out before, in this process or any other, through
            deaths, snapshots and a bus that takes the place of a removed one. A number of 16
            digits: the first is the time at which the bus was made, in microseconds.

        Raises
        ------
        BusClosedError, BusRemovedError
            This Producer is closed; or its bus was removed, and it may not go on in a successor.

        Notes
        -----
        One atomic addition in shared memory: it waits for nobody.
        """
        segment = self._here()
        segment.require_name()
        return _core.next_round(segment)
