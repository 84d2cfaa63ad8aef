"""A death and a stop during the repetition of failed samples, as a program.

The signal reaches the collector with retry requests, or the producer with a taken request; the
other side and the successor complete every group.
"""

import functools
import logging
import mmap
import os
from pathlib import Path

from failpoints import log_of, pattern, play
from supervisor import Child, deadline

import shmbus
from shmbus.inspect.status import read_status

# Reports of failures are dropped here; standard output and error share a stream.
logging.getLogger("shmbus.drops").disabled = True

GROUPS = 12
EXTENT = 4096
RETRIES = 20
#: Seconds a stopped producer keeps its taken requests.
RETRY_TIMEOUT_S = 0.3

#: Kind: point: passes before the signal. A starting collector frees 128 rows.
POINTS: dict[str, dict[str, tuple[int, ...]]] = {
    "collector": {
        "want-busy": (1, 100, 130, 140),
        "want-written": (1, 7),
        "want-published": (1, 7),
    },
    "producer": {
        "want-claimed": (1, 5),
        "want-leaving": (1,),
        "want-answering": (1, 4),
        "want-answered": (1, 4),
        # In an answer, and in the report of a failure.
        "commit-intended": (1, 4),
        "record-exposed": (2, 5),
        "commit-marked": (1, 4),
    },
}


def answer(producer: shmbus.Producer) -> None:
    for wanted in producer.requests.retries(limit=1):
        make(producer, wanted)


def make(producer: shmbus.Producer, wanted: shmbus.Request) -> None:
    data = pattern(int(wanted.instance_id[1:]) * 2 + wanted.index, 300)
    producer.requests.answer(wanted, data=data)


class Reader:
    """A collector that logs each group before and after its acknowledgement."""

    def __init__(self, name: str, log: Path) -> None:
        self.consumer = shmbus.Consumer(
            name, sample_retries=RETRIES, retry_timeout=RETRY_TIMEOUT_S, retry_backoff=(0, 0)
        )
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def take(self) -> None:
        for group in self.consumer.take(4, timeout=0.01):
            number = int(group.instance_id[1:])
            whole = all(
                sample["data"].tobytes() == pattern(number * 2 + index, 300).tobytes()
                for index, sample in enumerate(group)
            )
            os.write(self._log, b"%s %d\n" % (b"begin" if whole else b"torn", number))
            group.ack()
            os.write(self._log, b"done %d\n" % number)


def groups_in(log: Path, verb: str) -> list[int]:
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(number) for word, number in lines if word == verb]


def be_collector(name: str, over: mmap.mmap, log: Path) -> None:
    reader = Reader(name, log)
    while not over[0]:
        reader.take()
    reader.consumer.close()


def be_producer(name: str, over: mmap.mmap) -> None:
    """Answer requests, fail every third, and leave with an unanswered request."""
    producer = shmbus.Producer(name)
    turn = 0
    while not over[0]:
        for wanted in producer.requests.retries(limit=1):
            turn += 1
            if turn % 3 == 0:
                producer.requests.fail(wanted, "not yet")
            elif turn < GROUPS - 2:
                make(producer, wanted)
            else:
                producer.close()
                return


def case(name: str, kind: str, failpoint: str) -> dict[str, object]:
    """Fail half of each group; every group is delivered once and whole, through any death."""
    log = log_of(name)
    over = mmap.mmap(-1, 4096)
    with shmbus.Bus.create(name, "512KiB", max_producers=3, extent_bytes=EXTENT):
        producer = shmbus.Producer(name)
        for group in range(GROUPS):
            producer.put(f"g{group}", group_size=2, index=0, data=pattern(group * 2, 300))
            producer.fail(f"g{group}", 1, "flaky", group_size=2)
        reader = Reader(name, log) if kind == "producer" else None
        play = be_producer if kind == "producer" else functools.partial(be_collector, log=log)
        child = Child(lambda: play(name, over=over), failpoint)
        signalled = False
        for _ in deadline("all groups"):
            ended = child.look()
            signalled = signalled or child.stopped
            if reader is not None:
                reader.take()
            elif ended:
                reader = Reader(name, log)
            if kind == "collector" or ended or child.stopped:
                answer(producer)
            over[0] = set(groups_in(log, "begin")) >= set(range(GROUPS))
            # A second producer answers for a stopped one, except during the answer's commit.
            points = ("want-answered", "record-exposed", "commit-marked")
            kept = failpoint.startswith(points) and kind == "producer"
            most = len(set(groups_in(log, "begin"))) == GROUPS - 1
            if child.stopped and (kind == "collector" or over[0] or (kept and most)):
                child.go_on()
            if over[0] and ended and reader is not None:
                break
        assert reader is not None
        faults = audit(reader, producer, child, log)
        return {"signalled": signalled or child.killed, "faults": faults}


def audit(reader: Reader, producer: shmbus.Producer, child: Child, log: Path) -> list[str]:
    faults = []
    for _ in deadline("the last records"):
        reader.take()
        ledger = reader.consumer.stats()
        if not (ledger.in_ring or ledger.stashed or ledger.samples_wanted):
            break
    done = groups_in(log, "done")
    if len(done) != len(set(done)) or set(groups_in(log, "begin")) != set(range(GROUPS)):
        faults.append(f"lost or doubled: {sorted(done)}")
    if groups_in(log, "torn"):
        faults.append(f"torn: {groups_in(log, 'torn')}")
    if not ledger.balanced or set(ledger.dropped) - {"failed"}:
        faults.append(f"the ledger: {ledger}")
    if read_status(producer.name).wanted or producer.requests.retries():
        faults.append("something is still wanted")
    if child.status and not child.killed:
        faults.append(f"the process ended with {child.status}")
    reader.consumer.close()
    producer.close()
    return faults


if __name__ == "__main__":
    play(
        POINTS,
        {kind: lambda name, point, action, kind=kind: case(name, kind, point) for kind in POINTS},
    )
