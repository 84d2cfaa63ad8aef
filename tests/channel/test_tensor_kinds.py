"""Tensors of every kind arrive bit for bit: dtypes, ranks, views, many small and large ones."""

import gc
from collections.abc import Iterator

import pytest
import torch
from conftest import together

from shmbus.tensors import TensorChannel, TensorReceiver, TensorSender

Pair = tuple[TensorSender, TensorReceiver]
SPECS = {"x": ("int64", (None,)), "y": ("bfloat16", (None, 8))}


def made(step: int, rows: int = 4) -> dict[str, torch.Tensor]:
    return {
        "x": torch.arange(step, step + rows),
        "y": torch.full((rows, 8), float(step % 128), dtype=torch.bfloat16),
    }


@pytest.fixture(params=["host", "memfd"])
def pair(bus_name: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with (
        TensorChannel.create(bus_name, carrier=request.param, timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS, timeout=20) as receiver,
    ):
        yield sender, receiver


def test_every_dtype_and_rank_arrives_bit_for_bit(bus_name: str) -> None:
    dtypes = [
        torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
        torch.float16, torch.float32, torch.float64, torch.bfloat16,
    ]  # fmt: skip
    shapes: list[tuple[int, ...]] = [(), (5,), (3, 2), (2, 1, 3)]
    torch.manual_seed(7)
    bits = torch.randint(0, 256, (16 * 8,), dtype=torch.uint8)
    tensors = {}
    for dtype in dtypes:
        for shape in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            raw = bits[:size] % 2 if dtype == torch.bool else bits[:size]
            tensors[f"{dtype}{shape}"] = raw.clone().view(dtype).view(shape)
    specs = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=specs) as receiver,
    ):
        for _ in range(3):
            sender.send(tensors)
            with receiver.recv(20) as item:
                assert list(item) == list(tensors)
                for name, wanted in tensors.items():
                    assert item[name].dtype == wanted.dtype
                    assert item[name].shape == wanted.shape
                    raw = item[name].reshape(-1).view(torch.uint8)
                    assert torch.equal(raw, wanted.reshape(-1).view(torch.uint8))


def test_views_that_are_kept_stay_as_they_were_also_beyond_the_channel(pair: Pair) -> None:
    sender, receiver = pair
    kept = []
    for step in range(20):
        sender.send(made(step))
        with receiver.recv(20) as item:
            kept.append({"x": item["x"][1:], "y": item["y"]})
    sender.close()
    receiver.close()
    del item
    gc.collect()
    for step, each in enumerate(kept):
        assert torch.equal(each["x"], made(step)["x"][1:])
        assert torch.equal(each["y"], made(step)["y"])
    # The library of tensors may let go of them in any thread.
    together(lambda kept: kept.clear(), [kept])


def test_a_tensor_that_requires_grad_is_sent_as_any_other(bus_name: str) -> None:
    specs = {"y": ("float32", (4,))}
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=specs) as receiver,
    ):
        for step in range(6):
            sender.send({"y": torch.full((4,), float(step), requires_grad=True)})
            with receiver.recv(20) as item:
                assert not item["y"].requires_grad
                assert item["y"].tolist() == [float(step)] * 4


def step_of(count: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
    return {
        f"tensor-{n}": torch.randint(0, 2, (size + n % 3,), generator=generator).to(dtypes[n % 4])
        for n in range(count)
    }


@pytest.mark.parametrize("size", [3, 2_000])
@pytest.mark.parametrize("count", [200, 1025])
def test_each_of_many_tensors_arrives(count: int, size: int, bus_name: str) -> None:
    specs = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in step_of(count, size, 0).items()
    }
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=specs) as receiver,
    ):
        for number in range(2):
            sent = step_of(count, size, number)
            sender.send(sent)
            with receiver.recv(20) as item:
                assert [*item] == [*sent]
                assert all(torch.equal(item[name], sent[name]) for name in sent)
                assert all(item[name].dtype == sent[name].dtype for name in sent)


def test_large_tensors_whose_bits_say_the_opposite_arrive_as_their_values(bus_name: str) -> None:
    specs = {"minus one": ("float32", (40_000,)), "plain": ("float32", (40_000,))}
    negative = torch._neg_view(torch.ones(40_000))
    assert negative.is_neg() and negative.is_contiguous()
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=specs) as receiver,
    ):
        for _ in range(2):
            sender.send({"minus one": negative, "plain": torch.ones(40_000)})
            with receiver.recv(20) as item:
                assert item["minus one"].eq(-1).all() and item["plain"].eq(1).all()
