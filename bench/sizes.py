"""How much each row measures: to keep figures, for a quick check, or to see that it runs.

What has a least and a most goes on until its interval is narrow, or its seconds are over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FULL", "QUICK", "TINY", "Sizes"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Counts and durations of all rows.

    Attributes
    ----------
    memcpy_bytes, memcpy_repetitions : int
        Size of the copy, and how often it is made.
    hop_2048, hop_16384, hop_256, packed : int
        Trajectories of one run of a throughput row. They fill the bus many times over, since what
        lies in it at the first delivery was sent before the clock started.
    repetitions, most_repetitions : int
        Runs that each throughput row has in any case, and at most.
    rows_s : float
        Seconds after which no throughput row has more than it has in any case; half of them for the
        daemon's.
    wakes, warm_up : int
        Wake-ups of a turn that count, and those before them, which do not: first calls, first
        touches.
    wake_turns, most_wake_turns : int
        Turns that there are in any case, and at most.
    wakes_s, polls_s : float
        Seconds after which there are no more turns than in any case: to a reader that sleeps, of
        five parts each, and to one that polls, of three.
    stash_groups : (int, int)
        Open groups, few and many.
    stash_adds : int
        Trajectories timed at each.
    memory_trajectories, memory_capacity : int, str
        Trajectories stashed to see what one takes, and the bus that holds them.
    idle_s : float
        Seconds asleep.
    """

    memcpy_bytes: int
    memcpy_repetitions: int
    hop_2048: int
    hop_16384: int
    hop_256: int
    packed: int
    repetitions: int
    most_repetitions: int
    rows_s: float
    wakes: int
    warm_up: int
    wake_turns: int
    most_wake_turns: int
    wakes_s: float
    polls_s: float
    stash_groups: tuple[int, int]
    stash_adds: int
    memory_trajectories: int
    memory_capacity: str
    idle_s: float


FULL: Final = Sizes(
    memcpy_bytes=256 << 20,
    memcpy_repetitions=9,
    hop_2048=800_000,
    hop_16384=200_000,
    hop_256=1_600_000,
    packed=640_000,
    repetitions=3,
    most_repetitions=9,
    rows_s=120.0,
    wakes=1000,
    warm_up=50,
    wake_turns=3,
    most_wake_turns=15,
    wakes_s=40.0,
    polls_s=25.0,
    stash_groups=(1000, 1_000_000),
    stash_adds=2_000_000,
    memory_trajectories=1_000_000,
    memory_capacity="768MiB",
    idle_s=5.0,
)
QUICK: Final = Sizes(
    memcpy_bytes=256 << 20,
    memcpy_repetitions=5,
    hop_2048=320_000,
    hop_16384=40_000,
    hop_256=512_000,
    packed=192_000,
    repetitions=3,
    most_repetitions=5,
    rows_s=30.0,
    wakes=500,
    warm_up=50,
    wake_turns=3,
    most_wake_turns=9,
    wakes_s=8.0,
    polls_s=8.0,
    stash_groups=(1000, 100_000),
    stash_adds=400_000,
    memory_trajectories=100_000,
    memory_capacity="96MiB",
    idle_s=2.0,
)
TINY: Final = Sizes(
    memcpy_bytes=8 << 20,
    memcpy_repetitions=3,
    hop_2048=1024,
    hop_16384=128,
    hop_256=1024,
    packed=1024,
    repetitions=1,
    most_repetitions=1,
    rows_s=0.0,
    wakes=20,
    warm_up=5,
    wake_turns=1,
    most_wake_turns=1,
    wakes_s=0.0,
    polls_s=0.0,
    stash_groups=(100, 1000),
    stash_adds=10_000,
    memory_trajectories=10_000,
    memory_capacity="16MiB",
    idle_s=0.2,
)
