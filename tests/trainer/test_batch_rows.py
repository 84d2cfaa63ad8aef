"""Samples of several rows in a batch: a sequence a row, one score and one advantage a sample."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shmbus
from shmbus import Consumer, Producer
from trainer_adapter import Batch, ExtraField, OnlineDataHandler, pack
from trainer_adapter.gpu.packer import GpuPacker
from trainer_adapter.microbatch import MicroBatch, micro_batches

#: Samples of a group, as lists of their rows' lengths; None without rows=.
SHAPES: list[list[int] | None] = [[4, 3], None, [2], [5, 1, 6]]
EXTRA: dict[str, Any] = {
    "ref_logprobs": "token",
    "patches": "ragged",
    "pixels": "ragged",
    "weight": "sequence",
    "env": "meta",
}


def make_row(rng: np.random.Generator, length: int) -> dict[str, Any]:
    return {
        "tokens": rng.integers(0, 99, length, np.int32),
        "loss_mask": rng.integers(0, 2, length, np.uint8),
        "logprobs": -rng.random(length, np.float32),
        "ref_logprobs": -rng.random(length, np.float32),
        "patches": rng.integers(0, 9, (length, 2), np.int16),
    }


def make_group(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return the samples with their rows under "rows", however put."""
    return [
        {
            "score": float(rng.random()),
            "policy_version": (index, index + 2),
            "rows": [make_row(rng, length) for length in shape or [3]],
            "whole": {
                "pixels": rng.integers(0, 9, (index, 2), np.int16),
                "weight": np.array(rng.random(), np.float32),
                "meta": {"env": f"e{index}"},
            },
        }
        for index, shape in enumerate(SHAPES)
    ]


def put(producer: Producer, key: str, group: list[dict[str, Any]]) -> None:
    items = []
    for sample, shape in zip(group, SHAPES, strict=True):
        fields = sample["rows"][0] if shape is None else {"rows": sample["rows"]}
        head = {"score": sample["score"], "policy_version": sample["policy_version"]}
        items.append({**head, **sample["whole"], **fields})
    producer.put_group(key, items, timeout=10)


@pytest.fixture
def consumer(bus: shmbus.Bus) -> Iterator[Consumer]:
    with Consumer(bus.name) as consumer:
        yield consumer


@pytest.fixture
def groups(producer: Producer, seed: int) -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    every = [make_group(rng) for _ in range(3)]
    for number, group in enumerate(every):
        put(producer, f"k{number}", group)
    return every


