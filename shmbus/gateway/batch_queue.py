"""Groups from the bus to trainers: the queue that batches are made of, and what was given.

Atropos' protocol has no acknowledgement, so a request for the next batch is taken
as one for those before it, and a registration as the word of a trainer that was started again.

Invariants:

- Every group that was taken is in one place: the queue, a batch, or acknowledged.
- A group that cannot be answered is dropped, and named; those around it go on.
- `drain` returns after everything that was in the bus when it was called is in the queue.
- A batch is ready, being answered, given or ended; it is acknowledged only after its answer was
  delivered whole, and another one asked for. One that was not is the next to be answered.
- What is given is stored once its answer has left: a gateway that is killed before gives it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

import shmbus
from shmbus.gateway.bus_reader import BusReader
from shmbus.gateway.registry import Registry
from shmbus.gateway.settings import DRAIN_S, STALE_S
from shmbus.http.access import Refusal
from shmbus.peers import atropos
from shmbus.peers.atropos_queue import Availability, GroupQueue, Waiting

logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Batch:
    """Groups that go to a trainer together."""

    def __init__(self, parts: list[Waiting], ids: list[str] | None = None) -> None:
        self.parts = parts
        self.ids = [part.group.instance_id for part in parts] if ids is None else ids
        self.times = 0
        self.acknowledged = False
        #: Ends the answer that it is being given by.
        self.abort: Callable[[], None] = lambda: None


class Deliveries:
    """Batches, of which `keep` stay given: one for each trainer process."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._ready: deque[Batch] = deque()
        self._answering: list[Batch] = []
        self._given: deque[Batch] = deque()
        #: Whether one was given since the last registration.
        self.answered = False
        #: How often what is ready has changed.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._answering) + len(self._given)

    def given_ids(self) -> list[list[str]]:
        """Return the keys of what was given, for a successor."""
        return [batch.ids for batch in self._given]

    def ready_parts(self) -> list[Waiting]:
        """Return what waits to be answered again: no trainer has it."""
        return [part for batch in self._ready for part in batch.parts]

    def due(self) -> list[Batch]:
        """Take out what a request for the next batch acknowledges."""
        found = []
        while len(self._given) >= self._keep:
            found.append(self._given.popleft())
        return found

    def next_ready(self) -> Batch | None:
        """Return a batch that has to be answered again, if there is one."""
        return self._ready[0] if self._ready else None

    def begin(self, batch: Batch) -> None:
        """Note that a batch is being answered."""
        if self._ready and self._ready[0] is batch:
            self._ready.popleft()
            self.changes += 1
        batch.times += 1
        self._answering.append(batch)

    def delivered(self, batch: Batch) -> bool:
        """Note that all of its answer was written; False where it was forgotten meanwhile."""
        if batch not in self._answering:
            return False
        self._answering.remove(batch)
        self._given.append(batch)
        self.answered = True
        return True

    def lost(self, batch: Batch) -> bool:
        """Note that its answer did not reach its trainer; returns whether it comes again."""
        for held in (self._answering, self._given):
            if batch in held:
                held.remove(batch)
                self._ready.appendleft(batch)
                self.changes += 1
                return True
        return False

    def restarted(self) -> int:
        """Have all that was given answered again: the trainer was started anew."""
        count = len(self._given)
        self._ready.extendleft(reversed(self._given))
        self._given.clear()
        self.changes += 1
        self.answered = False
        return count

    def restore(self, ids: list[str]) -> Batch:
        """Take over a batch that a predecessor gave; its parts follow."""
        batch = Batch([], ids)
        self._given.append(batch)
        self.answered = True
        return batch

    def clear(self) -> list[Waiting]:
        """Forget everything, and return it; answers under way end, since others get the groups."""
        for batch in self._answering:
            batch.abort()
        batches = [*self._ready, *self._given, *self._answering]
        found = [part for batch in batches for part in batch.parts]
        self._ready.clear()
        self._given.clear()
        self._answering.clear()
        self.changes += 1
        self.answered = False
        return found


