"""The daemon's rows: throughput beside the embedded consumer, its processor time, and its sleep.

What a trajectory costs the daemon holds wake-ups too, which go by time and not by trajectories. So
short and long ones are compared at one rate, that both workloads reach.

One way through the daemon to a sleeping reader is two wake-ups. Its bound is a semaphore that a
third interpreter passes on to another. A polling reader leaves one of them, the daemon's own, and
its bound is a semaphore that goes straight.

Embedded and daemon runs take turns, so that a slow minute of the machine falls on both.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

import shmbus
from bench.bounds import Beside, Bound, interval, turns
from bench.failures import MeasurementError
from bench.processes import STALL_S, Role, run_together
from bench.rows import interpreters, packed, polled, wake
from bench.rows.idle import beside_sleeps
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.sending import check_ledger, produce, temporary_bus
from bench.sizes import Sizes
from bench.workload import Workload
from bench.yardsticks import sleep_us, syscall_us
from shmbus.segment.names import socket_path

__all__ = ["measure", "processor_s", "serving"]

#: Tokens of the second workload: four times the payload, which the daemon must not notice. Its
#: batches have as many trajectories, since each costs the daemon a message of its own.
LONG_TOKENS = 8192
TRAJECTORIES_PER_BATCH = packed.TOKENS_PER_BATCH // 2048
#: Trajectories a second at which short and long ones are compared, and for how many seconds.
EVEN_PER_S = 20_000.0
EVEN_S = 2.0
#: Groups of one trajectory of so many tokens that a client leases and acknowledges, so many a time.
LEASED_TOKENS = 256
LEASED_AT_ONCE = 256
PASSED_ON: Final = Bound(name="a semaphore passed on", unit="us", sense="cost")
#: Asked for and acknowledged by a message each, answered by one.
LEASE_MESSAGES: Final = Bound(name="two messages for 256 leases", unit="groups/s")
EMBEDDED: Final = Bound(name="embedded", unit="trajectories/s")
#: A batch is asked for and answered, and acknowledged and answered.
MESSAGES: Final = Bound(name="two messages a batch", unit="us a trajectory", sense="cost")
SHORT: Final = Bound(name="the short ones", unit="us a trajectory", sense="cost")


@contextmanager
def serving(name: str) -> Iterator[int]:
    """Run a daemon on a bus; yield its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shmbus", "serve", name, "--log-level", "warning"]
    )
    try:
        deadline = time.monotonic() + STALL_S
        while not os.path.exists(socket_path(name)):
            if time.monotonic() > deadline or process.poll() is not None:
                raise MeasurementError("the daemon did not begin to serve")
            time.sleep(0.01)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STALL_S)
        finally:
            process.kill()
            process.wait()


