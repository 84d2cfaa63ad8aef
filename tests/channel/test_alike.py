"""Steps that are like the last one: sent and received in one call each, and else as any other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Spawner

from shmbus import BusClosedError, PeerGoneError
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
#: After so many, the next one is sent and received in one call.
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


def send_in_one_call(sender: TensorSender, tensors: Any, step: int | None = None) -> int | None:
    assert sender._alike is not None
    return sender._alike[1](tensors, None, step)


@pytest.fixture
def pair(bus_name: str) -> Iterator[Pair]:
    with (
        TensorChannel.create(bus_name, timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS, timeout=20) as receiver,
    ):
        yield sender, receiver


def test_every_dtype_and_rank_arrives_bit_for_bit_in_one_call(bus_name: str) -> None:
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
        for step in range(6):
            if step > WARM_UP:
                assert send_in_one_call(sender, tensors) == step
            else:
                sender.send(tensors)
            with receiver.recv(20) as item:
                assert list(item) == list(tensors)
                for name, wanted in tensors.items():
                    assert item[name].dtype == wanted.dtype
                    assert item[name].shape == wanted.shape
                    raw = item[name].reshape(-1).view(torch.uint8)
                    assert torch.equal(raw, wanted.reshape(-1).view(torch.uint8))
            assert (receiver._alike is not None) == (step > 0)


def test_views_that_are_kept_stay_as_they_were_also_beyond_the_channel(pair: Pair) -> None:
    sender, receiver = pair
    kept = []
    for step in range(20):
        sender.send(made(step))
        with receiver.recv(20) as item:
            kept.append({"x": item["x"][1:], "y": item["y"]})
    assert receiver._alike is not None
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


def not_alike() -> dict[str, Any]:
    imaginary = torch.full((4, 8), 2.0 + 3.0j).conj().imag
    assert imaginary.is_neg()
    good = made(0)
    return {
        "another order": dict(reversed(good.items())),
        "a name too few": {"x": good["x"]},
        "another name": {"x": good["x"], "z": good["y"]},
        "another length": made(0, 5),
        "another dtype": {**good, "y": good["y"].half()},
        "another layout": {**good, "y": torch.ones(8, 4, dtype=torch.bfloat16).t()},
        "a subclass": {**good, "x": torch.nn.Parameter(good["x"], requires_grad=False)},
        "another device": {**good, "x": good["x"].to("meta")},
        "no tensor": {**good, "x": [1, 2, 3, 4]},
        "no mapping": list(good.values()),
        "lazily negated": {**good, "y": imaginary},
    }


@pytest.mark.parametrize("what", not_alike())
def test_what_is_not_alike_is_left_to_the_long_way_with_nothing_done(pair: Pair, what: str) -> None:
    pass_on(pair, 0, WARM_UP)
    sender, _ = pair
    assert send_in_one_call(sender, not_alike()[what]) is None
    assert sender.next_step == WARM_UP
    pass_on(pair, WARM_UP, 3)


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
    assert pair[0].growths > 0


def test_errors_are_those_of_the_long_way(pair: Pair) -> None:
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
            assert send_in_one_call(sender, made(3)) == 3
        other = {"x": ("int64", (None,))}
        with TensorChannel.open(bus_name, specs=other) as receiver:
            assert send_in_one_call(sender, made(4)) is None
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
    assert send_in_one_call(sender, made(3)) == 3
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
        assert receiver._alike is not None
        threading.Timer(0.1, child.kill).start()
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)


class Meddler(torch.overrides.TorchFunctionMode):
    """Runs a function, once, while somebody looks at a tensor."""

    def __init__(self, meddle: Any) -> None:
        super().__init__()
        self._meddle = meddle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()
        return func(*args, **(kwargs or {}))


def test_code_that_runs_while_a_step_is_looked_at_changes_nothing_of_it(pair: Pair) -> None:
    pass_on(pair, 0, WARM_UP)
    sender, receiver = pair
    with Meddler(lambda: sender.send(made(3))):
        assert send_in_one_call(sender, made(4)) == 4
    for step in (3, 4):
        with receiver.recv(20) as item:
            assert (item.step, same(item, made(step))) == (step, True)
    step = made(5)
    with Meddler(step.clear):
        assert send_in_one_call(sender, step) is None
    with Meddler(sender.close), pytest.raises(BusClosedError):
        send_in_one_call(sender, made(5))


def test_an_interrupt_while_a_step_is_looked_at_ends_the_call(pair: Pair) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pass_on(pair, 0, WARM_UP)
    with Meddler(interrupt), pytest.raises(KeyboardInterrupt):
        pair[0].send(made(3))
    pass_on(pair, WARM_UP, 2)
