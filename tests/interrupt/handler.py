"""Interrupts every step of an OnlineDataHandler, and audits after each.

Usage: ``python tests/interrupt/handler.py NAME [OPERATION...]``; as `embedded.py`, whose
promises it checks: the groups of batches here.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import embedded
from embedded import LATEST, Fault, again
from injection import Injected, Injection

import shmbus
from trainer_adapter import Batch, OnlineDataHandler

GROUPS = 6


class Case(embedded.Case):
    """A handler over a bus with a few groups, two a batch."""

    def __init__(self, name: str, **options: Any) -> None:
        self.bus = shmbus.Bus.create(name, "512KiB", max_producers=2)
        self.producer = shmbus.Producer(name)
        self.handler = OnlineDataHandler(
            name, groups_per_batch=2, daemon=False, max_wait=0.0, **options
        )
        self.round = 0
        self.put = set()
        self.patience_s = 0.3 if options.get("prefetch") else 0.02

    def close(self) -> None:
        self.handler.close()
        self.producer.close()
        self.bus.unlink()
        self.bus.close()

    def balance(self) -> shmbus.Ledger:
        ledger = self.handler.stats()
        if not ledger.balanced:
            raise Fault(f"the ledger does not balance: {ledger}")
        return ledger

    def batches(self) -> list[Batch]:
        found = []
        while True:
            try:
                found.append(self.handler.next_batch(timeout=self.patience_s))
            except TimeoutError:
                return found

    def audit_batches(self, held: list[Batch], done: set[str]) -> None:
        self.balance()
        found = [*held, *self.batches()]
        keys = sorted(group.instance_id for batch in found for group in batch.groups)
        wanted = sorted(self.put - done)
        if keys != wanted:
            raise Fault(f"expected {wanted}, got {keys}; {self.handler.stats()}")
        for batch in found:
            self.handler.ack(batch)
        ledger = self.balance()
        if ledger.leased or ledger.stashed or ledger.in_ring:
            raise Fault(f"something is left: {ledger}")


def interrupt(at: int, operate: Callable[[], object]) -> tuple[Injected | None, object]:
    """Run it with an exception at its `at`-th event."""
    result: object = None
    kept: Injected | None = None
    injection = Injection(at, __file__)
    LATEST[:] = [injection]
    try:
        with injection:
            result = operate()
    except Injected as error:
        kept = error
    return kept, result


def nexting(case: Case, at: int) -> None:
    case.offer(GROUPS)

    def operate() -> object:
        return case.handler.next_batch(timeout=2.0)

    kept, result = interrupt(at, operate)
    held = [result] if kept is None and isinstance(result, Batch) else []
    case.audit_batches(held, set())


def acking(case: Case, at: int) -> None:
    case.offer(GROUPS)
    first = case.handler.next_batch(timeout=2.0)

    def operate() -> None:
        case.handler.ack(first)

    kept, _ = interrupt(at, operate)
    case.balance()
    if kept is not None:
        again(operate)
    case.audit_batches([], {group.instance_id for group in first.groups})


def giving_back(case: Case, at: int) -> None:
    case.offer(GROUPS)
    first = case.handler.next_batch(timeout=2.0)

    def operate() -> None:
        case.handler.give_back(first)

    kept, _ = interrupt(at, operate)
    case.balance()
    if kept is not None:
        again(operate)
    case.audit_batches([], set())


def saving(case: Case, at: int) -> None:
    case.offer(GROUPS)
    first = case.handler.next_batch(timeout=2.0)
    before = case.handler.state_dict()
    interrupt(at, lambda: operate_state(case))
    if case.handler.state_dict() != before:
        raise Fault("the state is another one")
    case.audit_batches([first], set())


def operate_state(case: Case) -> object:
    def operate() -> object:
        return case.handler.state_dict()

    return operate()


def loading(case: Case, at: int) -> None:
    case.offer(GROUPS)
    first = case.handler.next_batch(timeout=2.0)
    state = case.handler.state_dict()
    case.handler.give_back(first)

    def operate() -> None:
        case.handler.load_state_dict(state)

    kept, _ = interrupt(at, operate)
    if kept is not None:
        operate()
    case.audit_batches([], {group.instance_id for group in first.groups})


OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[Case, int], None]]] = {
    "next": ({}, nexting),
    "next-stale": ({"max_policy_lag": 3}, nexting),
    "next-prefetch": ({"prefetch": 1}, nexting),
    "ack": ({}, acking),
    "ack-prefetch": ({"prefetch": 1}, acking),
    "give-back": ({}, giving_back),
    "give-back-prefetch": ({"prefetch": 1}, giving_back),
    "state": ({}, saving),
    "load": ({}, loading),
    "load-prefetch": ({"prefetch": 1}, loading),
}


if __name__ == "__main__":
    made = functools.partial(Case, sys.argv[1])
    print(json.dumps(embedded.report_of(OPERATIONS, sys.argv[2:], made)))
