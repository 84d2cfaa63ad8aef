"""Heads that a gateway knows: what a head says still decides, and a body below one is put once."""

from __future__ import annotations

import gzip
import json
import random
import re
import select
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_until
from gateways import TIMEOUT_S, Gateway, serving
from http_answers import more, read_answer
from http_requests import request_bytes, reset, scored

from shmbus.gateway.heads import Heads, KnownHead, split_head

TOKEN = "of this test"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("gateway")
    token = directory / "token"
    token.write_text(TOKEN)
    options = ("--create", "64MiB", "--body-limit", "1", "--token-file", token)
    with serving(directory, "known", *options) as found:
        for path, content in (("/register", REGISTRATION), ("/batch", None)):
            assert found.ask("POST" if content else "GET", path, content, **ALLOWED).status == 200
        yield found


ALLOWED = {"Authorization": f"Bearer {TOKEN}"}
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 1, "max_token_len": 512,
    "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 100,
}  # fmt: skip


def group(first: int) -> dict[str, Any]:
    """A group of 160 kB."""
    return scored([first, *range(100_000, 110_000)])


def short_posts(gateway: Gateway) -> int:
    """How many bodies came below heads that were known."""
    text = gateway.get("/metrics", **ALLOWED).body
    found = re.search(rb"gateway_short_posts\{.*\} (\d+)", text)
    assert found is not None
    return int(found[1])


def taken(gateway: Gateway) -> Any:
    """The first token of the next batch's group; None where there is none."""
    batch = gateway.get("/batch", **ALLOWED).json()["batch"]
    return batch and batch[0]["tokens"][0][0]


def post(gateway: Gateway, content: Any, path: str = "/scored_data", **headers: str) -> int:
    """Post; returns the status."""
    return gateway.post(path, content, **{**ALLOWED, **headers}).status


def test_it_is_known_after_its_first_answer_and_not_before(gateway: Gateway) -> None:
    before = short_posts(gateway)
    assert post(gateway, json.dumps(group(1)).encode()[:-1], X="known later") == 422
    for number in range(3):
        assert post(gateway, group(number), X="known later") == 200
        assert taken(gateway) == number
    assert short_posts(gateway) == before + 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer another"}, 401),
        ({"Authorization": ""}, 401),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "elsewhere.example"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Encoding": "br"}, 415),
        ({"Content_Length": "900000000"}, 413),
    ],
)
def test_another_head_is_looked_at(gateway: Gateway, headers: dict[str, str], status: int) -> None:
    for _ in range(2):
        assert post(gateway, group(1)) == 200
        assert taken(gateway) == 1
    before = short_posts(gateway)
    for _ in range(2):
        data = request_bytes("POST", "/scored_data", group(2), **{**ALLOWED, **headers})
        with gateway.connect() as connection:
            connection.sendall(data[: data.index(b"\r\n\r\n") + 4])
            assert read_answer(connection).status == status
    assert short_posts(gateway) == before
    assert taken(gateway) is None


def test_a_page_of_this_machine_is_answered_the_long_way(gateway: Gateway) -> None:
    before = short_posts(gateway)
    for _ in range(3):
        assert post(gateway, group(1), Origin="http://localhost") == 200
        assert taken(gateway) == 1
    assert short_posts(gateway) == before


def test_a_body_that_is_too_large_or_damaged_is_refused_as_ever(gateway: Gateway) -> None:
    # The same number of digits: 1.1 MB may not come, 1.0 MB may.
    text = json.dumps(group(1)).encode()
    fitting, too_large = (text + b" " * (size - len(text)) for size in (1_000_000, 1_100_000))
    for _ in range(2):
        assert post(gateway, fitting) == 200
        assert taken(gateway) == 1
    with gateway.connect() as connection:
        data = request_bytes("POST", "/scored_data", too_large, **ALLOWED)
        connection.sendall(data[: data.index(b"\r\n\r\n") + 4])
        answer = read_answer(connection)
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(1) == b""
    before = short_posts(gateway)
    with gateway.connect() as connection:
        for body in (fitting.replace(b"100001", b"NaN   ", 1), b"{" + fitting[1:-1] + b"{"):
            connection.sendall(request_bytes("POST", "/scored_data", body, **ALLOWED))
            assert read_answer(connection).status == 422
        connection.sendall(request_bytes("POST", "/scored_data", fitting, **ALLOWED))
        assert read_answer(connection).status == 200
    assert short_posts(gateway) == before + 3
    assert taken(gateway) == 1


def test_gzip_and_lists_and_samples_have_heads_of_their_own(gateway: Gateway) -> None:
    text = json.dumps(group(5)).encode()
    sample = {"instance_id": "i", "uid": "1", "reward": 1.0, "x": "y" * 100_000}
    packed = gzip.compress(text, 0)
    requests: list[tuple[str, bytes, dict[str, str]]] = [
        ("/scored_data", packed, {"Content_Encoding": "gzip"}),
        ("/scored_data_list", b"[%s]" % text, {}),
        ("/buffer/write", json.dumps(sample).encode(), {}),
    ]
    for path, body, headers in requests:
        before = short_posts(gateway)
        answers = []
        for _ in range(3):
            answer = gateway.post(path, body, **ALLOWED, **headers)
            assert answer.status == 200
            answers.append((answer.headers | {"date": ""}, answer.body))
            if path != "/buffer/write":
                assert taken(gateway) == 5
        assert short_posts(gateway) == before + 2
        # The answer is that of the long way, header by header.
        assert answers[0] == answers[1] == answers[2]
    assert post(gateway, packed[:-9] + bytes(9), Content_Encoding="gzip") == 400


