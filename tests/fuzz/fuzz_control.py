"""The daemon's decoder and dispatcher: no client's message harms a different client.

An input is a sequence of acts: a client says Hello, sends a well-formed message, any bytes, or
goes. Afterwards every client goes, and the ledger must account for every trajectory, none leased.
"""

import atexit
import itertools
import os
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec.inspect
from harness import Bytes, run

import shmbus
from shmbus import errors
from shmbus.control import messages
from shmbus.daemon.leases import Session
from shmbus.daemon.service import Service
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

_NAME = f"fuzz-{os.getpid()}"
_CLIENTS = 4
_MOST_ACTS = 200
_GROUP_TIMEOUT_S = 1000.0
_KINDS = get_args(messages.Request)
_SPLITS = ("train", "eval", "of no group")


def make(kind: Any, given: Bytes, likely: Mapping[str, Sequence[Any]]) -> Any:
    """Make a message of likely values (by field), small and huge numbers, and odd text."""

    def value(name: str, of: Any) -> Any:
        way, some = given.number(), likely.get(name, ())
        match of:
            case msgspec.inspect.UnionType(types=types):
                return value(name, types[way % len(types)])
            case msgspec.inspect.ListType(item_type=item):
                return [value(name, item) for _ in range(way % 5)]
            case msgspec.inspect.StructType(cls=cls):
                return make(cls, given, likely)
            case msgspec.inspect.StrType() if some and way < 200:
                return some[way % len(some)]
            case msgspec.inspect.StrType(min_length=least, max_length=most):
                least = least or 0
                return "a\0é\U0010ffff"[way % 4] * (least + given.number(2) % (most + 1 - least))
            case msgspec.inspect.BytesType():
                some = some or (bytes(16), bytes(32), b"cut")
                return b"".join(some[given.number() % len(some)] for _ in range(way % 5))
            case msgspec.inspect.IntType(ge=least, le=most, lt=end):
                least, end = least or 0, end or (2**31 if most is None else most + 1)
                number = given.number(8) if way == 255 else way - 1
                return least + (number - least) % (end - least)
            case msgspec.inspect.FloatType(le=most):
                return most if way == 255 else way / 100
            case msgspec.inspect.BoolType():
                return way % 2 == 1
            case msgspec.inspect.NoneType():
                return None
            case msgspec.inspect.DictType():
                return {}
        raise AssertionError(f"{kind.__name__}.{name}: no maker of {of}")

    return kind(**{x.name: value(x.name, x.type) for x in msgspec.inspect.type_info(kind).fields})


def request(given: Bytes, likely: Mapping[str, Sequence[Any]]) -> messages.Request:
    """Make a well-formed message of a client, of any kind."""
    return make(_KINDS[given.number() % len(_KINDS)], given, likely)


