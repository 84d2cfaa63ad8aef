"""Sums over the last minute: never more than a minute's worth, and nothing unwatched."""

from collections.abc import Iterator

import msgspec
import pytest

from shmbus import Bus, Producer
from shmbus.data.status_types import BusStatus, DaemonStatus, LeaseStatus, WaitedStatus
from shmbus.inspect.rates import Watcher
from shmbus.inspect.status import read_status


class Clock:
    """A bus of one producer and two trainers that wait all the time, and somebody who watches."""

    def __init__(self, status: BusStatus) -> None:
        leases = [LeaseStatus(client=n, pid=n, label="train.py") for n in (1, 2)]
        self._status = msgspec.structs.replace(
            status, daemon=DaemonStatus(answers=True, problem="", leases=leases)
        )
        self.watcher = Watcher(status.name)
        self.now_s = 1000.0
        self.waited_s = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.waited_s += seconds

    def poll(self, *, jump_s: float = 0.0) -> None:
        self.waited_s += jump_s
        [producer] = self._status.producers
        status = msgspec.structs.replace(
            self._status,
            producers=[msgspec.structs.replace(producer, waited_s=self.waited_s)],
            waited=WaitedStatus(trainers_s=2 * self.waited_s),
        )
        self.watcher._note_waits(status, self.now_s)
        self.watcher._at_s = self.now_s

    def watch(self, seconds: int) -> None:
        for _ in range(seconds):
            self.pass_time(1.0)
            self.poll()

    @property
    def sums(self) -> tuple[float, float]:
        [producer_s] = self.watcher.waited_s.values()
        return producer_s, self.watcher.trainers_waited_s


@pytest.fixture
def clock(bus_name: str) -> Iterator[Clock]:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name):
        yield Clock(read_status(bus_name))


def test_two_trainers_wait_two_minutes_in_a_minute_at_most(clock: Clock) -> None:
    clock.watch(200)
    producer_s, trainers_s = clock.sums
    assert 55.0 <= producer_s <= 60.0
    assert trainers_s == 2 * producer_s


def test_time_that_nobody_watched_is_not_of_the_last_minute(clock: Clock) -> None:
    clock.watch(30)
    clock.pass_time(600.0)
    clock.poll()
    assert clock.sums == (0.0, 0.0)
    clock.watch(12)
    assert clock.sums == (12.0, 24.0)


def test_a_wait_counted_at_its_end_is_at_most_the_time_watched(clock: Clock) -> None:
    clock.watch(20)
    clock.poll(jump_s=500.0)
    producer_s, trainers_s = clock.sums
    assert producer_s <= 20.0 and trainers_s <= 40.0
