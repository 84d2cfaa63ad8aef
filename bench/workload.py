"""What a system that moves trajectories is measured with: a Workload in, a Timed run out.

Each system has a file of its own with one function of the form ``Measure``. It starts a consumer
and the workload's producers as processes (`bench.processes`), lets them begin together, and returns
what the consumer timed: from its first delivery to its last acknowledgement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BYTES_PER_TOKEN", "GROUP_SIZE", "Measure", "Source", "Timed", "Workload"]

#: The arrays of one trajectory: tokens, loss_mask, logprobs.
Source: TypeAlias = tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]

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
    """What the producers send, all of them together.

    Attributes
    ----------
    trajectories : int
        How many; a multiple of producers * group size * batch.
    tokens : int
        Tokens of each.
    producers : int
        Processes that send an equal share each, as groups of their own.
    batch : int
        Trajectories a call, where the system has a call for several; 0 for one a call.
    cold : bool
        Whether what is sent lies in memory that no cache holds any more. Otherwise a producer sends
        the same arrays again and again, as if it had just written them.
    capacity : str
        Size of what lies between, where the system has such a thing.
    """

    trajectories: int
    tokens: int
    producers: int = 1
    batch: int = 0
    cold: bool = False
    capacity: str = "64MiB"

    def __post_init__(self) -> None:
        unit = self.producers * max(GROUP_SIZE, self.batch)
        assert self.trajectories % unit == 0, f"{self.trajectories} is no multiple of {unit}"

    @property
    def share(self) -> int:
        """Trajectories of one producer."""
        return self.trajectories // self.producers

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

    def items(self, producer: int) -> Iterator[tuple[tuple[str, int], Source]]:
        """Make ready what one producer sends: (instance id, index) and arrays, in order."""
        copies = COLD_BYTES // (self.tokens * BYTES_PER_TOKEN) if self.cold else 1
        sources = [self.source() for _ in range(copies)]
        ids = [f"prompt-{producer}-{number}" for number in range(PROMPTS)]
        identities = itertools.cycle(list(itertools.product(ids, range(GROUP_SIZE))))
        in_order = itertools.chain(
            itertools.islice(itertools.cycle(sources), self.share - 1), [self.source(last=True)]
        )
        return zip(itertools.islice(identities, self.share), in_order, strict=True)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One run of a workload.

    Attributes
    ----------
    trajectories : int
        How many arrived and were acknowledged: all of the workload.
    seconds : float
        From the first delivery to the last acknowledgement, in the consumer.
    consumer_cpu_s, producer_cpu_s : float
        Processor time of the consumer in that span, and of all producers while they sent.
    """

    trajectories: int
    seconds: float
    consumer_cpu_s: float
    producer_cpu_s: float

    @property
    def rate(self) -> float:
        """Trajectories a second."""
        return self.trajectories / self.seconds


Measure: TypeAlias = Callable[[Workload], Timed]
