"""Many clients of a daemon, in any order, some of them bad: each is served, and nothing remains.

The suite runs short forms; SHMBUS_TEST_CROWD, SHMBUS_TEST_CYCLES and SHMBUS_TEST_FUZZ set the
groups, cycles and messages of a long form.
"""

import contextlib
import gc
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Child, Daemon, Spawner, wait_until

from shmbus import Bus, Consumer, Producer
from shmbus.control import messages
from shmbus.daemon.leases import MAX_GRANT_TRAJECTORIES
from shmbus.inspect.segment_file import SegmentFile
from shmbus.segment import lifecycle
from shmbus.segment.names import socket_path
from shmbus_ext import _core

Served = Callable[..., Daemon]

RANKS = 8
PRODUCERS = 64
#: Processes shared by the producers; each producer keeps a separate handle.
SENDERS = 2
GROUPS = int(os.environ.get("SHMBUS_TEST_CROWD", "1500"))
CYCLES = int(os.environ.get("SHMBUS_TEST_CYCLES", "200"))
MESSAGES = int(os.environ.get("SHMBUS_TEST_FUZZ", "10000"))

SEND = """
import random, sys
import numpy as np
from shmbus import Producer
name, who, handles, groups, seed = sys.argv[1], *map(int, sys.argv[2:])
draw = random.Random(seed + who)
open_, most = [], 0
for number in range(groups):
    # A producer comes, works or leaves, whichever; together they are all there at some time.
    while len(open_) < handles and (number == groups // 2 or not open_ or draw.random() < 0.3):
        open_.append(Producer(name))
    most = max(most, len(open_))
    items = [
        dict(instance_id=f"{who}-{number}", group_size=4, index=i, timeout=60,
             tokens=np.full(draw.randrange(1, 300), number, np.int32))
        for i in range(4)
    ]
    for item in draw.sample(items, 4):
        draw.choice(open_).put(**item)
    if draw.random() < 0.2:
        open_.pop(draw.randrange(len(open_))).close()
for producer in draw.sample(open_, len(open_)):
    producer.close()
print("most", most)
"""

TRAIN = """
import os, random, sys
from shmbus import Consumer
name, rank, world_size, seed, log, stop = sys.argv[1:]
draw = random.Random(int(seed) + int(rank))
with open(log, "a", buffering=1) as out:
    print("training")
    while not os.path.exists(stop):
        with Consumer(name, rank=int(rank), world_size=int(world_size)) as consumer:
            for _ in range(draw.randrange(1, 6)):
                groups = consumer.take_shard(groups=3, max_wait=0.05, timeout=0.3)
                for group in groups[: draw.choice([1, 3, 3])]:  # what is left comes again
                    group.ack()
                    out.write(",".join(f"{t.producer_id}:{t.sequence}" for t in group) + "\\n")
print("done")
"""


def start_ranks(spawn: Spawner, name: str, seed: int, directory: Path, stop: Path) -> list[Child]:
    order = random.Random(seed).sample(range(RANKS), RANKS)
    return [
        spawn.script(TRAIN, name, r, RANKS, seed, directory / f"rank-{r}.log", stop) for r in order
    ]


def drain(name: str, log: Path) -> None:
    with Consumer(name) as consumer, log.open("w") as out:
        while (ledger := consumer.stats()).leased or ledger.stashed or ledger.in_ring:
            for group in consumer.take(64, timeout=0.1):
                group.ack()
                out.write(",".join(f"{t.producer_id}:{t.sequence}" for t in group) + "\n")


