"""TRL's weight transfer over a bus: whole versions only, and none of nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shmbus import Bus
from shmbus.pool.lifecycle import pool_path
from shmbus.weights import ManifestError, WeightSubscriber
from trainer_adapter.adapters.trl import ShmbusWeights

WAIT_S = 20.0


@pytest.fixture
def weights(bus: Bus) -> Iterator[ShmbusWeights]:
    made = ShmbusWeights(bus.name)
    yield made
    made.destroy()


def model(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    return iter([("a", torch.full((2,), value)), ("b", torch.full((3,), value))])


def test_a_first_sync_without_parameters_publishes_nothing(
    bus: Bus, weights: ShmbusWeights
) -> None:
    with pytest.raises(ValueError, match="send_weights: expected the model's parameters, got none"):
        weights.send_weights(iter([]))
    with pytest.raises(FileNotFoundError):
        open(pool_path(bus.name, "weights")).close()
    weights.send_weights(model(1.0))
    with WeightSubscriber(bus.name) as subscriber, subscriber.latest(timeout=WAIT_S) as found:
        assert found.version == 1 and found["a"].tolist() == [1.0, 1.0]


def test_a_later_sync_without_parameters_leaves_the_last_version(
    bus: Bus, weights: ShmbusWeights
) -> None:
    weights.send_weights(model(1.0))
    with pytest.raises(ManifestError, match="'a' did not come"):
        weights.send_weights(iter([]))
    with WeightSubscriber(bus.name) as subscriber:
        with subscriber.latest(timeout=WAIT_S) as found:
            assert found["b"].tolist() == [1.0] * 3
        weights.send_weights(model(2.0))
        with subscriber.latest(timeout=WAIT_S) as found:
            assert found["b"].tolist() == [2.0] * 3
