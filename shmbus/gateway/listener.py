"""The gateway's address: connections come with what their clients ask first.

The kernel holds a connection back until something was sent over it, for _DEFER_S at the most. What
is a poll that ends its connection is answered here, in two calls of the kernel. Every other
connection is handed on to the event loop, with what was read of it.

Invariant: each connection that was accepted is answered and ended, handed on, or ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

from shmbus.gateway.connection import Connections
from shmbus_ext import _core

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

#: Connections that wait to be accepted: environments connect anew for each request.
_BACKLOG: Final = 4096
#: Seconds that the kernel waits for the first bytes of a connection, before it gives it without.
_DEFER_S: Final = 1
#: Connections that are accepted before anything else has its turn.
_AT_ONCE: Final = 64
#: Seconds without accepting, where this process has no descriptor free.
_PAUSE_S: Final = 0.5


class Listener:
    """Accepts the connections of one address.

    Parameters
    ----------
    connections : Connections
        Whose they become.
    answer : callable
        Returns the answer to a first request that ends its connection, and None to others.
    """

    def __init__(self, connections: Connections, answer: Callable[[bytes], bytes | None]) -> None:
        self._connections = connections
        self._answer = answer
        self._sockets: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def bind(self, host: str, port: int) -> tuple[str, int]:
        """Take the address, without accepting anybody there yet; returns it.

        Raises
        ------
        OSError
            It is taken, or is none of this machine.
        """
        found = await self._loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            each = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            self._sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Of port 0 the first address chooses, and the others have the same.
            each.bind((address[0], port, *address[2:]))
            port = each.getsockname()[1]
        return str(self._sockets[0].getsockname()[0]), port

    def start(self) -> None:
        """Accept, from now on."""
        for each in self._sockets:
            with contextlib.suppress(OSError):  # without it, first requests come later
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_S)
            each.listen(_BACKLOG)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Accept nobody any more."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()
        for task in self._opening:
            task.cancel()

    def _accept(self, listener: socket.socket) -> None:
        descriptor = listener.fileno()
        for _ in range(_AT_ONCE):
            try:
                found = _core.accept_request(descriptor)
            except OSError as error:
                self._pause(listener, error)
                return
            if found is None:
                return
            answer = self._answer(found[1])
            if answer is None:
                self._hand_on(listener, *found)
            else:
                _core.answer_and_close(found[0], answer)

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """Let connections wait: the next try would fail as well."""
        logger.warning("no connection is accepted for %g s: %s", _PAUSE_S, error)
        self._loop.remove_reader(listener)
        self._loop.call_later(_PAUSE_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def _hand_on(self, listener: socket.socket, descriptor: int, first: bytes) -> None:
        accepted = socket.socket(listener.family, listener.type, listener.proto, descriptor)
        task = self._loop.create_task(self._open(accepted, first))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, first: bytes) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._connections.make(first), accepted
            )
        except BaseException as error:
            accepted.close()
            if not isinstance(error, OSError):
                raise
