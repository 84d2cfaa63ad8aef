"""A gateway killed at a chosen line: its successor's knowledge, and its clients' answers."""

import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import beside, wait_until
from gateways import REGISTRATION, Gateway
from http_answers import Answer
from http_requests import request_bytes, reset
from test_gateway_retries import all_batches, balanced, numbered, numbers

import shmbus

KILLS = {
    name: f"""
import os, signal
from shmbus.gateway.idempotent_put import IdempotentPut
from shmbus.http.server import Connection
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{fault}
"""
    for name, fault in {
        "before the first note": "IdempotentPut._write = kill",
        "before the group": "IdempotentPut._put_group = kill",
        "before the group's note": """
put_group = IdempotentPut._put_group
async def killed(self, *arguments):
    await put_group(self, *arguments)
    kill()
IdempotentPut._put_group = killed
""",
        "before the second group's note": """
put_group = IdempotentPut._put_group
async def killed(self, body, *arguments):
    await put_group(self, body, *arguments)
    if body.done:
        kill()
IdempotentPut._put_group = killed
""",
        "before the answer": "Connection.deliver = kill",
    }.items()
}
KILL_BEFORE_THE_NOTE = KILLS["before the group's note"]
KILL_AFTER_TWO_GROUPS = """
import os, signal
from shmbus.gateway.idempotent_put import IdempotentPut
write = IdempotentPut._write
def written(self, body):
    write(self, body)
    if body.done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
IdempotentPut._write = written
"""
PUT_SLOWLY = """
import asyncio
from shmbus.gateway.idempotent_put import IdempotentPut
put_group = IdempotentPut._put_group
async def slowly(self, *arguments):
    await put_group(self, *arguments)
    await asyncio.sleep(0.5)
IdempotentPut._put_group = slowly
"""
ATTACH_SLOWLY = """
import asyncio
from shmbus.gateway.bus_reader import BusReader
attach = BusReader.attach
async def slowly(self):
    await asyncio.sleep(0.5)
    await attach(self)
BusReader.attach = slowly
"""
KILL_BEFORE_THE_BATCH_IS_NOTED = """
import os, signal
from shmbus.gateway.batch_queue import BatchQueue
BatchQueue.given = lambda self, *arguments: os.kill(os.getpid(), signal.SIGKILL)
"""


def post_and_lose(gateway: Gateway, path: str, content: Any) -> None:
    with pytest.raises(OSError):
        gateway.post(path, content)
    gateway.child.wait()


def until_answered(ask: Callable[[], Answer]) -> Answer:
    while True:
        try:
            return ask()
        except OSError:
            time.sleep(0.001)


