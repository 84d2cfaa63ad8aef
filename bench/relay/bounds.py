"""What bounds a relay: Ray's objects alone, one ray.put a trajectory, and a loopback socket."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import ray

from bench.relay.cluster import Account, on_side, pid_of

__all__ = ["BLOCK", "RECORD", "SIZE", "ray_bounds", "tcp"]

BLOCK: Final = 16 << 20
#: What a trajectory of 2,048 tokens with mask and logprobs takes on a bus.
RECORD: Final = 18_816
SIZE: Final = 8
BLOCKS: Final = 40
PUTS: Final = 400
TCP_BYTES: Final = 1 << 30


class Sink:
    """Takes blocks, or references."""

    def pid(self) -> int:
        """Return its process."""
        return os.getpid()

    def take(self, block: Any) -> int:
        """Return a block's size."""
        return len(block)

    def take_each(self, refs: list[Any]) -> int:
        """Return the size of what these refer to."""
        return sum(len(ray.get(each)) for each in refs)


class Source:
    """Sends blocks, or references."""

    def pid(self) -> int:
        """Return its process."""
        return os.getpid()

    def send(self, sink: Any, count: int, at_once: int) -> float:
        """Send blocks, so many at a time; return bytes per second."""
        block = np.zeros(BLOCK, np.uint8)
        began, under_way = time.perf_counter(), []
        for _ in range(count):
            under_way.append(sink.take.remote(block))
            if len(under_way) == at_once:
                ray.get(under_way.pop(0))
        ray.get(under_way)
        return count * BLOCK / (time.perf_counter() - began)

    def put_each(self, sink: Any, count: int) -> float:
        """Put each trajectory; return how many per second."""
        record = np.zeros(RECORD, np.uint8)
        began = time.perf_counter()
        for _ in range(0, count, SIZE):
            ray.get(sink.take_each.remote([ray.put(record) for _ in range(SIZE)]))
        return count / (time.perf_counter() - began)


def _answer(call: Callable[[], Any]) -> float:
    return float(ray.get(call()))


def ray_bounds(made: Any) -> dict[str, Any]:
    """Measure Ray alone: blocks of the relay's size, and one ray.put a trajectory."""
    sink, source = on_side(Sink, "right"), on_side(Source, "left")
    account = Account(made, {pid_of(source): "sender", pid_of(sink): "receiver"})
    # Until all of both stores has been touched: a page's first use costs as much as its copy.
    ray.get(source.send.remote(sink, BLOCKS, 3))
    rates: dict[int, float] = {}
    said: dict[str, Any] = {}
    for at_once in (2, 3):
        send = functools.partial(source.send.remote, sink, BLOCKS, at_once)
        rates[at_once], spent = account.over(BLOCKS * BLOCK, functools.partial(_answer, send))
        said[f"ray_blocks_{at_once}_at_once_gb_per_s"] = rates[at_once] / 1e9
        said[f"ray_blocks_{at_once}_at_once_cpu_s_per_gb"] = spent
    best = max(rates, key=rates.__getitem__)
    said["ray_blocks_gb_per_s"] = rates[best] / 1e9
    said["ray_bytes_cpu_s_per_gb"] = said[f"ray_blocks_{best}_at_once_cpu_s_per_gb"]["all"]
    said["ray_put_each_per_s"] = ray.get(source.put_each.remote(sink, PUTS))
    for actor in (sink, source):
        ray.kill(actor)
    return said


def tcp(total: int = TCP_BYTES) -> tuple[float, float]:
    """Return bytes per second through a socket of this machine, and processor seconds a GB."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            chunk = bytes(1 << 20)
            for _ in range(total >> 20):
                connection.sendall(chunk)

    thread = threading.Thread(target=send)
    began, spent = time.perf_counter(), time.process_time()
    thread.start()
    connection, _ = listener.accept()
    room, got = bytearray(1 << 20), 0
    while count := connection.recv_into(room):
        got += count
    thread.join()
    took_s = time.perf_counter() - began
    connection.close()
    listener.close()
    return got / took_s, (time.process_time() - spent) / got * 1e9
