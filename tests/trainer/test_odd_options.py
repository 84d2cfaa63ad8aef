"""An array or a tensor where an option takes a word, a flag or a mapping: the option is named.

NumPy's and torch's own answer, that the truth of an array is ambiguous, names nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbus import Bus, Consumer, Producer
from shmbus.engines import EngineFleet, VllmServer
from shmbus.pool import PoolReader
from shmbus.tensors import TensorChannel
from shmbus.tensors.config import CudaCarrier
from shmbus.weights import (
    Fp8BlockSource,
    ModuleSource,
    ParamMeta,
    WeightPublisher,
    WeightSubscriber,
    probe_carriers,
    share_model,
)
from shmbus.weights.manifest import Manifest
from trainer_adapter import (
    ExtraField,
    FieldNames,
    OnlineDataHandler,
    group_advantages,
    pack,
    varlen_attention,
)
from trainer_adapter.adapters.openenv import EpisodeRecord, put_episode
from trainer_adapter.corrections import importance_correction
from trainer_adapter.losses import aggregate_loss, kl_estimate

WAIT_S = 20.0
ODD = [np.zeros(2), torch.zeros(2), np.array(["auto", "wait"])]
odd_values = pytest.mark.parametrize("odd", ODD, ids=["numbers", "tensor", "texts"])

ROW = torch.zeros(1, 3)
MASK = torch.ones(1, 3, dtype=torch.bool)


def source() -> ModuleSource:
    return ModuleSource(torch.nn.Linear(2, 2))


def attend(backend: Any) -> Any:
    heads = torch.zeros(4, 2, 8)
    borders = torch.tensor([0, 4], dtype=torch.int32)
    return varlen_attention(heads, heads, heads, borders, borders, 4, 4, backend=backend)


Call = Callable[[str, Any], Any]

# By the bus's name and the odd value: what is called, and what the message has to name.
CALLS: dict[str, tuple[Call, str]] = {
    "subscriber carrier": (lambda bus, x: WeightSubscriber(bus, carrier=x), "carrier"),
    "subscriber verify": (lambda bus, x: WeightSubscriber(bus, verify=x), "verify"),
    "subscriber directory": (lambda bus, x: WeightSubscriber(bus, directory=x), "directory"),
    "publisher bus": (lambda bus, x: WeightPublisher(x, source()), "bus"),
    "publisher source": (lambda bus, x: WeightPublisher(bus, x), "source"),
    "publisher carrier": (lambda bus, x: WeightPublisher(bus, source(), carrier=x), "carrier"),
    "publisher when_held": (
        lambda bus, x: WeightPublisher(bus, source(), when_held=x),
        "when_held",
    ),
    "probe size": (lambda bus, x: probe_carriers(size=x), "size"),
    "probe directory": (lambda bus, x: probe_carriers(directory=x), "directory"),
    "source slices": (lambda bus, x: ModuleSource(torch.nn.Linear(2, 2), slices=x), "slices"),
    "fp8 source": (lambda bus, x: Fp8BlockSource(x), "source"),
    "fp8 only": (lambda bus, x: Fp8BlockSource(source(), only=x), "only"),
    "share slices": (lambda bus, x: share_model(bus, torch.nn.Linear(2, 2), slices=x), "slices"),
    "manifest aliases": (
        lambda bus, x: Manifest.plan([ParamMeta("a", "float32", (2,))], aliases=x),
        "aliases",
    ),
    "manifest model": (
        lambda bus, x: Manifest.plan([ParamMeta("a", "float32", (2,))], model=x),
        "model",
    ),
    "pool device": (lambda bus, x: PoolReader(bus, "odd", device=x), "device"),
    "channel carrier": (lambda bus, x: TensorChannel.create(bus, carrier=x), "carrier"),
    "cuda kind": (lambda bus, x: CudaCarrier(device="cuda:0", kind=x), "kind"),
    "cuda colocated": (lambda bus, x: CudaCarrier(device="cuda:0", colocated=x), "colocated"),
    "fleet mode": (
        lambda bus, x: EngineFleet([VllmServer("http://127.0.0.1:1")], bus=bus, mode=x),
        "mode",
    ),
    "handler layout": (lambda bus, x: OnlineDataHandler(bus, layout=x), "layout"),
    "handler max_wait": (lambda bus, x: OnlineDataHandler(bus, max_wait=x), "max_wait"),
    "handler malformed": (lambda bus, x: OnlineDataHandler(bus, malformed=x), "malformed"),
    "handler truncated": (lambda bus, x: OnlineDataHandler(bus, truncated=x), "truncated"),
    "handler extra_fields": (
        lambda bus, x: OnlineDataHandler(bus, extra_fields=x),
        "extra_fields",
    ),
    "extra kind": (
        lambda bus, x: OnlineDataHandler(bus, extra_fields={"y": ExtraField(kind=x)}),
        "extra_fields: 'y'",
    ),
    "extra field": (
        lambda bus, x: OnlineDataHandler(
            bus, extra_fields={"y": ExtraField(kind="token", field=x)}
        ),
        "extra_fields: 'y': field",
    ),
    "fields": (
        lambda bus, x: OnlineDataHandler(bus, fields=FieldNames(loss_mask=x)),
        "fields: loss_mask",
    ),
    "advantages std": (lambda bus, x: group_advantages([1.0, 2.0], [2], std=x), "std"),
    "loss normalisation": (lambda bus, x: aggregate_loss(ROW, MASK, normalisation=x), "normalis"),
    "kl kind": (lambda bus, x: kl_estimate(ROW, ROW, MASK, kind=x), "kind"),
    "level": (lambda bus, x: importance_correction(ROW, ROW, MASK, level=x), "level"),
    "mode": (lambda bus, x: importance_correction(ROW, ROW, MASK, mode=x), "mode"),
    "backend": (lambda bus, x: attend(x), "backend"),
}


@odd_values
@pytest.mark.parametrize("call", CALLS)
def test_an_array_is_refused_by_the_options_name(call: str, odd: Any, bus: Bus) -> None:
    function, named = CALLS[call]
    with pytest.raises((TypeError, ValueError), match=rf"^{named}\w*: expected .*, got "):
        function(bus.name, odd)


@odd_values
@pytest.mark.parametrize("option", ["slots", "max_slots", "when_held", "directory"])
def test_a_checkpoints_options_are_named(
    option: str, odd: Any, bus_name: str, tmp_path: Path
) -> None:
    options = {"carrier": "checkpoint", "directory": tmp_path, option: odd}
    with pytest.raises((TypeError, ValueError), match=rf"{option}.*, got "):
        WeightPublisher(bus_name, source(), **options)


@odd_values
def test_loading_and_waiting_name_what_they_were_given(odd: Any, bus_name: str) -> None:
    with WeightPublisher(bus_name, source()) as publisher:
        publication = publisher.publish_async(1)
        publication.wait(WAIT_S)
        for wait in (publication.wait, publication.wait_copied):
            with pytest.raises(TypeError, match=r"^timeout: expected seconds"):
                wait(odd)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=WAIT_S) as found:
            for option in ("strict", "cast", "slices"):
                with pytest.raises(TypeError, match=rf"^{option}: expected .*, got "):
                    found.load_into(torch.nn.Linear(2, 2), **{option: odd})


@odd_values
def test_a_batchs_memory_is_named(odd: Any, bus: Bus) -> None:
    with Producer(bus.name) as producer:
        producer.put_group("q", [{"tokens": [1], "score": 1.0}, {"tokens": [2], "score": 0.0}])
    with Consumer(bus.name) as consumer:
        groups = consumer.take(1, timeout=WAIT_S)
        with pytest.raises(TypeError, match=r"^memory: expected a BatchMemory, got "):
            pack(groups, memory=odd)


@odd_values
@pytest.mark.parametrize("option", ["rewards", "unfinished"])
def test_an_episodes_options_are_named(option: str, odd: Any, bus: Bus) -> None:
    with (
        Producer(bus.name) as producer,
        pytest.raises(TypeError, match=f"^{option}: expected "),
    ):
        put_episode(
            producer, EpisodeRecord(), instance_id="q", group_size=1, index=0, **{option: odd}
        )
