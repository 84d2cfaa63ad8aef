"""`score_group`: samples left open by producers are scored before a batch, or named in an error."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from conftest import keys_of

import shmbus
from shmbus import Bus, Consumer, Producer, UnscoredError
from trainer_adapter import OnlineDataHandler, pack

SIZE = 2


def put(producer: Producer, key: str, scores: tuple[float | None, ...] = (None, None)) -> None:
    for index, score in enumerate(scores):
        tokens = np.array([index + 1, 7, 7], np.int32)
        producer.put(key, group_size=len(scores), index=index, score=score, tokens=tokens)


def judge(group: shmbus.Group) -> list[float]:
    return [float(t["tokens"][0]) for t in group]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_only_unscored_samples_are_scored(bus: Bus, producer: Producer, prefetch: int) -> None:
    asked: list[str] = []

    def recorded(group: shmbus.Group) -> torch.Tensor:
        asked.append(group.instance_id)
        return torch.tensor(judge(group), requires_grad=True)

    put(producer, "open")
    put(producer, "half", (None, -5.0))
    put(producer, "scored", (0.5, 1.5))
    with OnlineDataHandler(
        bus.name, groups_per_batch=3, score_group=recorded, advantages="dr_grpo", prefetch=prefetch
    ) as handler:
        batch = handler.next_batch(30)
        assert asked == ["open", "half"]
        assert batch.scores.tolist() == [1, 2, 1, -5, 0.5, 1.5]
        assert batch.advantages.reshape(-1, 3)[:, 0].tolist() == [-0.5, 0.5, 3, -3, -0.5, 0.5]
        assert handler.metrics()["reward/mean"] == pytest.approx(batch.scores.mean().item())
        handler.ack(batch)
        assert handler.stats().balanced


def test_without_a_scorer_it_is_malformed_and_named(bus: Bus, producer: Producer) -> None:
    put(producer, "open")
    put(producer, "scored", (0.5, 1.5))
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        with pytest.raises(UnscoredError, match=r"'open'\[0\] of producer 1: .*score_group"):
            handler.next_batch(30)
        assert handler.next_batch(30).instance_ids == ["scored"] * SIZE
        assert handler.stats().dropped["malformed"] == SIZE
    put(producer, "more")
    with Consumer(bus.name) as consumer:
        groups = consumer.take(timeout=10)
        with pytest.raises(UnscoredError, match=r"'more'\[0\]"):
            pack([group for group in groups if group.instance_id == "more"])


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_takes_groups_are_scored_at_once(bus: Bus, producer: Producer, prefetch: int) -> None:
    def score_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "shmbus-groups"}

    others = score_threads()  # of earlier tests, perhaps ending meanwhile
    loops = set()
    begun = 0
    all_begun: asyncio.Event | None = None

    async def together(group: shmbus.Group) -> list[float]:
        nonlocal begun, all_begun
        loops.add(asyncio.get_running_loop())
        all_begun = all_begun or asyncio.Event()
        begun += 1
        if begun == 8:
            all_begun.set()
        await all_begun.wait()  # in sequence they would wait for ever
        return judge(group)

    for number in range(8):
        put(producer, f"q{number}")

    async def in_a_notebook() -> None:
        # A loop runs in this thread already.
        batch = handler.next_batch(30)
        assert len(batch.groups) == 8 and batch.scores.tolist() == [1, 2] * 8
        handler.ack(batch)
        put(producer, "later")
        put(producer, "latest")

    with OnlineDataHandler(
        bus.name, groups_per_batch=8, max_wait=0.3, score_group=together, prefetch=prefetch
    ) as handler:
        asyncio.run(in_a_notebook())
        assert len(handler.next_batch(30).groups) == 2
        assert len(loops) == 1  # a server's client lives in a single loop
    assert not score_threads() - others


@pytest.mark.parametrize("in_a_coroutine", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_judge_that_fails_loses_no_group_and_is_asked_for_none_twice(
    bus: Bus, producer: Producer, prefetch: int, in_a_coroutine: bool
) -> None:
    asked: list[str] = []
    down = {"b"}

    def flaky(group: shmbus.Group) -> list[float]:
        asked.append(group.instance_id)
        if group.instance_id in down:
            down.clear()
            raise ConnectionError("the judge is down")
        return judge(group)

    async def flaky_too(group: shmbus.Group) -> list[float]:
        return flaky(group)

    for key in "abc":
        put(producer, key)
    score_group = flaky_too if in_a_coroutine else flaky
    with OnlineDataHandler(
        bus.name, groups_per_batch=3, score_group=score_group, prefetch=prefetch
    ) as handler:
        with pytest.raises(ConnectionError, match="down"):
            handler.next_batch(30)
        batch = handler.next_batch(30)
        assert sorted(keys_of(batch)) == ["a", "b", "c"]
        assert sorted(asked) == ["a", "b", "b", "c"]
        handler.ack(batch)
        ledger = handler.stats()
        assert ledger.balanced and ledger.acknowledged == 3 * SIZE


@pytest.mark.parametrize(
    "given",
    [[1.0], [1.0, float("nan")], "ab", 1.0, [[1.0, 2.0]], ["1", "2"], [None, 1.0], [10**400, 1]],
)
def test_an_answer_without_scores_loses_nothing(bus: Bus, producer: Producer, given: Any) -> None:
    put(producer, "q")
    answers = [given, [torch.tensor(0.0).bfloat16(), 1.0]]
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, score_group=lambda group: answers.pop(0)
    ) as handler:
        with pytest.raises(
            ValueError, match="score_group: expected 2 finite numbers for group 'q'"
        ):
            handler.next_batch(30)
        assert handler.next_batch(30).scores.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt()])
def test_a_coroutine_that_ends_itself_is_asked_again(
    bus: Bus, producer: Producer, raised: BaseException
) -> None:
    put(producer, "q")
    failures = [raised]

    async def score_group(group: shmbus.Group) -> Any:
        if failures:
            raise failures.pop()
        return [0.0, 1.0]

    with OnlineDataHandler(bus.name, groups_per_batch=1, score_group=score_group) as handler:
        with pytest.raises(RuntimeError, match=f"score_group: .*'q'.* got {type(raised).__name__}"):
            handler.next_batch(30)
        assert handler.next_batch(30).scores.tolist() == [0.0, 1.0]


def test_unscorable_and_useless_groups_are_sampled_anew(bus: Bus, producer: Producer) -> None:
    good = torch.tensor([0.0, 1.0], requires_grad=True).bfloat16()
    answers = {"useless": [1.0, 1.0], "unfit": None, "good": good}
    for key in answers:
        put(producer, key)

    with OnlineDataHandler(
        bus.name,
        groups_per_batch=1,
        score_group=lambda group: answers[group.instance_id],
        skip_zero_variance=True,
    ) as handler:
        assert keys_of(handler.next_batch(30)) == ["good"]
        assert handler.refill == 2
        assert handler.stats().dropped["filtered"] == 2 * SIZE


def test_evaluations_are_scored_and_survive_an_error(bus: Bus, producer: Producer) -> None:
    answers: list[list[float] | None] = [None]

    def score_group(group: shmbus.Group) -> list[float]:
        if answers:
            answers.pop()
            raise ConnectionError("the judge is down")
        return [1.0, 1.0]

    for index in range(SIZE):
        producer.put(
            "e", group_size=SIZE, index=index, score=None, split="eval", tokens=np.zeros(3, "i4")
        )
    with OnlineDataHandler(bus.name, score_group=score_group, skip_zero_variance=True) as handler:
        with pytest.raises(ConnectionError):
            handler.evaluate(1, timeout=30)
        assert handler.evaluate(1, timeout=30)["eval/reward/mean"] == 1.0
