"""Recorded means delivered: what did not reach its client is undone, and is not made twice."""

import asyncio
import socket
from collections.abc import Callable

import numpy as np
import pytest
from aiohttp import web
from conftest import wait_until
from http_requests import reset
from recorders import CALL, Scene, ask, call, chat, refused, sent, user

import shmbus
from shmbus.recorder.recorder import Recorder
from shmbus.recorder.sessions import Session

pytest_plugins = ["recorder_fixtures"]


def only(recorder: Recorder) -> Session:
    (found,) = recorder.sessions
    return found


def trained(scene: Scene) -> list[list[int]]:
    rows = scene.taken()[0].rows
    return [np.asarray(row["tokens"])[row["loss_mask"] == 1].tolist() for row in rows]


def chats(session: shmbus.Session) -> str:
    return f"{session.base_url}/chat/completions"


def read_until(raw: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        data = raw.recv(1 << 16)
        assert data, found
        found += data
    return found


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "close"])
@pytest.mark.parametrize("header", ["X-Nothing: 1", "Connection: close"])
def test_a_session_whose_key_reached_nobody_gives_its_sample_back_at_once(
    leave: Callable[[socket.socket], None], header: str, scene: Scene
) -> None:
    scene.feeder.request("q", group_size=1)
    raw = sent(f"{scene.recorder.url}/sessions", {"timeout": 30}, None, header)
    wait_until(lambda: scene.recorder.sessions.opened)
    raw.recv(1, socket.MSG_PEEK)
    leave(raw)
    wait_until(lambda: scene.recorder.sessions.ended == {"undelivered": 1})
    assert scene.producer.requests.next(30.0).attempt == 0


def test_a_session_whose_key_was_read_stays(recorder: Recorder, feeder: shmbus.Feeder) -> None:
    feeder.request("q", group_size=2)
    raw = sent(f"{recorder.url}/sessions", {"timeout": 30})
    read_until(raw, b"}")
    raw.close()
    ask(f"{recorder.url}/sessions", {"timeout": 30})  # urllib's Connection: close
    wait_until(lambda: len(recorder.sessions) == 2)
    assert not recorder.sessions.ended


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("header", ["X-Nothing: 1", "Connection: close"])
def test_a_retry_is_trained(count: int, header: str, session: shmbus.Session, scene: Scene) -> None:
    chat(session, [user("before")])
    held = scene.recorder.sessions.nbytes
    raw = sent(chats(session), {**CALL, "n": count}, session.api_key, header)
    wait_until(lambda: only(scene.recorder).transcript.turns == 1 + count)
    raw.recv(1, socket.MSG_PEEK)
    reset(raw)
    wait_until(lambda: only(scene.recorder).transcript.turns == 1)
    assert scene.recorder.sessions.nbytes == held
    chat(session, [user("hello")])
    assert session.finish(1.0)
    assert trained(scene) == [
        scene.engine.record[0].output,
        scene.engine.record[-1].output,
    ]


def test_a_whole_answer_cut_in_sending_is_undone(session: shmbus.Session, scene: Scene) -> None:
    scene.engine.script = ["a" * 60_000]
    raw = sent(chats(session), {**CALL, "logprobs": True, "max_tokens": 70_000}, session.api_key)
    read_until(raw, b"logprob")
    reset(raw)
    wait_until(lambda: scene.recorder.sessions.undone == 1)
    chat(session, [user("hello")])
    assert session.finish(1.0)
    assert trained(scene) == [scene.engine.record[-1].output]


def test_a_retry_replaces_a_stream_cut_at_its_end(session: shmbus.Session, scene: Scene) -> None:
    raw = sent(chats(session), {**CALL, "stream": True}, session.api_key)
    wait_until(lambda: only(scene.recorder).answers and not only(scene.recorder).running)
    reset(raw)
    wait_until(lambda: only(scene.recorder).answers[0].is_cut)
    chat(session, [user("hello")])
    chat(session, [user("other")])
    assert session.finish(1.0)
    assert trained(scene) == [one.output for one in scene.engine.record[1:]]


def test_an_answer_read_to_its_end_counts(session: shmbus.Session, scene: Scene) -> None:
    raw = sent(chats(session), {**CALL, "stream": True}, session.api_key)
    read_until(raw, b'"finish_reason":"stop"')
    reset(raw)
    wait_until(lambda: not only(scene.recorder).running)
    assert session.finish(1.0)
    assert trained(scene) == [scene.engine.record[0].output]


def test_a_client_that_closes_behind_the_last_event_has_the_answer(
    session: shmbus.Session, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = web.StreamResponse.write_eof

    async def end_late(response: web.StreamResponse, last: bytes = b"") -> None:
        await asyncio.sleep(0.05)
        await ends(response, last)

    monkeypatch.setattr(web.StreamResponse, "write_eof", end_late)
    for _ in range(2):
        with sent(chats(session), {**CALL, "stream": True}, session.api_key) as raw:
            read_until(raw, b"[DONE]")
            wait_until(lambda: not only(scene.recorder).running)
    assert session.finish(1.0)
    assert trained(scene) == [one.output for one in scene.engine.record]


@pytest.mark.parametrize(("attempt", "turns"), [("0", 2), ("1", 1)])
def test_retries_win(attempt: str, turns: int, session: shmbus.Session, scene: Scene) -> None:
    with sent(chats(session), CALL, session.api_key) as raw:
        wait_until(lambda: only(scene.recorder).answers and not only(scene.recorder).running)
        headers = {"x-stainless-retry-count": attempt}
        assert ask(chats(session), CALL, session.api_key, **headers)[0] == 200
        assert session.finish(1.0)
        raw.recv(1)
    assert trained(scene) == [one.output for one in scene.engine.record[2 - turns :]]


def test_equal_calls_of_a_connection_are_two(session: shmbus.Session, scene: Scene) -> None:
    with sent(chats(session), CALL, session.api_key, "x-stainless-retry-count: 1") as raw:
        read_until(raw, b"usage")
        second = sent(chats(session), CALL, session.api_key)
        read_until(second, b"usage")
        second.close()
        assert session.finish(1.0)
    assert trained(scene) == [one.output for one in scene.engine.record]


def test_an_error_behind_the_last_token_asks_no_second_engine(scene: Scene) -> None:
    first, second = scene.start_engine(), scene.start_engine()
    scene.start_recorder(first, second)
    session = scene.open()
    first.faults = ["error_behind_end"]
    with sent(chats(session), {**CALL, "stream": True}, session.api_key) as raw:
        read_until(raw, b"[DONE]")
    assert (first.calls, second.calls) == (1, 0)
    assert session.finish(1.0)
    assert trained(scene) == [first.record[0].output]


def test_an_unread_response_is_unrecorded(session: shmbus.Session, recorder: Recorder) -> None:
    raw = sent(f"{session.base_url}/responses", {"model": "m", "input": "x"}, session.api_key)
    wait_until(lambda: only(recorder).history)
    raw.recv(1, socket.MSG_PEEK)
    reset(raw)
    wait_until(lambda: not only(recorder).history)
    assert only(recorder).history_bytes == recorder.sessions.nbytes == 0
    missing = {"model": "m", "input": "x", "previous_response_id": "resp_1"}
    assert refused(call(session, missing, "responses")) == (400, "invalid_call")
    session.release()
