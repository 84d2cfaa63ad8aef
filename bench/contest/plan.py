"""The requests to each contender at each level: workloads of the field, and their sizes.

A run takes about as long for every contender: how many trajectories it moves follows from the rate
that its `Contender.per_second` lets expect, which decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.contenders.base import Contender
from bench.workload import BYTES_PER_TOKEN, GROUP_SIZE, SIDES, Workload

__all__ = [
    "FULL",
    "KINDS",
    "OURS",
    "PRODUCERS",
    "QUICK",
    "TINY",
    "USUAL",
    "Level",
    "Planned",
    "plan",
    "sized",
    "sizes",
]

#: Tokens that trajectories have in the field: a short answer, the usual, long, a reasoning trace.
SIZES: Final = (256, 2048, 8192, 32_768)
USUAL: Final = 2048
#: Of this contender each curve is judged.
OURS: Final = "shmbus"
PRODUCERS: Final = (1, 4, 16, 64)
CAPACITIES: Final = ("16MiB", "64MiB", "256MiB", "1GiB", "4GiB")
#: Workloads that differ from the usual one in one thing, by the name that the table has for it.
KINDS: Final[dict[str, dict[str, Any]]] = {
    "groups of 16": {"group_size": 16},
    "log-normal lengths": {"lengths": "log-normal"},
    "interleaved arrival": {"arrival": "interleaved"},
    "scrambled arrival": {"arrival": "scrambled"},
    "8 turns of messages": {"turns": 8},
    "routed experts": {"side": "routed-experts"},
    "top-64 logits": {"side": "top-k-logits"},
    "an image": {"side": "image"},
    # Where both hold the same bytes: groups of one sample, and a reader that keeps whole groups.
    "routed experts, groups of 1": {"side": "routed-experts", "group_size": 1},
    "an image, groups of 1": {"side": "image", "group_size": 1},
    "routed experts, groups kept": {"side": "routed-experts", "keep": True},
    "top-64 logits, groups kept": {"side": "top-k-logits", "keep": True},
    "an image, groups kept": {"side": "image", "keep": True},
}
#: Those that differ for a contender that has groups, and those for one that lends its memory; for
#: any other one they are the usual workload again, or the one that the name begins with.
OF_GROUPS: Final = frozenset({"groups of 16", "interleaved arrival", "scrambled arrival"})
OF_LENDERS: Final = frozenset(
    kind for kind in KINDS if kind.endswith((", groups of 1", ", groups kept"))
)
#: What trajectories with payloads beside them, and many producers, need between the processes.
LARGE_CAPACITY: Final = "256MiB"
#: Part of a trajectory's time that does not grow with its size, to expect.
FIXED_PART: Final = 0.35
#: Bytes a second that a consumer copies out of memory of another process, to expect.
READ_BYTES_PER_S: Final = 4.0e9
#: Those of contenders that begin a cluster or a server, which take seconds for each.
OF_CLUSTERS: Final = frozenset({"log-normal lengths", "routed experts"})
#: Trajectories a second of the load while latency is measured, and the part of what a contender
#: can carry that it must not exceed.
LOAD_PER_S: Final = 5_000.0
LOAD_PART: Final = 0.25
#: Calls of TransferQueue carry this many; a run has to have several.
LEAST: Final = 128
#: No run moves more, however small they are.
MOST: Final = 2_000_000
#: Most producers: of ours, whose curve is judged; of another contender; and where processes take
#: seconds to begin.
MANY_PRODUCERS: Final = 64
SOME_PRODUCERS: Final = 16
FEW_PRODUCERS: Final = 4
SLOW_BEGIN_S: Final = 1.4
#: Processes that begin in the time of one, to expect.
BEGIN_AT_ONCE: Final = 4
#: Seconds that a probe takes, to expect, and those after which a run has been found to stop.
PROBE_S: Final = 0.001
STOPPED_S: Final = 5.0
#: What is expected is often off by three, since it knows no machine; a point that takes so many
#: times as long has come to a stop.
LATE: Final = 6.0
LEAST_LIMIT_S: Final = 30.0
#: Tokens a second at which the REST server is compared at equal work: what is told in the field of
#: shared memory.
PACED_PER_S: Final = 6_284.0


@dataclass(frozen=True, kw_only=True)
class Level:
    """How much is measured.

    Attributes
    ----------
    name : str
    run_s, brief_s : float
        Seconds that one run of a workload is to take: one of a point that is judged, and one that
        stands beside those.
    repetitions : int
        Runs of each size, and of each point of our own curves, which are judged.
    sizes, producers, capacities : tuple
        Points of those curves.
    everything : bool
        Whether all of `KINDS` and batches are measured, and all series of contenders that start a
        cluster.
    probes : int
        Of each latency; a contender that starts a cluster gets a tenth.
    kills : int
        Writers that are killed; a contender whose processes take long to begin gets a quarter.
    stopped_s : float
        Seconds without a delivery after a kill, after which a run counts as stopped.
    paced : int
        Trajectories of the comparison at equal work; 0 for none.
    budget_s : float
        Seconds for the whole benchmark, of which the contest gets what is left when shmbus by
        itself has been measured.
    patience_s : float
        Seconds beyond its share that a contender gets to end what it has begun.
    """

    name: str
    run_s: float
    brief_s: float
    repetitions: int
    sizes: tuple[int, ...]
    producers: tuple[int, ...]
    capacities: tuple[str, ...]
    everything: bool
    probes: int
    kills: int
    stopped_s: float
    paced: int
    budget_s: float
    patience_s: float


FULL: Final = Level(
    name="full",
    run_s=1.5,
    brief_s=1.0,
    repetitions=3,
    sizes=SIZES,
    producers=PRODUCERS,
    capacities=CAPACITIES,
    everything=True,
    probes=3000,
    kills=20,
    stopped_s=10.0,
    paced=16,
    budget_s=1140.0,
    patience_s=30.0,
)
QUICK: Final = Level(
    name="quick",
    run_s=0.5,
    brief_s=0.5,
    repetitions=1,
    sizes=(USUAL,),
    producers=(),
    capacities=(),
    everything=False,
    probes=600,
    kills=4,
    stopped_s=10.0,
    paced=0,
    budget_s=280.0,
    patience_s=20.0,
)
TINY: Final = replace(
    FULL,
    name="tiny",
    run_s=0.005,
    brief_s=0.005,
    repetitions=1,
    sizes=(256, 512, USUAL),
    producers=(1, 2),
    capacities=("16MiB", "32MiB"),
    probes=20,
    kills=1,
    stopped_s=2.0,
    paced=4,
    budget_s=600.0,
    patience_s=60.0,
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One thing that is asked of a contender.

    Attributes
    ----------
    series : str
        What it belongs to: "size", "read", "packed", "kind", "producers", "capacity", "watched",
        "latency", "survival", "paced".
    point : str or int
        Where in the series it is.
    request : dict
        For `bench.contest.child`.
    expected_s : float
        What it takes, roughly: contenders share the time by the sums of these. What takes `LATE`
        times as long, and more than `LEAST_LIMIT_S`, is given up.
    """

    series: str
    point: str | int
    request: dict[str, Any]
    expected_s: float

    @property
    def limited(self) -> dict[str, Any]:
        """The request, with the seconds after which it is given up."""
        return {**self.request, "limit_s": max(LEAST_LIMIT_S, LATE * self.expected_s)}


