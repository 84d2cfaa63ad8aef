"""A sample of several rows is a single record, cut into rows by its reader, without a copy."""

import asyncio
import pickle
from array import array
from typing import Any

import numpy as np
import pytest
from conftest import fill, next_request

from shmbus import Bus, Consumer, Feeder, Producer
from shmbus_ext import _core

ROWS: list[dict[str, Any]] = [
    {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.25, -0.125], "loss_mask": [0, 1, 1]},
    {"tokens": [1, 4], "logprobs": [-1.0, -2.0], "loss_mask": [0, 1], "prefix_length": 1},
]


def assert_rows(rows: Any) -> None:
    assert [row.prefix_length for row in rows] == [0, 1]
    for row, put in zip(rows, ROWS, strict=True):
        assert tuple(row) == ("tokens", "logprobs", "loss_mask") and len(row) == 3
        for name, values in row.items():
            assert values.tolist() == put[name]
    assert rows[0]["tokens"].dtype == np.int32 and rows[0]["loss_mask"].dtype == np.uint8


def test_rows_come_back_as_views_of_the_ring(bus: Bus, producer: Producer) -> None:
    image = np.arange(6.0).reshape(3, 2)
    producer.put("q", group_size=1, index=0, score=2.0, rows=ROWS, image=image, timeout=10)
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(timeout=10)
        [sample] = group
        assert sample.score == 2.0 and sample.keys()[:2] == ("image", "row_lengths")
        rows = sample.rows
        assert_rows(rows)
        for row, start in zip(rows, (0, 3), strict=True):
            whole = sample["tokens"]
            assert (
                np.shares_memory(row["tokens"], whole[start:]) and not row["tokens"].flags.owndata
            )
            assert not row["tokens"].flags.writeable
        with pytest.raises(KeyError, match=r"'image'.*this row has the fields"):
            rows[0]["image"]
        copied = pickle.loads(pickle.dumps(sample.copy()))
        group.ack()
    assert_rows(rows)
    assert_rows(copied.rows)


def test_a_sample_without_rows_is_one_row(bus: Bus, producer: Producer) -> None:
    producer.put("q", group_size=1, index=0, tokens=[1, 2], timeout=10)
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(timeout=10)
        [row] = group[0].rows
        assert list(row) == ["tokens"] and row["tokens"].tolist() == [1, 2]
        assert row.prefix_length == 0
        assert len(group[0].copy().rows) == 1


async def test_every_way_to_put_takes_rows(bus: Bus, producer: Producer) -> None:
    head: dict[str, Any] = {"group_size": 1, "index": 0, "rows": ROWS}
    producer.put_many([{"instance_id": "many", **head}], timeout=10)
    await producer.aput("aput", **head, timeout=10)
    await producer.aput_many([{"instance_id": "aput_many", **head}], timeout=10)
    producer.put_group("group", [{"score": 1.0, "rows": ROWS}], timeout=10)
    await producer.aput_group("aput_group", [{"rows": ROWS}], timeout=10)
    with Feeder(bus.name) as feeder:
        feeder.request("request", group_size=1, prompt=np.arange(3))
        request = next_request(producer)
        rows = tuple(
            {name: np.asarray(v) if isinstance(v, list) else v for name, v in row.items()}
            for row in ROWS
        )
        assert producer.requests.answer(request, score=1.0, rows=rows)
    with Consumer(bus.name) as consumer:
        groups = []
        while len(groups) < 6:
            groups += consumer.take(timeout=10)
        for group in groups:
            for row, put in zip(group[0].rows, ROWS, strict=True):
                assert row["tokens"].tolist() == put["tokens"], group.instance_id


def test_what_a_copy_says_puts_it_again(bus: Bus, producer: Producer) -> None:
    producer.put("q", group_size=1, index=0, rows=ROWS, image=np.ones(5), timeout=10)
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(timeout=10)
        said = group[0].to_dict()
        group.ack()
        producer.put(**said, timeout=10)
        [again] = consumer.take(timeout=10)
        assert_rows(again[0].rows)
        assert again[0].keys() == ("image", "row_lengths", "tokens", "logprobs", "loss_mask")


