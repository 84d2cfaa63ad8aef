"""What each party is: its mailbox, its rounds, and when it asks again.

Invariants:

- Messages may be late, lost or doubled: what is lost is asked for again by a party's own clock.
- What one message does wrong is counted and told; the next one is taken all the same.
- A party that is only slow is not asked so often that it gets slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from shmbus import errors
from shmbus.relay.messages import Envelope, Message, unpack

_log = logging.getLogger("shmbus.relay")

#: Texts of refusals that are remembered, so that each is told once.
_MOST_TEXTS = 100


class Opener:
    """Unpacks what comes; what is no message of this version is counted, and told once."""

    def __init__(self, address: str = "this process") -> None:
        self.refused = 0
        self.told: dict[str, None] = {}
        self._address = address

    def open(self, packed: bytes | memoryview, payload: bytes | memoryview) -> list[Envelope]:
        """Return the message, or nothing."""
        try:
            return [unpack(packed, payload, self._address)]
        except (errors.LayoutMismatchError, errors.ProtocolError) as error:
            self.refused += 1
            text = str(error)
            if text not in self.told and len(self.told) < _MOST_TEXTS:
                self.told[text] = None
                _log.error("%s", text)
            return []


class Mailbox(Protocol):
    """Sends and receives messages under one address."""

    address: str
    opener: Opener

    def send(
        self, to: str, message: Message, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Send a message at the next `flush`, or lose it; a payload must not change meanwhile."""

    def flush(self) -> None:
        """Let go what waits to be sent with what comes after it."""

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return what has come, after at most so long where nothing has."""


#: Seconds without progress until a party asks again: at first, and at most, so that a party notices
#: the end of a partition soon.
PARTY_BACKOFF_S: Final = (1.0, 15.0)
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
    """Have a party work until `goes_on` says no."""
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
