"""What cannot be sent is refused by name before anything of it is stated or read."""

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from refusals import INT, SECONDS, let_through, of_type, of_value
from torch._subclasses.fake_tensor import FakeTensorMode

from shmbus import CapacityError, DeviceMismatchError, WaitTimeoutError
from shmbus.channel.endpoint import channel_path
from shmbus.tensors import (
    CudaCarrier,
    HostCarrier,
    TensorChannel,
    TensorReceiver,
    TensorSender,
)

Sides = tuple[TensorSender, TensorReceiver]
WAIT_S = 20.0
SPECS = {"a": ("float32", (None,))}
STEP = {"a": torch.ones(4)}
MANY = {f"{number:060}": torch.ones(1) for number in range(2000)}


@pytest.fixture(params=["host", "memfd"])
def sides(bus_name: str, request: pytest.FixtureRequest) -> Iterator[Sides]:
    sender = TensorChannel.create(bus_name, timeout=WAIT_S, carrier=request.param)
    receiver = TensorChannel.open(bus_name, specs=SPECS, timeout=WAIT_S)
    yield sender, receiver
    sender.close("the test is over")
    receiver.close()


def free(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.mark.parametrize("size", [4, 1 << 17])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("left", [0, 8])
def test_a_partial_tensor_is_not_read(sides: Sides, left: int, offset: int, size: int) -> None:
    sender, receiver = sides
    cut = free(torch.ones(offset + size)[offset:], left)
    with pytest.raises(ValueError, match=r"tensor 'a': expected a tensor with memory.* nothing"):
        sender.send({"a": cut})
    sender.send({"a": torch.full((size,), 7.0)})
    with receiver.recv() as item:
        assert item.step == 0 and bool((item["a"] == 7).all())


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)  # type: ignore[no-any-return]


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.ones(4).to_sparse(), "layout torch.sparse_coo"),
    "compressed": (lambda: torch.ones(4, 4).to_sparse_csr(), "layout torch.sparse_csr"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), "layout torch._mkldnn"),
    "nested": (nested, "a nested one"),
    "jagged": (jagged, "layout torch.jagged"),
    "quantized": (quantized, "got quint8"),
    "bits": (lambda: torch.empty(4, dtype=torch.bits8), "got bits8"),
    "half complex": (lambda: torch.empty(4, dtype=torch.complex32), "got complex32"),
    "lazy": (torch.nn.parameter.UninitializedParameter, "before its module's first"),
    "fake": (fake, "with memory"),
    "meta": (lambda: torch.ones(4, device="meta"), "device 'cpu', got 'meta'"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_plain_tensor_is_refused_by_name(kind: str, sides: Sides) -> None:
    make, said = ODD[kind]
    tensor = make()
    for name in ("other", "a"):
        with pytest.raises(ValueError, match=rf"tensor '{name}': .*{re.escape(said)}.*nothing was"):
            sides[0].send({name: tensor})
    assert sides[0].send(STEP) == 0


def test_a_tensor_of_a_transform_is_refused_by_name(sides: Sides) -> None:
    def told(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match=r"tensor 'a': expected a tensor with memory"):
            sides[0].send({"a": value})
        return value

    torch.func.vmap(told)(torch.ones(2, 4))
    assert sides[0].send(STEP) == 0


@pytest.mark.parametrize(
    ("step", "options", "error"),
    [
        ({"b": torch.ones(4)}, {"meta": {"x": object()}}, TypeError),
        ({"b": torch.ones(1 << 20)}, {}, CapacityError),
        ({"\ud800": torch.ones(4)}, {}, ValueError),
        (MANY, {}, ValueError),
    ],
)
def test_a_first_step_that_was_not_sent_binds_none_after_it(
    step: dict[str, torch.Tensor], options: dict[str, Any], error: type[Exception], bus_name: str
) -> None:
    with TensorChannel.create(bus_name, timeout=WAIT_S, max_bytes="1MiB") as sender:
        with pytest.raises(error, match=r"meta: |nothing was sent"):
            sender.send(step, **options)
        assert sender.send(STEP) == 0
        with (
            TensorChannel.open(bus_name, specs=SPECS, timeout=WAIT_S) as receiver,
            receiver.recv() as item,
        ):
            assert list(item) == ["a"]


def test_a_step_may_have_a_meta_alone_and_sizes_of_numpy(bus_name: str) -> None:
    for carrier in ("host", "memfd"):
        with (
            TensorChannel.create(bus_name, carrier=carrier) as sender,
            TensorChannel.open(bus_name, specs={}, timeout=WAIT_S) as receiver,
        ):
            for number in range(4):
                assert sender.send({}, meta={"n": number}) == number
                with receiver.recv() as item:
                    assert (dict(item), item.meta) == ({}, {"n": number})
    specs = {"a": ("float32", (np.int64(4), None))}
    with TensorChannel.create(bus_name, specs=specs) as sender:
        assert sender.send({"a": torch.ones(4, 2)}) == 0


@pytest.mark.parametrize(
    ("specs", "error", "match"),
    [
        (dict.fromkeys(MANY, ("float32", (1,))), ValueError, "specs: .*shorter names"),
        ({"\ud800": ("float32", (1,))}, ValueError, "specs: expected names .*UTF-8"),
        ({"a": ("float32", (1 << 63,))}, ValueError, r"specs\['a'\]: expected sizes"),
        ({"a": ("float32", (-1,))}, ValueError, r"specs\['a'\]: expected sizes"),
        ({"a": ("float32", (True,))}, ValueError, r"specs\['a'\]: expected sizes"),
    ],
)
def test_bad_specs_take_none(specs: Any, error: type[Exception], match: str, bus_name: str) -> None:
    with pytest.raises(error, match=match):
        TensorChannel.create(bus_name, specs=specs)
    with TensorChannel.create(bus_name) as sender:
        with pytest.raises(error, match=match):
            TensorChannel.open(bus_name, specs=specs)
        with TensorChannel.open(bus_name, specs=SPECS, timeout=WAIT_S) as receiver:
            sender.send(STEP)
            with receiver.recv() as item:
                assert item.step == 0


def test_a_timeout_is_checked_also_where_nothing_is_waited_for(sides: Sides) -> None:
    sender, receiver = sides
    wrong = SECONDS + of_type(np.array(1.0), torch.tensor(1.0))
    assert let_through(partial(sender.send, STEP), "timeout", wrong) == []
    assert let_through(partial(sender.skip, reason="none"), "timeout", wrong) == []
    assert sender.send(STEP) == 0
    assert let_through(receiver.recv, "timeout", wrong) == []
    assert receiver.recv().step == 0


@pytest.mark.parametrize("timeout", [np.float16(0.05), np.float32(0.05), np.int8(0), 0])
def test_a_tiny_timeout_ends(timeout: Any, bus_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a clock says after ten days is more than such a number can have.
    import time

    from shmbus.channel import endpoint
    from shmbus.segment import peer_wait

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 1e6

    for module in (endpoint, peer_wait):
        monkeypatch.setattr(module, "time", Clock)
    with (
        TensorChannel.create(bus_name, timeout=timeout),
        TensorChannel.open(bus_name, specs=SPECS, timeout=timeout, wait=timeout) as receiver,
    ):
        for given in (None, timeout):
            with pytest.raises(WaitTimeoutError):
                receiver.recv(timeout=given)


def test_unreadable_metas_and_unnamed_tensors_are_not_sent(sides: Sides) -> None:
    sender, receiver = sides
    wrong = of_type({1: 2}, {"a": object()}, {"a": torch.ones(1)}, [("a", 1)], 5)
    wrong += of_value({"a": 1 << 70}, {"a": "\ud800"})
    for meta, errors in wrong:
        with pytest.raises(errors, match=r"^meta: expected .* nothing was sent"):
            sender.send(STEP, meta=meta)
    for tensors in (None, [torch.ones(1)], torch.ones(1), {5: torch.ones(1)}):
        with pytest.raises(TypeError, match="nothing was sent"):
            sender.send(tensors)  # type: ignore[arg-type]
    sender.send(STEP, meta={"a": 1})
    with receiver.recv() as item:
        assert (item.step, item.meta) == (0, {"a": 1})


def test_a_step_is_a_number(sides: Sides) -> None:
    sender, receiver = sides
    wrong = INT + of_value(1 << 70)
    assert let_through(partial(sender.send, STEP), "step", wrong) == []
    assert let_through(receiver.recv, "step", wrong) == []
    assert sender.next_step == 0


def test_a_state_is_what_state_dict_returned(sides: Sides) -> None:
    steps = of_type({"acked_step": "3"}) + of_value({"acked_step": -5}, {"acked_step": 1 << 70})
    for side in sides:
        for state, errors in of_type(None) + of_value({}) + steps:
            with pytest.raises(errors, match=r"acked_step|state"):
                side.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"specs": {"a": ("float32", 5)}}, TypeError, "expected a shape, got 5"),
        ({"carrier": "cuda"}, ValueError, "device: expected one such as"),
        ({"specs": {"a": ("floaty", (1,))}}, ValueError, "dtype of torch, got 'floaty'"),
        ({"slots": 0, "carrier": "memfd"}, ValueError, "slots: expected 1 to 8, got 0"),
        ({"carrier": HostCarrier(), "slots": 3}, ValueError, "slots: options of the carrier"),
        ({"carrier": HostCarrier(), "device": "cpu"}, ValueError, "device: options of the car"),
        ({"carrier": "host", "device": "cpu"}, ValueError, "device: expected an option of carrier"),
        ({"carrier": "memfd", "device": "cuda:0"}, ValueError, "device: expected an option of car"),
        ({"carrier": "cuda", "device": "cpu"}, ValueError, "a CUDA device for carrier 'cuda', got"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name_and_leaves_nothing(
    options: dict[str, Any], error: type[Exception], match: str, bus_name: str
) -> None:
    with pytest.raises(error, match=match):
        TensorChannel.create(bus_name, **options)
    assert not os.path.exists(channel_path(bus_name))


def test_a_carrier_checks_its_options_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="colocated=True"):
        CudaCarrier(device="cuda:0", colocated=False)
    with pytest.raises(
        DeviceMismatchError, match="CUDA devices that this process sees, got 'cuda:63'"
    ):
        CudaCarrier(device="cuda:63")
    with pytest.raises(ValueError, match="slots: expected 1 to 8, got 9"):
        HostCarrier(slots=9)
