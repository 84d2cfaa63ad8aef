"""Wrong arguments of public calls: one table a promise, and one test for each.

- What a call is given is a parameter of the public surface. What comes is TypeError, ValueError or
  one of `shmbus`' own errors, never an error from the inside.
- An array where an option takes a word, a flag or a mapping, and what is no number where one is
  expected, is refused by the option's name. NumPy's and torch's own answer, that the truth of an
  array is ambiguous, names nothing.
- A handle that was refused its arguments holds no bus.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer
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
from trainer_adapter.adapters.atropos import AtroposTrainer
from trainer_adapter.adapters.skyrl import GenerateByBus
from trainer_adapter.adapters.torchtitan import ShmbusBatches
from trainer_adapter.adapters.trl import ShmbusRollouts, scored
from trainer_adapter.corrections import (
    cispo_loss,
    gspo_loss,
    importance_correction,
    overlong_penalty,
)
from trainer_adapter.losses import aggregate_loss, kl_estimate, policy_loss

TOKENS = np.arange(4, dtype=np.int32)


class Number(enum.IntEnum):
    """An int that is no exact int."""

    ONE = 1


class Text(str):
    """A str that is no exact str."""


#: What a user may pass by mistake, or a hostile colleague on purpose.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400), 0.0, -0.0,
    1.5, float("nan"), float("inf"), -float("inf"), "", "a", "x" * 256, "é" * 128, "\ud800", "\0",
    Text("sub"), b"", b"a", bytearray(b"x"), (), (1,), (1, 2), (2, 1), ("a", "b"), [], [1],
    [[1], [2, 3]], [None], {}, {"a": 1}, {1: 2}, set(), {1}, object(), object, int, len, Number.ONE,
    np.int32(1), np.uint64(2**64 - 1), np.float32(1.5), np.bool_(True), np.str_("s"), np.array(1),
    np.array([1, 2]), np.array([]), np.array("a"), np.datetime64("2020-01-01"),
    np.timedelta64(1, "s"),
    np.zeros(1, [("a", "i4")]), 1 + 2j, decimal.Decimal("1.5"), datetime.datetime(2026, 1, 1),
    range(3), memoryview(b"abc"), Ellipsis, NotImplemented, Exception("x"),
]  # fmt: skip
#: The same for a name of the call that is at fault: what is found there is one of these.
OWN_ERRORS = (TypeError, ValueError, shmbus.ShmbusError)

Call = Callable[[Any], object]


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, "1MiB", max_producers=4) as handle:
        yield handle


@pytest.fixture
def handles(bus_name: str) -> Iterator[tuple[Bus, Producer, Feeder]]:
    with (
        Bus.create(bus_name, "4MiB", max_producers=4) as bus,
        Producer(bus_name) as producer,
        Feeder(bus_name) as feeder,
    ):
        yield bus, producer, feeder


def faults(call: Call, values: list[Any] = VALUES) -> list[str]:
    """What a call lets through that is not its own error, or says by a codec's words."""
    found = []
    for value in values:
        try:
            call(value)
        except UnicodeError as error:
            found.append(f"{value!a:.40}: {type(error).__name__}: {error}")
        except OWN_ERRORS:
            continue
        except Exception as error:
            found.append(f"{value!a:.40}: {type(error).__name__}: {error}")
    return found


