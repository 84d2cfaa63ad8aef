"""What is none of a pool's, a channel's or a division's arguments is refused by its name."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from refusals import INT, let_through, of_type

from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, create_pool, unlink_pool
from trainer_adapter.balance import balance, by_budget

ROW = np.array([1, 2])


@pytest.fixture
def pool(bus_name: str) -> Iterator[str]:
    create_pool(bus_name, "things", PoolSpec(slot_bytes=4096))
    yield bus_name
    unlink_pool(bus_name, "things")


def test_a_version_is_described_by_bytes_and_flags(pool: str) -> None:
    wrong: list[dict[str, Any]] = [{"meta": True}, {"meta": "a"}, {"patch": ROW}, {"patch": "no"}]
    with PoolPublisher(pool, "things") as publisher:
        for each in wrong:
            with pytest.raises(TypeError, match=f"{next(iter(each))}: expected"):
                publisher.begin(1, 8, **each)
        with publisher.begin(1, 8, meta=b"m") as write:  # type: ignore[union-attr]
            assert write.meta == b"m"
    for policy in (ROW, None, "never"):
        with pytest.raises((TypeError, ValueError), match="when_held: expected"):
            PoolPublisher(pool, "things", when_held=policy)  # type: ignore[arg-type]


def test_integers_of_numpy_are_ints_of_a_reader(pool: str) -> None:
    with PoolPublisher(pool, "things") as publisher, PoolReader(pool, "things") as reader:
        with publisher.begin(np.int64(7), np.uint16(8)):  # type: ignore[union-attr]
            pass
        with reader.latest(after=np.int32(0), timeout=0) as lease:
            assert lease.version == 7
        with reader.at(np.int8(7)) as lease:
            assert lease.sequence == 1


def test_a_kind_that_no_file_can_be_named_by_is_refused(bus_name: str) -> None:
    with pytest.raises(ValueError, match="expected a kind of few letters, got one of 300"):
        create_pool(bus_name, "a" * 300, PoolSpec(slot_bytes=4096))


def test_parts_and_budgets_are_ints() -> None:
    wrong = INT + of_type(None)
    assert let_through(partial(balance, [1, 2, 3]), "parts", wrong) == []
    assert let_through(partial(by_budget, [1, 2, 3]), "budget", wrong) == []
    assert by_budget([3, 2, 1], np.uint64(2**64 - 1)) == [[0, 1, 2]]
