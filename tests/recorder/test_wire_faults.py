"""A reset of a connection is a fault of the wire: the call is sent again, the engine stays up."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from recorders import ask, chat, refused, user
from stub_engine import StubEngine

import shmbus
from shmbus.recorder import settings
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]


@pytest.fixture
def session(recorder: Recorder, producer: shmbus.Producer, feeder: shmbus.Feeder) -> shmbus.Session:
    feeder.request("q", group_size=1)
    return producer.session(producer.requests.next(30.0))


def states(recorder: Recorder) -> list[tuple[str, int]]:
    return [(engine.state, engine.failures) for engine in recorder.engines.all]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reset_of_a_reused_connection_costs_a_retry_and_marks_no_engine_down(
    stream: bool, start_engine: Any, start_recorder: Any, producer: shmbus.Producer,
    feeder: shmbus.Feeder, consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    first, second = start_engine(), start_engine()
    recorder = start_recorder(first, second)
    feeder.request("q", group_size=1)
    session = producer.session(producer.requests.next(30.0))
    chat(session, [user("one")])
    first.faults = ["die"]
    body = {"model": "m", "messages": [user("two")], "stream": stream}
    request = urllib.request.Request(
        f"{session.base_url}/chat/completions", json.dumps(body).encode(),
        {"Authorization": f"Bearer {session.api_key}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert stream == (b"[DONE]" in answer.read())
    assert (first.calls, second.calls) == (3, 0)
    assert states(recorder) == [("up", 0), ("up", 0)]
    assert session.finish(1.0)
    (group,) = consumer.take(1, timeout=30.0)
    assert group[0].meta["turns"] == 2


def test_completions_are_asked_again_too(
    session: shmbus.Session, engine: StubEngine, recorder: Recorder
) -> None:
    chat(session, [user("one")])
    engine.faults = ["die"]
    body = {"model": "m", "prompt": "x"}
    assert ask(f"{session.base_url}/completions", body, session.api_key)[0] == 200
    assert states(recorder) == [("up", 0)]


def test_a_second_reset_is_the_engines(
    start_recorder: Any, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder
) -> None:
    recorder = start_recorder(engine)
    feeder.request("q", group_size=1)
    session = producer.session(producer.requests.next(30.0))
    chat(session, [user("one")])
    engine.faults = ["die"] * 8
    body = {"model": "m", "messages": [user("two")]}
    assert refused(ask(f"{session.base_url}/chat/completions", body, session.api_key)) == (
        503,
        "engine",
    )
    assert recorder.engines.all[0].failures > 0


def test_a_pooled_connection_ends_before_its_server_closes_it(recorder: Recorder) -> None:
    uvicorn_s = 5.0
    assert uvicorn_s > settings.POOLED_S
    client = recorder.engines._client
    assert client is not None and client.connector is not None
    assert client.connector._keepalive_timeout == settings.POOLED_S
