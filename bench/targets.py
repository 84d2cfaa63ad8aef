"""Target of each row, by name. A target is a decision, independent of measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """A bound for a row's value, or for its ratio to the yardstick."""

    sense: Literal["at least", "at most"]
    bound: float
    of_beside: bool

    def met_by(self, value: float) -> bool:
        """Whether a measured value meets the bound."""
        return value >= self.bound if self.sense == "at least" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:,g}" + ("x" if self.of_beside else "")


def _times(bound: float) -> Target:
    """Least multiple of the yardstick."""
    return Target("at least", bound, of_beside=True)


def _most_times(bound: float) -> Target:
    """Largest multiple of the yardstick."""
    return Target("at most", bound, of_beside=True)


def _at_least(bound: float) -> Target:
    return Target("at least", bound, of_beside=False)


def _at_most(bound: float) -> Target:
    return Target("at most", bound, of_beside=False)


TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "hop-2048": _times(0.9),
        "hop-16384": _times(0.9),
        # A producer's way from memory to the ring is a memcpy.
        "hop-2048-cold": _times(0.85),
        "hop-16384-cold": _times(0.85),
        "hop-256": _times(0.15),
        "packed": _times(1.1),
        "prefix-8x2048+2048": _times(1.2),
        "prefix-16x8192+1024": _times(2.5),
        "daemon-packed": _times(0.9),
        "daemon-leases": _at_least(100_000),
        "wake": _most_times(2.0),
        "daemon-wake": _at_most(200.0),
        "requests": _at_least(200_000),
        "stash": _most_times(1.3),
        "idle": _at_most(0.06),
        "daemon-idle": _at_most(0.06),
        "against-iceoryx2": _times(5),
        "against-faster-fifo": _times(15),
        "against-pyzmq": _times(15),
        "against-multiprocessing.Queue": _times(25),
        "against-TransferQueue": _times(400),
        "against-atropos": _times(5000),
        "survival-shmbus": _at_most(0),
        "survival-shmbus-daemon": _at_most(0),
        "weights-publish": _times(0.85),
        "weights-load": _times(0.85),
        "weights-attach": _at_most(10.0),
        "weights-beside-readers": _most_times(1.1),
        "weights-against-safetensors": _times(5),
        "weights-against-torch.save": _times(8),
        "weights-against-torch.multiprocessing": _times(12),
        "weights-against-ray": _times(1.5),
        "weights-patch-0.001-made": _times(0.8),
        "weights-patch-0.01-made": _times(0.5),
        # Of a pinned copy of a rank's slices; of packed NCCL.
        **{
            name: target
            for model in ("qwen3-4b", "qwen3-30b-a3b")
            for name, target in {
                f"engines-{model}-rate": _times(0.9),
                f"engines-{model}-device": _most_times(1.0),
                f"engines-{model}-killed": _at_most(2.0),
            }.items()
        },
        "weights-cuda-small": _times(10),
        "weights-cuda-model": _times(3),
        "weights-cuda-publish": _times(0.9),
        "weights-cuda-load": _times(0.9),
        "weights-cuda-to-host": _times(0.95),
        "weights-cuda-from-host": _times(0.95),
        "weights-cuda-step": _most_times(1.05),
        # msgspec makes Python numbers of a body; a quarter took a parser of 900 lines.
        "gateway-post": _most_times(0.6),
        "gateway-post-gzip": _most_times(0.6),
        "goodput-shmbus_embedded": _at_least(1.0),
        "goodput-shmbus_daemon": _at_least(1.0),
        "goodput-shmbus_relay": _at_least(1.0),
        "goodput-soak": _at_least(1.0),
        "gpu-gather-64k": _times(0.3),
        "gpu-gather-256k": _times(0.7),
        "gpu-gather-1M": _times(0.9),
        "gpu-gather-large": _times(0.9),
    }
)
