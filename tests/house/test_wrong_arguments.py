"""Wrong arguments of public calls: a table and a test for each promise.

- The error is TypeError, ValueError or an error of `shmbus`, never an error from the inside.
- A refusal names the option, and its message shows the value or the value's type.
- A handle with refused arguments holds no bus.
"""

import datetime
import decimal
import enum
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import segments_named
from refusals import (
    ARRAY,
    ARRAYS,
    CHOICE,
    COUNT,
    FLAG,
    INT,
    NUMBER,
    POLICIES,
    SECONDS,
    TEXT,
    Wrong,
    let_through,
    of_type,
    of_value,
    refused,
)  # fmt: skip

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer
from shmbus.engines import EngineFleet, LoraFleet, VllmServer
from shmbus.pool import PoolReader
from shmbus.tensors import TensorChannel
from shmbus.tensors.carrier_types import CudaCarrier
from shmbus.weights import (
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
from trainer_adapter.corrections import importance_correction
from trainer_adapter.losses import aggregate_loss, kl_estimate, policy_loss

TOKENS = np.arange(4, dtype=np.int32)


class Number(enum.IntEnum):
    """An int subclass."""

    ONE = 1


class Text(str):
    """A str subclass."""


#: Values a user may pass by mistake, or a hostile colleague on purpose.
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
#: Errors of a call for its own arguments.
OWN_ERRORS = (TypeError, ValueError, shmbus.ShmbusError)

Call = Callable[[Any], object]


@pytest.fixture
def handles(bus_name: str) -> Iterator[tuple[Bus, Producer, Feeder]]:
    with (
        Bus.create(bus_name, "4MiB", max_producers=4) as bus,
        Producer(bus_name) as producer,
        Feeder(bus_name) as feeder,
    ):
        yield bus, producer, feeder


def faults(call: Call, values: list[Any] = VALUES) -> list[str]:
    """Return a call's foreign error, or an error in a codec's words."""
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


def test_sample_names_are_checked_alike_everywhere(handles: tuple[Bus, Producer, Feeder]) -> None:
    """`put` defines an id and a round; begin, abandon, cancelled and request agree."""
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
def test_producer_calls_have_no_inner_error(handles: tuple[Bus, Producer, Feeder]) -> None:
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


def test_handle_options_have_no_inner_error(handles: tuple[Bus, Producer, Feeder]) -> None:
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


WAIT_S = 20.0
ROW, MASK = torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)
BORDERS = torch.tensor([0, 1, 4])


def source() -> ModuleSource:
    return ModuleSource(torch.nn.Linear(2, 2))


def attend(**options: Any) -> object:
    given = {"max_q": 3, "max_k": 3, **options}
    return varlen_attention(*[torch.zeros(4, 2, 8)] * 3, BORDERS, BORDERS, **given)


def meta(**options: Any) -> object:
    return Manifest.plan([ParamMeta("a", "float32", (2,))], **options)


def with_extra(bus: str, **options: Any) -> object:
    return OnlineDataHandler(bus, extra_fields={"y": ExtraField(**{"kind": "token", **options})})


