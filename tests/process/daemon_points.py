"""A death and a stop at each named point of the daemon, its ranks and a snapshot, as a program.

A case forks a daemon and two ranks; a process gets its signal at a point. The audit requires every
group acknowledged whole, by a single rank. test_failpoints.py judges the report, a line a case.

Usage: ``python daemon_points.py NAME [KIND: or part of cases' names [first]]``
"""

import contextlib
import mmap
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from failpoints import SPAN_TWO, meet, pattern, play, ruin
from points import arm
from supervisor import DEADLINE_S, Child, deadline

import shmbus
from shmbus import errors
from shmbus.base import limits
from shmbus.cli import main as shmbus_main
from shmbus.handles import source
from shmbus.inspect.status import read_status
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus.store import snapshot

RANKS = 2
STRAGGLERS = 14
GROUPS, SIZE = 36, 4
EXTENT = 4096
#: Point between a rank's receipt of a shard and its start.
HOLD = "rank-borrowed:3"
#: Points only for a rank with a group at the loss of its daemon.
WITH_A_GROUP = ("rank-claiming", "rank-learned")
#: Flags in memory shared by a case's processes: ranks leave; a rank with a group keeps it; a rank
#: keeps a group.
OVER, KEEP, KEPT = 0, 1, 2
#: Seconds of a stop.
STOP_S = 0.05
#: Seconds for clients of the previous daemon to reconnect; shorter than the product's.
RECLAIM_WAIT_S = 0.3

#: Kind: point: passes before the signal.
CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "daemon": {
        "lease-begun": (1, 9),
        "lease-half": (1, 3, 30),
        "lease-made": (1, 9),
        "shard-formed": (1, 6),
        "shard-taken": (1, 2, 9),
        "deliver-begun": (1, 2, 9),
        "deliver-sent": (1, 2, 9),
        "ack-received": (1, 9),
        "ack-half": (1, 2, 21),
        "ack-ended": (1, 9),
        "ack-confirming": (1, 5),
        "ack-confirmed": (1, 5),
        "relieve-begun": (1, 2),
        "release-logged": (1, 20),
        "release-intended": (1, 20),
        "release-half": (1, 30),
        "release-counted": (1, 20),
        "free-ended": (1, 8),
        "free-half": (1, 5),
        "sweep-locked": (1,),
        "take-over-sealed": (1,),
        "move-intended": (1, 3),
        "move-published": (1, 3),
        "move-ended": (1, 3),
        "drain-begun": (1,),
        "drain-over": (1,),
        "drain-closing": (1,),
        "drain-closed": (1,),
    },
    # The daemon after a killed daemon, while a rank holds a shard.
    "successor": {
        "collector-replayed": (1,),
        "adopt-locks-read": (1,),
        "adopt-claim-heard": (1,),
        "adopt-diverted": (1,),
        "adopt-claim-leased": (1, 2),
        "adopt-resolved": (1,),
    },
    # The same, with the rank stopped until the daemon has gone on without it.
    "late_rank": {
        "adopt-withheld": (1,),
        "adopt-late-claim": (1,),
    },
    # The daemon at the loss of a rank with a shard.
    "broken_rank": {
        "shard-back": (1,),
        "client-left": (1,),
    },
    # A rank, with its daemon killed once.
    "rank": {
        "rank-dialled": (1, 2),
        "rank-welcomed": (1, 2),
        "rank-claiming": (1,),
        "rank-learned": (1,),
        "rank-received": (1, 4),
        "rank-borrowed": (1, 4),
        "rank-ended": (1, 7),
        "rank-told": (1, 7),
        "rank-confirmed": (1, 4),
        "rank-leaving": (1,),
    },
    "snapshot": {
        "snapshot-record": (1, 30),
        "snapshot-parts": (1,),
        "snapshot-manifest": (1,),
        "snapshot-synced": (1, 2),
    },
}


def workload() -> list[tuple[str, int, int, int]]:
    """(instance_id, group_size, index, bytes): whole groups, and stragglers among fillers."""
    puts = []
    for number in range(STRAGGLERS):
        puts.append((f"s{number}", 2, 0, 600))
        puts.append((f"f{number}", 1, 0, 2500))
    for number in range(GROUPS):
        large = SPAN_TWO if number % 9 == 4 else 0
        puts.append((f"g{number}", SIZE, 0, max(large, 300)))
        puts += [(f"g{number}", SIZE, index, 200 + number * 31 % 500) for index in range(1, SIZE)]
    puts += [(f"s{number}", 2, 1, 600) for number in range(STRAGGLERS)]
    return puts


def content(instance_id: str, index: int, size: int) -> np.ndarray:
    return pattern(sum(instance_id.encode()) * 37 + int(instance_id[1:]) * 5 + index, size)


def speak_into(log: Path) -> None:
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)


def serve(name: str, kind: str, failpoint: str, log: Path) -> None:
    speak_into(log)
    if kind != "successor":  # its rank has to reconnect in time, however slow this build
        limits.RECLAIM_WAIT_S = RECLAIM_WAIT_S
    arm(failpoint)
    assert shmbus_main(["serve", name, "--drain-timeout", "5"]) == 0


