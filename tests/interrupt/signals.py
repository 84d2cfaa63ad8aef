"""Sends real signals at random instants to a consuming process, and audits at the end.

Usage: ``python tests/interrupt/signals.py NAME COUNT [SEED [MODE...]]``. Prints a JSON line a mode.
A mode lasts for COUNT exceptions from SIGINT, Python's KeyboardInterrupt, and COUNT from SIGALRM,
whose handler raises a different exception. Exit status 1 for any fault.

In some modes a signal counts anywhere (``embedded``, ``served``, ``ranks``), in the others only
within one call: ``take``, ``ack``, ``with``, and ``next_batch`` (``prefetch...``). In the end every
group was acknowledged once, nothing remains, and no call failed for a different reason.
"""

import contextlib
import faulthandler
import json
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import served

import shmbus

DATA = np.arange(7, dtype=np.int32)
SAMPLES = 2
SIGNALS = {signal.SIGINT, signal.SIGALRM}

#: Longest seconds between two signals; long enough for several calls, short enough for a long call.
PAUSE_S = 0.004

#: Seconds from a signal to its exception in the taker.
ANSWER_S = 10.0

#: Most groups waiting for the consumer: enough to find, without a flood.
AHEAD_GROUPS = 60


#: Modes with signals within a certain call only.
WITHIN = ("take", "ack", "with", "prefetch", "prefetch-served", "prefetch-ranks")
MODES = ("embedded", "served", "ranks", *WITHIN)

#: Modes without a daemon.
ALONE = ("embedded", "prefetch")


class Alarm(Exception):
    """Raised by the handler of SIGALRM."""


