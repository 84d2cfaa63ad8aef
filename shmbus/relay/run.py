"""A party at work: its messages, its rounds, and what happens when its bus is made again.

Invariant: what one message does wrong is counted and told; the next one is taken all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from shmbus import errors
from shmbus.relay.codec import Envelope
from shmbus.relay.mailbox import Mailbox

__all__ = ["Party", "run_party"]

_log = logging.getLogger("shmbus.relay")

#: Seconds until a party that lost its bus looks for the next of that name.
_REOPEN_S = 0.2


class Party(Protocol):
    """A source, a sink or a coordinator, with what it works on."""

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""

    def round(self) -> float:
        """Do what there is to do; return the seconds until the next call."""

    def close(self) -> None:
        """Leave."""


def run_party(make: Callable[[], Party], mailbox: Mailbox, goes_on: Callable[[], bool]) -> None:
    """Have a party work until `goes_on` says no.

    Parameters
    ----------
    make : callable
        Makes the party; it is called again while it cannot, and once its bus was removed.
    mailbox : Mailbox
        Where its messages come.
    goes_on : callable
        Whether to go on.
    """
    told: type[Exception] | None = None
    while goes_on():
        try:
            party = make()
        except (errors.ShmbusError, OSError) as error:
            # Whoever has the bus may be this party's own predecessor, which is ending; and one of
            # another version, or of another user, may be made again.
            level = logging.DEBUG if type(error) is told else logging.WARNING
            _log.log(level, "relay: %s; it is tried again", error)
            told = type(error)
            time.sleep(_REOPEN_S)
            mailbox.receive(0.0)
            continue
        told = None
        try:
            _work(party, mailbox, goes_on)
        except errors.BusRemovedError as error:
            _log.warning("relay: %s; the next bus of that name is relayed", error)
        finally:
            party.close()


def _work(party: Party, mailbox: Mailbox, goes_on: Callable[[], bool]) -> None:
    wait_s = 0.0
    while goes_on():
        for envelope in mailbox.receive(wait_s):
            party.take(envelope)
        # Before the round, which may put a block: others are to work meanwhile.
        mailbox.flush()
        wait_s = party.round()
        mailbox.flush()
