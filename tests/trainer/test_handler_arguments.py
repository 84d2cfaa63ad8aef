"""What OnlineDataHandler and `pack` refuse: a TypeError or ValueError that names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shmbus import Bus, Consumer, Producer
from trainer_adapter import OnlineDataHandler, pack


def put_pair(
    producer: Producer, instance_id: str, scores: tuple[float, float] = (0.0, 1.0)
) -> None:
    for index, score in enumerate(scores):
        producer.put(
            instance_id, group_size=2, index=index, score=score, tokens=np.arange(4, dtype=np.int32)
        )


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"layout": "ragged"}, ValueError, "layout: expected .*'ragged'"),
        ({"truncated": "cut"}, ValueError, "truncated: expected .*'cut'"),
        ({"advantages": "ppo"}, ValueError, "advantages: expected .*'ppo'"),
        ({"device": "cuda:99"}, ValueError, "device: expected .*'cuda:99'"),
        ({"fields": {}}, TypeError, "fields: expected FieldNames, got dict"),
    ],
)
def test_pack_refuses_the_same_and_leaves_the_group_leased(
    bus: Bus, producer: Producer, given: dict[str, Any], error: Any, match: str
) -> None:
    put_pair(producer, "g")
    with Consumer(bus.name) as consumer:
        (group,) = consumer.take(timeout=10)
        with pytest.raises(error, match=match):
            pack(group, **given)
        assert pack(group).instance_ids == ["g", "g"]


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, ValueError), (float("nan"), ValueError), ("soon", TypeError)],
)
def test_a_timeout_that_is_no_number_of_seconds_is_refused(
    bus: Bus, timeout: Any, error: Any
) -> None:
    with (
        OnlineDataHandler(bus.name) as handler,
        pytest.raises(error, match=r"timeout: expected .*seconds,? or None"),
    ):
        handler.next_batch(timeout)


def test_only_a_batch_can_be_ended(bus: Bus) -> None:
    with OnlineDataHandler(bus.name) as handler:
        for end in (handler.ack, handler.give_back):
            with pytest.raises(TypeError, match="expected a Batch, got list"):
                end([])  # type: ignore[arg-type]


def test_a_callable_is_called_with_scores_of_the_bus_only(bus: Bus, producer: Producer) -> None:
    seen = []

    def centred(scores: Any) -> torch.Tensor:
        seen.append(scores.tolist())
        return torch.tensor(scores - scores.mean(), dtype=torch.float32, requires_grad=True)

    put_pair(producer, "g", (3.0, 5.0))
    with OnlineDataHandler(bus.name, groups_per_batch=1, advantages=centred) as handler:
        batch = handler.next_batch(10)
        assert batch.advantages.tolist() == [-1.0] * 4 + [1.0] * 4
        assert not batch.advantages.requires_grad
    assert seen == [[3.0, 5.0]]


def test_a_callable_that_gives_no_advantages_is_named_and_costs_no_group(
    bus: Bus, producer: Producer
) -> None:
    put_pair(producer, "g")
    answers: list[Any] = [[1.0], [float("nan"), 0.0], None, [1j, 0.0], [2.0, 3.0]]
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, advantages=lambda scores: answers.pop(0)
    ) as handler:
        for _ in range(4):
            with pytest.raises(ValueError, match="advantages: expected 2 finite real numbers from"):
                handler.next_batch(10)
        assert handler.next_batch(10).advantages.tolist() == [2.0] * 4 + [3.0] * 4
        assert handler.stats().dropped == {}


def test_numpys_integers_are_integers_to_a_handler(bus: Bus) -> None:
    sizes: dict[str, Any] = {"groups_per_batch": np.int32(1), "pack_threads": np.int64(1)}
    with (
        Producer(bus.name) as producer,
        OnlineDataHandler(bus.name, prefetch=np.int8(1), **sizes) as handler,  # type: ignore[arg-type]
    ):
        put_pair(producer, "a")
        batch = handler.next_batch(30.0)
        assert batch.num_sequences == 2
        handler.ack(batch)


@pytest.mark.parametrize("step", [float("inf"), float("nan"), torch.tensor(1 + 2j), None, "x"])
def test_a_checkpoint_with_a_step_that_is_no_number_is_refused(bus: Bus, step: object) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        state = {**handler.state_dict(), "step": step}
        with pytest.raises(ValueError, match="state_dict: expected what state_dict"):
            handler.load_state_dict(state)


def test_an_evaluation_names_what_it_refuses(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        with pytest.raises(TypeError, match="groups: expected an int, got Tensor"):
            handler.evaluate(torch.ones(2))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timeout: expected seconds or None, got str"):
            handler.evaluate(1, timeout="soon")  # type: ignore[arg-type]
