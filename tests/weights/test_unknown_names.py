"""A tensor under a slightly wrong name: the error lists the existing names."""

import pickle
from collections.abc import Iterator

import pytest
import torch
from weight_models import many

from shmbus.base.near_names import UnknownNameError
from shmbus.tensors import TensorChannel
from shmbus.weights import ModuleSource, WeightPublisher, Weights, WeightSubscriber, share_model

WAIT_S = 20.0


@pytest.fixture
def weights(bus_name: str) -> Iterator[Weights]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with WeightPublisher(bus_name, ModuleSource(model)) as publisher:
        publisher.publish(version=7)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=WAIT_S) as found:
            yield found


def test_weights_name_the_version_and_the_names_that_are_alike(weights: Weights) -> None:
    with pytest.raises(KeyError) as caught:
        weights["model.0.weight"]
    said = str(caught.value)
    assert said.startswith("'model.0.weight': weights of version 7: no such name; did you mean ")
    assert "'0.weight'" in said and said.endswith("?")


def test_weights_stay_a_mapping(weights: Weights) -> None:
    with pytest.raises(KeyError, match=r"no such name; there is '0\.weight', '0\.bias', '1\.w"):
        weights["lm_head"]
    assert "0.weight" in weights and "lm_head" not in weights
    assert weights.get("lm_head") is None
    assert 5 not in weights


def test_only_so_many_names_are_shown_also_in_another_process() -> None:
    error = UnknownNameError("weights", "lm_head", [f"p{number}" for number in range(8)])
    assert str(error).endswith("there is 'p0', 'p1', 'p2', 'p3', 'p4' and 3 more")
    assert str(UnknownNameError("weights", "lm_head", [])).endswith("there is none")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is KeyError and arrived.args == (str(error),)


def test_a_shared_model_names_the_bus_and_the_names_that_are_alike(bus_name: str) -> None:
    with share_model(bus_name, many(3)) as shared, pytest.raises(KeyError) as caught:
        shared["p11"]
    said = str(caught.value)
    assert said.startswith(f"'p11': shared weights of bus {bus_name!r}: no such name; did you mean")


def test_a_step_names_itself_and_the_names_that_are_alike(bus_name: str) -> None:
    sender = TensorChannel.create(bus_name, timeout=WAIT_S)
    receiver = TensorChannel.open(bus_name, specs={"logits": ("float32", (None,))}, timeout=WAIT_S)
    sender.send({"logits": torch.ones(4)})
    with receiver.recv() as item:
        assert item.get("logit") is None
        with pytest.raises(KeyError) as caught:
            item["logit"]
    said = str(caught.value)
    assert said.startswith(f"'logit': step 0 of channel {bus_name!r}")
    assert said.endswith("did you mean 'logits'?")
    sender.close("the test is over")
    receiver.close()