def sized(contender: Contender, run_s: float, **parameters: Any) -> dict[str, Any]:
    """Complete the parameters of a workload by how many trajectories it has in so many seconds."""
    one = {"tokens": USUAL, "producers": 1, "group_size": GROUP_SIZE, **parameters}
    if "trajectories" in one:
        return one
    unit = one["producers"] * one["group_size"]
    probe = Workload(trajectories=unit, **one)
    part = probe.bytes_each / (USUAL * BYTES_PER_TOKEN)
    each_s = (FIXED_PART + (1 - FIXED_PART) * part) / contender.per_second
    if probe.read:
        each_s = max(each_s, probe.bytes_each / READ_BYTES_PER_S)
    least = LEAST if contender.per_second > LEAST else 2 * unit
    wanted = min(max(least, run_s / each_s), MOST)
    return {**one, "trajectories": max(1, round(wanted / unit)) * unit}


def sizes(contender: Contender, level: Level) -> list[Planned]:
    """List one repetition of all sizes."""
    return [_throughput(contender, level, "size", tokens, tokens=tokens) for tokens in level.sizes]


def plan(contender: Contender, level: Level, ours: bool) -> Iterator[Planned]:
    """List what is asked of a contender beside its sizes, what claims rest on first.

    A contender that runs out of time loses the last ones.
    """
    clustered = bool(contender.environment)
    if not clustered or level.everything:
        yield _throughput(contender, level, "read", "", read=True)
    yield from _latencies(contender, level)
    yield _survival(contender, level)
    if level.everything:
        yield _throughput(
            contender, level, "packed", "", what="packed", **_packable(contender, level)
        )
    yield from _growth(contender, level, ours)
    if level.paced and (ours or contender.name == "atropos"):
        paced = Workload(
            trajectories=level.paced, tokens=USUAL, group_size=1, pause_s=USUAL / PACED_PER_S
        )
        yield Planned(
            series="paced",
            point=USUAL,
            request={"what": "throughput", "workload": paced.as_parameters()},
            expected_s=contender.begin_s + level.paced * paced.pause_s,
        )
    if not clustered or level.everything:
        yield _throughput(contender, level, "watched", "", what="watched")
    if level.everything:
        for kind, parameters in KINDS.items():
            if not _differs(kind, contender):
                continue
            large: dict[str, Any] = (
                {"capacity": LARGE_CAPACITY} if parameters.get("side") in SIDES else {}
            )
            yield _throughput(contender, level, "kind", kind, **large, **parameters)
    # Whose curves are judged has them again, for medians; processor time over producers repeats
    # within a few hundredths, and takes the longest.
    for number in range(level.repetitions - 1 if ours else 0):
        again = _growth(contender, level, ours)
        yield from (one for one in again if number == 0 or one.series == "capacity")


