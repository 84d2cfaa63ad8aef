"""Interrupts every step of a Consumer of a daemon, one or two ranks, and audits after each.

Usage: ``python tests/interrupt/served.py NAME [OPERATION...]``; as `embedded.py`, whose promises
it checks. The daemon is a process of its own, which nothing interrupts.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import embedded
from embedded import SHAPE, Fault, again, interrupt
from injection import Injection

import shmbus
from shmbus.client.daemon_client import DaemonClient

#: Seconds for what was leased to nobody to come again.
PATIENCE_S = 30.0


def serve(name: str) -> subprocess.Popen[bytes]:
    """Start a daemon that nothing interrupts."""
    argv = [sys.executable, "-m", "shmbus", "serve", name, "--capacity", "1MiB"]
    return subprocess.Popen([*argv, "--log-level", "error"], stdin=subprocess.DEVNULL)


def wait_for(make: Callable[[], Any]) -> Any:
    """What is made once the daemon is there."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return make()
        except shmbus.ShmbusError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Case(embedded.Case):
    """Consumers of a daemon: one, or two ranks of which the first is interrupted."""

    def __init__(self, name: str, **options: Any) -> None:
        self.ranks = options.pop("ranks", 1)
        self.daemon = serve(name)
        self.name = name
        self.producer = wait_for(lambda: shmbus.Producer(name))
        self.round = 0
        self.put = set()
        self.consumer = wait_for(self.attach)
        self.others = [self.attach(rank) for rank in range(1, self.ranks)]

    def attach(self, rank: int = 0) -> shmbus.Consumer:
        return shmbus.Consumer(self.name, daemon=True, rank=rank, world_size=self.ranks)

    def close(self) -> None:
        for consumer in [self.consumer, *self.others]:
            consumer.close()
        self.producer.close()
        self.daemon.terminate()
        self.daemon.wait(30)
        shmbus.unlink(self.name)

    def take(self, count: int = 64, held: int = 0) -> list[shmbus.Group]:
        """All that comes: what is put has been read by the daemon once its ring is empty."""
        found: list[shmbus.Group] = []
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            new = self.consumer.take(count, 0)
            found += new
            ledger = self.consumer.stats()
            if not new and not ledger.in_ring and not ledger.groups_ready:
                if ledger.groups_leased <= held + len(found):
                    break
                time.sleep(0.002)
        return found


def stepping(case: Case, at: int) -> Injection:
    """Take a step with two ranks, interrupt the first, and take it again."""
    case.offer(groups=4)
    share = 2 * SHAPE.more
    first, (second,) = case.consumer, case.others
    others: list[shmbus.Group] = []

    def other() -> None:
        others.extend(second.take_shard(groups=share, timeout=PATIENCE_S))

    thread = threading.Thread(target=other)
    thread.start()

    def operate() -> object:
        return first.take_shard(groups=share, timeout=PATIENCE_S)

    injection, kept, result = interrupt(at, operate)
    mine: list[shmbus.Group] = [] if kept is not None else list(result)  # type: ignore[call-overload]
    if kept is not None:
        mine = first.take_shard(groups=share, timeout=PATIENCE_S)
    thread.join()
    keys = sorted(group.instance_id for group in [*mine, *others])
    if keys != sorted(case.put):
        raise Fault(f"expected {sorted(case.put)}, got {keys}; {first.stats()}")
    first.ack(mine)
    second.ack(others)
    case.balance()
    ledger = second.stats()
    if ledger.leased or ledger.stashed or ledger.in_ring:
        raise Fault(f"something is left: {ledger}")
    return injection


def polling(case: Case, at: int) -> Injection:
    """A poll: the answer is there at once, whatever it is."""
    consumer = case.consumer
    case.offer()

    def operate() -> object:
        return consumer.take(1, 0)

    injection, kept, result = interrupt(at, operate)
    held = [] if kept is not None or result is None else list(result)  # type: ignore[call-overload]
    case.audit(held, set())
    return injection


