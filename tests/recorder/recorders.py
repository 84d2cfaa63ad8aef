"""What the tests of the recorder share: a client without any library of its own."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from stub_engine import StubEngine

import shmbus
from shmbus.recorder.recorder import Recorder

StartEngine = Callable[..., StubEngine]


@dataclass
class Scene:
    request: pytest.FixtureRequest
    bus: shmbus.Bus
    engine: StubEngine
    start_engine: StartEngine
    start: Callable[..., Recorder]
    producer: shmbus.Producer
    feeder: shmbus.Feeder
    consumer: shmbus.Consumer
    has_recorder: bool = False

    @property
    def recorder(self) -> Recorder:
        self.has_recorder = True
        found: Recorder = self.request.getfixturevalue("recorder")
        return found

    def start_recorder(self, *engines: StubEngine | str, **options: Any) -> Recorder:
        self.has_recorder = True
        return self.start(*engines, **options)

    def open(
        self, instance_id: str | int = "q", url: str | None = None, **request: Any
    ) -> shmbus.Session:
        """Request a sample and open its session, at the fixture's recorder if none runs."""
        assert self.has_recorder or self.recorder
        self.feeder.request(instance_id, **{"group_size": 1, "meta": {"ask": "hello"}, **request})
        return self.producer.session(self.producer.requests.next(30.0), url=url)

    def taken(self) -> list[shmbus.Trajectory]:
        (group,) = self.consumer.take(1, timeout=30.0)
        return list(group)


def ask(
    url: str, body: Any = None, key: str | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"model": "m", "messages": [user("hello")]}


def call(
    session: shmbus.Session, body: Any = CALL, path: str = "chat/completions"
) -> tuple[int, dict[str, Any]]:
    return ask(f"{session.base_url}/{path}", body, session.api_key)


def posted(session: shmbus.Session, body: Any, path: str = "chat/completions") -> Any:
    """Send a call, and return its answer as it comes."""
    data, key = json.dumps(body).encode(), {"Authorization": f"Bearer {session.api_key}"}
    return urllib.request.urlopen(
        urllib.request.Request(f"{session.base_url}/{path}", data, key), timeout=60
    )


def chat(session: shmbus.Session, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    status, answer = call(session, {"model": "m", "messages": messages, **options})
    assert status == 200, answer
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def refused(status_and_body: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    status, body = status_and_body
    return status, body["error"]["code"]


def sent(url: str, body: Any, key: str | None = None, *headers: str) -> socket.socket:
    """Send a POST without reading the answer; `headers` are lines."""
    parts = urlsplit(url)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", *headers]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        lines.append(f"Content-Length: {len(data)}")
    raw = socket.create_connection((parts.hostname, parts.port), timeout=60)
    raw.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return raw
