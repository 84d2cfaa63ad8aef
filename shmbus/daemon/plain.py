"""The plain case of a service: one request is the next, and only its groups are missing.

Then all that is left to decide is known before the groups are, and C may lease them and write the
reply (`granting.py`). Here it is said when that is so, and what was granted enters the books.

Invariant: what C grants is what `Service.serve` would grant, to the same client, under the same
numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from shmbus.control import messages
from shmbus.daemon.history import History
from shmbus.daemon.leases import LeaseTable, Session
from shmbus.daemon.recovery import Claims
from shmbus.daemon.steps import StepPlanner
from shmbus.stash.collector import Collector
from shmbus_ext import _core

__all__ = ["Entry", "PlainGrants", "Request", "Waiting"]

#: Groups for which the ring is read in one go, before other messages have their turn.
_PORTION = 256

#: Where a reply goes, the request's id, its split, how many groups it wants, the number of its
#: first lease, and what goes before the reply: the arguments of `_core.Granter.arm`.
Request: TypeAlias = tuple[int, int, int, int, int, bytes]
Entry: TypeAlias = "_core.GroupEntry[_core.Trajectory]"


class Waiting:
    """A Take or TakeStep that has not been answered."""

    __slots__ = ("deadline_s", "request", "session", "split", "wanted")

    def __init__(
        self,
        session: Session,
        request: messages.Take | messages.TakeStep,
        split: int,
        now: float,
    ) -> None:
        self.session = session
        self.split = split
        self.request = request
        #: Ready groups up to which the ring is read in one go.
        self.wanted = request.max_groups if isinstance(request, messages.Take) else _PORTION
        self.wanted = min(self.wanted, _PORTION)
        self.deadline_s = None if request.timeout_s is None else now + request.timeout_s


class PlainGrants(ABC):
    """The part of a service that grants outside of it, and notes it."""

    collector: Collector
    sessions: dict[int, Session]
    history: History
    _waiting: list[Waiting]
    _claims: Claims | None
    _planner: StepPlanner | None
    _table: LeaseTable
    #: A bit for each split whose groups clients take, or have taken.
    splits: int

    @property
    @abstractmethod
    def is_special(self) -> bool:
        """Whether more is going on than groups coming and leases ending."""

    @abstractmethod
    def pump(self, now: float) -> bool:
        """Read a portion of the ring and answer requests that wait; True if there may be more."""

    @property
    def has_returned(self) -> bool:
        """Whether groups wait here for the next client that the stash does not know of."""
        return bool(self._table.returned)

    def _is_alone(self) -> bool:
        """Whether there is one client that takes groups."""
        return sum(not session.observer for session in self.sessions.values()) == 1

    def _end_ahead(self, session: Session, now: float) -> None:
        """Have what this client asked ahead before answered now, with what is there."""
        for waiting in self._waiting:
            request = waiting.request
            if waiting.session is session and isinstance(request, messages.Take) and request.ahead:
                waiting.deadline_s = now

    def next_plain(self) -> Request | None:
        """Return the request that is answered next, where no decision is left but for its groups.

        The answer holds until anything else happens to the service.
        """
        if not self._waiting or self._claims is not None or self.is_special:
            return None
        waiting = self._waiting[0]
        request = waiting.request
        if (
            self._planner is not None
            or not isinstance(request, messages.Take)
            or self._table.returned
            or not self.collector.is_plain
            or (request.ahead and not self._is_alone())
            or (way := waiting.session.direct()) is None
        ):
            return None
        fd, before = way
        number = self._table.next_number
        return fd, request.id, waiting.split, request.max_groups, number, before

    def note_granted(
        self, left: list[Entry | tuple[int, _core.Trajectory]], entries: list[Entry], rest: bytes,
        now: float,
    ) -> bool:  # fmt: skip
        """Enter what was granted to the request of `next_plain`, and go on from there.

        Parameters
        ----------
        left : list
            What was read besides, and is for a policy.
        entries : list[GroupEntry]
            Under lease, and written to the client; empty where nothing was.
        rest : bytes
            The end of the reply, which is not written yet.
        now : float
            Seconds on the monotonic clock.

        Returns
        -------
        bool
            Whether the ring may have more.
        """
        self.history.look_at_producers()
        if entries:
            waiting = self._waiting.pop(0)
            session = waiting.session
            session.sent_directly(rest)
            for entry in entries:
                lease = self._table.lease_of(entry, entry.samples)
                session.leases[lease.number] = lease
                self.history.leased(lease, session)
            session.end_wait(now)
            self.collector.note_leased(entries)
        if left:
            self.collector.stash.apply_policy(left, now)
        return bool(self._waiting or not entries) and self.pump(now)
