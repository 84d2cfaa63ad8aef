"""Amount of measurement: for kept figures, for a quick check, or for a smoke test."""

from dataclasses import dataclass
from typing import Final

__all__ = ["LEVELS", "Level"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Counts and durations of all rows."""

    repetitions: int
    #: Size of the copy around a run.
    memcpy_bytes: int
    #: Trajectories of a run: many times the bus, whose first content arrives untimed.
    hop_2048: int
    hop_16384: int
    hop_256: int
    packed: int
    wakes: int
    #: Offered groups.
    requests: int
    #: Open groups, few and many.
    stash_groups: tuple[int, int]
    stash_adds: int
    idle_s: float
    #: Seconds of a contender's run, probes of the latency, killed writers.
    contest_s: float
    probes: int
    kills: int


LEVELS: Final = {
    "full": Level(
        repetitions=5,
        memcpy_bytes=256 << 20,
        hop_2048=800_000,
        hop_16384=200_000,
        hop_256=1_600_000,
        packed=640_000,
        wakes=1000,
        requests=12_000,
        stash_groups=(1000, 1_000_000),
        stash_adds=1_000_000,
        idle_s=5.0,
        contest_s=1.5,
        probes=1000,
        kills=20,
    ),
    "quick": Level(
        repetitions=3,
        memcpy_bytes=256 << 20,
        hop_2048=320_000,
        hop_16384=40_000,
        hop_256=512_000,
        packed=192_000,
        wakes=500,
        requests=4000,
        stash_groups=(1000, 100_000),
        stash_adds=400_000,
        idle_s=2.0,
        contest_s=0.5,
        probes=300,
        kills=4,
    ),
    "tiny": Level(
        repetitions=1,
        memcpy_bytes=8 << 20,
        hop_2048=1024,
        hop_16384=128,
        hop_256=1024,
        packed=1024,
        wakes=20,
        requests=16,
        stash_groups=(100, 1000),
        stash_adds=10_000,
        idle_s=0.2,
        contest_s=0.005,
        probes=20,
        kills=1,
    ),
}
