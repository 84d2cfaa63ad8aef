"""A bus that was removed under its daemon: clients are told, and the daemon ends in order."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Daemon, wait_until

import shmbus
from shmbus import Consumer, Producer
from shmbus.segment.names import socket_path

Served = Callable[..., Daemon]
DATA = np.arange(8, dtype=np.int32)


def put(producer: Producer, key: str) -> None:
    producer.put(key, group_size=1, index=0, tokens=DATA)


def ended(served: Daemon) -> str:
    wait_until(lambda: not served.child.running, what="the end of the daemon of a removed bus")
    return served.child.finish()


def test_a_client_that_waits_on_a_removed_bus_is_told(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "8MiB")
    with Consumer(bus_name) as consumer:
        removal = threading.Timer(0.1, shmbus.unlink, [bus_name])
        removal.start()
        with pytest.raises(shmbus.BusRemovedError, match="there is no bus of that name now"):
            consumer.take(timeout=60)
        removal.join()
        with pytest.raises(shmbus.BusRemovedError):
            consumer.take(timeout=None)
    log = ended(served)
    assert f"bus '{bus_name}' was removed" in log and "Traceback" not in log


def test_what_a_removed_bus_holds_is_delivered_before_its_daemon_ends(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        for number in range(3):
            put(producer, str(number))
        (first,) = consumer.take(1, timeout=10)
        shmbus.unlink(bus_name)
        rest = consumer.take(1, timeout=10) + consumer.take(1, timeout=10)
        for group in [first, *rest]:
            assert np.array_equal(group[0]["tokens"], DATA)
            group.ack()
        with pytest.raises(shmbus.BusRemovedError):
            consumer.take(timeout=60)
    ended(served)


def test_a_removed_bus_leaves_its_name_to_the_next_daemon(daemon: Served, bus_name: str) -> None:
    old = daemon("--capacity", "8MiB", "--drain-timeout", 60, "--unlink-on-exit")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        put(producer, "old")
        (held,) = consumer.take(timeout=10)
        shmbus.unlink(bus_name)
        wait_until(lambda: "was removed" in old.child.output(), what="the daemon's word")
        new = daemon("--capacity", "8MiB")
        held.ack()
    ended(old)
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        put(producer, "new")
        (group,) = consumer.take(timeout=10)
        assert group.instance_id == "new"
        group.ack()
    new.stop()
    with pytest.raises(FileNotFoundError):
        open(socket_path(bus_name)).close()


def test_a_bus_that_was_removed_after_its_daemon_died_leaves_its_name_to_an_embedded_reader(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB").child.kill()
    shmbus.unlink(bus_name)
    with shmbus.Bus.create(bus_name, "8MiB"), Producer(bus_name) as producer:
        put(producer, "q")
        with Consumer(bus_name) as consumer:
            assert not consumer.has_daemon
            (group,) = consumer.take(timeout=10)
            group.ack()
