"""slime's rollout buffer over HTTP: its routes, its shapes, and what is kept when things die."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_until
from gateways import REGISTRATION, Gateway, serving
from http_requests import request_bytes, reset, scored

GROUP = 3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all of this."""
    directory = tmp_path_factory.mktemp("children")
    with serving(directory, "slime", "--create", "4MiB", "--group-size", GROUP) as found:
        yield found


@pytest.fixture
def buffer(shared: Gateway) -> Gateway:
    """It, empty."""
    shared.post("/get_rollout_data", {})
    assert shared.get("/reset_data").status == 200
    return shared


def item(key: str, uid: int, **more: Any) -> dict[str, Any]:
    """A sample."""
    return {"instance_id": key, "uid": str(uid), "reward": float(uid), "tokens": [uid], **more}


def write(gateway: Gateway, *items: dict[str, Any]) -> None:
    """As a generator does."""
    for each in items:
        assert gateway.post("/buffer/write", each).json()["success"], each


def read(gateway: Gateway) -> list[tuple[str, int]]:
    """As a trainer does; keys and uids."""
    data = gateway.post("/get_rollout_data", {}).json()["data"]["data"]
    return [(each["instance_id"], int(each["uid"])) for each in data]


def test_groups_come_whole_by_their_key_and_as_they_were_written(buffer: Gateway) -> None:
    whole = [item("a", n, messages=[{"role": "user", "content": "x"}], extra_info={"n": n})
             for n in range(GROUP)]  # fmt: skip
    write(buffer, whole[0], item("b", 0), whole[1], item("b", 1))
    empty = buffer.post("/get_rollout_data", {}).json()
    assert (empty["success"], empty["data"]["data"]) == (False, [])
    write(buffer, whole[2])
    answer = buffer.post("/get_rollout_data", {}).json()
    assert (answer["success"], answer["data"]["data"]) == (True, whole)
    write(buffer, item("b", 2))
    assert read(buffer) == [("b", n) for n in range(GROUP)]
    assert read(buffer) == []


def test_a_second_sample_with_the_same_uid_is_dropped(buffer: Gateway) -> None:
    write(buffer, item("a", 0), item("a", 0), item("a", 1))
    assert read(buffer) == []
    write(buffer, item("a", 2))
    assert read(buffer) == [("a", n) for n in range(GROUP)]


def test_a_write_whose_answer_was_lost_comes_once(buffer: Gateway) -> None:
    lost = {key: value for key, value in item("a", 0).items() if key != "uid"}
    connection = buffer.connect()
    connection.sendall(request_bytes("POST", "/buffer/write", lost))
    wait_until(
        lambda: buffer.post("/get_rollout_data", {}).json()["data"]["meta_info"], what="the sample"
    )
    reset(connection)
    write(buffer, lost, item("a", 1))
    assert read(buffer) == []


def test_data_whose_answer_was_cut_comes_again(buffer: Gateway) -> None:
    write(buffer, *(item("a", n, text="x" * 400_000) for n in range(GROUP)))
    connection = buffer.connect()
    connection.sendall(request_bytes("POST", "/get_rollout_data", {}))
    assert connection.recv(1000)
    reset(connection)
    assert read(buffer) == [("a", n) for n in range(GROUP)]
    assert read(buffer) == []


def test_atropos_and_slime_share_a_bus(buffer: Gateway) -> None:
    buffer.post("/register", {**REGISTRATION, "batch_size": 2})
    write(buffer, item("a", 0), item("a", 1))
    assert buffer.post("/scored_data", scored([7], [8])).status == 200
    write(buffer, item("a", 2))
    [group] = buffer.batch()
    assert group["tokens"] == [[7], [8]]
    assert read(buffer) == [("a", n) for n in range(GROUP)]


def test_a_generator_of_the_server_is_refused_and_told_what_to_do(buffer: Gateway) -> None:
    answer = buffer.post("/start_rollout", {})
    assert (answer.status, "--group-size" in answer.detail) == (501, True)


def test_what_was_written_and_given_outlives_a_killed_gateway(buffer: Gateway) -> None:
    """The last of this file: the gateway is another one after it."""
    write(buffer, *(item("a", n) for n in range(GROUP)), item("b", 0))
    assert len(read(buffer)) == GROUP
    # By the time of another answer, it has noted that this one left.
    assert buffer.get("/info").status == 200
    buffer.kill()
    buffer.start()
    # The trainer lives: by asking for more it acknowledges what it had.
    write(buffer, item("b", 1), item("b", 2))
    # Two gateways put them: the bus keeps the order of each.
    assert sorted(read(buffer)) == [("b", n) for n in range(GROUP)]
    assert read(buffer) == []
