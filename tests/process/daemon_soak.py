"""Full load over a daemon and two ranks, under every kind of fault: prints a JSON report.

Beyond the faults of soak.py: ranks get killed, stopped and slowed; /dev/shm is full for spells;
processes live in their own time namespaces; the wall clock jumps. The report lists faults
impossible on this machine.

Usage: ``PYTHONPATH=tests python tests/process/daemon_soak.py NAME SECONDS SEED [RESTARTS]``. A
number of restarts ends the soak after so many kills of the daemon, each right after some training.
"""

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import soak
from soak import ACKED, DOUBLED, Notes, Soak, audit, judge
from supervisor import own_tmpfs

import shmbus
from shmbus.cli import main as shmbus_main

RANKS = 2
#: The bus, and a little for sockets.
TMPFS_BYTES = (16 << 20) + (2 << 20)
LONGEST_FULL_S = 1.0
#: Without an acknowledgement for so long, the bus is full of groups due to time out.
LONGEST_WAIT_S = 2.0
DAY_NS = 86_400 * 10**9
CLOCK = Path(__file__).with_name("wall_clock.c")
LOG = Path(os.environ.get("SHMBUS_WALL_CLOCK", "none")).with_name("daemon.log")
_CLONE_NEWTIME = 0x80
_libc = ctypes.CDLL(None, use_errno=True)


def serve(name: str) -> None:
    os.dup2(os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    options = ["--group-timeout", soak.GROUP_TIMEOUT_S, "--on-timeout", "drop"]
    assert shmbus_main(["serve", name, *map(str, options)]) == 0


def join(name: str, rank: int) -> shmbus.Consumer:
    """Attach as soon as a daemon knows the previous rank's death."""
    while True:
        with contextlib.suppress(shmbus.BusBusyError, shmbus.DaemonUnavailableError):
            return shmbus.Consumer(name, rank=rank, world_size=RANKS)
        time.sleep(0.01)


def train(name: str, rank: int, notes: Notes, answers: Notes) -> None:
    """Take steps, check and acknowledge, for ever; only the daemon's receipts count."""
    with join(name, rank) as consumer:
        while True:
            groups = consumer.take_shard(groups=8, max_wait=0.05, field="data", timeout=0.5)
            ended = []
            for group in groups:
                place = judge(group, answers)
                # The granting daemon may have died before this process took the group.
                with contextlib.suppress(shmbus.ProtocolError):
                    group.ack()
                    ended.append(place)
            if ended:
                consumer.stats()
            for place in ended:
                if answers.groups[place] & ACKED:
                    answers.add(*place, DOUBLED)
                answers.add(*place, ACKED)
            answers.counts[1] += len(ended)
            if notes.counts[0]:
                time.sleep(0.03)


class DaemonSoak(Soak):
    """A `Soak` with the daemon as its consumer, and ranks on top."""

    COUNTED = "consumer kills"

    def __init__(
        self, name: str, seed: int, restarts: int, allowed: dict[str, bool], wall: mmap.mmap
    ) -> None:
        self.allowed, self.wall = allowed, wall
        super().__init__(name, seed, restarts)
        for rank in range(RANKS):
            self.start(
                f"rank {rank}", lambda _, rank=rank: train(name, rank, self.notes, self.answers)
            )

    def start(self, name: str, program: Callable[[int], None] | None = None) -> None:
        if self.allowed["time namespaces"]:
            own_monotonic_clock(self.rng.randrange(10**6))
        super().start(name, program)

    def consume(self, life: int) -> None:
        serve(self.name)

    def kill_consumer(self) -> None:
        """Kill, except while dead producers' groups wait to time out: the daemon needs the time."""
        if time.monotonic() - self.moved_s < LONGEST_WAIT_S:
            super().kill_consumer()

    def counted(self) -> None:
        """Kill the daemon, and wait for its successor's first trained group."""
        super().kill_consumer()
        before, end = self.answers.counts[1], time.monotonic() + soak.HANG_S
        while self.answers.counts[1] == before and time.monotonic() < end:
            time.sleep(0.002)

    def act(self) -> None:
        rank = f"rank {self.rng.randrange(RANKS)}"
        what = self.rng.random() if not self.kills else 1.0
        if what < 0.10:
            self.restart(rank)
            self.done["rank kills"] += 1
        elif what < 0.13:
            self.stop(rank)
        elif what < 0.14 and self.allowed["tmpfs"]:
            self.fill()
        elif what < 0.25:
            self.wall[:8] = self.rng.randrange(-DAY_NS, DAY_NS).to_bytes(8, "little", signed=True)
            self.done["wall clock jumps"] += 1
        else:
            super().act()

    def fill(self) -> None:
        path = Path("/dev/shm/ballast")
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self.kill_consumer()
        time.sleep(self.rng.random() * LONGEST_FULL_S)
        path.unlink()
        self.done["full /dev/shm"] += 1


# --- faults that need the kernel's leave


def own_monotonic_clock(ahead_s: int) -> bool:
    """Have future forks of this process live so many seconds later."""
    if _libc.unshare(_CLONE_NEWTIME):
        return False
    Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_s} 0\nboottime {ahead_s} 0\n")
    return True


def with_wall_clock(directory: str) -> None:
    """Start this program again under a jumping wall clock."""
    library, offset = f"{directory}/wall_clock.so", f"{directory}/offset"
    Path(offset).write_bytes(bytes(4096))
    cc = os.environ.get("CC", "cc").split()
    subprocess.run([*cc, "-shared", "-fPIC", "-O2", "-o", library, CLOCK, "-ldl"], check=True)
    env = {**os.environ, "SHMBUS_WALL_CLOCK": offset}
    env["LD_PRELOAD"] = " ".join(filter(None, [env.get("LD_PRELOAD"), library]))
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=env).returncode)


def main() -> None:
    if "SHMBUS_WALL_CLOCK" not in os.environ:
        with tempfile.TemporaryDirectory() as directory:
            with_wall_clock(directory)
    name, seconds, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    restarts = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    print(f"seed {seed}", file=sys.stderr)
    with Path(os.environ["SHMBUS_WALL_CLOCK"]).open("r+b") as file:
        wall = mmap.mmap(file.fileno(), 4096)
    allowed = {
        "tmpfs": own_tmpfs(Path("/dev/shm"), TMPFS_BYTES),
        "time namespaces": own_monotonic_clock(0),
    }
    with shmbus.Bus.create(name, soak.CAPACITY, max_producers=2 * soak.PRODUCERS) as bus:
        run = DaemonSoak(name, seed, restarts, allowed, wall)
        try:
            hangs = run.run(seconds)
        except AssertionError:
            print(LOG.read_text()[-2000:], file=sys.stderr)
            raise
        if hangs:
            print(f"nothing moved for {soak.HANG_S} s: {bus.stats()}", file=sys.stderr)
        report = {**audit(run, run.finish(), hangs), **allowed}
        report["daemon kills"] = report.pop("consumer kills")
        print(json.dumps(report))
    with contextlib.suppress(shmbus.BusNotFoundError):
        shmbus.unlink(name)


if __name__ == "__main__":
    main()
