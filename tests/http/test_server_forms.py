"""One table of requests for every server of this package: the gateway, the recorder, the page."""

import gzip
import json
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from conftest import RUN_PREFIX, wait_until
from http_answers import Answer, more, read_answer
from http_requests import request_bytes, reset, scored
from multidict import CIMultiDict
from threaded_server import in_thread

import shmbus
from shmbus.gateway.atropos_routes import serving as gateway_serving
from shmbus.gateway.settings import Settings as GatewaySettings
from shmbus.http import bodies
from shmbus.http.access import is_loopback
from shmbus.http.app import App
from shmbus.recorder.server import serving as recorder_serving
from shmbus.recorder.settings import Settings as RecorderSettings
from shmbus.web.server import serving as page_serving
from shmbus.web.settings import Settings as PageSettings

LIMIT = 64 << 10
TOKEN = "a-token-of-letters-and-digits"
EVIL = "http://evil.example"
LEAVE = [reset, socket.socket.close]


class Server(NamedTuple):
    """A running server, a path to read, a path for a body with its content, and its status."""

    name: str
    url: str
    reads: str
    posts: str
    content: bytes
    accepted: int
    #: Bytes that bodies hold, and bodies that were taken.
    held: Callable[[], int]
    taken: Callable[[], int] = int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def head(self, **more: str) -> dict[str, str]:
        """Return headers with the token; an empty value leaves a header out."""
        token = {"Authorization": f"Bearer {TOKEN}"}
        if self.name == "page":
            token = {"Cookie": f"shmbus-{self.port}={TOKEN}"}
        return {"Host": f"127.0.0.1:{self.port}", **token, **more}

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, method: str, path: str, content: Any = None, **headers: str) -> Answer:
        with self.connect() as connection:
            connection.sendall(request_bytes(method, path, content, **self.head(**headers)))
            return read_answer(connection, has_body=method != "HEAD")


@contextmanager
def running(name: str, bus: str) -> Iterator[Server]:
    serve: dict[str, Callable[[], Any]] = {
        "gateway": lambda: gateway_serving(
            GatewaySettings(bus=bus, port=0, token=TOKEN, body_limit=LIMIT, memory=4 * LIMIT)
        ),
        "recorder": lambda: recorder_serving(
            RecorderSettings(
                bus=bus, port=0, engines=("http://127.0.0.1:9",), token=TOKEN, body_limit=LIMIT
            )
        ),
        "page": lambda: page_serving(
            PageSettings(buses=(bus,), host="127.0.0.1", port=0, token=TOKEN)
        ),
    }
    with shmbus.Bus.create(bus, "4MiB"), in_thread(serve[name]) as service:
        made = {
            "gateway": lambda: Server(
                name, service.url, "/info", "/scored_data",
                json.dumps(scored([1, 2], [3, 4])).encode(), 200, lambda: service.bodies.used,
                lambda: service.puts.producer.stats().committed,
            ),
            "recorder": lambda: Server(
                name, service.url, "/metrics", "/sessions", b'{"timeout": 0, "pad": "0123456789"}',
                204, lambda: service.body_bytes,
            ),
            "page": lambda: Server(name, service.url, "/page.js", "/", b"x" * 100, 413, int),
        }  # fmt: skip
        yield made[name]()
    Path(f"/dev/shm/shmbus-gateway.{bus}").unlink(missing_ok=True)


SERVERS = ("gateway", "recorder", "page")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running(name, f"{RUN_PREFIX}forms-{name}"))
            for name in SERVERS
        }


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    return servers[request.param]


