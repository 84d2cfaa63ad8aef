"""Groups from the bus to trainers: the queue for batches, and the given batches.

Atropos' protocol lacks an acknowledgement: a request for the next batch counts as the
acknowledgement of earlier batches, and a registration as a trainer's restart.

Invariants:

- Every taken group is in a single place: the queue, a batch, or acknowledged.
- A group without a valid answer is dropped and named; its neighbours go on.
- `drain` returns after every group in the bus at the call is in the queue.
- A batch is ready, being answered, given or ended. It is acknowledged only after a whole delivery
  of its answer, and a request for another batch. A batch with a lost answer comes next.
- A given batch is stored after its answer left: a gateway killed before gives it again.
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
from shmbus.gateway.registry import GroupKey, Registry
from shmbus.gateway.settings import DRAIN_S, STALE_S
from shmbus.http.access import Refusal
from shmbus.peers import atropos
from shmbus.peers.atropos_queue import Availability, GroupQueue, Waiting

logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def key_of(group: shmbus.Group) -> GroupKey:
    """Return the group's key on the bus."""
    return group.instance_id, group.round


class Batch:
    """Groups for a trainer, given together."""

    def __init__(self, parts: list[Waiting], ids: list[GroupKey] | None = None) -> None:
        self.parts = parts
        self.ids = [key_of(part.group) for part in parts] if ids is None else ids
        self.times = 0
        self.acknowledged = False
        #: Aborts the running answer.
        self.abort: Callable[[], None] = lambda: None