def test_names_of_samples_are_checked_alike_wherever_they_are_given(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    """`put` says what an id and a round are; begin, abandon, cancelled and request agree."""
    _, producer, feeder = handles

    def refused(call: Call, value: object) -> type[Exception] | None:
        try:
            call(value)
        except (TypeError, ValueError) as error:
            return type(error)
        except shmbus.BusFullError:
            return None
        return None

    kept = {"group_size": 2, "index": 0, "timeout": 0}
    asked = {"group_size": 2, "prompt": TOKENS, "timeout": 0}
    for name, first, others in (
        (
            "instance_id",
            lambda v: producer.put(v, **kept),
            (
                lambda v: producer.cancelled(v, round=1),
                lambda v: feeder.request(v, **asked),
            ),
        ),
        (
            "round",
            lambda v: producer.put("e", round=v, **kept),
            (
                lambda v: producer.cancelled("e", round=v),
                lambda v: feeder.request("e", round=v, **asked),
            ),
        ),
    ):
        for value in VALUES:
            expected = refused(first, value)
            for other in others:
                assert refused(other, value) is expected, (name, value)


@pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning")  # NumPy's, of an "a"
def test_calls_of_a_producer_have_no_error_from_the_inside(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    _, producer, feeder = handles

    def resize(value: Any) -> None:
        slot = producer.reserve("a", group_size=1, index=0, fields={"x": ("int32", 4)}, timeout=0)
        try:
            slot.resize("x", value)
        finally:
            slot.abort()

    def reserve(fields: Any) -> None:
        producer.reserve("a", group_size=1, index=0, fields=fields, timeout=0).abort()

    calls: dict[str, Call] = {
        "is_wanted": producer.requests.is_wanted,
        "release": producer.requests.release,
        "requests.answer": lambda v: producer.requests.answer(v, tokens=TOKENS),
        "requests.fail": lambda v: producer.requests.fail(v, "why"),
        "resize": resize,
        "fields": lambda v: reserve({"x": ("int32", v)}),
        "dtype": lambda v: reserve({"x": (v, 4)}),
        "field": lambda v: reserve({"x": v}),
        "prompt_need": lambda v: feeder.request("n", group_size=2, need=v, round=1, timeout=0),
    }
    assert {name: found for name, call in calls.items() if (found := faults(call))} == {}


def test_options_of_handles_have_no_error_from_the_inside(
    handles: tuple[Bus, Producer, Feeder],
) -> None:
    bus, producer, _ = handles
    name = producer.name
    used = [v for v in VALUES if v is not None]
    calls: dict[str, Call] = {
        option: lambda v, option=option: Consumer(name, daemon=False, **{option: v}).close()
        for option in (
            "group_timeout",
            "retry_timeout",
            "max_policy_lag",
            "label",
            "sample_retries",
        )
    }
    calls |= {
        "wait": lambda v: Producer(name, wait=v).close(),
        "producer's label": lambda v: Producer(name, label=v).close(),
        "max_producers": lambda v: Bus.ensure(name, max_producers=v).close(),
        "extent_bytes": lambda v: Bus.ensure(name, extent_bytes=v).close(),
        "capacity": lambda v: Bus.ensure(name, v).close(),
        "policy_version": lambda v: setattr(bus, "policy_version", v),
    }
    assert {name: found for name, call in calls.items() if (found := faults(call, used))} == {}


@pytest.mark.parametrize("value", [np.array([1, 2]), int, np.bool_(True), True, "1", 1.0])
def test_what_is_no_int_is_named_with_its_argument(
    handles: tuple[Bus, Producer, Feeder], value: object
) -> None:
    _, producer, _ = handles
    for name in ("group_size", "index", "round", "need", "policy_version"):
        sample: dict[str, Any] = {"group_size": 2, "index": 0, name: value, "tokens": TOKENS}
        with pytest.raises(TypeError, match=f"{name}: expected an int, got "):
            producer.put("a", timeout=0, **sample)
    with pytest.raises(TypeError, match="max_policy_lag: expected an int, got "):
        Consumer(producer.name, max_policy_lag=value)  # type: ignore[arg-type]


# -- arrays, and what is no number -------------------------------------------------------------

WAIT_S = 20.0
ARRAYS = [np.zeros(2), torch.zeros(2), np.array(["auto", "wait"])]


def source() -> ModuleSource:
    return ModuleSource(torch.nn.Linear(2, 2))


def attend(backend: Any) -> Any:
    heads = torch.zeros(4, 2, 8)
    borders = torch.tensor([0, 4], dtype=torch.int32)
    return varlen_attention(heads, heads, heads, borders, borders, 4, 4, backend=backend)


#: By the bus's name and the array: what is called, and what the message has to name.
BY_ARRAYS: dict[str, tuple[Callable[[str, Any], object], str]] = {
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


@pytest.mark.parametrize("call", BY_ARRAYS)
def test_an_array_is_refused_by_the_options_name(call: str, bus: Bus) -> None:
    function, named = BY_ARRAYS[call]
    for array in ARRAYS:
        with pytest.raises((TypeError, ValueError), match=rf"^{named}\w*: expected .*, got "):
            function(bus.name, array)


@pytest.mark.parametrize("option", ["slots", "max_slots", "when_held", "directory"])
def test_a_checkpoints_options_are_named(option: str, bus_name: str, tmp_path: Path) -> None:
    for array in ARRAYS:
        options = {"carrier": "checkpoint", "directory": tmp_path, option: array}
        with pytest.raises((TypeError, ValueError), match=rf"{option}.*, got "):
            WeightPublisher(bus_name, source(), **options)


def test_loading_and_waiting_name_what_they_were_given(bus_name: str) -> None:
    with WeightPublisher(bus_name, source()) as publisher:
        publication = publisher.publish_async(1)
        publication.wait(WAIT_S)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=WAIT_S) as found:
            for array in ARRAYS:
                for wait in (publication.wait, publication.wait_copied):
                    with pytest.raises(TypeError, match=r"^timeout: expected seconds"):
                        wait(array)
                for option in ("strict", "cast", "slices"):
                    with pytest.raises(TypeError, match=rf"^{option}: expected .*, got "):
                        found.load_into(torch.nn.Linear(2, 2), **{option: array})


def test_pack_names_a_wrong_option(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", [{"tokens": [1], "score": 1.0}, {"tokens": [2], "score": 0.0}])
        groups = consumer.take(1, timeout=WAIT_S)
        for array in ARRAYS:
            with pytest.raises(TypeError, match=r"^memory: expected a BatchMemory, got "):
                pack(groups, memory=array)


ROW, MASK = torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)
BORDERS = torch.tensor([0, 1, 4])
QKV = [torch.zeros(4, 2, 8)] * 3

#: What a number is not, or not one that a float holds.
NO_NUMBERS: list[Any] = [
    10**400, -(10**400), math.nan, -1, "a", b"a", [], {}, object(), int, 1j, np.array([1, 2]),
]  # fmt: skip

BY_NUMBERS: dict[str, Callable[[Any], object]] = {
    "eps": lambda v: group_advantages([1.0, 2.0], eps=v),
    "scale": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, 3, 3, scale=v),
    "max_q": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, v, 3),
    "max_k": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, 3, v),
    "window_size": lambda v: varlen_attention(*QKV, BORDERS, BORDERS, 3, 3, window_size=(v, 0)),
    "clip_low": lambda v: policy_loss(ROW, ROW, ROW, MASK, clip_low=v),
    "clip_high": lambda v: policy_loss(ROW, ROW, ROW, MASK, clip_high=v),
    "denominator": lambda v: aggregate_loss(ROW, MASK, denominator=v),
    "high": lambda v: importance_correction(ROW, ROW, MASK, high=v),
    "low": lambda v: cispo_loss(ROW, ROW, ROW, MASK, low=v),
    "clip_low of gspo": lambda v: gspo_loss(ROW, ROW, ROW, MASK, cu_seqlens=BORDERS, clip_low=v),
    "longest": lambda v: overlong_penalty([3], longest=v, buffer=1),
    "buffer": lambda v: overlong_penalty([3], longest=4, buffer=v),
}


