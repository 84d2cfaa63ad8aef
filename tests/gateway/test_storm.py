"""SIGKILL of gateway, environments and trainer, and cut connections (SHMBUS_STORM_SECONDS).

Groups answered 200 train; only the batch of a killed trainer or a dying gateway trains twice.
"""

import faulthandler
import fcntl
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Child, Spawner, wait_until
from gateways import REGISTRATION, Gateway

import shmbus

SECONDS = float(os.environ.get("SHMBUS_STORM_SECONDS", "6"))
ENVIRONMENTS = 3
GROUPS_A_MINUTE = float(os.environ.get("SHMBUS_STORM_GROUPS_A_MINUTE", "0"))
PAUSE_S = (0.2, 5.0)

COMMON = """
import contextlib, fcntl, json, os, random, socket, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from http_answers import read_answer
from http_requests import request_bytes, reset, scored
port, log, dice = int(sys.argv[2]), open(sys.argv[3], "a", buffering=1), random.Random()

def ask(*request, cut):
    # None where no whole answer came: the same is asked again.
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            data = request_bytes(*request)
            if cut and dice.random() < 0.1:
                connection.sendall(data[: dice.randrange(len(data))])
                reset(connection)
                return None
            if cut and dice.random() < 0.1:
                hang_up(connection, data)
                return None
            connection.sendall(data)
            return read_answer(connection)
    time.sleep(0.05)
    return None

def hang_up(connection, data):
    # A trainer that hangs up in the instant in which its gateway is killed is the one case that
    # nobody can tell from one that read its answer; docs/gateway.md says so.
    with open(sys.argv[4]) as strikes:
        fcntl.flock(strikes, fcntl.LOCK_SH)
        connection.sendall(data)
        connection.recv(dice.randrange(1, 200))
        reset(connection)
        # What the gateway answers now, it answers after it has heard of that.
        ask("GET", "/healthz", cut=False)
"""

ENVIRONMENT = (
    COMMON
    + """
number, interval_s = int(sys.argv[5]), float(sys.argv[6])
while True:
    due_s = time.monotonic() + interval_s
    group = scored([number] * dice.choice([2, 50, 3000, 12000]), [number])
    while True:
        answer = ask("POST", "/scored_data", group, cut=True)
        if answer is not None and answer.status == 200:
            break
        assert answer is None or answer.status == 503, answer
    log.write(f"{number}\\n")
    number += 1
    time.sleep(max(0.0, due_s - time.monotonic()))
"""
)

TRAINER = (
    COMMON
    + """
life = sys.argv[5]
registration = json.loads(sys.argv[6])
while (answer := ask("POST", "/register", registration, cut=False)) is None or answer.status != 200:
    pass
while True:
    answer = ask("GET", "/batch", cut=True)
    if answer is None or answer.status != 200:
        continue
    batch = answer.json()["batch"]
    if batch is None:
        log.write(f"{life} none\\n")
        time.sleep(0.01)
        continue
    log.write(f"{life} " + " ".join(str(g["tokens"][0][0]) for g in batch) + "\\n")
"""
)


