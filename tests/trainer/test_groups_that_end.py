"""TRL's rollout function over groups that cannot train or never come."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from answering import Answer, answering

import shmbus
from trainer_adapter.adapters.trl import ShmbusRollouts, scored

VERSION, LAG = 5, 1
GOOD = {"tokens": [3, 4], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]}


def of_version(version: int) -> Answer:
    return lambda producer, request: (
        producer.requests.answer(request, score=request.index, policy_version=version, **GOOD)
        and None
    )


def fail(producer: shmbus.Producer, request: shmbus.Request) -> None:
    producer.requests.fail(request, "the sandbox is gone")


def ask(bus: str, **options: Any) -> list[float]:
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), num_generations=2, max_completion_length=8,
        accelerator=SimpleNamespace(num_processes=1), processing_class=None,
    )  # fmt: skip
    rollouts = ShmbusRollouts(bus, timeout=60.0, tokenize=False, **options)
    try:
        scores: list[float] = rollouts(["a", "a"], trainer)["bus_score"]
        return scores
    finally:
        rollouts.close()


def test_older_weights_end_the_step(bus: shmbus.Bus) -> None:
    bus.policy_version = VERSION
    named = pytest.raises(RuntimeError, match=r"the group \('\w+', \d+\) was asked for.*as stale")
    with answering(bus.name, of_version(VERSION - LAG - 1)), named:
        ask(bus.name, max_policy_lag=LAG)
    assert bus.stats().dropped["stale"] == 2 and bus.stats().acknowledged == 0


@pytest.mark.parametrize("version", [VERSION - LAG, VERSION, VERSION + 7])
def test_newer_weights_pass(version: int, bus: shmbus.Bus) -> None:
    bus.policy_version = VERSION
    with answering(bus.name, of_version(version)):
        assert ask(bus.name, max_policy_lag=LAG) == [0.0, 1.0]
    assert bus.stats().acknowledged == 2
    assert bus.policy_version == VERSION, "a worker's version is not the trainer's"


@pytest.mark.parametrize("served", [False, True])
def test_a_group_that_failed_for_good_ends_the_step_by_name(
    served: bool, bus_name: str, daemon: Callable[..., Any]
) -> None:
    if served:
        daemon("--capacity", "1MiB")
    named = pytest.raises(RuntimeError, match=r"it dropped 2 samples as failed.*sample_retries")
    with shmbus.Bus.ensure(bus_name, capacity="1MiB"), answering(bus_name, fail), named:
        ask(bus_name)


def test_a_step_follows_an_ended_one(bus: shmbus.Bus) -> None:
    with answering(bus.name, fail), pytest.raises(RuntimeError, match="dropped it"):
        ask(bus.name)
    with answering(bus.name, of_version(0)):
        assert ask(bus.name) == [0.0, 1.0]


def test_a_completion_that_is_longer_than_trl_allows_is_named(bus: shmbus.Bus) -> None:
    long = {"tokens": [3] * 10, "loss_mask": [0] + [1] * 9, "logprobs": [-1.0] * 10}
    named = pytest.raises(ValueError, match=r"at most 8 sampled in a turn, max_completion_length")
    with answering(bus.name, lambda p, request: p.requests.answer(request, **long) and None), named:
        ask(bus.name)


def test_what_cannot_be_scored_is_none_to_trls_reward_function(bus: shmbus.Bus) -> None:
    def answer(producer: shmbus.Producer, request: shmbus.Request) -> None:
        producer.requests.answer(request, **GOOD, **scored(math.nan if request.index else 0.5))

    with answering(bus.name, answer):
        assert ask(bus.name) == [0.5, None]