@pytest.mark.parametrize("name", BY_NUMBERS)
def test_a_number_that_is_none_is_refused_by_its_name(name: str) -> None:
    for value in NO_NUMBERS:
        if name in ("scale", "window_size") and isinstance(value, int) and value == -1:
            continue  # a number like others
        with pytest.raises((TypeError, ValueError), match=name.partition(" ")[0]):
            BY_NUMBERS[name](value)


# -- handles ------------------------------------------------------------------------------------

OF_CONSUMER: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"skip_zero_variance": "no"}, TypeError, "skip_zero_variance: expected True or False"),
    ({"daemon": "yes"}, TypeError, "daemon: expected True or False"),
    ({"max_policy_lag": -1}, ValueError, "max_policy_lag: expected 0 or more, got -1"),
    ({"sample_retries": None}, TypeError, "sample_retries: expected an int"),
    ({"retry_timeout": None}, TypeError, "retry_timeout: expected seconds"),
    ({"label": 3}, TypeError, "label: expected a str or None, got int"),
    ({"label": "a\0b"}, ValueError, "label: expected text without NUL"),
    ({"world_size": 2, "daemon": False}, ValueError, "daemon=False: .* leave daemon out"),
]

OF_PRODUCER: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"checksum": "no"}, TypeError, "checksum: expected True or False, got str"),
    ({"label": b"x"}, TypeError, "label: expected a str or None, got bytes"),
    ({"label": "a\0b"}, ValueError, "label: expected text without NUL"),
]

