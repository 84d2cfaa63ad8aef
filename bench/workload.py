"""What every system is measured with: a `Workload` in, a `Timed` out.

What the producers of a workload send is the same in every run: it follows from its parameters.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BYTES_PER_TOKEN", "GROUP_SIZE", "Item", "Reader", "Source", "Timed", "Workload"]

#: The arrays of one trajectory: tokens, loss_mask, logprobs.
Source: TypeAlias = tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]
#: What is sent: whose prompt it answers and as which sample, and its arrays.
Item: TypeAlias = tuple[tuple[str, int], Source]
#: How the consumer waits: as the contender is fastest, or asleep.
Reader: TypeAlias = Literal["fastest", "sleeping"]

#: Trajectories of a prompt: the smaller of the two usual sizes of GRPO.
GROUP_SIZE: Final = 8
#: An int32 token, a uint8 mask and a float32 logprob.
BYTES_PER_TOKEN: Final = 9
#: Prompts that a producer goes through before it begins again: a data set such as GSM8K has 7,473.
PROMPTS: Final = 8192
#: Bytes of different trajectories that a producer with cold sources goes through: more than the
#: last-level cache of any one processor that this is likely to run on.
COLD_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The trajectories of all producers together."""

    trajectories: int
    #: Of each trajectory.
    tokens: int
    #: Processes with an equal share each, in groups of their own.
    producers: int = 1
    #: Trajectories a call, for a system with a call for several; 0 for one a call.
    batch: int = 0
    #: Whether no cache holds the sources; else a producer sends the same arrays again and again.
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
        """Trajectories of one producer."""
        return self.trajectories // self.producers

    @property
    def bytes_each(self) -> int:
        """Bytes of a trajectory."""
        return self.tokens * BYTES_PER_TOKEN

    @property
    def room(self) -> int:
        """How many trajectories fit into `capacity`: at least two."""
        number, unit = self.capacity[:-3], self.capacity[-3:]
        size = int(number) << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
        return max(2, size // self.bytes_each)

    def source(self, *, last: bool = False) -> Source:
        """Make the arrays of one trajectory.

        All have the same content but the last of each producer: since space is used again, only
        something new in it shows that it was written.
        """
        return (
            np.arange(self.tokens, dtype=np.int32) + np.int32(last),
            np.ones(self.tokens, np.uint8) - np.uint8(last),
            np.linspace(-2.0, 0.0, self.tokens, dtype=np.float32) - np.float32(last),
        )

    def items(self, producer: int) -> Iterator[Item]:
        """Make ready what one producer sends: (instance id, index) and arrays, in order."""
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
