"""Steps of many tensors, small ones in one call and large ones copied one by one."""

from __future__ import annotations

import pytest
import torch

from shmbus.tensors import TensorChannel


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
