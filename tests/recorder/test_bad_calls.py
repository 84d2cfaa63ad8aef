"""Mistakes of clients, harnesses and engines: a status with a remedy, nothing trained."""

import asyncio
import json
import socket
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from conftest import wait_until
from recorders import CALL, Scene, ask, call, chat, posted, refused, user
from stub_engine import StubEngine

import shmbus
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]


def asked_again(scene: Scene) -> shmbus.Request:
    """Return the failed sample, asked for again; nothing of the failure was put."""

    def look() -> shmbus.Request | None:
        assert not scene.consumer.take(1, timeout=0.02)
        return scene.producer.requests.next(0)

    return wait_until(look)


def failed_alone(session: shmbus.Session, scene: Scene) -> str:
    """Check that the sample fails by name and is asked for again; returns why."""
    assert not session.finish(1.0)
    again = asked_again(scene)
    assert (again.instance_id, again.index, again.attempt) == ("q", 0, 1)
    assert again.reason == session.why != ""
    return again.reason


def broken_stream(session: shmbus.Session, body: dict[str, Any], path: str) -> None:
    """Check a call's end: 404, or an error in a begun stream."""
    try:
        with posted(session, body, path) as answer:
            last = answer.read().decode().split("\n\n")[-2]
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == 404
    else:
        assert json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("key", [None, "sk-shmbus-another", "", "é"])
def test_a_key_of_no_session_is_401(key: str | None, recorder: Recorder) -> None:
    headers = {} if key is None else {"x-api-key": key}
    answer = ask(f"{recorder.url}/v1/chat/completions", CALL, None, **headers)
    assert refused(answer) == (401, "unknown_session")
    assert "producer.session" in answer[1]["error"]["message"]


def test_a_call_after_the_end_is_404(session: shmbus.Session, consumer: shmbus.Consumer) -> None:
    chat(session, [user("hello")])
    assert session.finish(1.0)
    wait_until(lambda: call(session)[0] == 404)
    assert refused(call(session)) == (404, "scored")


def test_only_the_first_score_counts(session: shmbus.Session, scene: Scene) -> None:
    chat(session, [user("hello")])
    assert session.finish(1.0)
    with pytest.raises(RuntimeError, match="ended already"):
        session.finish(0.5)
    assert [sample.score for sample in scene.taken()] == [1.0]


@pytest.mark.parametrize("score", ["1", [1.0], np.ones(2)])
def test_a_score_of_another_type_is_named_and_the_session_goes_on(
    score: Any, session: shmbus.Session, scene: Scene
) -> None:
    call(session)
    with pytest.raises(TypeError, match=r"score: expected a float, got (str|list|numpy)"):
        session.finish(score)
    assert session.finish(1.0)
    assert scene.taken()[0].score == 1.0


def test_a_session_without_a_sampled_token_fails(session: shmbus.Session, scene: Scene) -> None:
    assert "no sampled token" in failed_alone(session, scene)


def test_a_block_without_a_score_fails_the_sample(session: shmbus.Session, scene: Scene) -> None:
    with session:
        chat(session, [user("hello")])
    assert "without a score" in asked_again(scene).reason


def test_an_agents_exception_fails_and_goes_on(session: shmbus.Session, scene: Scene) -> None:
    with pytest.raises(LookupError), session:
        raise LookupError("the tool has gone")
    assert asked_again(scene).reason == "LookupError: the tool has gone"


def test_an_interrupted_agent_gives_the_sample_back(session: shmbus.Session, scene: Scene) -> None:
    with pytest.raises(KeyboardInterrupt), session:
        raise KeyboardInterrupt
    with shmbus.Producer(scene.bus.name) as other:
        assert other.requests.next(30.0).attempt == 0


def test_an_agent_whose_session_is_over_ends(session: shmbus.Session, scene: Scene) -> None:
    import openai

    scene.engine.faults = ["nan"]
    with session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        raise AssertionError("the call must raise")
    assert "logprob" in asked_again(scene).reason
    assert scene.engine.calls == 1, "its client tried again"


def test_a_group_complete_without_a_session_ends_it_and_frees_the_engine(scene: Scene) -> None:
    session = scene.open(group_size=2, need=1, round=0)
    scene.engine.gate = asyncio.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, session)
        wait_until(lambda: scene.engine.calls)
        fields = {"tokens": [1], "logprobs": [-1.0], "loss_mask": [1]}
        scene.producer.requests.answer(scene.producer.requests.next(30.0), score=1.0, **fields)
        (group,) = scene.consumer.take(1, timeout=30.0)
        group.ack()
        assert refused(waiting.result(60)) == (404, "unwanted")
    wait_until(lambda: scene.engine.aborted)
    assert not session.finish(1.0)
    assert "unwanted" in repr(session)


def test_a_session_that_would_be_too_stale_ends(scene: Scene) -> None:
    scene.start_recorder(scene.engine, max_lag=2)
    session = scene.open()
    chat(session, [user("hello")])
    scene.consumer.policy_version = 2
    chat(session, [user("hello")])
    scene.consumer.policy_version = 3
    assert refused(call(session)) == (404, "stale")
    assert "version 0" in failed_alone(session, scene)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"[1]", 400, "invalid_json"),
        ({**CALL, "use_beam_search": True}, 400, "not_sampled"),
        ({**CALL, "echo": True}, 400, "not_sampled"),
    ],
)
def test_an_odd_body_is_400(body: Any, status: int, code: str, session: shmbus.Session) -> None:
    assert refused(call(session, body)) == (status, code)
    chat(session, [user("hello")])


