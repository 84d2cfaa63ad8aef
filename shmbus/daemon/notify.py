"""Reports the daemon's state to systemd: one datagram, as sd_notify(3) describes it.

Invariant: the daemon runs whether NOTIFY_SOCKET is set or not, and whether it is read or not.
"""

from __future__ import annotations

import logging
import os
import socket

__all__ = ["notify"]

logger = logging.getLogger(__name__)


def notify(state: str) -> bool:
    """Send a state such as ``READY=1``; False without NOTIFY_SOCKET, or if it cannot be sent."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    # A leading "@" stands for the NUL of the abstract namespace.
    target = "\0" + address[1:] if address[0] == "@" else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), target)
        except OSError as error:
            logger.warning("could not send %s to NOTIFY_SOCKET %s: %s", state, address, error)
            return False
    return True
