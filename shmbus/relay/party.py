"""The common part of parties: mailbox, rounds and retries.

Invariants:

- Messages may arrive late, twice or never: a party repeats lost requests by its own clock.
- An error in a message is counted and logged; the next message is taken as usual.
- Backoff keeps requests to a merely slow party from slowing it further.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from shmbus import errors
from shmbus.relay.messages import Envelope, Message, unpack

_log = logging.getLogger("shmbus.relay")

#: Remembered texts of refusals, each logged once.
_MOST_TEXTS = 100


class Opener:
    """Unpacks messages; invalid messages and other versions are counted, and logged once."""

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
    """Sends and receives messages under a single address."""

    address: str
    opener: Opener

    def send(
        self, to: str, message: Message, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Send a message at the next `flush`, or lose it; a payload must not change meanwhile."""

    def flush(self) -> None:
        """Send the waiting messages."""

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return received messages; wait at most `timeout_s` seconds for the first."""


#: Seconds without progress until a party asks again: first and longest wait. The limit lets a party
#: notice a partition's end soon.
PARTY_BACKOFF_S: Final = (1.0, 15.0)
#: Seconds until a party without its bus looks for the next bus of the name.
_REOPEN_S = 0.2


class Party(Protocol):
    """A source, a sink or a coordinator, with its resources."""

    def take(self, envelope: Envelope) -> None:
        """Act on a message."""

    def round(self) -> float:
        """Do the due work; return the seconds until the next call."""

    def close(self) -> None:
        """Leave."""


def run_party(make: Callable[[], Party], mailbox: Mailbox, goes_on: Callable[[], bool]) -> None:
    """Run a party until `goes_on` returns False."""
    told: type[Exception] | None = None
    while goes_on():
        try:
            party = make()
        except (errors.ShmbusError, OSError) as error:
            # The bus's holder may be this party's ending predecessor; a bus of another version or
            # user may be recreated.
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
        # Before the round, because a round may put a block: peers work meanwhile.
        mailbox.flush()
        wait_s = party.round()
        mailbox.flush()