def test_a_schema_checks_the_fields_of_rows(bus_name: str) -> None:
    schema: dict[str, Any] = {"tokens": ("int16", ("T",)), "experts": ("uint8", ("T", 2))}
    rows = [{"tokens": [1], "experts": [[1, 2]]}, {"tokens": [2, 3], "experts": [[3, 4], [5, 6]]}]
    with Bus.create(bus_name, capacity="4MiB", schema=schema), Producer(bus_name) as producer:
        with pytest.raises(TypeError, match="expert: the schema has no such field"):
            producer.put("q", group_size=1, index=0, rows=[{"tokens": [1], "expert": [[1, 2]]}])
        with pytest.raises(ValueError, match="experts"):
            producer.put("q", group_size=1, index=0, rows=[{"tokens": [1], "experts": [[1]]}])
        with pytest.raises((TypeError, ValueError), match="experts"):
            producer.put("q", group_size=1, index=0, rows=[{"tokens": [1]}])
        producer.put("q", group_size=1, index=0, rows=rows, timeout=10)
        with Consumer(bus_name) as consumer:
            [group] = consumer.take(timeout=10)
            got = group[0].rows
            assert got[1]["experts"].tolist() == [[3, 4], [5, 6]]
            assert got[1]["tokens"].dtype == np.int16


