"""A new run on the bus of an earlier run: warnings before the first batch."""

import logging

import pytest
import torch

from shmbus import Bus, Consumer, Producer
from shmbus.inspect.status import read_status
from shmbus.weights import ModuleSource, WeightPublisher
from trainer_adapter import OnlineDataHandler


@pytest.fixture
def old_bus(bus: Bus) -> Bus:
    """A bus at policy version 9, with a group that its trainer never took."""
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        for version in (8, 9):
            consumer.policy_version = version
        producer.put_group("q", [{"tokens": [1], "score": float(n)} for n in range(2)])
    return bus


def test_a_missing_checkpoint_is_warned(old_bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    with OnlineDataHandler(old_bus.name, groups_per_batch=1) as handler:
        handler.next_batch(30.0)
        [record] = [r for r in caplog.records if "earlier run" in r.message]
        assert (record.levelno, record.args) == (
            logging.WARNING, (old_bus.name, 9, 2, old_bus.name),
        )  # fmt: skip
        caplog.clear()
        with pytest.raises(TimeoutError):
            handler.next_batch(0.0)
        assert not [r for r in caplog.records if "earlier run" in r.message]
        with pytest.raises(ValueError, match=f"expected 9 or more.*`shmbus rm {old_bus.name}`"):
            handler.set_policy_version(0)


@pytest.mark.parametrize("goes_on", ["load_state_dict", "set_policy_version", "a fresh bus"])
def test_a_trainer_that_goes_on_is_not_warned(
    goes_on: str, old_bus: Bus, bus_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with OnlineDataHandler(old_bus.name, groups_per_batch=1) as handler:
        if goes_on == "load_state_dict":
            handler.load_state_dict(handler.state_dict())
        elif goes_on == "set_policy_version":
            handler.set_policy_version(9)
        else:
            handler._consumer.take(1, 30.0)[0].ack()
    if goes_on == "a fresh bus":
        with (
            OnlineDataHandler(old_bus.name, groups_per_batch=1) as handler,
            pytest.raises(TimeoutError),
        ):
            handler.next_batch(0.0)
    assert not [r for r in caplog.records if "earlier run" in r.message]


def test_weights_of_an_earlier_run_are_told(old_bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Consumer(old_bus.name),
        WeightPublisher(old_bus.name, ModuleSource(torch.nn.Linear(2, 2))) as publisher,
    ):
        publisher.publish(version=0)
        [record] = [r for r in caplog.records if "earlier run" in r.message]
        assert record.args == (old_bus.name, 0, 9, old_bus.name)
        verdict = read_status(old_bus.name).verdict
        assert verdict is not None
        [finding] = [f for f in verdict.findings if f.kind == "earlier_run"]
        assert "9" in finding.what and f"shmbus rm {old_bus.name}" in finding.advice
        caplog.clear()
        publisher.publish(version=9)
        verdict = read_status(old_bus.name).verdict
        assert verdict is not None and "earlier_run" not in [f.kind for f in verdict.findings]
    assert not [r for r in caplog.records if "earlier run" in r.message]
