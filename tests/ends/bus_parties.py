"""Parties with a handle on a bus: writers, readers, feeders; each meets its end in a test.

A party prepares a bus, opens (`live`), uses its holdings (`touch`), waits in a call, and is judged
by `audit`, the third life. The other side starts by `meet`, and works by `attend`.

Invariants:

- A sample's bytes follow from its group and index: torn or overwritten samples show.
- A life reports (`Task.say`) after the fact; the audit counts on nothing else.
"""

import contextlib
import time
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from endings import Held, Task

import shmbus
from shmbus.inspect.status import read_status

CAPACITY, EXTENT_BYTES = "128KiB", 4096
#: Samples of a group, and groups put by the peer before a life begins.
SIZE, GROUPS = 2, 6
TOKENS = 120
#: Seconds of a third life's wait for expected groups; seconds of a call with something to take.
FOUND_S, TAKEN_S = 10.0, 10.0


def sample(group: str, index: int) -> dict[str, Any]:
    value = zlib.crc32(f"{group}:{index}".encode()) >> 1
    return {
        "score": float(index),
        "tokens": np.full(TOKENS, value, np.int32),
        "logprobs": np.full(TOKENS, -0.5, np.float32),
        "loss_mask": np.ones(TOKENS, np.uint8),
    }


def put_group(producer: shmbus.Producer, group: str, timeout: float = TAKEN_S) -> None:
    producer.put_group(group, [sample(group, index) for index in range(SIZE)], timeout=timeout)


def put_half(producer: shmbus.Producer, group: str, index: int) -> None:
    producer.put(group, group_size=SIZE, index=index, timeout=TAKEN_S, **sample(group, index))


def members(group: Any) -> list[list[int]]:
    """Return a group's members after a check of its bytes."""
    for t in group:
        right = sample(group.instance_id, t.index)
        for name in ("tokens", "logprobs", "loss_mask"):
            assert np.array_equal(t[name], right[name]), f"{group.instance_id}[{t.index}] is torn"
    return [[t.index, t.producer_id, t.sequence] for t in group]


# The request lane.


def take_request(producer: shmbus.Producer, timeout: float | None) -> Any:
    return producer.requests.next(timeout)


async def await_request(producer: shmbus.Producer) -> Any:
    return await producer.requests.anext(None)


def answer(producer: shmbus.Producer, request: Any) -> bool:
    return producer.requests.answer(request, **sample(request.instance_id, request.index))


def press(name: str, label: str) -> list[str]:
    """Put groups until the bus is full, to overwrite freed space; return the groups."""
    done: list[str] = []
    with shmbus.Producer(name) as producer, contextlib.suppress(shmbus.BusFullError):
        while len(done) < 1000:
            put_group(producer, f"{label}-{len(done)}", timeout=0)
            done.append(f"{label}-{len(done)}")
    return done


class Found:
    """Findings of a third life: the members of each group, acknowledged."""

    def __init__(
        self,
        name: str,
        awaited: set[str],
        then: Callable[[], str] | None = None,
        *,
        ends: bool = True,
        **options: Any,
    ) -> None:
        self.groups: dict[str, list[list[int]]] = {}
        with shmbus.Consumer(name, wait=TAKEN_S, **options) as consumer:
            self._drain(consumer)
            if then is not None:
                awaited = awaited | {then()}  # its room is free now
                self._drain(consumer)
            self.ledger = consumer.stats()
        found = set(self.groups)
        assert found == awaited, (
            f"lost: {sorted(awaited - found)}; came though nobody put them, or after their "
            f"acknowledgement: {sorted(found - awaited)}; {self.ledger}"
        )
        if ends:
            self._balance(name)

    def _drain(self, consumer: shmbus.Consumer) -> None:
        deadline = time.monotonic() + FOUND_S
        while time.monotonic() < deadline:
            groups = consumer.take(64, 0.0)
            for group in groups:
                assert group.instance_id not in self.groups, f"{group.instance_id} came twice"
                self.groups[group.instance_id] = members(group)
                group.ack()
            ledger = consumer.stats()
            if groups:
                deadline = time.monotonic() + FOUND_S
            elif ledger.in_ring == ledger.groups_ready == ledger.leased == 0:
                return

    def _balance(self, name: str) -> None:
        ledger = self.ledger
        assert ledger.balanced and not ledger.dropped, ledger
        assert ledger.committed == ledger.acknowledged, ledger
        assert ledger.requests.balanced, ledger.requests
        assert ledger.requests.open == ledger.requests.claimed == 0, ledger.requests
        seen = read_status(name).ledger
        assert (seen.unreadable, seen.undelivered) == (0, 0), seen


