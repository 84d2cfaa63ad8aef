"""Interrupts every step of a Consumer that reads the ring itself, and audits after each step.

Usage: ``python tests/interrupt/embedded.py NAME [OPERATION...]``. Prints a JSON line: the number of
exceptions, and the faults after each. ``sweep.py`` uses further shapes.

After an exception the ledger balances; the repeated operation succeeds or reports its earlier
success; every group is delivered once more, or was acknowledged; every lease has a holder.
"""

import functools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from injection import Injected, Injection

import shmbus

DATA = np.arange(7, dtype=np.int32)

#: The current injection, for an audit.
LATEST: list[Injection] = []

#: The latest exception with its traceback, kept as in a notebook until the next.
KEPT: list[Injected] = []

#: Exceptions raised in repeated calls.
REPEATED: list[str] = []


@dataclass
class Shape:
    """Circumstances of an operation; a seeded shape differs from round to round."""

    samples: int = 2
    more: int = 1
    rng: random.Random | None = None

    def seed(self, number: int) -> None:
        self.rng = random.Random(number)
        self.samples = self.rng.randint(2, 5)
        self.more = self.rng.randint(1, 3)


SHAPE = Shape()


class Fault(Exception):
    """A broken promise."""


class Outcome(NamedTuple):
    kept: Injected | None
    result: Any

    @property
    def groups(self) -> list[shmbus.Group]:
        return [] if self.result is None else list(self.result)


