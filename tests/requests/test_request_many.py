"""Many requests by one call: offered, taken, and what a full lane or a bad item leaves."""

import asyncio
import re

import numpy as np
import pytest
from conftest import ends_of, wait_until, work_until
from lane import take_all, totals

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer
from shmbus.segment import explain
from shmbus_ext import _core

X = np.zeros(4, np.float32)


def items(first: int, count: int, size: int = 2) -> list[dict[str, object]]:
    return [
        {"instance_id": number, "group_size": size, "meta": number, "prompt": np.full(5, number)}
        for number in range(first, first + count)
    ]


def test_many_groups_are_offered_in_order_by_one_call(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "1MiB", request_capacity="1MiB") as bus,
        Feeder(bus_name) as feeder,
        Producer(bus_name) as producer,
    ):
        assert feeder.request_many(items(0, 200), timeout=5) == list(range(1, 201))
        assert feeder.request_many([]) == []
        found = take_all(producer)
        assert [(r.instance_id, r.index) for r in found] == [
            (str(number), index) for number in range(200) for index in range(2)
        ]
        assert all((r["prompt"] == r.meta).all() and r["prompt"].size == 5 for r in found)
        assert totals(bus) == (400, 0, 400, 0, 0, 200)


def test_several_samples_are_taken_by_one_call_each_once(
    bus: Bus, feeder: Feeder, producer: Producer
) -> None:
    feeder.request_many(items(0, 20, size=3), timeout=5)
    with Producer(bus.name) as other:
        found = []
        while mine := producer.requests.next_many(7, timeout=0):
            assert len(mine) <= 7
            found += mine + other.requests.next_many(5, timeout=0)
        assert sorted((int(r.instance_id), r.index) for r in found) == [
            (number, index) for number in range(20) for index in range(3)
        ]
        assert all((r["prompt"] == int(r.instance_id)).all() for r in found)
        for request in found:
            assert request.meta == int(request.instance_id)
    # The other worker's samples return, each with its own prompt.
    again = producer.requests.next_many(1000, timeout=5)
    assert len(again) == 20 * 3 - sum(producer.requests.is_wanted(r) for r in found)
    assert all((r["prompt"] == r.meta).all() for r in again)


def test_failed_samples_come_first_among_several(bus: Bus, feeder: Feeder) -> None:
    with (
        Producer(bus.name) as producer,
        Producer(bus.name) as other,
        Consumer(bus.name, sample_retries=1, retry_backoff=(0, 0)) as consumer,
    ):
        feeder.request_many(items(0, 1))
        for request in producer.requests.next_many(2):
            producer.requests.fail(request, "no answer")
        feeder.request_many(items(1, 2))
        work_until(consumer, lambda: consumer.stats().samples_wanted)
        found = producer.requests.next_many(1)
        assert [r.instance_id for r in found] == ["1"], "it has just failed those of 0"
        found = other.requests.next_many(4)
        assert [(r.instance_id, r.attempt) for r in found] == [
            ("0", 1), ("0", 1), ("1", 0), ("2", 0),
        ]  # fmt: skip


def test_a_loop_takes_several_and_answers_them(bus: Bus, feeder: Feeder) -> None:
    async def work(producer: Producer) -> int:
        done = 0
        while found := await producer.requests.anext_many(8, timeout=0.3):
            answers = [
                producer.requests.afail(each, "unlucky")
                if each.instance_id == "3"
                else producer.requests.aanswer(each, score=1.0, tokens=[1, 2])
                for each in found
            ]
            done += sum(await asyncio.gather(*answers))
        return done

    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        feeder.request_many(items(0, 6), timeout=5)
        assert asyncio.run(work(producer)) == 12
        groups = consumer.take(10, timeout=10)
        assert sorted(group.instance_id for group in groups) == ["0", "1", "2", "4", "5"]
        consumer.ack(groups)
        work_until(consumer, lambda: totals(bus)[5] == 0)
        assert consumer.stats().dropped == {"failed": 2}