OPTIONS: dict[str, tuple[Callable[..., Any], dict[str, Wrong]]] = {
    "Consumer": (
        Consumer,
        POLICIES
        | {
            "on_overflow": CHOICE + of_type(1), "duplicate": CHOICE + of_type(True),
            "max_stash_bytes": INT + of_value(0), "on_stall": of_value("warn") + of_type(5),
            "stall_timeout": SECONDS + of_value(0), "wait": SECONDS, "daemon": FLAG,
            "label": TEXT + of_value("a\0b"), 
        },
    ),
    "Producer": (
        Producer, {"checksum": FLAG, "label": TEXT + of_value("a\0b"), "wait": SECONDS},
    ),
    "OnlineDataHandler": (
        OnlineDataHandler,
        {
            "tokens_per_batch": COUNT, "groups_per_batch": COUNT, "prefetch": INT + of_value(-1, 9),
            "world_size": COUNT + of_type(None), "rank": INT + of_value(2),
            "max_wait": SECONDS, "device": of_value("abacus", "cuda:99") + of_type(None),
            "layout": CHOICE, "malformed": CHOICE, "truncated": CHOICE, "duplicate": CHOICE,
            "advantages": CHOICE + of_value(None), "progress": of_type(3),
            "extra_fields": of_type(["x"], {3: "token"}) + ARRAY,
            "fields": of_type({"tokens": "t"}),
            "score_group": of_type(0.5),
            "pack_threads": COUNT + of_value(65), 
        },
    ),
    "extra_fields": (with_extra, {"field": ARRAY}),
    "the kind of extra_fields": (
        lambda bus, extra_fields: with_extra(bus, kind=extra_fields),
        {"extra_fields": ARRAY},
    ),
    "FieldNames": (
        lambda bus, **o: OnlineDataHandler(bus, fields=FieldNames(**o)), {"loss_mask": ARRAY},
    ),
    "WeightPublisher": (
        lambda place, **o: WeightPublisher(**{"bus": place, "source": source(), **o}),
        {
            "bus": ARRAY, "source": ARRAY, "carrier": CHOICE, "when_held": CHOICE, "digests": FLAG,
            "rank": INT, "world_size": INT, "slots": INT + of_value(-1, (1 << 32) + 2),
            "timeout": SECONDS + of_type(None), "label": TEXT,
            "device": of_value("abacus") + of_type(None),
        },
    ),
    "a checkpoint": (
        lambda bus, **o: WeightPublisher(
            bus, source(), **{"carrier": "checkpoint", "directory": "/tmp/none", **o}
        ),
        dict.fromkeys(("slots", "max_slots", "when_held", "directory"), ARRAY),
    ),
    "WeightSubscriber": (WeightSubscriber, {"carrier": CHOICE, "directory": ARRAY}),
    "probe_carriers": (lambda bus, **o: probe_carriers(**o), {"size": ARRAY, "directory": ARRAY}),
    "ModuleSource": (
        lambda bus, **o: ModuleSource(torch.nn.Linear(2, 2), **o), {"slices": ARRAY},
    ),
    "share_model": (
        lambda bus, **o: share_model(bus, torch.nn.Linear(2, 2), **o), {"slices": ARRAY},
    ),
    "Manifest": (lambda bus, **o: meta(**o), {"aliases": ARRAY, "model": ARRAY}),
    "PoolReader": (lambda bus, **o: PoolReader(bus, "odd", **o), {"device": ARRAY}),
    "TensorChannel": (
        TensorChannel.create,
        {
            "carrier": CHOICE, "slots": INT, "timeout": SECONDS + of_type(None), "label": TEXT,
            "specs": of_type(5), "device": of_value("abacus"),
            "max_bytes": of_value((1 << 64) + 4096),
        },
    ),
    "CudaCarrier": (
        lambda bus, **o: CudaCarrier(device="cuda:0", **o), {"kind": ARRAY, "colocated": ARRAY},
    ),
    **{
        kind.__name__: (
            lambda bus, kind=kind, **o: kind([VllmServer("http://127.0.0.1:1")], bus=bus, **o),
            {"timeout": SECONDS + of_value(0) + of_type(None), "quorum": INT + of_value(3)}
            | ({"mode": CHOICE, "clear_cache": FLAG} if kind is EngineFleet else {}),
        )
        for kind in (EngineFleet, LoraFleet)
    },
    "group_advantages": (
        lambda bus, **o: group_advantages([1.0, 2.0], **o), {"std": ARRAY, "eps": NUMBER},
    ),
    "varlen_attention": (
        lambda bus, **o: attend(**o),
        {
            "scale": NUMBER, "max_q": NUMBER + of_type(2.5) + of_value(-1, 2**31),
            "max_k": NUMBER + of_value(-1),
            "window_size": tuple(((value, 0), errors) for value, errors in NUMBER),
            "backend": CHOICE, "return_lse": FLAG, "enable_gqa": FLAG,
        },
    ),
    "policy_loss": (
        lambda bus, **o: policy_loss(ROW, ROW, ROW, MASK, **o),
        {"clip_low": NUMBER + of_value(-1, 1.5), "clip_high": NUMBER + of_value(-1)},
    ),
    "aggregate_loss": (
        lambda bus, **o: aggregate_loss(ROW, MASK, **o),
        {"normalisation": CHOICE, "denominator": NUMBER + of_value(-1)},
    ),
    "kl_estimate": (lambda bus, **o: kl_estimate(ROW, ROW, MASK, **o), {"kind": CHOICE}),
    "importance_correction": (
        lambda bus, **o: importance_correction(ROW, ROW, MASK, **o),
        {"mode": CHOICE, "high": NUMBER + of_value(-1, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", OPTIONS)
def test_a_wrong_option_is_refused_by_its_name_and_holds_no_bus(call: str, bus: Bus) -> None:
    function, options = OPTIONS[call]
    made = partial(function, bus.name)
    before = segments_named(bus.name)
    found = {name: let_through(made, name, wrong) for name, wrong in options.items()}
    assert {name: each for name, each in found.items() if each} == {}
    assert bus.stats().producers == []
    assert bus.stats().collector_pid == 0
    assert segments_named(bus.name) == before


def test_ints_of_a_sample_are_named(handles: tuple[Bus, Producer, Feeder]) -> None:
    def put(**changes: Any) -> None:
        sample: dict[str, Any] = {"group_size": 2, "index": 0, "tokens": TOKENS, **changes}
        handles[1].put("a", timeout=0, **sample)

    for name in ("group_size", "index", "round", "need", "policy_version"):
        assert let_through(put, name, INT, f"{name}: expected an int, got ") == []


def test_loading_and_waiting_name_what_they_were_given(bus_name: str) -> None:
    with WeightPublisher(bus_name, source()) as publisher:
        publication = publisher.publish_async(1)
        publication.wait(WAIT_S)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=WAIT_S) as found:
            for wait in (publication.wait, publication.wait_copied):
                assert let_through(wait, "timeout", of_type(*ARRAYS)) == []
            load = partial(found.load_into, torch.nn.Linear(2, 2))
            for option in ("strict", "cast", "slices"):
                assert let_through(load, option, of_type(*ARRAYS)) == []


def test_pack_names_a_wrong_option(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", [{"tokens": [1], "score": 1.0}, {"tokens": [2], "score": 0.0}])
        groups = consumer.take(1, timeout=WAIT_S)
        assert let_through(partial(pack, groups), "memory", of_type(*ARRAYS)) == []


TOGETHER: list[tuple[Any, dict[str, Any], str]] = [
    *((handle, {"no_such": 1}, "TypeError: no_such") for handle in (Consumer, OnlineDataHandler)),
    (Consumer, {"world_size": 2, "daemon": False}, "ValueError: daemon=False: .* leave daemon out"),
    *(
        (OnlineDataHandler, options, said)
        for options, said in (
            ({"tokens_per_batch": 1, "groups_per_batch": 1}, "ValueError: got both"),
            ({"rank": 2, "world_size": 2}, "ValueError: rank: expected 0 to 1, got 2"),
            ({"max_lag": 1}, "TypeError: did you mean 'max_policy_lag'"),
            ({"batch_size": 4}, r"TypeError: mean 'groups_per_batch' or 'tokens_per_batch'\?"),
            ({"advantage": "grpo"}, "TypeError: did you mean 'advantages'"),
            ({"max_staleness": 4}, "TypeError: did you mean 'max_policy_lag'"),
            ({"group_per_batch": 4}, "TypeError: did you mean 'groups_per_batch'"),
            ({"rewards": sum}, "TypeError: did you mean 'score_group'"),
            ({"num_generations": 8}, "TypeError: expected one of bus, tokens_per_batch"),
        )
    ),
]


@pytest.mark.parametrize(("handle", "options", "said"), TOGETHER)
def test_odd_pairs_are_named(handle: Any, options: dict[str, Any], said: str, bus: Bus) -> None:
    refused(said, partial(handle, bus.name, **options))
    assert bus.stats().collector_pid == 0
