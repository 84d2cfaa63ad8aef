"""The daemon for its clients: the same groups as embedded, and no harm from bad clients."""

import contextlib
import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Daemon, Spawner, client_of, take_groups, wait_until

from shmbus import (
    Bus,
    BusBusyError,
    BusClosedError,
    Consumer,
    DaemonUnavailableError,
    Producer,
    ProtocolError,
)
from shmbus.base import limits
from shmbus.control import messages
from shmbus.daemon.service import MAX_WAITING
from shmbus.handles import source
from shmbus.segment.names import MAX_NAME_BYTES, socket_path

Served = Callable[..., Daemon]


def put(name: str, key: str, size: int = 4, tokens: int = 100) -> None:
    with Producer(name) as producer:
        for index in range(size):
            producer.put(
                key, group_size=size, index=index, score=float(index),
                tokens=np.arange(tokens, dtype=np.int32) + index, meta=index,
            )  # fmt: skip


def test_a_consumer_finds_the_daemon_and_gets_what_embedded_would_give(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    with Consumer(bus_name) as consumer:
        assert client_of(consumer)
        put(bus_name, "a")
        put(bus_name, "b")
        # Groups of different producers complete in no order.
        first, second = sorted(consumer.take(2, timeout=10), key=lambda g: g.instance_id)
        assert (first.instance_id, first.size, len(first), first.complete) == ("a", 4, 4, True)
        assert [t.index for t in first] == [0, 1, 2, 3]
        assert [t.meta for t in first] == [0, 1, 2, 3]
        assert np.array_equal(first[3]["tokens"], np.arange(100) + 3)
        assert not first[3]["tokens"].flags.writeable
        ledger = consumer.stats()
        assert ledger.balanced and ledger.leased == 8 and ledger.groups_leased == 2
        with first:
            pass
        with pytest.raises(RuntimeError), second:
            raise RuntimeError
        assert (first.state, second.state) == ("acknowledged", "given_back")
        with pytest.raises(ProtocolError, match="acknowledged already"):
            first.ack()
        # A request may exceed a word.
        (again,) = consumer.take(2**64, timeout=10)
        assert again.instance_id == "b"
        again.drop()
        ledger = consumer.stats()
        assert ledger.acknowledged == 4 and ledger.dropped == {"malformed": 4}
        assert consumer.take(timeout=0) == []
        consumer.policy_version = 9
        assert consumer.policy_version == 9
    with Producer(bus_name) as producer:
        assert producer.policy_version == 9
    served.stop()


def test_the_socket_is_for_its_user_only_and_gone_after_an_orderly_end(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB", "--unlink-on-exit")
    path = Path(socket_path(bus_name))
    assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600
    served.stop()
    assert not path.exists()
    assert not Path(f"/dev/shm/shmbus.{bus_name}").exists()


def test_a_name_too_long_for_a_socket_is_served_under_a_shorter_one(
    daemon: Served, bus_name: str
) -> None:
    name = bus_name + "x" * (MAX_NAME_BYTES - len(bus_name))
    served = daemon("--capacity", "8MiB", "--unlink-on-exit", name=name)
    put(name, "a")
    with Consumer(name) as consumer:
        assert len(consumer.take(timeout=10)) == 1
    served.stop()


def test_a_second_daemon_and_an_embedded_consumer_are_told_who_serves_the_bus(
    daemon: Served, bus_name: str, spawn: Spawner
) -> None:
    served = daemon("--capacity", "8MiB")
    with pytest.raises(BusBusyError, match=rf"pid {served.child.pid} \(shmbus serve\)"):
        Consumer(bus_name, daemon=False)
    second = spawn.module("shmbus", "serve", bus_name)
    assert second.wait() == 1
    assert f"pid {served.child.pid}" in second.output()
    with Consumer(bus_name) as consumer:
        put(bus_name, "a")
        assert len(consumer.take(timeout=10)) == 1


def test_an_embedded_consumer_keeps_a_daemon_out(bus_name: str, spawn: Spawner) -> None:
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name):
        second = spawn.module("shmbus", "serve", bus_name)
        assert second.wait() == 1
        assert f"pid {os.getpid()}" in second.output()


def test_policies_are_the_daemons_and_a_consumer_that_wants_others_is_told(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB", "--group-timeout", "0.2", "--on-timeout", "partial")
    with pytest.raises(ValueError, match=r"max_policy_lag=3.*max_policy_lag=None"):
        Consumer(bus_name, max_policy_lag=3)
    with Consumer(bus_name, group_timeout=0.2, on_timeout="partial") as consumer:
        with Producer(bus_name) as producer:
            producer.put("a", group_size=3, index=1, tokens=np.zeros(3, np.int32))
        (group,) = consumer.take(timeout=10)
        assert not group.complete and len(group) == 1
        group.ack()


def test_a_duplicate_is_raised_by_take_where_the_daemon_was_told_so(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB", "--duplicate", "error")
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for index in (0, 0, 1):
            producer.put("a", group_size=2, index=index, tokens=np.zeros(3, np.int32))
        with pytest.raises(ProtocolError, match="came twice"):
            consumer.take(timeout=10)
        assert len(consumer.take(timeout=10)) == 1


def test_groups_asked_for_ahead_are_neither_lost_nor_out_of_turn(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer:
        for number in range(60):
            producer.put(f"g{number:02}", group_size=1, index=0, tokens=np.zeros(9, np.int32))
    with Consumer(bus_name) as consumer:
        first = consumer.take(16, timeout=10)
        assert [g.instance_id for g in first] == [f"g{n:02}" for n in range(16)]
        first[0].give_back()
        assert consumer.take(1, timeout=10)[0].instance_id == "g00"
        assert [g.instance_id for g in consumer.take(20, timeout=10)] == [
            f"g{n:02}" for n in range(16, 36)
        ]
        assert [g.instance_id for g in consumer.take(3, timeout=10)] == ["g36", "g37", "g38"]
    with Consumer(bus_name) as consumer:
        found = [group.instance_id for group in take_groups(consumer, 60)]
        assert sorted(found) == [f"g{n:02}" for n in range(60)]


def test_a_view_stays_what_it_is_after_ack_close_and_the_end_of_the_daemon(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "1MiB")
    put(bus_name, "a", size=1)
    consumer = Consumer(bus_name)
    (group,) = consumer.take(timeout=10)
    view = group[0]["tokens"]
    group.ack()
    for number in range(200):
        put(bus_name, f"g{number}", size=1, tokens=3000)
        consumer.ack(consumer.take(timeout=10))
        if number == 100:
            served.restart()
    assert np.array_equal(view, np.arange(100))
    consumer.close()
    assert np.array_equal(view, np.arange(100))


def test_sigterm_waits_for_leases(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "8MiB")
    put(bus_name, "a")
    with Consumer(bus_name) as consumer:
        (group,) = consumer.take(timeout=10)
        served.child.send_signal(signal.SIGTERM)
        wait_until(lambda: " draining " in served.child.output())
        put(bus_name, "b")
        assert consumer.take(timeout=0.1) == []
        assert served.child.running
        group.ack()
        served.child.finish()
    served.start()
    with Consumer(bus_name) as consumer:
        assert [g.instance_id for g in consumer.take(timeout=10)] == ["b"]


def test_a_stale_socket_is_no_daemon_and_says_what_to_do(
    daemon: Served, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "DAEMON_WAIT_S", 0.2)
    served = daemon("--capacity", "8MiB")
    served.kill()
    with pytest.raises(DaemonUnavailableError, match=f"shmbus serve {bus_name}.*daemon=False"):
        Consumer(bus_name)
    with Consumer(bus_name, daemon=False) as consumer:
        put(bus_name, "a")
        assert len(consumer.take(timeout=10)) == 1


def test_a_daemon_that_stays_away_is_an_error_with_its_name(
    daemon: Served, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = daemon("--capacity", "8MiB")
    with Consumer(bus_name) as consumer:
        served.kill()
        assert consumer.take(timeout=0.1) == []
        monkeypatch.setattr(limits, "CLIENT_WAIT_S", 0.3)
        with pytest.raises(DaemonUnavailableError, match=f"shmbus serve {bus_name}"):
            consumer.take(timeout=None)


def test_a_stopped_daemon_does_not_keep_take_beyond_its_timeout(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    with Consumer(bus_name) as consumer:
        served.child.send_signal(signal.SIGSTOP)
        put(bus_name, "a")
        assert consumer.take(timeout=0.1) == []
        served.child.send_signal(signal.SIGCONT)
        found = []
        while not found:
            found = consumer.take(timeout=0.5)
        assert found[0].instance_id == "a"


def test_a_forked_child_is_told_and_leaves_its_parents_connection_alone(
    daemon: Served, bus_name: str, spawn: Spawner
) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, "a")
    child = spawn.script(
        "import os, sys\nfrom shmbus import Consumer, BusClosedError\n"
        "c = Consumer(sys.argv[1])\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n        c.take(timeout=0)\n"
        "    except BusClosedError as e:\n        print('told', 'fork' in str(e))\n"
        "    c.close()\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print('parent', len(c.take(timeout=10)))\n",
        bus_name,
    )
    assert child.finish().split("\n")[:2] == ["told True", "parent 1"]


# -- bad clients


@contextlib.contextmanager
def raw(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(socket_path(name))
        yield connection


def replies_until_closed(connection: socket.socket) -> list[messages.Reply]:
    buffer = messages.FrameBuffer()
    found: list[messages.Reply] = []
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += [messages.decode_reply(body) for body in buffer.feed(data)]
    return found


def hello(name: str, **options: object) -> bytes:
    return messages.frame(messages.Hello(version=messages.VERSION, bus=name, **options))  # type: ignore[arg-type]


def still_serves(name: str) -> bool:
    key = f"alive-{time.monotonic_ns()}"
    put(name, key, size=1)
    with Consumer(name) as consumer:
        groups = consumer.take(timeout=10)
        consumer.ack(groups)
        return [g.instance_id for g in groups] == [key]


def test_bad_clients_are_answered_or_closed_and_nobody_else_notices(
    daemon: Served, bus_name: str, tmp_path: Path
) -> None:
    served = daemon("--capacity", "8MiB")
    take = messages.frame(messages.Take(id=1, max_groups=1))
    claim = messages.frame(messages.Claim(groups=[]))
    snapshot = messages.frame(messages.TakeSnapshot(id=1, directory=str(tmp_path / "snapshot")))
    cases = {
        "control message": b"\x03\x00\x00\x00\xff\xff\xff",
        "expected Hello": take,
        "max_groups": hello(bus_name) + messages.frame(messages.Take(id=1, max_groups=2**63)),
        "announced": struct.pack("<I", 2**31),
        "version": messages.frame(messages.Hello(version=99, bus=bus_name)),
        "another bus": hello("other"),
        "got Hello after its Hello": hello(bus_name) * 2,
        "observer": hello(bus_name, observer=True) + take,
        "wait already": hello(bus_name) + take * (MAX_WAITING + 1),
        "after the last one": hello(bus_name) + claim,
        "a Claim after": hello(bus_name, client=1) + snapshot + claim * 2,
    }
    for expected, data in cases.items():
        with raw(bus_name) as connection:
            connection.sendall(data)
            last = replies_until_closed(connection)[-1]
            assert isinstance(last, messages.Refused) and expected in last.message, last
        assert still_serves(bus_name)
    with raw(bus_name) as connection:
        connection.sendall(hello(bus_name)[:-3])
    assert still_serves(bus_name)
    served.stop()


def test_leases_of_others_cannot_be_ended_or_given_back(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, "a")
    with Consumer(bus_name) as consumer, raw(bus_name) as connection:
        (group,) = consumer.take(timeout=10)
        connection.sendall(
            hello(bus_name)
            + messages.frame(messages.End(numbers=list(range(100)), reason=0))
            + messages.frame(messages.GiveBack(numbers=list(range(100))))
            + messages.frame(messages.GetLedger(id=1))
            + messages.frame(messages.Bye())
        )
        (_, ended, _) = replies_until_closed(connection)
        assert isinstance(ended, messages.Ended) and not ended.numbers
        group.ack()
        assert wait_until(lambda: consumer.stats().acknowledged == 4)


def test_a_client_that_floods_and_does_not_read_is_closed(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    with raw(bus_name) as connection:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection.send(hello(bus_name))
            flood = messages.frame(messages.GetStatus(id=1)) * 1000
            while True:
                connection.send(flood)
        assert still_serves(bus_name)


def test_a_lease_that_ends_for_no_known_reason_is_refused(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, "a")
    with raw(bus_name) as connection:
        # 16 has the length of a number within bounds.
        end = messages.frame(messages.End(numbers=[1], reason=1)).replace(
            b"reason\x01", b"reason\x10"
        )
        connection.sendall(
            hello(bus_name) + messages.frame(messages.Take(id=1, max_groups=1)) + end
        )
        *_, leases, refused = replies_until_closed(connection)
        assert isinstance(leases, messages.Leases) and leases.groups[0].number == 1
        assert isinstance(refused, messages.Refused) and "reason" in refused.message
    with Consumer(bus_name) as consumer:
        assert take_groups(consumer, 1)[0].instance_id == "a"


def test_what_a_client_acknowledged_before_it_was_gone_counts(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    put(bus_name, "a")
    with raw(bus_name) as connection:
        connection.sendall(hello(bus_name) + messages.frame(messages.Take(id=1, max_groups=1)))
        buffer = messages.FrameBuffer()
        replies: list[messages.Reply] = []
        while not (replies and isinstance(replies[-1], messages.Leases)):
            replies += [messages.decode_reply(body) for body in buffer.feed(connection.recv(65536))]
        number = replies[-1].groups[0].number
        connection.sendall(
            messages.frame(messages.Take(id=2, max_groups=1, timeout_s=0.2))
            + messages.frame(messages.GetLedger(id=3))
        )
        while not isinstance(replies[-1], messages.LedgerReply):
            replies += [messages.decode_reply(body) for body in buffer.feed(connection.recv(65536))]
        # The resumed daemon first owes an answer to a gone client.
        served.child.send_signal(signal.SIGSTOP)
        connection.sendall(messages.frame(messages.End(numbers=[number], reason=0)))
    time.sleep(0.3)
    served.child.send_signal(signal.SIGCONT)
    with Consumer(bus_name) as consumer:
        assert consumer.take(timeout=0.3) == []
        assert consumer.stats().acknowledged == 4


ACKNOWLEDGE = """
import sys, time
from shmbus import Consumer
consumer = Consumer(sys.argv[1])
groups = []
while len(groups) < 96:
    groups += consumer.take(96 - len(groups), timeout=10)
for group in groups[:70]:
    group.ack()
print("acknowledged")
time.sleep(600)
"""


def test_what_a_client_with_plenty_in_hand_acknowledged_counts_though_it_is_killed(
    daemon: Served, bus_name: str, spawn: Spawner
) -> None:
    daemon("--capacity", "8MiB")
    for key in range(96):
        put(bus_name, str(key), size=1)
    # The daemon reads its messages in small parts, and dies behind them.
    child = spawn.script(ACKNOWLEDGE, bus_name, until="acknowledged")
    child.kill()
    with Consumer(bus_name) as consumer:
        left = take_groups(consumer, 26)
        assert consumer.take(timeout=0) == []
        ledger = consumer.stats()
        assert (ledger.acknowledged, ledger.leased) == (70, 26)
        consumer.ack(left)
        assert wait_until(lambda: consumer.stats().acknowledged == 96)


def test_groups_before_one_that_is_not_leased_are_acknowledged_and_those_behind_are_not(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    for key in "abcd":
        put(bus_name, key)
    with Consumer(bus_name) as consumer, Consumer(bus_name) as other:
        groups = take_groups(consumer, 4)
        with pytest.raises(ProtocolError, match="another Consumer"):
            other.ack(groups)
        assert {group.state for group in groups} == {"leased"}
        groups[2].drop()
        with pytest.raises(ProtocolError, match="dropped already"):
            consumer.ack(groups)
        assert [g.state for g in groups] == ["acknowledged", "acknowledged", "dropped", "leased"]
        with pytest.raises(ProtocolError, match="acknowledged already"):
            consumer.ack([groups[3], groups[3]])
        with pytest.raises(TypeError, match="Group"):
            consumer.ack([None])  # type: ignore[list-item]
        with pytest.raises(BusClosedError, match="acknowledged"):
            groups[0][0]["tokens"]
        assert wait_until(lambda: consumer.stats().acknowledged == 12)
        assert consumer.stats().dropped == {"malformed": 4}
