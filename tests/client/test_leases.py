"""A client's leases without a daemon: locks, messages, and effects of a reconnect."""

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from shmbus import Bus, Producer
from shmbus.base import limits
from shmbus.client.leases import ClientLease, ClientState, Leases
from shmbus.control import messages
from shmbus.segment import lifecycle
from shmbus_ext import _core

GROUPS = 3


class Dialogue:
    """A client's leases, and in place of the daemon a lending reader."""

    def __init__(self, bus: Bus) -> None:
        self.reader = _core.Reader(lifecycle.open_segment(bus.name), "test")
        self.reader.lend()
        self.state = ClientState()
        self.leases = Leases(lifecycle.open_segment(bus.name, read_only=True), self.state)
        self.leases.set_client(0)
        self.ends = socket.socketpair()

    def locks(self) -> int:
        """Count the extents under a lease lock."""
        return sum(count for _, count in self.reader.segment.locks_held(1))

    def grant(self, step: int = -1) -> list[ClientLease]:
        """Lease every record as a group, by the numbers 10, 11, ..."""
        granted = [
            messages.Granted(number=10 + at, size=1, places=_core.places([sample]))
            for at, sample in enumerate(self.reader.poll(GROUPS))
        ]
        answer = messages.Leases(id=1, groups=granted, step=step)
        return self.leases.receive(answer, self.ends[0].fileno())


@pytest.fixture
def dialogue(bus_name: str) -> Iterator[Dialogue]:
    with Bus.create(bus_name, "1MiB", max_producers=2) as bus:
        with Producer(bus.name) as producer:
            for number in range(GROUPS):
                # Larger than an extent: no two share a lock.
                data = np.zeros(bus.stats().capacity // 8, np.uint8)
                producer.put(f"g{number}", group_size=1, index=0, data=data)
        made = Dialogue(bus)
        yield made
        made.leases.borrower.close()
        for end in made.ends:
            end.close()
        made.reader.close()


def test_a_lease_is_locked_until_the_daemon_has_confirmed_its_end(dialogue: Dialogue) -> None:
    leases = dialogue.leases
    first, second, _ = dialogue.grant()
    assert dialogue.locks() == GROUPS
    leases.end(first, _core.ACKED)
    leases.end(second, _core.DROP_MALFORMED)
    assert not leases.is_leased(first) and dialogue.locks() == GROUPS
    ends = list(leases.unsent_ends())
    assert {(e.reason, *e.numbers) for e in ends} == {
        (_core.ACKED, 10), (_core.DROP_MALFORMED, 11),
    }  # fmt: skip
    assert list(leases.unsent_ends()) == [] and leases.borrower.unconfirmed == 2
    leases.borrower.confirm(dialogue.state.leases, [10, 11, 99])
    assert dialogue.locks() == 1 and leases.borrower.unconfirmed == 0
    assert list(dialogue.state.leases) == [12]


def test_claims_are_split_by_size(dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue.grant(step=4)
    assert dialogue.state.next_step == 5
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 2 * (16 + 64))
    tokens, claims = dialogue.leases.claims()
    assert [len(claim.groups) for claim in claims] == [1] * GROUPS
    assert [claim.last for claim in claims] == [False, False, True]
    assert {held.token for claim in claims for held in claim.groups} == set(tokens)
    assert {held.step for claim in claims for held in claim.groups} == {4}


def test_nothing_is_kept_of_what_arrived_on_a_connection_that_is_over(dialogue: Dialogue) -> None:
    dialogue.ends[1].close()
    assert dialogue.grant() == [] and dialogue.leases.borrower.ready == []
    assert dialogue.state.leases == {} and dialogue.locks() == 0
