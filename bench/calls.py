"""Hot calls under pytest-benchmark, comparable over commits.

``make bench-calls`` runs this file; ``pytest bench/calls.py --benchmark-autosave`` keeps the
figures, and ``--benchmark-compare`` sets them beside the figures of an earlier commit. Producer and
consumer share a process and never wait: a figure is the cost of a call, without the hop between
processes. A test sends, takes and acknowledges whole rounds, and times a single part.
"""

import itertools
import os
import secrets
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

import shmbus
from bench.rows.stash import Sample
from bench.workload import GROUP_SIZE
from shmbus.stash.stash import Stash

torch = pytest.importorskip("torch")

#: Trajectories of a round: several groups, well below the capacity.
ROUND: Final = 64
TOKENS: Final = 2048
ROUNDS: Final = 300
WARM_UP: Final = 20
ARRAYS: Final[dict[str, Any]] = {
    "tokens": np.arange(TOKENS, dtype=np.int32),
    "loss_mask": np.ones(TOKENS, np.uint8),
    "logprobs": np.zeros(TOKENS, np.float32),
}


class Ends:
    """Producer and consumer of a bus, with rounds of whole groups between them."""

    def __init__(self, name: str) -> None:
        self.producer = shmbus.Producer(name)
        self.consumer = shmbus.Consumer(name)
        self.number = 0

    def items(self) -> list[dict[str, Any]]:
        """Make the dicts of a round."""
        self.number += 1
        return [
            {"instance_id": f"p-{self.number}-{i // GROUP_SIZE}", "group_size": GROUP_SIZE,
             "index": i % GROUP_SIZE, "score": float(i % 2), "policy_version": 3, **ARRAYS}
            for i in range(ROUND)
        ]  # fmt: skip

    def put(self, items: list[dict[str, Any]]) -> None:
        """Put a round, a trajectory a call."""
        for item in items:
            self.producer.put(**item)

    def take(self) -> list[shmbus.Group]:
        """Take all available groups."""
        return self.consumer.take(max_groups=ROUND, timeout=0.0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    name = f"calls-{os.getpid()}-{secrets.token_hex(4)}"
    with shmbus.Bus.create(name, "64MiB"):
        pair = Ends(name)
        with pair.producer, pair.consumer:
            yield pair


def timed(benchmark: Any, call: Any, before: Any, after: Any = None) -> None:
    """Time ``call(*before())`` by rounds, without the time of ``before`` and ``after``."""
    benchmark.extra_info["trajectories"] = ROUND
    benchmark.pedantic(call, setup=before, teardown=after, rounds=ROUNDS, warmup_rounds=WARM_UP)


def _arguments(*arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {}


def test_put(benchmark: Any, ends: Ends) -> None:
    def drain(*_: Any) -> None:
        ends.consumer.ack(ends.take())

    timed(benchmark, ends.put, lambda: _arguments(ends.items()), drain)


def test_put_lists(benchmark: Any, ends: Ends) -> None:
    lists = {name: array.tolist() for name, array in ARRAYS.items()}

    def drain(*_: Any) -> None:
        ends.consumer.ack(ends.take())

    timed(benchmark, ends.put, lambda: _arguments([item | lists for item in ends.items()]), drain)


def test_put_many(benchmark: Any, ends: Ends) -> None:
    def drain(*_: Any) -> None:
        ends.consumer.ack(ends.take())

    timed(benchmark, ends.producer.put_many, lambda: _arguments(ends.items()), drain)


def test_reserve(benchmark: Any, ends: Ends) -> None:
    fields = {name: (str(array.dtype), TOKENS) for name, array in ARRAYS.items()}

    def reserve(items: list[dict[str, Any]]) -> None:
        for item in items:
            with ends.producer.reserve(
                item["instance_id"], group_size=GROUP_SIZE, index=item["index"], fields=fields
            ) as slot:
                for name, array in ARRAYS.items():
                    slot[name][:] = array

    def drain(*_: Any) -> None:
        ends.consumer.ack(ends.take())

    timed(benchmark, reserve, lambda: _arguments(ends.items()), drain)


def test_take(benchmark: Any, ends: Ends) -> None:
    def sent() -> tuple[tuple[Any, ...], dict[str, Any]]:
        ends.producer.put_many(ends.items())
        return _arguments()

    held: list[shmbus.Group] = []

    def take() -> None:
        held.extend(ends.take())

    def acknowledge(*_: Any) -> None:
        ends.consumer.ack(held)
        held.clear()

    timed(benchmark, take, sent, acknowledge)


def test_stash(benchmark: Any) -> None:
    stash: Stash[Any] = Stash()
    numbers = itertools.count()

    def samples() -> tuple[tuple[Any, ...], dict[str, Any]]:
        keys = [f"p-{next(numbers)}" for _ in range(ROUND // GROUP_SIZE)]
        return _arguments([Sample(key, GROUP_SIZE, i) for i in range(GROUP_SIZE) for key in keys])

    def add(round_of_samples: list[Sample]) -> None:
        stash.add(round_of_samples, 0.0)

    def end(*_: Any) -> None:
        for group in stash.lease(ROUND):
            stash.end_lease(group)

    timed(benchmark, add, samples, end)


def test_views(benchmark: Any, ends: Ends) -> None:
    def taken() -> tuple[tuple[Any, ...], dict[str, Any]]:
        ends.producer.put_many(ends.items())
        return _arguments(ends.take())

    def look(groups: list[shmbus.Group]) -> None:
        for group in groups:
            for t in group:
                for name in ARRAYS:
                    t[name]

    timed(benchmark, look, taken, ends.consumer.ack)


def test_ack(benchmark: Any, ends: Ends) -> None:
    def taken() -> tuple[tuple[Any, ...], dict[str, Any]]:
        ends.producer.put_many(ends.items())
        return _arguments(ends.take())

    timed(benchmark, ends.consumer.ack, taken)


def test_pack(benchmark: Any, ends: Ends) -> None:
    from trainer_adapter import pack

    def taken() -> tuple[tuple[Any, ...], dict[str, Any]]:
        ends.producer.put_many(ends.items())
        return _arguments(ends.take())

    timed(benchmark, pack, taken, ends.consumer.ack)


def test_attention(benchmark: Any) -> None:
    from trainer_adapter import varlen_attention

    lengths = [256, 64, 512, 192]
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    q, k, v = (torch.randn(total, 4, 32) for _ in range(3))

    def attend() -> None:
        varlen_attention(
            q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), window_size=(-1, 0)
        )

    benchmark.pedantic(attend, rounds=30, warmup_rounds=3)


if __name__ == "__main__":
    sys.exit("bench.calls: pytest runs it: make bench-calls, or pytest bench/calls.py")