class Party:
    """Common behaviour."""

    #: Whether a bus has room for a single instance.
    ALONE = False
    #: Whether the peer can come only afterwards.
    MEETS_LATER = False
    #: Whether its results stay held after its close.
    OUTLIVED = False

    def __init__(self, how: str) -> None:
        self.how = how

    def prepare(self, task: Task) -> None:
        """Make the party's bus."""
        shmbus.Bus.create(task.name, CAPACITY, max_producers=12, extent_bytes=EXTENT_BYTES).close()

    def meet(self, task: Task) -> Any:
        raise NotImplementedError

    def attend(self, handle: Any) -> None:
        """Work, as the peer."""

    def live(self, task: Task) -> Held:
        """Open the handle, use it, and hold the cell's things."""
        raise NotImplementedError

    def touch(self, held: Held) -> None:
        """Use the handle, whatever became of the peer."""

    def wait(self, held: Held) -> None:
        raise NotImplementedError

    async def await_something(self, held: Held) -> None:
        raise NotImplementedError

    def call_for(self, held: Held) -> Callable[[], Any]:
        """Return a call with memory that may fail."""
        raise NotImplementedError

    def was_called(self, held: Held, done: Any) -> None:
        """Keep the result of such a call."""
        held.things += done

    def press(self, task: Task, label: str) -> list[str]:
        """Use up the free space; return the groups."""
        return press(task.name, label)

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        raise NotImplementedError


def all_of(facts: list[dict[str, Any]], name: str) -> set[str]:
    return {each for said in facts for each in said.get(name, ())}


class ProducerParty(Party):
    """A Producer; the peer collects, and holds every group taken."""

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        if task.held == "request":
            with shmbus.Feeder(task.name) as feeder:
                feeder.request("asked", group_size=1)

    def meet(self, task: Task) -> Any:
        return shmbus.Consumer(task.name)

    def attend(self, handle: Any) -> None:
        # Groups stay leased until the close.
        self.taken = [*getattr(self, "taken", []), *handle.take(64, 0)]

    def live(self, task: Task) -> Held:
        producer = shmbus.Producer(task.name)
        put_group(producer, f"life{task.life}-a")
        put_group(producer, f"life{task.life}-b")
        put_half(producer, "half", task.life - 1)
        done = [f"life{task.life}-a", f"life{task.life}-b", *(["half"] if task.life == 2 else [])]
        task.say(put=done)
        things: list[Any] = []
        if task.held == "reservation":
            fields = {"tokens": ("int32", TOKENS)}
            slot = producer.reserve(f"open{task.life}", group_size=1, index=0, fields=fields)
            slot["tokens"][:7] = 1
            things.append(slot)
        # In a repeated cell the first object owns the request, and lives until its name is bound.
        if task.held == "request" and not (self.how == "again" and task.life == 2):
            request = take_request(producer, TAKEN_S)
            assert request is not None and request.instance_id == "asked"
            things.append(request)
        held = Held(self, task, producer, things)
        held.put = done  # type: ignore[attr-defined]
        return held

    def touch(self, held: Held) -> None:
        key = f"{held.put[0]}-again{len(held.put)}"  # type: ignore[attr-defined]
        put_group(held.handle, key)
        self._note(held, key)

    def _note(self, held: Held, key: str) -> None:
        held.put.append(key)  # type: ignore[attr-defined]
        held.task.say(put=held.put)  # type: ignore[attr-defined]

    def wait(self, held: Held) -> None:
        take_request(held.handle, None)

    async def await_something(self, held: Held) -> None:
        await await_request(held.handle)

    def call_for(self, held: Held) -> Callable[[], Any]:
        self.calls = getattr(self, "calls", 0) + 1
        key = f"{held.put[0]}-m{self.calls}"  # type: ignore[attr-defined]
        values = sample(key, 0)

        def call() -> str:
            try:
                held.handle.put(key, group_size=1, index=0, timeout=0, **values)
            except shmbus.BusFullError:
                return ""
            return key

        return call

    def was_called(self, held: Held, done: Any) -> None:
        if done:
            self._note(held, done)

    def press(self, task: Task, label: str) -> list[str]:
        return []  # frees nothing, and its next life needs room

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        def take_again() -> str:
            with shmbus.Producer(task.name) as producer:
                request = take_request(producer, TAKEN_S)
                assert request is not None, "the request did not come back"
                assert answer(producer, request) and take_request(producer, 0) is None
            return "asked"

        Found(task.name, all_of(facts, "put"), take_again if task.held == "request" else None)


