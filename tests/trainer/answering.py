"""A producer that answers the requests of a trainer, in a thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import shmbus

Answer = Callable[[shmbus.Producer, shmbus.Request], Any]


@contextmanager
def answering(bus: str, answer: Answer) -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        with shmbus.Producer(bus) as producer:
            while not over.is_set():
                request = producer.requests.next(timeout=0.05)
                if request is not None:
                    answer(producer, request)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
