"""What is raised in the middle of a call of a channel, at any event of it: no step is lost."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shmbus import BusClosedError
from shmbus.tensors import StepSkippedError, TensorChannel, TensorReceiver

_FILE = Path(__file__).parents[1] / "interrupt" / "injection.py"
_SPEC = importlib.util.spec_from_file_location("channel_injection", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
INJECTED: type[BaseException] = _MODULE.Injected

SPECS = {"a": ("float32", (None,))}
STEP = {"a": torch.ones(4)}
MOST_EVENTS = 2000


def each_event(operate: Callable[[int], tuple[Callable[[], object], Callable[[str], None]]]) -> int:
    for at in range(1, MOST_EVENTS):
        call, check = operate(at)
        injection: Any = _MODULE.Injection(at, "")
        try:
            with injection:
                call()
        except (INJECTED, StepSkippedError):
            pass
        check(injection.where)
        if not injection.raised:
            return at
    raise AssertionError("the operation has no end")


def test_a_skip_that_nobody_was_told_comes_again(bus_name: str) -> None:
    late = []
    with (
        TensorChannel.create(bus_name, timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS, timeout=20) as receiver,
    ):

        def operate(at: int) -> tuple[Callable[[], object], Callable[[str], None]]:
            step = sender.skip(reason="nothing")

            def check(where: str) -> None:
                if receiver.acked_step == step:
                    late.append(where)
                    return
                try:
                    receiver.recv()
                except StepSkippedError as error:
                    assert error.step == step

            return receiver.recv, check

        assert each_event(operate) > 20
    # After the acknowledgement only the raise remains.
    assert not any("errors.py" in where or "__init__" in where for where in late)


def test_a_side_whose_end_was_interrupted_is_closed_or_as_it_was(bus_name: str) -> None:
    with TensorChannel.create(bus_name, timeout=20) as sender:
        sender.send(STEP)

        def operate(at: int) -> tuple[Callable[[], object], Callable[[str], None]]:
            receiver: TensorReceiver = TensorChannel.open(bus_name, specs=SPECS, timeout=20)

            def check(where: str) -> None:
                try:
                    assert receiver.recv().step == 0
                    receiver.close()
                except BusClosedError:
                    pass

            return lambda: receiver.close("over"), check

        assert each_event(operate) > 10
