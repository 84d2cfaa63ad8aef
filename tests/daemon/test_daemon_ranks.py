"""Ranks: shards of a step are disjoint and decided once; a rank's successor gets its groups."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Daemon, Spawner, next_request, take_groups, two_ranks, wait_until

from shmbus import (
    Bus,
    Consumer,
    DaemonUnavailableError,
    Feeder,
    Group,
    Producer,
)
from shmbus.control.ask import ask_status
from shmbus.control.messages import StatusReply
from shmbus.handles import source
from shmbus.inspect.status import read_status

Served = Callable[..., Daemon]


def put(name: str, groups: range, tokens: Callable[[int], int] = lambda g: 10 + g % 7) -> None:
    with Producer(name) as producer:
        for group in groups:
            for index in range(2):
                producer.put(
                    f"g{group}", group_size=2, index=index,
                    tokens=np.full(tokens(group), group, np.int32),
                )  # fmt: skip


def ids(groups: list[Group]) -> list[str]:
    return [group.instance_id for group in groups]


@pytest.mark.parametrize("first", [0, 1])
def test_shards_are_the_same_whoever_asks_first(daemon: Served, bus_name: str, first: int) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, range(8))
    with two_ranks(bus_name) as (zero, one):
        got: dict[int, list[Group]] = {}
        for rank in (first, 1 - first):
            got[rank] = (zero, one)[rank].take_shard(groups=4, timeout=10)
        assert len(got[0]) == len(got[1]) == 4
        # Heaviest first, a round each: pinned, independent of the asking rank.
        assert ids(got[0]) == ["g2", "g3", "g6", "g7"]
        assert ids(got[1]) == ["g0", "g1", "g4", "g5"]
        for rank in (0, 1):
            (zero, one)[rank].ack(got[rank])
        assert wait_until(lambda: zero.stats().acknowledged == 16)


def here(name: str) -> int:
    reply = ask_status(name)
    return len(reply.daemon.leases) if isinstance(reply, StatusReply) else 0


def test_after_a_restart_a_rank_ahead_leaves_the_groups_to_one_behind(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    put(bus_name, range(6))
    with two_ranks(bus_name) as (zero, one):
        zero.ack(zero.take_shard(groups=1, max_wait=0, timeout=10))
        for _ in range(3):
            one.ack(one.take_shard(groups=1, max_wait=0, timeout=10))
        wait_until(lambda: one.stats().acknowledged == 8)
        served.restart()
        wait_until(lambda: here(bus_name) == 2, what="both ranks to come back")
        # The daemon knew two steps of the second rank: both groups belong to these steps.
        assert one.take_shard(groups=1, max_wait=0, timeout=0.2) == []
        taken = [zero.take_shard(groups=1, max_wait=0, timeout=10) for _ in range(2)]
        assert [len(groups) for groups in taken] == [1, 1]


@pytest.mark.parametrize("holds", [True, False], ids=["holding", "holding nothing"])
@pytest.mark.parametrize("knew", [True, False], ids=["known before", "new"])
@pytest.mark.parametrize("asks_first", [0, 1])
def test_after_a_restart_a_process_that_took_no_step_keeps_pace_with_the_other_rank(
    daemon: Served, bus_name: str, holds: bool, knew: bool, asks_first: int
) -> None:
    served = daemon("--capacity", "8MiB")
    put(bus_name, range(12))

    def rank(number: int) -> Consumer:
        return Consumer(bus_name, rank=number, world_size=2)

    def step(consumer: Consumer) -> list[Group]:
        return consumer.take_shard(groups=1, max_wait=0, timeout=10)

    with rank(0) as zero, rank(1) as one:  # an earlier life, with numbers known to the ranks
        for _ in range(3):
            for consumer in (zero, one):
                consumer.ack(step(consumer))
        wait_until(lambda: zero.stats().acknowledged == 12)
    with contextlib.ExitStack() as stack:
        zero = stack.enter_context(rank(0))
        one = stack.enter_context(rank(1)) if knew else None
        taken = step(zero)
        if not holds:
            zero.ack(taken)
            wait_until(lambda: zero.stats().acknowledged == 14)
        served.restart()
        wait_until(lambda: here(bus_name) == 1 + knew, what="the ranks to come back")
        one = one or stack.enter_context(rank(1))
        if holds and asks_first == 1:
            taken += step(one)
        for _ in range(2):
            for consumer in (zero, one) if asks_first == 0 else (one, zero):
                taken += step(consumer)
        if holds and asks_first == 0:
            taken += step(one)
        # A held step's second shard is the first for the new process.
        assert len(set(ids(taken))) == len(taken) == 5 + holds
        for consumer in (zero, one):
            assert consumer.take_shard(groups=1, max_wait=0, timeout=0.1) == []


STOPPED_RANK = """
import sys, time
from pathlib import Path
from shmbus import Consumer
_, bus, folder, holds = sys.argv
consumer = Consumer(bus, rank=0, world_size=2)
held = []
for step in range(5):
    while not Path(folder, str(step)).exists():
        time.sleep(0.01)
    held.append(consumer.take_shard(groups=1, max_wait=0, timeout=30))
    print("took", *(group.instance_id for group in held[-1]), f"in step {step}", flush=True)
    while len(held) > int(holds):
        consumer.ack(held.pop(0))
        consumer.stats()  # brings the confirmation
    print("done", step, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("holds", [0, 1, 2])
def test_a_rank_that_returns_after_a_new_process_asked_goes_on_beside_it(
    daemon: Served, spawn: Spawner, bus_name: str, tmp_path: Path, holds: int, asked: int
) -> None:
    # The new process counts steps from 0 until its sibling reports. The sibling's groups belong to
    # steps of both ranks, so the new rank takes as many steps.
    served = daemon("--capacity", "8MiB")
    put(bus_name, range(6))
    zero = spawn.script(STOPPED_RANK, bus_name, tmp_path, str(holds))

    def let_step(number: int) -> None:
        (tmp_path / str(number)).touch()
        wait_until(lambda: f"done {number}" in zero.output())

    taken = []
    with Consumer(bus_name, rank=1, world_size=2) as one:
        for number in range(3):
            let_step(number)
            groups = one.take_shard(groups=1, max_wait=0, timeout=10)
            if number < 3 - holds:
                taken += ids(groups)
                one.ack(groups)
        wait_until(lambda: one.stats().acknowledged == 2 * (6 - 2 * holds))
    zero.send_signal(signal.SIGSTOP)
    served.restart()

    def step(rank: Consumer) -> list[Group]:
        return rank.take_shard(groups=1, max_wait=0, timeout=30)

    with Consumer(bus_name, rank=1, world_size=2) as one:
        if not asked and holds < 2:
            assert one.take_shard(groups=1, max_wait=0, timeout=0.1) == []
        put(bus_name, range(6, 10))
        for _ in range(asked):
            taken += ids(step(one))
        zero.send_signal(signal.SIGCONT)
        for number in (3, 4):
            let_step(number)
        for _ in range(2 + holds - asked):
            taken += ids(step(one))
    for line in zero.output().splitlines():
        if line.startswith("took"):
            taken += line.removeprefix("took ").partition(" in step")[0].split()
    assert len(taken) == len(set(taken)) == 10


HOLDING_RANK = """
import sys, time
from shmbus import Consumer
consumer = Consumer(sys.argv[1], rank=1, world_size=2)
groups = consumer.take_shard(groups=1, max_wait=0, timeout=60)
print("took", *(group.instance_id for group in groups), flush=True)
time.sleep(600)
"""
ATTACHED = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
print("here", flush=True)
time.sleep(600)
"""


def test_a_prompt_whose_group_waits_for_a_dead_ranks_successor_stays_open(
    daemon: Served, spawn: Spawner, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    with Feeder(bus_name) as feeder, Producer(bus_name) as producer:
        for number in range(2):
            feeder.request(f"q{number}", group_size=1, prompt=np.arange(2))
        for _ in range(2):
            request = next_request(producer)
            producer.requests.answer(request, tokens=np.arange(4))
    with Consumer(bus_name, rank=0, world_size=2) as zero:
        other = spawn.script(HOLDING_RANK, bus_name)
        taken = zero.take_shard(groups=1, max_wait=0, timeout=30)
        wait_until(lambda: "took q" in other.output())
        served.restart()
        wait_until(lambda: here(bus_name) == 2, what="both ranks to come back")
        other.kill()
        wait_until(lambda: here(bus_name) == 1, what="the rank to be missed")
        # A producer's death triggers a look at every request: requests with gone answers end.
        worker = spawn.script(ATTACHED, bus_name)
        wait_until(lambda: "here" in worker.output())
        worker.kill()
        wait_until(lambda: not any(p.state == "alive" for p in read_status(bus_name).producers))
        put(bus_name, range(1))
        wait_until(lambda: zero.stats().stashed >= 3)
        assert zero.stats().requests.groups == 2
        with Consumer(bus_name, rank=1, world_size=2) as one:
            again = one.take_shard(groups=1, max_wait=0, timeout=30)
            assert sorted(ids(taken + again)) == ["q0", "q1"]
            zero.ack(taken)
            one.ack(again)
            wait_until(lambda: zero.stats().requests.groups == 0)


SLOW_RANK = """
import sys
from shmbus import Consumer
consumer = Consumer(sys.argv[1], rank=0, world_size=2)
print("here")
print("took", len(consumer.take_shard(groups=1, max_wait=0, timeout=60)))
"""


def test_a_rank_that_comes_late_after_a_restart_has_what_was_kept_for_it(
    daemon: Served, bus_name: str, spawn: Spawner
) -> None:
    served = daemon("--capacity", "8MiB")
    slow = spawn.script(SLOW_RANK, bus_name, until="here")
    slow.send_signal(signal.SIGSTOP)
    put(bus_name, range(3))
    with Consumer(bus_name, rank=1, world_size=2) as one:
        one.ack(one.take_shard(groups=1, max_wait=0, timeout=10))
        wait_until(lambda: one.stats().acknowledged == 2)
        served.restart()
        one.ack(one.take_shard(groups=1, max_wait=0, timeout=10))
        slow.send_signal(signal.SIGCONT)
        slow.expect("took 1")


def test_ranks_ask_alike_and_the_next_job_asks_anew(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, range(8))
    with two_ranks(bus_name) as (zero, one):
        zero.ack(zero.take_shard(groups=2, timeout=10))
        with pytest.raises(ValueError, match=r"groups=3.*groups=2"):
            one.take_shard(groups=3, timeout=10)
        one.ack(one.take_shard(groups=2, timeout=10))
        zero.ack(zero.take_shard(groups=1, timeout=10))  # the other rank's shard waits
        assert zero.take_shard(groups=4, timeout=0) == []
    with two_ranks(bus_name) as (zero, one):
        for rank in (one, one, zero):
            assert len(rank.take_shard(groups=3, max_wait=0, timeout=10)) == 1


def test_another_world_size_takes_over_when_the_ranks_are_gone(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, range(8))
    with Consumer(bus_name, rank=0, world_size=2) as zero:
        with pytest.raises(ValueError, match="world of 2"):
            Consumer(bus_name, rank=0, world_size=3)
        assert len(zero.take_shard(groups=2, timeout=10)) == 2
    with Consumer(bus_name) as plain:
        assert sorted(ids(take_groups(plain, 8))) == [f"g{i}" for i in range(8)]


def test_ranks_need_a_daemon(bus_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DAEMON_WAIT_S", 0.1)
    with (
        Bus.create(bus_name, "1MiB"),
        pytest.raises(DaemonUnavailableError, match=r"shmbus serve.*rank=1, world_size=2"),
    ):
        Consumer(bus_name, rank=1, world_size=2)


@pytest.mark.parametrize("rank, world_size", [(-1, 2), (2, 2), (0, 0), (0, 5000)])
def test_a_rank_out_of_range_is_a_value_error(bus_name: str, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"rank|world_size"):
        Consumer(bus_name, rank=rank, world_size=world_size)


def test_more_trained_groups_than_a_message_holds_are_known_to_a_checkpoint(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "64MiB")
    expected = [f"{number:0250}" for number in range(9000)]
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(Producer(bus_name))
        ranks = [stack.enter_context(Consumer(bus_name, rank=n, world_size=2)) for n in range(2)]
        for start in range(0, len(expected), 1000):
            for name in expected[start : start + 1000]:
                producer.put(name, group_size=1, index=0, tokens=np.arange(2))
            for rank in ranks:
                rank.note_trained(rank.take_shard(groups=500, timeout=30), 3)
                rank.stats()  # answered after the note
        known = ranks[0].trained_before(4)
        assert len(known.names) == len(expected)
        assert sorted(known.groups) == [(name, None, "train") for name in expected]