class TakerParty(Party):
    """A taker of groups; the peer puts groups."""

    ALONE = True
    #: Options of the third life's Consumer.
    OPTIONS: ClassVar[dict[str, Any]] = {}

    def meet(self, task: Task) -> Any:
        producer = shmbus.Producer(task.name)
        done = [f"group{number}" for number in range(GROUPS)]
        for key in done:
            put_group(producer, key)
        put_half(producer, "half", 0)
        task.say(put=done)
        return producer

    def open(self, task: Task) -> Any:
        return shmbus.Consumer(task.name)

    def take(self, held: Held, count: int) -> list[Any]:
        taken: list[Any] = held.handle.take(count, TAKEN_S)
        return taken

    def end(self, held: Held, thing: Any) -> None:
        thing.ack()

    def groups_of(self, thing: Any) -> list[Any]:
        return [thing]

    def live(self, task: Task) -> Held:
        held = Held(self, task, self.open(task), [])
        held.acked = []  # type: ignore[attr-defined]
        held.leased = {}  # type: ignore[attr-defined]
        (first,) = self.take(held, 1)
        self._note(held, [first])
        if task.held == "views":
            held.things += [t["tokens"] for group in self.groups_of(first) for t in group]
        keys = [group.instance_id for group in self.groups_of(first)]
        self.end(held, first)
        held.acked += keys  # type: ignore[attr-defined]
        del first
        if task.held != "nothing":
            more = self.take(held, 1)
            self._note(held, more)
            if task.held == "views":
                held.things += [t["tokens"] for group in self.groups_of(more[0]) for t in group]
            if task.held in self.KEEPS:
                held.things += more
            del more
        task.say(acked=held.acked, leased=held.leased)  # type: ignore[attr-defined]
        return held

    #: Cells in which the party keeps the groups taken, not only their consequences.
    KEEPS: tuple[str, ...] = ("lease",)

    def _note(self, held: Held, things: list[Any]) -> None:
        for thing in things:
            for group in self.groups_of(thing):
                held.leased[group.instance_id] = members(group)  # type: ignore[attr-defined]

    def touch(self, held: Held) -> None:
        more = held.handle.take(1, 0)
        self._note(held, more)
        if held.task.held == "lease":
            held.things += more
        del more
        held.task.say(leased=held.leased)  # type: ignore[attr-defined]

    def wait(self, held: Held) -> None:
        kept = []
        while True:
            kept += held.handle.take(1, None)

    async def await_something(self, held: Held) -> None:
        while True:
            held.things += await held.handle.atake(1, None)

    def call_for(self, held: Held) -> Callable[[], Any]:
        return lambda: held.handle.take(1, 0.0)

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        def complete() -> str:
            with shmbus.Producer(task.name) as producer:
                put_half(producer, "half", 1)
            return "half"

        acked = all_of(facts, "acked")
        found = Found(task.name, all_of(facts, "put") - acked, complete, **self.OPTIONS)
        for said in facts:
            for key, there in said.get("leased", {}).items():
                assert key in acked or found.groups[key] == there, f"{key} has other members"


class ConsumerParty(TakerParty):
    """A Consumer that reads the ring itself."""


class LeaserParty(TakerParty):
    """A Consumer that leases from a daemon, the peer (run by test_ends.py)."""

    ALONE = False
    OPTIONS: ClassVar = {"daemon": True}

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        super().meet(task._replace(life=0)).close()

    def open(self, task: Task) -> Any:
        return shmbus.Consumer(task.name, daemon=True, wait=TAKEN_S)

    def touch(self, held: Held) -> None:
        # No question to a gone daemon: it would wait for the successor.
        if held.task.other == "open":
            super().touch(held)