def processor_s(pid: int) -> float:
    """Processor seconds of all threads of a process, as the scheduler counts them."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def _wakes(pid: int) -> int:
    """How often threads of a process went off the processor by themselves."""
    wakes = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        words = (task / "status").read_text().split()
        wakes += int(words[words.index("voluntary_ctxt_switches:") + 1])
    return wakes


def _run(workload: Workload, *, daemon: bool, per_s: float = 0.0) -> tuple[float, float]:
    """Move a workload into packed batches; trajectories a second, daemon microseconds each."""
    with temporary_bus(workload.capacity) as name:
        if not daemon:
            return _train(name, workload, per_s), 0.0
        with serving(name) as pid:
            before = processor_s(pid)
            rate = _train(name, workload, per_s)
            return rate, (processor_s(pid) - before) / workload.trajectories * 1e6


def _train(name: str, workload: Workload, per_s: float) -> float:
    tokens_per_batch = TRAJECTORIES_PER_BATCH * workload.tokens
    trainer = Role(packed.train, (name, workload, tokens_per_batch))
    producers = [Role(produce, (name, workload, i, per_s)) for i in range(workload.producers)]
    (seconds, _), *_ = run_together([trainer, *producers])
    return workload.trajectories / float(seconds)


def measure(sizes: Sizes, capacity: str, say: Callable[[str], None]) -> list[Row]:
    """Measure all of them.

    Parameters
    ----------
    sizes : Sizes
    capacity : str
    say : callable
        Told what is under way.
    """
    trajectories, least = sizes.packed, sizes.repetitions
    # Runs of it differ by less than a hundredth.
    leased = trajectories // 4 // LEASED_AT_ONCE * LEASED_AT_ONCE
    short = Workload(trajectories=trajectories, tokens=2048, capacity=capacity)
    long = Workload(trajectories=trajectories // 4, tokens=LONG_TOKENS, capacity=capacity)
    even = int(min(EVEN_PER_S * EVEN_S, trajectories)) // TRAJECTORIES_PER_BATCH
    evenly = [
        dataclasses.replace(each, trajectories=even * TRAJECTORIES_PER_BATCH)
        for each in (short, long)
    ]
    embedded: list[float] = []
    rates: list[float] = []
    cpu, cpu_long, even_cpu = [], [], []
    messages_us = [syscall_us()]

    def beside() -> Beside:
        bounds = tuple((rate,) for rate in embedded)
        return Beside(bound=EMBEDDED, values=tuple(rates), bounds=bounds)

    for number in turns(least, sizes.most_repetitions, sizes.rows_s / 2, lambda: beside().narrow):
        say(f"packed batches without and with a daemon ({number})")
        embedded.append(_run(short, daemon=False)[0])
        rate, each = _run(short, daemon=True)
        rates.append(rate)
        if number > least:
            continue
        cpu.append(each)
        cpu_long.append(_run(long, daemon=True)[1])
        even_cpu.append([_run(each, daemon=True, per_s=EVEN_PER_S)[1] for each in evenly])
        messages_us.append(syscall_us())
    least_us = [2 * us / TRAJECTORIES_PER_BATCH for us in messages_us]
    say("one way through a daemon, to a reader that sleeps, and to one that polls")
    ways = [_wake(sizes, capacity), _polled(sizes, capacity)]
    say("leases of small groups through a daemon")
    leases = _leases(leased, least, capacity)
    say("a daemon asleep")
    return [
        Row(
            name="daemon-packed",
            title="put to packed torch batches through the daemon, 2,048 tokens",
            measured=f"{statistics.median(rates):,.0f} trajectories/s",
            value=statistics.median(beside().ratios),
            spread=interval(beside().ratios),
            bound=beside(),
            target=TARGETS["daemon-packed"],
            figures={"trajectories_per_s": rates, "of_embedded": beside().ratios},
        ),
        Row(
            name="daemon-cpu",
            title="the daemon's processor time, 2,048 tokens",
            measured=f"{statistics.median(cpu):.2f} us a trajectory; "
            f"{statistics.median(cpu_long):.2f} us at {LONG_TOKENS:,} tokens",
            value=statistics.median(cpu),
            spread=interval(cpu),
            bound=Beside(
                bound=MESSAGES,
                values=tuple(cpu),
                bounds=tuple(itertools.pairwise(least_us)),
            ),
            target=TARGETS["daemon-cpu"],
            figures={"us_2048": cpu, f"us_{LONG_TOKENS}": cpu_long},
        ),
        _payload(even_cpu),
        *ways,
        leases,
        _idle(sizes.idle_s, capacity),
    ]


def _wake(sizes: Sizes, capacity: str) -> Row:
    """Measure one way through the daemon, beside a semaphore that is passed on."""
    pauses = wake.pauses_ns(sizes)
    ours, bare = [], []
    for _ in range(sizes.repetitions):
        way = wake.run_shmbus(pauses, capacity, beside=serving)
        ours.append(float(np.median(way[sizes.warm_up :])) / 1000)
        bound = interpreters.measure(pauses, between=1)
        bare.append(float(np.median(bound[sizes.warm_up :])) / 1000)
    added = [mine - least for mine, least in zip(ours, bare, strict=True)]
    return Row(
        name="daemon-wake",
        title="one way through the daemon to a sleeping reader, p50",
        measured=f"{statistics.median(ours):.1f} us; a semaphore passed on "
        f"{statistics.median(bare):.1f} us",
        value=statistics.median(ours),
        spread=interval(ours),
        bound=Beside(bound=PASSED_ON, values=tuple(ours), bounds=tuple((least,) for least in bare)),
        target=TARGETS["daemon-wake"],
        figures={"us": ours, "semaphore_us": bare, "added_us": added},
    )


def _polled(sizes: Sizes, capacity: str) -> Row:
    """Measure one way through the daemon to a reader that polls, beside a semaphore."""
    pauses = wake.pauses_ns(sizes)
    ours, bare = [], []
    for _ in range(sizes.repetitions):
        # For one group, as its next one: for all there are, the daemon would look a second time.
        ways, _ = polled.run_shmbus(pauses, capacity, at_once=1, beside=serving)
        ours.append(float(np.median(ways[sizes.warm_up :, 0])) / 1000)
        bound = interpreters.measure(pauses)
        bare.append(float(np.median(bound[sizes.warm_up :])) / 1000)
    return Row(
        name="daemon-polled",
        title="one way through the daemon to a polling reader, p50",
        measured=f"{statistics.median(ours):.1f} us; a semaphore {statistics.median(bare):.1f} us",
        value=statistics.median(ours),
        spread=interval(ours),
        bound=Beside(
            bound=wake.SEMAPHORE, values=tuple(ours), bounds=tuple((least,) for least in bare)
        ),
        target=TARGETS["daemon-polled"],
        figures={"us": ours, "semaphore_us": bare},
    )


def _leases(trajectories: int, turns: int, capacity: str) -> Row:
    """Measure groups a second that one client leases, a trajectory each, and acknowledges."""
    workload = Workload(
        trajectories=trajectories,
        tokens=LEASED_TOKENS,
        group_size=1,
        batch=LEASED_AT_ONCE,
        capacity=capacity,
    )
    rates, cpu, messages_us = [], [], [syscall_us()]
    for _ in range(turns):
        with temporary_bus(capacity) as name, serving(name) as pid:
            before = processor_s(pid)
            rate, _ = run_together(
                [Role(_lease_all, (name, workload)), Role(produce, (name, workload, 0))]
            )
            rates.append(float(rate))
            cpu.append((processor_s(pid) - before) / trajectories * 1e6)
        messages_us.append(syscall_us())
    messages = [LEASED_AT_ONCE / (2 * us) * 1e6 for us in messages_us]
    return Row(
        name="daemon-leases",
        title=f"groups leased through the daemon, {LEASED_TOKENS} tokens each",
        measured=f"{statistics.median(rates):,.0f} groups/s; the daemon's processor time "
        f"{statistics.median(cpu):.2f} us a group",
        value=statistics.median(rates),
        spread=interval(rates),
        bound=Beside(
            bound=LEASE_MESSAGES,
            values=tuple(rates),
            bounds=tuple(itertools.pairwise(messages)),
        ),
        target=TARGETS["daemon-leases"],
        figures={"groups_per_s": rates, "daemon_us": cpu},
    )


def _lease_all(start: Callable[[], None], name: str, workload: Workload) -> float:
    """Take and acknowledge every group; return groups a second, from the first on."""
    with shmbus.Consumer(name) as consumer:
        start()
        groups = consumer.take(LEASED_AT_ONCE, STALL_S)
        began, taken = time.monotonic(), 0
        while groups:
            taken += len(groups)
            consumer.ack(groups)
            left = workload.trajectories - taken
            groups = consumer.take(LEASED_AT_ONCE, STALL_S) if left else []
        seconds = time.monotonic() - began
        check_ledger(consumer.stats(), workload)
    return taken / seconds


def _payload(runs: list[list[float]]) -> Row:
    """Compare microseconds a trajectory, short and long, of runs at one rate."""
    short, long = (statistics.median(each) for each in zip(*runs, strict=True))
    beside = Beside(
        bound=SHORT,
        values=tuple(each[1] for each in runs),
        bounds=tuple((each[0],) for each in runs),
    )
    return Row(
        name="daemon-payload",
        title=f"the daemon's processor time at {EVEN_PER_S:,.0f} trajectories/s, {LONG_TOKENS:,} "
        "tokens against 2,048",
        measured=f"{long:.2f} us a trajectory against {short:.2f}",
        value=statistics.median(beside.ratios),
        spread=interval(beside.ratios),
        bound=beside,
        target=TARGETS["daemon-payload"],
        figures={"us": runs},
    )


def _idle(idle_s: float, capacity: str) -> Row:
    with (
        temporary_bus(capacity) as name,
        serving(name) as pid,
        shmbus.Producer(name),
        shmbus.Consumer(name) as consumer,
    ):
        consumer.take(timeout=0.0)
        time.sleep(0.1)
        sleep_before = sleep_us()
        before, wakes = processor_s(pid), _wakes(pid)
        time.sleep(idle_s)
        share, wakes = (processor_s(pid) - before) / idle_s, _wakes(pid) - wakes
    return Row(
        name="daemon-idle",
        title=f"a daemon asleep for {idle_s:.1f} s, with a producer and a consumer",
        measured=f"{share * 100:.3f} % of a processor",
        value=share * 100,
        bound=beside_sleeps(share * idle_s, idle_s, wakes, (sleep_before, sleep_us())),
        target=TARGETS["daemon-idle"],
        figures={"processor_share": share, "measured_s": idle_s},
    )
