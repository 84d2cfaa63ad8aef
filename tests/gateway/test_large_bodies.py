"""Large bodies are put whole, in any pieces, or not at all."""

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
from gateways import Gateway, serving
from http_answers import read_answer
from http_requests import request_bytes, reset, scored

#: Tokens of a sequence: its group is 600 kB of JSON, beyond any single piece.
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
    [found] = gateway.batch()
    return all(found[key] == group[key] for key in ("tokens", "masks", "scores"))


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


def test_the_log_and_the_metrics_have_its_bytes(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "64MiB")
    gateway.register(batch_size=1)
    data = json.dumps(large(1)).encode()
    assert gateway.post("/scored_data", data).status == 200
    assert f"received={len(data)}" in gateway.stop()


@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_client_that_goes_within_a_body_is_in_the_log(shared: Gateway, end: Any) -> None:
    lost = re.compile(
        r"POST /scored_data status=0 .* peer=(127\.0\.0\.1|None) "
    )  # a reset takes the address
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


def test_a_held_body_is_answered_with_room_or_dropped_with_its_client(gateway_of: Any) -> None:
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
