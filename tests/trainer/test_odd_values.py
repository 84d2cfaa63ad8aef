"""What is no number is refused by its argument's name; bits keep the dtype that they are of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmbus import Bus, Consumer, Producer
from trainer_adapter import ExtraField, pack
from trainer_adapter.advantages import group_advantages
from trainer_adapter.attention import varlen_attention
from trainer_adapter.corrections import (
    cispo_loss,
    gspo_loss,
    importance_correction,
    overlong_penalty,
)
from trainer_adapter.losses import aggregate_loss, importance_weights, policy_loss

ROW, MASK = torch.zeros(4), torch.ones(4, dtype=torch.bool)
BORDERS = torch.tensor([0, 1, 4])
QKV = [torch.zeros(4, 2, 8)] * 3

#: What a number is not, or not one that a float holds.
VALUES: list[Any] = [
    10**400, -(10**400), math.nan, -1, "a", b"a", [], {}, object(), int, 1j, np.array([1, 2]),
]  # fmt: skip

CALLS: dict[str, Callable[[Any], object]] = {
    "eps": lambda v: group_advantages([1.0, 2.0], eps=v),
    "scale": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, 3, 3, scale=v),
    "max_q": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, v, 3),
    "max_k": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, 3, v),
    "window_size": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, 3, 3, window_size=(v, 0)),
    "clip_low": lambda v: policy_loss(ROW, ROW, ROW, MASK, clip_low=v),
    "clip_high": lambda v: policy_loss(ROW, ROW, ROW, MASK, clip_high=v),
    "cap": lambda v: importance_weights(ROW, ROW, MASK, cap=v),
    "denominator": lambda v: aggregate_loss(ROW, MASK, denominator=v),
    "high": lambda v: importance_correction(ROW, ROW, MASK, high=v),
    "low": lambda v: cispo_loss(ROW, ROW, ROW, MASK, low=v),
    "clip_low of gspo": lambda v: gspo_loss(ROW, ROW, ROW, MASK, cu_seqlens=BORDERS, clip_low=v),
    "longest": lambda v: overlong_penalty([3], longest=v, buffer=1),
    "buffer": lambda v: overlong_penalty([3], longest=4, buffer=v),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_is_none_is_refused_by_its_name(name: str) -> None:
    for value in VALUES:
        if name in ("scale", "window_size") and isinstance(value, int) and value == -1:
            continue  # a number like others
        with pytest.raises((TypeError, ValueError), match=name.partition(" ")[0]):
            CALLS[name](value)


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="1MiB", max_producers=4) as handle:
        yield handle


def test_tensors_that_numpy_lacks_come_into_a_batch_as_they_were(bus: Bus) -> None:
    half = torch.arange(6).view(3, 2).to(torch.bfloat16) / 3
    small = torch.arange(3).to(torch.float8_e4m3fn)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put("a", group_size=1, index=0, tokens=[1, 2, 3], half=half, small=small)
        wanted = {
            "half": "token",
            "small": "token",
            "wide": ExtraField(kind="token", field="half", dtype="float32"),
        }
        extra = pack(consumer.take(1, 30.0), extra_fields=wanted).extra
        assert torch.equal(extra["half"], half)
        assert extra["small"].dtype == small.dtype
        assert torch.equal(extra["small"].float(), small.float())
        assert torch.equal(extra["wide"], half.float())


def test_samples_whose_bits_have_another_dtype_do_not_fit_together(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        for index, dtype in enumerate((torch.float8_e4m3fn, torch.float8_e5m2)):
            small = torch.ones(2).to(dtype)
            producer.put("a", group_size=2, index=index, tokens=[1, 2], small=small)
        groups = consumer.take(1, 30.0)
        with pytest.raises(ValueError, match=r"'small': expected float8_e4m3fn rows.*float8_e5m2"):
            pack(groups, extra_fields={"small": "token"})


def test_bits_are_never_taken_for_logprobs(bus: Bus) -> None:
    half = torch.full((2,), -0.5, dtype=torch.bfloat16)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put("a", group_size=1, index=0, tokens=[1, 2], logprobs=half)
        groups = consumer.take(1, 30.0)
        with pytest.raises(ValueError, match=r"'logprobs': expected .*bfloat16"):
            pack(groups)
