"""A death and a stop at each named point of the core, as a program.

A case forks a process, which gets its signal at its point. The other side goes on, and audits the
result. test_failpoints.py judges the report, a line a case.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from supervisor import DEADLINE_S, Child, deadline

import shmbus

RECORDS = 80
GROUPS, SIZE = 40, 4
EXTENT = 4096
SPAN_TWO = 6000

#: Kind: point: passes before the signal; late passes lie behind several wraps.
POINTS: dict[str, dict[str, tuple[int, ...]]] = {
    "producer": {
        "attach-locked": (1,),
        "attach-taken-over": (1,),
        "attach-named": (1,),
        "take-over-counted": (1,),
        "take-over-sealed": (1,),
        "run-leased": (1, 15),
        "run-entered": (1, 15),
        "run-linked": (1, 2, 15),
        "lease-half": (1, 5),
        "commit-intended": (1, 60),
        "record-published": (1, 30),
        "record-exposed": (1, 60),
        "commit-marked": (1, 60),
        "abort-marked": (1, 8),
        "close-sealed": (1,),
    },
    "collector": {
        "collector-replayed": (1,),
        "sweep-locked": (1,),
        "take-over-counted": (1, 2),
        "take-over-sealed": (1, 2),
        "release-logged": (1, 30),
        "release-intended": (1, 30),
        "release-half": (1, 3, 121),
        "release-counted": (1, 30),
        "free-ended": (1, 15),
        "free-half": (1, 2, 7),
    },
    "mover": {
        "run-linked": (1,),
        "move-intended": (1, 3),
        "move-published": (1, 3),
        "move-ended": (1, 3),
        "free-ended": (1,),
    },
    # Three marks a group, eight groups a take.
    "partial": {"lease-marking": (1, 2, 3, 4, 23, 25, 60)},
}


def pattern(key: int, size: int) -> np.ndarray:
    return ((np.arange(size) + key * 7919) % 251).astype(np.uint8)


def size_of(number: int) -> int:
    """Return small sizes, sizes of half an extent, and of two."""
    return SPAN_TWO if number % 10 == 7 else 100 + number * 977 % 1900


def meet(
    child: Child,
    beside: Callable[[], object] = lambda: time.sleep(0.002),
    while_stopped: Callable[[], object] = lambda: None,
) -> bool:
    """Work beside a process until its end, through a stop; return whether the signal came."""
    signalled = False
    for _ in deadline("the end of a process that meets its signal"):
        beside()
        ended = child.look()
        if child.stopped:
            signalled = True
            while_stopped()
            child.go_on()
        if ended:
            break
    return signalled or child.killed


def await_signal(child: Child, action: str) -> bool:
    """Wait for the child's kill or stop at its point; False after another end."""
    for _ in deadline("the signal at a point"):
        if child.look() or child.stopped:
            return child.killed if action == "kill" else child.stopped
        time.sleep(0.002)
    return False


def ruin(name: str) -> None:
    """Leave a slot behind with a dead owner's two records and open reservation."""

    def die() -> None:
        producer = shmbus.Producer(name)
        producer.put("ruin", group_size=1, index=0, data=pattern(1, 50))
        slot = producer.reserve("never", group_size=1, index=0, fields={"data": ("u1", 300)})
        producer.put("ruin", group_size=1, index=0, data=pattern(1, 50))
        assert slot is not None
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(die).wait() == -signal.SIGKILL


def write_records(name: str) -> None:
    """Put numbered records in every possible way."""
    producer = shmbus.Producer(name)
    for number in range(RECORDS):
        size = size_of(number)
        key = {"group_size": 1, "index": 0}
        if number % 4 < 2:
            producer.put("c", data=pattern(number, size), **key)
        else:
            if number % 4 == 3:
                producer.reserve("never", fields={"data": ("u1", size)}, **key).abort()
            with producer.reserve("c", fields={"data": ("u1", size)}, **key) as slot:
                slot["data"][:] = pattern(number, size)
    producer.close()


