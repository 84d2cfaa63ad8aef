"""Whether a run goes on when one of its writers is killed in the middle of a write.

A survivor and a victim send large trajectories to one reader, as fast as they can. After a random
while the victim gets SIGKILL, at a random moment of a send that has just begun, and the next one
begins; that several times over. Said is how many of the kills hit within a send; whether the reader
went on receiving from the survivor after each one; and whether all that a victim's `send` had
returned for has arrived, whole.

Each trajectory is filled with one number, its own, so that a torn one shows.
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

#: Tokens of a trajectory: megabytes, so that most kills hit a write; fewer where that takes long.
TOKENS: Final = 262_144
SLOW_TOKENS: Final = 16_384
#: Contenders below this many trajectories (of 2,048 tokens) a second get the smaller ones.
SLOW_PER_S: Final = 1_000.0
#: Trajectories of a victim that have to arrive before it may be killed.
ARRIVED: Final = 2
#: A victim goes on for a random part of so many seconds, some of its sends' worth, until one of its
#: sends is aimed at.
KILL_WITHIN_S: Final = 0.02
#: Seconds to wait for a send that begins. How far into one a kill hits is random too: megabytes
#: take some hundreds of microseconds, at the speed of memory.
AIM_S: Final = 1.0
SEND_S: Final = 0.0003
#: Seconds without one that the survivor began to send after the kill, after which a run counts as
#: stopped.
PATIENCE_S: Final = 10.0
#: Seconds that everything gets to begin, and that what victims sent gets to arrive.
START_S: Final = 30.0
LATE_S: Final = 3.0
POLL_S: Final = 0.002
CAPACITY: Final = "64MiB"
#: What the tokens of a trajectory are filled with: this many for each sender.
NUMBERS: Final = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The outcome of a run."""

    kills: int
    #: Kills within a send.
    in_send: int
    #: The kill after which nothing came from the survivor; None if the survivor always went on.
    stopped_after: int | None
    #: Sent trajectories of victims that never came; trajectories in pieces; repeated ones.
    lost: int
    torn: int
    doubled: int
    lasted_s: float
    #: Error of a reader that failed.
    why: str = ""


def measure(module: str, kills: int, patience_s: float = PATIENCE_S) -> Survival:
    """Kill so many writers, one after the other, or until nothing has come for `patience_s`."""
    contender = importlib.import_module(module)
    slow = contender.CONTENDER.per_second < SLOW_PER_S
    workload = Workload(
        trajectories=kills + 1,
        tokens=SLOW_TOKENS if slow else TOKENS,
        producers=kills + 1,
        group_size=1,
        capacity=CAPACITY,
    )
    # For each sender: received, sent, whether it is within a send. Then the survivor's latest to
    # arrive, torn and doubled.
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
        # One that was begun now or earlier may have been on its way.
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
    """Return so long after a sender has begun a send, or after a while if it begins none."""
    deadline = time.perf_counter() + AIM_S
    while within[number] and time.perf_counter() < deadline:
        pass
    while not within[number] and time.perf_counter() < deadline:
        pass
    # No call that lets the processor go: that takes longer than what is to be hit.
    due = time.perf_counter() + after_s
    while time.perf_counter() < due:
        pass


class _Part:
    """One of the three counters of each sender."""

    def __init__(self, counters: Any, offset: int) -> None:
        self._counters = counters
        self._offset = offset

    def __getitem__(self, number: int) -> int:
        return int(self._counters[3 * number + self._offset])

    def __setitem__(self, number: int, value: int) -> None:
        self._counters[3 * number + self._offset] = value


def _wait(condition: Callable[[], bool], seconds: float, reader: Started) -> bool:
    """Wait until a condition holds; False if it takes longer, or the reader has failed."""
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
            # New arrays each time: some contenders look at them only after send has returned.
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
