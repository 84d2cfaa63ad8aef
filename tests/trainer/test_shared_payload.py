"""What a group's samples have in common: in the ring once, and once in a batch."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmbus import Bus, Consumer, Producer
from trainer_adapter import OnlineDataHandler, pack
from trainer_adapter.adapters.prompt_response import part_row
from trainer_adapter.adapters.trl.rows import Expected, read_sample
from trainer_adapter.microbatch import micro_batches

FIELDS: Any = {"pixels": "group"}


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="64MiB") as handle:
        yield handle


def image(rows: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random((rows, 4)).astype(np.float32)


def samples(count: int, rows: bool = False) -> list[dict[str, Any]]:
    tokens = [np.arange(n + 2, dtype=np.int32) for n in range(count)]
    if rows:
        return [{"rows": [{"tokens": one}, {"tokens": one[:1]}]} for one in tokens]
    return [{"tokens": one, "score": float(at)} for at, one in enumerate(tokens)]


def test_an_image_of_three_megabytes_is_in_the_ring_once(bus: Bus) -> None:
    pixels = image(3 << 16)
    assert pixels.nbytes == 3 << 20
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", samples(16), shared={"pixels": pixels})
        assert pixels.nbytes <= producer.stats().bytes < pixels.nbytes + (1 << 20)
        (group,) = consumer.take(1, 10)
        assert np.array_equal(group.shared["pixels"], pixels)
        copied = group.copy()
        assert np.array_equal(copied.shared["pixels"], pixels)
        batch = pack([group], extra_fields=FIELDS)
        assert batch.extra["pixels"].shape == pixels.shape
        assert torch.equal(batch.extra["pixels"], torch.from_numpy(pixels))
        assert batch.extra_offsets["pixels"].tolist() == [0, 3 << 16]
        group.ack()
        again = producer.next_round()
        producer.put_many([{**t, "round": again} for t in copied.to_dict()["trajectories"]])
        (group,) = consumer.take(1, 10)
        assert np.array_equal(group.shared["pixels"], pixels)


@pytest.mark.parametrize("rows", [False, True])
def test_each_group_has_its_own_in_batches_and_micro_batches(
    bus: Bus, producer: Producer, rows: bool
) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=3, extra_fields=FIELDS) as handler:
        for number in range(3):
            given = {"pixels": image(number + 1, number)}
            producer.put_group(f"q{number}", samples(2, rows), shared=given)
        batch = handler.next_batch(10)
        assert batch.extra_offsets["pixels"].tolist() == [0, 1, 3, 6]
        whole = torch.cat([torch.from_numpy(image(n + 1, n)) for n in range(3)])
        assert torch.equal(batch.extra["pixels"], whole)
        for part in micro_batches(batch, count=4):
            keys = list(dict.fromkeys(part.instance_ids))
            assert part.group_sizes.tolist() == [part.instance_ids.count(key) for key in keys]
            own = [torch.from_numpy(image(int(key[1:]) + 1, int(key[1:]))) for key in keys]
            assert torch.equal(part.extra["pixels"], torch.cat(own))
        handler.ack(batch)


def test_a_prompt_with_one_image_is_shared_by_its_group(bus: Bus) -> None:
    given = [{"tokens": np.arange(300, dtype=np.int32)} for _ in range(4)]
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", given, shared={"pixels": image(5)})
        batch = pack(consumer.take(1, 10), layout="prefix", extra_fields=FIELDS)
        assert batch.prefix_tree is not None
        assert batch.prefix_tree.num_rows == 300


def test_the_schema_of_the_bus_holds_for_it(bus_name: str) -> None:
    schema = {"tokens": "int32", "pixels?": ("float32", ("N", 4))}
    with Bus.create(bus_name, capacity="1MiB", schema=schema), Producer(bus_name) as producer:
        asyncio.run(producer.aput_group("q", samples(2), shared={"pixels": image(2)}))
        with Consumer(bus_name) as consumer:
            (group,) = consumer.take(1, 10)
            assert group.shared["pixels"].dtype == np.float32
            assert "pixels" not in group[1]
        with pytest.raises(ValueError, match=r"pixels: expected the shape .*, got \(2, 3\)"):
            producer.put_group("q", samples(2), shared={"pixels": np.zeros((2, 3), np.float32)})
        with pytest.raises(TypeError, match="pixel"):
            producer.put_group("q", samples(2), shared={"pixel": image(2)})


def test_stacks_that_have_no_place_for_it_refuse_it_by_name(bus: Bus) -> None:
    given = {"loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0]}
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", [{"tokens": [1, 2, 3], **given}], shared={"pixels": image(1)})
        (group,) = consumer.take(1, 10)
        for read in (
            lambda t: part_row(t, t.rows[0], True),
            lambda t: read_sample(t, Expected(None, None)),
        ):
            with pytest.raises(ValueError, match=r"'q'.*'shared:pixels'.*whole group"):
                read(group[0])


def test_what_does_not_fit_is_refused_by_name(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        given = samples(2)
        given[1]["pixels"] = image(1)
        with pytest.raises(ValueError, match=r"put_group: sample 1: 'pixels' is in shared=, too"):
            producer.put_group("q", given, shared={"pixels": image(1)})
        with pytest.raises(TypeError, match="shared: expected a mapping, got list"):
            producer.put_group("q", samples(2), shared=[image(1)])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="shared: expected names of arrays, got 'score'"):
            producer.put_group("q", samples(2), shared={"score": image(1)})
        producer.put_group("lacks", samples(2))
        (group,) = consumer.take(1, 10)
        assert group.shared == {}
        with pytest.raises(
            ValueError,
            match=r"'lacks'\[0\] of producer \d+: field 'shared:pixels': expected it once for the "
            r"group, by put_group\(shared=\)",
        ):
            pack([group], extra_fields=FIELDS)
