"""The daemon's log: what clients cause is told once, and then summed up."""

import socket
from collections.abc import Callable

import pytest
from conftest import Daemon, wait_until

from shmbus import Consumer, Producer
from shmbus.segment.names import socket_path

Served = Callable[..., Daemon]


def garbage(name: str, count: int) -> None:
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(socket_path(name))
            connection.sendall(b"\xff" * 64)
            while connection.recv(65536):
                pass


def test_a_thousand_bad_clients_are_one_line_and_a_sum(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "1MiB")
    garbage(bus_name, 1000)
    # A new cause gets its own line.
    with Consumer(bus_name), pytest.raises(ValueError, match="the daemon decides"):
        Consumer(bus_name, group_timeout=3)
    wait_until(lambda: "the daemon decides" in served.child.output())
    said = served.stop()
    refused = [line for line in said.splitlines() if "refused a client" in line]
    assert len(refused) == 3, said
    assert "999 more since the last such line; the latest: refused a client: " in refused[-1]


def test_silent_connections_are_one_line_and_a_sum(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "1MiB")
    silent = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for connection in silent:
        connection.connect(socket_path(bus_name))
    for connection in silent:
        while connection.recv(65536):
            pass
        connection.close()
    said = [line for line in served.stop().splitlines() if "no Hello within" in line]
    assert len(said) == 2
    assert "refused clients (no Hello): 49 more" in said[1]


def test_drops_are_in_the_daemons_log(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "1MiB")
    with Producer(bus_name, label="worker-7") as producer, Consumer(bus_name) as consumer:
        for _ in range(5):
            producer.put("a", group_size=2, index=0)
        wait_until(lambda: consumer.stats().dropped.get("duplicate") == 4)
    said = [line for line in served.stop().splitlines() if " as duplicate" in line]
    assert "group 'a', from producer 2 (worker-7, pid" in said[0]
    assert "dropped 3 more trajectories as duplicate" in said[1]