class Victim:
    """The interrupted process; signals wait while its own records change."""

    def __init__(self, name: str, mode: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.mode = mode
        self.ranks = 2 if mode.endswith("ranks") else 1
        self.consumers = self.attach(name)
        #: The next to act, and its holdings.
        self.turn = 0
        self.held: list[shmbus.Group] = []
        self.acknowledged: list[str] = []
        #: Exceptions with their tracebacks, which keep the calls' objects.
        self.kept: list[BaseException] = []
        #: Whether a handler may raise now, and a signal from an unarmed moment.
        self.armed = False
        self.missed = 0

    def attach(self, name: str) -> list[Any]:
        return [
            shmbus.Consumer(name, daemon=self.mode not in ALONE, rank=rank, world_size=self.ranks)
            for rank in range(self.ranks)
        ]

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.armed:
            self.missed = number
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        else:
            raise Alarm

    def arm(self) -> None:
        self.armed = True
        if self.mode not in WITHIN:
            missed, self.missed = self.missed, 0
            if missed:
                self.handle(missed, None)

    def work(self) -> None:
        if self.mode not in WITHIN:
            self.arm()
            self.operate()
        elif self.mode == "take":
            self.arm()
            self.held = self.consumers[0].take(self.random.choice([1, 4, 20]), 0.002)
        else:
            self.held = self.consumers[0].take(20, 0.002)
            self.arm()
            self.end(self.consumers[0], self.mode)

    def operate(self) -> None:
        """Do the freely interruptible work."""
        verb = self.random.choice(["each", "list", "with", "back", "stats", "version"])
        if verb == "stats":
            self.consumers[0].stats()
        elif verb == "version":
            self.consumers[0].policy_version += 1
        consumer = self.consumers[self.turn]
        if self.ranks == 1:
            self.held = consumer.take(self.random.choice([1, 4, 20]), 0.002)
        else:
            self.held = consumer.take_shard(groups=1, timeout=0.002)
        self.end(consumer, verb)

    def end(self, consumer: shmbus.Consumer, verb: str) -> None:
        if verb == "list":
            consumer.ack(self.held)
        elif verb == "with":
            for group in self.held:
                with group:
                    assert group[0]["tokens"].tobytes() == DATA.tobytes()
        elif verb == "back":
            for group in self.held:
                group.give_back()
        else:
            for group in self.held:
                group.ack()

    def note(self) -> None:
        """Note the ended groups; the next call acknowledges the rest."""
        self.acknowledged += [g.instance_id for g in self.held if g.state == "acknowledged"]
        self.held = [group for group in self.held if group.state == "leased"]

    def run(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self.handle)
        faulthandler.register(signal.SIGUSR1)
        over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
        print("ready", flush=True)
        while not over.is_set():
            try:
                self.work()
                self.armed = False
            except (KeyboardInterrupt, Alarm) as error:
                self.armed = False
                self.kept = [*self.kept[-9:], error]
                print(type(error).__name__, flush=True)
            self.note()
            self.finish_held()
            if self.missed and self.mode in WITHIN:
                self.missed = 0
                print("missed", flush=True)
            self.turn = (self.turn + 1) % self.ranks

    def finish_held(self) -> None:
        """Acknowledge the remains of an interrupted call."""
        for group in self.held:
            group.ack()
        self.note()

    def drain(self, seconds: float) -> shmbus.Ledger:
        deadline = time.monotonic() + seconds
        while True:
            self.operate()
            self.note()
            self.turn = (self.turn + 1) % self.ranks
            ledger = [consumer.stats() for consumer in self.consumers][-1]
            left = ledger.leased or ledger.stashed or ledger.in_ring
            if not left or time.monotonic() > deadline:
                return ledger


class Trainer(Victim):
    """A handler with prefetch and an interrupted `next_batch`."""

    def attach(self, name: str) -> list[Any]:
        # Imported late: the remaining victims start without torch.
        from trainer_adapter import OnlineDataHandler

        self.batches: list[Any] = []
        return [
            OnlineDataHandler(
                name, groups_per_batch=2, max_wait=0.0, prefetch=1, daemon=self.mode not in ALONE,
                rank=rank, world_size=self.ranks,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def work(self) -> None:
        handler = self.consumers[self.turn]
        with contextlib.suppress(TimeoutError):
            self.arm()
            # A single step of C takes the batch from the value stack into the list.
            self.batches.append(handler.next_batch(timeout=0.02))

    operate = work

    def note(self) -> None:
        for batch in self.batches:
            self.consumers[self.turn].ack(batch)
            self.acknowledged += [group.instance_id for group in batch.groups]
        self.batches.clear()


def consume(name: str, mode: str, seed: int) -> None:
    victim = (Trainer if mode.startswith("prefetch") else Victim)(name, mode, seed)
    victim.run()
    ledger = victim.drain(10.0)
    left = {"leased": ledger.leased, "stashed": ledger.stashed, "in_ring": ledger.in_ring}
    print(
        json.dumps(
            {
                "acknowledged": victim.acknowledged,
                "left": {name: count for name, count in left.items() if count},
                "balanced": ledger.balanced,
                "dropped": dict(ledger.dropped),
            }
        )
    )


class Feeder(threading.Thread):
    """Puts groups until told to stop; an even number."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self._bus = shmbus.Bus.open(name)
        self._producer = shmbus.Producer(name)
        self._over = threading.Event()
        self.keys: list[str] = []

    def run(self) -> None:
        while not self._over.is_set() or len(self.keys) % 2:
            waiting = self._bus.stats().undelivered
            if waiting > AHEAD_GROUPS * SAMPLES and not self._over.is_set():
                time.sleep(0.001)
                continue
            key = f"g{len(self.keys)}"
            self.keys.append(key)
            for index in range(SAMPLES):
                self._producer.put(
                    key, group_size=SAMPLES, index=index, score=float(index), tokens=DATA,
                    timeout=ANSWER_S,
                )  # fmt: skip

    def stop(self) -> list[str]:
        self._over.set()
        self.join()
        self._producer.close()
        self._bus.close()
        return self.keys


def attack(name: str, mode: str, count: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    with contextlib.ExitStack() as last:
        if mode in ALONE:
            last.enter_context(shmbus.Bus.create(name, "1MiB", max_producers=2))
        else:
            daemon = served.serve(name)
            last.callback(shmbus.unlink, name)
            last.callback(daemon.wait, 30)
            last.callback(daemon.terminate)
            served.wait_for(lambda: shmbus.Bus.open(name).close())
        victim = subprocess.Popen(
            [sys.executable, __file__, name, "consume", str(seed), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        last.callback(victim.wait)
        last.callback(victim.kill)
        assert victim.stdin is not None and victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        feeder = Feeder(name)
        feeder.start()
        met: dict[str, int] = {}
        faults: list[str] = []
        left = rng.sample([*SIGNALS] * count, 2 * count)
        while left:
            number = left[-1]
            time.sleep(rng.uniform(0, PAUSE_S))
            victim.send_signal(number)
            if not select.select([victim.stdout], [], [], ANSWER_S)[0]:
                victim.send_signal(signal.SIGUSR1)
                faults.append(f"signal {number} did not come through; where it is is on stderr")
                time.sleep(0.5)
                break
            came = victim.stdout.readline().strip()
            if came not in ("KeyboardInterrupt", "Alarm", "missed"):
                faults.append(f"the consumer ended, with status {victim.wait()}")
                break
            met[came] = met.get(came, 0) + 1
            if came != "missed":
                left.pop()
        keys = feeder.stop()
        output, _ = victim.communicate()
        faults += faults_of(keys, output)
        return {"mode": mode, "seed": seed, **met, "faults": faults}


def faults_of(keys: list[str], output: str) -> list[str]:
    try:
        said = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        return ["the consumer failed: its traceback is on stderr"]
    times = Counter(said["acknowledged"])
    faults = [f"acknowledged {times[key]} times: {key}" for key in keys if times[key] != 1]
    if said["left"] or said["dropped"] or not said["balanced"]:
        faults.append(f"the ledger: {said['left']}, {said['dropped']}")
    return faults


if __name__ == "__main__":
    bus, count, *rest = sys.argv[1:]
    if count == "consume":
        consume(bus, rest[1], int(rest[0]))
    else:
        chosen = int(rest[0]) if rest else random.SystemRandom().randrange(2**32)
        reports = []
        for which in rest[1:] or MODES:
            reports.append(attack(bus, which, int(count), chosen))
            print(json.dumps(reports[-1]), flush=True)
        sys.exit(any(report["faults"] for report in reports))
