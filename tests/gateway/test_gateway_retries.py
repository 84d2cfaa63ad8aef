"""A full bus, lost answers, dead trainers, environments and gateways: no loss, no double."""

import contextlib
import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import together, wait_until
from gateways import REGISTRATION, Gateway
from http_answers import read_answer
from http_requests import request_bytes, reset, scored

import shmbus
from trainer_adapter.adapters.atropos import AtroposTrainer

#: So many tokens are a hundredth of a bus of 1 MiB, with their masks.
ROW = 600


def numbered(number: int, length: int = ROW) -> dict[str, Any]:
    return scored([number] * length, [number] * length)


def numbers(batch: Any) -> list[int]:
    return [group["tokens"][0][0] for group in batch]


def all_batches(gateway: Gateway) -> list[int]:
    """Take until the flow ends; the last request acknowledges."""
    found: list[int] = []
    while (batch := gateway.batch()) is not None:
        found += numbers(batch)
    return found


def balanced(name: str) -> bool:
    with shmbus.Consumer(name) as consumer:
        return consumer.stats().balanced


def fill(gateway: Gateway, start: int = 0) -> list[threading.Thread]:
    """Post until a request is held; return the threads of waiting requests."""
    answered: dict[int, int] = {}

    def post(number: int) -> None:
        answered[number] = gateway.post("/scored_data", numbered(number)).status

    threads = []
    for number in range(start, start + 1000):
        thread = threading.Thread(target=post, args=(number,))
        thread.start()
        thread.join(0.5)
        threads.append(thread)
        if thread.is_alive():
            return threads
        assert answered[number] == 200
    raise AssertionError("the bus is never full")


def test_a_full_bus_holds_a_post_until_there_is_room(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "1MiB")
    gateway.register(batch_size=2)
    threads = fill(gateway)
    assert gateway.get("/info").status == 200
    assert gateway.metric("held_bodies") > 0
    found: list[int] = []
    while len(found) < len(threads):
        found += numbers(gateway.batch() or [])
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(len(threads)))


