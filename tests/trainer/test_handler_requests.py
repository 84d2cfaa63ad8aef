"""Prompts offered by the trainer, and what a checkpoint says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import shmbus
from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler

TOKENS = np.arange(8, dtype=np.int32)


def sample_all(producer: Producer) -> list[str]:
    """Answer every open request; return which prompts had some."""
    seen = set()
    while (request := producer.next_request(0)) is not None:
        seen.add(request.instance_id)
        producer.put_for(
            request,
            score=float(request.index),
            tokens=np.concatenate([request["prompt"], TOKENS]),
            loss_mask=np.ones(8 + request["prompt"].size, np.uint8),
            logprobs=np.zeros(8 + request["prompt"].size, np.float32),
        )
    return sorted(seen)


def test_a_checkpoint_offers_again_exactly_what_was_not_trained(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "4MiB"),
        Producer(bus_name) as producer,
        OnlineDataHandler(bus_name, groups_per_batch=2) as handler,
    ):
        for number in range(6):
            handler.request(f"q{number}", group_size=2, prompt=np.arange(number, dtype=np.int32))
        sample_all(producer)
        first = handler.next_batch(10)
        handler.ack(first)
        second = handler.next_batch(10)  # yielded counts as trained
        state = json.loads(json.dumps(handler.state_dict()))
        assert [each["instance_id"] for each in state["requests"]["open"]] == ["q4", "q5"]
        handler.ack(second)
        handler.load_state_dict(state)
        assert producer.next_request(0) is None, "they are on this bus still"
    with (
        Bus.create(bus_name, "4MiB"),
        Producer(bus_name) as producer,
        OnlineDataHandler(bus_name, groups_per_batch=2) as handler,
    ):
        handler.load_state_dict(state)
        assert sample_all(producer) == ["q4", "q5"]
        batch = handler.next_batch(10)
        assert sorted(set(batch.instance_ids)) == ["q4", "q5"]
        handler.ack(batch)
        assert "requests" not in handler.state_dict()
        assert handler.stats().requests.balanced


def test_a_handler_whose_bus_has_no_requests_saves_none(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        state = handler.state_dict()
        assert "requests" not in state
        handler.load_state_dict(state)
        with pytest.raises(ValueError, match="requests state"):
            handler.load_state_dict({**state, "requests": {"version": 7}})
        with pytest.raises(shmbus.BusFullError):
            while True:
                handler.request("q", group_size=2, prompt=np.zeros(3000), timeout=0)
