"""Interrupts every step of an OnlineDataHandler, and audits after each step.

Usage: ``python tests/interrupt/handler.py NAME [OPERATION...] [--seed N]``; checks the promises of
`embedded.py` for the groups of batches. A name beginning with ``served-`` uses a daemon's handler,
``rank-`` a handler of two ranks; the ending ``-prefetch`` makes batches ahead.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import embedded
import served
from embedded import Fault, again, interrupt

import shmbus
from trainer_adapter import Batch, OnlineDataHandler

#: Groups of a rank's batch; a round suffices for three, or a batch for each rank.
BATCH = 2
#: Seconds for every put group to come in a batch.
PATIENCE_S = 30.0
#: Seconds of a wait for a batch.
SLICE_S = 0.5


class Case(embedded.Case):
    """A handler over a bus with a few groups; embedded, a daemon's, or of two ranks."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.ranks = options.pop("ranks", 1)
        self.served = options.pop("served", False) or self.ranks > 1
        self.options = options
        self.daemon = served.serve(name) if self.served else None
        if self.daemon is None:
            self.bus = shmbus.Bus.create(name, "512KiB", max_producers=2)
        else:
            self.bus = served.wait_for(lambda: shmbus.Bus.open(name))
        self.producer = shmbus.Producer(name)
        self.consumer = served.wait_for(self.attach)
        self.others = [self.attach(rank) for rank in range(1, self.ranks)]
        self.round = 0
        self.put = set()

    def attach(self, rank: int = 0) -> OnlineDataHandler:  # type: ignore[override]
        return OnlineDataHandler(
            self.name,
            groups_per_batch=BATCH,
            daemon=self.served,
            max_wait=0.0,
            rank=rank,
            world_size=self.ranks,
            **self.options,
        )

    def close(self) -> None:
        for handler in [self.consumer, *self.others]:
            handler.close()
        self.producer.close()
        if self.daemon is not None:
            self.daemon.terminate()
            self.daemon.wait(30)
        self.bus.unlink()
        self.bus.close()

    def offer(self, *arguments: Any) -> None:
        super().offer(BATCH * self.ranks if self.ranks > 1 else 3 * BATCH)

    def take(self, count: int = 64, held: int = 0) -> list[Any]:
        return [self.consumer.next_batch(timeout=2.0)]

    def batches(self, wanted: set[str]) -> list[tuple[OnlineDataHandler, Batch]]:
        """Collect the batches of every rank until the wanted groups came, or time is over."""
        found: list[tuple[OnlineDataHandler, Batch]] = []
        left = set(wanted)
        deadline = time.monotonic() + PATIENCE_S
        while left and time.monotonic() < deadline:
            # In most operations the first rank had its part of a step.
            for handler in [*self.others, self.consumer]:
                try:
                    batch = handler.next_batch(timeout=SLICE_S)
                except TimeoutError:
                    continue
                found.append((handler, batch))
                left.difference_update(group.instance_id for group in batch.groups)
                if not left:
                    break
        return found

    def audit(self, held: list[Batch], done: set[str]) -> None:
        """Check for losses and repetitions; `held` belongs to the first rank."""
        self.balance()
        wanted = self.put - done
        keys = [group.instance_id for batch in held for group in batch.groups]
        found = [(self.consumer, batch) for batch in held]
        found += self.batches(wanted - set(keys))
        keys = sorted(group.instance_id for _, batch in found for group in batch.groups)
        if keys != sorted(wanted):
            raise Fault(f"expected {sorted(wanted)}, got {keys}; {self.consumer.stats()}")
        for handler, batch in found:
            handler.ack(batch)
        self.balance()
        for handler in self.others:
            handler.stats()  # after its acknowledgements
        self.check_empty()


def nexting(case: Case, at: int) -> None:
    """A batch lost by the exception comes again; a returned batch is listed."""
    case.offer()

    def operate() -> object:
        return case.consumer.next_batch(timeout=2.0)

    kept, result = interrupt(at, operate)
    held = case.consumer.out
    if kept is None and held != [result]:
        raise Fault(f"expected {result} to be out, got {held}")
    case.audit(held, set())


