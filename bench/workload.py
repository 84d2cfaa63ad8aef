"""Input and output of every measurement: a `Workload` in, a `Timed` out.

The parameters of a workload fix the producers' data: equal in every run.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BYTES_PER_TOKEN", "GROUP_SIZE", "Item", "Reader", "Source", "Timed", "Workload"]

#: Arrays of a trajectory: tokens, loss_mask, logprobs.
Source: TypeAlias = tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]
#: A sent trajectory: prompt's id, sample's index, and arrays.
Item: TypeAlias = tuple[tuple[str, int], Source]
#: Manner of the consumer's wait: the contender's fastest, or asleep.
Reader: TypeAlias = Literal["fastest", "sleeping"]

#: Trajectories of a prompt: the smaller of the two usual sizes of GRPO.
GROUP_SIZE: Final = 8
#: An int32 token, a uint8 mask and a float32 logprob.
BYTES_PER_TOKEN: Final = 9
#: Prompts of a producer before a repetition: a data set such as GSM8K has 7,473.
PROMPTS: Final = 8192
#: Bytes of distinct trajectories of a producer with cold sources: beyond the last-level cache of
#: any likely processor.
COLD_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The trajectories of the producers together."""

    trajectories: int
    #: Tokens of a trajectory.
    tokens: int
    #: Processes with equal shares, in separate groups.
    producers: int = 1
    #: Trajectories a call, for a system with a batch call; 0 for single calls.
    batch: int = 0
    #: Whether sources miss every cache; otherwise a producer repeats the same arrays.
    cold: bool = False
    #: Of the ring or queue, for a system with a bound in bytes.
    capacity: str = "64MiB"
    group_size: int = GROUP_SIZE
    reader: Reader = "fastest"

    def __post_init__(self) -> None:
        unit = self.producers * max(self.group_size, self.batch)
        assert self.trajectories % unit == 0, f"{self.trajectories} is no multiple of {unit}"

    @property
    def share(self) -> int:
        """Trajectories of a producer."""
        return self.trajectories // self.producers

    @property
    def bytes_each(self) -> int:
        """Bytes of a trajectory."""
        return self.tokens * BYTES_PER_TOKEN

    @property
    def room(self) -> int:
        """Trajectories within `capacity`: at least two."""
        number, unit = self.capacity[:-3], self.capacity[-3:]
        size = int(number) << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
        return max(2, size // self.bytes_each)

    def source(self, *, last: bool = False) -> Source:
        """Make the arrays of a trajectory.

        A producer's last trajectory differs in content from its predecessors: in reused space, only
        new content proves a write.
        """
        return (
            np.arange(self.tokens, dtype=np.int32) + np.int32(last),
            np.ones(self.tokens, np.uint8) - np.uint8(last),
            np.linspace(-2.0, 0.0, self.tokens, dtype=np.float32) - np.float32(last),
        )

    def items(self, producer: int) -> Iterator[Item]:
        """Make a producer's trajectories in order: (instance id, index) and arrays."""
        copies = max(COLD_BYTES // self.bytes_each, 1) if self.cold else 1
        sources = [self.source() for _ in range(copies)]
        groups = self.share // self.group_size
        ids = [f"prompt-{producer}-{number}" for number in range(min(PROMPTS, groups))]
        identities = itertools.cycle(list(itertools.product(ids, range(self.group_size))))
        in_order = itertools.chain(
            itertools.islice(itertools.cycle(sources), self.share - 1), [self.source(last=True)]
        )
        return zip(identities, in_order, strict=False)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Trajectories and seconds of a run, from the first delivery to the last acknowledgement."""

    trajectories: int
    seconds: float

    @property
    def rate(self) -> float:
        """Trajectories a second."""
        return self.trajectories / self.seconds
