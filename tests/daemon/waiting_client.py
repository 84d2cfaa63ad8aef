"""A client of a daemon that waits for groups, in a thread of its own."""

from __future__ import annotations

import threading

from conftest import wait_until

from shmbus import Consumer, Group
from shmbus.control.ask import ask_status
from shmbus.control.messages import StatusReply

__all__ = ["take_beside"]


def take_beside(consumer: Consumer, seconds: float) -> tuple[threading.Thread, list[Group]]:
    """Have a consumer take in a thread, and wait until its daemon says that it waits."""
    groups: list[Group] = []
    taker = threading.Thread(target=lambda: groups.extend(consumer.take(timeout=seconds)))
    taker.start()
    wait_until(lambda: _somebody_waits(consumer.name), what="the client to wait")
    return taker, groups


def _somebody_waits(name: str) -> bool:
    reply = ask_status(name)
    return isinstance(reply, StatusReply) and any(client.waiting for client in reply.clients)
