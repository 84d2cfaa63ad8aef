"""Large bodies are put whole, in whatever pieces they come, or not."""

from __future__ import annotations

import gzip
import json
import random
import re
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_until
from gateways import TIMEOUT_S, Gateway, serving
from http_answers import more, read_answer
from http_requests import request_bytes, reset, scored

#: Tokens of a sequence: its group is 600 kB of JSON, which no one piece holds.
TOKENS = 30_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    options = ("--create", "64MiB", "--body-limit", "4")
    with serving(tmp_path_factory.mktemp("gateway"), "large", *options) as gateway:
        gateway.register(batch_size=1)
        yield gateway


def large(first: int, **more: Any) -> dict[str, Any]:
    return scored([first, *range(100_000, 100_000 + TOKENS)], **more)


def was_put(gateway: Gateway, group: dict[str, Any]) -> bool:
    """Whether the next batch is this group."""
    [found] = gateway.batch()
    return all(found[key] == group[key] for key in ("tokens", "masks", "scores"))


def test_it_comes_in_pieces_of_any_size(shared: Gateway, seed: int) -> None:
    dice = random.Random(seed)
    for most in (200, 5_000, 100_000, 10**7):
        group = large(most)
        data = request_bytes("POST", "/scored_data", group)
        with shared.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            at = 0
            while at < len(data):
                count = dice.randint(1, most)
                connection.sendall(data[at : at + count])
                at += count
            assert read_answer(connection).status == 200
        assert was_put(shared, group)


def test_it_comes_with_its_head_after_its_head_and_after_a_pause(shared: Gateway) -> None:
    for number, cut in enumerate((0, 1, 10, 300_000, -1)):
        group = large(number)
        data = request_bytes("POST", "/scored_data", group)
        head = data.index(b"\r\n\r\n") + 4
        at = len(data) - 1 if cut < 0 else head + cut
        with shared.connect() as connection:
            connection.sendall(data[:at])
            time.sleep(0.1)
            connection.sendall(data[at:])
            assert read_answer(connection).status == 200
        assert was_put(shared, group)


def test_several_over_one_connection_and_others_between_them(shared: Gateway) -> None:
    with shared.connect() as connection:
        for number in range(3):
            group = large(number)
            connection.sendall(request_bytes("POST", "/scored_data", group))
            assert read_answer(connection).status == 200
            assert was_put(shared, group)
        small = scored([1, 2])
        for content in (large(3), small, large(4)):
            connection.sendall(request_bytes("GET", "/status"))
            assert read_answer(connection).status == 200
            connection.sendall(request_bytes("POST", "/scored_data", content))
            assert read_answer(connection).status == 200
            assert was_put(shared, content)


def test_requests_behind_it_are_answered_in_their_order(shared: Gateway) -> None:
    groups = [large(1), large(2)]
    posts = b"".join(request_bytes("POST", "/scored_data", group) for group in groups)
    with shared.connect() as connection:
        connection.sendall(posts + request_bytes("GET", "/info"))
        answers = b""
        # Several come in one piece, as it falls.
        while not (answers.count(b"HTTP/1.1 200 ") == 3 and answers.endswith(b"}")):
            answers += more(connection)
    assert answers.count(b'"received"') == 2
    assert b"batch_size" in answers.rpartition(b"HTTP/1.1 200 ")[2]
    assert all(was_put(shared, group) for group in groups)


def test_gzip_and_lists_and_what_only_the_parser_reads(shared: Gateway, seed: int) -> None:
    dice = random.Random(seed)
    group = large(1, inference_logprobs=[[dice.random() for _ in range(TOKENS + 1)]])
    text = json.dumps(group).encode()
    bodies: Any = {
        "/scored_data": [
            (gzip.compress(text, 1), {"Content_Encoding": "gzip"}),
            # A token as text is not plain.
            (text.replace(b"[[1, ", b'[["1", ', 1), {}),
        ],
        "/scored_data_list": [(b"[%s]" % text, {})],
    }
    for path, each in bodies.items():
        for body, headers in each:
            assert shared.post(path, body, **headers).status == 200
            assert was_put(shared, group)