def sequences(
    groups: list[list[dict[str, Any]]],
) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Each row with the position of its sample, and that sample."""
    samples = [sample for group in groups for sample in group]
    return [(at, sample, row) for at, sample in enumerate(samples) for row in sample["rows"]]


def assert_rows(batch: Batch, groups: list[list[dict[str, Any]]]) -> None:
    every = sequences(groups)
    lengths = [len(row["tokens"]) for _, _, row in every]
    assert batch.lengths == lengths
    assert batch.num_tokens == sum(lengths) and batch.num_sequences == len(every)
    assert batch.max_seqlen == max(lengths)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    assert batch.sample_of.dtype == torch.int32
    assert batch.sample_of.tolist() == [at for at, _, _ in every]
    want = np.float32([sample["score"] for _, sample, _ in every])
    assert batch.scores.numpy() == pytest.approx(want)
    assert batch.policy_versions.tolist() == [one["policy_version"][0] for _, one, _ in every]
    newest = batch.newest_policy_versions
    assert newest.dtype == torch.int64
    assert newest.tolist() == [one["policy_version"][1] for _, one, _ in every]
    of_group = [sum(len(one["rows"]) for one in group) for group in groups]
    assert batch.group_sizes.tolist() == of_group
    assert batch.group_sizes.dtype == torch.int64


def test_each_row_is_a_sequence(consumer: Consumer, groups: list[list[dict[str, Any]]]) -> None:
    batch = pack(consumer.take(3, 10))
    assert_rows(batch, groups)
    every = sequences(groups)
    tokens = np.concatenate([row["tokens"] for _, _, row in every])
    assert batch.tokens.tolist() == tokens.tolist()
    positions = [at for _, _, row in every for at in range(len(row["tokens"]))]
    assert batch.position_ids.tolist() == positions
    masks = np.concatenate([row["loss_mask"] for _, _, row in every]) != 0
    assert batch.loss_mask.numpy().tolist() == masks.tolist()
    logprobs = np.concatenate([row["logprobs"] for _, _, row in every])
    assert batch.logprobs is not None
    assert np.array_equal(batch.logprobs.numpy(), np.where(masks, logprobs, 0))
    scores = [np.array([sample["score"] for sample in group]) for group in groups]
    each = np.concatenate([(s - s.mean()) / (s.std(ddof=1) + 1e-6) for s in scores])
    want = np.concatenate([np.full(len(row["tokens"]), each[at]) for at, _, row in every])
    assert batch.advantages.numpy() == pytest.approx(want, rel=1e-5)


def test_row_fields_are_cut(consumer: Consumer, groups: list[list[dict[str, Any]]]) -> None:
    batch = pack(consumer.take(3, 10), extra_fields=EXTRA)
    every = sequences(groups)
    want = np.concatenate([row["ref_logprobs"] for _, _, row in every])
    assert np.array_equal(batch.extra["ref_logprobs"].numpy(), want)
    assert batch.extra["env"] == [one["whole"]["meta"]["env"] for _, one, _ in every]
    weights = [float(one["whole"]["weight"]) for _, one, _ in every]
    assert batch.extra["weight"].tolist() == weights
    for name, rows in (
        ("patches", [row["patches"] for _, _, row in every]),
        ("pixels", [one["whole"]["pixels"] for _, one, _ in every]),
    ):
        assert np.array_equal(batch.extra[name].numpy(), np.concatenate(rows)), name
        ends = np.cumsum([0, *(len(one) for one in rows)])
        assert batch.extra_offsets[name].tolist() == ends.tolist(), name


def assert_whole(batch: Batch | MicroBatch, every: list[tuple[int, Any, Any]]) -> None:
    assert batch.newest_policy_versions.tolist() == [
        one["policy_version"][1] for _, one, _ in every
    ]
    assert batch.policy_versions.tolist() == [one["policy_version"][0] for _, one, _ in every]
    assert batch.extra["env"] == [one["whole"]["meta"]["env"] for _, one, _ in every]
    patches = np.concatenate([row["patches"] for _, _, row in every])
    assert np.array_equal(batch.extra["patches"].numpy(), patches)
    refs = batch.extra["ref_logprobs"]
    starts = batch.cu_seqlens.tolist()
    for at, (_, _, row) in enumerate(every):
        n = len(row["tokens"])
        here = slice(starts[at], starts[at] + n)
        place = (at, slice(n)) if batch.layout == "padded" else here
        tokens, ref = batch.tokens[place], refs[place]
        assert tokens.tolist() == row["tokens"].tolist()
        assert np.array_equal(ref.numpy(), row["ref_logprobs"])


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_rows_go_through_a_handler_its_state_and_micro_batches(
    bus: shmbus.Bus, groups: list[list[dict[str, Any]]], layout: Any, prefetch: int
) -> None:
    options: dict[str, Any] = {
        "groups_per_batch": 1, "extra_fields": EXTRA, "layout": layout, "prefetch": prefetch,
    }  # fmt: skip
    with OnlineDataHandler(bus.name, **options) as handler:
        assert_whole(handler.next_batch(10), sequences(groups[:1]))
        state = handler.state_dict()
    with OnlineDataHandler(bus.name, **options) as handler:
        handler.load_state_dict(state)
        for group in groups[1:]:
            batch = handler.next_batch(10)
            every = sequences([group])
            assert_whole(batch, every)
            for part in micro_batches(batch, count=2):
                assert_whole(part, [every[i] for i in part.sequence_indices.tolist()])
                for name in ("sample_of", "newest_policy_versions"):
                    assert torch.equal(
                        getattr(part, name), getattr(batch, name)[part.sequence_indices]
                    )
            handler.ack(batch)
        assert handler.stats().balanced and handler.stats().dropped == {}


def test_a_token_budget_counts_all_rows(bus: shmbus.Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, tokens_per_batch=20, max_wait=None) as handler:
        for number in range(4):
            rows = [{"tokens": [1] * 5}, {"tokens": [2] * 5}]
            producer.put(f"k{number}", group_size=1, index=0, rows=rows, timeout=10)
        batch = next(iter(handler))
        assert batch.num_tokens == 20 and batch.num_sequences == 4 and len(batch.groups) == 2
        assert batch.lengths == [5, 5, 5, 5]
        handler.ack(batch)


def test_rewards_count_samples_lengths_count_sequences(bus: shmbus.Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        several = [{"tokens": [1, 2]}, {"tokens": [3, 4]}, {"tokens": [5, 6, 7, 8, 9, 9, 9, 9]}]
        samples = [{"score": 3.0, "rows": several}, {"score": 1.0, "tokens": [1, 1, 1, 1]}]
        producer.put_group("q", samples, timeout=10)
        handler.ack(next(iter(handler)))
        figures = handler.metrics()
        assert figures["reward/mean"] == 2.0
        assert figures["length/mean"] == 4.0
        assert figures["share/zero_variance"] == 0.0
        assert figures["batch/sequences"] == 4.0


def test_rows_without_tokens_are_refused_by_name(consumer: Consumer, producer: Producer) -> None:
    producer.put(
        "q", group_size=1, index=0, tokens=[1, 2], rows=[{"logprobs": [0.0, 0.0]}], timeout=10
    )
    with pytest.raises(ValueError, match=r"'q'\[0\].*'tokens'.*beside rows=.*in the rows"):
        pack(consumer.take(1, 10))


def test_a_fill_replaces_rows_of_an_absent_field(consumer: Consumer, producer: Producer) -> None:
    producer.put("q", group_size=2, index=0, rows=[{"tokens": [1]}, {"tokens": [2, 3]}], timeout=10)
    producer.put("q", group_size=2, index=1, tokens=[4], ref=np.ones(1, np.float32), timeout=10)
    fields = {"ref": ExtraField(kind="token", dtype="float32", fill=-1.0)}
    batch = pack(consumer.take(1, 10), extra_fields=fields)
    assert batch.extra["ref"].tolist() == [-1, -1, -1, 1]
    assert batch.lengths == [1, 2, 1]


@pytest.mark.gpu
def test_a_gpu_gets_rows_by_host(consumer: Consumer, groups: list[list[dict[str, Any]]]) -> None:
    packer = GpuPacker("cuda", extra_fields=EXTRA)
    batch = packer.pack(consumer.take(3, 10))
    assert batch.transport == "copy" or packer.transport != "gather"
    assert_rows(batch.to("cpu"), groups)
    packer.close()
