"""What real clients send: accepted, or refused by a name and a status."""

import json
import socket
from typing import Any, NamedTuple

import msgspec
import pytest
from conftest import wait_until
from recorders import CALL, Scene, ask, call, refused, sent
from stub_engine import StubEngine

import shmbus
from shmbus.base.format import printable
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]

JSON = json.dumps(CALL).encode()
KIB = 1 << 10


class Form(NamedTuple):
    body: bytes = JSON
    headers: tuple[str, ...] = ()
    code: str = ""


def with_field(text: bytes) -> bytes:
    return JSON[:-1] + b', "x": ' + text + b"}"


FORMS = {
    "no content type": (200, Form()),
    "a form's content type": (
        200, Form(JSON, ("Content-Type: application/x-www-form-urlencoded",)),
    ),
    "text": (200, Form(JSON, ("Content-Type: text/plain; charset=latin-1",))),
    "another model": (200, Form(JSON.replace(b'"m"', b'"small-and-fast"'))),
    "no UTF-8 in a key": (400, Form(JSON.replace(b"model", b"mod\xff"), (), "invalid_json")),
    "no UTF-8 in a text": (400, Form(JSON.replace(b"hello", b"h\xe9llo"), (), "invalid_json")),
    "UTF-16": (400, Form(json.dumps(CALL).encode("utf-16"), (), "invalid_json")),
    "half a surrogate": (400, Form(with_field(b'"\\ud800"'), (), "invalid_json")),
    "a form": (
        400, Form(b"model=m", ("Content-Type: application/x-www-form-urlencoded",), "invalid_json"),
    ),
    "NaN": (400, Form(with_field(b"NaN"), (), "invalid_json")),
    "a number of 400 digits": (200, Form(with_field(b"1" + b"0" * 400))),
    "an exponent of 400": (400, Form(with_field(b"1e400"), (), "invalid_json")),
    "deep": (400, Form(with_field(b"[" * 5000 + b"]" * 5000), (), "invalid_json")),
    "nothing": (400, Form(b"", (), "invalid_json")),
}  # fmt: skip


@pytest.fixture
def recorder(start_recorder: Any, engine: StubEngine) -> Recorder:
    found: Recorder = start_recorder(engine, body_limit=64 * KIB)
    return found


def answer_of(raw: socket.socket) -> tuple[int, bytes]:
    """Read an answer whose connection its server closes, or which has a length."""
    found = b""
    while b"\r\n\r\n" not in found:
        data = raw.recv(1 << 16)
        assert data, found
        found += data
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += raw.recv(1 << 16)
    return int(head.split()[1]), body


