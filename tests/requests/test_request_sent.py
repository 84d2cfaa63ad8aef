"""Samples of the lane that other nodes make: no worker here takes them."""

import numpy as np
from conftest import next_request
from lane import take_all, totals

from shmbus import Bus, Feeder, Producer
from shmbus.relay.prompt_lanes import TrainerLane
from shmbus_ext import _core


def test_what_was_sent_is_in_no_workers_hands_here_until_its_request_ends(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "4MiB") as bus,
        Feeder(bus_name) as feeder,
        Producer(bus_name) as producer,
    ):
        feeder.request("q", group_size=4, prompt=np.arange(3, dtype=np.int32))
        mine = next_request(producer, timeout=0)
        ((row, number, *_),) = _core.request_rows(bus._segment)
        assert _core.request_send(bus._segment, row, number) == 3
        assert totals(bus) == (4, 0, 4, 0, 0, 1)
        assert _core.request_send(bus._segment, row, number) == 3
        assert producer.requests.release(mine)
        # What a worker gives back is for workers here.
        (again,) = take_all(Producer(bus_name))
        assert again.index == mine.index
        _core.request_end(bus._segment, row, number)
        assert totals(bus) == (4, 0, 0, 0, 4, 0)
        assert _core.request_send(bus._segment, row, number) == 0


def test_a_request_that_was_sent_is_known_to_the_next_sink_and_one_that_a_worker_has_begun_is_not(
    bus_name: str,
) -> None:
    with (
        Bus.create(bus_name, "4MiB") as bus,
        Feeder(bus_name) as feeder,
        Producer(bus_name) as producer,
    ):
        feeder.request("begun", group_size=2, prompt=np.arange(3, dtype=np.int32))
        assert producer.requests.next(timeout=0) is not None
        feeder.request("fresh", group_size=2, prompt=np.arange(3, dtype=np.int32))
        lane = TrainerLane(bus._segment)
        rows = lane.rows()
        assert [(row.sent, row.untouched) for row in rows.values()] == [
            (False, False), (False, True),
        ]  # fmt: skip
        sent = lane.send(2)
        assert sent is not None and sent[0].group[0] == "fresh"
        # The next sink learns it from the lane.
        rows = TrainerLane(bus._segment).rows()
        assert [(row.sent, row.untouched) for row in rows.values()] == [
            (False, False), (True, False),
        ]  # fmt: skip
