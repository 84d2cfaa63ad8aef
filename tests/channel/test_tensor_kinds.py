"""Steps that are like the last one, of which less is checked, and those between that are not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Spawner

from shmbus import PeerGoneError
from shmbus.tensors import (
    SpecMismatchError,
    StepOrderError,
    TensorChannel,
    TensorReceiver,
    TensorSender,
)

Pair = tuple[TensorSender, TensorReceiver]
SPECS = {"x": ("int64", (None,)), "y": ("bfloat16", (None, 8))}
NEVER_S = 3600.0
WARM_UP = 3


def made(step: int, rows: int = 4) -> dict[str, torch.Tensor]:
    return {
        "x": torch.arange(step, step + rows),
        "y": torch.full((rows, 8), float(step % 128), dtype=torch.bfloat16),
    }


def same(item: Any, wanted: dict[str, torch.Tensor]) -> bool:
    return list(item) == list(wanted) and all(torch.equal(item[n], wanted[n]) for n in wanted)


def pass_on(pair: Pair, first: int, steps: int, rows: int = 4) -> None:
    sender, receiver = pair
    for step in range(first, first + steps):
        assert sender.send(made(step, rows)) == step
        with receiver.recv(20) as item:
            assert item.step == step
            assert same(item, made(step, rows))


@pytest.fixture
def pair(bus_name: str) -> Iterator[Pair]:
    with (
        TensorChannel.create(bus_name, timeout=20) as sender,
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
    letting_go = threading.Thread(target=kept.clear)
    letting_go.start()
    letting_go.join()


def test_meta_of_each_step_is_its_own(pair: Pair) -> None:
    sender, receiver = pair
    for step in range(8):
        meta = {"n": step, "text": "x" * step} if step % 3 else None
        sender.send(made(step), meta=meta)
        with receiver.recv(20) as item:
            assert (item.step, item.meta) == (step, meta or {})


def test_a_lazily_negated_tensor_arrives_as_it_reads(bus_name: str) -> None:
    specs = {"y": ("float32", (4,))}
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=specs) as receiver,
    ):
        for step in range(6):
            lazy = torch.full((4,), complex(1, step)).conj().imag
            sender.send({"y": lazy.contiguous() if step < WARM_UP else lazy.clone()})
            with receiver.recv(20) as item:
                assert item["y"].tolist() == [-float(step)] * 4


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


def test_steps_of_other_lengths_between_are_received_too(pair: Pair) -> None:
    first = 0
    for rows in (4, 7, 4, 1, 600, 4):
        pass_on(pair, first, WARM_UP, rows)
        first += WARM_UP
    assert pair[0]._writer.growths > 0


def test_what_cannot_be_sent_leaves_the_channel_usable(pair: Pair) -> None:
    sender, receiver = pair
    pass_on(pair, 0, WARM_UP)
    with pytest.raises(StepOrderError, match="it was sent already"):
        sender.send(made(0), step=0)
    with pytest.raises(SpecMismatchError, match="tensor 'y' is expected"):
        sender.send({"x": made(0)["x"]})
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        sender.send({**made(0), "y": torch.ones(8, 4, dtype=torch.bfloat16).t()})
    with pytest.raises(ValueError, match="expected a tensor on the agreed device"):
        sender.send({**made(0), "x": made(0)["x"].to("meta")})
    assert sender.send(made(3), step=3) == 3
    with pytest.raises(ZeroDivisionError), receiver.recv(20):
        raise ZeroDivisionError
    with receiver.recv(20) as item:
        assert (item.step, same(item, made(3))) == (3, True)
    with pytest.raises(StepOrderError, match="acknowledged already"):
        receiver.recv(0, step=3)
    sender.skip(reason="nothing")
    with pytest.raises(Exception, match="skipped: nothing"):
        receiver.recv(20)
    pass_on(pair, 5, 2)


def test_a_receiver_that_expects_something_else_ends_it_on_both_sides(bus_name: str) -> None:
    with TensorChannel.create(bus_name, timeout=20) as sender:
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            pass_on((sender, receiver), 0, WARM_UP)
            assert sender.send(made(3)) == 3
        other = {"x": ("int64", (None,))}
        with TensorChannel.open(bus_name, specs=other) as receiver:
            with pytest.raises(SpecMismatchError, match="'y' is sent"):
                sender.send(made(4))
            with pytest.raises(SpecMismatchError):
                receiver.recv(20)
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            for step in (3, 4):
                with receiver.recv(20) as item:
                    assert same(item, made(step))
                sender.send(made(step + 1))


def test_a_resume_goes_on_with_each_step_once(pair: Pair) -> None:
    sender, receiver = pair
    pass_on(pair, 0, WARM_UP)
    sender.load_state_dict({"acked_step": 9})
    receiver.load_state_dict({"acked_step": 9})
    for step in range(10, 14):
        assert sender.send(made(step)) == step
        with receiver.recv(20) as item:
            assert (item.step, same(item, made(step))) == (step, True)
    sender.send(made(14))
    receiver.load_state_dict({"acked_step": 14})
    sender.send(made(15))
    with receiver.recv(20) as item:
        assert item.step == 15


def test_a_receiver_that_sleeps_for_long_is_woken(pair: Pair) -> None:
    sender, receiver = pair
    pass_on(pair, 0, WARM_UP)
    got = []

    def receive() -> None:
        with receiver.recv(20) as item:
            got.append((item.step, same(item, made(3))))

    waiting = threading.Thread(target=receive)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert sender.send(made(3)) == 3
    waiting.join(20)
    assert got == [(3, True)]


SENDER = """
import sys, time, torch
from shmbus.tensors import TensorChannel
tx = TensorChannel.create(sys.argv[1])
for step in range(4):
    tx.send({"x": torch.arange(step, step + 4), "y": torch.full((4, 8), float(step)).bfloat16()})
print("sent", flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(60)
def test_a_sender_that_is_killed_ends_a_wait(bus_name: str, spawn: Spawner) -> None:
    child = spawn.script(SENDER, bus_name)
    with TensorChannel.open(bus_name, specs=SPECS, wait=30) as receiver:
        for step in range(4):
            with receiver.recv(30) as item:
                assert same(item, made(step))
        threading.Timer(0.1, child.kill).start()
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