@pytest.mark.parametrize("name", FORMS)
def test_a_call_is_kept_or_refused(name: str, session: shmbus.Session, recorder: Recorder) -> None:
    status, form = FORMS[name]
    with sent(
        f"{session.base_url}/chat/completions", form.body, session.api_key, *form.headers
    ) as raw:
        found, body = answer_of(raw)
    answer = json.loads(body)
    if status == 200:
        assert (found, answer["choices"][0]["finish_reason"]) == (200, "stop")
    else:
        assert refused((found, answer)) == (status, form.code)
    wait_until(lambda: recorder.body_bytes == 0)
    assert call(session)[0] == 200
    session.release()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"1" + b"0" * 400, 400),
        (b"-1" + b"0" * 400, 400),
        (b"1" * 5000, 400),
        (b"1e400", 422),
        (b"NaN", 422),
        (b"-Infinity", 422),
        (b"true", 422),
        (b"null", 422),
        (b'"1"', 422),
        (b"[1]", 422),
        (b"1e308", 422),
        (b"1e38", 200),
        (b"-0.0", 200),
    ],
)
def test_a_score_is_put_or_refused(text: bytes, status: int, scene: Scene) -> None:
    scene.feeder.request("q", group_size=1)
    _, opened = ask(f"{scene.recorder.url}/sessions", {"timeout": 30})
    key = opened["api_key"]
    assert ask(f"{scene.recorder.url}/v1/chat/completions", CALL, key)[0] == 200
    found = ask(f"{scene.recorder.url}/session/score", b'{"score": ' + text + b"}", key)
    assert found[0] == status, found


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/session/score", b'{"score": 1, "meta": {"x": 1%s}}' % (b"0" * 400), 422),
        ("/session/score", b'{"score": 1, "meta": {"x": "\\ud800"}}', 422),
        ("/session/score", b'{"score": 1, "meta": {"x": NaN}}', 200),
        ("/session/score", b'{"score": 1, "meta": %s%s}' % (b'{"x":' * 900, b"1" + b"}" * 900), 0),
        ("/session/score", b'\xff{"score": 1}', 400),
        ("/session/fail", b'{"reason": "\\ud800"}', 200),
        ("/session/fail", b'{"reason": "%s"}' % (b"x" * 9000), 200),
        ("/session/fail", b'{"reason": "a\\nfalse line"}', 200),
        ("/sessions", b'{"timeout": 1%s}' % (b"0" * 400), 0),
        ("/sessions", b'{"timeout": NaN}', 400),
        ("/sessions", b'{"timeout": "1"}', 400),
        ("/sessions", b'{"ticket": {}}', 400),
    ],
)
def test_a_harness_that_sends_anything_is_answered(
    path: str, body: bytes, status: int, caplog: pytest.LogCaptureFixture, scene: Scene
) -> None:
    caplog.set_level("INFO")
    scene.feeder.request("q", group_size=2)
    _, opened = ask(f"{scene.recorder.url}/sessions", {"timeout": 30})
    assert ask(f"{scene.recorder.url}/v1/chat/completions", CALL, opened["api_key"])[0] == 200
    found = ask(scene.recorder.url + path, body, opened["api_key"])
    assert found[0] == status or (not status and found[0] in (200, 422)), found
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    assert caplog.messages == [printable(one) for one in caplog.messages]


def test_a_ticket_of_a_number_that_no_bus_has_is_refused(scene: Scene) -> None:
    scene.feeder.request("q", group_size=1)
    request = scene.producer.requests.next(30.0)
    ticket = msgspec.to_builtins(scene.producer.requests._ticket(request))
    ticket["claim"] = [10**400 for _ in ticket["claim"]]
    assert ask(f"{scene.recorder.url}/sessions", {"ticket": ticket})[0] in (400, 409)
    scene.producer.requests.release(request)


def test_what_is_announced_and_not_sent_takes_no_room(scene: Scene) -> None:
    recorder = scene.start_recorder(scene.engine, memory=256 << 20)
    session = scene.open()
    length = f"Content-Length: {32 << 20}"
    path = {"/sessions": None, "/v1/chat/completions": session.api_key}
    held = [sent(recorder.url + at, b"{", path[at], length) for at in path for _ in range(20)]
    wait_until(lambda: 0 < recorder.body_bytes < 1 << 12)
    assert call(session)[0] == 200
    for raw in held:
        raw.close()
    wait_until(lambda: recorder.body_bytes == 0)
    session.release()


def test_conversations_of_responses_count_once_and_end_with_the_session(scene: Scene) -> None:
    recorder = scene.start_recorder(scene.engine)
    session = scene.open()
    last = None
    for _ in range(3):
        body = {"model": "m", "input": "x" * 100_000, "previous_response_id": last}
        status, answer = call(session, body, "responses")
        assert status == 200
        last = answer["id"]
    (open_session,) = recorder.sessions
    assert 300_000 < open_session.history_bytes < 310_000
    for _ in range(40):
        assert call(session, {"model": "m", "input": "y"}, "responses")[0] == 200
    assert open_session.history_bytes < 32 * 2000
    session.release()
    wait_until(lambda: not len(recorder.sessions))
    assert recorder.sessions.nbytes == 0
