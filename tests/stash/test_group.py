"""A group in its caller's hands: ends, views, and no references kept."""

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from shmbus import Bus, Consumer, Group, Producer

SIZE = 4


@pytest.fixture
def consumer(bus_name: str) -> Iterator[Consumer]:
    with Bus.create(bus_name, capacity="2MiB"), Consumer(bus_name) as handle:
        with Producer(bus_name) as producer:
            for key in "abc":
                for index in reversed(range(SIZE)):
                    x = np.full(20, index, np.int32)
                    producer.put(key, group_size=SIZE, index=index, x=x, timeout=30)
        yield handle


def assert_whole(group: Group) -> None:
    assert group.complete and len(group) == group.size == SIZE
    assert [t.index for t in group] == list(range(SIZE))
    assert all(np.array_equal(t["x"], np.full(20, t.index)) for t in group)


def test_a_group_is_read_like_a_list_of_its_samples_by_index(consumer: Consumer) -> None:
    [group] = consumer.take(1, 10)
    assert_whole(group)
    assert (group.instance_id, group.round, group.state) == ("a", None, "leased")
    assert group[0] is group.trajectories[0] and group[-1] is group.trajectories[3]
    assert group[1:3] == group.trajectories[1:3]
    with pytest.raises(IndexError):
        group[SIZE]


def test_a_block_acknowledges_on_success_and_gives_back_on_an_error(consumer: Consumer) -> None:
    first, second = consumer.take(2, 10)
    with pytest.raises(RuntimeError, match="mine"), first:
        raise RuntimeError("mine")
    with second:
        second.drop()
    again, last = consumer.take(3, 10)
    assert (again.instance_id, last.instance_id) == ("a", "c")
    assert_whole(again)
    with again as entered:
        assert entered is again
    assert [first.state, second.state, again.state] == ["given_back", "dropped", "acknowledged"]


def test_changing_the_list_of_a_group_changes_nothing_about_its_end(consumer: Consumer) -> None:
    a, b, c = consumer.take(3, 10)
    for group in (a, b, c):
        group.trajectories.reverse()
        group.trajectories.pop()
    assert [t.index for t in a] == [3, 2, 1] and not a.complete
    a.ack()
    b.drop()
    c.give_back()
    ledger = consumer.stats()
    assert ledger.balanced and ledger.acknowledged == SIZE
    assert_whole(consumer.take(1, 10)[0])


def test_a_group_that_nobody_holds_stays_under_lease(consumer: Consumer) -> None:
    consumer.take(2, 10)
    gc.collect()
    ledger = consumer.stats()
    assert ledger.balanced and (ledger.leased, ledger.groups_leased) == (2 * SIZE, 2)
    assert [group.instance_id for group in consumer.take(9, 0)] == ["c"]


def test_a_group_that_its_consumer_keeps_goes_with_it(bus_name: str) -> None:
    with Bus.create(bus_name, capacity="2MiB"), Producer(bus_name) as producer:
        producer.put("a", group_size=1, index=0)
        consumer = Consumer(bus_name)
        vars(consumer)["kept"] = consumer.take(1, 10)
        consumer.close()
        gone = weakref.ref(consumer)
        del consumer
        gc.collect()
        assert gone() is None
