"""Whoever dies, the sample is asked for again, once; nothing half-recorded is trained."""

import os
import signal as signals
from typing import Any

import pytest
from conftest import Spawner, wait_until
from recorders import CALL, ask, chat, user
from stub_engine import StubEngine

import shmbus
from shmbus.segment.recorder_files import read_recorders

pytest_plugins = ["recorder_fixtures"]

WORKER = """
import sys, shmbus
producer = shmbus.Producer(sys.argv[1])
session = producer.session(producer.requests.next(30.0))
print(session.base_url, session.api_key, flush=True)
sys.stdin.read() if sys.argv[2:] else __import__("time").sleep(600)
"""
PROXY = """
import sys
from shmbus.cli import main
sys.exit(main(["proxy", sys.argv[1], "--engine", sys.argv[2], "--http", "127.0.0.1:0"]))
"""


@pytest.fixture
def proxy(spawn: Spawner, bus: shmbus.Bus, engine: StubEngine) -> Any:
    child = spawn.script(PROXY, bus.name, engine.url)
    wait_until(lambda: read_recorders(bus.name))
    return child


def test_killed_recorders_release(
    proxy: Any, engine: StubEngine, bus: shmbus.Bus, producer: shmbus.Producer,
    feeder: shmbus.Feeder,
) -> None:  # fmt: skip
    feeder.request("q", group_size=1)
    with producer.session(producer.requests.next(30.0)) as session:
        chat(session, [user("hello")])
        proxy.kill()
        assert not session.finish(1.0)
    assert "recorder has gone" in session.why
    assert not read_recorders(bus.name)
    with shmbus.Producer(bus.name) as other:
        assert other.requests.next(30.0).attempt == 0


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_an_agents_exception_while_its_recorder_says_nothing_goes_on_and_releases_the_sample(
    proxy: Any, bus: shmbus.Bus, producer: shmbus.Producer, feeder: shmbus.Feeder,
    monkeypatch: pytest.MonkeyPatch, signal: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("shmbus.handles.session._ANSWER_S", 0.3)
    feeder.request("q", group_size=1)
    with (
        pytest.raises(LookupError, match="of the agent"),
        producer.session(producer.requests.next(30.0)) as session,
    ):
        chat(session, [user("hello")])
        os.kill(proxy.pid, getattr(signals, signal))
        raise LookupError("of the agent")
    assert "released" in repr(session)
    with shmbus.Producer(bus.name) as other:
        assert other.requests.next(30.0).attempt == 0
    if signal == "SIGSTOP":
        os.kill(proxy.pid, signals.SIGCONT)


STATUS_ONLY = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = sys.argv[2].encode()
        self.send_response(int(sys.argv[1]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [(500, "{}", "released"), (502, "<html>", "released"), (401, "{}", "released"),
     (200, "not JSON", "released"), (200, "{}", "failed")],
)  # fmt: skip
def test_only_a_404_says_that_a_session_is_over(
    proxy: Any, spawn: Spawner, producer: shmbus.Producer, feeder: shmbus.Feeder,
    status: int, body: str, end: str,
) -> None:  # fmt: skip
    feeder.request("q", group_size=1)
    server = spawn.script(STATUS_ONLY, status, body)
    wait_until(lambda: server.output().strip())
    with pytest.raises(LookupError), producer.session(producer.requests.next(30.0)) as session:
        session._url = f"http://127.0.0.1:{server.output().strip()}"
        raise LookupError
    assert end in repr(session)


def test_another_server_in_place_of_a_recorder_is_named(
    proxy: Any, spawn: Spawner, producer: shmbus.Producer, feeder: shmbus.Feeder
) -> None:
    feeder.request("q", group_size=1)
    server = spawn.script(STATUS_ONLY, 200, "{}")
    url = f"http://127.0.0.1:{wait_until(lambda: server.output().strip())}"
    with pytest.raises(shmbus.RecorderUnavailableError, match=f"{url}: its answer cannot be read"):
        producer.session(producer.requests.next(30.0), url=url, wait=0.0)
    with producer.session(producer.requests.next(30.0)) as session:
        session._url = url
        assert not session.finish(1.0)
    assert "released" in repr(session) and "cannot be read" in session.why


def test_a_killed_one_returns_samples(proxy: Any, bus: shmbus.Bus, feeder: shmbus.Feeder) -> None:
    (note,) = read_recorders(bus.name)
    feeder.request("q", group_size=1)
    assert ask(f"{note.url}/sessions", {"timeout": 30})[0] == 200
    proxy.kill()
    with shmbus.Producer(bus.name) as other:
        assert wait_until(lambda: other.requests.next(1.0)).instance_id == "q"


def test_a_worker_that_is_killed_has_its_session_end_and_its_sample_asked_for_again(
    recorder: Any, engine: StubEngine, spawn: Spawner, bus: shmbus.Bus, feeder: shmbus.Feeder
) -> None:
    feeder.request("q", group_size=1)
    worker = spawn.script(WORKER, bus.name)
    wait_until(lambda: "sk-shmbus" in worker.output())
    url, key = worker.output().split()
    assert ask(f"{url}/chat/completions", CALL, key)[0] == 200
    worker.kill()
    wait_until(lambda: not len(recorder.sessions))
    assert ask(f"{url}/chat/completions", CALL, key)[1]["error"]["code"] == "unwanted"
    with shmbus.Producer(bus.name) as other:
        assert other.requests.next(30.0).instance_id == "q"


def test_a_removed_bus_ends_its_recorder(proxy: Any, bus: shmbus.Bus, bus_name: str) -> None:
    shmbus.unlink(bus_name)
    wait_until(lambda: not proxy.running)
    assert proxy.popen.returncode == 1