def nexting_twice(case: Case, at: int) -> None:
    """The trainer also loses the next call's batch; the handler lists the batch."""
    case.offer()

    def operate() -> object:
        return case.consumer.next_batch(timeout=2.0)

    if interrupt(at, operate).kept is not None and not case.consumer.out:
        operate()
    case.audit(case.consumer.out, set())


def offering(case: Case, at: int) -> None:
    """Each prompt of a single-pass iterator is offered once."""
    count = BATCH * case.ranks
    prompts = iter([(f"q{number}", [number]) for number in range(2 * count)])

    def operate() -> None:
        case.consumer.offer(prompts, ahead=1, group_size=1)

    kept, _ = interrupt(at, operate)
    position = case.consumer.state_dict().get("offer", {}).get("position", 0)
    if position != len(case.consumer._consumer.open_requests()):
        raise Fault(f"the state stands at {position}")
    if kept is not None:
        again(operate)
    # A call offers for a tenth of a second: two prompts' worth on a busy machine.
    for _ in range(count):
        if len(case.consumer._consumer.open_requests()) < count:
            again(operate)
    found = case.consumer._consumer.open_requests()
    if found != [(f"q{number}", number, "train") for number in range(count)]:
        raise Fault(f"open are {found}")
    # The next handler has no prompts to replace these.
    case.consumer.close()
    case.put = set()
    while (request := case.producer.requests.next(timeout=0)) is not None:
        case.put.add(request.instance_id)
        case.producer.requests.answer(request, tokens=embedded.DATA)
    case.consumer = served.wait_for(case.attach)
    case.audit([], set())


def ending(verb: str) -> Callable[[Case, int], None]:
    def run(case: Case, at: int) -> None:
        case.offer()
        first = case.consumer.next_batch(timeout=2.0)

        def operate() -> None:
            getattr(case.consumer, verb)(first)

        case.interrupt(at, operate)
        done = {group.instance_id for group in first.groups} if verb == "ack" else set()
        case.audit([], done)

    return run


def saving(case: Case, at: int) -> None:
    case.offer()
    first = case.consumer.next_batch(timeout=2.0)
    before = case.consumer.state_dict()

    def operate() -> object:
        return case.consumer.state_dict()

    interrupt(at, operate)
    if case.consumer.state_dict() != before:
        raise Fault("the state is another one")
    case.audit([first], set())


def loading(case: Case, at: int) -> None:
    case.offer()
    first = case.consumer.next_batch(timeout=2.0)
    state = case.consumer.state_dict()
    case.consumer.give_back(first)

    def operate() -> None:
        case.consumer.load_state_dict(state)

    if interrupt(at, operate).kept is not None:
        again(operate)
    case.audit([], {group.instance_id for group in first.groups})


_VERBS: dict[str, tuple[dict[str, Any], Callable[[Case, int], None]]] = {
    "next": ({}, nexting),
    "next-twice": ({}, nexting_twice),
    "ack": ({}, ending("ack")),
    "give-back": ({}, ending("give_back")),
    "state": ({}, saving),
    "load": ({}, loading),
    "close": ({}, embedded.closing),
}
_VERBS |= {f"{verb}-prefetch": ({"prefetch": 1}, run) for verb, (_, run) in _VERBS.items()}
_VERBS |= {
    "next-stale": ({"max_policy_lag": 3}, nexting),
    "offer": ({}, offering),
    "attach": ({}, embedded.attaching),
}

OPERATIONS = dict(_VERBS)
for place, where in (("served-", {"served": True}), ("rank-", {"ranks": 2})):
    for verb, (options, run) in _VERBS.items():
        # A daemon owns the policy of stale groups.
        if verb != "next-stale":
            OPERATIONS[place + verb] = ({**options, **where}, run)


if __name__ == "__main__":
    made = functools.partial(Case, sys.argv[1])
    print(json.dumps(embedded.report_of(OPERATIONS, made)))
