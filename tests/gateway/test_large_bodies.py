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
            [found] = shared.batch()
            assert all(found[key] == group[key] for key in ("tokens", "masks", "scores"))
            wait_until(lambda: f"received={len(body)}" in shared.child.output())  # noqa: B023


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
    assert re.search(rb"gateway_body_bytes\{.*\} 0\n", shared.get("/metrics").body)
    assert shared.batch() is None


def test_a_held_body_is_answered_with_room_or_dropped_with_its_client(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=1)
    body = request_bytes("POST", "/scored_data", scored([7, *range(100_000, 110_000)]))
    answered = 0
    held: list[socket.socket] = []

    def settled() -> bool:
        nonlocal answered
        for connection in select.select(held, [], [], 0.02)[0]:
            assert read_answer(connection).status == 200
            held.remove(connection)
            connection.close()
            answered += 1
        count = f'held_bodies{{bus="{gateway.name}"}} {len(held)}\n'
        return count.encode() in gateway.get("/metrics").body

    while len(held) < 2:
        held.append(gateway.connect())
        held[-1].sendall(body)
        wait_until(settled, what="an answer, or a held body")
    assert answered > 1
    held.pop().close()
    for _ in range(answered + 1):
        wait_until(gateway.batch, what="the next batch")
    with held[0] as connection:
        assert read_answer(connection).status == 200
    assert gateway.batch() is None
