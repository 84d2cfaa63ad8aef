"""What a party of the relay needs of a network: messages that may be late, lost or doubled.

Invariant: a party works with any mailbox: what is lost is asked for again by its own clock.
"""

from __future__ import annotations

import logging
from typing import Protocol

from shmbus import errors
from shmbus.relay.codec import Envelope, unpack
from shmbus.relay.messages import Message

__all__ = ["Mailbox", "Opener"]

_log = logging.getLogger("shmbus.relay")

#: Texts of refusals that are remembered, so that each is told once.
_MOST_TEXTS = 100


class Opener:
    """Unpacks what comes; what is no message of this version is counted, and told once.

    Parameters
    ----------
    address : str
        Of whoever gets it, for the texts.

    Attributes
    ----------
    refused : int
        Messages that were refused.
    told : dict of str to None
        Why, each text once, in their order.
    """

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
        """Send a message, or lose it where nobody has that address now.

        It may wait for `flush`. A payload may be read later, and must not change meanwhile.
        """

    def flush(self) -> None:
        """Let go what waits to be sent with what comes after it."""

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return what has come, after at most so long where nothing has."""

    def close(self) -> None:
        """Take the address away."""
