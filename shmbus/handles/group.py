"""A delivered group: held by the trainer under lease until acknowledgement.

Invariant: a group is leased, acknowledged, given back or dropped. Its state leaves "leased" exactly
once, and only the Consumer changes it.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NoReturn

from shmbus import errors
from shmbus.base.arguments import TRAIN
from shmbus.data.copies import GroupCopy, ReadGroup
from shmbus_ext._core import GroupBase, Trajectory

GroupState = Literal["leased", "acknowledged", "given_back", "dropped"]


class Group(ReadGroup[Trajectory], GroupBase):
    """All samples of a prompt, ordered by index, under lease of a single Consumer.

    A group acts as a sequence of its trajectories. As a context manager it acknowledges on success,
    and gives itself back after an exception; a lease that ended inside the block stays ended.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int | None
        The producers' round, if given.
    size : int
        Samples of the group. ``len(group)`` counts the present samples: fewer only for a group with
        a smaller need, or delivered under a "partial" option of the Consumer.
    state : "leased" | "acknowledged" | "given_back" | "dropped"
        Under lease, or how the lease ended.
    trajectories : list[Trajectory]
        The samples, ordered by index. The list belongs to the caller: changes affect no lease.
    columns : dict of str to list of array
        Arrays added to the group after its samples were put, by name, one per sample. They belong
        to this process, and to this lease.
    annotated : bool
        True with columns.

    Examples
    --------
    A block acknowledges its group, or gives it back after an exception::

        (group,) = consumer.take(1, timeout=None)
        with group:
            rewards = [t.score for t in group]
            tokens = [t["tokens"] for t in group]  # read-only views of the ring
    """

    # For columns, which few groups carry: the dict of attributes is made with the first column.
    __slots__ = ("__dict__",)

    state: GroupState
    _columns: dict[str, list[Any]] | None = None

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Arrays added to the group after its samples were put, by name, one per sample."""
        if self._columns is None:
            self._columns = {}
        return self._columns

    @property
    def annotated(self) -> bool:
        """True with columns."""
        return bool(self._columns)

    def copy(self) -> GroupCopy:
        """Copy the group out of the ring; its lease goes on.

        Returns
        -------
        GroupCopy
            A picklable copy with the same interface and its own arrays.

        Raises
        ------
        BusClosedError
            The group was acknowledged or dropped, or its consumer is closed.
        """
        return GroupCopy(self.instance_id, self.round, self.size, [t.copy() for t in self])

    def to_dict(self) -> dict[str, Any]:
        """Return the group as plain values, with owned arrays.

        Returns
        -------
        dict
            "instance_id", "round", "size", and "trajectories": a list of dicts from
            `Trajectory.to_dict`, which `Producer.put_many` takes unchanged.

        Raises
        ------
        BusClosedError
            As for `copy`.
        """
        return self.copy().to_dict()

    def ack(self) -> None:
        """Acknowledge a trained group; its space returns to the ring.

        All its samples are acknowledged, or none, even if this process dies now. Does not wait for
        an answer; see `Consumer.ack` for the effect of a daemon's death. Arrays still referenced
        stay valid.

        Raises
        ------
        ProtocolError
            The group was acknowledged, dropped or given back before.
        DaemonUnavailableError
            The daemon was unreachable for CLIENT_WAIT_S (30 s).
        BusClosedError
            The consumer is closed; the next consumer gets the group again.
        """
        self._consumer.ack(self)

    def give_back(self) -> None:
        """End the lease without acknowledging: this group will be delivered next.

        Raises
        ------
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        self._consumer.give_back(self)

    def drop(self) -> None:
        """End the lease and discard the group; the ledger counts its samples as malformed.

        Raises
        ------
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        self._consumer.drop(self)

    def require_leased(self, verb: str) -> None:
        """Raise unless the group is under lease.

        Parameters
        ----------
        verb : str
            The intended action, for the message.

        Raises
        ------
        ProtocolError
            The group was acknowledged, dropped or given back before.
        """
        if self.state != "leased":
            raise errors.ProtocolError(
                f"cannot {verb} group {self.instance_id!r}, since it is "
                f"{self.state.replace('_', ' ')} already; "
                "each delivered group ends once"
            )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.state != "leased":
            return
        if kind is None:
            self.ack()
            return
        # A closed Consumer gave the group back; a forked child owns no part of it. Neither error
        # may replace the exception that ended the block, for example the SystemExit of that child.
        with contextlib.suppress(errors.BusClosedError):
            self.give_back()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"group {self.instance_id!r} is under lease, and its arrays are views of the ring: it "
            "cannot be pickled or sent to another process; pickle its .copy(), which owns its "
            "arrays"
        )

    def __repr__(self) -> str:
        round = "" if self.round is None else f" round={self.round}"
        if self.split != TRAIN:
            round += f" split={self.split!r}"
        return f"<Group {self.instance_id!r}{round} {len(self)}/{self.size} {self.state}>"
