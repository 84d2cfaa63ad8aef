"""Looks: what `take(timeout=0)` does through a daemon, for a caller that looks again and again.

To ask a daemon that sleeps costs two wake-ups, and as much of its processor, for the answer that
there is nothing. So who looks often leaves a request there, which is answered when there is a
group; in between, that the daemon sleeps and has sent nothing says that there is none.

Invariants:

- A look that finds nothing is true: whatever was put before it began had been read by the daemon,
  and made no group complete. A daemon that sleeps openly has no complete group, so that holds
  also for a request that it has not read yet.
- A request is left by a client that is alone, for STANDS_S at most, and under a policy that judges
  no group by when it is taken. What it brings is leased, and given back as any other lease is.
- Nothing waits for a reply that may never come: a dialogue in doubt ends the connection.
"""

from __future__ import annotations

import time
from typing import Protocol

from shmbus.client.connection import REPLY_GRACE_S, Connection
from shmbus.client.leases import ClientState, Leases
from shmbus.control import messages
from shmbus.control.wire import Wire, refusal
from shmbus_ext import _core

__all__ = ["Looks"]

#: Seconds that a request stands with the daemon; who stops looking has what came to it for as
#: long, where a second client could have had it.
STANDS_S = 0.01
#: Looks in vain, one soon after the other, after which a caller is taken for one that goes on.
OFTEN = 3
#: Seconds that a look stays awake for a daemon that somebody has just woken: it needs a third of it
#: to wake up and to reply, or to sleep again. To be asked costs it and this process a wake-up each.
AWAKE_S = 0.0001
#: Seconds between two such looks: far more than one takes, and less than a step of a trainer.
SOON_S = 0.001


class Client(Protocol):
    """What this needs of a daemon's client."""

    segment: _core.Segment
    state: ClientState
    connection: Connection
    leases: Leases

    def ask(self, max_groups: int, timeout: float | None, ahead: int) -> bool: ...
    def leave_request(self, max_groups: int, timeout_s: float) -> int: ...
    def borrow(self, reply: messages.Leases, wire: Wire) -> object: ...


class Looks:
    """The looks of one client, and the request that it has left with the daemon.

    Each call is told the client: with a reference of each to the other, a Consumer that nobody
    refers to would not end.
    """

    def __init__(self) -> None:
        #: The id of the request that stands; it does while it is the state's open take.
        self._standing = -1
        #: Whether the next look leaves one: the last that stood has brought groups.
        self._again = False
        self._in_vain = 0
        self._last_s = 0.0
        #: Whether a daemon that is awake is about to reply, or to sleep: it slept at the look
        #: before, or has just been sent a request.
        self._in_a_moment = False

    def forget(self) -> None:
        """Ask the next time: the daemon is about to be told what makes a group complete."""
        self._again = False

    def look(self, client: Client, max_groups: int, ahead: int) -> bool:
        """Say whether there are leases to hand out now; never waits for a group.

        Parameters
        ----------
        client : Client
            Whose look it is.
        max_groups : int
            How many it would take.
        ahead : int
            How many to ask ahead behind a reply that has as many; 0 for none.
        """
        state, connection = client.state, client.connection
        if self._again:
            self._again = False
            self._stand(client, max_groups)
            self._in_a_moment = True
        if state.open_take != self._standing:
            return self._ask(client, max_groups, ahead)
        wire = connection.wire
        if wire is not None and not (wire.ended or connection.doubtful):
            found = client.leases.look(wire.fileno(), AWAKE_S if self._in_a_moment else 0.0)
            self._in_a_moment = found is False
            # Only then: another thread that reads a reply files it under the lock.
            if found is False and self._is_open(client):
                return False
        return self._look_closer(client, max_groups, ahead)

    def _is_open(self, client: Client) -> bool:
        """Whether nobody has read an answer to the request that stands."""
        with client.state.lock:
            pending = client.state.replies.get(self._standing)
            return pending is not None and pending.reply is None

    def _ask(self, client: Client, max_groups: int, ahead: int) -> bool:
        """Ask the daemon; leave a request there if the caller goes on looking in vain."""
        earlier = client.state.open_take is not None
        found = client.ask(max_groups, 0.0, ahead)
        if earlier and not found:
            # That was the answer of then.
            found = client.ask(max_groups, 0.0, ahead)
        now_s = time.monotonic()
        soon = now_s - self._last_s < SOON_S
        self._in_vain = 0 if found else self._in_vain + 1 if soon else 1
        self._last_s = now_s
        if self._in_vain >= OFTEN:
            self._stand(client, max_groups)
        return found

    def _stand(self, client: Client, max_groups: int) -> None:
        """Leave a request with the daemon, if there is none, and no policy against it."""
        if client.connection.policy.get("max_policy_lag") is not None:
            return
        try:
            with client.state.lock:
                if client.state.open_take is None and client.connection.wire is not None:
                    self._standing = client.leave_request(max_groups, STANDS_S)
        except BaseException:
            _give_up(client)
            raise

    def _look_closer(self, client: Client, max_groups: int, ahead: int) -> bool:
        """Receive what has come, or have the request answered by one that stands in its place."""
        state, connection = client.state, client.connection
        try:
            with state.lock:
                standing = self._standing
                stands = state.open_take == standing
                if stands and connection.receive_groups(standing):
                    state.open_take = None
                    self._again = True
                    return True
                connection.receive_pending()
                wire = connection.wire
                pending = state.replies.get(standing) if stands else None
                if wire is not None and pending is not None and pending.reply is None:
                    self._standing = client.leave_request(max_groups, STANDS_S)
                else:
                    wire = None
            reply = None if wire is None else _answer(client, wire, standing)
        except BaseException:
            _give_up(client)
            raise
        if isinstance(reply, messages.Refused):
            raise refusal(reply)
        if wire is not None:
            return bool(client.leases.ready)
        if stands and client.ask(max_groups, 0.0, ahead):
            self._again = True
            return True
        # It was answered because its time was over: that says nothing of now.
        self._last_s = time.monotonic()
        return self._ask(client, max_groups, ahead)


def _answer(client: Client, wire: Wire, id_: int) -> messages.Reply | None:
    """Wait for the answer to a request that was ended, and keep what it brings."""
    reply = client.connection.late_reply(wire, id_, REPLY_GRACE_S)
    if isinstance(reply, messages.Leases):
        client.borrow(reply, wire)
    elif reply is None and wire is client.connection.wire:
        # It may come yet, with groups that nobody would hold.
        _give_up(client)
    return reply


def _give_up(client: Client) -> None:
    """End a dialogue that may have stopped in the middle; the next claim says what is true."""
    client.connection.doubtful = True
    client.connection.abandon()
