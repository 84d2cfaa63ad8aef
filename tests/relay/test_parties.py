"""A relay over buses of this machine: records across, ends back, and refusals."""

import struct
import time
from typing import Any

import numpy as np
import pytest
from conftest import take_groups, wait_until
from relay.local import COORDINATOR, LocalMailbox, LocalRelay, put_group, relay, relayed, stats

import shmbus
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text
from shmbus.relay import messages as m
from shmbus.relay.command import show_relay
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.messages import PROTOCOL, Envelope, pack
from shmbus.relay.party import Opener
from shmbus.relay.sink_party import ENDS_S, SinkParty
from shmbus.relay.source_party import SourceParty
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

pytest_plugins = ["relay.relay_fixtures"]


def trained(bus: str) -> str:
    """Attach, and acknowledge the next group; return its id."""
    with shmbus.Consumer(bus) as consumer:
        (group,) = take_groups(consumer, 1)
        group.ack()
        return group.instance_id


def test_a_source_holds_a_record_until_the_trainers_ack(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]), shmbus.Consumer(buses["t"]) as consumer:
        put_group([buses["a"]], 1)
        (group,) = take_groups(consumer, 1)
        assert stats(buses["a"]).undelivered == 4
        group.ack()
        wait_until(lambda: stats(buses["a"]).acknowledged == 4)


def test_a_source_learns_why_the_trainer_dropped_a_group(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]), shmbus.Consumer(buses["t"]) as consumer:
        put_group([buses["a"]], 1)
        (group,) = take_groups(consumer, 1)
        consumer.drop(group, reason="filtered")
        wait_until(lambda: stats(buses["a"]).dropped == {"filtered": 4})


def test_with_release_put_a_source_has_its_space_at_once(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]], release="put"):
        put_group([buses["a"]], 1)
        wait_until(lambda: stats(buses["a"]).dropped == {"relayed": 4})
        assert stats(buses["t"]).undelivered == 4


def test_workers_see_the_trainers_policy_version_and_its_pause(buses: dict[str, str]) -> None:
    with relayed(buses, "a") as (_, _, producer), shmbus.Bus.open(buses["t"]) as bus:
        bus.policy_version = 12
        wait_until(lambda: producer.policy_version == 12)
        bus.pause("new weights")
        with shmbus.Bus.open(buses["a"]) as source:
            wait_until(lambda: source.paused is not None and "new weights" in source.paused)
            bus.resume()
            wait_until(lambda: source.paused is None)


def test_a_pause_of_a_sources_own_stays_its_own(buses: dict[str, str]) -> None:
    with (
        relay([buses["a"]], [buses["t"]]),
        shmbus.Bus.open(buses["a"]) as source,
        shmbus.Bus.open(buses["t"]) as bus,
    ):
        source.pause("mine")
        # With each version the source learns about the trainer's unpaused bus.
        for version in (3, 4):
            bus.policy_version = version
            wait_until(lambda version=version: source.policy_version == version)
            assert source.paused == "mine"


def test_a_useless_group_never_crosses(buses: dict[str, str]) -> None:
    policy = StashPolicy(skip_zero_variance=True)
    with relay([buses["a"]], [buses["t"]], policy=policy):
        with shmbus.Producer(buses["a"]) as producer:
            for i in range(4):
                producer.put("q", group_size=4, index=i, score=1.0)
        wait_until(lambda: stats(buses["a"]).dropped == {"zero_variance": 4})
        assert stats(buses["t"]).committed == 0


def test_a_small_bus_never_stands_still_beside_uneven_sources(bus_name: str) -> None:
    fast, slow, small = (f"{bus_name}.{each}" for each in ("fast", "slow", "small"))
    groups, values = 150, 6000
    with (
        shmbus.Bus.create(fast, "8MiB"),
        shmbus.Bus.create(slow, "8MiB"),
        # Room for the halves of a third of the groups.
        shmbus.Bus.create(small, "1MiB", max_producers=2),
        relay([fast, slow], [small]),
        shmbus.Consumer(small) as consumer,
    ):
        for first in range(0, groups, 50):
            for half, name in ((0, fast), (1, slow)):
                with shmbus.Producer(name) as producer:
                    for i in range(first, first + 50):
                        put_half(producer, i, half, values)
            for group in take_and_end(consumer, 50):
                assert int(group[1:]) in range(first, first + 50)


def put_half(producer: shmbus.Producer, group: int, half: int, values: int) -> None:
    producer.put(
        f"q{group}", group_size=2, index=half, score=half, tokens=np.zeros(values, np.int32)
    )


def take_and_end(consumer: shmbus.Consumer, count: int) -> list[str]:
    found: list[str] = []
    deadline = time.monotonic() + 30.0
    while len(found) < count:
        assert time.monotonic() < deadline, f"it stands still at {len(found)}"
        for group in consumer.take(timeout=0.1):
            found.append(group.instance_id)
            group.ack()
    return found