def test_a_retry_that_comes_while_a_successor_takes_over_comes_once(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    gateway.restart(KILL_BEFORE_THE_NOTE)
    post_and_lose(gateway, "/scored_data", numbered(0))
    with beside(gateway.start, ATTACH_SLOWLY):
        assert until_answered(lambda: gateway.post("/scored_data", numbered(0))).status == 200
    assert all_batches(gateway) == [0]


@pytest.mark.parametrize("reads_bus", [False, True])
@pytest.mark.parametrize("kill", KILLS)
def test_a_body_is_put_once_where_its_gateway_dies(
    kill: str, reads_bus: bool, gateway_of: Any
) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.restart(KILLS[kill])
    body = [numbered(0), numbered(1)]
    post_and_lose(gateway, "/scored_data_list", body)
    gateway.start()
    registration = {**REGISTRATION, "batch_size": 2, "reads_bus": reads_bus}
    assert gateway.post("/register", registration).status == 200
    assert gateway.post("/scored_data_list", body).json()["groups_processed"] == 2
    if not reads_bus:
        assert all_batches(gateway) == [0, 1]
        return
    with shmbus.Consumer(gateway.name) as consumer:
        assert taken(consumer) == [0, 1]
        assert consumer.stats().in_ring == consumer.stats().leased == 0


def test_a_repeat_that_comes_while_its_first_is_put_is_put_once(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    gateway.restart(PUT_SLOWLY)
    with gateway.connect() as connection:
        connection.sendall(request_bytes("POST", "/scored_data", numbered(0)))
        wait_until(lambda: gateway.get("/status").json()["queue_size"] == 1)
        reset(connection)
    assert gateway.post("/scored_data", numbered(0)).status == 200
    assert all_batches(gateway) == [0]


def test_of_a_list_a_successor_puts_only_what_is_not_there(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    gateway.restart(KILL_AFTER_TWO_GROUPS)
    body = [numbered(number) for number in range(4)]
    post_and_lose(gateway, "/scored_data_list", body)
    with shmbus.Consumer(gateway.name) as consumer:
        found = consumer.take(10, timeout=0)
        seen = [int(group[0]["tokens"][0]) for group in found]
        consumer.ack(found)
        gateway.start()
        assert gateway.post("/scored_data_list", body).status == 200
        found = consumer.take(10, timeout=0)
        seen += [int(group[0]["tokens"][0]) for group in found]
        consumer.ack(found)
    assert seen == [0, 1, 2, 3]


def cycle(producer: shmbus.Producer, consumer: shmbus.Consumer) -> list[int]:
    """Have all space of the bus be used again; returns what else came meanwhile."""
    filler = np.zeros(100_000, np.int64)
    found = []
    for number in range(2 * consumer.stats().capacity // filler.nbytes):
        producer.put(f"filler-{number}", group_size=1, index=0, score=0.0, filler=filler)
        for group in consumer.take(10, timeout=0):
            if not group.instance_id.startswith("filler"):
                found.append(int(group[0]["tokens"][0]))
            consumer.ack([group])
    return found


def test_a_retry_of_a_group_that_was_trained_on_and_whose_space_is_used_again_comes_once(
    gateway_of: Any,
) -> None:
    gateway = gateway_of("--create", "4MiB")
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    producer, consumer = shmbus.Producer(gateway.name), shmbus.Consumer(gateway.name)
    with producer, consumer:
        gateway.restart(KILL_BEFORE_THE_NOTE)
        post_and_lose(gateway, "/scored_data", numbered(0))
        assert cycle(producer, consumer) == [0]
        gateway.start()
        for number in range(2):
            assert gateway.post("/scored_data", numbered(number)).status == 200
        assert cycle(producer, consumer) == [1]


def test_a_body_that_waited_while_others_were_put_is_not_taken_for_put(gateway_of: Any) -> None:
    """Samples committed since its note belong to other producers."""
    gateway = gateway_of("--create", "4MiB", "--hold", 2)
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    body = [numbered(number, 20_000) for number in range(10)]
    with shmbus.Consumer(gateway.name) as consumer:
        assert gateway.post("/scored_data_list", body).status == 503
        found = taken(consumer)
        assert 0 < len(found) < len(body)
        for number in range(100, 104):
            assert gateway.post("/scored_data", numbered(number)).status == 200
        assert taken(consumer) == [100, 101, 102, 103]
        gateway.restart()
        while gateway.post("/scored_data_list", body).status == 503:
            found += taken(consumer)
        found += taken(consumer)
    assert found == list(range(len(body)))


def taken(consumer: shmbus.Consumer) -> list[int]:
    found: list[int] = []
    while groups := consumer.take(100, timeout=0):
        found += [int(group[0]["tokens"][0]) for group in groups]
        consumer.ack(groups)
    return found


def test_a_hang_up_during_a_gateways_death_counts_as_read(gateway_of: Any) -> None:
    """The only possible loss: every byte left the gateway, and the client never read the last."""
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    for number in range(2):
        assert gateway.post("/scored_data", numbered(number)).status == 200
    connection = gateway.connect()
    connection.sendall(request_bytes("GET", "/batch"))
    while not connection.recv(1 << 20, socket.MSG_PEEK).endswith(b"}]}"):
        pass
    wait_until(
        lambda: gateway.get("/status").json()["current_step"] == 1, what="the note of the batch"
    )
    gateway.child.send_signal(signal.SIGSTOP)
    assert connection.recv(10)
    reset(connection)
    gateway.restart()
    assert all_batches(gateway) == [1]


@pytest.mark.slow
def test_a_retry_while_the_daemon_is_dead_comes_once(daemon: Any, gateway_of: Any) -> None:
    served = daemon("--capacity", "4MiB")
    gateway = gateway_of("--daemon")
    gateway.register(batch_size=2)
    gateway.restart(KILL_BEFORE_THE_NOTE)
    post_and_lose(gateway, "/scored_data", numbered(0))
    served.kill()
    gateway.start()
    assert gateway.post("/scored_data", numbered(0)).status == 200
    served.start()
    assert all_batches(gateway) == [0]


def test_a_gateway_dying_in_an_answer_repeats_the_batch(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    gateway.restart(KILL_BEFORE_THE_BATCH_IS_NOTED)
    for number in range(2):
        assert gateway.post("/scored_data", numbered(number)).status == 200
    assert numbers(gateway.batch()) == [0]
    gateway.child.wait()
    gateway.start()
    assert all_batches(gateway) == [0, 1]
    gateway.stop()
    assert balanced(gateway.name)
