"""An exception at any step of a guarded block, or of a copy's making, leaves nothing locked."""

import contextlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path

import torch
from injection import Injected, Injection

from shmbus import DamagedError
from shmbus.weights import SharedModel, attach_model, share_model
from shmbus.weights.single_copy import path_of

#: Of a share's many steps the short form interrupts every so manieth, from a seed's on.
STEP = 1 if "SHMBUS_TEST_LONG" in os.environ else 3


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    fill(model, value)
    return model


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: torch.nn.Module) -> set[float]:
    return {value for each in model.parameters() for value in each.detach().flatten().tolist()}


def interrupted(
    operate: Callable[[], object], check: Callable[[str], None], first: int = 1, step: int = 1
) -> int:
    """Interrupt each step of an operation, or some, and check after each; return their number."""
    for at in range(first, 10_000, step):
        injection = Injection(at, __file__)
        with contextlib.suppress(Injected), injection:
            operate()
        check(injection.where)
        if not injection.raised:
            return at - 1
    raise AssertionError("more steps than the operation has")


def test_an_interrupted_reader_does_not_keep_the_step_out(bus_name: str) -> None:
    with share_model(bus_name, model_of(1)) as shared, attach_model(bus_name, model_of(0)) as seen:

        def operate() -> None:
            with seen.reading(timeout=30):
                pass

        def check(where: str) -> None:
            with shared.stepping(1, timeout=30):
                pass

        assert interrupted(operate, check) > 30


def test_an_interrupted_step_keeps_no_reader_out_and_leaves_no_mix(bus_name: str) -> None:
    model, replica = model_of(1), model_of(0)
    with share_model(bus_name, model, version=1) as shared, attach_model(bus_name, replica) as seen:

        def operate() -> None:
            with shared.stepping(2, timeout=30):
                fill(model, 2)

        def check(where: str) -> None:
            with contextlib.suppress(DamagedError), seen.reading(timeout=30) as version:
                assert values(replica) == {version}
            with shared.stepping(1, timeout=30, heal=True):
                fill(model, 1)

        assert interrupted(operate, check) > 30


def test_an_interrupted_attach_leaves_the_model_as_it_was_or_attached(bus_name: str) -> None:
    with share_model(bus_name, model_of(1), version=1) as shared:
        replica = model_of(5)
        own = dict(replica.named_parameters())
        attached: list[SharedModel | None] = [None]

        def operate() -> None:
            attached[0] = attach_model(bus_name, replica, timeout=30)

        def check(where: str) -> None:
            assert values(replica) in ({1.0}, {5.0})
            if attached[0] is not None:
                attached[0].close()
                attached[0] = None
            replica.weight, replica.bias = own["weight"], own["bias"]
            with shared.stepping(1, timeout=30):
                pass

        assert interrupted(operate, check) > 100


def test_an_interrupted_share_leaves_no_file_and_the_models_values(
    bus_name: str, seed: int
) -> None:
    path = Path(path_of(bus_name))
    model = model_of(1)
    made: list[SharedModel | None] = [None]
    lines, first = inspect.getsourcelines(share_model)
    last = first + lines.index("        return shared\n")
    lost = f"{inspect.getsourcefile(share_model)}:{last} return"

    def operate() -> None:
        made[0] = share_model(bus_name, model, version=1)

    def check(where: str) -> None:
        assert values(model) == {1.0}
        if made[0] is not None:
            made[0].close()
            made[0] = None
        if where == lost:  # made, and never handed over: like a dead owner
            path.unlink()
        assert not [*path.parent.glob(f"{path.name}*")], where

    assert interrupted(operate, check, 1 + seed % STEP, STEP) > 100
