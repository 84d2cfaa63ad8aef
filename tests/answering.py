"""Producers that answer the requests of buses, each in a thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import shmbus

Answer = Callable[[shmbus.Producer, shmbus.Request], Any]


@contextmanager
def answering(buses: str | list[str], answer: Answer) -> Iterator[None]:
    over = threading.Event()

    def work(bus: str) -> None:
        with shmbus.Producer(bus) as producer:
            while not over.is_set():
                request = producer.requests.next(timeout=0.05)
                if request is not None:
                    answer(producer, request)

    names = [buses] if isinstance(buses, str) else buses
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