class FuzzedService:
    """A service over a small bus, removed when the fuzzer ends."""

    def __init__(self) -> None:
        shmbus.Bus.create(_NAME, "256KiB", max_producers=2, extent_bytes=4096).close()
        atexit.register(shmbus.unlink, _NAME)
        self.producer = shmbus.Producer(_NAME)
        self.collector = Collector(_NAME, StashPolicy(group_timeout_s=_GROUP_TIMEOUT_S))
        self.groups, self.sequences = itertools.count(), itertools.count()
        self.service = Service(self.collector, {})
        [self.bus] = _core.lineage(self.collector.segment)
        #: Latest groups, and their samples' identities and lasting names.
        self.likely: dict[str, Any] = {
            "instance_id": deque(["of no sample"], maxlen=8),
            "identities": deque([bytes(16)], maxlen=8),
            "names": deque([bytes(32)], maxlen=8),
            "split": _SPLITS,
            "field": ("tokens", "absent"),
        }

    def put(self, way: int) -> None:
        """Put a sample of a new group, or both, while the bus has room."""
        group, where = f"g{next(self.groups)}", {"split": _SPLITS[way // 2 % 2], "timeout": 0}
        for index in range(1 + way % 2):
            try:
                self.producer.put(group, group_size=2, index=index, tokens=[0] * 50, **where)
            except shmbus.BusFullError:
                return
            number, sequence = self.producer.producer_id, next(self.sequences)
            self.likely["instance_id"].append(group)
            self.likely["identities"].append(struct.pack("<QQ", number, sequence))
            self.likely["names"].append(self.bus + struct.pack(">QQ", number, sequence))

    def hello(self, given: Bytes) -> messages.Hello:
        kind = given.number()
        return messages.Hello(
            version=messages.VERSION,
            bus=_NAME,
            rank=kind % 4,
            world_size=1 + kind // 4 % 3,
            client=given.number() % 8 - 1 if kind & 16 else -1,
            next_step=given.number() if kind & 32 else 0,
            observer=kind & 192 == 192,
            split=_SPLITS[given.number() // 200],
        )

    def say(self, session: Session, body: bytes) -> bool:
        """Act like Connection and Server; return False at the connection's end."""
        service = self.service
        try:
            request = messages.decode_request(body)
            if isinstance(request, messages.Bye):
                return False
            if not isinstance(request, messages.TakeSnapshot):
                service.handle(session, request)
            elif service.frozen:
                service.thaw()
            else:
                service.freeze()
        except errors.ProtocolError:
            return False
        return True

    def run(self, data: bytes) -> None:
        given = Bytes(data)
        # Every second daemon just began, and waits for an earlier daemon's clients.
        if given.number() % 2:
            self.service = Service(self.collector, {})
        service = self.service
        sessions: dict[int, Session] = {}
        for _ in range(_MOST_ACTS):
            if not given:
                break
            act = given.number()
            slot = act // 8 % _CLIENTS
            session = sessions.get(slot)
            if act % 8 == 0:
                self.put(given.number())
            elif act % 8 == 1:
                service.tick(time.monotonic() + given.number() / 50)
            elif session is None:
                came = service.hello(
                    self.hello(given),
                    lambda *replies: [messages.frame(each) for each in replies] and None,
                )
                if isinstance(came, Session):
                    sessions[slot] = came
            else:
                if act % 8 == 2:
                    body = given.take(given.number())
                else:
                    body = messages.frame(request(given, self.likely))[4:]
                if act % 8 == 7 or not self.say(session, body):
                    service.leave(sessions.pop(slot), orderly=act < 128)
        if service.frozen:
            service.thaw()
        for session in sessions.values():
            service.leave(session, orderly=False)
        for later_s in (10.0, 2 * _GROUP_TIMEOUT_S):
            service.pump(time.monotonic())
            service.tick(time.monotonic() + later_s)
        for split in _SPLITS[:2]:
            self.check(split)

    def check(self, split: str) -> None:
        """Check for losses; then empty the bus of a split, like a correct client."""
        service = self.service
        assert not service.leased_groups, service.leased_groups
        replies: list[messages.Reply] = []
        session = service.hello(
            messages.Hello(version=messages.VERSION, bus=_NAME, split=split),
            lambda *some: replies.extend(some),
        )
        assert isinstance(session, Session), session
        while True:
            service.pump(time.monotonic())
            service.handle(session, messages.Take(id=0, max_groups=64, timeout_s=0.0))
            service.tick(time.monotonic() + 1)
            reply = replies.pop()
            assert isinstance(reply, messages.Leases), reply
            if not reply.groups:
                break
            numbers = [group.number for group in reply.groups]
            service.handle(session, messages.End(numbers=numbers, reason=0))
        ledger = service.ledger()
        assert ledger.balanced and not ledger.leased and not ledger.in_ring, ledger
        assert not ledger.stashed or split != _SPLITS[1], ledger
        service.leave(session, orderly=True)

    def close(self) -> None:
        self.collector.close()
        self.producer.close()


if __name__ == "__main__":
    run(FuzzedService)
