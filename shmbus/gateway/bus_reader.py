"""The gateway as a consumer of its bus: takes and ends leases in a thread of its own.

With a daemon each call may wait for the daemon, and clients must not wait along. Invariant: calls
run one after another, in the order of their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar

import shmbus
from shmbus.gateway import settings
from shmbus.http.access import Refusal

_R = TypeVar("_R")

#: Groups taken by a read, at most: clients get turns in between.
_MOST = 32 * settings.TAKE_GROUPS


class BusReader:
    """Reads a bus."""

    def __init__(self, name: str, daemon: bool | None) -> None:
        self._name = name
        self._daemon = daemon
        self._consumer: shmbus.Consumer | None = None
        self._thread = ThreadPoolExecutor(1, "shmbus-gateway-bus")
        self._attaching = asyncio.Lock()
        #: True after a read of everything in the bus at the start.
        self._read_before = False

    @property
    def attached(self) -> bool:
        """True while groups come to this process."""
        return self._consumer is not None

    async def _call(self, work: Callable[[], _R]) -> _R:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (shmbus.DaemonUnavailableError, shmbus.BusClosedError) as error:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error

    async def attach(self) -> None:
        """Become a consumer of the bus, unless another process reads the bus."""
        async with self._attaching:
            if self._consumer is not None:
                return

            def make() -> shmbus.Consumer:
                # The gateway reports stalls by its own queue sizes.
                return shmbus.Consumer(
                    self._name, label="shmbus gateway", daemon=self._daemon, on_stall=None
                )

            try:
                self._consumer = await self._call(make)
            except shmbus.BusBusyError as error:
                raise Refusal(
                    HTTPStatus.CONFLICT,
                    f"{error}; a trainer that reads the bus itself needs no batches from here, and "
                    "several share it by `shmbus serve`",
                ) from error

    async def detach(self) -> None:
        """Leave the bus: leased groups go to another consumer."""
        consumer = self._consumer
        if consumer is not None:
            self._consumer = None
            self._read_before = False
            await self._call(consumer.close)

    async def take(self) -> Sequence[shmbus.Group]:
        """Return the complete groups, leased."""
        consumer = self._consumer
        if consumer is None:
            return ()

        def take() -> list[shmbus.Group]:
            found: list[shmbus.Group] = []
            if not self._read_before:
                # A predecessor's groups must be known before the first request for more.
                while consumer.stats().in_ring:
                    found += consumer.take(settings.TAKE_GROUPS, timeout=0)
                self._read_before = True
            while len(found) < _MOST and (groups := consumer.take(settings.TAKE_GROUPS, timeout=0)):
                found += groups
            return found

        return await self._call(take)

    async def ack(self, groups: list[shmbus.Group]) -> None:
        """Acknowledge groups."""
        consumer = self._consumer
        if groups and consumer is not None:
            await self._call(lambda: consumer.ack(groups))

    async def drop(self, groups: list[shmbus.Group]) -> None:
        """Discard groups."""
        consumer = self._consumer
        if groups and consumer is not None:
            await self._call(lambda: consumer.drop(groups))

    async def close(self) -> None:
        """Leave the bus."""
        await self.detach()
        self._thread.shutdown()
