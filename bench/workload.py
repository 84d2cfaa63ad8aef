"""Workloads for every system that moves trajectories: a Workload in, a Timed run out.

Each system has a file of its own with one function of the form ``Measure``. It starts a consumer
and the workload's producers as processes (`bench.processes`), lets them begin together, and returns
what the consumer timed: from its first delivery to its last acknowledgement.

What the producers of a workload send is the same in every run: it follows from its parameters.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BYTES_PER_TOKEN",
    "GROUP_SIZE",
    "PAYLOADS",
    "SIDES",
    "Arrival",
    "Item",
    "Measure",
    "Reader",
    "Source",
    "Timed",
    "Workload",
]

#: The arrays of one trajectory: tokens, loss_mask, logprobs.
Source: TypeAlias = tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]
#: What is sent: whose prompt it answers and as which sample, and its arrays.
Item: TypeAlias = tuple[tuple[str, int], Source]
#: In which order the samples of a producer's groups come.
Arrival: TypeAlias = Literal["in order", "interleaved", "scrambled"]
#: How the consumer waits: as the contender is fastest, asleep, or polling without a pause.
Reader: TypeAlias = Literal["fastest", "sleeping", "busy"]

#: Trajectories of a prompt: the smaller of the two usual sizes of GRPO.
GROUP_SIZE: Final = 8
#: An int32 token, a uint8 mask and a float32 logprob.
BYTES_PER_TOKEN: Final = 9
#: Prompts that a producer goes through before it begins again: a data set such as GSM8K has 7,473.
PROMPTS: Final = 8192
#: Bytes of different trajectories that a producer with cold sources goes through: more than the
#: last-level cache of any one processor that this is likely to run on.
COLD_BYTES: Final = 256 << 20
#: Groups that are under way at once where samples come interleaved or scrambled: what a rollout
#: worker with some hundred requests in flight has open.
OPEN_GROUPS: Final = 32
#: Different lengths that a log-normal mix goes through.
LENGTHS: Final = 256
#: Standard deviation of a mix's logarithm: a 99th percentile of six times the median, as the
#: lengths of reasoning traces have it.
LENGTH_SIGMA: Final = 0.8
#: No trajectory of a mix is shorter, or longer.
LENGTH_BOUNDS: Final = (16, 32_768)
SEED: Final = 20240229

#: Sizes of a payload that stands for any.
PAYLOADS: Final[dict[str, int]] = {
    "64 KiB": 64 << 10,
    "256 KiB": 256 << 10,
    "1 MiB": 1 << 20,
    "4 MiB": 4 << 20,
    "16 MiB": 16 << 20,
}

#: Large payloads beside the tokens: dtype, and what follows the number of tokens in the shape.
#: The experts that a mixture-of-experts model chose, for replay in the trainer: 8 of 128 in each of
#: 48 layers. The 64 likeliest tokens of a teacher at each position. An image of a megapixel.
SIDES: Final[dict[str, tuple[tuple[str, str, tuple[int, ...]], ...]]] = {
    "": (),
    "routed-experts": (("routed_experts", "uint8", (-1, 48, 8)),),
    "top-k-logits": (
        ("teacher_ids", "int32", (-1, 64)),
        ("teacher_logprobs", "float32", (-1, 64)),
    ),
    "image": (("image", "uint8", (1024, 1024, 3)),),
    # Bytes of any kind, for curves over their number.
    **{name: (("payload", "uint8", (size,)),) for name, size in PAYLOADS.items()},
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the producers send, all of them together.

    Attributes
    ----------
    trajectories : int
        How many; a multiple of producers * group size * batch.
    tokens : int
        Tokens of each; with `lengths` "log-normal" their median.
    producers : int
        Processes that send an equal share each, as groups of their own.
    batch : int
        Trajectories a call, where the system has a call for several; 0 for one a call.
    cold : bool
        Whether what is sent lies in memory that no cache holds any more. Otherwise a producer sends
        the same arrays again and again, as if it had just written them.
    capacity : str
        Size of what lies between, where the system has such a thing.
    group_size : int
        Trajectories of a prompt.
    lengths : {"fixed", "log-normal"}
        Whether all have `tokens` tokens, or a mix of lengths around that.
    arrival : {"in order", "interleaved", "scrambled"}
        Group after group; one sample of each of `OPEN_GROUPS` groups in turn; or those in disorder.
    turns : int
        Messages of a conversation that go with each trajectory as metadata; 0 for none.
    side : str
        A large payload that goes with each trajectory, of `SIDES`.
    read : bool
        Whether the consumer reads every byte once, by copying it into memory of its own; otherwise
        it makes an array of each field, and looks no further.
    reader : {"fastest", "sleeping", "busy"}
        How the consumer waits for more.
    keep : bool
        Whether a consumer that gets samples one by one holds each until its group is whole, as one
        that gets groups does; of one producer in order.
    warm_up : int
        Trajectories that arrive before the clock starts, so that every place of what lies between
        has been written once; at least the first delivery.
    pause_s : float
        Seconds that a producer sleeps before it sends each: the time that a model would take to
        generate it.
    """

    trajectories: int
    tokens: int
    producers: int = 1
    batch: int = 0
    cold: bool = False
    capacity: str = "64MiB"
    group_size: int = GROUP_SIZE
    lengths: Literal["fixed", "log-normal"] = "fixed"
    arrival: Arrival = "in order"
    turns: int = 0
    side: str = ""
    read: bool = False
    reader: Reader = "fastest"
    keep: bool = False
    warm_up: int = 0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        unit = self.producers * max(self.group_size, self.batch)
        assert self.trajectories % unit == 0, f"{self.trajectories} is no multiple of {unit}"
        assert self.side in SIDES, f"{self.side!r} is none of {sorted(SIDES)}"

    @property
    def share(self) -> int:
        """Trajectories of one producer."""
        return self.trajectories // self.producers

    @property
    def plain(self) -> bool:
        """Whether it is a simple one: equal lengths, group after group, nothing beside."""
        return self == Workload(
            trajectories=self.trajectories,
            tokens=self.tokens,
            producers=self.producers,
            batch=self.batch,
            cold=self.cold,
            capacity=self.capacity,
            group_size=self.group_size,
        )

    def as_parameters(self) -> dict[str, Any]:
        """Return what makes it again, as what json can write."""
        return asdict(self)

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        return max(self._lengths())

    @property
    def total_tokens(self) -> int:
        """Tokens of all trajectories."""
        lengths = self._lengths()
        # The last trajectory of each producer is as long as the first.
        cycle = list(itertools.islice(itertools.cycle(lengths), self.share - 1))
        return (sum(cycle) + lengths[0]) * self.producers

    @property
    def bytes_each(self) -> int:
        """Bytes of the longest trajectory with what goes beside it, without its metadata."""
        side = sum(array.nbytes for array in self.side_arrays().values())
        return self.longest * BYTES_PER_TOKEN + side

    @property
    def room(self) -> int:
        """How many of these trajectories fit into `capacity`: at least two."""
        number, unit = self.capacity[:-3], self.capacity[-3:]
        size = int(number) << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
        return max(2, size // self.bytes_each)

    def source(self, *, last: bool = False, tokens: int = 0) -> Source:
        """Make the arrays of one trajectory, of the first length unless `tokens` says otherwise.

        All have the same content but the last of each producer: since space is used again, only
        something new in it shows that it was written.
        """
        length = tokens or self._lengths()[0]
        return (
            np.arange(length, dtype=np.int32) + np.int32(last),
            np.ones(length, np.uint8) - np.uint8(last),
            np.linspace(-2.0, 0.0, length, dtype=np.float32) - np.float32(last),
        )

    def side_arrays(self) -> dict[str, NDArray[Any]]:
        """Make the large arrays that go with each trajectory, by name."""
        return {
            name: np.ones([self.tokens if size < 0 else size for size in shape], dtype)
            for name, dtype, shape in SIDES[self.side]
        }

    def meta(self) -> dict[str, Any] | None:
        """Make the metadata of each trajectory: the messages of a conversation, or nothing."""
        if not self.turns:
            return None
        roles = itertools.cycle(["user", "assistant"])
        messages = [
            {"role": role, "content": f"turn {turn}: " + "so 48 / 2 = 24 clips were sold. " * 8}
            for turn, role in zip(range(self.turns), roles, strict=False)
        ]
        return {"env": "gsm8k", "finish_reason": "stop", "messages": messages}

    def items(self, producer: int) -> Iterator[Item]:
        """Make ready what one producer sends: (instance id, index) and arrays, in order."""
        lengths = self._lengths()
        copies = COLD_BYTES // (max(lengths) * BYTES_PER_TOKEN) if self.cold else len(lengths)
        sources = [
            self.source(tokens=length)
            for length in itertools.islice(itertools.cycle(lengths), max(copies, 1))
        ]
        in_order = itertools.chain(
            itertools.islice(itertools.cycle(sources), self.share - 1), [self.source(last=True)]
        )
        return zip(self._identities(producer), in_order, strict=True)

    def _lengths(self) -> list[int]:
        """Lengths that a producer goes through, in turn."""
        if self.lengths == "fixed":
            return [self.tokens]
        generator = np.random.default_rng(SEED)
        drawn = generator.lognormal(np.log(self.tokens), LENGTH_SIGMA, LENGTHS)
        return [int(length) for length in np.clip(drawn, *LENGTH_BOUNDS)]

    def _identities(self, producer: int) -> Iterator[tuple[str, int]]:
        """Name every sample that one producer sends, in its order of arrival."""
        groups = self.share // self.group_size
        ids = [f"prompt-{producer}-{number}" for number in range(min(PROMPTS, groups))]
        if self.arrival == "in order":
            identities = itertools.cycle(list(itertools.product(ids, range(self.group_size))))
            return itertools.islice(identities, self.share)
        windows = range(0, groups, OPEN_GROUPS)
        open_groups = (
            [ids[n % PROMPTS] for n in range(f, min(f + OPEN_GROUPS, groups))] for f in windows
        )
        return itertools.chain.from_iterable(map(self._mixed, open_groups))

    def _mixed(self, ids: list[str]) -> list[tuple[str, int]]:
        """Give every sample of groups that are under way together its place."""
        samples = [(one, index) for index in range(self.group_size) for one in ids]
        if self.arrival == "scrambled":
            random.Random(ids[0]).shuffle(samples)
        return samples


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
    others_cpu_s : float
        Processor time of what else the system runs on, such as a server, while all that went on.
    counted : int, optional
        Trajectories that the rate counts: without those of the first delivery, which were sent
        before the span began. None for all, where they are few among many.
    faults : int
        Minor page faults of consumer and producers in their spans.
    figures : dict
        What else was seen, for the JSON.
    """

    trajectories: int
    seconds: float
    consumer_cpu_s: float
    producer_cpu_s: float
    others_cpu_s: float = 0.0
    counted: int | None = None
    faults: int = 0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Trajectories a second."""
        return (self.trajectories if self.counted is None else self.counted) / self.seconds

    @property
    def cpu_s(self) -> float:
        """Processor time of all processes."""
        return self.consumer_cpu_s + self.producer_cpu_s + self.others_cpu_s


Measure: TypeAlias = Callable[[Workload], Timed]
