"""The target of each row, in one place: what the project has set itself, whatever is measured.

Invariants:

- A target is a decision. It follows no measurement, so that no row is met by being slow.
- A row, a report and reports folded long after their runs are judged by what stands here.
- Where a host cannot give it, the row says what its bound alone comes to there (`Row.best`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["AGAINST", "HARDLY_SLOWER", "NO_SLOWER", "TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """A bound for a row's value, such as ``at least 0.9 of memcpy``."""

    sense: Literal["at least", "at most"]
    bound: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Make a target of its text, as a report keeps it."""
        sense: Literal["at least", "at most"] = (
            "at least" if text.startswith("at least ") else "at most"
        )
        bound, _, unit = text.removeprefix(f"{sense} ").partition(" ")
        return cls(sense, float(bound), unit)

    def met_by(self, value: float) -> bool:
        """Whether a measured value meets the bound."""
        return value >= self.bound if self.sense == "at least" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g} {self.unit}"


def _at_least(bound: float, unit: str) -> Target:
    return Target("at least", bound, unit)


def _at_most(bound: float, unit: str) -> Target:
    return Target("at most", bound, unit)


#: What stands before a contender's name in the row that sets it beside shmbus.
AGAINST: Final = "against-"
#: Growth of a cost a trajectory, whatever grows: groups, producers, the ring.
_GROWTH: Final = _at_most(1.3, "times, at any point")
_STASH: Final = _at_most(1.3, "times the cost with few")
_ADDED: Final = _at_most(10.0, "us more")
#: For payloads whose group a cache holds, and for those of which no cache does.
NO_SLOWER: Final = _at_least(1.0, "of iceoryx2")
HARDLY_SLOWER: Final = _at_least(round(1 / 1.1, 2), "of iceoryx2")

#: By the name of the row.
TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "hop-2048": _at_least(0.9, "of memcpy"),
        "hop-16384": _at_least(0.9, "of memcpy"),
        # What a producer reads from memory and writes to the ring is a memcpy.
        "hop-2048-cold": _at_least(0.85, "of memcpy"),
        "hop-16384-cold": _at_least(0.85, "of memcpy"),
        "hop-256": _at_least(0.15, "of memcpy"),
        "packed": _at_least(1.1, "of memcpy"),
        "packed-of-bound": _at_least(0.85, "of its bound"),
        "four-producers": _at_least(0.9, "of one producer"),
        "wake-p50": _at_most(2.0, "times a raw futex"),
        # The kernel's own scheduling is in both; the rest is the bus's.
        "wake-p99": _ADDED,
        "wake-added-p99": _ADDED,
        "wake-loaded-p99": _ADDED,
        "polled-p50": _at_most(1.0, "us"),
        "polled-published-p50": _at_most(1.0, "us"),
        "polled-awake-p50": _at_most(2.0, "us"),
        "lists-sample": _at_most(1.2, "times"),
        "lists-ids": _at_most(1.3, "times"),
        "lists-schema": _at_most(50, "ns"),
        "requests": _at_least(200_000, "samples/s"),
        "stash-by-age": _STASH,
        "stash-scrambled": _STASH,
        "idle": _at_most(0.06, "CPU seconds a minute"),
        "daemon-packed": _at_least(0.9, "of embedded"),
        "daemon-cpu": _at_most(3.0, "us a trajectory"),
        "daemon-payload": _at_most(1.2, "times, whatever the payload"),
        "daemon-wake": _at_most(25.0, "us"),
        "daemon-polled": _at_most(8.0, "us"),
        "daemon-leases": _at_least(100_000, "groups/s"),
        "daemon-idle": _at_most(0.1, "% of a processor"),
        "growth-open-groups": _GROWTH,
        "growth-producers": _GROWTH,
        "growth-capacity": _GROWTH,
        "against-iceoryx2": _at_least(5, "times as many"),
        "against-faster-fifo": _at_least(15, "times as many"),
        "against-pyzmq": _at_least(15, "times as many"),
        "against-multiprocessing.Queue": _at_least(25, "times as many"),
        "against-TransferQueue": _at_least(400, "times as many"),
        "against-atropos": _at_least(5000, "times as many"),
        # Both hold the same bytes: groups of one sample, or a reader that keeps whole groups.
        "large-routed-experts-1": NO_SLOWER,
        "large-image-1": NO_SLOWER,
        "large-routed-experts-8": HARDLY_SLOWER,
        "large-top-64-logits-8": HARDLY_SLOWER,
        "large-image-8": HARDLY_SLOWER,
        "load-p99": _at_most(1.0, "of its p50"),
        "survival": _at_most(0.0, "runs stopped or trajectories harmed"),
    }
)
