"""Prompts by a declared schema: a feeder checks its offers at once."""

import array
import pickle
from typing import Any

import numpy as np
import pytest
from lane import totals

from shmbus import Bus, Consumer, Feeder, Producer

SCHEMA = {
    "prompt": ("int32", "T"),
    "types": ("uint8", "T"),
    "image?": ("float16", (3, None, None)),
    "temperature?": ("float32", ()),
}


def test_lists_and_arrays_become_what_is_declared(bus: Bus, producer: Producer) -> None:
    with Feeder(bus.name, schema=SCHEMA) as feeder:
        feeder.request("list", group_size=1, prompt=[1, 2, 3], types=(0, 1, 1), temperature=0.5)
        feeder.request(
            "arrays",
            group_size=1,
            prompt=np.arange(4)[::-2],
            types=array.array("B", [1, 2]),
            image=np.ones((3, 2, 5), np.float64),
        )
        # Pickles with its schema.
        pickle.loads(pickle.dumps(feeder)).request("copy", group_size=1, prompt=[], types=[])
    first, second, third = producer.requests.next_many(3, timeout=5)
    assert first["prompt"].dtype == np.int32 and first["prompt"].tolist() == [1, 2, 3]
    assert first["types"].dtype == np.uint8 and first["temperature"].shape == ()
    assert first["temperature"] == np.float32(0.5)
    assert second["prompt"].tolist() == [3, 1] and second["types"].tolist() == [1, 2]
    assert second["image"].dtype == np.float16 and second["image"].shape == (3, 2, 5)
    assert third["prompt"].shape == (0,)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"types": [1]}, TypeError, r"^missing the field 'prompt', which the"),
        ({"promt": [1], "types": [1]}, TypeError, r"^promt: the schema has no such field.*prompt="),
        ({"prompt": [1, 2], "types": [1]}, ValueError, r"^types: .*with T = 2, as prompt has"),
        ({"prompt": [[1], [2]], "types": [1]}, ValueError, r"^prompt: expected the shape \('T',\)"),
        ({"prompt": [1, "2"], "types": [1, 1]}, TypeError, r"^prompt\[1\]: expected an int"),
        ({"prompt": [1, 2.5], "types": [1, 1]}, TypeError, r"^prompt\[1\]: expected an int"),
        ({"prompt": [1, 2**40], "types": [1, 1]}, ValueError, r"^prompt\[1\]: expected a number"),
        ({"prompt": np.array([1.5]), "types": [1]}, (TypeError, ValueError), r"^prompt"),
        ({"prompt": [1], "types": [256]}, ValueError, r"^types\[0\]: expected a number that uint8"),
        ({"prompt": [None], "types": [1]}, TypeError, r"^prompt\[0\]: expected an int.*None"),
        ({"prompt": "text", "types": [1]}, TypeError, r"^prompt: expected an array, got str"),
        (
            {"prompt": [1], "types": [1], "image": np.ones((2, 2, 5))},
            ValueError,
            r"^image: expected the shape \(3, None, None\), got \(2, 2, 5\)",
        ),
    ],
)
def test_a_prompt_that_is_not_as_declared_is_refused_and_offers_nothing(
    bus: Bus, fields: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with Feeder(bus.name, schema=SCHEMA) as feeder:
        with pytest.raises(kind, match=message):
            feeder.request("q", group_size=1, **fields)
        with pytest.raises(kind, match="^item 1: " + message[1:]):
            feeder.request_many(
                [
                    {"instance_id": "a", "group_size": 1, "prompt": [1], "types": [1]},
                    {"instance_id": "q", "group_size": 1, **fields},
                ]
            )
    assert totals(bus) == (0, 0, 0, 0, 0, 0)


def test_who_collects_offers_by_a_schema_too_and_takes_it_along(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name, prompt_schema=SCHEMA) as consumer:
        consumer.request("list", group_size=1, prompt=[1, 2], types=(0, 1), temperature=1)
        with pytest.raises(TypeError, match=r"^promt: the schema has no such field.*prompt="):
            consumer.request("typo", group_size=1, promt=[1, 2], types=[0, 1])
        copy = pickle.dumps(consumer)
    with pickle.loads(copy) as consumer:
        consumer.request("copy", group_size=1, prompt=np.arange(3), types=[1, 1, 1])
    first, second = producer.requests.next_many(2, timeout=5)
    assert first["prompt"].dtype == np.int32 and first["prompt"].tolist() == [1, 2]
    assert first["types"].dtype == np.uint8 and first["temperature"] == np.float32(1)
    assert second["prompt"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="prompt"):
        Consumer(bus.name, prompt_schema={"prompt": object})
    with Consumer(bus.name) as consumer, pytest.raises(TypeError, match="prompt_schema="):
        consumer.request("q", group_size=1, types=[1, 2])
