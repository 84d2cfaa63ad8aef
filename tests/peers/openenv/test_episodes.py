"""Episodes over a real OpenEnv server: its step results are the score, turns are rows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doc_pages
import pytest
import uvicorn
from conftest import wait_until
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

import shmbus
from shmbus.recorder.server import serving
from shmbus.recorder.settings import Settings
from trainer_adapter.adapters.openenv import EpisodeRecord, put_episode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recorder"))
from recorders import chat, user
from stub_engine import StubEngine, in_thread, serving_stub

pytestmark = pytest.mark.timeout(180)


class Guess(Action):
    word: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment[Guess, Hint, State]):
    """Three guesses; each right one gives 0.5."""

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, capacity="1MiB"):
        yield bus_name


def test_an_episode_of_a_real_environment_is_a_sample(server: str, bus: str) -> None:
    with GenericEnvClient(base_url=server).sync() as env, shmbus.Producer(bus) as producer:
        for index, words in enumerate(([7, 7, 1], [1, 1, 7])):
            record = EpisodeRecord("guessing")
            result = env.reset()
            context = [2]
            for word in words:
                assert not result.done
                record.turn(context, [word, 9], [-0.5, -0.25])
                result = env.step({"word": word})
                record.result(result)
                context = [*context, word, 9, 3]
            assert put_episode(
                producer, record, "q1", group_size=2, index=index, policy_version=(3, 4)
            )
    with shmbus.Consumer(bus) as consumer:
        [group] = consumer.take(1, 5.0)
        assert [t.score for t in group] == [1.0, 0.5]
        t = group[0]
        [row] = t.rows
        assert row["tokens"].tolist() == [2, 7, 9, 3, 7, 9, 3, 1, 9]
        assert row["loss_mask"].tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1]
        assert row["logprobs"].tolist() == [0, -0.5, -0.25, 0, -0.5, -0.25, 0, -0.5, -0.25]
        assert t.meta["env"] == "guessing" and t.meta["steps"] == 3
        assert (t.policy_version, t.newest_policy_version) == (3, 4)
        consumer.ack(group)


def test_the_page_makes_a_sample(server: str, bus: str) -> None:
    context = [2]

    def act(result: Any) -> tuple[Any, ...]:
        given = context.copy()
        context.extend([7, 9, 3])
        return given, [7, 9], [-0.5, -0.25], {"word": 7}

    with (
        GenericEnvClient(base_url=server).sync() as env,
        shmbus.Producer(bus) as producer,
        shmbus.Feeder(bus) as feeder,
    ):
        feeder.request("q1", group_size=1)
        names = {"env": env, "producer": producer, "act": act, "version": 3}
        request = producer.requests.next(timeout=10.0)
        doc_pages.run("environments.md", "act(result)", bus, request=request, **names)
    with shmbus.Consumer(bus) as consumer:
        [group] = consumer.take(1, 5.0)
        [sample] = group
        assert sample.score == 1.5 and sample["tokens"].tolist() == [2, 7, 9, 3, 7, 9, 3, 7, 9]
        consumer.ack(group)


def test_an_agent_of_an_environment_becomes_a_worker_by_its_base_url(
    server: str, bus_name: str, seed: int
) -> None:
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


def test_a_context_that_was_rewritten_begins_a_row() -> None:
    record = EpisodeRecord()
    record.turn([1, 2], [3], [-1.0])
    record.turn([1, 2, 3, 4], [5], [-1.0])
    record.turn([1, 9, 4], [6], [-2.0], finish_reason="length")
    first, second = record.rows()
    assert first["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert second["tokens"].tolist() == [1, 9, 4, 6]
    assert second["loss_mask"].tolist() == [0, 0, 0, 1]
    assert record.finish_reason == "length"


def step(reward: float | None, done: bool) -> StepResult[Any]:
    return StepResult(observation={}, reward=reward, done=done)


@pytest.mark.parametrize(
    ("results", "turns", "words"),
    [
        ([step(1.0, False)], 1, "the environment was not done"),
        ([step(None, True)], 1, "no step gave a reward"),
        ([step(float("nan"), True)], 1, "reward nan"),
        ([step(1.0, True)], 0, "nothing was sampled"),
    ],
)
def test_what_cannot_be_trained_is_reported_and_asked_for_again(
    results: list[Any], turns: int, words: str, bus: str
) -> None:
    record = EpisodeRecord()
    for _ in range(turns):
        record.turn([1], [2], [-1.0])
    for result in results:
        record.result(result)
    with shmbus.Producer(bus) as producer, shmbus.Consumer(bus, sample_retries=1) as consumer:
        assert not put_episode(producer, record, "q", group_size=1, index=0)
        assert consumer.take(1, 0.2) == []
        # The backoff ends while somebody takes.
        [wanted] = wait_until(lambda: consumer.take(1, 0.1) or producer.requests.retries())
        assert words in wanted.reason


def test_the_example_does_what_it_says() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(root / "examples" / "openenv_episodes.py"), "--quick"],
        capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(
        r"32 episodes, mean score 0\.\d\d, \d+ sampled tokens, 8 asked for again\n", done.stdout
    )


def test_wrong_arguments_are_named() -> None:
    record = EpisodeRecord()
    with pytest.raises(ValueError, match="expected 2 logprobs, one for each sampled token, got 1"):
        record.turn([1], [2, 3], [-1.0])
    with pytest.raises(ValueError, match="expected finite logprobs"):
        record.turn([1], [2], [float("nan")])
    with pytest.raises(TypeError, match=r"expected OpenEnv's StepResult, got SimpleNamespace"):
        record.result(SimpleNamespace(reward=1.0))


def test_the_page_installs_what_the_tests_ran_with() -> None:
    wanted = doc_pages.installs("environments.md", "pip install shmbus openenv")
    given = (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    assert wanted <= set(given), wanted
