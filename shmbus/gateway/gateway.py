"""A gateway: the bus at one side; registrations, queue and journal at the other.

`AtroposRoutes` implements the routes; this class holds the shared state and the counters.

Invariant: a successor's state is stored before the client's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

import shmbus
from shmbus.gateway import settings as limits
from shmbus.gateway.batch_queue import BatchQueue
from shmbus.gateway.bodies import Bodies
from shmbus.gateway.bus_reader import BusReader
from shmbus.gateway.idempotent_put import IdempotentPut, Samples
from shmbus.gateway.journal import Journal
from shmbus.gateway.registry import Registry
from shmbus.gateway.settings import Settings
from shmbus.http.access import Refusal
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
        #: Own address.
        self.url = ""
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

    # -- operators ------------------------------------------------------------------------------

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return True with the state while the bus exists."""
        healthy = not self.gone.is_set()
        return healthy, {
            "status": "ok" if healthy else "gone",
            "bus": self.bus.name,
            "collects": self.batch_queue.attached,
        }

    def counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return gauges and counters for a scrape."""
        return {
            "queue_groups": len(self.batch_queue.queue),
            "given_batches": len(self.batch_queue.batches),
            "held_bodies": self.puts.holding + self.bodies.waiting,
            "body_bytes": self.bodies.used,
            "repeated_bodies": self.puts.repeated,
            "environments": sum(e.connected for e in self.registry.state.environments),
        }, {}
