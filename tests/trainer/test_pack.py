"""Results of `pack`: its values against numpy, its memory, and its refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import keys_of, take_groups
from numpy_batches import PER_TOKEN, assert_batch, put, put_random, sample

import shmbus
from shmbus import Bus, Consumer, Producer
from trainer_adapter import FieldNames, OnlineDataHandler, pack
from trainer_adapter.batches.memory import BLOCK_BYTES, BatchMemory


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "none", lambda s: s * 2 - s.max()])
def test_numpy_agrees(bus: Bus, producer: Producer, seed: int, layout: Any, kind: Any) -> None:
    groups = put_random(producer, seed, 40)
    groups["level"] = [sample(np.random.default_rng(seed), 5, score=0.7) for _ in range(4)]
    put(producer, "level", groups["level"])
    with OnlineDataHandler(
        bus.name, groups_per_batch=41, layout=layout, advantages=kind
    ) as handler:
        batch = handler.next_batch(10)
        assert batch.layout == layout
        assert keys_of(batch) == list(groups)
        assert_batch(batch, groups, kind)


INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_type_becomes_int64(bus: Bus, producer: Producer, dtype: str) -> None:
    kind = np.dtype(dtype)
    info = np.iinfo(kind) if kind.kind in "iu" else np.iinfo("u1")
    top = min(int(info.max), 2**63 - 1) if kind.kind in "iu" else 1
    low = int(info.min) if kind.kind == "i" else 0
    groups = {"a": [{"tokens": np.array([low, 0, 1, top], kind), "score": 0.0}]}
    put(producer, "a", groups["a"])
    with Consumer(bus.name) as consumer:
        assert_batch(pack(consumer.take(1, 10)), groups)


@pytest.mark.parametrize("dtype", [*INTEGERS, "f4", "f8"])
def test_a_mask_of_any_numeric_type_marks_ones(bus: Bus, producer: Producer, dtype: str) -> None:
    mask = np.array([0, 1, 0, 1, 1], dtype)
    if dtype[0] == "f":
        mask = np.append(mask, [-0.0]).astype(dtype)
    tokens = np.arange(len(mask))
    for precision in ("f4", "f8"):
        logprobs = (-np.arange(len(mask)) / 7).astype(precision)
        group = [{"tokens": tokens, "loss_mask": mask, "logprobs": logprobs, "score": 1.0}]
        put(producer, precision, group)
        with Consumer(bus.name) as consumer, consumer.take(1, 10)[0] as taken:
            batch = pack(taken)
            assert_batch(batch, {precision: group})
            assert np.array_equal(batch.loss_mask.numpy(), mask != 0)


@pytest.mark.parametrize("mask_dtype", ["u1", "i1", "?"])
def test_usual_dtypes_are_exact(bus: Bus, producer: Producer, seed: int, mask_dtype: str) -> None:
    rng = np.random.default_rng(seed)
    lengths = [0, 1, 63, 64, 65, 127, 200, 255, 256, 257, 511, 513, 4095, 4097]
    usual, others = [], []
    for length in rng.permutation(lengths):
        tokens = rng.integers(-(2**31), 2**31, length, np.int64)
        mask = rng.integers(0, 2, length).astype(mask_dtype)
        logprobs = rng.integers(0, 2**32, length, np.uint64).astype(np.uint32).view(np.float32)
        logprobs[(mask != 0) & ~(np.isfinite(logprobs) & (logprobs <= 0))] = -0.0
        given = {"logprobs": logprobs, "score": float(rng.random())}
        usual.append({"tokens": tokens.astype(np.int32), "loss_mask": mask.astype(mask_dtype)})
        others.append({"tokens": tokens, "loss_mask": mask.astype(np.int16)})
        usual[-1].update(given)
        others[-1].update(given)
    put(producer, "usual", usual)
    put(producer, "others", others)
    with Consumer(bus.name) as consumer:
        taken = {group.instance_id: pack(group) for group in consumer.take(2, 10)}
    for name in PER_TOKEN:
        one, other = (getattr(taken[key], name).numpy() for key in ("usual", "others"))
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), name
    assert not taken["usual"].logprobs[~taken["usual"].loss_mask].any()


def test_a_logprob_that_is_not_finite_is_found(bus: Bus, producer: Producer, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for at in (0, 63, 64, 255, 256, 299):
        group = sample(rng, 300)
        group["loss_mask"][at] = 1
        group["logprobs"][at] = rng.choice([np.nan, np.inf, -np.inf])
        put(producer, f"at {at}", [group])
        with (
            Consumer(bus.name) as consumer,
            consumer.take(1, 10)[0] as taken,
            pytest.raises(ValueError, match=f"token {at}\\b"),
        ):
            pack(taken)


def test_values_outside_the_mask_never_reach_a_loss(bus: Bus, producer: Producer) -> None:
    values = np.array([np.nan, -1.0, np.inf, -2.0, -np.inf], np.float32)
    mask = np.array([0, 1, 0, 1, 0], np.uint8)
    group = {"tokens": np.arange(5), "loss_mask": mask, "logprobs": values, "advantages": values}
    cut = {**group, "loss_mask": np.ones(5), "meta": {"finish_reason": "length"}}
    put(producer, "a", [group, cut])
    with Consumer(bus.name) as consumer:
        batch = pack(consumer.take(1, 10), truncated="mask")
        for found in (batch.logprobs, batch.advantages[:5]):
            assert found[:5].tolist() == [0.0, -1.0, 0.0, -2.0, 0.0]
            assert not torch.signbit(found[~batch.loss_mask[: len(found)]]).any()
        assert batch.advantages.isfinite().all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_producers_advantages_win(bus: Bus, producer: Producer, dtype: str, layout: Any) -> None:
    rng = np.random.default_rng(2)
    own = [sample(rng, n, advantages=rng.random(n).astype(dtype)) for n in (9, 4)]
    groups = {"a": [sample(rng, 5), sample(rng, 2)], "b": own, "c": [sample(rng, 3)]}
    for key, group in groups.items():
        put(producer, key, group)
    with Consumer(bus.name) as consumer:
        assert_batch(pack(consumer.take(3, 10), layout=layout), groups)


def test_fields_go_by_the_names_that_they_were_given(bus: Bus, producer: Producer) -> None:
    group = sample(np.random.default_rng(3), 7)
    renamed = {"input ids": group["tokens"], "m": group["loss_mask"], "logprobs": np.ones((2, 2))}
    put(producer, "a", [{**renamed, "score": group["score"]}])
    names = FieldNames(tokens="input ids", loss_mask="m", logprobs=None, advantages=None)
    with OnlineDataHandler(bus.name, groups_per_batch=1, fields=names) as handler:
        batch = handler.next_batch(10)
        assert np.array_equal(batch.tokens.numpy(), group["tokens"])
        assert np.array_equal(batch.loss_mask.numpy(), group["loss_mask"] != 0)
        assert batch.logprobs is None


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 3], [3, 0, 0, 2], [1]])
def test_empty_sequences_are(bus: Bus, producer: Producer, lengths: list[int], layout: Any) -> None:
    groups = {"a": [sample(np.random.default_rng(4), n) for n in lengths]}
    put(producer, "a", groups["a"])
    with Consumer(bus.name) as consumer:
        assert_batch(pack(consumer.take(1, 10), layout=layout), groups)


def test_pack_wants_groups_under_lease(bus: Bus, producer: Producer) -> None:
    put(producer, "a", [sample(np.random.default_rng(5), 3)])
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(1, 10)
        assert pack(group).step == -1
        group.ack()
        with pytest.raises(shmbus.BusClosedError, match="acknowledged"):
            pack(group)


def test_memory_of_a_kept_tensor_is_not_reused(bus: Bus, producer: Producer, seed: int) -> None:
    put_random(producer, seed, 8)
    memory = BatchMemory()
    with Consumer(bus.name) as consumer:
        groups = take_groups(consumer, 8)
        kept, wanted, places = [], [], set()
        for group in groups:
            batch = pack(group, memory=memory)
            places.add(batch.tokens.data_ptr() // BLOCK_BYTES)
            # One small view of a batch keeps its block.
            kept.append(batch.logprobs[1:])
            wanted.append(kept[-1].clone())
            del batch
        assert len(places) == len(groups)
        for view, right in zip(kept, wanted, strict=True):
            assert torch.equal(view, right)
        kept.clear()
        del view
        # Without observers a single block suffices.
        assert len({pack(group, memory=memory).tokens.data_ptr() for group in groups}) == 1