class Case:
    """An operation over a bus with a few groups."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.bus = shmbus.Bus.create(name, "512KiB", max_producers=2)
        self.producer = shmbus.Producer(name)
        self.options = options
        self.consumer = self.attach()
        self.round = 0
        self.put: set[str] = set()

    def attach(self) -> shmbus.Consumer:
        return shmbus.Consumer(self.name, daemon=False, **self.options)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()
        self.bus.unlink()
        self.bus.close()

    def offer(self, groups: int = 3, extra: Callable[[str], None] | None = None) -> None:
        self.round += 1
        self.put = set()
        for number in range(groups * SHAPE.more):
            key = f"r{self.round}-{number}"
            self.put.add(key)
            for index in range(SHAPE.samples):
                self.producer.put(
                    key, group_size=SHAPE.samples, index=index, score=float(index), tokens=DATA
                )
            if extra is not None and number == 0:
                extra(key)

    def take(self, count: int = 64, held: int = 0) -> list[shmbus.Group]:
        """Take every group beside `held` groups."""
        found: list[shmbus.Group] = []
        for _ in range(8):
            found += self.consumer.take(count, 0)
        return found

    def balance(self) -> shmbus.Ledger:
        ledger = self.consumer.stats()
        if not ledger.balanced:
            raise Fault(f"the ledger does not balance: {ledger}")
        return ledger

    def check_empty(self) -> None:
        ledger = self.balance()
        if ledger.leased or ledger.stashed or ledger.in_ring:
            raise Fault(f"something is left: {ledger}")

    def interrupt(self, at: int, operate: FunctionType, repeat: bool = True) -> Outcome:
        """Run an operation with an exception at its `at`-th event, and repeat the operation."""
        outcome = interrupt(at, operate)
        self.balance()
        if outcome.kept is not None and repeat:
            again(operate)
        self.balance()
        return outcome

    def audit(self, held: list[shmbus.Group], done: set[str]) -> None:
        """Check for losses: an undone group is held, or comes again, once."""
        self.balance()
        found = [*held, *self.take(held=len(held))]
        keys = sorted(group.instance_id for group in found)
        wanted = sorted(self.put - done)
        if keys != wanted:
            raise Fault(f"expected {wanted}, got {keys}; {self.consumer.stats()}")
        ledger = self.balance()
        if ledger.groups_leased != len(found):
            raise Fault(f"{ledger.groups_leased} groups are leased, {len(found)} are held")
        for group in found:
            group.ack()
        self.check_empty()


#: An event of a repeated call lies among the first so many.
REPEATED_EVENTS = 80


def again(operate: FunctionType) -> None:
    """Repeat an interrupted operation: it succeeds, or reports its earlier success."""
    if SHAPE.rng is not None and SHAPE.rng.random() < 0.5:
        injection = Injection(SHAPE.rng.randint(1, REPEATED_EVENTS), operate.__code__.co_filename)
        try:
            with injection:
                operate()
        except Injected:
            REPEATED.append(injection.where)
        except shmbus.ProtocolError as error:
            if "already" not in str(error):
                raise Fault(f"called again: {error}") from error
    try:
        operate()
    except shmbus.ProtocolError as error:
        if "already" not in str(error):
            raise Fault(f"called again: {error}") from error


def interrupt(at: int, operate: FunctionType) -> Outcome:
    injection = Injection(at, operate.__code__.co_filename)
    LATEST[:] = [injection]
    try:
        with injection:
            return Outcome(None, operate())
    except Injected as error:
        KEPT[:] = [error]
        return Outcome(error, None)


def taking(case: Case, at: int, extra: Callable[[str], None] | None = None) -> None:
    case.offer(extra=extra)

    def operate() -> object:
        return case.consumer.take(64, 0)

    case.audit(interrupt(at, operate).groups, set())


def ending(verb: str) -> Callable[[Case, int], None]:
    def run(case: Case, at: int) -> None:
        case.offer()
        first, *rest = case.take()

        def operate() -> None:
            getattr(first, verb)()

        case.interrupt(at, operate)
        case.audit(rest, set() if verb == "give_back" else {first.instance_id})

    return run


def ending_many(case: Case, at: int) -> None:
    case.offer()
    groups = case.take()

    def operate() -> None:
        case.consumer.ack([group for group in groups if group.state == "leased"])

    case.interrupt(at, operate)
    case.audit([], {group.instance_id for group in groups})


def within(case: Case, at: int) -> None:
    case.offer()
    first, *rest = case.take()

    def operate() -> None:
        with first:
            pass

    outcome = case.interrupt(at, operate, repeat=False)
    if outcome.kept is not None and first.state == "leased":
        first.ack()
    case.audit(rest, set() if first.state == "given_back" else {first.instance_id})


def failing(case: Case, at: int) -> None:
    """Take across a duplicate, a size mismatch and a failed sample."""

    def extra(key: str) -> None:
        put = case.producer.put
        put(f"{key}-d", group_size=2, index=0, tokens=DATA)
        put(f"{key}-d", group_size=2, index=0, tokens=DATA)
        put(f"{key}-d", group_size=3, index=1, tokens=DATA)
        put(f"{key}-d", group_size=2, index=1, tokens=DATA)
        case.put.add(f"{key}-d")
        case.producer.fail(f"{key}-f", group_size=2, index=0, reason="boom")
        put(f"{key}-f", group_size=2, index=1, tokens=DATA)

    taking(case, at, extra)


def judged(case: Case, at: int) -> None:
    def extra(key: str) -> None:
        for index in range(2):
            case.producer.put(f"{key}-z", group_size=2, index=index, score=1, tokens=DATA)

    taking(case, at, extra)


def counting(case: Case, at: int) -> None:
    case.offer()
    groups = case.take()

    def operate() -> object:
        return case.consumer.stats()

    interrupt(at, operate)
    case.audit(groups, set())


def reattach(case: Case, at: int) -> None:
    """Attach again; an interrupted attach leaves nothing attached."""
    case.consumer.close()

    def operate() -> object:
        return case.attach()

    case.consumer = interrupt(at, operate).result or case.attach()


def attaching(case: Case, at: int) -> None:
    case.offer()
    reattach(case, at)
    case.audit([], set())


def closing(case: Case, at: int) -> None:
    case.offer()
    case.take()

    def operate() -> None:
        case.consumer.close()

    if interrupt(at, operate).kept is not None:
        again(operate)
    case.consumer = case.attach()
    case.audit([], set())


OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[Case, int], None]]] = {
    "take": ({}, taking),
    "take-stale": ({"max_policy_lag": 3}, taking),
    "take-failing": ({}, failing),
    "take-judged": ({"skip_zero_variance": True, "max_policy_lag": 3}, judged),
    "ack": ({}, ending("ack")),
    "ack-list": ({}, ending_many),
    "drop": ({}, ending("drop")),
    "give-back": ({}, ending("give_back")),
    "with": ({}, within),
    "stats": ({}, counting),
    "attach": ({}, attaching),
    "close": ({}, closing),
}


def every(
    make: Callable[[], Any], run: Callable[[Any, int], object], first: int = 1, step: int = 1
) -> Iterator[tuple[str, str]]:
    """Interrupt each event of an operation, or some; yield the place and the fault after it."""
    at = first - step
    case = make()
    try:
        while True:
            at += step
            wrong = ""
            KEPT.clear()
            try:
                run(case, at)
            except (Fault, shmbus.ShmbusError, ValueError, AssertionError) as error:
                wrong = f"{type(error).__name__}: {error}"
                case.close()
                case = make()
            (injection,) = LATEST
            if not injection.raised:
                if wrong:
                    yield "without an exception", wrong
                return
            yield injection.where, wrong
    finally:
        case.close()


def report_of(
    operations: dict[str, tuple[dict[str, Any], Callable[[Any, int], object]]],
    make: Callable[..., Any],
) -> dict[str, Any]:
    """Run the command line; return the exceptions raised in each operation, and the faults."""
    chosen = sys.argv[2:]
    part = {"--from": 1, "--step": 1}
    for name in part:
        if name in chosen:
            at = chosen.index(name)
            part[name] = int(chosen[at + 1])
            del chosen[at : at + 2]
    if "--seed" in chosen:
        at = chosen.index("--seed")
        SHAPE.seed(int(chosen[at + 1]))
        del chosen[at : at + 2]
    report: dict[str, Any] = {"injections": 0, "faults": []}
    for operation in chosen or operations:
        options, run = operations[operation]
        count = 0
        for where, wrong in every(functools.partial(make, **options), run, *part.values()):
            count += 1
            if wrong:
                report["faults"].append(f"{operation}: {where}: {wrong}"[:300])
        report[operation] = count + len(REPEATED)
        report["injections"] += report[operation]
        REPEATED.clear()
    return report


if __name__ == "__main__":
    print(json.dumps(report_of(OPERATIONS, functools.partial(Case, sys.argv[1]))))