def test_status_says_who_relays_and_what_waits_for_which_source(buses: dict[str, str]) -> None:
    assert read_status(buses["t"]).relay is None
    with relay([buses["a"]], [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        put_group([buses["a"]], 1)
        (group,) = take_groups(consumer, 1)
        wait_until(lambda: (of_source := read_status(buses["a"]).relay) and of_source.held == 4)
        found = read_status(buses["t"])
        assert found.relay is not None and found.relay.is_sink and found.relay.settled == 4
        bus = made.parties[buses["a"]].source.bus
        assert found.relay.held_for == {bus: 4}
        assert f"bus {bus}: 4 are held there too" in status_text(found)
        assert "holds 4, has let 0 go" in status_text(read_status(buses["a"]))
        group.ack()
        wait_until(lambda: (of_sink := read_status(buses["t"]).relay) and not of_sink.held_for)


@pytest.mark.parametrize("who", ["coordinator", "a", "t"])
def test_partition_losses_are_repeated(buses: dict[str, str], who: str) -> None:
    with relay([buses["a"]], [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        put_group([buses["a"]], 1)
        take_groups(consumer, 1)[0].ack()
        number = made.parties[buses["a"]].source.number
        made.boxes.cut = {buses.get(who, who)}
        put_group([buses["a"]], 2)
        wait_until(lambda: made.parties[buses["a"]].source.number > number)
        time.sleep(0.1)  # for its arrival, or its loss
        made.boxes.cut = set()
        (group,) = take_groups(consumer, 1)
        assert group.instance_id == "q2"
        group.ack()
        wait_until(lambda: stats(buses["a"]).acknowledged == 8)


def test_an_unwanted_group_is_dropped(bus_name: str, caplog: pytest.LogCaptureFixture) -> None:
    large, small = f"{bus_name}.large", f"{bus_name}.small"
    with (
        shmbus.Bus.create(large, "8MiB"),
        shmbus.Bus.create(small, "256KiB", max_producers=2),
        relay([large], [small]),
        shmbus.Consumer(small) as consumer,
    ):
        put_group([large], 1, values=50_000)
        wait_until(lambda: stats(large).dropped == {"malformed": 4})
        wait_until(lambda: "fits no trainer's bus" in caplog.text)
        assert "more capacity" in caplog.text
        put_group([large], 2)
        assert take_groups(consumer, 1)[0].instance_id == "q2"


def test_a_sources_new_bus_goes_on_and_losses_are_counted(buses: dict[str, str]) -> None:
    sources = [buses["a"], buses["b"]]
    with relay(sources, [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        with shmbus.Producer(buses["a"]) as producer:
            producer.put("half", group_size=2, index=0, score=1.0)
        wait_until(lambda: made.coordinator.note().announced == 1)
        shmbus.unlink(buses["a"])
        shmbus.Bus.create(buses["a"], "4MiB").close()
        wait_until(lambda: made.coordinator.lost == 1)
        put_group(sources, 5)
        assert take_groups(consumer, 1)[0].instance_id == "q5"
        assert made.coordinator.note().announced == 0


def test_unacknowledged_groups_of_a_removed_bus_return(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]):
        put_group([buses["a"]], 1)
        wait_until(lambda: stats(buses["t"]).committed == 4)
        shmbus.unlink(buses["t"])
        shmbus.Bus.create(buses["t"], "4MiB").close()
        with shmbus.Consumer(buses["t"]) as consumer:
            (group,) = take_groups(consumer, 1)
            assert (group.instance_id, len(group)) == ("q1", 4)
            group.ack()
        wait_until(lambda: stats(buses["a"]).acknowledged == 4)


def test_acks_during_a_half_put_block_reach_the_source(buses: dict[str, str]) -> None:
    a, t = buses["a"], buses["t"]
    count = 24
    shmbus.unlink(a)
    shmbus.Bus.create(a, "16MiB").close()  # larger than the trainer's
    with relay([a], [t]) as made, shmbus.Consumer(t) as consumer:
        sink: SinkParty = made.parties[t]
        held: list[shmbus.Group] = []
        for i in range(count):
            put_group([a], i, size=1, values=50_000)  # two of them make a block
            held += consumer.take(timeout=0.05)
        done = 0

        def is_half_put() -> bool:
            """The bus is full, with one of a block's two records."""
            nonlocal done
            held.extend(consumer.take(timeout=0.2))
            if sink._order and sink._put == 1 and stats(t).committed == len(held) + done:
                time.sleep(4 * ENDS_S)  # a put under way would end in this time
                return sink._put == 1
            if held:
                held.pop(0).ack()
                done += 1
            return False

        wait_until(is_half_put)
        last = held.pop()
        assert last.instance_id == f"q{len(held) + done}"
        view = last[0]["tokens"]  # keeps its space beyond the acknowledgement
        last.ack()
        time.sleep(4 * ENDS_S)
        assert sink._put == 1
        del view, last

        def is_told() -> bool:
            held.extend(consumer.take(timeout=0.05))  # looks for space without views
            return stats(a).acknowledged == done + 1

        wait_until(is_told)


def test_another_version_is_refused_with_both(caplog: pytest.LogCaptureFixture) -> None:
    opener = Opener("node8")
    packed = bytearray(pack("node7", m.HelloWanted()))
    assert opener.open(bytes(packed), b"")[0].sender == "node7"
    packed[1] = 77  # the first number of five
    for _ in range(3):
        assert opener.open(bytes(packed), b"") == []
    assert opener.refused == 3
    (told,) = [record.getMessage() for record in caplog.records]
    assert "node7 speaks protocol 77" in told
    assert f"node8 protocol {PROTOCOL} with bus layout {_core.LAYOUT_VERSION}" in told
    assert "the same version of shmbus on both nodes" in told
    for junk in (b"", b"\xc1", struct.pack("<Q", 1), pack("x", m.HelloWanted())[:-1]):
        assert opener.open(junk, b"") == []


class OldMailbox(LocalMailbox):
    """The mailbox of a node with the previous shmbus."""

    def send(self, to: str, message: m.Message, payload: Any = b"") -> None:
        """Send under the old version's number, the first of five."""
        box = self._exchange.boxes.get(to)
        if box is not None:
            packed = bytearray(pack(self.address, message))
            packed[1] = PROTOCOL - 1
            box.append((bytes(packed), bytes(payload)))

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Refuse every message of this version."""
        super().receive(timeout_s)
        return []


def test_a_node_of_the_previous_release_is_refused_by_name(buses: dict[str, str]) -> None:
    a, b, t = buses["a"], buses["b"], buses["t"]
    with relay([a], [t]) as made:
        made.coordinator.joined.append(b)
        made.kinds[b] = OldMailbox
        made.start(b, lambda box: SourceParty(b, box, COORDINATOR))
        put_group([b], 1)
        put_group([a], 2)
        assert trained(t) == "q2"
        wait_until(lambda: stats(a).acknowledged == 4)
        note = made.coordinator.note()
        assert note.missing == [b] and note.refused > 0
        (why,) = note.why_refused
        assert f"{b} speaks protocol {PROTOCOL - 1}" in why and COORDINATOR in why
        assert "the same version of shmbus on both nodes" in why
        assert any(
            "install the same version" in line for line in show_relay("x", note).splitlines()
        )
        assert stats(b).committed == 4 and stats(b).acknowledged == 0
        del made.kinds[b]
        made.restart(b)
        assert trained(t) == "q1"
        wait_until(lambda: stats(b).acknowledged == 4)


def test_of_two_coordinators_the_older_one_ends(buses: dict[str, str]) -> None:
    made = LocalRelay([buses["a"]], [buses["t"]])
    try:
        wait_until(lambda: made.coordinator.pure is not None)
        sources, sinks = [buses["a"]], [buses["t"]]
        made.start("second", lambda box: CoordinatorParty(box, sources, sinks))
        wait_until(lambda: COORDINATOR in made.ended)
        assert isinstance(made.ended[COORDINATOR], shmbus.BusBusyError)
        put_group([buses["a"]], 1)
        with shmbus.Consumer(buses["t"]) as consumer:
            take_groups(consumer, 1)
    finally:
        made.stop()


def test_a_coordinator_that_no_sink_heard_cuts_no_source_off(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        wait_until(lambda: made.coordinator.pure is not None and buses["a"] in made.parties)
        bus = made.parties[buses["a"]].source.bus
        made.send(COORDINATOR, buses["a"], m.Subscription(bus, 1 << 40))
        wait_until(lambda: made.coordinator.pure and made.coordinator.pure.term > 1 << 40)
        put_group([buses["a"]], 1)
        take_groups(consumer, 1)


def test_a_doubled_bus_is_refused(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with relay([buses["a"], buses["b"]], [buses["t"]]) as made:
        wait_until(lambda: len(made.coordinator.hellos) == 3)
        hello, _ = made.coordinator.hellos[buses["a"]]
        made.send("x", COORDINATOR, hello._replace(address=buses["b"]))
        wait_until(lambda: made.coordinator.refused == 1)
        assert f"is announced by {buses['b']} and by {buses['a']}" in caplog.text
        made.send("x", COORDINATOR, hello._replace(address="stranger"))
        wait_until(lambda: made.coordinator.refused == 2)
        assert "stranger is not among the relay's peers" in caplog.text


def test_a_second_relay_for_one_bus_is_refused(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]) as made:
        wait_until(lambda: made.coordinator.pure is not None)
        mailbox = made.exchange.open("other")
        with pytest.raises(shmbus.BusBusyError, match="another relay puts records onto it"):
            SinkParty(buses["t"], mailbox, COORDINATOR)
        with pytest.raises(shmbus.BusBusyError, match="relay"):
            shmbus.Consumer(buses["a"])