class BatchQueue:
    """What trainers are given; `store` stores the registry's state for a successor."""

    def __init__(
        self,
        bus: shmbus.Bus,
        reader: BusReader,
        registry: Registry,
        *,
        keep_batches: int,
        store: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._registry = registry
        self._store = store
        self.queue = GroupQueue()
        self.batches = Deliveries(keep_batches)
        self._draining = asyncio.Lock()
        self._giving = asyncio.Lock()
        self._drained_s = 0.0
        #: What environments are told, and of which state of all that it is made of.
        self._available: tuple[tuple[int, int, int], Availability] | None = None
        #: What a predecessor gave, by key; the parts come as the bus delivers them again.
        self._restoring: dict[str, Batch] = {}
        for ids in registry.state.given:
            batch = self.batches.restore(ids)
            self._restoring |= dict.fromkeys(ids, batch)

    # -- from the bus ---------------------------------------------------------------------------

    async def attach(self) -> None:
        """Have groups come to this process."""
        if not self._reader.attached:
            await self._reader.attach()
            await self.drain()

    async def drain(self) -> None:
        """Take all groups that are complete now."""
        if not self._reader.attached:
            return
        async with self._draining:
            unusable: list[shmbus.Group] = []
            acknowledged: list[shmbus.Group] = []
            for group in await self._reader.take():
                if not self._sort(group, acknowledged):
                    unusable.append(group)
            self._drained_s = time.monotonic()
            await self._reader.ack(acknowledged)
            await self._reader.drop(unusable)

    def _sort(self, group: shmbus.Group, acknowledged: list[shmbus.Group]) -> bool:
        """Put a group where it belongs; False for one that no trainer here can use."""
        if atropos.is_atropos(group):
            part = Waiting(len(group), atropos.env_id_of(group), group)
        elif all("tokens" in sample for sample in group):
            part = Waiting(len(group), None, group)
        else:
            self._warn_unusable(group, "it has no tokens")
            return False
        batch = self._restoring.pop(group.instance_id, None)
        if batch is not None and batch.acknowledged:
            acknowledged.append(group)
        elif batch is not None and not batch.times:
            batch.parts.append(part)
        # What was answered again without this part does not have it: it is for the next batch.
        else:
            self.queue.add(part, self._registry.group_size(part.env_id))
        return True

    def _warn_unusable(self, group: shmbus.Group, why: object) -> None:
        logger.warning(
            "group %r cannot be answered: dropped: %s", group.instance_id, why,
            extra={"bus": self._bus.name},
        )  # fmt: skip

    @property
    def attached(self) -> bool:
        """Whether groups come to this process."""
        return self._reader.attached

    @property
    def undelivered(self) -> int:
        """How many groups wait, given back ones too.

        Where another process reads the bus, nobody here knows the groups: their sequences count.
        """
        if not self._reader.attached:
            return self._bus.stats().undelivered
        return sum(self.queue.counts.values()) + len(self.batches.ready_parts())

    def available_to(self, env_id: int) -> Availability:
        """Return what an environment is told of what waits; unknown groups count as its own."""
        if not self._reader.attached:
            size = self._registry.group_size(env_id) or 1
            return Availability({(env_id, size): self.undelivered // size}, {})
        now = (self.queue.changes, self.batches.changes, self._registry.changes)
        if self._available is None or self._available[0] != now:
            counts: Counter[tuple[int | None, int]] = Counter(self.queue.counts)
            counts.update((part.env_id, part.size) for part in self.batches.ready_parts())
            self._available = (now, Availability(counts, self._registry.quotas()))
        return self._available[1]

    @property
    def answered(self) -> bool:
        """Whether a batch was given since the last registration."""
        return self.batches.answered

    def note_put(self) -> None:
        """Note that a body was put: what environments are told next counts it."""
        self._drained_s = 0.0

    @property
    def stale(self) -> bool:
        """Whether the bus has to be read before a client is told how many groups wait."""
        return self._reader.attached and time.monotonic() - self._drained_s > STALE_S

    @property
    def due(self) -> bool:
        """Whether the maintenance has to read the bus."""
        return time.monotonic() - self._drained_s > DRAIN_S / 2

    # -- to a trainer ---------------------------------------------------------------------------

    async def next_batch(self) -> tuple[Batch, list[bytes]] | None:
        """Acknowledge what was given, and begin the answer of the next batch, if there is one.

        Its groups come with it as JSON.
        """
        async with self._giving:
            await self._acknowledge()
            await self.drain()
            batch = self.batches.next_ready()
            if batch is not None:
                texts = await self._written(batch.parts)
            while batch is None:
                registry = self._registry
                chosen = self.queue.take(registry.batch_size, registry.minimums())
                if chosen is None:
                    return None
                count = len(chosen)
                texts = await self._written(chosen)
                if len(chosen) == count:
                    batch = Batch(chosen)
                else:
                    self.queue.put_back(chosen)
            self.batches.begin(batch)
            return batch, texts

    async def _written(self, parts: list[Waiting]) -> list[bytes]:
        """Return groups as JSON; those that cannot be are dropped, and leave `parts`."""
        texts: list[bytes] = []
        unusable: list[Waiting] = []
        for part in parts:
            try:
                texts.append(_encoder.encode(atropos.group_of(part.group)))
            except (TypeError, ValueError, shmbus.UnscoredError) as error:
                self._warn_unusable(part.group, error)
                unusable.append(part)
        if unusable:
            parts[:] = [part for part in parts if part not in unusable]
            await self._reader.drop([part.group for part in unusable])
        return texts

    async def _acknowledge(self) -> None:
        due = self.batches.due()
        for batch in due:
            batch.acknowledged = True
        groups = [part.group for batch in due for part in batch.parts]
        if due:
            await self._reader.ack(groups)
            self._note()

    def given(self, batch: Batch) -> None:
        """Note that all of its answer has left."""
        if self.batches.delivered(batch):
            if batch.times == 1:
                self._registry.state.step += 1
            with contextlib.suppress(Refusal):
                self._note()

    def lost(self, batch: Batch) -> None:
        """Note that the answer did not reach its trainer."""
        if self.batches.lost(batch):
            logger.warning(
                "a batch did not reach its trainer: it comes again",
                extra={"bus": self._bus.name, "groups": len(batch.parts), "times": batch.times},
            )
            self._note()

    def restarted(self) -> None:
        """Have everything come again that the last trainer did not acknowledge."""
        count = self.batches.restarted()
        if count:
            logger.warning(
                "a trainer registered again: what the last one had not acknowledged comes again",
                extra={"bus": self._bus.name, "batches": count},
            )
            self._note()

    def _note(self) -> None:
        self._registry.state.given = self.batches.given_ids()
        self._store()

    async def reset(self) -> int:
        """Discard everything; returns how many groups that were."""
        await self.drain()
        groups = [part.group for part in self._forget() if part.group.state == "leased"]
        await self._reader.drop(groups)
        self._note()
        return len(groups)

    async def detach(self) -> None:
        """Leave all groups to another process that reads the bus, also those that were given."""
        async with self._giving, self._draining:
            if self._reader.attached:
                self._forget()
                await self._reader.detach()
                self._note()

    def _forget(self) -> list[Waiting]:
        """Forget all groups that were taken, and return what held them."""
        self._restoring.clear()
        return [*self.queue.clear(), *self.batches.clear()]

    async def close(self) -> None:
        """Leave the bus."""
        await self._reader.close()