class Deliveries:
    """Batches, with the last `keep` still given: one for each trainer process."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._ready: deque[Batch] = deque()
        self._answering: list[Batch] = []
        self._given: deque[Batch] = deque()
        #: True after a batch was given since the last registration.
        self.answered = False
        #: Number of changes of the ready batches.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._answering) + len(self._given)

    def given_ids(self) -> list[list[GroupKey]]:
        """Return the keys of given groups, for a successor."""
        return [batch.ids for batch in self._given]

    def ready_parts(self) -> list[Waiting]:
        """Return the groups of ready batches: no trainer holds them."""
        return [part for batch in self._ready for part in batch.parts]

    def due(self) -> list[Batch]:
        """Remove and return the batches acknowledged by a request for the next batch."""
        found = []
        while len(self._given) >= self._keep:
            found.append(self._given.popleft())
        return found

    def next_ready(self) -> Batch | None:
        """Return the first ready batch, or None."""
        return self._ready[0] if self._ready else None

    def begin(self, batch: Batch) -> None:
        """Note the start of a batch's answer."""
        if self._ready and self._ready[0] is batch:
            self._ready.popleft()
            self.changes += 1
        batch.times += 1
        self._answering.append(batch)

    def delivered(self, batch: Batch) -> bool:
        """Note an answer's delivery; return False for a batch forgotten meanwhile."""
        if batch not in self._answering:
            return False
        self._answering.remove(batch)
        self._given.append(batch)
        self.answered = True
        return True

    def lost(self, batch: Batch) -> bool:
        """Note a lost answer; return True if the batch comes again."""
        for held in (self._answering, self._given):
            if batch in held:
                held.remove(batch)
                self._ready.appendleft(batch)
                self.changes += 1
                return True
        return False

    def restarted(self) -> int:
        """Make every given batch ready again, after a trainer's restart; return their number."""
        count = len(self._given)
        self._ready.extendleft(reversed(self._given))
        self._given.clear()
        self.changes += 1
        self.answered = False
        return count

    def restore(self, ids: list[GroupKey]) -> Batch:
        """Take over a batch given by a predecessor; its parts follow."""
        batch = Batch([], ids)
        self._given.append(batch)
        self.answered = True
        return batch

    def clear(self) -> list[Waiting]:
        """Forget and return everything; running answers end: other consumers get their groups."""
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
    """The trainers' batches; `store` stores the registry's state for a successor."""

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
        #: The report for environments, with the change counts of its inputs.
        self._available: tuple[tuple[int, int, int], Availability] | None = None
        #: What a predecessor gave, by key; the parts come as the bus delivers them again.
        self._restoring: dict[GroupKey, Batch] = {}
        for ids in registry.state.given:
            batch = self.batches.restore(ids)
            self._restoring |= dict.fromkeys(ids, batch)

    # -- from the bus ---------------------------------------------------------------------------

    async def attach(self) -> None:
        """Become the consumer of the bus."""
        if not self._reader.attached:
            await self._reader.attach()
            await self.drain()

    async def drain(self) -> None:
        """Take every complete group."""
        if not self._reader.attached:
            return
        async with self._draining:
            acknowledged: list[shmbus.Group] = []
            groups = await self._reader.take()
            unusable = [group for group in groups if not self._sort(group, acknowledged)]
            self._drained_s = time.monotonic()
            await self._reader.ack(acknowledged)
            await self._reader.drop(unusable)

    def _sort(self, group: shmbus.Group, acknowledged: list[shmbus.Group]) -> bool:
        """Put a group into its place; return False for a group without use for trainers."""
        if atropos.is_atropos(group):
            part = Waiting(len(group), atropos.env_id_of(group), group)
        elif all("tokens" in sample for sample in group):
            part = Waiting(len(group), None, group)
        else:
            self._warn_unusable(group, "it has no tokens")
            return False
        batch = self._restoring.pop(key_of(group), None)
        if batch is not None and batch.acknowledged:
            acknowledged.append(group)
        elif batch is not None and not batch.times:
            batch.parts.append(part)
        # The batch was answered again without this part: the part joins the next batch.
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
        """True while groups come to this process."""
        return self._reader.attached

    @property
    def undelivered(self) -> int:
        """The number of waiting groups; by their sequences while another process reads the bus."""
        if not self._reader.attached:
            return self._bus.stats().undelivered
        return sum(self.queue.counts.values()) + len(self.batches.ready_parts())

    def available_to(self, env_id: int) -> Availability:
        """Return an environment's queue report; unknown groups count as its own."""
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
        """True after a batch was given since the last registration."""
        return self.batches.answered

    def note_put(self) -> None:
        """Note a put: the next report to environments counts it."""
        self._drained_s = 0.0

    @property
    def stale(self) -> bool:
        """True if a report of waiting groups needs a read of the bus first."""
        return self._reader.attached and time.monotonic() - self._drained_s > STALE_S

    @property
    def due(self) -> bool:
        """True if the maintenance should read the bus."""
        return time.monotonic() - self._drained_s > DRAIN_S / 2

    # -- to a trainer ---------------------------------------------------------------------------

    async def next_batch(self) -> tuple[Batch, list[bytes]] | None:
        """Acknowledge given batches, and begin the next batch's answer, with its groups as JSON."""
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
        """Return groups as JSON; unencodable groups are dropped, and leave `parts`."""
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
        """Note that a batch's answer left."""
        if self.batches.delivered(batch):
            if batch.times == 1:
                self._registry.state.step += 1
            with contextlib.suppress(Refusal):
                self._note()

    def settle(self, batch: Batch, delivered: bool) -> None:
        """Make a batch with a lost answer ready again."""
        if not delivered and self.batches.lost(batch):
            logger.warning(
                "a batch did not reach its trainer: it comes again",
                extra={"bus": self._bus.name, "groups": len(batch.parts), "times": batch.times},
            )
            self._note()

    def restarted(self) -> None:
        """Make every group not acknowledged by the last trainer ready again."""
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
        """Discard everything; return the number of groups."""
        await self.drain()
        groups = [part.group for part in self._forget() if part.group.state == "leased"]
        await self._reader.drop(groups)
        self._note()
        return len(groups)

    async def detach(self) -> None:
        """Leave every group, also given groups, to another reader of the bus."""
        async with self._giving, self._draining:
            if self._reader.attached:
                self._forget()
                await self._reader.detach()
                self._note()

    def _forget(self) -> list[Waiting]:
        """Forget the taken groups, and return their holders."""
        self._restoring.clear()
        return [*self.queue.clear(), *self.batches.clear()]

    async def close(self) -> None:
        """Leave the bus."""
        await self._reader.close()