class HandlerParty(TakerParty):
    """An OnlineDataHandler: takes batches of a single group."""

    PREFETCH = 0
    KEEPS = ("batch", "views")

    def open(self, task: Task) -> Any:
        from trainer_adapter import OnlineDataHandler

        return OnlineDataHandler(
            task.name, groups_per_batch=1, prefetch=self.PREFETCH, pack_threads=1
        )

    def take(self, held: Held, count: int) -> list[Any]:
        return [held.handle.next_batch(TAKEN_S) for _ in range(count)]

    def end(self, held: Held, thing: Any) -> None:
        held.handle.ack(thing)

    def groups_of(self, thing: Any) -> list[Any]:
        return list(thing.groups)

    def touch(self, held: Held) -> None:
        assert held.handle.stats().balanced

    def wait(self, held: Held) -> None:
        kept = []
        while True:
            kept.append(held.handle.next_batch(None))

    def call_for(self, held: Held) -> Callable[[], Any]:
        def call() -> list[Any]:
            try:
                return [held.handle.next_batch(0)]
            except TimeoutError:
                return []

        return call


class PrefetchParty(HandlerParty):
    """A HandlerParty with a thread that keeps two batches ready."""

    PREFETCH = 2


class FeederParty(Party):
    """A Feeder; the peer: a worker with a sample in hand."""

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        with shmbus.Feeder(task.name) as feeder:
            feeder.request("before", group_size=1)

    def meet(self, task: Task) -> Any:
        producer = shmbus.Producer(task.name)
        self.requests = [*getattr(self, "requests", []), take_request(producer, TAKEN_S)]
        return producer

    def live(self, task: Task) -> Held:
        feeder = shmbus.Feeder(task.name)
        held = Held(self, task, feeder, [])
        held.offered = []  # type: ignore[attr-defined]
        self.touch(held)
        many = [{"instance_id": f"life{task.life}-{n}", "group_size": 1} for n in range(2)]
        feeder.request_many(many, timeout=TAKEN_S)
        self._note(held, *(each["instance_id"] for each in many))
        return held

    def _note(self, held: Held, *keys: str) -> None:
        held.offered += keys  # type: ignore[attr-defined]
        held.task.say(offered=held.offered)  # type: ignore[attr-defined]

    def _offer(self, held: Held, timeout: float | None, **more: Any) -> str:
        at = f"life{held.task.life}-{len(held.offered)}-touched"
        held.handle.request(at, group_size=1, timeout=timeout, **more)
        return at

    def touch(self, held: Held) -> None:
        self._note(held, self._offer(held, TAKEN_S))

    def wait(self, held: Held) -> None:
        with contextlib.suppress(shmbus.BusFullError):
            while True:
                self._note(held, self._offer(held, 0, prompt=np.zeros(5000, np.int32)))
        held.handle.request("too-late", group_size=1, prompt=np.zeros(5000, np.int32))

    def call_for(self, held: Held) -> Callable[[], Any]:
        # A new group each time: a failed call may have offered its group, as may a death there.
        self.calls = getattr(self, "calls", 0) + 1
        key = f"tried{held.task.life}-{self.calls}"

        def call() -> str:
            try:
                held.handle.request(key, group_size=1, timeout=0)
                return key
            except shmbus.BusFullError:
                return ""

        return call

    def was_called(self, held: Held, done: Any) -> None:
        if done:
            self._note(held, done)

    def press(self, task: Task, label: str) -> list[str]:
        # Room in the lane for the next life.
        with shmbus.Producer(task.name) as producer:
            requests = [take_request(producer, 0) for _ in range(8)]
            done = [each.instance_id for each in requests if each and answer(producer, each)]
        Found(task.name, {*done}, ends=False)
        return done

    def audit(self, task: Task, facts: list[dict[str, Any]]) -> None:
        seen: set[str] = set()
        with shmbus.Producer(task.name) as producer:
            while (request := take_request(producer, 0)) is not None:
                assert request.instance_id not in seen, "a request came twice"
                assert answer(producer, request)
                seen.add(request.instance_id)
        Found(task.name, seen)
        awaited = (all_of(facts, "offered") | {"before"}) - all_of(facts, "put")
        found = {key for key in seen if not key.startswith("tried")}
        assert found == {key for key in awaited if not key.startswith("tried")}, (found, awaited)
        assert seen >= awaited, f"lost: {awaited - seen}"


BUS_PARTIES: dict[str, type[Party]] = {
    "producer": ProducerParty,
    "consumer": ConsumerParty,
    "leaser": LeaserParty,
    "feeder": FeederParty,
    "handler": HandlerParty,
    "prefetch": PrefetchParty,
}
