"""What the tests of the request lane share."""

from conftest import work_until

from shmbus import Bus, Consumer, Producer, Request
from shmbus_ext import _core


def totals(bus: Bus) -> tuple[int, ...]:
    return _core.request_totals(bus._segment)[:6]


def held(bus: Bus) -> int:
    """Places of the bound on groups that begun groups hold."""
    return _core.lead_state(bus._segment)[1]


def take_all(producer: Producer) -> list[Request]:
    found = []
    while (request := producer.requests.next(0)) is not None:
        found.append(request)
    return found


def ask(consumer: Consumer, producer: Producer) -> list[Request]:
    """Let the consumer work, which has no group to take, until a sample is asked for; take it."""
    found: list[Request] = []

    def asked() -> bool:
        found.extend(take_all(producer))
        return bool(found)

    work_until(consumer, asked)
    return found
