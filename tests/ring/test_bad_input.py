"""What workers and feeders get wrong: refused by its name and place, and the bus as it was."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import RUN_PREFIX, ends_of

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer

SCHEMA = {
    "tokens": "int32", "logprobs?": "float32", "loss_mask?": "uint8",
    "experts?": ("uint8", ("T", 2, 2)),
}  # fmt: skip
CELL = [[1, 2], [3, 4]]

#: Arguments beside tokens=[1, 2, 3] of group "q" of 2; the error and how its message begins.
BAD_SAMPLES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "ragged rows": (
        {"experts": [CELL, CELL, [[1, 2]]]}, ValueError, r"experts\[2\]: expected 2 .*got 1",
    ),
    "a list among tokens": ({"tokens": [1, [2], 3]}, TypeError, r"tokens\[1\]: expected a number"),
    "None in logprobs": (
        {"logprobs": [0.1, None, 0.3]}, TypeError, r"logprobs\[1\]: expected a number.*got None",
    ),
    "a negative mask": ({"loss_mask": [1, -1, 0]}, ValueError, r"loss_mask\[1\]: .*got -1"),
    "a million, the last one wrong": (
        {"tokens": [1] * 999_999 + ["x"]}, TypeError, r"tokens\[999999\]: .*int32, got str",
    ),
    "an unknown field": (
        {"log_probs": [0.1] * 3}, TypeError, r"log_probs: the schema has no such.*mean logprobs=",
    ),
    "need above the size": ({"need": 3, "round": 0}, ValueError, r"need: expected 1 to 2 .*got 3"),
    "no rows": ({"rows": []}, ValueError, r"rows: expected at least one, got none"),
    "an empty row": ({"rows": [{}]}, ValueError, r"rows: row 0: expected at least one field"),
}  # fmt: skip

BAD_REQUESTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "need above the size": ({"need": 3, "round": 0}, ValueError, r"need: .*group_size=2, got 3"),
    "a size above all": ({"group_size": 20_000}, ValueError, r"group_size: expected 1 to 16384"),
    "a priority above all": ({"priority": 8}, ValueError, r"priority: expected 0 to 7, .*got 8"),
    "need without a round": ({"need": 1}, ValueError, r"need: 1 of 2 needs a round"),
    "a score": ({"score": 1.0}, TypeError, r"score: a request says no score"),
    "an index": ({"index": np.int32(1)}, TypeError, r"index: a request says no index"),
    "a list": ({"hidden": [1, 2]}, TypeError, r"hidden: expected an array, got list; declare"),
    "no split": ({"split": ""}, ValueError, r"split: expected"),
    "a long split": ({"split": "x" * 32}, ValueError, r"split: expected"),
    "a split with a NUL": ({"split": "a\0b"}, ValueError, r"split: expected"),
    "a number for a split": ({"split": 3}, TypeError, r"split: expected"),
    "None for a split": ({"split": None}, TypeError, r"split: expected"),
    "text": ({"prompt": "1 + 1?"}, TypeError, r"prompt: expected an array, got str; .*meta="),
    "too large": (
        {"prompt": np.zeros(1 << 21)}, shmbus.RecordTooLargeError, r"bus .*request_capacity",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> Iterator[tuple[Bus, Producer, Consumer, Feeder]]:
    """A bus with room for a list of a million tokens; stays empty."""
    name = f"{RUN_PREFIX}bad-input"
    bus = Bus.create(name, "32MiB", max_producers=2, schema=SCHEMA)
    with ends_of(bus) as (producer, consumer), Feeder(name) as feeder:
        yield bus, producer, consumer, feeder


def require_untouched(consumer: Consumer) -> None:
    counts = consumer.stats()
    assert counts.balanced and counts.committed == 0 and counts.requests.offered == 0
    assert consumer.take(timeout=0) == []


@pytest.mark.parametrize("what", BAD_SAMPLES)
def test_a_bad_sample_is_refused_by_field_and_index_however_it_is_put(
    wide: tuple[Bus, Producer, Consumer, Feeder], what: str
) -> None:
    _, producer, consumer, _ = wide
    given, kind, message = BAD_SAMPLES[what]
    sample = {"tokens": [1, 2, 3], **given}
    if "rows" in given:
        del sample["tokens"]
    good = {"tokens": [1, 2, 3]}
    of_group = {key: sample.pop(key) for key in ("need", "round") if key in sample}
    place = {"instance_id": "q", "group_size": 2, **of_group}
    with pytest.raises(kind, match=f"^{message}"):
        producer.put(**place, index=0, **sample, timeout=0)
    first = {"instance_id": "p", "group_size": 2, "index": 0, **good}
    with pytest.raises(kind, match=f"put_many: item 1: {message}"):
        producer.put_many([first, {**place, "index": 1, **sample}], timeout=0)
    with pytest.raises(kind, match=f"put_group: sample {0 if of_group else 1}: {message}"):
        producer.put_group("q", [good, sample], **of_group, timeout=0)
    require_untouched(consumer)


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_offers_nothing(
    wide: tuple[Bus, Producer, Consumer, Feeder], what: str
) -> None:
    _, _, consumer, feeder = wide
    given, kind, message = BAD_REQUESTS[what]
    with pytest.raises(kind, match=f"^{message}"):
        feeder.request("q", **{"group_size": 2, "timeout": 0, **given})
    require_untouched(consumer)
