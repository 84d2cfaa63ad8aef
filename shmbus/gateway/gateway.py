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
from shmbus.gateway.bodies import Bodies
from shmbus.gateway.connection import connection_of
from shmbus.gateway.deliveries import Batch, Deliveries
from shmbus.gateway.handover import BodyKey, Handover
from shmbus.gateway.heads import Request
from shmbus.gateway.inherited import committed_by, whole_groups
from shmbus.gateway.intake import Body, Intake, Records, key_of
from shmbus.gateway.metrics import Metrics
from shmbus.gateway.reader import BusReader
from shmbus.gateway.refusal import Refusal
from shmbus.gateway.registry import Registry
from shmbus.gateway.settings import DRAIN_S, Settings
from shmbus.gateway.supply import ATROPOS, Supply
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
        self.handover = Handover(self.bus)
        # Before the slot of a dead gateway's producer is another's: this one's, maybe.
        committed = committed_by(settings.bus) if self.handover.entries else {}
        self.producer = shmbus.Producer(settings.bus, label="shmbus gateway", on_stall=None)
        self.registry = self._registry()
        self.intake = Intake(self.bus, self.producer, self.handover, settings.hold_s, committed)
        self.bodies = Bodies(settings.body_limit, settings.memory)
        self.metrics = Metrics()
        self.supply = Supply(
            self.bus,
            BusReader(settings.bus, settings.daemon),
            self.registry,
            keep_batches=settings.keep_batches,
            group_size=settings.group_size,
            store=self.store,
            handover=self.handover,
            on_seen=self.intake.seen,
        )
        #: The records of the group that came last, for ``/latest_example``.
        self.latest: Records | None = None
        self._maintenance: asyncio.Task[None] | None = None
        #: Set when the bus has gone: the process ends.
        self.gone = asyncio.Event()

    def _registry(self) -> Registry:
        try:
            return Registry(self.handover.state, self.handover.answer)
        except msgspec.DecodeError as error:
            # Of another version of shmbus; the groups are in the bus, whatever it says.
            logger.warning("the last gateway's registrations are forgotten: %s", error)
            return Registry()

    def store(self) -> None:
        """Store the registrations for a successor."""
        self.handover.store(self.registry.state)

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over from a predecessor, and begin the maintenance."""
        if self.registry.registered and not self.registry.reads_bus:
            with contextlib.suppress(Refusal):  # asked for again by the next batch
                await self.supply.attach()
        self._maintenance = asyncio.get_running_loop().create_task(self._maintain())

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(DRAIN_S)
            try:
                if self.supply.due:
                    await self.supply.drain()
                await self.intake.forget_old()
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
        await self.supply.close()
        self.producer.close()
        self.handover.close(remove=self.gone.is_set())
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
        body = await self._known(key) or self.intake.new(key, count)
        known = body

        def id_of(number: int) -> str:
            return known.id_of(number, kind)

        try:
            groups = [] if body.whole else records(id_of)
        except ValueError as error:
            raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        await self.intake.put(body, groups, deadline_s, lambda: connection.alive)
        self.supply.note_put()
        if groups and kind == ATROPOS:
            self.latest = groups[-1]
        return body

    async def _known(self, key: BodyKey) -> Body | None:
        """Return a body that comes again, with what a predecessor had put of it."""
        body = self.intake.known(key)
        if body is None or not body.inherited:
            return body
        try:
            if self.registry.registered and not self.registry.reads_bus:
                await self._attach_if_free()
            await self.supply.drain()
            if not self.supply.attached:
                # Whoever reads the bus, or will, takes what is there for one group, and what is put
                # after that for the next one.
                for instance_id in whole_groups(self.bus.name, self.intake.awaited(body)):
                    self.intake.seen(instance_id)
        except BaseException:
            self.intake.lost(body)
            raise
        return body

    async def _attach_if_free(self) -> None:
        try:
            await self.supply.attach()
        except Refusal as refusal:
            if refusal.status != HTTPStatus.CONFLICT:
                raise

    async def answer_put(
        self, request: Request, response: web.Response, body: Body
    ) -> web.StreamResponse:
        """Answer a body that is in the bus, and learn whether the answer arrived."""

        def note(delivered: bool) -> None:
            (self.intake.delivered if delivered else self.intake.lost)(body)

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
                self.supply.lost(deliveries, batch)

        try:
            connection = connection_of(request)
        except ConnectionResetError:
            note(False)
            raise

        def finish(socket: int, byte: bytes) -> bool:
            return self.supply.finish(deliveries, batch, socket, byte)

        return await connection.send(request, response, note, finish)

    def gauges(self) -> dict[str, float]:
        """Return what a scrape is told of the present."""
        bodies = self.bodies
        return {
            "queue_groups": len(self.supply.queue),
            "slime_samples": len(self.supply.samples),
            "given_batches": len(self.supply.batches) + len(self.supply.sample_batches),
            "held_bodies": self.intake.holding + bodies.plain.waiting + bodies.compressed.waiting,
            "body_bytes": bodies.plain.used + bodies.compressed.used,
            "repeated_bodies": self.intake.repeated,
            "environments": sum(e.connected for e in self.registry.state.environments),
        }