def _differs(kind: str, contender: Contender) -> bool:
    """Whether a kind of trajectories is asked of a contender: it is another workload for it."""
    if contender.environment:
        return kind in OF_CLUSTERS
    if kind in OF_GROUPS:
        return bool(contender.groups)
    return kind not in OF_LENDERS or contender.lends


def _run_s(contender: Contender, level: Level, series: str, point: str | int) -> float:
    """Seconds of one run of a point: fewer where no target is about it."""
    judged = (
        (series == "size" and point == USUAL)
        or series == "capacity"
        or (series == "producers" and contender.name == OURS)
        or (series == "kind" and point in OF_LENDERS)
    )  # fmt: skip
    return level.run_s if judged else level.brief_s


def _throughput(
    contender: Contender,
    level: Level,
    series: str,
    point: str | int,
    what: str = "throughput",
    **parameters: Any,
) -> Planned:
    run_s = _run_s(contender, level, series, point)
    workload = sized(contender, run_s, **parameters)
    # Processes begin side by side, on few cores.
    begin_s = contender.begin_s * (1 + workload["producers"] / BEGIN_AT_ONCE)
    return Planned(
        series=series,
        point=point,
        request={"what": what, "workload": workload},
        expected_s=begin_s + run_s,
    )


def _growth(contender: Contender, level: Level, ours: bool) -> Iterator[Planned]:
    """List the curves over producers and, for ours, over the size of the ring."""
    if contender.begin_s >= SLOW_BEGIN_S:
        most = FEW_PRODUCERS
    else:
        most = MANY_PRODUCERS if ours else SOME_PRODUCERS
    # What begins a cluster or a server for each of them says nothing of the cost of a further one.
    for producers in () if contender.environment else level.producers:
        if producers <= most:
            # A consumer that reads is the slower side, so that the ring is full at each point. One
            # that only looks would leave one producer a ring in the cache, and many one in memory,
            # and the curve would be the cache's.
            yield _throughput(
                contender, level, "producers", producers,
                producers=producers, read=True, capacity=LARGE_CAPACITY,
            )  # fmt: skip
    for capacity in level.capacities if ours else ():
        yield _throughput(contender, level, "capacity", capacity, capacity=capacity)


def _latencies(contender: Contender, level: Level) -> Iterator[Planned]:
    clustered = bool(contender.environment)
    probes = max(10, level.probes // 10) if clustered else level.probes
    load = min(LOAD_PER_S, LOAD_PART * contender.per_second)
    readers = {"sleeping": 0.0, "busy": 0.0, "under load": load}
    for point, load_per_s in readers.items():
        if not clustered or level.everything or point == "sleeping":
            yield Planned(
                series="latency",
                point=point,
                request={
                    "what": "latency",
                    "probes": probes,
                    "reader": "busy" if point == "busy" else "sleeping",
                    "load_per_s": load_per_s,
                    "capacity": "64MiB",
                },
                expected_s=contender.begin_s + probes * PROBE_S,
            )


def _survival(contender: Contender, level: Level) -> Planned:
    # Each victim is a process that begins.
    kills = level.kills if contender.begin_s < SLOW_BEGIN_S else max(1, level.kills // 4)
    return Planned(
        series="survival",
        point="",
        request={"what": "survival", "kills": kills, "stopped_s": level.stopped_s},
        expected_s=contender.begin_s * (kills + 1) + STOPPED_S,
    )


def _packable(contender: Contender, level: Level) -> dict[str, Any]:
    """Whole batches only: ours would wait for the rest of the last one."""
    per_batch = 65_536 // USUAL
    count = sized(contender, level.brief_s)["trajectories"] // 4
    return {"trajectories": max(1, count // per_batch) * per_batch}