def test_a_full_lane_says_how_many_were_offered_and_the_others_follow(bus_name: str) -> None:
    bus = Bus.create(bus_name, "1MiB", request_capacity="64KiB")
    with ends_of(bus) as (producer, consumer), Feeder(bus_name) as feeder:
        wanted = items(0, 80, size=1)
        with pytest.raises(shmbus.BusFullError) as caught:
            feeder.request_many(wanted, timeout=0.05)
        accepted = caught.value.accepted  # type: ignore[attr-defined]
        assert 0 < accepted < 80 and totals(bus)[0] == accepted

        def drain() -> None:
            for request in producer.requests.next_many(80, timeout=0):
                producer.requests.answer(request, x=X)
            consumer.ack(consumer.take(80, timeout=0.01))

        rest = wanted[accepted:]
        while rest:
            drain()
            try:
                feeder.request_many(rest, timeout=0)
                break
            except shmbus.BusFullError as error:
                rest = rest[error.accepted :]  # type: ignore[attr-defined]
        wait_until(lambda: drain() or totals(bus) == (80, 0, 0, 80, 0, 0))
        assert consumer.stats().balanced


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ({"group_size": 2}, TypeError, r"^item 2: missing the argument 'instance_id'"),
        ({"instance_id": "a"}, TypeError, r"^item 2: missing the argument 'group_size'"),
        ("text", TypeError, r"^item 2: expected a mapping, got str"),
        ({"instance_id": "a", "group_size": 0}, ValueError, r"^item 2: group_size: expected"),
        ({"instance_id": True, "group_size": 1}, TypeError, r"^item 2: instance_id: expected"),
        (
            {"instance_id": "a", "group_size": 2, "need": 3},
            ValueError,
            r"^item 2: need: expected 1 to group_size=2, got 3",
        ),
        (
            {"instance_id": "a", "group_size": 2, "need": 1},
            ValueError,
            r"^item 2: need: 1 of 2 needs a round",
        ),
        (
            {"instance_id": "large", "group_size": 1, "prompt": np.zeros(1 << 20)},
            shmbus.RecordTooLargeError,
            r"the request 'large' of 1 samples needs 8\d+ bytes",
        ),
    ],
)
def test_a_bad_item_offers_nothing_of_the_list(
    bus: Bus, feeder: Feeder, bad: object, kind: type[Exception], message: str
) -> None:
    listed: list[object] = [*items(0, 2), bad, *items(3, 90)]
    with pytest.raises(kind, match=message):
        feeder.request_many(listed, timeout=0)  # type: ignore[arg-type]
    listed.insert(0, listed.pop(2))
    with pytest.raises(kind):
        feeder.request_many(listed[1:] + listed[:1], timeout=0)  # type: ignore[arg-type]
    assert totals(bus) == (0, 0, 0, 0, 0, 0)


def test_a_list_must_be_one_and_a_limit_too(feeder: Feeder, producer: Producer) -> None:
    with pytest.raises(TypeError, match=r"^requests: expected an iterable"):
        feeder.request_many(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^limit: expected"):
        producer.requests.next_many(0)
    with pytest.raises(TypeError, match=r"^limit: expected"):
        producer.requests.next_many("x")  # type: ignore[arg-type]


def test_a_lane_whose_rows_are_all_taken_names_the_request_capacity_to_set(bus_name: str) -> None:
    said = []
    capacity: int | str = "64KiB"
    for _ in range(2):
        with Bus.create(bus_name, "1MiB", request_capacity=capacity), Feeder(bus_name) as feeder:
            with pytest.raises(shmbus.BusFullError) as caught:
                feeder.request_many(items(0, 400, size=1), timeout=0)
            said.append(caught.value.accepted)  # type: ignore[attr-defined]
            capacity = int(re.findall(r"request_capacity=(\d+)", str(caught.value))[0])
    assert said[1] >= 2 * said[0] > 0


@pytest.mark.parametrize(("rows", "groups", "words"), [
    (_core.REQUEST_MAX_ROWS, _core.REQUEST_MAX_ROWS, "16,384 groups a bus"),
    (9000, 9000, f"request_capacity={_core.REQUEST_MAX_ROWS * _core.REQUEST_ROW_SHARE} "),
    (9000, 8999, "larger request_capacity"),
])  # fmt: skip
def test_the_limit_that_a_full_lane_has_met_is_named(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, rows: int, groups: int, words: str
) -> None:
    totals = (0, 0, 0, 0, 0, groups, 0, 4096, 4096)
    monkeypatch.setattr(_core, "request_row_count", lambda segment: rows)
    monkeypatch.setattr(_core, "request_totals", lambda segment: totals)
    assert words in str(explain.requests_full_error(bus._segment, 100, 0.0))
