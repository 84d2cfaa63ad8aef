"""`annotate_group`: arrays that come to a complete group before its batch, refused by name."""

from typing import Any

import numpy as np
import pytest
import torch

import shmbus
from shmbus import Bus, Producer
from trainer_adapter import ExtraField, OnlineDataHandler

TOKENS = np.arange(3, dtype=np.int32)


def put(producer: Producer, key: str, lengths: tuple[int, ...] = (3, 5)) -> None:
    producer.put_group(
        key, [{"tokens": np.arange(n, dtype=np.int32), "score": float(n)} for n in lengths]
    )


def reference(group: shmbus.Group) -> dict[str, Any]:
    return {
        "ref_logprobs": [-t["tokens"].astype(np.float32) for t in group],
        "values": [t.score for t in group],
    }


def test_an_error_is_raised_and_the_next_call_annotates_once(bus: Bus, producer: Producer) -> None:
    asked: list[str] = []

    def annotate(group: shmbus.Group) -> dict[str, Any]:
        asked.append(group.instance_id)
        if asked == ["a", "b"]:
            raise OSError("the teacher is away")
        return reference(group)

    put(producer, "a")
    put(producer, "b")
    with OnlineDataHandler(
        bus.name, groups_per_batch=2, annotate_group=annotate, extra_fields={"values": "sequence"}
    ) as handler:
        with pytest.raises(OSError, match="the teacher is away"):
            handler.next_batch(30)
        batch = handler.next_batch(30)
        assert asked == ["a", "b", "b"]
        handler.give_back(batch)
        assert torch.equal(handler.next_batch(30).extra["ref_logprobs"], -batch.tokens.float())
        assert len(asked) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("layout", ["packed", "padded", "prefix"])
def test_columns_reach_the_sample(bus: Bus, producer: Producer, layout: Any, prefetch: int) -> None:
    put(producer, "a")
    put(producer, "b", (2, 4, 1))
    fields = {"values": "sequence", "teacher": ExtraField(kind="token", dtype="bfloat16")}

    async def annotate(group: shmbus.Group) -> dict[str, Any]:
        teacher = [torch.ones(len(t["tokens"]), 4).bfloat16() for t in group]
        return {**reference(group), "teacher": teacher}

    with OnlineDataHandler(
        bus.name, groups_per_batch=2, annotate_group=annotate, layout=layout, prefetch=prefetch,
        extra_fields=fields,
    ) as handler:  # fmt: skip
        batch = handler.next_batch(30)
        assert batch.extra["teacher"].dtype == torch.bfloat16 and batch.extra["teacher"].any()
        assert torch.equal(batch.extra["ref_logprobs"], -batch.tokens.float())
        assert batch.extra["values"].tolist() == batch.scores.tolist()
        kinds = {"ref_logprobs": "token", "teacher": "token", "values": "sequence"}
        assert batch.extra_kinds == kinds
        handler.ack(batch)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, TypeError, "expected a dict of names and arrays for group 'a', got NoneType"),
        ({"x": 3}, TypeError, "group 'a': column 'x': expected a list, got int"),
        ({"x": [np.ones(3)]}, ValueError, "column 'x': expected 2 arrays, one a sample, got 1"),
        (
            {"x": [np.ones(3), np.ones(4)]},
            ValueError,
            r"column 'x': sample 1: expected 5 rows, one a token, got shape \(4,\)",
        ),
        ({"x": [np.ones(3), [[1], 2]]}, TypeError, "column 'x': expected arrays of numbers: "),
        (
            {"x": [np.ones(3), np.ones(5, "g")]},
            TypeError,
            "1: expected numbers, got float128",
        ),
        (
            {"x": [np.ones(3), np.ones(5, np.float32)]},
            ValueError,
            r"column 'x': sample 1: expected float64 of shape \(\), as the first",
        ),
        (
            {"tokens": [1, 2]},
            ValueError,
            "expected names that no field of its samples and no column",
        ),
    ],
)
def test_what_does_not_fit_is_named_by_group_column_and_sample(
    bus: Bus, producer: Producer, given: Any, error: type[Exception], message: str
) -> None:
    put(producer, "a")
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, annotate_group=lambda group: given
    ) as handler:
        with pytest.raises(error, match=message):
            handler.next_batch(30)
        assert handler.stats().dropped.get("malformed", 0) == 0
        assert handler.stats().leased == 2


def test_a_declared_row_shape_is_the_columns_too(bus: Bus, producer: Producer) -> None:
    put(producer, "a")
    columns: Any = lambda group: {"x": [np.ones(len(t["tokens"])) for t in group]}  # noqa: E731
    fields = {"x": ExtraField(kind="token", shape=(2,))}
    with (
        OnlineDataHandler(bus.name, annotate_group=columns, extra_fields=fields) as handler,
        pytest.raises(ValueError, match=r"'x': sample 0: expected float64 of shape \(2,\)"),
    ):
        handler.next_batch(30)


def test_groups_of_a_batch_have_the_same_columns(bus: Bus, producer: Producer) -> None:
    put(producer, "a")
    put(producer, "b")

    def annotate(group: shmbus.Group) -> dict[str, Any]:
        return reference(group) if group.instance_id == "a" else {"values": [1.0, 2.0]}

    with (
        OnlineDataHandler(
            bus.name,
            groups_per_batch=2,
            annotate_group=annotate,
            extra_fields={"values": "sequence"},
        ) as handler,
        pytest.raises(ValueError, match="group 'b': expected the column 'ref_logprobs'"),
    ):
        handler.next_batch(30)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_column_that_is_not_finite_costs_its_group(
    bus: Bus, producer: Producer, layout: Any, kind: Any, masked: bool
) -> None:
    for key in ("a", "b"):
        rows = [
            {"tokens": TOKENS, "loss_mask": np.uint8([1, index or not masked, 1])}
            for index in range(2)
        ]
        producer.put_group(key, [{"score": 1.0, "rows": rows}, {"score": 0.0, "rows": rows[1:]}])

    def annotate(group: shmbus.Group) -> dict[str, Any]:
        found = [np.zeros(6, np.float32), np.zeros(3, np.float32)]
        if group.instance_id == "a":
            found[0][1] = np.nan
        return {"x": found if kind == "token" else [one.sum() for one in found]}

    with OnlineDataHandler(
        bus.name, groups_per_batch=1, annotate_group=annotate, layout=layout, malformed="drop",
        extra_fields={"x": kind},
    ) as handler:  # fmt: skip
        expected = ["a", "b"] if kind == "token" and masked else ["b"]
        assert [handler.next_batch(30).instance_ids[0] for _ in expected] == expected
        assert handler.stats().dropped.get("malformed", 0) == 4 - 2 * len(expected)
