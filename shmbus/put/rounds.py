"""Before a sample is made: a number for its round, and a note of who has begun it.

Invariants:

- A number is handed out once on a bus, and never by the bus that takes its place.
- The count of useless groups never falls, and is the whole bus's.
- A note of a begun sample is for those who look at the bus. Nothing is delivered, refused or waited
  for because of it.
"""

from __future__ import annotations

from shmbus._arguments import check_count, check_instance_id, check_round, check_split
from shmbus.put.attached import AttachedWriter
from shmbus_ext import _core

__all__ = ["RoundPuts"]


class RoundPuts(AttachedWriter):
    """`next_round` and `groups_useless`, `begin` and `abandon`."""

    @property
    def groups_useless(self) -> int:
        """Groups for training that were dropped whole, for any reason, since the bus was created.

        A trainer that wants so many groups a step needs as many more as this grows by.
        """
        return _core.groups_useless(self._here())

    def next_round(self) -> int:
        """Return a number that nobody else gets on this bus, for the `round` of one round.

        Ask once for each time that a prompt is sampled, and pass it as `round=` with all samples of
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

    def begin(
        self,
        instance_id: str | int,
        index: int,
        *,
        round: int | None = None,
        split: str | None = None,
    ) -> bool:
        """Say that this producer samples it now, so that others can tell who is missing.

        `shmbus inspect --groups` and the page name the producer then, from the group's first sample
        on. The note ends by itself when the sample is put or reported as failed, and when this
        producer closes or dies. A sample that `requests.next` gave needs none.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `put`.
        index : int
            Which sample of its group, from 0.
        round : int, optional
            Which round of the prompt, as for `put`.
        split : str, optional
            Who the group is for, as for `put`.

        Returns
        -------
        bool
            False where too many samples are noted already (4,096 on a bus): nothing else depends on
            it.

        Raises
        ------
        TypeError, ValueError
            As for `put`.
        BusClosedError
            This Producer is closed, or was made before a fork.

        Notes
        -----
        A compare-and-swap in shared memory: it waits for nobody.
        """
        return self._begin(*_sample(instance_id, index, round, split))

    def abandon(
        self,
        instance_id: str | int,
        index: int,
        *,
        round: int | None = None,
        split: str | None = None,
    ) -> bool:
        """Take back what `begin` said: the sample is not made here any more.

        Where the group still needs it, `fail` is what asks for it again.

        Parameters
        ----------
        instance_id, index, round, split : object
            As for `begin`.

        Returns
        -------
        bool
            Whether it was noted as begun here.

        Raises
        ------
        TypeError, ValueError, BusClosedError
            As for `begin`.
        """
        return self._leave_begun(*_sample(instance_id, index, round, split))


def _sample(
    instance_id: object, index: object, round: object, split: object
) -> tuple[str, int | None, str | None, int]:
    """Check the arguments that name a sample."""
    key = check_instance_id(instance_id)
    number = check_count("index", index, 0)
    if number >= _core.MAX_GROUP_SIZE:
        raise ValueError(f"index: expected less than {_core.MAX_GROUP_SIZE}, got {number}")
    return (
        key,
        check_round(round),
        None if split is None else check_split(split),
        number,
    )
