"""Ranks that wait: the daemon tries to form a step once a group, whatever their number."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import pytest
from counted_work import instructions

import shmbus
from shmbus.control import messages
from shmbus.daemon.leases import Session
from shmbus.daemon.service import Service
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy

GROUPS = 4


class Job:
    """Ranks of one job at a service without sockets, and the groups of each answer."""

    def __init__(self, name: str, ranks: int, collector: Collector) -> None:
        self.name, self.ranks = name, ranks
        self.service = Service(collector, {})
        self.producer = shmbus.Producer(name)
        self.put_groups = 0
        self.answers: list[list[int]] = [[] for _ in range(ranks)]
        self.sessions = [self.join(rank) for rank in range(ranks)]

    def join(self, rank: int) -> Session:
        hello = messages.Hello(
            version=messages.VERSION, bus=self.name, rank=rank, world_size=self.ranks
        )
        session = self.service.hello(hello, partial(self.note, rank))
        assert isinstance(session, Session)
        return session

    def note(self, rank: int, *replies: messages.Reply) -> None:
        self.answers[rank] += [len(x.groups) for x in replies if isinstance(x, messages.Leases)]

    def ask(self, *ranks: int, **said: object) -> None:
        for rank in ranks:
            request = msgspec.convert({"id": rank, "groups": GROUPS, **said}, messages.TakeStep)
            self.service.handle(self.sessions[rank], request)

    def put(self, groups: int) -> None:
        for _ in range(groups):
            tokens = np.zeros(4, np.int32)
            self.producer.put(f"g{self.put_groups}", group_size=1, index=0, tokens=tokens)
            self.put_groups += 1
            now = time.monotonic()
            self.service.pump(now)
            self.service.next_tick_s(now)


@contextmanager
def job_of(name: str, ranks: int) -> Iterator[Job]:
    shmbus.Bus.create(name, "8MiB").close()
    collector = Collector(name, StashPolicy())
    job = Job(name, ranks, collector)
    try:
        yield job
    finally:
        job.producer.close()
        collector.close()
        shmbus.unlink(name)


def work_a_group(name: str, ranks: int, late: int) -> float:
    """Instructions of the daemon for a group, while all ranks but the late ones wait."""
    waiting = range(ranks - late)
    with job_of(name, ranks) as job:
        job.ask(*waiting)
        if late:
            # Shards of an earlier step wait for the late ranks.
            job.put(ranks * GROUPS)
            job.ask(*waiting)
        job.put(ranks * GROUPS - GROUPS)
        found = instructions(lambda: job.put(2)) / 2
        job.put(GROUPS)
        assert all(job.answers[rank] == [GROUPS] * (1 + late) for rank in waiting)
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_a_group_costs_128_waiting_ranks_what_it_costs_two(bus_name: str, late: int) -> None:
    two, many = (work_a_group(bus_name, ranks, late) for ranks in (2, 128))
    assert many <= 1.1 * two


def test_each_waiting_rank_keeps_its_own_deadline(bus_name: str) -> None:
    with job_of(bus_name, 3) as job:
        job.ask(0, 2)
        job.ask(1, timeout_s=60.0)
        now = time.monotonic()
        job.service.serve(now + 61)
        assert job.answers == [[], [0], []]
        job.ask(1)
        job.put(3 * GROUPS)
        assert job.answers == [[GROUPS], [0, GROUPS], [GROUPS]]


def test_ranks_wait_on_after_the_first_of_them_has_left(bus_name: str) -> None:
    with job_of(bus_name, 3) as job:
        job.ask(0, 1, 2)
        job.put(GROUPS)
        job.service.leave(job.sessions[0], orderly=True)
        job.put(2 * GROUPS)
        assert job.answers == [[], [GROUPS], [GROUPS]]
        job.sessions[0] = job.join(0)
        job.ask(0)
        assert job.answers[0] == [GROUPS]


def test_a_partial_step_needs_one_rank_that_takes_such(bus_name: str) -> None:
    with job_of(bus_name, 3) as job:
        job.ask(0, 1, max_wait_s=5.0, only_full=True)
        job.put(3)
        job.service.serve(time.monotonic() + 6)
        assert job.answers == [[], [], []]
        job.ask(2, max_wait_s=5.0)
        for _ in range(2):
            job.service.serve(time.monotonic() + 6)
        assert job.answers == [[1], [1], [1]]