@pytest.mark.timeout(60 + GROUPS // 20)
def test_64_producers_and_8_ranks_come_work_and_leave_in_any_order(
    daemon: Served, bus_name: str, spawn: Spawner, tmp_path: Path, seed: int
) -> None:
    served = daemon("--capacity", "16MiB")
    files = open_files(served.child.pid)
    stop = tmp_path / "stop"
    ranks = start_ranks(spawn, bus_name, seed, tmp_path, stop)
    senders = [
        spawn.script(SEND, bus_name, who, PRODUCERS // SENDERS, GROUPS // SENDERS, seed)
        for who in range(SENDERS)
    ]
    for sender in senders:
        assert sender.finish(30 + GROUPS / 20).split() == ["most", str(PRODUCERS // SENDERS)]
    stop.touch()
    for rank in ranks:
        rank.finish()
    drain(bus_name, tmp_path / "rest.log")
    ended = Counter(
        identity
        for log in tmp_path.glob("*.log")
        for line in log.read_text().splitlines()
        for identity in line.split(",")
    )
    bus = Bus.open(bus_name)
    stats = bus.stats()
    bus.close()
    assert stats.committed == stats.acknowledged == GROUPS // SENDERS * SENDERS * 4
    assert len(ended) == stats.committed and set(ended.values()) == {1}
    wait_until(lambda: open_files(served.child.pid) <= files, what="the daemon to close its files")
    assert_nothing_is_held(bus_name, served.child.pid)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def private_kib(pid: int) -> int:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )
    return int(line.split()[1])


def only_the_collector_holds(name: str) -> bool:
    with SegmentFile(name) as file:
        return all(run.slot == file.max_producers for run in file.runs())


def assert_nothing_is_held(name: str, daemon: int) -> None:
    segment = lifecycle.open_segment(name)
    try:
        wait_until(
            lambda: not any(segment.locks_held(kind) for kind in range(1 + _core.MAX_CLIENTS)),
            what="the locks of clients to be gone",
        )
        wait_until(
            lambda: all(row[1] == _core.SLOT_FREE for row in segment.producers()),
            what="the producers' slots to be free",
        )
        wait_until(lambda: only_the_collector_holds(name), what="the producers' runs to be free")
        # Its spare run, and the target of moves after a shortage of room.
        assert segment.extent_count - segment.free_extents() <= 2
    finally:
        segment.close()
    assert not list(Path("/dev/shm").glob(f"shmbus-new-{daemon}-*"))


@pytest.mark.timeout(60 + CYCLES // 10)
def test_attaching_and_leaving_leaks_nothing(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "8MiB")

    def cycle(number: int) -> None:
        with Producer(bus_name) as producer:
            producer.put(str(number), group_size=1, index=0, tokens=np.zeros(9, np.int32))
        with Consumer(bus_name) as consumer:
            groups = consumer.take(timeout=10)
            views = [t["tokens"] for group in groups for t in group]
            if number % 3:
                consumer.ack(groups)
            assert len(views) == len(groups)

    def look() -> tuple[int, int, int]:
        gc.collect()
        wait_until(lambda: threading.active_count() <= threads)
        return open_files(os.getpid()), open_files(served.child.pid), private_kib(served.child.pid)

    threads = threading.active_count()
    for number in range(CYCLES // 10):
        cycle(number)
    mine, theirs, before_kib = look()
    for number in range(CYCLES // 10, CYCLES):
        cycle(number)
    with Consumer(bus_name) as consumer:

        def is_all_acknowledged() -> bool:
            consumer.ack(consumer.take(timeout=0.1))
            return consumer.stats().acknowledged == CYCLES

        wait_until(is_all_acknowledged)

    def are_closed() -> bool:
        found = look()
        return found[0] <= mine and found[1] <= theirs

    wait_until(are_closed, what="the files to be closed")
    print(f"the daemon's memory: {before_kib} KiB, {look()[2]} KiB after {CYCLES} cycles")
    assert look()[2] < before_kib + 2048
    assert_nothing_is_held(bus_name, served.child.pid)


# -- any messages of clients


def any_value(draw: random.Random, depth: int = 0) -> Any:
    kinds = ["small", "edge", "float", "text", "bytes", "none", "list"]
    match draw.choice(kinds if depth < 2 else kinds[:-1]):
        case "small":
            return draw.randrange(-2, 12)
        case "edge":
            return draw.choice([2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 255, 256])
        case "float":
            return draw.choice([0.0, 0.001, -1.0, 1e12, 1e300, float("inf"), float("nan")])
        case "text":
            return "".join(chr(draw.randrange(1, 0x3000)) for _ in range(draw.choice([0, 1, 1200])))
        case "bytes":
            return draw.randbytes(draw.choice([0, 1, 16, 32, 2000]))
        case "list":
            return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return None


def some_request(draw: random.Random, kind: str) -> messages.Request:
    """Return a possible message of a client of this kind, with any numbers."""
    number = draw.choice([0, 1, 2, 7, draw.randrange(1, 5000), 2**63 - 1])
    numbers = [draw.randrange(1, 3000) for _ in range(draw.randrange(5))]
    wait_s = draw.choice([0.0] * 12 + [0.001, 1e12, None])
    few = draw.choice([1, 2, 2**63 - 1])
    reason = draw.choice([0] * 60 + [1, _core.REASONS - 1, _core.REASONS, 255])
    says: list[Callable[[], messages.Request]] = [
        lambda: messages.GetLedger(id=number),
        lambda: messages.GetStatus(id=number),
        lambda: messages.SetPolicyVersion(id=number, policy_version=number),
        lambda: messages.End(numbers=numbers, reason=reason),
        lambda: messages.GiveBack(numbers=numbers),
        lambda: messages.TakeSnapshot(id=number, directory=draw.choice(["/dev/null/no", "no"])),
    ]
    if kind == "rank":
        says += [lambda: messages.TakeStep(id=number, groups=2, timeout_s=wait_s)] * 3
        says.append(lambda: messages.TakeStep(id=number, tokens=few, timeout_s=wait_s))
    elif kind != "observer":
        says += [lambda: messages.Take(id=number, max_groups=few, timeout_s=wait_s)] * 4
    return draw.choice(says)()


def harmed(draw: random.Random, data: bytes) -> bytes:
    """Return the same with an improper value, or with damaged bytes."""
    fields = msgspec.msgpack.decode(data[4:])
    if draw.random() < 0.5:
        fields[draw.choice(sorted(fields))] = any_value(draw)
        with contextlib.suppress(OverflowError):  # no such number in msgpack
            body = msgspec.msgpack.encode(fields)
            return len(body).to_bytes(4, "little") + body
    broken = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        broken[draw.randrange(len(broken))] = draw.randrange(256)
    return bytes(broken)


def some_talk(draw: random.Random, name: str) -> tuple[bytes, int]:
    """Return a client's messages, and the heard part: damage may end the daemon's attention."""
    kind = draw.choice(["plain", "plain", "claims", "rank", "observer"])
    options: dict[str, Any] = {
        "claims": {"client": 3},
        "rank": {"rank": 0, "world_size": 2},
        "observer": {"observer": True},
    }.get(kind, {})
    said: list[messages.Request] = [messages.Hello(version=messages.VERSION, bus=name, **options)]
    if kind == "claims":
        held = [
            messages.Held(token=t, identities=draw.randbytes(16), reason=draw.randrange(-1, 2))
            for t in range(draw.randrange(4))
        ]
        said.append(messages.Claim(groups=held))
    said += [some_request(draw, kind) for _ in range(draw.randrange(200))]
    frames = [messages.frame(each) for each in said]
    bad = draw.randrange(len(frames) + 1)
    if bad < len(frames):
        frames[bad] = harmed(draw, frames[bad])
    return b"".join(frames), min(bad + 1, len(frames))


def say(name: str, data: bytes) -> int:
    """Send everything while reading; return the answers' bytes until the daemon closes."""
    got = 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(socket_path(name))
        with contextlib.suppress(ConnectionError):
            while data:
                data = data[connection.send(data[:16384]) :]
                if not data:
                    connection.shutdown(socket.SHUT_WR)
                while chunk := receive(connection, wait=not data):
                    got += len(chunk)
    return got


def receive(connection: socket.socket, *, wait: bool) -> bytes:
    try:
        return connection.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


@pytest.mark.timeout(60 + MESSAGES // 200)
def test_the_daemon_answers_or_closes_whatever_it_is_told(
    daemon: Served, bus_name: str, seed: int
) -> None:
    served = daemon("--capacity", "8MiB")
    draw = random.Random(seed)
    heard = connections = answered = 0
    with Producer(bus_name) as producer:
        while heard < MESSAGES:
            for index in draw.choices([0, 1], k=3):
                producer.put(
                    f"{connections}", group_size=2, index=index, tokens=np.zeros(5, np.int32),
                    timeout=30,
                )  # fmt: skip
            talk, count = some_talk(draw, bus_name)
            answered += say(bus_name, talk) > 0
            heard += count
            connections += 1
            if connections % 50 == 0:
                with Consumer(bus_name) as consumer:
                    consumer.ack(consumer.take(MAX_GRANT_TRAJECTORIES, timeout=0.1))
    print(f"{heard} messages in {connections} connections, {answered} of them answered")
    assert served.child.running and answered > connections // 2
    with Consumer(bus_name) as consumer:
        ledger = wait_until(lambda: (s := consumer.stats()).balanced and s)
    assert ledger.committed == 3 * connections
    served.stop()