class Storm:
    def __init__(self, spawner: Spawner, gateway: Gateway, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.gateway = gateway
        self.answered = directory / "answered"
        self.trained = directory / "trained"
        self.strikes = directory / "strikes"
        self.strikes.touch()
        self._spawn = spawner
        self._lives = 0
        self.kills: Counter[str] = Counter()
        self.trainer = self._trainer()
        self.environments = [self._environment(n) for n in range(ENVIRONMENTS)]

    def _start(self, text: str, log: Path, *more: object) -> Child:
        here = Path(__file__).parent
        return self._spawn.script(text, here, self.gateway.port, log, self.strikes, *more)

    def _trainer(self) -> Child:
        self._lives += 1
        content = json.dumps({**REGISTRATION, "batch_size": 4})
        return self._start(TRAINER, self.trained, self._lives, content)

    def _environment(self, number: int) -> Child:
        """Start an environment; a number with an unnoted answer is never reused."""
        first = (number + 1) * 10**9 + self.kills[f"environment {number}"] * 10**6
        interval_s = 60.0 * ENVIRONMENTS / GROUPS_A_MINUTE if GROUPS_A_MINUTE else 0.0
        return self._start(ENVIRONMENT, Path(f"{self.answered}{number}"), first, interval_s)

    def strike(self) -> None:
        for child in (self.gateway.child, self.trainer, *self.environments):
            assert child.running, child.output()
        who = self.dice.choice(["gateway", "gateway", "trainer", "environment"])
        if who == "gateway":
            with self.strikes.open() as strikes:
                fcntl.flock(strikes, fcntl.LOCK_EX)
                self.gateway.kill()
            self.gateway.start()
        elif who == "trainer":
            self.trainer.kill()
            self.trainer = self._trainer()
        else:
            number = self.dice.randrange(ENVIRONMENTS)
            self.environments[number].kill()
            who = f"environment {number}"
            self.kills[who] += 1
            self.environments[number] = self._environment(number)
            return
        self.kills[who] += 1

    def finish(self) -> None:
        """End the environments, and let the trainer take the rest."""
        for environment in self.environments:
            environment.kill()
        wait_until(self._is_drained, 60.0, "the trainer to take everything")
        self.trainer.kill()

    def _is_drained(self) -> bool:
        lines = self.trained.read_text().splitlines()
        return len(lines) > 20 and all(line.endswith("none") for line in lines[-20:])

    def audit(self, waiting: set[int]) -> tuple[int, int]:
        """Compare answered with trained groups; return their number. `waiting` fill no batch."""
        answered = {
            int(line)
            for number in range(ENVIRONMENTS)
            for line in Path(f"{self.answered}{number}").read_text().split()
        }
        lives: dict[str, list[list[int]]] = {}
        for line in self.trained.read_text().splitlines():
            life, *numbers = line.split()
            batches = lives.setdefault(life, [])
            if numbers != ["none"]:
                batches.append([int(number) for number in numbers])
            else:
                batches.append([])
        trained: Counter[int] = Counter()
        again: set[int] = set()
        for batches in lives.values():
            for batch in batches:
                trained.update(batch)
            again.update(batches[-1] if batches else ())
        lost = answered - trained.keys() - waiting
        doubled = {n: count for n, count in trained.items() if count > 1 and n not in again}
        assert not lost, f"{len(lost)} lost: {sorted(lost)[:20]}"
        where = [
            line
            for line in self.trained.read_text().splitlines()
            if not doubled.keys().isdisjoint(map(int, line.replace("none", "").split()[1:]))
        ]
        # A batch of four sequences for each kill of a gateway, at the most.
        most = 4 * self.kills["gateway"]
        assert len(doubled) <= most, f"{len(doubled)} trained twice: {where[:20]}"
        return len(answered), len(trained)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
def test_nothing_is_lost(spawn: Spawner, gateway_of: Any, tmp_path: Path, seed: int) -> None:
    # Its own limit, above, exceeds the limit of a hanging test.
    faulthandler.cancel_dump_traceback_later()
    gateway = gateway_of("--create", "4MiB")
    storm = Storm(spawn, gateway, tmp_path, seed)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(storm.dice.uniform(*PAUSE_S))
        storm.strike()
    storm.finish()
    gateway.stop()
    with shmbus.Consumer(gateway.name) as consumer:
        ledger = consumer.stats()
        assert ledger.balanced
        waiting = {int(t["tokens"][0]) for g in consumer.take(100, timeout=0) for t in g}
    answered, trained = storm.audit(waiting)
    print(
        f"{answered} answered, {60 * answered / SECONDS:.0f} a minute; {trained} trained on, "
        f"kills {dict(storm.kills)}, {ledger}"
    )
    assert answered > 50
