"""Nothing trains on filler: a whole group has a field under its right name, or no sample has."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from numpy_batches import assert_batch, put, sample

from shmbus import Bus, Consumer, Producer
from trainer_adapter import FieldNames, OnlineDataHandler, pack

TOKENS = np.arange(6, dtype=np.int32)
FULL: dict[str, Any] = {
    "logprobs": np.full(6, -2, np.float32),
    "loss_mask": np.ones(6, np.uint8),
    "advantages": np.full(6, 3, np.float32),
}


def own(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the trainer's side's log; the bus logs the drop too, with a shortened reason."""
    return [record for record in caplog.records if record.name.startswith("trainer_adapter")]


@pytest.mark.parametrize("missing", [(), ("logprobs",), ("loss_mask",), ("loss_mask", "logprobs")])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_optional_fields_may_be_missing_in_all_samples(
    bus: Bus, producer: Producer, missing: tuple[str, ...], layout: Any
) -> None:
    rng = np.random.default_rng(1)
    group = [sample(rng, 6), sample(rng, 6), sample(rng, 6), sample(rng, 6)]
    for one in group:
        for name in missing:
            del one[name]
    put(producer, "a", group)
    with Consumer(bus.name) as consumer:
        assert_batch(pack(consumer.take(1, 10), layout=layout), {"a": group})


def test_a_loss_mask_may_be_in_some_groups_only(bus: Bus, producer: Producer) -> None:
    rng = np.random.default_rng(1)
    groups = {"a": [sample(rng, 6), sample(rng, 6)], "b": [sample(rng, 6), sample(rng, 6)]}
    for one in groups["b"]:
        del one["loss_mask"]
    for key, group in groups.items():
        put(producer, key, group)
    with Consumer(bus.name) as consumer:
        assert_batch(pack(consumer.take(2, 10)), groups)


@pytest.mark.parametrize("field", sorted(FULL))
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_field_that_only_some_siblings_have_makes_the_group_malformed(
    bus: Bus, producer: Producer, field: str, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, prefetch=prefetch, malformed="drop"
    ) as handler:
        producer.put("mixed", group_size=2, index=0, score=0, tokens=TOKENS, **{field: FULL[field]})
        producer.put("mixed", group_size=2, index=1, score=1, tokens=TOKENS)
        for index in range(2):
            producer.put(
                "good", group_size=2, index=index, score=index, tokens=TOKENS,
                **{field: FULL[field]},
            )  # fmt: skip
        with caplog.at_level(logging.WARNING):
            batch = handler.next_batch(timeout=10)
        assert set(batch.instance_ids) == {"good"}
        handler.ack(batch)
        assert handler.stats().dropped == {"malformed": 2}
    (record,) = [r for r in own(caplog) if "mixed" in r.getMessage()]
    assert field in record.getMessage() and "[1]" in record.getMessage()


def test_a_batch_with_logprobs_in_some_groups_is_refused(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name) as consumer:
        producer.put("a", group_size=1, index=0, tokens=TOKENS, logprobs=FULL["logprobs"])
        producer.put("b", group_size=1, index=0, tokens=TOKENS)
        groups = consumer.take(2, timeout=5)
        with pytest.raises(ValueError, match="logprobs"):
            pack(groups)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("first", ["with", "without"])
def test_a_group_without_logprobs_beside_others_with_them_is_malformed(
    bus: Bus, producer: Producer, first: str, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    groups = {"with": {"logprobs": FULL["logprobs"]}, "without": {}}
    with OnlineDataHandler(
        bus.name, groups_per_batch=2, malformed="drop", prefetch=prefetch
    ) as handler:
        for key in (first, *(groups.keys() - {first})):
            producer.put(key, group_size=1, index=0, tokens=TOKENS, **groups[key])
        producer.put("more", group_size=1, index=0, tokens=TOKENS, **groups["with"])
        with caplog.at_level(logging.WARNING):
            batch = handler.next_batch(timeout=10)
        assert set(batch.instance_ids) == {"with", "more"}
        assert batch.logprobs is not None
        handler.ack(batch)
        assert handler.stats().dropped == {"malformed": 1}
    (record,) = [r for r in own(caplog) if "'without'" in r.getMessage()]
    assert "'logprobs'" in record.getMessage() and "FieldNames" in record.getMessage()


def test_late_logprobs_end_waiting_groups_without_logprobs(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2, max_wait=None) as handler:
        producer.put("without", group_size=1, index=0, tokens=TOKENS)
        handler._planner.inbox.extend(handler._take(10, True))
        handler._admission.admit()
        for key in ("with", "more"):
            producer.put(key, group_size=1, index=0, tokens=TOKENS, logprobs=FULL["logprobs"])
        with pytest.raises(ValueError, match=r"'without'.*'logprobs'"):
            handler.next_batch(timeout=10)
        assert set(handler.next_batch(timeout=10).instance_ids) == {"with", "more"}


def test_a_near_name_warns(bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture) -> None:
    near = {"log_probs": "logprobs", "completion_mask": "loss_mask"}
    with (
        OnlineDataHandler(bus.name, groups_per_batch=1) as handler,
        caplog.at_level(logging.WARNING),
    ):
        for number in range(3):
            for index in range(2):
                producer.put(
                    f"g{number}", group_size=2, index=index, score=index, tokens=TOKENS,
                    log_probs=FULL["logprobs"], completion_mask=FULL["loss_mask"],
                )  # fmt: skip
            handler.ack(handler.next_batch(timeout=10))
    for wrong, right in near.items():
        (record,) = [r for r in caplog.records if repr(wrong) in r.getMessage()]
        assert repr(right) in record.getMessage()


def test_named_fields_pass(bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture) -> None:
    names = FieldNames(logprobs="log_probs", loss_mask="completion_mask")
    with OnlineDataHandler(bus.name, groups_per_batch=1, fields=names) as handler:
        for index in range(2):
            producer.put(
                "g", group_size=2, index=index, score=index, tokens=TOKENS,
                log_probs=FULL["logprobs"], completion_mask=FULL["loss_mask"],
            )  # fmt: skip
        with caplog.at_level(logging.WARNING):
            handler.ack(handler.next_batch(timeout=10))
    assert not caplog.records


def test_the_advice_for_a_value_that_is_no_array_fits(bus: Bus, producer: Producer) -> None:
    for value, advice in (
        ("hello", "expected an array.*meta"),
        (b"\x89PNG", "expected an array.*np.frombuffer"),
        (torch.ones(2, device="meta"), "contiguous CPU"),
        (torch.ones(2).to_sparse(), "contiguous CPU"),
    ):
        with pytest.raises(TypeError, match=advice) as caught:
            producer.put("a", group_size=1, index=0, tokens=TOKENS, extra=value)
        assert "int32" not in str(caught.value)
