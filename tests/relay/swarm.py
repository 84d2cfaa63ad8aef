"""Many simulated sources in a thread: each announces a record of the same real bus as its own."""

import contextlib
import struct
import threading
from collections.abc import Iterator

from conftest import beside
from relay.heads import export, pack_head
from relay.local import COORDINATOR, LocalRelay

from shmbus.relay import messages as m
from shmbus.relay.messages import ORIGIN_BYTES, Origin, unpack_heads
from shmbus.relay.record_reader import RecordReader, reason_of
from shmbus_ext import _core

_IDENTITY = slice(32, 48)
_CRC = struct.Struct("<I")
_CRC_AT = 60


def identity_of(number: int) -> bytes:
    return struct.pack(">QQ", 77, number)


def address_of(number: int) -> str:
    return f"source{number}"


def hello(number: int) -> m.Hello:
    return m.Hello(
        address_of(number), False, "swarm", identity_of(number).hex(), 1, 0, COORDINATOR,
        0, None, 0, 0, 0, 1, 1, 0, 0,
    )  # fmt: skip


class Swarm:
    """`count` sources, with a record of the reader's bus each."""

    def __init__(self, relay: LocalRelay, reader: RecordReader, count: int) -> None:
        self._relay, self._reader, self._count = relay, reader, count
        self.released: set[Origin] = set()
        self._real: dict[Origin, Origin] = {}
        self._heads: list[bytes] = []
        _, records = reader.poll(count)
        heads = unpack_heads(reader.identity, _core.read_heads(records, reason_of))
        for number, head in enumerate(heads):
            origin = identity_of(number) + head.origin[len(identity_of(0)) :]
            self._real[origin] = head.origin
            self._heads.append(pack_head(origin, head))
        assert len(self._heads) == count
        relay.coordinator.sources.update(dict.fromkeys(map(address_of, range(count))))
        self._boxes = [relay.exchange.open(address_of(number)) for number in range(count)]
        for number, box in enumerate(self._boxes):
            box.send(COORDINATOR, hello(number))
            self._announce(number, (0, 0))

    def _announce(self, number: int, answers: tuple[int, int]) -> None:
        bus = identity_of(number).hex()
        news = m.Announcement(bus, (1, 1 + answers[1]), True, self._heads[number], answers)
        self._boxes[number].send(COORDINATOR, news)

    def work(self) -> None:
        for number, box in enumerate(self._boxes):
            for envelope in box.receive(0.0):
                match envelope.message:
                    case m.HelloWanted():
                        box.send(envelope.sender, hello(number))
                    case m.Subscription() as asked:
                        self._announce(number, (asked.term, asked.question))
                    case m.Fetch() as asked if asked.origins:
                        answer = m.Fetched(
                            asked.sink, asked.incarnation, (), (), (1, 1), asked.number
                        )
                        box.send(envelope.sender, answer, self._block(asked.origins[0]))
                    case m.Release() as asked:
                        self.released |= asked.origins
                        said = m.Released(asked.bus, asked.sink, asked.origins, (1, 1))
                        box.send(envelope.sender, said)

    def _block(self, origin: Origin) -> bytes:
        block = bytearray(export(self._reader, [self._real[origin]]))
        block[_IDENTITY] = origin[: ORIGIN_BYTES // 2]
        _CRC.pack_into(block, _CRC_AT, _core.crc32c(bytes(block[:_CRC_AT])))
        return bytes(block)


@contextlib.contextmanager
def swarm(relay: LocalRelay, reader: RecordReader, count: int) -> Iterator[Swarm]:
    """Let a swarm answer until the end of the block."""
    made, over = Swarm(relay, reader, count), threading.Event()

    def work() -> None:
        while not over.wait(0.01):
            made.work()

    with beside(work):
        try:
            yield made
        finally:
            over.set()