def ending_shard(verb: str) -> Callable[[Case, int], Injection]:
    """A rank ends a group of its shard: what it gives back is its own again, and of no other."""

    def run(case: Case, at: int) -> Injection:
        case.offer(groups=4)
        share = 2 * SHAPE.more
        first, (second,) = case.consumer, case.others
        mine = first.take_shard(groups=share, timeout=PATIENCE_S)
        others = second.take_shard(groups=share, timeout=PATIENCE_S)
        one = mine.pop(0)

        def operate() -> None:
            if verb == "with":
                with one:
                    pass
            else:
                getattr(one, verb)()

        injection, kept, _ = interrupt(at, operate)
        case.balance()
        if kept is not None and one.state == "leased":
            again(operate)
        if one.state == "given_back":
            (came,) = first.take_shard(groups=share, timeout=PATIENCE_S)
            if came.instance_id != one.instance_id:
                raise Fault(f"gave back {one.instance_id}, got {came.instance_id}")
            mine.append(came)
        first.ack(mine)
        second.ack(others)
        case.balance()
        ledger = second.stats()
        if ledger.leased or ledger.stashed or ledger.in_ring:
            raise Fault(f"something is left: {ledger}")
        return injection

    return run


def doubting(verb: str) -> Callable[[Case, int], Injection]:
    """Interrupt the call after one that was interrupted in the middle of its dialogue."""

    def run(case: Case, at: int) -> Injection:
        case.offer()
        groups = case.take()
        source = case.consumer._source
        assert isinstance(source, DaemonClient)
        source.connection.doubtful = True

        def operate() -> None:
            if verb == "stats":
                case.consumer.stats()
            else:
                getattr(groups[0], verb)()

        injection, kept, _ = interrupt(at, operate)
        if kept is not None:
            again(operate)
        done = {groups[0].instance_id} if verb == "ack" else set()
        case.audit(groups if verb == "stats" else groups[1:], done)
        return injection

    return run


def returning(case: Case, at: int) -> Injection:
    """Attach as the rank that has just left; nobody has its place after an interrupt."""
    case.offer(groups=2)
    case.consumer.close()

    def operate() -> object:
        return case.attach()

    injection, kept, result = interrupt(at, operate)
    case.consumer = result if isinstance(result, shmbus.Consumer) else case.attach()
    for consumer in (case.consumer, *case.others):
        consumer.ack(consumer.take_shard(groups=SHAPE.more, timeout=PATIENCE_S))
    case.balance()
    ledger = case.others[0].stats()
    if ledger.leased or ledger.stashed or ledger.in_ring:
        raise Fault(f"something is left: {ledger}; after {kept}")
    return injection


def setting(case: Case, at: int) -> Injection:
    version = at

    def operate() -> None:
        case.consumer.policy_version = version

    injection, kept, _ = interrupt(at, operate)
    if kept is not None:
        again(operate)
    if case.consumer.policy_version != version:
        raise Fault(f"the version is {case.consumer.policy_version}, {version} was set")
    case.offer()
    case.audit([], set())
    return injection


OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[Case, int], Injection]]] = {
    "take": ({}, embedded.taking),
    "poll": ({}, polling),
    "ack": ({}, embedded.ending("ack")),
    "ack-list": ({}, embedded.ending_many),
    "drop": ({}, embedded.ending("drop")),
    "give-back": ({}, embedded.ending("give_back")),
    "with": ({}, embedded.within),
    "stats": ({}, embedded.counting),
    "version": ({}, setting),
    "doubted-stats": ({}, doubting("stats")),
    "doubted-ack": ({}, doubting("ack")),
    "doubted-give-back": ({}, doubting("give_back")),
    "attach": ({}, embedded.attaching),
    "close": ({}, embedded.closing),
    "rank-step": ({"ranks": 2}, stepping),
    "rank-ack": ({"ranks": 2}, ending_shard("ack")),
    "rank-drop": ({"ranks": 2}, ending_shard("drop")),
    "rank-give-back": ({"ranks": 2}, ending_shard("give_back")),
    "rank-with": ({"ranks": 2}, ending_shard("with")),
    "rank-attach": ({"ranks": 2}, returning),
}


if __name__ == "__main__":
    made = functools.partial(Case, sys.argv[1])
    print(json.dumps(embedded.report_of(OPERATIONS, made)))
