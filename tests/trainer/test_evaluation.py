"""Evaluation while training, in one process: by the embedded consumer, and beside a daemon."""

import multiprocessing
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from conftest import Daemon, wait_until

from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler
from trainer_adapter.losses import policy_loss

DIGITS, ANSWER = 6, 3


def work(name: str) -> None:
    rng = np.random.default_rng(0)
    with Producer(name) as producer:
        while (request := producer.requests.next()) is not None:
            digit = int(request["prompt"][0])
            right = request.split == "eval" and digit % 2 == 0
            answer = [digit] * ANSWER if right else rng.integers(0, DIGITS, ANSWER).tolist()
            producer.requests.answer(
                request,
                score=float(np.mean(np.array(answer) == digit)),
                policy_version=producer.policy_version,
                tokens=[digit, *answer],
                loss_mask=[0] + [1] * ANSWER,
                logprobs=[0.0] + [float(-np.log(DIGITS))] * ANSWER,
            )


@pytest.fixture
def worker(bus_name: str) -> Iterator[Callable[[], None]]:
    started = []

    def start() -> None:
        child = multiprocessing.get_context("fork").Process(target=work, args=(bus_name,))
        child.start()
        started.append(child)

    yield start
    for child in started:
        child.kill()
        child.join()


def train(handler: OnlineDataHandler) -> list[dict[str, float]]:
    """Train a table of logits, and evaluate every third step."""
    table = torch.zeros(DIGITS, DIGITS, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=1.0)
    evaluations = []
    offered = 0
    for step in range(1, 10):
        while offered < step * 4 + 4:
            handler.request(
                f"q{offered}", group_size=4, prompt=np.array([offered % DIGITS], np.int32)
            )
            offered += 1
        batch = handler.next_batch(30)
        assert all(name.startswith("q") for name in batch.instance_ids)
        assert batch.logprobs is not None
        where = batch.loss_mask.nonzero().squeeze(1)
        new = table[batch.tokens[where - 1]].log_softmax(-1)
        picked = new.gather(1, batch.tokens[where, None]).squeeze(1)
        loss, *_ = policy_loss(
            picked, batch.logprobs[where], batch.advantages[where], torch.ones_like(where).bool()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        handler.set_policy_version(step)
        handler.ack(batch)
        if step % 3 == 0:
            for digit in range(DIGITS):
                handler.request(
                    f"e{step}-{digit}", group_size=2, split="eval", priority=7,
                    prompt=np.array([digit], np.int32),
                )  # fmt: skip
            evaluations.append(handler.evaluate(DIGITS, timeout=30))
    return evaluations


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("served", [False, True], ids=["embedded", "daemon"])
def test_a_trainer_evaluates_while_it_trains(
    bus_name: str,
    daemon: Callable[..., Daemon],
    worker: Callable[[], None],
    served: bool,
    prefetch: int,
) -> None:
    bus = None if served else Bus.create(bus_name, "4MiB")
    if served:
        daemon("--capacity", "4MiB")
    try:
        worker()
        with OnlineDataHandler(bus_name, groups_per_batch=4, prefetch=prefetch) as handler:
            evaluations = train(handler)
            # A daemon hears of an acknowledgement a moment later.
            wanted = 3 * DIGITS * 2
            wait_until(lambda: handler.stats().splits["eval"].acknowledged == wanted)
            assert handler.stats().balanced and not handler.stats().dropped
    finally:
        if bus is not None:
            bus.close()
    for figures in evaluations:
        assert (figures["eval/groups"], figures["eval/samples"]) == (DIGITS, 2 * DIGITS)
        assert figures["eval/reward/mean"] >= 0.5  # the even digits alone
        assert figures["eval/reward/best"] >= figures["eval/reward/mean"]
        assert figures["eval/length/mean"] == ANSWER + 1
        assert 0 <= figures["eval/lag/mean"] <= figures["eval/lag/max"] <= 3


def test_an_evaluation_says_how_many_groups_came_in_time(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1, split="own") as handler:
        assert handler.evaluate(3, timeout=0.01) == {"eval/groups": 0.0, "eval/samples": 0.0}
        handler.request("q", group_size=1, prompt=[1, 2])
        assert producer.requests.next(10).split == "own"
        for number in range(2):
            producer.put(number, group_size=1, index=0, score=number, split="test", tokens=[1, 2])
        figures = handler.evaluate(3, timeout=0.05, split="test")
        assert figures["test/groups"] == 2 and figures["test/reward/mean"] == 0.5
        for split in ("own", "test"):
            producer.put(split, group_size=1, index=0, split=split, tokens=[1])
        with pytest.raises(ValueError, match="another than 'own', whose groups come as batches"):
            handler.evaluate(1, split="own")
        with handler.take("test", timeout=5)[0] as group:
            assert group.instance_id == "test"
        assert handler.next_batch(10).instance_ids == ["own"]
        assert handler.stats().balanced
