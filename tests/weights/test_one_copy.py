"""The engine has the memory, and the trainer steps in it: one copy, fused for one of them."""

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fork_server import TEMPLATE
from fused_model import checkpoint
from one_copy_engine import SHAPE, serve
from weight_models import without_memory

from shmbus.errors import PeerGoneError, WaitTimeoutError
from shmbus.weights import attach_model

STEPS = 60


class Engine:
    def __init__(self, bus: str, device: str) -> None:
        self.pipe: Connection
        self.pipe, there = TEMPLATE.Pipe()
        self.process = TEMPLATE.Process(target=serve, args=(there, bus, device), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(120) and self.pipe.recv() == "shared"

    def score(self) -> tuple[Any, Any]:
        self.pipe.send("score")
        assert self.pipe.poll(60)
        found: tuple[Any, Any] = self.pipe.recv()
        return found

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send("end")
        self.process.join(30)
        self.process.kill()
        self.process.join()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, bus_name: str) -> Iterator[Engine]:
    made = Engine(bus_name, request.param)
    yield made
    made.end()


def trainer_model() -> torch.nn.Module:
    return without_memory(checkpoint(SHAPE), SHAPE.dtype)


def loss(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([each.double().pow(2).sum() for each in model.parameters()]).sum()


def test_the_engine_has_each_step_at_once_without_a_copy(engine: Engine, bus_name: str) -> None:
    model = trainer_model()
    with attach_model(bus_name, model, writable=True) as shared:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scores = [engine.score()]
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss(model).backward()
            with shared.stepping(step):
                optimizer.step()
            scores.append(engine.score())
            assert scores[-1][0] == step
            assert scores[-1][1] == pytest.approx(loss(model).item(), rel=1e-12)
        values = [value for _, value in scores]
        assert values == sorted(values, reverse=True)
    assert engine.score()[0] == STEPS, "the engine goes on without its trainer"


def test_a_failed_step_is_unseen_and_healed_by_a_successor(engine: Engine, bus_name: str) -> None:
    model = trainer_model()
    with (
        attach_model(bus_name, model, writable=True) as shared,
        contextlib.suppress(ZeroDivisionError),
        shared.stepping(1),
    ):
        _ = 1 / 0
    assert engine.score()[0] == "DamagedError"
    with attach_model(bus_name, trainer_model(), writable=True) as shared:
        with shared.stepping(2, heal=True):
            pass
        assert engine.score()[0] == 2


def test_what_an_engine_that_ended_had_is_attached_by_nobody(engine: Engine, bus_name: str) -> None:
    engine.process.kill()
    engine.process.join()
    with pytest.raises((PeerGoneError, WaitTimeoutError)):
        attach_model(bus_name, trainer_model(), writable=True, timeout=1.0)
