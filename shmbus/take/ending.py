"""The ends of leases: acknowledged, dropped, given back.

Invariant: a group is checked here (that it is one, is leased, and is this Consumer's) before its
source ends the lease, so no source ends a lease twice. The one exception, a list of groups for a
daemon, is checked in the same call that ends them (`DaemonClient.end_groups`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmbus import errors
from shmbus.group import Group, GroupState
from shmbus.ledger import TrainedBefore
from shmbus.source import Source
from shmbus.take.attached import AttachedConsumer
from shmbus_ext import _core

__all__ = ["LeaseEnds"]


class LeaseEnds(AttachedConsumer):
    """`ack`, `drop` and `give_back`."""

    def ack(self, groups: Group | Iterable[Group]) -> None:
        """Acknowledge one group or several: the trainer is done with them, and their space is free.

        Each is atomic: all of its samples are acknowledged, or none, even if this process dies now.
        Does not wait for an answer.

        Without a daemon the groups are acknowledged when this returns. With one they are on their
        way to it: they take effect even if this process dies now, and, as long as this process
        lives, even if the daemon dies, since the next one is told. Only if both die before the
        daemon has read it is a group delivered again, as one that was never acknowledged.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased. A list is fastest.

        Raises
        ------
        ProtocolError
            One of them is not leased any more; those before it are acknowledged.
        TypeError
            Something is not a Group; those before it are acknowledged.
        DaemonUnavailableError
            The daemon has been unreachable for CLIENT_WAIT_S (30 s). The next one is still told.
        BusClosedError
            The consumer is closed, or was made before a fork.

        Examples
        --------
        One group, or several::

            groups = consumer.take(64, timeout=1.0)
            consumer.ack(groups[0])
            consumer.ack(groups[1:])
        """
        self._end("ack", groups, _core.ACKED, "acknowledged")

    def drop(self, groups: Group | Iterable[Group], *, useless: bool = False) -> None:
        """Discard leased groups; the ledger counts their samples as malformed, or as filtered.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased.
        useless : bool
            Nothing is wrong with them, but there is nothing to learn from them: they are counted as
            "filtered".

        Raises
        ------
        ProtocolError, TypeError, DaemonUnavailableError, BusClosedError
            As for `ack`; those before it are dropped.
        """
        reason = _core.DROP_FILTERED if useless else _core.DROP_MALFORMED
        self._end("drop", groups, reason, "dropped")

    def _end(
        self, verb: str, groups: Group | Iterable[Group], reason: int, state: GroupState
    ) -> None:
        source = self._require_source()
        several = _several(verb, groups)
        with source.lock:
            try:
                # One C call ends all, or stops at the group that raises below.
                for group in several[source.end_groups(self, several, reason, state) :]:
                    source.end(self._leased(source, group, verb), reason)
                    group.state = state
            finally:
                source.flush()

    def give_back(self, group: Group) -> None:
        """End a lease without acknowledging; the group is the next to be delivered.

        With a daemon this may wait up to REPLY_GRACE_S (1 s), for groups that were asked ahead and
        are given back, too.

        Parameters
        ----------
        group : Group
            Delivered by this consumer and still leased.

        Raises
        ------
        ProtocolError, TypeError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        source = self._require_source()
        source.recall()
        with source.lock:
            if not source.give_back_group(self, group, "given_back"):
                source.give_back(self._leased(source, group, "give back"))
                group.state = "given_back"
            source.flush()

    # -- what was trained ------------------------------------------------------------------------

    def note_trained(self, groups: Iterable[Group], step: int) -> None:
        """Say that groups are trained, for the checkpoints of other ranks; without ranks a no-op.

        Does not wait for an answer.

        Parameters
        ----------
        groups : iterable of Group
            Delivered by this consumer and still leased.
        step : int
            The trainer's own count of steps, alike on all ranks; -1 where they are not trained.

        Raises
        ------
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        source = self._require_source()
        leases = [self._leased(source, group, "note") for group in groups]
        source.note_trained(leases, step)

    def lasting_names(self, groups: Iterable[Group]) -> set[bytes]:
        """Return what samples are known by for good, for a checkpoint.

        Parameters
        ----------
        groups : iterable of Group
            Delivered by this consumer.

        Returns
        -------
        set of bytes
            One or two a sample, of 32 bytes: the identity of the bus that it was put onto, its
            producer id and sequence there. It is the same on a bus that is restored from a
            snapshot; a sample that a relay has brought has that of its source, too.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        self._require_source()
        return set().union(
            *(name for group in groups for name in _core.lasting_origins(group.trajectories))
        )

    def trained_before(self, step: int) -> TrainedBefore:
        """Return what is trained and may come again, for a checkpoint.

        Parameters
        ----------
        step : int
            What was noted (`note_trained`), on any rank, as of an earlier step is trained.

        Returns
        -------
        TrainedBefore
            Of what was noted, and of what `end_trained` was told. What this consumer has trained
            and not noted is not in it; without ranks nothing is noted.

        Raises
        ------
        DaemonUnavailableError, BusClosedError
            As for `stats`.
        """
        return self._require_source().trained_before(step)

    def end_trained(self, names: Iterable[bytes]) -> None:
        """Acknowledge samples that a checkpoint counts as trained, now and whenever they come.

        No group has them any more. What comes late of a group with a round that has such a sample
        is surplus. Groups that this consumer holds stay as they are; give them back first. A second
        call takes the place of the first.

        Parameters
        ----------
        names : iterable of bytes
            Lasting names, as of `trained_before` and `lasting_names`.

        Raises
        ------
        DaemonUnavailableError, BusClosedError
            As for `stats`.
        """
        self._require_source().end_trained({*names})

    def _leased(self, source: Source, group: Group, verb: str) -> Any:
        """Return the lease of a group that this Consumer holds."""
        if not isinstance(group, Group):
            raise TypeError(f"{verb}: expected a Group, got {type(group).__name__}")
        group.require_leased(verb)
        lease = group._lease
        if group._consumer is not self or not source.is_leased(lease):
            raise errors.ProtocolError(
                f"cannot {verb} group {group.instance_id!r} here, since another Consumer "
                "delivered it; use that one"
            )
        return lease


def _several(verb: str, groups: object) -> list[Any]:
    if isinstance(groups, list):
        return groups
    if isinstance(groups, Group):
        return [groups]
    if not isinstance(groups, Iterable):
        raise TypeError(
            f"{verb}: expected a Group or an iterable of Groups, got {type(groups).__name__}"
        )
    return list(groups)
