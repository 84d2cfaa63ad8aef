"""A gateway that is killed at a chosen line: what its successor knows, and what clients then get.

The faults are lines that run in the gateway's own process before it serves.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from gateways import REGISTRATION, Gateway
from http_answers import Answer
from http_requests import request_bytes, reset
from test_gateway_retries import all_batches, balanced, numbered, numbers

import shmbus

#: A group is in the bus, and the journal does not say so.
KILL_BEFORE_THE_NOTE = """
import os, signal
from shmbus.gateway.idempotent_put import IdempotentPut
put_group = IdempotentPut._put_group
async def killed(self, *arguments):
    await put_group(self, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)
IdempotentPut._put_group = killed
"""
KILL_BEFORE_THE_GROUP = """
import os, signal
from shmbus.gateway.idempotent_put import IdempotentPut
IdempotentPut._put_group = lambda self, *arguments: os.kill(os.getpid(), signal.SIGKILL)
"""
KILL_AFTER_TWO_GROUPS = """
import os, signal
from shmbus.gateway.idempotent_put import IdempotentPut
write = IdempotentPut._write
def written(self, body, mark=0):
    write(self, body, mark)
    if body.done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
IdempotentPut._write = written
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


def restart(gateway: Gateway, fault: str) -> None:
    """Have it die at a line."""
    gateway.kill()
    gateway.start(fault)


def post_and_lose(gateway: Gateway, path: str, content: Any) -> None:
    """Post to a gateway that dies before it answers."""
    with pytest.raises(OSError):
        gateway.post(path, content)
    gateway.child.wait()


def until_answered(ask: Callable[[], Answer]) -> Answer:
    """Ask again and again while nobody listens, as clients do."""
    while True:
        try:
            return ask()
        except OSError:
            time.sleep(0.001)


def test_a_retry_that_comes_while_a_successor_takes_over_comes_once(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    restart(gateway, KILL_BEFORE_THE_NOTE)
    post_and_lose(gateway, "/scored_data", numbered(0))
    starting = threading.Thread(target=gateway.start, args=(ATTACH_SLOWLY,))
    starting.start()
    assert until_answered(lambda: gateway.post("/scored_data", numbered(0))).status == 200
    starting.join()
    assert all_batches(gateway) == [0]


def test_a_retry_before_any_trainer_has_registered_comes_once(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    restart(gateway, KILL_BEFORE_THE_NOTE)
    post_and_lose(gateway, "/scored_data", numbered(0))
    gateway.start()
    assert gateway.post("/scored_data", numbered(0)).status == 200
    assert gateway.post("/register", {**REGISTRATION, "batch_size": 2}).status == 200
    assert all_batches(gateway) == [0]


def test_a_retry_comes_once_where_the_trainer_reads_the_bus_itself(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    restart(gateway, KILL_BEFORE_THE_NOTE)
    post_and_lose(gateway, "/scored_data", numbered(0))
    gateway.start()
    assert gateway.post("/scored_data", numbered(0)).status == 200
    with shmbus.Consumer(gateway.name) as consumer:
        groups = consumer.take(10, timeout=0)
        assert [int(group[0]["tokens"][0]) for group in groups] == [0]
        consumer.ack(groups)
        assert consumer.stats().in_ring == consumer.stats().leased == 0


def test_of_a_list_a_successor_puts_only_what_is_not_there(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    restart(gateway, KILL_AFTER_TWO_GROUPS)
    body = [numbered(number) for number in range(4)]
    post_and_lose(gateway, "/scored_data_list", body)
    with shmbus.Consumer(gateway.name) as consumer:
        found = consumer.take(10, timeout=0)
        seen = [int(group[0]["tokens"][0]) for group in found]
        # Nobody can see them in the bus any more.
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


@pytest.mark.parametrize("slot_is_taken", [False, True])
def test_a_retry_of_a_trained_and_reused_group_is_one(slot_is_taken: bool, gateway_of: Any) -> None:
    """Once; twice only if another producer has the slot of the dead gateway's by then, too."""
    gateway = gateway_of("--create", "4MiB")
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    producer, consumer = shmbus.Producer(gateway.name), shmbus.Consumer(gateway.name)
    with producer, consumer:
        restart(gateway, KILL_BEFORE_THE_NOTE)
        post_and_lose(gateway, "/scored_data", numbered(0))
        assert cycle(producer, consumer) == [0]
        others = [shmbus.Producer(gateway.name) for _ in range(64 - 1)] if slot_is_taken else []
        for other in others:
            other.close()
        gateway.start()
        for number in range(2):
            assert gateway.post("/scored_data", numbered(number)).status == 200
        assert cycle(producer, consumer) == ([0, 1] if slot_is_taken else [1])


def test_a_group_that_the_dead_gateway_had_not_put_is_put(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    restart(gateway, KILL_BEFORE_THE_GROUP)
    post_and_lose(gateway, "/scored_data", numbered(0))
    gateway.start()
    assert gateway.post("/scored_data", numbered(0)).status == 200
    assert all_batches(gateway) == [0]


def test_a_body_that_waited_while_others_were_put_is_not_taken_for_put(gateway_of: Any) -> None:
    """What was committed since its note is of the others."""
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
        gateway.kill()
        gateway.start()
        while gateway.post("/scored_data_list", body).status == 503:
            found += taken(consumer)
        found += taken(consumer)
    assert found == list(range(len(body)))


def taken(consumer: shmbus.Consumer) -> list[int]:
    """All groups that are complete, by their numbers; they are acknowledged."""
    found: list[int] = []
    while groups := consumer.take(100, timeout=0):
        found += [int(group[0]["tokens"][0]) for group in groups]
        consumer.ack(groups)
    return found


def test_a_hang_up_during_a_gateways_death_counts_as_read(
    gateway_of: Any,
) -> None:
    """The one loss that is left: all bytes had left the gateway, and nobody read the last ones."""
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
    # It hears nothing of the reset that follows.
    gateway.child.send_signal(signal.SIGSTOP)
    assert connection.recv(10)
    reset(connection)
    gateway.kill()
    gateway.start()
    # Had the trainer died with the gateway, and registered again, the batch would come again.
    assert all_batches(gateway) == [1]


@pytest.mark.slow
def test_a_retry_while_the_daemon_is_dead_comes_once(daemon: Any, gateway_of: Any) -> None:
    served = daemon("--capacity", "4MiB")
    gateway = gateway_of("--daemon")
    gateway.register(batch_size=2)
    restart(gateway, KILL_BEFORE_THE_NOTE)
    post_and_lose(gateway, "/scored_data", numbered(0))
    served.kill()
    gateway.start()
    assert gateway.post("/scored_data", numbered(0)).status == 200
    served.start()
    assert all_batches(gateway) == [0]


def test_a_gateway_dying_in_an_answer_repeats_the_batch(
    gateway_of: Any,
) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.register(batch_size=2)
    restart(gateway, KILL_BEFORE_THE_BATCH_IS_NOTED)
    for number in range(2):
        assert gateway.post("/scored_data", numbered(number)).status == 200
    found = numbers(gateway.batch())
    assert found == [0]
    gateway.child.wait()
    gateway.start()
    assert all_batches(gateway) == [0, 1]
    gateway.stop()
    assert balanced(gateway.name)