def producer_case(name: str, failpoint: str, action: str) -> dict[str, object]:
    """Signal a producer; a second producer and the collector go on."""
    seen: list[int] = []
    faults: list[str] = []

    def take(timeout: float) -> int:
        groups = consumer.take(64, timeout=timeout)
        for group in groups:
            sample = group[0]
            if group.instance_id == "c":
                seen.append(sample.sequence)
                key = sample.sequence
                if not np.array_equal(sample["data"], pattern(key, size_of(key))):
                    faults.append(f"record {key} is torn")
            group.ack()
        return len(groups)

    def send(size: int) -> None:
        for _ in deadline("space for the healthy producer"):
            try:
                healthy.put("h", group_size=1, index=0, data=pattern(3, size), timeout=0.005)
                return
            except shmbus.BusFullError:
                take(0)

    with shmbus.Bus.create(name, "64KiB", max_producers=2, extent_bytes=EXTENT):
        consumer = shmbus.Consumer(name)
        healthy = shmbus.Producer(name)
        take(0)  # looks for the dead now, and not again before the child does
        ruin(name)

        def send_and_take(size: int, times: int, timeout: float = 0) -> None:
            for _ in range(times):
                send(size)
                take(timeout)

        child = Child(lambda: write_records(name), failpoint)
        signalled = meet(
            child, lambda: send_and_take(500, 1, 0.002), lambda: send_and_take(1500, 80)
        )
        for _ in deadline("the last records"):
            stats = consumer.stats()
            if not take(0.01) and stats.in_ring == 0 and stats.producers == 1:
                break
        ledger = consumer.stats()
        # The dead's holdings are free: as many records fit as into a new bus.
        send_and_take(1500, 100)
        consumer.close()
        healthy.close()
    if sorted(seen) != list(range(len(seen))):
        faults.append(f"lost or doubled: {sorted(seen)}")
    if action == "stop" and len(seen) != RECORDS:
        faults.append(f"{len(seen)} of {RECORDS} records came after it went on")
    return verdict(signalled, faults, ledger, child)


def verdict(
    signalled: bool, faults: list[str], ledger: shmbus.Ledger, child: Child, late: int = 0
) -> dict[str, object]:
    """Return the audit; so many late samples may be dropped, or wait in vain for siblings."""
    left = ledger.dropped.get("surplus", 0) + ledger.stashed
    rest = ledger.committed - ledger.acknowledged - left
    if not ledger.balanced or set(ledger.dropped) - {"surplus"} or rest or left > late:
        faults.append(f"the ledger: {ledger}")
    if ledger.capacity - ledger.free > (4 + late) * EXTENT:
        faults.append(f"{ledger.capacity - ledger.free} bytes are held at the end")
    if child.status not in (0, -signal.SIGKILL):
        faults.append(f"the process ended with {child.status}")
    return {"signalled": signalled, "faults": faults}


def group_key(group: int, index: int) -> int:
    return group * SIZE + index


def put_groups(
    producer: shmbus.Producer, indices: range, first: int, count: int, **more: int
) -> None:
    for group in range(first, first + count):
        for index in indices:
            key = group_key(group, index)
            data = pattern(key, SPAN_TWO if key % 17 == 5 else 600)
            key_of = {"group_size": SIZE, "index": index, **more}
            producer.put(f"{group}", data=data, timeout=DEADLINE_S, **key_of)


def check_group(group: shmbus.Group, faults: list[str]) -> None:
    indices = [sample.index for sample in group]
    if indices != sorted({*indices}) or len(indices) < (group.need or group.size):
        faults.append(f"group {group.instance_id} has samples {indices}")
    for sample in group:
        key = group_key(int(group.instance_id), sample.index)
        if not np.array_equal(sample["data"], pattern(key, sample["data"].size)):
            faults.append(f"group {group.instance_id} is torn or mixed")


def collect_groups(name: str, log: Path) -> None:
    """Take and acknowledge; the log notes intents and deeds."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faults: list[str] = []
    with shmbus.Consumer(name) as consumer:
        done = 0
        while done < GROUPS:
            for group in consumer.take(8, timeout=1):
                if group.instance_id != "ruin":
                    check_group(group, faults)
                    os.write(descriptor, b"begin %s\n" % group.instance_id.encode())
                group.ack()
                if group.instance_id != "ruin":
                    os.write(descriptor, b"done %s\n" % group.instance_id.encode())
                    done += 1
    assert not faults, faults


def read_log(log: Path) -> tuple[set[str], set[str]]:
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return {g for verb, g in lines if verb == "begin"}, {g for verb, g in lines if verb == "done"}


def take_rest(
    name: str, log: Path, expected: int, faults: list[str]
) -> tuple[shmbus.Ledger, set[str]]:
    """Succeed: take the unacknowledged groups, and compare with the log."""
    begun, done = read_log(log)
    rest: list[str] = []
    with shmbus.Consumer(name) as consumer:
        while groups := consumer.take(64, timeout=0.1):
            for group in groups:
                if group.instance_id != "ruin":
                    check_group(group, faults)
                    rest.append(group.instance_id)
                group.ack()
        ledger = consumer.stats()
    if len(rest) != len(set(rest)) or set(rest) & done:
        faults.append(f"delivered after the acknowledgement: {sorted(set(rest) & done)}")
    if len(set(rest) | begun) != expected:
        faults.append(f"{expected - len(set(rest) | begun)} groups are lost")
    return ledger, set(rest)


def check_alone(name: str, faults: list[str]) -> None:
    try:
        shmbus.Consumer(name).close()
        faults.append("a second collector attached while the first was stopped")
    except shmbus.BusBusyError:
        pass


def collector_case(name: str, failpoint: str, action: str) -> dict[str, object]:
    """Signal a collector between acknowledged groups; a successor takes over."""
    faults: list[str] = []
    log = log_of(name)
    with shmbus.Bus.create(name, "512KiB", max_producers=2, extent_bytes=EXTENT):
        with shmbus.Producer(name) as producer:
            ruin(name)
            put_groups(producer, range(SIZE), 0, GROUPS)
            child = Child(lambda: collect_groups(name, log), failpoint)
            signalled = meet(child, while_stopped=lambda: check_alone(name, faults))
        ledger, _ = take_rest(name, log, GROUPS, faults)
    return verdict(signalled, faults, ledger, child)


def collect_stragglers(name: str) -> None:
    """Acknowledge the runs' filling, to have the rest moved."""
    with shmbus.Consumer(name) as consumer:
        for _ in deadline("stragglers to be moved"):
            for group in consumer.take(8, timeout=0.02):
                group.ack()
            if consumer.stats().moved > 6:
                return