def join(name: str, rank: int) -> shmbus.Consumer:
    """Attach as a rank, as soon as the daemon knows its predecessor's death."""
    for _ in deadline(f"rank {rank}'s place to be free"):
        with contextlib.suppress(errors.BusBusyError):
            return shmbus.Consumer(name, rank=rank, world_size=RANKS)
    raise AssertionError


def train(name: str, rank: int, failpoint: str, log: Path, told: mmap.mmap) -> None:
    speak_into(log.with_name(f"rank-{rank}.log"))
    # On a busy machine the next daemon may start after a trainer's patience.
    source.DAEMON_WAIT_S = DEADLINE_S
    arm(failpoint)
    with log.open("ab", buffering=0) as out, join(name, rank) as consumer:
        while not told[OVER]:
            for group in consumer.take_shard(groups=2, max_wait=0.02, timeout=0.03):
                if group.instance_id == "ruin":
                    group.ack()
                    continue
                line = f"{group.instance_id} {rank}\n"
                if not all(
                    sample.index == index
                    and np.array_equal(
                        sample["data"], content(group.instance_id, index, sample["data"].size)
                    )
                    for index, sample in enumerate(group)
                ):
                    out.write(b"torn " + line.encode())
                out.write(b"begin " + line.encode())
                while rank == 0 and told[KEEP]:
                    told[KEPT] = 1
                    time.sleep(0.001)
                group.ack()
                out.write(b"done " + line.encode())


