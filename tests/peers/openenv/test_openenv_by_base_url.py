"""An agent of a real OpenEnv server through the recorder: step rewards are the score."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from http_requests import free_port
from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

import shmbus
from shmbus.recorder.server import serving
from shmbus.recorder.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recorder"))
from recorders import chat, user
from stub_engine import StubEngine, serving_stub
from threaded_server import in_thread

pytestmark = pytest.mark.timeout(180)


class Guess(Action):
    word: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def reset(self, *args: Any, **kwargs: Any) -> Hint:
        self._steps = 0
        return Hint(text="guess")

    def step(self, action: Guess, *args: Any, **kwargs: Any) -> Hint:
        self._steps += 1
        reward = 0.5 * (action.word == 7)
        return Hint(text="again", done=self._steps == 3, reward=reward)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    port = free_port()
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    running = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not running.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(10)


def test_an_environments_agent_works_by_base_url(server: str, bus_name: str, seed: int) -> None:
    schema = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
    with (
        shmbus.Bus.create(bus_name, "1MiB", schema=schema),
        in_thread(lambda: serving_stub(StubEngine(seed), 0)) as engine,
        in_thread(lambda: serving(Settings(bus=bus_name, engines=(engine.url,), port=0))),
        GenericEnvClient(base_url=server).sync() as env,
        shmbus.Producer(bus_name) as producer,
        shmbus.Consumer(bus_name) as consumer,
    ):
        consumer.request("q1", group_size=1)
        with producer.session(producer.requests.next(timeout=30.0), wait=30.0) as session:
            result, messages, reward = env.reset(), [], 0.0
            while not result.done:
                messages.append(user(result.observation["text"]))
                messages.append(chat(session, messages))
                result = env.step({"word": 7})
                reward += result.reward or 0.0
            session.finish(reward)
        [group] = consumer.take(1, 10.0)
        sampled = [i for row in group[0].rows for i in row["tokens"][row["loss_mask"] == 1]]
        assert (group[0].score, group[0].meta["turns"]) == (1.5, 3)
        assert sampled == [i for each in engine.record for i in each.output]
        consumer.ack(group)