#: Refused rows, with the message.
BAD: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, "expected at least one, got none"),
    (3, TypeError, "expected a list of mappings, one a row, got int"),
    ({"tokens": [1]}, TypeError, "expected a list of mappings, one a row, got dict"),
    (iter(ROWS), TypeError, "expected a list of mappings"),
    ([ROWS[0], 3], TypeError, "row 1: expected a mapping of names to arrays, got int"),
    ([{}], ValueError, "row 0: expected at least one field"),
    ([{"prefix_length": 1}], ValueError, "row 0: expected at least one field"),
    ([{1: [1]}], TypeError, "row 0: expected str names, got 1"),
    ([{"tokens": [1]}, {"ids": [1]}], ValueError, "row 1: expected the fields of row 0, tokens"),
    ([{"tokens": [1]}, {"tokens": [1], "x": [1]}], ValueError, "row 1: .*got tokens, x"),
    ([{"tokens": [1], "logprobs": [0.0, 0.0]}], ValueError, "row 0: logprobs: expected 1 elements"),
    ([{"tokens": [1]}, {"tokens": []}], ValueError, "row 1: tokens: expected at least one element"),
    ([{"tokens": [1], "score": [1]}], ValueError, "row 0: 'score' belongs to the sample"),
    ([{"tokens": [1], "rows": [1]}], ValueError, "row 0: 'rows' belongs to the sample"),
    ([{"tokens": [1], "row_lengths": [1]}], ValueError, "row 0: 'row_lengths' belongs"),
    ([{"image": [1]}], ValueError, "row 0: 'image' is a field of the sample, too"),
    ([{"tokens": np.array(3)}], ValueError, "row 0: tokens: .*got a single number"),
    ([{"tokens": "abc"}], TypeError, "row 0: tokens: expected an array, got str"),
    ([{"tokens": [1]}, {"tokens": np.ones(1)}], TypeError, "row 1: tokens: expected a list, as"),
    ([{"tokens": np.ones(1)}, {"tokens": [1]}], TypeError, "row 1: tokens: expected an array, as"),
    ([{"x": np.ones(1)}, {"x": np.ones(1, np.int8)}], ValueError, "row 1: x: expected float64"),
    ([{"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}], ValueError, r"row 1: x: .*shape \(3,\)"),
    ([{"tokens": [1], "prefix_length": 2}], ValueError, "row 0: prefix_length: expected 0 to 1"),
    ([{"tokens": [1], "prefix_length": -1}], ValueError, "row 0: prefix_length"),
    ([{"tokens": [1], "prefix_length": 0.5}], TypeError, "row 0: prefix_length"),
    ([{"tokens": [1]}, {"tokens": [None]}], TypeError, "tokens"),
]


@pytest.mark.parametrize("rows, kind, text", BAD, ids=[text[:40] for _, _, text in BAD])
def test_rows_that_do_not_fit_are_refused_by_their_number(
    bus: Bus, producer: Producer, rows: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        producer.put("q", group_size=1, index=0, rows=rows, image=np.ones(2))
    with pytest.raises(kind, match=text):
        producer.put_group("q", [{"rows": ROWS}, {"rows": rows, "image": np.ones(2)}])
    assert bus.stats().committed == 0
    assert producer.pressure() < 1
    producer.put("q", group_size=1, index=0, rows=ROWS, timeout=10)
    assert bus.stats().committed == 1


#: Row lengths of five tokens beyond any put.
DAMAGED = [
    np.array([[2, 0], [2, 0]]),
    np.array([[5, 6]]),
    np.array([[6, 0], [-1, 0]]),
    np.array([[5, 0], [0, 0]]),
    np.array([[2**63 - 1, 0], [2**63 - 1, 0], [7, 0]]),
    np.zeros((0, 2), np.int64),
    np.array([5, 0]),
    np.array([[5, 0]], np.int32),
]


@pytest.mark.parametrize("lengths", DAMAGED, ids=lambda one: str(one.tolist()))
def test_row_lengths_that_do_not_fit_are_refused_where_they_are_read(
    bus: Bus, producer: Producer, lengths: np.ndarray[Any, Any]
) -> None:
    # Past the checks of put, like a producer of another version.
    head = {"instance_id": "q", "group_size": 1, "index": 0, "score": 0.0, "timeout": 10}
    dtypes = (lengths.dtype, np.dtype(np.int32))
    with producer._reserve(
        head, ("row_lengths", "tokens"), dtypes, (lengths.shape, (5,)), 0
    ) as slot:
        slot["row_lengths"][:] = lengths
        slot["tokens"][:] = 1
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(timeout=10)
        with pytest.raises(ValueError, match=r"'q'\[0\].*'row_lengths'.*add up to the fields"):
            assert group[0].rows
        with pytest.raises(ValueError, match=r"'q'\[0\].*'row_lengths'.*add up to the fields"):
            assert group[0].copy().rows
        assert group[0]["tokens"].tolist() == [1] * 5


def test_the_row_lengths_cannot_be_set_by_hand(bus: Bus, producer: Producer) -> None:
    lengths = np.array([[1, 0], [1, 0]])
    with pytest.raises(ValueError, match=r"row_lengths.*is made of rows="):
        producer.put("q", group_size=1, index=0, row_lengths=lengths, tokens=[1, 2])
    computed = {"".join(["row_", "lengths"]): lengths}
    with pytest.raises(ValueError, match=r"row_lengths.*is made of rows="):
        producer.put_many([{"instance_id": "q", "group_size": 1, "index": 0, **computed}])
    with pytest.raises(ValueError, match="row_lengths"):
        producer.reserve("q", group_size=1, index=0, fields={"row_lengths": ("int64", (2, 2))})
    with pytest.raises(ValueError, match="row_lengths"):
        Producer(bus.name, schema={"row_lengths": "int64"})
    assert bus.stats().committed == 0
    assert _core.ROW_LENGTHS == "row_lengths"


async def test_rows_wait_for_space_as_any_sample_does(bus_name: str) -> None:
    rows = [{"data": np.full(30_000, number, np.int64)} for number in range(2)]
    sample: Any = {"group_size": 1, "index": 0, "rows": rows}
    with Bus.create(bus_name, capacity="2MiB"), Producer(bus_name) as producer:
        fill(lambda number: producer.put(f"q{number}", **sample, timeout=0))
        waiting = asyncio.create_task(producer.aput("last", **sample, timeout=30))
        await asyncio.sleep(0)
        with Consumer(bus_name) as consumer:
            seen = []
            while "last" not in seen:
                for group in await consumer.atake(timeout=30):
                    assert [row["data"][0] for row in group[0].rows] == [0, 1]
                    seen.append(group.instance_id)
                    group.ack()
            await waiting


def test_other_sequences_than_lists_are_rows_too(bus: Bus, producer: Producer) -> None:
    rows = [{"x": array("d", [1.0, 2.0])}, {"x": memoryview(np.array([3.0]))}]
    producer.put("q", group_size=1, index=0, rows=rows, timeout=10)
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(timeout=10)
        assert [row["x"].tolist() for row in group[0].rows] == [[1.0, 2.0], [3.0]]