OF_HANDLER: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tokens_per_batch": 1, "groups_per_batch": 1}, ValueError, "got both"),
    ({"tokens_per_batch": 0}, ValueError, "tokens_per_batch: expected 1 or more, got 0"),
    ({"groups_per_batch": -1}, ValueError, "groups_per_batch: expected 1 or more, got -1"),
    ({"groups_per_batch": 1.0}, TypeError, "groups_per_batch: expected an int, got float"),
    ({"tokens_per_batch": True}, TypeError, "tokens_per_batch: expected an int, got bool"),
    ({"rank": 2, "world_size": 2}, ValueError, "rank: expected 0 to 1, got 2"),
    ({"world_size": 0}, ValueError, "world_size: expected 1 or more, got 0"),
    ({"world_size": None}, TypeError, "world_size: expected an int, got NoneType"),
    ({"world_size": torch.ones(2)}, TypeError, "world_size: expected an int, got Tensor"),
    ({"prefetch": np.array([1, 2])}, TypeError, "prefetch: expected an int, got ndarray"),
    ({"max_wait": 10**400}, ValueError, "max_wait: expected seconds .* that a float can hold"),
    ({"max_lag": 1}, TypeError, "'max_lag'; did you mean 'max_policy_lag'"),
    ({"batch_size": 4}, TypeError, "mean 'groups_per_batch' or 'tokens_per_batch'\\?"),
    ({"advantage": "grpo"}, TypeError, "'advantage'; did you mean 'advantages'\\?"),
    ({"max_staleness": 4}, TypeError, "'max_staleness'; did you mean 'max_policy_lag'\\?"),
    ({"group_per_batch": 4}, TypeError, "did you mean 'groups_per_batch'"),
    ({"rewards": sum}, TypeError, "'rewards'; did you mean 'score_group'"),
    ({"num_generations": 8}, TypeError, "expected one of bus, tokens_per_batch, .*daemon"),
    ({"layout": "ragged"}, ValueError, "layout: expected .*'ragged'"),
    ({"malformed": "keep"}, ValueError, "malformed: expected .*'keep'"),
    ({"advantages": "ppo"}, ValueError, "advantages: expected .*'ppo'"),
    ({"advantages": None}, ValueError, "advantages: expected .*None"),
    ({"max_wait": -1}, ValueError, "max_wait: expected .*-1"),
    ({"max_wait": float("nan")}, ValueError, "max_wait: expected .*nan"),
    ({"max_wait": True}, TypeError, "max_wait: expected seconds or None, got bool"),
    ({"max_wait": "soon"}, TypeError, "max_wait: expected seconds or None, got str"),
    ({"fields": {"tokens": "t"}}, TypeError, "fields: expected .*FieldNames.*dict"),
    ({"device": "abacus"}, ValueError, "device: expected .*'abacus'"),
    ({"device": "cuda:99"}, ValueError, "device: expected .* CUDA devices .*'cuda:99'"),
    ({"device": None}, TypeError, "device: expected .* got NoneType"),
    ({"progress": 3}, TypeError, "progress: expected a bool or a file, got int"),
    ({"duplicate": "keep"}, ValueError, "duplicate: expected .*'keep'"),
    ({"no_such": 1}, TypeError, "no_such"),
]


