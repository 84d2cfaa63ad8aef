"""A whole relay in threads of this process, over mailboxes in its memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

import shmbus
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.messages import Envelope, Message, pack
from shmbus.relay.party import Opener, run_party
from shmbus.relay.sink_party import SinkParty
from shmbus.relay.source_party import SourceParty
from shmbus.stash.stash import StashPolicy

COORDINATOR = "coordinator"


class Exchange:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[str, deque[tuple[bytes, bytes]]] = {}

    def open(self, address: str) -> LocalMailbox:
        with self.changed:
            self.boxes[address] = deque()
        return LocalMailbox(self, address)


class LocalMailbox:
    """A mailbox of an Exchange. Messages are packed as usual."""

    def __init__(self, exchange: Exchange, address: str) -> None:
        self.address = address
        self._exchange = exchange
        self.opener = Opener(address)

    def send(
        self, to: str, message: Message, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Send a message, or lose it at an unknown address."""
        with self._exchange.changed:
            box = self._exchange.boxes.get(to)
            if box is not None:
                box.append((pack(self.address, message), bytes(payload)))
                self._exchange.changed.notify_all()

    def flush(self) -> None:
        """Do nothing: no message waits."""

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return arrived messages, after at most so long a wait for the first."""
        box = self._exchange.boxes[self.address]
        with self._exchange.changed:
            if not box and timeout_s > 0:
                self._exchange.changed.wait(timeout_s)
            taken = [box.popleft() for _ in range(len(box))]
        return [found for each in taken for found in self.opener.open(*each)]


class Boxes(dict[str, Any]):
    """Boxes of an exchange; nothing reaches an address cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[str] = set()

    def get(self, address: str, default: Any = None) -> Any:
        return default if address in self.cut else super().get(address, default)


class LocalRelay:
    """Sources, sinks and a coordinator, a thread each."""

    def __init__(
        self,
        sources: list[str],
        sinks: list[str],
        *,
        policy: StashPolicy | None = None,
        release: str = "acknowledged",
        keep: str = "",
    ) -> None:
        self.exchange = Exchange()
        self.boxes = self.exchange.boxes = Boxes()
        #: Addresses with a mailbox of a different version.
        self.kinds: dict[str, type[LocalMailbox]] = {}
        self.parties: dict[str, Any] = {}
        self.ended: dict[str, BaseException] = {}
        self._over = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._stops: dict[str, threading.Event] = {}
        self._makes: dict[str, Callable[[Any], Any]] = {}
        for each in sources:
            self.start(each, lambda box, bus=each: SourceParty(bus, box, COORDINATOR))
        for each in sinks:

            def sink(box: Any, bus: str = each) -> SinkParty:
                return SinkParty(bus, box, COORDINATOR, release, keep=keep)

            self.start(each, sink)
        self.start(COORDINATOR, lambda box: CoordinatorParty(box, sources, sinks, policy))

    def start(self, address: str, make: Callable[[Any], Any]) -> None:
        mailbox = self.exchange.open(address)
        if address in self.kinds:
            mailbox = self.kinds[address](self.exchange, address)
        stop = self._stops[address] = threading.Event()
        self._makes[address] = make
        self.parties.pop(address, None)

        def remake() -> Any:
            self.parties[address] = make(mailbox)
            return self.parties[address]

        def work() -> None:
            try:
                run_party(remake, mailbox, lambda: not (stop.is_set() or self._over.is_set()))
            except BaseException as error:
                self.ended[address] = error

        self._threads[address] = threading.Thread(target=work)
        self._threads[address].start()
        deadline = time.monotonic() + 30.0
        while address not in self.parties and address not in self.ended:
            assert time.monotonic() < deadline, f"{address} does not begin"
            time.sleep(0.001)

    def end(self, address: str) -> None:
        self._stops[address].set()
        self._threads[address].join()
        self.boxes.pop(address)

    def restart(self, address: str) -> None:
        self.end(address)
        self.start_again(address)

    def start_again(self, address: str) -> None:
        self.start(address, self._makes[address])

    def send(self, sender: str, to: str, message: Message, payload: bytes = b"") -> None:
        """Send a message in somebody's name."""
        before = self.exchange.boxes.get(sender)
        mailbox = self.exchange.open(sender)
        if before is not None:
            self.exchange.boxes[sender] = before
        mailbox.send(to, message, payload)

    @property
    def coordinator(self) -> CoordinatorParty:
        found: CoordinatorParty = self.parties[COORDINATOR]
        return found

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads.values():
            thread.join()


@contextmanager
def relay(sources: list[str], sinks: list[str], **options: Any) -> Iterator[LocalRelay]:
    """Run a relay; an error in a party is an error here."""
    made = LocalRelay(sources, sinks, **options)
    try:
        yield made
    finally:
        made.stop()
    for address, error in made.ended.items():
        raise AssertionError(f"{address} ended") from error


@contextmanager
def relayed(
    buses: dict[str, str], sources: str, taking: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """Run a relay; yield its trainer's consumer and a producer a source, in this order."""
    names = [buses[each] for each in sources]
    with relay(names, [buses["t"]], **options) as made, ExitStack() as stack:
        consumer = stack.enter_context(shmbus.Consumer(buses["t"], **(taking or {})))
        yield (made, consumer, *(stack.enter_context(shmbus.Producer(name)) for name in names))


CLAIM = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
while not producer.requests.retries():
    time.sleep(0.01)
"""


def have_splits(name: str, *labels: str) -> None:
    with shmbus.Producer(name) as producer:
        for label in labels:
            producer.cancelled("none", round=0, split=label)


def put_group(
    names: list[str], group: int, *, size: int = 4, values: int = 100, **more: Any
) -> None:
    producers = [shmbus.Producer(name) for name in names]
    for index in range(size):
        producers[index % len(names)].put(
            f"q{group}", group_size=size, index=index, score=float(index),
            tokens=np.full(values, group, np.int32), **more,
        )  # fmt: skip
    for producer in producers:
        producer.close()


#: Of tests with failing samples.
TWICE = StashPolicy(sample_retries=2, retry_timeout_s=60.0)


def stats(name: str) -> shmbus.BusStats:
    with shmbus.Bus.open(name) as bus:
        return bus.stats()
