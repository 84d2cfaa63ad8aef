"""Wrong messages of a relay's peers: refused by names, counted, and nothing stands still."""

import pytest
from conftest import take_groups, wait_until
from relay.heads import RecordHead, head_of, pack_heads
from relay.local import COORDINATOR, put_group, relay

import shmbus
from shmbus.relay import messages as m
from shmbus.relay.coordinator import Coordinator
from shmbus.relay.coordinator_party import Clocks
from shmbus.relay.messages import OriginHead

pytest_plugins = ["relay.relay_fixtures"]

SECOND = 1_000_000_000
HOUR = 3600 * SECOND


def test_an_offset_of_clocks_is_that_of_the_quickest_word() -> None:
    clocks = Clocks()
    assert clocks.offset_ns("a") == 0
    for delay in (40, 3, 25):
        assert clocks.note("a", HOUR + 100 - delay, 100) == 0.0
    assert clocks.offset_ns("a") == HOUR - 3
    # A message held back for a minute by a partition is no jump.
    assert clocks.note("a", HOUR, 60 * SECOND) == 0.0
    assert clocks.offset_ns("a") == HOUR - 3 and clocks.offset_ns("b") == 0


@pytest.mark.parametrize("by_s", [7200, -7200])
def test_a_clock_that_jumps_is_told_once_and_followed(by_s: int) -> None:
    clocks = Clocks()
    now = 0
    for _ in range(20):
        now += SECOND
        assert clocks.note("a", now + HOUR, now) == 0.0
    told = []
    for _ in range(20):
        now += SECOND
        told.append(clocks.note("a", now + HOUR + by_s * SECOND, now))
    assert [each for each in told if each] == [by_s]
    assert clocks.offset_ns("a") == HOUR + by_s * SECOND


def head(
    bus: str,
    index: int,
    committed_ns: int,
    *,
    sequence: int = 0,
    size: int = 2,
    reason: str | None = None,
) -> OriginHead:
    of = RecordHead(1, sequence, "q", None, size, index, 0.0, 0, 64, committed_ns, 7, size, reason)
    return head_of(bus, of)


@pytest.mark.parametrize(("made_ns", "late"), [(40, True), (60, False)])
def test_which_of_two_machines_was_first_is_judged_by_one_clock(made_ns: int, late: bool) -> None:
    """A report of a sample put meanwhile is late, though its machine runs for longer."""
    a, b = "a" * 32, "b" * 32
    made = Coordinator(3, [a, b], ["t"])
    made.begin()
    made.clocks_ns = {a: 0, b: 900 * HOUR}
    both = (head(a, 0, 50), head(a, 1, 50, sequence=1))
    made.announced(m.Announcement(a, (1, 1), True, pack_heads(both)), 0.0)
    report = head(b, 1, made_ns + 900 * HOUR, reason="gone")
    made.announced(m.Announcement(b, (1, 1), True, pack_heads([report])), 0.0)
    # A record newer than the sample belongs to the prompt's next round.
    assert len(made.stash.failures.groups) == (0 if late else 1)


def test_a_jumping_clock_is_named(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with relay([buses["a"]], [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        wait_until(lambda: len(made.coordinator.hellos) == 2)
        hello, _ = made.coordinator.hellos[buses["a"]]
        made.send("x", COORDINATOR, hello._replace(clock_ns=hello.clock_ns + HOUR))
        wait_until(lambda: f"the clock of {buses['a']} has jumped by +3.6e+03 s" in caplog.text)
        with shmbus.Producer(buses["a"]) as producer:
            producer.put("half", group_size=2, index=0, score=1.0)
        wait_until(lambda: made.coordinator.note().waiting)
        (waits,) = made.coordinator.note().waiting
        assert (waits.instance_id, waits.here, waits.missing) == ("half", 1, [1])
        assert waits.at == [buses["a"]] and waits.age_s > 0
        put_group([buses["a"]], 1)
        assert take_groups(consumer, 1)[0].instance_id == "q1"


def test_a_stranger_is_refused(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with relay([buses["a"]], [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        wait_until(lambda: made.coordinator.pure is not None)
        heads = pack_heads([head("f" * 32, 0, 0)])
        for number in (1, 2):
            made.send("stranger", COORDINATOR, m.Announcement("f" * 32, (1, number), True, heads))
        wait_until(lambda: made.coordinator.refused == 2)
        (told,) = [each.getMessage() for each in caplog.records if "stranger" in each.getMessage()]
        assert f"announces bus {'f' * 32} to {COORDINATOR}" in told and "start the relay" in told
        assert made.coordinator.note().announced == 0
        put_group([buses["a"]], 1)
        take_groups(consumer, 1)


def test_what_nobody_holds_is_given_back_and_no_group_waits_for_it(buses: dict[str, str]) -> None:
    """A head of a record unknown to its source: forged, or of another bus."""
    with relay([buses["a"]], [buses["t"]]) as made, shmbus.Consumer(buses["t"]) as consumer:
        wait_until(lambda: (pure := made.coordinator.pure) is not None and bool(pure.newest))
        source = made.parties[buses["a"]].source
        forged = pack_heads([head(source.bus, 0, 0, sequence=77, size=1)])
        source.number += 1
        news = m.Announcement(source.bus, source.mark, False, forged)
        made.send(buses["a"], COORDINATOR, news)
        wait_until(lambda: (pure := made.coordinator.pure) and pure.newest[source.bus] == news.mark)
        wait_until(lambda: made.coordinator.note().assigned == 0)
        put_group([buses["a"]], 1)
        assert take_groups(consumer, 1)[0].instance_id == "q1"
        with shmbus.Bus.open(buses["t"]) as bus:
            assert bus.stats().committed == 4
