"""Who gets what from the page's server, and what bad clients get; raw HTTP to a real process."""

import hashlib
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest
from conftest import wait_until
from http_answers import more, read_answer
from pages import Web

from shmbus import Bus, Producer
from shmbus.base.format import printable
from shmbus.web import settings
from shmbus.web.server import read_files

Start = Callable[..., Web]


@pytest.fixture
def page(web: Start, bus_name: str) -> Web:
    return web(bus_name)


def test_the_token_becomes_a_cookie_and_leaves_the_address(page: Web) -> None:
    answer = page.ask(f"/?token={page.token}", Cookie="")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(page.cookie)
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert page.ask("/").status == 200


STRANGERS: list[tuple[str, dict[str, str], int]] = [
    ("/", {"Cookie": ""}, 401),
    ("/events", {"Cookie": ""}, 401),
    ("/page.js", {"Cookie": "shmbus=x"}, 401),
    ("/?token=wrong", {}, 403),
    ("/?token=%ff%00", {}, 403),
    ("/", {"Host": ""}, 400),
    ("/events", {"Origin": "null"}, 403),
    ("/%2e%2e/server.py", {}, 404),
    ("/static/page.js", {}, 404),
    ("/vendor/LICENSE.htm", {}, 404),
    ("/events?bus=nobody", {}, 404),
    ("/events?bus=../../etc/passwd", {}, 404),
    ("/group?id=q", {"Cookie": ""}, 401),
    ("/group?id=q", {"Origin": "http://evil.example"}, 403),
    ("/group?bus=nobody&id=q", {}, 404),
    ("/group", {}, 400),
    ("/group?id=", {}, 400),
    *((f"/group?id=q&round={word}", {}, 400) for word in ("x", "%2B5", "1_0", "%D9%A3", "%205")),
    (f"/group?id=q&round={'9' * 5000}", {}, 400),
    ("/group?id=q&round=-9223372036854775808", {}, 400),
    (f"/group?id={'x' * 256}", {}, 400),
    (f"/group?id=q&split={'x' * 100}", {}, 400),
]


def test_strangers_are_refused(page: Web) -> None:
    for path, headers, status in STRANGERS:
        answer = page.ask(path, **headers)
        assert answer.status == status, (path, headers)
        assert page.token not in answer.body.decode()


def test_every_answer_has_the_policy(page: Web) -> None:
    for path, headers in (("/", {}), ("/page.js", {}), ("/nothing", {}), ("/", {"Cookie": ""})):
        answer = page.ask(path, **headers)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy and "*" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_thousand_connections_are_bounded_and_others_undisturbed(page: Web) -> None:
    held: list[socket.socket] = []
    try:
        for _ in range(1000):
            held.append(page.connect())
        fds = Path(f"/proc/{page.child.pid}/fd")
        wait_until(
            lambda: len(list(fds.iterdir())) < settings.MAX_CONNECTIONS + 60,
            what="connections beyond the limit to be closed",
        )
        # Silent connections make room for an asking one.
        wait_until(lambda: _answers(page), timeout=settings.IDLE_S + 20, what="an answer")
    finally:
        for each in held:
            each.close()


def _answers(page: Web) -> bool:
    try:
        return page.ask("/").status == 200
    except OSError:
        return False


def test_a_client_that_never_reads_disturbs_no_other(page: Web, bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), page.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(page.request("/events"))
        pictures = page.pictures()
        first = next(pictures)["now"]
        for picture in pictures:
            if picture["now"] - first > 3:
                break
        assert picture["state"] == "unread"


def test_too_many_pages_are_told_so(page: Web) -> None:
    held = []
    try:
        for _ in range(settings.MAX_WATCHING):
            connection = page.connect()
            held.append(connection)
            connection.sendall(page.request("/events"))
            assert b" 200 " in more(connection)
        assert page.ask("/events").status == 503
        assert page.ask("/").status == 200
    finally:
        for each in held:
            each.close()
    wait_until(lambda: _watches(page), what="a place that became free")


def _watches(page: Web) -> bool:
    with page.connect() as connection:
        connection.sendall(page.request("/events"))
        return b" 200 " in more(connection)


def test_the_server_ends_in_order_with_pages_open(page: Web) -> None:
    with page.connect() as connection:
        connection.sendall(page.request("/events"))
        more(connection)
        page.stop()


def test_the_page_is_at_most_150_kb() -> None:
    assert sum(len(body) for _, _, body in read_files().values()) <= 150_000


def test_vendored_files_are_those_on_record() -> None:
    folder = Path(settings.__file__).parent / "static" / "vendor"
    recorded = dict(
        re.findall(r"^\| `(\S+)` .*`([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.M)
    )
    files = [path for path in folder.iterdir() if path.suffix in (".js", ".css")]
    assert recorded == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_page_has_no_way_to_make_markup_of_text() -> None:
    folder = Path(settings.__file__).parent / "static"
    for path in folder.glob("*.js"):
        text = path.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, f"{path.name}: {way}"


def test_the_head_of_what_never_ends_does_end(page: Web) -> None:
    with page.connect() as connection:
        connection.sendall(page.request("/events", "HEAD"))
        assert read_answer(connection, has_body=False).status == 200
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "key", ["a\nb\r\n\tc", "\u202eabc", "\0\x1b[2J" + "\x01" * 240, r"a\nb", "\U000e0001"]
)
def test_a_group_is_found_by_its_id_as_it_is_shown(page: Web, bus_name: str, key: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        producer.put(key, group_size=2, index=0, score=1.0, split="s\n", tokens=[1])
        shown = printable(key)
        query = urlencode({"id": shown, "split": printable("s\n")})
        answer = json.loads(page.ask(f"/group?{query}").body)
        assert (answer["state"], answer["group"]["instance_id"]) == ("open", shown)


def test_a_group_that_nobody_knows_is_told_so(page: Web, bus_name: str) -> None:
    for name in ("q", "%ed%a0%80", "%00", "%3Cscript%3E", "%F0%9F%92%A9" * 60):
        answer = page.ask(f"/group?id={name}")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("application/json")
        assert json.loads(answer.body)["state"] == "unknown"  # there is no bus
    with Bus.create(bus_name, "1MiB"):
        answer = page.ask("/group?id=q&round=3&split=eval")
        assert json.loads(answer.body)["state"] == "gone"
