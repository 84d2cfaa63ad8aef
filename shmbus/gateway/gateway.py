"""A gateway: the bus at one side; registrations, queue and journal at the other.

`AtroposRoutes` implements the routes; this class holds the shared state and the counters.

Invariant: a successor's state is stored before the client's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

import shmbus
from shmbus.gateway import settings as limits
from shmbus.gateway.batch_queue import Batch, BatchQueue
from shmbus.gateway.bodies import Bodies
from shmbus.gateway.bus_reader import BusReader
from shmbus.gateway.idempotent_put import Body, IdempotentPut, Samples, key_of
from shmbus.gateway.journal import Journal
from shmbus.gateway.registry import Registry
from shmbus.gateway.settings import Settings
from shmbus.http.access import Refusal
from shmbus.http.metrics import Metrics
from shmbus.http.server import connection_of
from shmbus.segment.names import identity, is_named

logger = logging.getLogger(__name__)


class Gateway:
    """Serves a bus."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bus = shmbus.Bus.open(settings.bus)
        self._made = identity(settings.bus)
        self.journal = Journal(self.bus)
        self.puts = IdempotentPut(self.bus, self.journal, settings.hold_s)
        self.registry = self._registry()
        self.bodies = Bodies(settings.body_limit, settings.memory)
        self.metrics = Metrics("shmbus_gateway")
        self.batch_queue = BatchQueue(
            self.bus,
            BusReader(settings.bus, settings.daemon),
            self.registry,
            keep_batches=settings.keep_batches,
            store=self.store,
        )
        #: The samples of the last group, for ``/latest_example``.
        self.latest: Samples | None = None
        self._maintenance: asyncio.Task[None] | None = None
        #: Set after the bus's removal: the process ends.
        self.gone = asyncio.Event()

    def _registry(self) -> Registry:
        try:
            return Registry(self.journal.state)
        except msgspec.DecodeError as error:
            # The state of another shmbus version; the groups are safe in the bus.
            logger.warning("the last gateway's registrations are forgotten: %s", error)
            return Registry()

    def store(self) -> None:
        """Store the registrations for a successor."""
        self.journal.store(self.registry.state)

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over from a predecessor, and begin the maintenance."""
        if self.registry.registered and not self.registry.reads_bus:
            with contextlib.suppress(Refusal):  # asked for again by the next batch
                await self.batch_queue.attach()
        self._maintenance = asyncio.get_running_loop().create_task(self._maintain())

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(limits.DRAIN_S)
            try:
                if self.batch_queue.due:
                    await self.batch_queue.drain()
                self.puts.forget_old()
                if self._made is None or not is_named(self.bus.name, self._made):
                    logger.error("bus %r was removed: this gateway ends", self.bus.name)
                    self.gone.set()
                    return
            except Refusal as error:
                logger.warning("%s", error.message)
                await asyncio.sleep(1.0)
            except Exception:
                # Without the maintenance a removed bus goes unnoticed.
                logger.exception("the maintenance failed, and goes on")
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Leave the bus: unacknowledged groups are delivered again."""
        if self._maintenance is not None:
            self._maintenance.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._maintenance
        await self.batch_queue.close()
        self.puts.close()
        self.journal.close(remove=self.gone.is_set())
        self.bus.close()

    # -- shared by routes -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def body(
        self, request: web.BaseRequest
    ) -> AsyncIterator[tuple[bytes | bytearray, float]]:
        """Yield the body of a request with groups, and the deadline of its hold."""
        deadline_s = time.monotonic() + self.settings.hold_s
        try:
            async with self.bodies.large(request, deadline_s) as raw:
                yield raw, deadline_s
        except web.RequestPayloadError as error:
            raise ConnectionResetError(f"the client ended its body early: {error}") from error

    async def put(
        self,
        request: web.BaseRequest,
        raw: bytes | bytearray,
        deadline_s: float,
        groups: Sequence[Samples],
    ) -> Body:
        """Put the groups of a body from `body`, once."""
        body = await self.puts.put(
            key_of(raw), groups, deadline_s, lambda: connection_of(request).alive
        )
        self.batch_queue.note_put()
        return body

    async def answer_put(
        self, request: web.BaseRequest, response: web.Response, body: Body
    ) -> web.StreamResponse:
        """Answer a body already in the bus, and learn the answer's fate."""

        def note(delivered: bool) -> None:
            (self.puts.delivered if delivered else self.puts.lost)(body)

        connection = connection_of(request)
        return await connection.deliver(request, response, note, limits.ANSWER_S)

    async def answer_batch(
        self,
        request: web.BaseRequest,
        response: web.Response,
        batch: Batch,
    ) -> web.StreamResponse:
        """Answer a batch, and make it ready again after a lost answer."""

        def note(delivered: bool) -> None:
            if not delivered:
                self.batch_queue.lost(batch)

        connection = connection_of(request)
        batch.abort = connection.abort
        await connection.deliver(request, response, note, limits.ANSWER_S)
        self.batch_queue.given(batch)
        return response

    def gauges(self) -> dict[str, float]:
        """Return the gauges for a scrape."""
        bodies = self.bodies
        return {
            "queue_groups": len(self.batch_queue.queue),
            "given_batches": len(self.batch_queue.batches),
            "held_bodies": self.puts.holding + bodies.plain.waiting + bodies.compressed.waiting,
            "body_bytes": bodies.plain.used + bodies.compressed.used,
            "repeated_bodies": self.puts.repeated,
            "environments": sum(e.connected for e in self.registry.state.environments),
        }