def test_a_body_beyond_the_memory_is_413_and_beside_other_sessions_503(scene: Scene) -> None:
    recorder = scene.start_recorder(scene.engine, memory=24 << 10)
    session = scene.open()
    answer = call(session, {**CALL, "pad": "x" * 5000})
    assert refused(answer) == (413, "body_limit") and "--memory" in str(answer[1])
    scene.feeder.request("other", group_size=1, prompt=[1])
    _, other = ask(f"{recorder.url}/sessions", {"timeout": 30})
    asked, key = f"{recorder.url}/v1/responses", other["api_key"]
    assert ask(asked, {"model": "m", "input": "x" * 3000}, key)[0] == 200
    while ask(asked, {"model": "m", "input": "x"}, key)[0] == 200:
        pass
    assert refused(ask(asked, {"model": "m", "input": "x"}, key)) == (413, "body_limit")
    assert refused(call(session, {**CALL, "pad": "x" * 3000})) == (503, "memory")
    assert ask(f"{recorder.url}/session/score", {"score": 1.0}, key)[0] == 200
    wait_until(lambda: len(recorder.sessions) == 1)
    chat(session, [user("hello")])
    session.release()
    wait_until(lambda: recorder.sessions.nbytes == recorder.body_bytes == 0)


@pytest.mark.parametrize(("limit", "calls"), [({"calls": 2}, 2), ({"tokens": 10}, 1)])
def test_a_sessions_calls_are_bounded(limit: dict[str, int], calls: int, scene: Scene) -> None:
    scene.start_recorder(scene.engine, **limit)
    session = scene.open()
    for _ in range(calls):
        chat(session, [user("hello, long enough")])
    assert refused(call(session)) == (400, "session_limit")
    assert session.finish(1.0)


def test_sessions_at_once_are_bounded(scene: Scene) -> None:
    scene.start_recorder(scene.engine, sessions=1)
    scene.feeder.request("q", group_size=2)
    first = scene.producer.session(scene.producer.requests.next(30.0))
    with pytest.raises(shmbus.RecorderUnavailableError, match="429"):
        scene.producer.session(scene.producer.requests.next(30.0))
    first.release()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chats", [False, True])
@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("no_ids", "token ids"),
        ("no_logprobs", "logprobs"),
        ("fewer_logprobs", "logprobs"),
        ("nan", "logprob"),
        ("missing", "logprob"),
        ("usage", "sampled"),
        ("no_utf8", "JSON"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_fails_its_sample_by_name(
    fault: str, word: str, chats: bool, stream: bool, session: shmbus.Session, scene: Scene
) -> None:
    scene.engine.script = ["some words"]
    scene.engine.faults = [fault]
    path = "chat/completions" if chats else "completions"
    body = {**CALL, "stream": stream} if chats else {"model": "m", "prompt": "x", "stream": stream}
    broken_stream(session, body, path)
    assert word in failed_alone(session, scene)
    assert refused(call(session))[0] == 404


def test_a_tool_call_without_its_id_fails(session: shmbus.Session, scene: Scene) -> None:
    scene.engine.script, scene.engine.faults = ['{look {"at": 1}}'], ["no_tool_id"]
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"model": "m", "max_tokens": 64, "messages": [user("x")], "tools": [tool]}
    assert refused(call(session, body, "messages")) == (404, "bad_answer")
    assert "id" in failed_alone(session, scene)


@pytest.mark.parametrize("chats", [False, True])
def test_logprobs_of_other_tokens_fail(chats: bool, session: shmbus.Session, scene: Scene) -> None:
    scene.engine.script = ["abc"]
    scene.engine.faults = ["swapped"]
    body = CALL if chats else {"model": "m", "prompt": "x"}
    assert call(session, body, "chat/completions" if chats else "completions")[0] == 404
    assert "token_id:" in failed_alone(session, scene)


def test_tokens_after_the_end_of_a_stream_fail(session: shmbus.Session, scene: Scene) -> None:
    scene.engine.script, scene.engine.faults = ["abc"], ["late"]
    broken_stream(session, {**CALL, "stream": True}, "chat/completions")
    assert "after its finish_reason" in failed_alone(session, scene)


@pytest.mark.parametrize("fault", ["die_mid", "abort"])
def test_a_dying_engine_returns_samples(fault: str, session: shmbus.Session, scene: Scene) -> None:
    scene.engine.script, scene.engine.faults = ["some words"], [fault]
    scene.engine.token_s = 0.02  # a first part went out before
    broken_stream(session, {**CALL, "stream": True}, "chat/completions")
    assert refused(call(session)) == (404, "engine")
    assert not session.finish(1.0)
    assert "released" in repr(session)
    with shmbus.Producer(scene.bus.name) as other:
        assert other.requests.next(30.0).attempt == 0


def test_a_client_hears_an_engines_refusal(session: shmbus.Session, engine: StubEngine) -> None:
    engine.faults = ["refuse"]
    assert call(session) == (400, {"error": {"message": "too long"}})
    chat(session, [user("shorter")])


def test_a_hang_up_in_mid_stream_records_nothing(session: shmbus.Session, scene: Scene) -> None:
    scene.engine.token_s = 0.05
    scene.engine.script = ["a" * 1000]
    parts = urlsplit(session.base_url)
    body = b'{"model": "m", "stream": true, "max_tokens": 1000, "messages": []}'
    with socket.create_connection((parts.hostname, parts.port)) as raw:
        raw.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
            f"{session.api_key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert b"200 OK" in raw.recv(1000)
    wait_until(lambda: scene.engine.aborted)
    scene.engine.token_s = 0.0
    chat(session, [user("hello")])
    assert session.finish(1.0)
    assert scene.taken()[0].meta["turns"] == 1
