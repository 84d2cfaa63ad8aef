"""What is asked of each contender, at each level: the workloads of the field, and how many.

A run takes about as long for every contender: how many trajectories it moves follows from the rate
that its `Contender.per_second` lets expect, which decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.contenders.base import Contender
from bench.workload import BYTES_PER_TOKEN, GROUP_SIZE, SIDES, Workload

__all__ = ["FULL", "KINDS", "PRODUCERS", "QUICK", "TINY", "Level", "Planned", "plan", "sized"]

#: Tokens that trajectories have in the field: a short answer, the usual, long, a reasoning trace.
SIZES: Final = (256, 2048, 8192, 32_768)
USUAL: Final = 2048
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
}
#: What trajectories with payloads beside them, and many producers, need between the processes.
LARGE_CAPACITY: Final = "256MiB"
#: Part of a trajectory's time that does not grow with its size, to expect.
FIXED_PART: Final = 0.35
#: Trajectories a second of the load while latency is measured, and the part of what a contender
#: can carry that it must not exceed.
LOAD_PER_S: Final = 5_000.0
LOAD_PART: Final = 0.25
#: Calls of TransferQueue carry this many; a run has to have several.
LEAST: Final = 128
#: Tokens a second at which the REST server is compared at equal work: what is told in the field of
#: shared memory.
PACED_PER_S: Final = 6_284.0


@dataclass(frozen=True, kw_only=True)
class Level:
    """How much is measured.

    Attributes
    ----------
    name : str
    run_s : float
        Seconds that one run of a workload is to take.
    repetitions : int
        Runs of each size.
    sizes, producers, capacities : tuple
        Points of those curves.
    everything : bool
        Whether all of `KINDS` and batches are measured, and all series of contenders that start a
        cluster.
    probes : int
        Of each latency; a contender that starts a cluster gets a tenth.
    kills : int
        Writers that are killed; a contender that starts a cluster gets a quarter.
    paced : int
        Trajectories of the comparison at equal work; 0 for none.
    deadline_s : float
        Seconds for all that is asked of one contender in one process.
    """

    name: str
    run_s: float
    repetitions: int
    sizes: tuple[int, ...]
    producers: tuple[int, ...]
    capacities: tuple[str, ...]
    everything: bool
    probes: int
    kills: int
    paced: int
    deadline_s: float


FULL: Final = Level(
    name="full",
    run_s=1.5,
    repetitions=3,
    sizes=SIZES,
    producers=PRODUCERS,
    capacities=CAPACITIES,
    everything=True,
    probes=3000,
    kills=20,
    paced=16,
    deadline_s=600.0,
)
QUICK: Final = Level(
    name="quick",
    run_s=0.5,
    repetitions=1,
    sizes=(USUAL,),
    producers=(),
    capacities=(),
    everything=False,
    probes=600,
    kills=4,
    paced=0,
    deadline_s=120.0,
)
TINY: Final = replace(
    FULL,
    name="tiny",
    run_s=0.005,
    repetitions=1,
    sizes=(256, 512, USUAL),
    producers=(1, 2),
    capacities=("16MiB", "32MiB"),
    probes=20,
    kills=1,
    paced=4,
    deadline_s=60.0,
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
    """

    series: str
    point: str | int
    request: dict[str, Any]


def sized(contender: Contender, level: Level, **parameters: Any) -> dict[str, Any]:
    """Complete the parameters of a workload by how many trajectories it has."""
    one = {"tokens": USUAL, "producers": 1, "group_size": GROUP_SIZE, **parameters}
    if "trajectories" in one:
        return one
    unit = one["producers"] * one["group_size"]
    probe = Workload(trajectories=unit, **one)
    part = probe.bytes_each / (USUAL * BYTES_PER_TOKEN)
    each_s = (FIXED_PART + (1 - FIXED_PART) * part) / contender.per_second
    wanted = min(max(LEAST if contender.per_second > LEAST else unit, level.run_s / each_s), 2e6)
    return {**one, "trajectories": max(1, round(wanted / unit)) * unit}


def plan(contender: Contender, level: Level, ours: bool) -> Iterator[Planned]:
    """List what is asked of a contender once; repetitions of "size" come on top."""
    clustered = bool(contender.environment)

    def throughput(series: str, point: str | int, what: str, **parameters: Any) -> Planned:
        workload = sized(contender, level, **parameters)
        return Planned(series=series, point=point, request={"what": what, "workload": workload})

    if not clustered or level.everything:
        yield throughput("read", "", "throughput", read=True)
        yield throughput("watched", "", "watched")
    if level.everything:
        yield throughput("packed", "", "packed", **_packable(contender, level))
    if level.everything:
        for kind, parameters in KINDS.items():
            large = {"capacity": LARGE_CAPACITY} if parameters.get("side") in SIDES else {}
            yield throughput("kind", kind, "throughput", **parameters, **large)
    for producers in level.producers:
        if producers <= (4 if clustered else max(level.producers)):
            more = {"producers": producers, "capacity": LARGE_CAPACITY}
            yield throughput("producers", producers, "throughput", **more)
    if ours:
        for capacity in level.capacities:
            yield throughput("capacity", capacity, "throughput", capacity=capacity)
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
            )
    if level.paced and (ours or contender.name == "atropos"):
        paced = Workload(
            trajectories=level.paced, tokens=USUAL, group_size=1, pause_s=USUAL / PACED_PER_S
        )
        request = {"what": "throughput", "workload": paced.as_parameters()}
        yield Planned(series="paced", point=USUAL, request=request)
    kills = max(1, level.kills // 4) if clustered else level.kills
    yield Planned(series="survival", point="", request={"what": "survival", "kills": kills})


def _packable(contender: Contender, level: Level) -> dict[str, Any]:
    """Whole batches only: ours would wait for the rest of the last one."""
    per_batch = 65_536 // USUAL
    count = sized(contender, level)["trajectories"] // 4
    return {"trajectories": max(1, count // per_batch) * per_batch}
