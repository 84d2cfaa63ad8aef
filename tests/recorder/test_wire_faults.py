"""A reset of a connection is a fault of the wire: the call is sent again, the engine stays up."""

import pytest
from recorders import CALL, Scene, call, chat, posted, refused, user

import shmbus
from shmbus.recorder import settings
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]


def states(recorder: Recorder) -> list[tuple[str, int]]:
    return [(engine.state, engine.failures) for engine in recorder.engines.all]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reset_of_a_reused_connection_costs_a_retry(stream: bool, scene: Scene) -> None:
    first, second = scene.start_engine(), scene.start_engine()
    recorder = scene.start_recorder(first, second)
    session = scene.open()
    chat(session, [user("one")])
    first.faults = ["die"]
    with posted(session, {**CALL, "stream": stream}) as answer:
        assert stream == (b"[DONE]" in answer.read())
    assert (first.calls, second.calls) == (3, 0)
    assert states(recorder) == [("up", 0), ("up", 0)]
    assert session.finish(1.0)
    assert scene.taken()[0].meta["turns"] == 2


def test_completions_are_asked_again_too(session: shmbus.Session, scene: Scene) -> None:
    chat(session, [user("one")])
    scene.engine.faults = ["die"]
    assert call(session, {"model": "m", "prompt": "x"}, "completions")[0] == 200
    assert states(scene.recorder) == [("up", 0)]


def test_a_second_reset_is_the_engines(scene: Scene) -> None:
    recorder = scene.start_recorder(scene.engine)
    session = scene.open()
    chat(session, [user("one")])
    scene.engine.faults = ["die"] * 8
    assert refused(call(session)) == (503, "engine")
    assert recorder.engines.all[0].failures > 0


def test_a_pooled_connection_ends_before_its_server_closes_it(recorder: Recorder) -> None:
    uvicorn_s = 5.0
    assert uvicorn_s > settings.POOLED_S
    client = recorder.engines._client
    assert client is not None and client.connector is not None
    assert client.connector._keepalive_timeout == settings.POOLED_S
