"""One gateway: the bus at one side, registrations, the queue and the journal at the other.

Routes of Atropos and slime are methods of `AtroposRoutes` and `SlimeRoutes`; this holds what both
use. Invariant: what a successor must know is stored before the client is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

import shmbus
from shmbus.gateway.batch_queue import ATROPOS, BatchQueue
from shmbus.gateway.bodies import Bodies
from shmbus.gateway.bus_reader import BusReader
from shmbus.gateway.connection import connection_of
from shmbus.gateway.deliveries import Batch, Deliveries
from shmbus.gateway.heads import Request
from shmbus.gateway.idempotent_put import Body, IdempotentPut, Records, key_of
from shmbus.gateway.journal import BodyKey, Journal
from shmbus.gateway.metrics import Metrics
from shmbus.gateway.recovery import committed_by, whole_groups
from shmbus.gateway.registry import Registry
from shmbus.gateway.settings import DRAIN_S, Settings
from shmbus.http.access import Refusal
from shmbus.segment.names import identity, is_named

__all__ = ["Gateway"]

logger = logging.getLogger(__name__)


class Gateway:
    """Serves one bus.

    Parameters
    ----------
    settings : Settings
        How.

    Raises
    ------
    BusNotFoundError, BusBusyError, LayoutMismatchError
        As for `shmbus.Producer`.
    RuntimeError
        Another gateway serves this bus.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bus = shmbus.Bus.open(settings.bus)
        self._made = identity(settings.bus)
        self.journal = Journal(self.bus)
        # Before the slot of a dead gateway's producer is another's: this one's, maybe.
        committed = committed_by(settings.bus) if self.journal.entries else {}
        self.producer = shmbus.Producer(settings.bus, label="shmbus gateway", on_stall=None)
        self.registry = self._registry()
        self.puts = IdempotentPut(self.bus, self.producer, self.journal, settings.hold_s, committed)
        self.bodies = Bodies(settings.body_limit, settings.memory)
        self.metrics = Metrics()
        self.batch_queue = BatchQueue(
            self.bus,
            BusReader(settings.bus, settings.daemon),
            self.registry,
            keep_batches=settings.keep_batches,
            group_size=settings.group_size,
            store=self.store,
            journal=self.journal,
            on_seen=self.puts.seen,
        )
        #: The records of the group that came last, for ``/latest_example``.
        self.latest: Records | None = None
        self._maintenance: asyncio.Task[None] | None = None
        #: Set when the bus has gone: the process ends.
        self.gone = asyncio.Event()

    def _registry(self) -> Registry:
        try:
            return Registry(self.journal.state, self.journal.answer)
        except msgspec.DecodeError as error:
            # Of another version of shmbus; the groups are in the bus, whatever it says.
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
            await asyncio.sleep(DRAIN_S)
            try:
                if self.batch_queue.due:
                    await self.batch_queue.drain()
                await self.puts.forget_old()
                if self._made is None or not is_named(self.bus.name, self._made):
                    logger.error("bus %r was removed: this gateway ends", self.bus.name)
                    self.gone.set()
                    return
            except Refusal as error:
                logger.warning("%s", error.message)
                await asyncio.sleep(1.0)
            except Exception:
                # Without it nobody would notice that the bus has gone.
                logger.exception("the maintenance failed, and goes on")
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Leave the bus: what trainers did not acknowledge is delivered again."""
        if self._maintenance is not None:
            self._maintenance.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._maintenance
        await self.batch_queue.close()
        self.producer.close()
        self.journal.close(remove=self.gone.is_set())
        self.bus.close()

    # -- what routes share ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def body(
        self, request: Request
    ) -> AsyncIterator[tuple[bytes | bytearray | memoryview, float]]:
        """Have the body of a request with groups, and until when it may be held."""
        deadline_s = time.monotonic() + self.settings.hold_s
        try:
            async with self.bodies.large(request, deadline_s) as raw:
                yield raw, deadline_s
        except web.RequestPayloadError as error:
            raise ConnectionResetError(f"the client ended its body early: {error}") from error

    async def put(
        self,
        request: Request,
        raw: bytes | bytearray | memoryview,
        deadline_s: float,
        count: int,
        records: Callable[[Callable[[int], str]], Sequence[Records]],
        kind: str,
    ) -> Body:
        """Put the groups of a body, once.

        Parameters
        ----------
        request, raw : BaseRequest, bytes
            The request, and its body inflated.
        deadline_s : float
            Of `body`.
        count : int
            How many groups it has.
        records : callable
            Makes the records of all groups, given what a group of a number is called.
        kind : str
            What their keys begin with.
        """
        connection = connection_of(request)
        key = key_of(raw)
        body = await self._known(key) or self.puts.new(key, count)
        known = body

        def id_of(number: int) -> str:
            return known.id_of(number, kind)

        try:
            groups = [] if body.whole else records(id_of)
        except ValueError as error:
            raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        await self.puts.put(body, groups, deadline_s, lambda: connection.alive)
        self.batch_queue.note_put()
        if groups and kind == ATROPOS:
            self.latest = groups[-1]
        return body

    async def _known(self, key: BodyKey) -> Body | None:
        """Return a body that comes again, with what a predecessor had put of it."""
        body = self.puts.known(key)
        if body is None or not body.inherited:
            return body
        try:
            if self.registry.registered and not self.registry.reads_bus:
                await self._attach_if_free()
            await self.batch_queue.drain()
            if not self.batch_queue.attached:
                # Whoever reads the bus, or will, takes what is there for one group, and what is put
                # after that for the next one.
                for instance_id in whole_groups(self.bus.name, self.puts.awaited(body)):
                    self.puts.seen(instance_id)
        except BaseException:
            self.puts.lost(body)
            raise
        return body

    async def _attach_if_free(self) -> None:
        try:
            await self.batch_queue.attach()
        except Refusal as refusal:
            if refusal.status != HTTPStatus.CONFLICT:
                raise

    async def answer_put(
        self, request: Request, response: web.Response, body: Body
    ) -> web.StreamResponse:
        """Answer a body that is in the bus, and learn whether the answer arrived."""

        def note(delivered: bool) -> None:
            (self.puts.delivered if delivered else self.puts.lost)(body)

        try:
            connection = connection_of(request)
        except ConnectionResetError:
            note(False)
            raise
        return await connection.send(request, response, note)

    async def answer_batch(
        self,
        request: web.BaseRequest,
        response: web.Response,
        deliveries: Deliveries[Any],
        batch: Batch[Any],
    ) -> web.StreamResponse:
        """Answer a batch, and have it come again if the answer does not arrive."""

        def note(delivered: bool) -> None:
            if not delivered:
                self.batch_queue.lost(deliveries, batch)

        try:
            connection = connection_of(request)
        except ConnectionResetError:
            note(False)
            raise

        def finish(socket: int, byte: bytes) -> bool:
            return self.batch_queue.finish(deliveries, batch, socket, byte)

        return await connection.send(request, response, note, finish)

    def gauges(self) -> dict[str, float]:
        """Return what a scrape is told of the present."""
        bodies = self.bodies
        return {
            "queue_groups": len(self.batch_queue.queue),
            "slime_samples": len(self.batch_queue.samples),
            "given_batches": len(self.batch_queue.batches) + len(self.batch_queue.sample_batches),
            "held_bodies": self.puts.holding + bodies.plain.waiting + bodies.compressed.waiting,
            "body_bytes": bodies.plain.used + bodies.compressed.used,
            "repeated_bodies": self.puts.repeated,
            "environments": sum(e.connected for e in self.registry.state.environments),
        }
