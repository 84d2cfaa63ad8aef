"""Interrupts every step of a daemon's Consumer, one or two ranks, and audits after each step.

Usage: ``python tests/interrupt/served.py NAME [OPERATION...]``; checks the promises of
`embedded.py`. The daemon is a separate process, never interrupted.
"""

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

import shmbus
from shmbus.client.daemon_client import DaemonClient

#: Seconds for leases without a holder to come again.
PATIENCE_S = 30.0


def serve(name: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "shmbus", "serve", name, "--capacity", "1MiB"]
    return subprocess.Popen([*argv, "--log-level", "error"], stdin=subprocess.DEVNULL)


def wait_for(make: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while True:
        try:
            return make()
        except shmbus.ShmbusError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Case(embedded.Case):
    """Consumers of a daemon: a single consumer, or two ranks with the first interrupted."""

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
        """Take every group: an empty ring means the daemon read every put."""
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


def acknowledge_shards(case: Case, mine: list[shmbus.Group], others: list[shmbus.Group]) -> None:
    case.consumer.ack(mine)
    case.others[0].ack(others)
    case.balance()
    case.others[0].stats()  # behind the acknowledgements
    case.check_empty()


def stepping(case: Case, at: int) -> None:
    """Take a step with two ranks, interrupt the first, and take the step again."""
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

    outcome = interrupt(at, operate)
    mine = outcome.groups if outcome.kept is None else list(operate())  # type: ignore[call-overload]
    thread.join()
    keys = sorted(group.instance_id for group in [*mine, *others])
    if keys != sorted(case.put):
        raise Fault(f"expected {sorted(case.put)}, got {keys}; {first.stats()}")
    acknowledge_shards(case, mine, others)


def polling(case: Case, at: int) -> None:
    """Poll: any answer comes at once."""
    case.offer()

    def operate() -> object:
        return case.consumer.take(1, 0)

    case.audit(interrupt(at, operate).groups, set())


def ending_shard(verb: str) -> Callable[[Case, int], None]:
    """A rank ends a group of its shard: a group given back stays in the same shard."""

    def run(case: Case, at: int) -> None:
        case.offer(groups=4)
        share = 2 * SHAPE.more
        first, (second,) = case.consumer, case.others
        one, *mine = first.take_shard(groups=share, timeout=PATIENCE_S)
        others = second.take_shard(groups=share, timeout=PATIENCE_S)

        def operate() -> None:
            if verb == "with":
                with one:
                    pass
            else:
                getattr(one, verb)()

        outcome = case.interrupt(at, operate, repeat=False)
        if outcome.kept is not None and one.state == "leased":
            again(operate)
        if one.state == "given_back":
            (came,) = first.take_shard(groups=share, timeout=PATIENCE_S)
            if came.instance_id != one.instance_id:
                raise Fault(f"gave back {one.instance_id}, got {came.instance_id}")
            mine.append(came)
        acknowledge_shards(case, mine, others)

    return run


def doubting(verb: str) -> Callable[[Case, int], None]:
    """Interrupt the call after a call interrupted in the middle of its dialogue."""

    def run(case: Case, at: int) -> None:
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

        if interrupt(at, operate).kept is not None:
            again(operate)
        done = {groups[0].instance_id} if verb == "ack" else set()
        case.audit(groups if verb == "stats" else groups[1:], done)

    return run


def returning(case: Case, at: int) -> None:
    """Attach as the rank that just left; an interrupted attach leaves the place free."""
    case.offer(groups=2)
    embedded.reattach(case, at)
    for consumer in (case.consumer, *case.others):
        consumer.ack(consumer.take_shard(groups=SHAPE.more, timeout=PATIENCE_S))
    acknowledge_shards(case, [], [])


def setting(case: Case, at: int) -> None:
    version = at

    def operate() -> None:
        case.consumer.policy_version = version

    if interrupt(at, operate).kept is not None:
        again(operate)
    if case.consumer.policy_version != version:
        raise Fault(f"the version is {case.consumer.policy_version}, {version} was set")
    case.offer()
    case.audit([], set())


OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[Case, int], None]]] = {
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