def test_what_was_answered_503_and_is_sent_again_comes_once(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "1MiB", "--hold", 0.2)
    gateway.register(batch_size=2)
    number = 0
    while (answer := gateway.post("/scored_data", numbered(number))).status == 200:
        number += 1
    assert answer.status == 503
    assert "nothing was lost" in answer.detail
    assert gateway.post("/scored_data", numbered(number)).status == 503
    half = [numbers(gateway.batch())[0] for _ in range(number // 2)]
    assert gateway.post("/scored_data", numbered(number)).status == 200
    assert sorted(half + all_batches(gateway)) == list(range(number + 1))


def test_a_paused_bus_holds_too_and_says_why(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "1MiB", "--hold", 0.2)
    with shmbus.Bus.open(gateway.name) as bus:
        bus.pause("new weights")
        answer = gateway.post("/scored_data", numbered(0))
        assert (answer.status, "paused (new weights)" in answer.detail) == (503, True)
        bus.resume()
    assert gateway.post("/scored_data", numbered(0)).status == 200


def test_what_can_never_fit_is_refused_at_once(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "1MiB")
    sequence = gateway.post("/scored_data", scored([1] * 40_000))
    group = gateway.post("/scored_data", scored(*([[1] * 8000] * 8)))
    images = gateway.post("/scored_data", {**numbered(1), "images": ["x" * 400_000]})
    for answer in (sequence, group, images):
        assert (answer.status, "larger capacity" in answer.detail) == (413, True)
    gateway.register(batch_size=2)
    assert gateway.post("/scored_data", numbered(1)).status == 200
    assert all_batches(gateway) == [1]


def test_a_body_whose_answer_was_lost_comes_once(gateway: Gateway, seed: int) -> None:
    delays = random.Random(seed)
    gateway.register(batch_size=2)
    for number in range(60):
        connection = gateway.connect()
        connection.sendall(request_bytes("POST", "/scored_data", numbered(number)))
        # Before, during and after its put and answer.
        time.sleep(delays.choice((0, 0.0005, 0.001, 0.002, 0.01)))
        reset(connection)
        assert gateway.post("/scored_data", numbered(number)).status == 200
    assert sorted(all_batches(gateway)) == list(range(60))
    assert gateway.metric("repeated_bodies") > 0


def test_a_list_whose_answer_was_lost_comes_once_and_another_body_too(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    body = [numbered(number) for number in range(5)]
    for _ in range(2):
        connection = gateway.connect()
        connection.sendall(request_bytes("POST", "/scored_data_list", body))
        wait_until(lambda: gateway.get("/status").json()["queue_size"] == 5)
        reset(connection)
    assert gateway.post("/scored_data", numbered(5)).status == 200
    assert gateway.post("/scored_data_list", body).json()["groups_processed"] == 5
    assert all_batches(gateway) == list(range(6))


def test_a_batch_whose_answer_was_cut_comes_again_first(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    for number in range(3):
        gateway.post("/scored_data", numbered(number, 60_000))
    for end in (reset, socket.socket.close, reset):
        connection = gateway.connect()
        connection.sendall(request_bytes("GET", "/batch"))
        assert connection.recv(1000)
        end(connection)
    assert all_batches(gateway) == [0, 1, 2]


def test_a_trainer_that_hangs_up_at_once_has_its_batch_again(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    gateway.post("/scored_data", numbered(0))
    for number in range(40):
        connection = gateway.connect()
        connection.sendall(request_bytes("GET", "/batch"))
        time.sleep(number % 4 / 2000)
        connection.close()
    assert all_batches(gateway) == [0]


@pytest.mark.parametrize(
    ("bodies", "taken", "kept", "gateway_dies"),
    [
        ([0, 1, 2], 2, 1, False),
        ([0, 1, 2], 2, 1, True),
        ([0, 1, 2, 3], 3, 2, False),
        ([0, 0], 2, 2, True),
    ],
)
def test_the_kept_batches_of_a_dead_trainer_come_again(
    bodies: list[int], taken: int, kept: int, gateway_dies: bool, gateway_of: Any
) -> None:
    gateway = gateway_of("--create", "4MiB", "--keep-batches", kept)
    gateway.register(batch_size=2)
    for number in bodies:
        assert gateway.post("/scored_data", numbered(number)).status == 200
    assert [numbers(gateway.batch()) for _ in range(taken)] == [[n] for n in bodies[:taken]]
    if gateway_dies:
        gateway.restart()
    assert gateway.post("/register", {**REGISTRATION, "batch_size": 2}).status == 200
    assert all_batches(gateway) == bodies[taken - kept :]


def test_a_trainer_that_leaves_http_has_everything_and_may_come_back(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    for number in range(3):
        gateway.post("/scored_data", numbered(number))
    assert numbers(gateway.batch()) == [0]
    url = f"http://127.0.0.1:{gateway.port}"
    with pytest.raises(shmbus.BusBusyError):
        AtroposTrainer(gateway.name, 2)
    with AtroposTrainer(gateway.name, 2, url=url) as trainer:
        trainer.register()
        assert numbers(trainer.get_batch(timeout=20)["batch"]) == [0]
        gateway.restart()
        assert numbers(trainer.get_batch(timeout=20)["batch"]) == [1]
        assert gateway.get("/batch").status == 409
    assert gateway.post("/register", {**REGISTRATION, "batch_size": 2}).status == 200
    assert all_batches(gateway) == [1, 2]
    gateway.stop()
    assert balanced(gateway.name)


def test_groups_given_away_do_not_end_a_batch(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "32MiB")
    gateway.register(batch_size=2)
    # 12 MB of JSON: beyond the kernel's buffer for an idle client.
    gateway.post("/scored_data", numbered(10**18, 150_000))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    slow.connect(("127.0.0.1", gateway.port))
    slow.sendall(request_bytes("GET", "/batch"))
    assert slow.recv(1)
    with AtroposTrainer(gateway.name, 2, url=f"http://127.0.0.1:{gateway.port}") as trainer:
        with slow, pytest.raises(ConnectionError):
            read_answer(slow)
        assert numbers(trainer.get_batch(timeout=20)["batch"]) == [10**18]


def test_a_trainer_reads_slowly_and_others_are_answered(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    gateway.post("/scored_data", numbered(0, 60_000))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", gateway.port))
    slow.sendall(request_bytes("GET", "/batch"))
    for _ in range(20):
        assert slow.recv(1)
        assert gateway.get("/info").status == 200
    reset(slow)
    assert numbers(gateway.batch()) == [0]


def test_registrations_and_groups_outlive_the_gateway(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    env = gateway.register_env(weight=2.0)
    for number in range(4):
        gateway.post("/scored_data", {**numbered(number), "env_id": env})
    assert numbers(gateway.batch()) == [0]
    # The note of a given batch follows the last byte: a kill between the two gives the batch again.
    wait_until(
        lambda: gateway.get("/status-env", {"env_id": env}).json()["current_step"] == 1,
        what="the note of the first batch",
    )
    gateway.restart()
    assert gateway.get("/info").json()["batch_size"] == 2
    status = gateway.get("/status-env", {"env_id": env}).json()
    assert (status["current_step"], status["queue_size"]) == (1, 3)
    assert numbers(gateway.batch()) == [1]
    assert all_batches(gateway) == [2, 3]
    gateway.stop()
    assert balanced(gateway.name)


def test_a_bus_that_was_removed_ends_its_gateway(gateway: Gateway) -> None:
    gateway.register()
    shmbus.unlink(gateway.name)
    assert gateway.child.wait() == 1
    assert "was removed: this gateway ends" in gateway.child.output()
    assert not Path(f"/dev/shm/shmbus-gateway.{gateway.name}").exists()


def test_a_new_bus_of_the_same_name_knows_nothing_of_the_old(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register()
    gateway.kill()
    shmbus.unlink(gateway.name)
    gateway.start()
    assert gateway.get("/info").json()["batch_size"] == -1


def test_a_second_gateway_of_a_bus_is_refused(gateway: Gateway, gateway_of: Any) -> None:
    gateway.register()
    with pytest.raises(AssertionError, match=f"found the one with pid {gateway.child.pid}"):
        gateway_of()
    assert gateway.get("/info").json()["batch_size"] == REGISTRATION["batch_size"]


def test_what_clients_send_at_once_stays_within_the_budget(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "1MiB", "--body-limit", 4, "--memory", 16, "--hold", 1)
    body = json.dumps(scored([1] * 400, messages=[[{"role": "user", "content": "x" * 3_000_000}]]))
    request = request_bytes("POST", "/scored_data", body.encode())
    before = gateway.peak_kib()
    connections = [gateway.connect() for _ in range(60)]
    together(lambda connection: _send(connection, request), connections)
    assert gateway.get("/info").status == 200
    # 16 MiB of bodies: one decoded, and the read-ahead of the rest.
    assert gateway.peak_kib() - before < 64 << 10
    for connection in connections:
        connection.close()


def _send(connection: socket.socket, request: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(request)
        read_answer(connection)


def test_groups_wait_for_a_killed_daemon(bus_name: str, daemon: Any, gateway_of: Any) -> None:
    served = daemon("--capacity", "8MiB")
    gateway = gateway_of("--daemon")
    gateway.register(batch_size=2)
    gateway.post("/scored_data", numbered(0))
    assert numbers(gateway.batch()) == [0]
    served.kill()
    assert gateway.post("/scored_data", numbered(1)).status == 200
    served.start()
    found: list[int] = []

    def came() -> bool:
        answer = gateway.get("/batch")
        if answer.status == 200:
            found.extend(numbers(answer.json()["batch"] or []))
        return found == [1]

    wait_until(came, what="the group that was put while there was no daemon")