def test_what_the_client_says_of_its_connection_holds(gateway: Gateway) -> None:
    for _ in range(2):
        data = request_bytes("POST", "/scored_data", group(1), **ALLOWED, Connection="close")
        with gateway.connect() as connection:
            connection.sendall(data)
            answer = read_answer(connection)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            connection.settimeout(TIMEOUT_S)
            assert connection.recv(1) == b""
        assert taken(gateway) == 1


def test_what_comes_behind_a_body_is_answered_after_it(gateway: Gateway) -> None:
    post(gateway, group(1))
    assert taken(gateway) == 1
    data = request_bytes("POST", "/scored_data", group(2), **ALLOWED)
    info = request_bytes("GET", "/info")
    for behind, status in ((info, 401), (b"\0" * 100, 400)):
        before = short_posts(gateway)
        with gateway.connect() as connection:
            connection.sendall(data * 2 + behind)
            answers = b""
            while answers.count(b"HTTP/1.") < 3:
                answers += more(connection)
        said = re.findall(rb"HTTP/1\.[01] (\d+) ", answers)
        assert said == [b"200", b"200", str(status).encode()]
        assert short_posts(gateway) == before + 2
        assert [taken(gateway), taken(gateway), taken(gateway)] == [2, 2, None]


def test_a_body_whose_answer_was_lost_is_put_once(gateway: Gateway) -> None:
    for number in (1, 2):
        post(gateway, group(number))
        assert taken(gateway) == number
    data = request_bytes("POST", "/scored_data", group(3), **ALLOWED)
    for _ in range(3):
        with gateway.connect() as connection:
            connection.sendall(data)
            # Answered, and reset with the answer unread.
            connection.settimeout(TIMEOUT_S)
            assert connection.recv(1) == b"H"
            reset(connection)
        time.sleep(0.05)
    assert post(gateway, group(3)) == 200
    assert [taken(gateway), taken(gateway)] == [3, None]
    # Answered and read: equal bodies are two groups.
    for _ in range(2):
        assert post(gateway, group(3)) == 200
    assert [taken(gateway), taken(gateway), taken(gateway)] == [3, 3, None]


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_client_that_goes_within_a_body_is_in_the_log(gateway: Gateway, end: Any) -> None:
    for _ in range(2):
        assert post(gateway, group(1)) == 200
        assert taken(gateway) == 1
    lost = re.compile(r"POST /scored_data status=0 .* peer=127\.0\.0\.1 ")
    before = len(lost.findall(gateway.child.output()))
    data = request_bytes("POST", "/scored_data", group(2), **ALLOWED)
    for count, cut in enumerate((data.index(b"\r\n\r\n") + 4, 60_000, len(data) - 1), 1):
        with gateway.connect() as connection:
            connection.sendall(data[:cut])
            time.sleep(0.02)
            end(connection)
        wait_until(
            lambda: len(lost.findall(gateway.child.output())) == before + count,  # noqa: B023
            what="its line in the log",
        )
    assert "Traceback" not in gateway.child.output()
    assert taken(gateway) is None


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_one_that_goes_at_once_leaves_nothing_behind(gateway: Gateway, end: Any, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(2):
        assert post(gateway, group(1)) == 200
        assert taken(gateway) == 1
    data = request_bytes("POST", "/scored_data", group(2), **ALLOWED)
    for _ in range(60):
        with gateway.connect() as connection:
            connection.sendall(data[: dice.randrange(100, len(data))])
            end(connection)
    assert post(gateway, group(3)) == 200
    assert [taken(gateway), taken(gateway)] == [3, None]
    found = re.search(rb"gateway_body_bytes\{.*\} (\d+)", gateway.get("/metrics", **ALLOWED).body)
    assert found is not None
    assert found[1] == b"0"
    assert "Traceback" not in gateway.child.output()


def test_a_held_body_is_answered_when_there_is_room_and_dropped_when_its_client_goes(
    gateway_of: Any,
) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=1)
    body = request_bytes("POST", "/scored_data", group(7))
    answered = 0
    held: list[socket.socket] = []
    # The first head is parsed; from then on it is known, and the bus fills.
    while len(held) < 2:
        connection = gateway.connect()
        connection.sendall(body)
        while not select.select([connection], [], [], 0.02)[0]:
            if b"held_bodies{bus=\"%s\"} %d" % (
                gateway.name.encode(), len(held) + 1
            ) in gateway.get("/metrics").body:  # fmt: skip
                held.append(connection)
                break
        else:
            assert read_answer(connection).status == 200
            connection.close()
            answered += 1
    assert answered > 1
    held.pop().close()
    for _ in range(answered + 1):
        wait_until(gateway.batch, what="the next batch")
    with held[0] as connection:
        assert read_answer(connection).status == 200
    assert gateway.batch() is None


def test_so_many_are_known_and_the_oldest_goes() -> None:
    heads = Heads()
    made = [b"POST /scored_data %d" % number for number in range(300)]
    request: Any = SimpleNamespace(version=(1, 1), path="/scored_data", headers={}, keep_alive=True)
    for head in made:
        heads.remember(head, request, 200)
    assert len(heads) == 256
    assert heads.find(made[0]) is None
    assert heads.find(made[-1]) == KnownHead("/scored_data", {}, True)  # type: ignore[arg-type]
    for head, status, version in (
        (b"a", 422, (1, 1)),
        (b"b", 200, (1, 0)),
        (b"c" * 4096, 200, None),
    ):
        request.version = version or (1, 1)
        heads.remember(head, request, status)
        assert heads.find(head) is None


@pytest.mark.parametrize("length", [b"65536", b"2", b"-1", b"1 1", b""])
def test_a_body_that_is_small_or_of_no_plain_length_is_not_cut(length: bytes) -> None:
    assert split_head(b"POST /scored_data HTTP/1.1\r\nContent-Length: %s\r\n\r\n" % length) is None
