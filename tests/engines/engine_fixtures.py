"""What the tests of servers share: servers of their own, and a trainer's publisher."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_engine import Running, SmallEngine
from small_sglang import SmallSglang
from small_vllm import SmallVllm
from trainers import Scene, Trainer

from shmbus import Bus

StartServer = Callable[..., Running]
SMALL: dict[str, Callable[[int], SmallEngine]] = {"vllm": SmallVllm, "sglang": SmallSglang}


@pytest.fixture
def servers() -> Iterator[StartServer]:
    started: list[Running] = []

    def start(ranks: int = 1, make: str | Callable[[int], SmallEngine] = "vllm") -> Running:
        started.append(Running(SMALL[make] if isinstance(make, str) else make, ranks))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def trainer(bus_name: str) -> Iterator[Trainer]:
    trainer = Trainer(bus_name)
    yield trainer
    trainer.publisher.close()


@pytest.fixture
def writer(bus_name: str, tmp_path: Path) -> Iterator[Trainer]:
    """A trainer that writes checkpoints to `tmp_path`."""
    trainer = Trainer(bus_name, carrier="checkpoint", directory=tmp_path)
    yield trainer
    trainer.publisher.close()


@pytest.fixture
def scene(bus: Bus, trainer: Trainer, servers: StartServer) -> Scene:
    return Scene(bus, trainer, servers)