def mover_case(name: str, failpoint: str, action: str) -> dict[str, object]:
    """Signal a collector in a move of stragglers; their groups complete later."""
    faults: list[str] = []
    with (
        shmbus.Bus.create(name, "64KiB", max_producers=2, extent_bytes=EXTENT),
        shmbus.Producer(name) as producer,
    ):
        for group in range(14):
            data = pattern(group_key(group, 0), 600)
            producer.put(f"{group}", group_size=2, index=0, data=data)
            producer.put("filler", group_size=1, index=0, data=pattern(0, 2500))
        child = Child(lambda: collect_stragglers(name), failpoint)
        signalled = meet(child, while_stopped=lambda: check_alone(name, faults))
        rest: list[str] = []
        with shmbus.Consumer(name) as consumer:

            def take(timeout: float) -> bool:
                groups = consumer.take(8, timeout=timeout)
                for group in groups:
                    if group.instance_id != "filler":
                        check_group(group, faults)
                        rest.append(group.instance_id)
                    group.ack()
                return bool(groups)

            for number in range(14):
                data = pattern(group_key(number, 1), 600)
                for _ in deadline("space for the stragglers' groups"):
                    try:
                        producer.put(f"{number}", group_size=2, index=1, data=data, timeout=0.005)
                        break
                    except shmbus.BusFullError:
                        take(0)
            while take(0.1):
                pass
            ledger = consumer.stats()
        if sorted(map(int, rest)) != list(range(14)):
            faults.append(f"lost or doubled: {sorted(map(int, rest))}")
    return verdict(signalled, faults, ledger, child)


def partial_case(name: str, failpoint: str, action: str) -> dict[str, object]:
    """Signal a collector in a lease of groups without a sample, which comes then."""
    faults: list[str] = []
    log = log_of(name)
    late: list[int] = []
    with shmbus.Bus.create(name, "512KiB", max_producers=2, extent_bytes=EXTENT):
        with shmbus.Producer(name) as producer:
            put_groups(producer, range(SIZE - 1), 0, GROUPS, need=SIZE - 1, round=0)
            child = Child(lambda: collect_groups(name, log), failpoint)

            def complete() -> None:
                """Put the last samples of groups not begun by the collector."""
                begun, _ = read_log(log)
                late.extend(group for group in range(GROUPS) if str(group) not in begun)
                for group in late:
                    last = range(SIZE - 1, SIZE)
                    put_groups(producer, last, group, 1, need=SIZE - 1, round=0)

            signalled = meet(child, while_stopped=complete)
            if child.killed:
                complete()
        ledger, _ = take_rest(name, log, GROUPS, faults)
    return verdict(signalled, faults, ledger, child, len(late))


Case = Callable[[str, str, str], "dict[str, object]"]


def log_of(name: str) -> Path:
    return Path(f"/dev/shm/shmbus.{name}.log")


def play(
    points: dict[str, dict[str, tuple[int, ...]]],
    cases: dict[str, Case],
    actions: tuple[str, ...] = ("kill", "stop"),
) -> None:
    """Run cases (bus, failpoint, action) by kind, failpoint and action, and print a line each."""
    name, only, passes = [*sys.argv[1:], "", ""][:3]
    for kind, of_kind in points.items():
        for point, hits in of_kind.items():
            for hit, action in itertools.product(hits, actions):
                case = f"{kind}:{point}:{hit}:{action}"
                chosen = case.startswith(only) if only.endswith(":") else only in case
                if not chosen or (passes == "first" and hit != hits[0]):
                    continue
                report: dict[str, object] = {"case": case, "signalled": False}
                try:
                    report |= cases[kind](name, f"{point}:{hit}:{action}", action)
                except Exception as error:
                    report["faults"] = [repr(error)]
                finally:
                    log_of(name).unlink(missing_ok=True)
                    with contextlib.suppress(shmbus.BusNotFoundError):
                        shmbus.unlink(name)
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    play(
        POINTS,
        {
            "producer": producer_case,
            "collector": collector_case,
            "mover": mover_case,
            "partial": partial_case,
        },
    )
