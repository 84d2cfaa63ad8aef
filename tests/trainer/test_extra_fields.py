"""Extra fields: packed as NumPy would, whatever their dtype, on every way that a batch goes."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy_batches import put
from torch.utils.data import DataLoader

from shmbus import Bus, Consumer, Producer
from trainer_adapter import Batch, ExtraField, OnlineDataHandler, pack
from trainer_adapter.gpu.packer import GpuPacker
from trainer_adapter.microbatch import MicroBatch, micro_batches

FIELDS: dict[str, Any] = {
    "ref_logprobs": "token",
    "routed_experts": "token",
    "pixel_values": "ragged",
    "embedding": "sequence",
    "weight": "sequence",
    "env_id": "meta",
}


def random_sample(rng: np.random.Generator, length: int) -> dict[str, Any]:
    """A sample of which the tokens are not the first field."""
    return {
        "routed_experts": rng.integers(0, 255, (length, 3, 2), np.uint8),
        "embedding": rng.random((2, 5), np.float32),
        "ref_logprobs": -rng.random(length).astype(np.float32),
        "tokens": rng.integers(0, 99, length, np.int32),
        "pixel_values": rng.integers(-9, 9, (int(rng.integers(0, 4)), 2, 2), np.int16),
        "weight": np.array(rng.random()),
        "logprobs": -rng.random(length).astype(np.float32),
        "score": float(rng.random()),
        "meta": {"env_id": f"env-{int(rng.integers(0, 9))}"},
    }


@pytest.fixture
def samples(producer: Producer, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    every: list[dict[str, Any]] = []
    for number in range(8):
        group = [random_sample(rng, int(rng.integers(0, 30))) for _ in range(3)]
        put(producer, f"k{number}", group)
        every += group
    return every


def assert_extra(batch: Batch | MicroBatch, samples: list[dict[str, Any]]) -> None:
    lengths = [len(one["tokens"]) for one in samples]
    for name, kind in FIELDS.items():
        got = batch.extra[name]
        if kind == "meta":
            assert got == [one["meta"][name] for one in samples]
            continue
        rows = [one[name] for one in samples]
        joined = np.stack(rows) if kind == "sequence" else np.concatenate(rows)
        assert got.dtype == torch.from_numpy(joined[:0]).dtype, name
        if kind == "token" and batch.layout == "padded":
            want = np.zeros((len(rows), max(lengths), *joined.shape[1:]), joined.dtype)
            for row, one in zip(want, rows, strict=True):
                row[: len(one)] = one
            joined = want
        assert np.array_equal(got.cpu().numpy(), joined), name
    offsets = batch.extra_offsets["pixel_values"]
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, *np.cumsum([len(one["pixel_values"]) for one in samples])]
    assert batch.extra_kinds == FIELDS
    tokens = np.concatenate([one["tokens"] for one in samples])
    if batch.layout == "packed":
        assert batch.tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_handler_packs_them_beside_the_tokens(
    bus: Bus, samples: list[dict[str, Any]], layout: Any, prefetch: int
) -> None:
    with OnlineDataHandler(
        bus.name, groups_per_batch=2, extra_fields=FIELDS, layout=layout, prefetch=prefetch
    ) as handler:
        for first in range(0, len(samples), 6):
            batch = handler.next_batch(10)
            assert_extra(batch, samples[first : first + 6])
            handler.ack(batch)
        assert handler.stats().dropped == {}


NUMPY_DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_field_keeps_its_dtype(bus: Bus, producer: Producer, dtype: str, layout: Any) -> None:
    values = [np.array([0, 1, 2, 100][:n]).astype(dtype) for n in (2, 4)]
    put(producer, "a", [{"tokens": np.arange(len(one)), "x": one} for one in values])
    with Consumer(bus.name) as consumer:
        batch = pack(consumer.take(1, 10), extra_fields={"x": "token"}, layout=layout)
        parts = micro_batches(batch, count=2)
        (second,) = (part for part in parts if part.sequence_indices.tolist() == [1])
        for holder, want in ((batch, values), (second, values[1:])):
            got = holder.extra["x"].numpy()
            assert got.dtype == np.dtype(dtype)
            if layout == "padded":
                got = np.concatenate([row[: len(one)] for row, one in zip(got, want, strict=True)])
            assert np.array_equal(got, np.concatenate(want))


def test_a_dtype_can_be_asked_for(bus: Bus, producer: Producer) -> None:
    bits = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)
    group = [
        {
            "tokens": np.arange(3),
            "mine": np.array([1, 2, 3], np.float64),
            "half": bits.view(torch.int16).numpy(),
        }
    ]
    put(producer, "a", group)
    wanted = {
        "mine": ExtraField(kind="token", dtype="float32"),
        "half": ExtraField(kind="token", dtype=torch.bfloat16),
        "other": ExtraField(kind="sequence", field="mine"),
    }
    with Consumer(bus.name) as consumer:
        batch = pack(consumer.take(1, 10), extra_fields=wanted)
        assert batch.extra["mine"].dtype == torch.float32
        assert batch.extra["mine"].tolist() == [1.0, 2.0, 3.0]
        assert torch.equal(batch.extra["half"], bits)
        assert batch.extra["other"].shape == (1, 3)


OPTIONAL = {
    "values": ExtraField(kind="token", fill=-1.0, dtype="float32"),
    "experts": ExtraField(kind="token", fill=0, dtype="uint8", shape=(2,)),
    "boxes": ExtraField(kind="ragged", fill=0, dtype="int64", shape=(4,)),
    "temperature": ExtraField(kind="sequence", fill=1.0, dtype="float32"),
    "env_id": ExtraField(kind="meta", fill=None),
}


def put_optional(producer: Producer) -> None:
    full = {
        "values": np.array([0.5, 0.25], np.float32),
        "experts": np.full((2, 2), 7, np.uint8),
        "boxes": np.ones((3, 4), np.int64),
        "temperature": np.float32(0.5),
        "meta": {"env_id": 3},
    }
    put(producer, "none", [{"tokens": np.arange(3)}])
    put(producer, "some", [{"tokens": np.arange(2), **full}, {"tokens": np.arange(1)}])


def put_long(producer: Producer, rng: np.random.Generator, dtypes: list[str]) -> None:
    """Rows of more bytes than a step of the kernel, with a field of each dtype."""

    def field(kind: str) -> np.ndarray[Any, Any]:
        return rng.integers(0, 99, (700, 3, 13)).astype(kind)

    group = [{"tokens": np.arange(700), **{kind: field(kind) for kind in dtypes}} for _ in "abc"]
    put(producer, "long", group)


def test_a_sample_without_an_optional_field_gets_its_fill(bus: Bus, producer: Producer) -> None:
    put_optional(producer)
    with OnlineDataHandler(bus.name, groups_per_batch=1, extra_fields=OPTIONAL) as handler:
        first, second = handler.next_batch(10), handler.next_batch(10)
        assert first.extra["values"].tolist() == [-1.0] * 3
        assert first.extra["experts"].tolist() == [[0, 0]] * 3
        assert first.extra["experts"].dtype == torch.uint8
        assert first.extra["boxes"].shape == (0, 4)
        assert first.extra["temperature"].tolist() == [1.0]
        assert first.extra["env_id"] == [None]
        assert second.extra["values"].tolist() == [0.5, 0.25, -1.0]
        assert second.extra["experts"].tolist() == [[7, 7], [7, 7], [0, 0]]
        assert second.extra_offsets["boxes"].tolist() == [0, 3, 3]
        assert second.extra["temperature"].tolist() == [0.5, 1.0]
        assert second.extra["env_id"] == [3, None]


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["gather", "pinned", "copy"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_each_way_to_a_gpu_brings_the_same(
    bus: Bus, samples: list[dict[str, Any]], transport: Any, layout: Any
) -> None:
    packer = GpuPacker("cuda", transport=transport, layout=layout, extra_fields=FIELDS)
    with Consumer(bus.name) as consumer:
        batch = packer.deliver(packer.pack(consumer.take(64, 10)))
        assert batch.transport == transport and batch.extra["routed_experts"].is_cuda
        assert_extra(batch, samples)
        for part in micro_batches(batch, count=3):
            assert_extra(part, [samples[i] for i in part.sequence_indices.tolist()])
        packer.close()


@pytest.mark.gpu
def test_a_gpu_gets_long_rows_and_fills(bus: Bus, producer: Producer) -> None:
    dtypes = ["u1", "i2", "f4", "f8"]
    put_long(producer, np.random.default_rng(3), dtypes)
    put_optional(producer)
    with Consumer(bus.name) as consumer:
        for wanted in (dict.fromkeys(dtypes, "token"), OPTIONAL, OPTIONAL):
            groups = consumer.take(1, 10)
            packer = GpuPacker("cuda", transport="gather", extra_fields=wanted)  # type: ignore[arg-type]
            batch, right = packer.pack(groups), pack(groups, extra_fields=wanted)  # type: ignore[arg-type]
            for name, want in right.extra.items():
                got = batch.extra[name]
                assert got == want if isinstance(want, list) else torch.equal(got.cpu(), want)
            packer.close()


@pytest.mark.gpu
def test_a_loader_pins_extra_fields_too(bus: Bus, samples: list[dict[str, Any]]) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=8, extra_fields=FIELDS) as handler:
        batch = next(iter(DataLoader(handler, batch_size=None, pin_memory=True)))
        assert batch.tokens.is_pinned() and batch.extra["ref_logprobs"].is_pinned()
        assert batch.extra_offsets["pixel_values"].is_pinned()
        assert_extra(batch.to("cuda", non_blocking=True), samples)
        handler.ack(batch)
        assert handler.stats().acknowledged == 24


GOOD = {
    "tokens": np.arange(4),
    "x": np.zeros((4, 2), np.float32),
    "box": np.zeros((1, 4), np.int32),
    "meta": {"env_id": 1},
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, r"field 'x': expected in every sample, since extra_fields has it, got none"),
    ({"x": np.zeros((3, 2), np.float32)}, r"'x': expected as many rows as tokens, got 3"),
    (
        {"x": np.zeros((4, 2), np.float64)},
        r"'x': expected float32 rows of shape \(2,\), got fl",
    ),
    (
        {"x": np.zeros((4, 3), np.float32)},
        r"'x': expected float32 rows of shape \(2,\), got ",
    ),
    ({"x": np.zeros(4, np.float32)}, r"'x': expected float32 rows of shape \(2,\), got float32 ro"),
    ({"box": np.zeros((1, 5), np.int32)}, r"'box': expected int32 rows of shape \(4,\), got int32"),
    ({"box": np.int32(1)}, r"'box': expected a dimension that counts its rows, got a single"),
    (
        {"meta": {"env": 1}},
        r"meta: expected a value of 'env_id', as extra_fields asks, got the",
    ),
    ({"meta": None}, r"meta: expected a value of 'env_id', as extra_fields asks, got None"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
@pytest.mark.parametrize("sibling", [False, True])
def test_a_group_that_does_not_fit_is_malformed_and_costs_no_other(
    bus: Bus, producer: Producer, wrong: dict[str, Any], message: str, sibling: bool
) -> None:
    bad = {name: value for name, value in {**GOOD, **wrong}.items() if value is not None}
    put(producer, "first", [GOOD])
    put(producer, "bad", [GOOD, bad] if sibling else [bad])
    put(producer, "last", [GOOD])
    wanted = {"x": "token", "box": "ragged", "env_id": "meta"}
    with OnlineDataHandler(bus.name, groups_per_batch=1, extra_fields=wanted) as handler:
        got = []
        with pytest.raises(ValueError, match=message) as caught:
            for _ in range(3):
                got += handler.next_batch(10).instance_ids
        assert "'bad'" in str(caught.value) and "of producer" in str(caught.value)
        while len(got) < 2:
            got += handler.next_batch(10).instance_ids
        assert sorted(got) == ["first", "last"]
        assert handler.stats().dropped == {"malformed": 1 + sibling}


@pytest.mark.parametrize(
    ("x", "shape", "message"),
    [(np.zeros(2, dtype), None, "a dtype that torch has") for dtype in (">i4", "<U2", "M8[s]")]
    + [(np.zeros((2, 3), np.uint8), (48, 8), r"expected rows of shape \(48, 8\).*got \(3,\)")],
)
def test_the_first_sample_needs_a_dtype_of_torch_and_the_declared_shape(
    bus: Bus, producer: Producer, x: Any, shape: Any, message: str
) -> None:
    put(producer, "a", [{"tokens": np.arange(2), "x": x}])
    with Consumer(bus.name) as consumer, pytest.raises(ValueError, match=message):
        pack(consumer.take(1, 10), extra_fields={"x": ExtraField(kind="token", shape=shape)})


def test_a_batch_pickles_without_groups_and_memory(bus: Bus, samples: list[dict[str, Any]]) -> None:
    with Consumer(bus.name) as consumer:
        batch = pack(consumer.take(64, 10), extra_fields=FIELDS)
        bits = pickle.dumps(batch)
        copy = pickle.loads(bits)
        assert_extra(copy, samples)
        assert copy.groups == [] and copy.facts is not None
        assert repr(copy) == repr(batch)
        size = sum(value.nbytes for value in vars(batch).values() if torch.is_tensor(value))
        size += sum(value.nbytes for value in batch.extra.values() if torch.is_tensor(value))
        assert len(bits) < size + 40_000


def test_a_batch_moves_with_all_of_its_tensors(bus: Bus, samples: list[dict[str, Any]]) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=8, extra_fields=FIELDS) as handler:
        batch = handler.next_batch(10)
        moved = batch.to("meta", non_blocking=True)
        named = moved.asdict()
        assert "groups" not in named and named["max_seqlen"] == batch.max_seqlen
        tensors = [value for value in named.values() if torch.is_tensor(value)]
        tensors += [value for value in named["extra"].values() if torch.is_tensor(value)]
        tensors += named["extra_offsets"].values()
        assert len(tensors) == 17 and all(value.device.type == "meta" for value in tensors)
        assert (moved.num_tokens, moved.num_sequences) == (batch.num_tokens, 24)
        assert batch.num_tokens == sum(len(one["tokens"]) for one in samples)
        assert micro_batches(batch, count=2)[0].to("meta").tokens.device.type == "meta"
        # The copy stands for the batch: a trainer has nothing else after `batch = batch.to(...)`.
        handler.ack(moved)
        assert handler.stats().acknowledged == 24


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