def test_one_that_ends_early_is_not_taken(shared: Gateway) -> None:
    data = request_bytes("POST", "/scored_data", large(1))
    for cut in (300, 50_000, 200_000, len(data) - 1):
        for end in (socket.socket.close, reset):
            with shared.connect() as connection:
                connection.sendall(data[:cut])
                time.sleep(0.02)
                end(connection)
    assert shared.post("/scored_data", large(7)).status == 200
    assert was_put(shared, large(7))
    assert shared.batch() is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Encoding": "br"}, 415),
        ({"Content_Length": str(5 << 20)}, 413),
        ({"Origin": "http://elsewhere.example"}, 403),
    ],
)
def test_one_that_is_refused_ends_its_connection(
    shared: Gateway, headers: dict[str, str], status: int
) -> None:
    # What is left of it would be taken for the next request.
    data = request_bytes("POST", "/scored_data", large(1), **headers)
    head = data.index(b"\r\n\r\n") + 4
    with shared.connect() as connection:
        connection.sendall(data[:head])
        answer = read_answer(connection)
        assert answer.status == status
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(1) == b""
    assert shared.batch() is None


def test_damaged_ones_are_refused_and_the_connection_stays(shared: Gateway) -> None:
    text = json.dumps(large(1)).encode()
    with shared.connect() as connection:
        for body, headers, status in (
            (text[:-1], {}, 422),
            (text.replace(b"100007", b"NaN", 1), {}, 422),
            (text, {"Content_Encoding": "gzip"}, 400),
        ):
            connection.sendall(request_bytes("POST", "/scored_data", body, **headers))
            assert read_answer(connection).status == status
        connection.sendall(request_bytes("POST", "/scored_data", large(8)))
        assert read_answer(connection).status == 200
    assert was_put(shared, large(8))


def test_the_log_and_the_metrics_have_its_bytes(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "64MiB")
    gateway.register(batch_size=1)
    data = json.dumps(large(1)).encode()
    assert gateway.post("/scored_data", data).status == 200
    assert f"received={len(data)}" in gateway.stop()


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_client_that_goes_within_a_body_is_in_the_log(shared: Gateway, end: Any) -> None:
    lost = re.compile(r"POST /scored_data status=0 .* peer=127\.0\.0\.1 ")
    before = len(lost.findall(shared.child.output()))
    data = request_bytes("POST", "/scored_data", large(2))
    for count, cut in enumerate((data.index(b"\r\n\r\n") + 4, 60_000, len(data) - 1), 1):
        with shared.connect() as connection:
            connection.sendall(data[:cut])
            time.sleep(0.02)
            end(connection)
        wait_until(
            lambda: len(lost.findall(shared.child.output())) == before + count,  # noqa: B023
            what="its line in the log",
        )
    assert "Traceback" not in shared.child.output()
    assert shared.batch() is None


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_one_that_goes_at_once_leaves_nothing_behind(shared: Gateway, end: Any, seed: int) -> None:
    dice = random.Random(seed)
    data = request_bytes("POST", "/scored_data", large(2))
    for _ in range(60):
        with shared.connect() as connection:
            connection.sendall(data[: dice.randrange(100, len(data))])
            end(connection)
    assert shared.post("/scored_data", large(3)).status == 200
    assert was_put(shared, large(3))
    assert shared.batch() is None
    found = re.search(rb"gateway_body_bytes\{.*\} (\d+)", shared.get("/metrics").body)
    assert found is not None
    assert found[1] == b"0"
    assert "Traceback" not in shared.child.output()


def test_a_held_body_is_answered_when_there_is_room_and_dropped_when_its_client_goes(
    gateway_of: Any,
) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=1)
    body = request_bytes("POST", "/scored_data", scored([7, *range(100_000, 110_000)]))
    answered = 0
    held: list[socket.socket] = []
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
