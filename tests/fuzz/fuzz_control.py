"""The daemon's decoder and dispatcher: no client's message harms a different client.

An input is a sequence of acts: a client says Hello, sends a well-formed message, any bytes, or
goes. Afterwards every client goes, and the ledger must account for every trajectory, none leased.
"""

import atexit
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Bytes, run

import shmbus
from shmbus import errors
from shmbus.control import messages
from shmbus.daemon.leases import Session
from shmbus.daemon.service import Service
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy

_NAME = f"fuzz-{os.getpid()}"
_CLIENTS = 4
_MOST_ACTS = 200


class FuzzedService:
    """A service over a small bus, removed when the fuzzer ends."""

    def __init__(self) -> None:
        shmbus.Bus.create(_NAME, "256KiB", max_producers=2, extent_bytes=4096).close()
        atexit.register(shmbus.unlink, _NAME)
        self.producer = shmbus.Producer(_NAME)
        self.collector = Collector(_NAME, StashPolicy())
        self.numbers = itertools.count()
        self.service = Service(self.collector, {})

    def put(self) -> None:
        number = next(self.numbers)
        try:
            for index in range(2):
                self.producer.put(
                    f"g{number}", group_size=2, index=index, tokens=np.zeros(50), timeout=0
                )
        except shmbus.BusFullError:
            return

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
        )

    def request(self, given: Bytes) -> messages.Request:
        """Return a possible message of a client, with small or huge numbers."""

        def number() -> int:
            return given.number(8) >> 1 if given.number() == 255 else given.number()

        makers: list[Callable[[], Any]] = [
            lambda: messages.Take(
                id=number(), max_groups=1 + number(), timeout_s=0.0, ahead=number() % 2 == 1
            ),
            lambda: messages.TakeStep(
                id=number(), groups=1 + number() % 3, max_wait_s=0.0, timeout_s=number() / 100
            ),
            lambda: messages.TakeStep(id=number(), tokens=1 + number(), max_wait_s=0.0),
            lambda: messages.End(numbers=[number(), number()], reason=number() % 256),
            lambda: messages.GiveBack(numbers=[number(), number()]),
            lambda: messages.Claim(
                groups=[
                    messages.Held(
                        token=number(),
                        identities=b"".join(
                            number().to_bytes(8, "little") for _ in range(number() % 5)
                        ),
                        reason=number() % 8 - 1,
                        step=number(),
                    )
                ],
                last=number() % 2 == 0,
            ),
            lambda: messages.SetPolicyVersion(id=number(), policy_version=number()),
            lambda: messages.GetLedger(id=number()),
            lambda: messages.GetStatus(id=number()),
            lambda: messages.Bye(),
        ]
        return makers[given.number() % len(makers)]()

    def say(self, session: Session, body: bytes) -> bool:
        """Act like Connection; return False at the connection's end."""
        try:
            request = messages.decode_request(body)
            if isinstance(request, (messages.Bye, messages.Hello)):
                return False
            self.service.handle(session, request)
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
                self.put()
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
                body = (
                    given.take(given.number())
                    if act % 8 == 2
                    else messages.frame(self.request(given))[4:]
                )
                if act % 8 == 7 or not self.say(session, body):
                    service.leave(sessions.pop(slot), orderly=act < 128)
        for session in sessions.values():
            service.leave(session, orderly=False)
        service.tick(time.monotonic() + 10)
        self.check()

    def check(self) -> None:
        """Check for losses; then empty the bus, like a correct client."""
        service = self.service
        assert not service.leased_groups, service.leased_groups
        replies: list[messages.Reply] = []
        session = service.hello(
            messages.Hello(version=messages.VERSION, bus=_NAME), lambda *some: replies.extend(some)
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
        service.leave(session, orderly=True)

    def close(self) -> None:
        self.collector.close()
        self.producer.close()


if __name__ == "__main__":
    run(FuzzedService)
