"""Fixtures of the recorder's tests: stub engines, recorders, and a client for one sample."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from recorders import Scene, StartEngine
from stub_engine import StubEngine, serving_stub
from threaded_server import in_thread

import shmbus
from shmbus.recorder.recorder import Recorder
from shmbus.recorder.server import serving
from shmbus.recorder.settings import Settings

StartRecorder = Callable[..., Recorder]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_engine(stack: ExitStack, seed: int) -> StartEngine:
    def start(port: int = 0) -> StubEngine:
        found: StubEngine = stack.enter_context(
            in_thread(lambda: serving_stub(StubEngine(seed), port))
        )
        return found

    return start


@pytest.fixture
def engine(start_engine: StartEngine) -> StubEngine:
    return start_engine()


@pytest.fixture
def start_recorder(bus: shmbus.Bus, stack: ExitStack) -> StartRecorder:
    def start(*engines: StubEngine | str, **options: Any) -> Recorder:
        urls = tuple(each if isinstance(each, str) else each.url for each in engines)
        options.setdefault("assume_trainer_version", True)  # stubs have no rows
        settings = Settings(bus=bus.name, engines=urls, port=0, **options)
        found: Recorder = stack.enter_context(in_thread(lambda: serving(settings)))
        return found

    return start


@pytest.fixture
def recorder(start_recorder: StartRecorder, engine: StubEngine) -> Recorder:
    return start_recorder(engine)


@pytest.fixture
def consumer(bus: shmbus.Bus) -> Iterator[shmbus.Consumer]:
    with shmbus.Consumer(bus.name, sample_retries=2, retry_backoff=(0.01, 0.05)) as consumer:
        yield consumer


@pytest.fixture
def session(recorder: Recorder, producer: shmbus.Producer, feeder: shmbus.Feeder) -> shmbus.Session:
    feeder.request("q", group_size=1)
    return producer.session(producer.requests.next(30.0))


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, bus: shmbus.Bus, engine: StubEngine, start_engine: StartEngine,
    start_recorder: StartRecorder, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> Scene:  # fmt: skip
    return Scene(request, bus, engine, start_engine, start_recorder, producer, feeder, consumer)