@pytest.fixture(params=SERVERS[:2])
def taker(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    return servers[request.param]


# -- requests


class Form(NamedTuple):
    """Send a request to the read path, or `path`; return its status by server."""

    status: int | dict[str, int]
    method: str = "GET"
    path: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012  (never changed)
    #: Bytes of "@".
    raw: bytes = b"@"


FOREIGN = {"gateway": 403, "recorder": 403, "page": 421}
REQUESTS = {
    "read": Form(200),
    "head": Form(200, "HEAD"),
    "query": Form(200, path="?x=1"),
    "unknown path": Form(404, path="/nothing"),
    "a path above": Form(404, path="/../server.py"),
    "wrong method": Form(405, "DELETE"),
    "trace": Form(405, "TRACE"),
    "no token": Form({"gateway": 401, "recorder": 200, "page": 401}, headers={
        "Authorization": "", "Cookie": ""}),
    "another token": Form({"gateway": 401, "recorder": 200, "page": 401}, headers={
        "Authorization": "Bearer x", "Cookie": "shmbus=x"}),
    "another host": Form(FOREIGN, headers={"Host": "evil.example"}),
    "a host that looks local": Form(FOREIGN, headers={"Host": "127.0.0.1.evil.example"}),
    "a host that is no text": Form(FOREIGN, headers={"Host": "@"}, raw=b"\x80\xff"),
    "an origin that is no text": Form({"gateway": 200, "recorder": 200, "page": 403},
        headers={"Origin": "@"}, raw=b"\x80\xff"),
    "a page of another site reads": Form({"gateway": 200, "recorder": 200, "page": 403},
        headers={"Origin": EVIL}),
    "a browser of another site reads": Form({"gateway": 200, "recorder": 200, "page": 403},
        headers={"Sec_Fetch_Site": "cross-site"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_its_status_on_every_server(name: str, server: Server) -> None:
    form = REQUESTS[name]
    path = form.path if form.path.startswith("/") else server.reads + form.path
    data = request_bytes(form.method, path, **server.head(**form.headers))
    with server.connect() as connection:
        connection.sendall(data.replace(b"@", form.raw))
        answer = read_answer(connection, has_body=form.method != "HEAD")
    status = form.status if isinstance(form.status, int) else form.status[server.name]
    assert answer.status == status, answer
    assert TOKEN.encode() not in answer.body and b"Traceback" not in answer.body
    assert re.fullmatch(r"shmbus/[\d.]+", answer.headers["server"])
    if status == 405:
        assert "GET" in answer.headers["allow"]
    if status == 401 and server.name != "page":
        assert answer.headers["www-authenticate"] == "Bearer"
    # No page of another site may read the answer.
    assert "access-control-allow-origin" not in answer.headers
    assert server.ask("GET", server.reads).status == 200


def test_a_head_has_the_headers_of_its_get(server: Server) -> None:
    got, head = (server.ask(method, server.reads).headers for method in ("GET", "HEAD"))
    assert head["content-type"] == got["content-type"]
    if server.name != "recorder":  # counts its own requests
        assert head["content-length"] == got["content-length"]


@pytest.mark.parametrize("headers", [{"Origin": EVIL}, {"Sec_Fetch_Site": "cross-site"}])
def test_a_page_of_another_site_may_not_post(headers: dict[str, str], taker: Server) -> None:
    assert taker.ask("POST", taker.posts, taker.content, **headers).status == 403


def test_names_of_this_machine_may_ask_through_a_tunnel(server: Server) -> None:
    for host in ("localhost:9000", "[::1]:9000", "127.0.0.1:9000"):
        assert server.ask("GET", server.reads, Host=host, Origin=f"http://{host}").status == 200


# -- bodies


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def in_chunks(data: bytes, size: int) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in [*parts, b""])


def damaged(data: bytes) -> bytes:
    packed = gzip.compress(data)
    return packed[:20] + bytes([packed[20] ^ 0xFF]) + packed[21:]


class Body(NamedTuple):
    """A body made of content, and its status; 0 if accepted."""

    status: int
    made: Callable[[bytes], bytes] = bytes
    headers: dict[str, str] = {}  # noqa: RUF012  (never changed)


def encoded(name: str) -> dict[str, str]:
    return {"Content_Encoding": name}


GZIP = encoded("gzip")
CHUNKED = {"Content_Length": "", "Transfer_Encoding": "chunked"}
BOMB = gzip.compress(bytes(40 * LIMIT))
BODIES = {
    "plain": Body(0),
    "charset": Body(0, headers={"Content_Type": "application/json; charset=utf-8"}),
    "identity": Body(0, headers=encoded("identity")),
    "gzip": Body(0, gzip.compress, GZIP),
    "x-gzip": Body(0, gzip.compress, encoded("X-GZIP")),
    "gzip in members": Body(0, lambda c: gzip.compress(c[:9]) + gzip.compress(c[9:]), GZIP),
    "deflate": Body(0, zlib.compress, encoded("deflate")),
    "raw deflate": Body(0, raw_deflate, encoded("deflate")),
    "chunks": Body(0, lambda c: in_chunks(c, 5), CHUNKED),
    "gzip in chunks": Body(0, lambda c: in_chunks(gzip.compress(c), 7), GZIP | CHUNKED),
    "brotli": Body(415, bytes, encoded("br")),
    "zstd": Body(415, bytes, encoded("zstd")),
    "gzip twice": Body(415, gzip.compress, encoded("gzip, gzip")),
    "gzip in two lines": Body(415, gzip.compress, encoded("gzip\r\nContent-Encoding: gzip")),
    "no text": Body(415, bytes, encoded("\x80\xff")),
    "no gzip": Body(400, bytes, GZIP),
    "half a gzip": Body(400, lambda c: gzip.compress(c)[:-9], GZIP),
    "damaged gzip": Body(400, damaged, GZIP),
    "bytes behind gzip": Body(400, lambda c: gzip.compress(c) + b"more", GZIP),
    "half a deflate": Body(400, lambda c: zlib.compress(c)[:-5], encoded("deflate")),
    "bytes behind deflate": Body(400, lambda c: zlib.compress(c) + b"x", encoded("deflate")),
    "a bomb": Body(413, lambda c: BOMB, GZIP),
    "a bomb that lies": Body(413, lambda c: BOMB[:-4] + bytes(4), GZIP),
    "a large length": Body(413, lambda c: b"", {"Content_Length": str(1 << 40)}),
    "large": Body(413, lambda c: c + b" " * LIMIT),
    "large in chunks": Body(413, lambda c: in_chunks(c + b" " * LIMIT, 1 << 14), CHUNKED),
    "an expectation": Body(417, bytes, {"Expect": "200-maybe"}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_taken_or_refused_by_its_form_on_every_server(name: str, taker: Server) -> None:
    form = BODIES[name]
    data = request_bytes(
        "POST", taker.posts, form.made(taker.content), **taker.head(**form.headers)
    )
    with taker.connect() as connection:
        connection.sendall(data)
        answer = read_answer(connection)
        assert answer.status == (form.status or taker.accepted), answer
        if form.status:
            # The rest of the body is no next request.
            assert connection.recv(1) == b""
    wait_until(lambda: taker.held() == 0)
    assert taker.ask("POST", taker.posts, taker.content).status == taker.accepted


def test_the_page_takes_no_body(servers: dict[str, Server]) -> None:
    page = servers["page"]
    assert page.ask("GET", page.posts, page.content).status == 413


def test_a_client_that_waits_for_leave_to_send_its_body_gets_leave(taker: Server) -> None:
    request = request_bytes("POST", taker.posts, taker.content, **taker.head(Expect="100-continue"))
    head, _, body = request.partition(b"\r\n\r\n")
    with taker.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert more(connection) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_answer(connection).status == taker.accepted


@pytest.mark.parametrize("leave", LEAVE)
def test_a_body_that_ends_early_is_not_taken_and_holds_nothing(
    leave: Callable[[socket.socket], None], taker: Server
) -> None:
    before = taker.taken()
    whole = request_bytes("POST", taker.posts, taker.content, **taker.head())
    chunks = request_bytes(
        "POST", taker.posts, in_chunks(taker.content, 9)[:-5], **taker.head(**CHUNKED)
    )
    for data in (whole[:-1], whole[: whole.index(b"\r\n\r\n") + 4], whole[:30], chunks):
        connection = taker.connect()
        connection.sendall(data)
        time.sleep(0.02)
        leave(connection)
    wait_until(lambda: taker.held() == 0)
    assert taker.taken() == before
    assert taker.ask("POST", taker.posts, taker.content).status == taker.accepted


def test_a_body_that_does_not_come_is_refused_by_its_deadline(
    taker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.05)
    data = request_bytes("POST", taker.posts, taker.content, **taker.head())
    with taker.connect() as connection:
        connection.sendall(data[:-1])
        assert read_answer(connection).status == 408
    wait_until(lambda: taker.held() == 0)


@pytest.mark.parametrize(
    ("looks", "ended"),
    [
        # Seconds and bytes since the last look, and waiting bodies.
        ([(1, 0, True), (1, 0, True)], True),
        ([(1, 0, True), (1, 1, True), (1, 0, True)], False),
        ([(1, 0, False), (1, 0, False), (1, 0, True)], False),
        ([(1, 0, True), (3, 0, True), (1, 0, True)], False),
        ([(1, 0, True), (3, 0, True), (1, 0, True), (1, 0, True)], True),
        ([(1, 0, False)] * 99, True),
    ],
    ids=["stalled", "came", "alone", "own delay", "still stalled", "deadline"],
)
def test_a_body_ends_by_its_deadline_or_a_stall_while_others_wait(
    looks: list[tuple[float, int, bool]], ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = SimpleNamespace(now_s=0.0, time=lambda: loop.now_s, call_at=lambda *_: None)
    monkeypatch.setattr(bodies.asyncio, "get_running_loop", lambda: loop)
    errors: list[Exception] = []
    content = SimpleNamespace(total_bytes=0, set_exception=errors.append)
    request: Any = SimpleNamespace(content=content, content_length=1, headers=CIMultiDict())
    reader = bodies.BodyReader(request, LIMIT)
    others_wait: list[bool] = []
    reader.begin(lambda: others_wait[-1])
    for since_s, count, is_crowded in looks:
        others_wait.append(is_crowded)
        loop.now_s += since_s * bodies.LOOK_S
        content.total_bytes += count * int(bodies.SLOWEST_BYTES_PER_S * bodies.LOOK_S)
        reader.look()
    assert bool(errors) == ended


# -- the wire


JUNK = [
    b"\x00" * 100 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("junk", JUNK, ids=["zeros", "half a line", "TLS", "two", "both"])
@pytest.mark.parametrize("before", [0, 1])
def test_bytes_that_are_no_http_end_their_connection(
    before: int, junk: bytes, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    like = server.ask("GET", "/nothing")
    with server.connect() as connection:
        for _ in range(before):
            connection.sendall(request_bytes("GET", server.reads, **server.head()))
            assert read_answer(connection).status == 200
        connection.sendall(junk)
        answer = read_answer(connection)
        assert connection.recv(1) == b""
    assert answer.status == 400 and b"expected a request of HTTP/1.1" in answer.body
    assert all(answer.headers[name] == like.headers[name] for name in ("server", "content-type"))
    assert not [record for record in caplog.records if record.exc_info]
    assert server.ask("GET", server.reads).status == 200


@pytest.mark.parametrize("line", ["X: " + "x" * 1000, "X-{}: y\r\n"])
def test_headers_without_end_cost_one_connection(line: str, server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        # Refused, or closed during the transfer.
        with pytest.raises(OSError):
            for number in range(100_000):
                connection.sendall((line.format(number) * 10).encode())
            read_answer(connection)
    assert server.ask("GET", server.reads).status == 200


def test_requests_over_one_connection_are_answered_in_their_order(server: Server) -> None:
    paths = [server.reads, f"{server.reads}?x=1", "/nothing"]
    with server.connect() as connection:
        connection.sendall(b"".join(request_bytes("HEAD", path, **server.head()) for path in paths))
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"200", b"404"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.8.8:80", True), ("localhost", True), ("localhost:1", True),
        ("::1", True), ("[::1]", True), ("[::1]:80", True), ("0.0.0.0", False), ("::", False),
        ("evil.example", False), ("localhost.evil.example", False), ("", False), ("[", False),
    ],
)  # fmt: skip
def test_loopback_is_told_by_address_name_and_host_header(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_a_mistake_is_a_500_without_its_text(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("a secret")

    monkeypatch.setattr(App, "_unrouted", fails)
    answer = server.ask("GET", "/nothing")
    assert answer.status == 500 and b"secret" not in answer.body
    assert "LookupError: a secret" in caplog.text
    monkeypatch.undo()
    assert server.ask("GET", server.reads).status == 200