class Case:
    """A bus, its daemon, and two ranks; the dead are replaced."""

    def __init__(self, name: str, kind: str, failpoint: str, directory: Path) -> None:
        self.name, self.kind, self.failpoint = name, kind, failpoint
        self.directory = directory
        self.log = directory / "groups.log"
        self.log.touch()
        self.told = mmap.mmap(-1, 4096)
        self.puts = workload()
        self.wanted = {put[0] for put in self.puts}
        self.extra = 0
        self.signalled = False
        self.faults: list[str] = []
        #: The stopped process, until the scenario resumes it.
        self.held: Child | None = None
        self.daemons = 0
        self.daemon = self.serve(failpoint if kind in ("daemon", "broken_rank") else "")
        stopped = HOLD + ":stop"
        first = {
            "successor": stopped,
            "late_rank": stopped,
            "broken_rank": HOLD + ":kill",
            "rank": failpoint,
        }
        self.ranks = [
            self.train(rank, "" if rank else first.get(kind, "")) for rank in range(RANKS)
        ]
        self.producer = shmbus.Producer(name)

    def serve(self, failpoint: str = "") -> Child:
        self.daemons += 1
        log = self.directory / f"daemon-{self.daemons}.log"
        return Child(lambda: serve(self.name, self.kind, failpoint, log), failpoint)

    def train(self, rank: int, failpoint: str = "") -> Child:
        return Child(lambda: train(self.name, rank, failpoint, self.log, self.told), failpoint)

    # -- permanent work -----------------------------------------------------------

    def go_on(self) -> None:
        """Fill the free space, resume stopped processes, replace killed processes."""
        self.put(0.004)
        for member in (self.daemon, *self.ranks):
            ended = member.look()
            if member.stopped and member is not self.held:
                self.signalled = True
                self.while_stopped(member)
                member.go_on()
            elif ended and member.killed:
                self.signalled = True
                self.replace(member)
            elif ended and member.status:
                said = "".join(path.read_text() for path in sorted(self.directory.glob("*-*.log")))
                raise AssertionError(f"a process ended with {member.status}: {said}")

    def while_stopped(self, member: Child) -> None:
        """Check the remaining processes' progress, and a stopped daemon's hold on the bus."""
        self.put(STOP_S)
        if member is self.daemon and not self.failpoint.startswith("drain-closed"):
            try:
                Collector(self.name, StashPolicy()).close()
                self.faults.append("a second collector attached while the daemon was stopped")
            except errors.BusBusyError:
                pass

    def replace(self, member: Child) -> None:
        if member is self.daemon:
            self.daemon = self.serve()
        else:
            rank = self.ranks.index(member)
            self.ranks[rank] = self.train(rank)

    def put(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.puts and (left := end - time.monotonic()) > 0:
            instance_id, size, index, length = self.puts[0]
            data = content(instance_id, index, length)
            with contextlib.suppress(shmbus.BusFullError):
                self.producer.put(
                    instance_id, group_size=size, index=index, data=data, timeout=left
                )
                del self.puts[0]
        time.sleep(max(end - time.monotonic(), 0))

    def lines(self, verb: str) -> Counter[str]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return Counter(line[1] for line in lines if line[0] == verb)

    def until(self, groups: int) -> None:
        for _ in deadline(f"{groups} groups"):
            self.go_on()
            if len(self.wanted & self.lines("begin").keys()) >= groups:
                return
            self.feed()

    def feed(self) -> None:
        """Keep work in reserve: a lone group makes no step, so more have to follow."""
        if not self.puts:
            self.puts.append((f"e{self.extra}", 1, 0, 100))
            self.extra += 1

    # -- the scenario ---------------------------------------------------------------------------

    def play(self) -> None:
        if self.kind in ("successor", "late_rank"):
            self.held = self.ranks[0]
            for _ in deadline("a rank that stops with a shard"):
                self.go_on()
                if self.held.stopped:
                    break
        else:
            self.until(8)
            for _ in deadline("both ranks to work"):
                if len(set(self.log.read_text().split()) & {"0", "1"}) == RANKS:
                    break
                self.go_on()
        if self.failpoint.startswith(WITH_A_GROUP):
            self.told[KEEP] = 1
            for _ in deadline("a rank with a group"):
                self.go_on()
                if self.told[KEPT]:
                    break
                self.feed()
        if self.kind in ("successor", "late_rank", "rank"):
            self.daemon.kill()
            self.daemon = self.serve("" if self.kind == "rank" else self.failpoint)
            self.told[KEEP] = 0
        if self.held is not None:
            # A successor's rank reconnects in time, a late rank after the daemon has gone on.
            end = time.monotonic() + (3 * RECLAIM_WAIT_S if self.kind == "late_rank" else 0)
            while time.monotonic() < end:
                self.go_on()
            self.held.go_on()
            self.held = None
        self.until(len(self.wanted))

    def finish(self) -> shmbus.Ledger:
        self.told[OVER] = 1
        for _ in deadline("the end of the ranks"):
            self.go_on()
            if all(rank.status == 0 for rank in self.ranks):
                break
        asked = None
        for _ in deadline("the end of the daemon"):
            log = self.directory / f"daemon-{self.daemons}.log"
            if asked is not self.daemon and log.exists() and "serving" in log.read_text():
                asked = self.daemon
                os.kill(asked.pid, signal.SIGTERM)
            self.go_on()
            if self.daemon.status == 0:
                break
        self.producer.close()
        with shmbus.Consumer(self.name) as consumer:
            while groups := consumer.take(8, timeout=0.05):
                consumer.ack(groups)
            return consumer.stats()

    def audit(self, ledger: shmbus.Ledger) -> None:
        begun, done = self.lines("begin"), self.lines("done")
        if self.wanted - begun.keys() or self.lines("torn"):
            lost = sorted(self.wanted - begun.keys())
            self.faults.append(f"lost: {lost}, torn: {sorted(self.lines('torn'))}")
        twice = {group for group, count in done.items() if count > 1}
        if self.kind == "rank" and self.failpoint.endswith("kill"):
            # An acknowledgement unread by the killed daemon died with both.
            twice -= {
                line.split()[1] for line in self.log.read_text().splitlines() if line.endswith(" 0")
            }
        if twice:
            self.faults.append(f"acknowledged twice: {sorted(twice)}")
        if not ledger.balanced or ledger.dropped or ledger.committed != ledger.acknowledged:
            self.faults.append(f"the ledger: {ledger}")
        if ledger.capacity - ledger.free > 4 * EXTENT:
            self.faults.append(f"{ledger.capacity - ledger.free} bytes are held at the end")

    def end(self) -> None:
        for member in (self.daemon, *self.ranks):
            member.kill()


def daemon_case(name: str, kind: str, failpoint: str, directory: Path) -> dict[str, object]:
    with shmbus.Bus.create(name, "64KiB", max_producers=3, extent_bytes=EXTENT):
        if "take-over" in failpoint or "sweep" in failpoint:
            ruin(name)
        case = Case(name, kind, failpoint, directory)
        try:
            case.play()
            case.audit(case.finish())
        finally:
            case.end()
    return {"signalled": case.signalled, "faults": case.faults}


def snapshot_case(name: str, kind: str, failpoint: str, directory: Path) -> dict[str, object]:
    faults = []
    with shmbus.Bus.create(name, "512KiB", max_producers=2, extent_bytes=EXTENT):
        with shmbus.Producer(name) as producer:
            puts = workload()
            for instance_id, size, index, length in puts:
                data = content(instance_id, index, length)
                producer.put(instance_id, group_size=size, index=index, data=data)

        def take() -> None:
            arm(failpoint)
            snapshot.take(name, directory / "snap")

        child = Child(take)
        signalled = meet(child)
        if child.status == 0 or (directory / "snap").exists():
            snapshot.restore(directory / "snap", name + ".back")
            records = read_status(name + ".back").ledger.in_ring
            shmbus.unlink(name + ".back")
            if records != len(puts):
                faults.append(f"{records} of {len(puts)} records are in the snapshot")
        if read_status(name).ledger.in_ring != len(puts):
            faults.append("the bus has changed")
    return {"signalled": signalled, "faults": faults}


def case(kind: str) -> Callable[[str, str, str], dict[str, object]]:
    play_one = snapshot_case if kind == "snapshot" else daemon_case

    def run(name: str, failpoint: str, action: str) -> dict[str, object]:
        with tempfile.TemporaryDirectory() as directory:
            return play_one(name, kind, failpoint, Path(directory))

    return run


if __name__ == "__main__":
    play(CASES, {kind: case(kind) for kind in CASES})