@pytest.mark.parametrize(
    ("handle", "options", "error", "match"),
    [
        *((Consumer, *row) for row in OF_CONSUMER),
        *((Producer, *row) for row in OF_PRODUCER),
        *((OnlineDataHandler, *row) for row in OF_HANDLER),
    ],
)
def test_wrong_options_are_named_at_once_and_hold_no_bus(
    handle: Any, options: dict[str, Any], error: type[Exception], match: str, bus: Bus
) -> None:
    with pytest.raises(error, match=match):
        handle(bus.name, **options)
    assert bus.stats().producers == []
    assert bus.stats().collector_pid == 0


class Packer:
    """torchtitan's Batcher, with a batch a group."""

    def add_training_samples(self, *, training_sample_group: Any) -> Any:
        return training_sample_group


TYPES: Any = ModuleType("types")
for _name in ("RolloutTurnID", "TrainingSample", "TrainingSampleGroup"):
    setattr(TYPES, _name, type(_name, (SimpleNamespace,), {}))


OF_ADAPTERS: list[tuple[Callable[[str], object], str]] = [
    (lambda bus: AtroposTrainer(bus, 2.0), "batch_size: expected an int, got float"),
    (lambda bus: AtroposTrainer(bus, True), "batch_size: expected an int, got bool"),
    (lambda bus: AtroposTrainer(bus, 2, keep_batches="1"), "keep_batches: expected an int"),
    (lambda bus: AtroposTrainer(bus, 2, minimums={1: math.nan}), "share of 0 to 1 for env"),
    (lambda bus: AtroposTrainer(bus, 2, minimums=5), "minimums: expected the shares"),
    (lambda bus: AtroposTrainer(bus, 2, url="host:1"), "url: expected http://HOST:PORT"),
    (lambda bus: GenerateByBus(bus, timeout=math.nan), "timeout: expected 0 or more seconds"),
    (lambda bus: GenerateByBus(bus, timeout=None), "timeout: expected seconds, got NoneType"),
    (lambda bus: GenerateByBus(bus, logprobs="no"), "logprobs: expected True or False"),
    (lambda bus: GenerateByBus(bus, split="eval"), "split: training and evaluation"),
    (lambda bus: ShmbusRollouts(bus, timeout="5"), "timeout: expected seconds, got str"),
    (lambda bus: ShmbusRollouts(bus, split="eval"), "split: training and evaluation"),
    (lambda bus: ShmbusBatches(bus, Packer(), advantages="x", types=TYPES), "'rloo' or 'none'"),
    (lambda bus: ShmbusBatches(bus, None, types=TYPES), "batcher: expected torchtitan's Batch"),
    (lambda bus: scored("1e"), "reward: expected a finite number, NaN or None, got '1e'"),
    (lambda bus: scored(None, [1]), "meta: expected a mapping or None, got list"),
]


@pytest.mark.parametrize(("make", "match"), OF_ADAPTERS)
def test_a_wrong_argument_is_named_where_the_adapter_is_made(
    make: Callable[[str], object], match: str, bus: Bus
) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make(bus.name)
