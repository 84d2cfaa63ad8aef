"""Survival of a run after a writer's death in the middle of a write.

A survivor and a victim send large trajectories to a reader at full speed. After a random while the
victim gets SIGKILL at a random moment of a fresh send, and the next victim begins; several times
over. Results: the kills within a send; progress of the reader with the survivor's trajectories
after each kill; arrival, whole, of every trajectory behind a returned `send` of a victim.

A trajectory is filled with its own number: a torn trajectory shows.
"""

from __future__ import annotations

import importlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.processes import Role, Started, context
from bench.workload import Source, Workload

__all__ = ["Survival", "measure"]

#: Tokens of a trajectory: megabytes, to catch a write by most kills; fewer for slow contenders.
TOKENS: Final = 262_144
SLOW_TOKENS: Final = 16_384
#: Contenders below this rate (of trajectories with 2,048 tokens a second) get the smaller size.
SLOW_PER_S: Final = 1_000.0
#: Least arrivals from a victim before its kill.
ARRIVED: Final = 2
#: A victim goes on for a random part of so many seconds, several sends, until the aimed send.
KILL_WITHIN_S: Final = 0.02
#: Seconds to wait for a fresh send. The kill's distance into the send is random too: megabytes
#: take hundreds of microseconds at the speed of memory.
AIM_S: Final = 1.0
SEND_S: Final = 0.0003
#: Seconds without a survivor's trajectory from after the kill, before a run counts as stopped.
PATIENCE_S: Final = 10.0
#: Seconds for the start, and for late arrivals from victims.
START_S: Final = 30.0
LATE_S: Final = 3.0
POLL_S: Final = 0.002
CAPACITY: Final = "64MiB"
#: Fill values of a sender's trajectories: so many for each sender.
NUMBERS: Final = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The outcome of a run."""

    kills: int
    #: Kills within a send.
    in_send: int
    #: The kill that silenced the survivor; None for a survivor that always went on.
    stopped_after: int | None
    #: Sent trajectories of victims without arrival; trajectories in pieces; repeated trajectories.
    lost: int
    torn: int
    doubled: int
    lasted_s: float
    #: Error of a failed reader.
    why: str = ""


def measure(module: str, kills: int, patience_s: float = PATIENCE_S) -> Survival:
    """Kill so many writers, one by one, or until `patience_s` of silence."""
    contender = importlib.import_module(module)
    slow = contender.CONTENDER.per_second < SLOW_PER_S
    workload = Workload(
        trajectories=kills + 1,
        tokens=SLOW_TOKENS if slow else TOKENS,
        producers=kills + 1,
        group_size=1,
        capacity=CAPACITY,
    )
    # For each sender: received, sent, within a send. Then the survivor's latest arrival, torn and
    # doubled.
    counters = context().RawArray("q", 3 * (kills + 1) + 3)
    with contender.link(workload) as address:
        senders = [
            Role(_send, (module, address, workload, number, counters))
            for number in range(kills + 1)
        ]
        reader = Started(Role(_read, (module, address, workload, counters)))
        running = [reader]
        try:
            return _kill_all(senders, reader, running, counters, patience_s)
        finally:
            for one in running:
                one.end()


def _kill_all(
    senders: list[Role],
    reader: Started,
    running: list[Started],
    counters: Any,
    patience_s: float,
) -> Survival:
    began = time.monotonic()
    received, sent, within = (_Part(counters, offset) for offset in range(3))
    latest = len(counters) - 3
    generator = random.Random(len(senders))
    running.append(Started(senders[0]))
    if not _wait(lambda: received[0] > ARRIVED, START_S, reader):
        raise RuntimeError(f"nothing came from the survivor: {reader.failure()}")
    in_send, stopped_after, killed = 0, None, 0
    for number in range(1, len(senders)):
        victim = Started(senders[number])
        running.append(victim)
        arrived = _wait(lambda n=number: received[n] >= ARRIVED, START_S, reader)  # type: ignore[misc]
        time.sleep(generator.uniform(0, KILL_WITHIN_S))
        _aim(within, number, generator.uniform(0, SEND_S))
        victim.end()
        killed += 1
        in_send += within[number]
        # A trajectory begun by now may already travel.
        mark = sent[0]
        if not arrived or not _wait(lambda m=mark: counters[latest] > m, patience_s, reader):  # type: ignore[misc]
            stopped_after = number
            break
    victims = range(1, killed + 1)
    if stopped_after is None:
        _wait(lambda: all(received[n] >= sent[n] for n in victims), LATE_S, reader)
    return Survival(
        kills=killed,
        in_send=in_send,
        stopped_after=stopped_after,
        lost=sum(max(0, sent[n] - received[n]) for n in victims),
        torn=counters[len(counters) - 2],
        doubled=counters[len(counters) - 1],
        lasted_s=time.monotonic() - began,
        why=reader.failure(),
    )


def _aim(within: _Part, number: int, after_s: float) -> None:
    """Return so long after a sender began a send, or after a while without a send."""
    deadline = time.perf_counter() + AIM_S
    while within[number] and time.perf_counter() < deadline:
        pass
    while not within[number] and time.perf_counter() < deadline:
        pass
    # Spin: a call that yields the processor takes longer than the targeted send.
    due = time.perf_counter() + after_s
    while time.perf_counter() < due:
        pass


class _Part:
    """View of a counter, with an element for each sender."""

    def __init__(self, counters: Any, offset: int) -> None:
        self._counters = counters
        self._offset = offset

    def __getitem__(self, number: int) -> int:
        return int(self._counters[3 * number + self._offset])

    def __setitem__(self, number: int, value: int) -> None:
        self._counters[3 * number + self._offset] = value


def _wait(condition: Callable[[], bool], seconds: float, reader: Started) -> bool:
    """Wait for a condition; return False at the deadline or after the reader's failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or not reader.running:
            return False
        time.sleep(POLL_S)
    return True


def _send(module: str, address: Any, workload: Workload, number: int, counters: Any) -> None:
    """Send for ever."""
    sent, within = _Part(counters, 1), _Part(counters, 2)
    size = workload.tokens
    with importlib.import_module(module).sender(address, workload, number) as sender:
        for count in itertools.count():
            # New arrays each time: contenders may read the arrays after the return of send.
            source: Source = (
                np.full(size, number * NUMBERS + count, np.int32),
                np.full(size, count & 1, np.uint8),
                np.full(size, count, np.float32),
            )
            within[number] = 1
            sender.send(f"{number}-{count}", 0, source)
            sender.flush()
            sent[number] = count + 1
            within[number] = 0


def _read(module: str, address: Any, workload: Workload, counters: Any) -> None:
    """Receive for ever, and check every value."""
    received = _Part(counters, 0)
    latest, torn, doubled = range(len(counters) - 3, len(counters))
    seen: set[tuple[int, int]] = set()
    with importlib.import_module(module).receiver(address, workload) as receiver:
        while True:
            for _, _, (tokens, mask, logprobs, *_) in receiver.receive(None):
                number, count = divmod(int(tokens[0]), NUMBERS)
                whole = tokens.size == workload.tokens and all(
                    bool(np.all(array == value))
                    for array, value in ((tokens, tokens[0]), (mask, count & 1), (logprobs, count))
                )
                if not whole:
                    counters[torn] += 1
                elif (number, count) in seen:
                    counters[doubled] += 1
                else:
                    received[number] += 1
                    seen.add((number, count))
                    if number == 0:
                        counters[latest] = max(counters[latest], count)
            receiver.done()
