"""What is refused, by which exception, in which words, and that a refusal leaves nothing behind."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from operator import setitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, segments_named
from test_style import ROOT

import shmbus
from shmbus import Bus, Consumer, Group, Producer, errors
from shmbus_ext import _core

TREE = {
    "BusBusyError": (), "BusClosedError": (), "BusExistsError": (), "BusFullError": (),
    "BusNotFoundError": (), "BusRemovedError": (), "CapacityError": (ValueError,),
    "DaemonUnavailableError": (), "DamagedError": (), "DeviceMismatchError": (),
    "LayoutMismatchError": (), "PeerGoneError": (), "ProtocolError": (),
    "RecordTooLargeError": (ValueError,), "RecorderUnavailableError": (),
    "StallError": (), "UnscoredError": (ValueError,),
    "UnservedGroupError": (),
    "VersionUnknownError": (),
    "WaitTimeoutError": (TimeoutError,),
}  # fmt: skip

#: Bases of what packages raise; each hands its own out.
BASES = ("ChannelError", "WeightsError")

X = np.arange(20, dtype=np.int32)
PAGE = np.zeros(3500, np.uint8)


class Ends(SimpleNamespace):
    """Both ends of a small bus, and a group and a reservation between them."""

    bus: Bus
    producer: Producer
    consumer: Consumer
    group: Group
    slot: shmbus.Reservation


@pytest.fixture
def ends(bus_name: str) -> Iterator[Ends]:
    """Sixteen extents of a page each."""
    with (
        Bus.create(bus_name, capacity=65536, max_producers=4) as bus,
        Producer(bus_name) as producer,
        Consumer(bus_name) as consumer,
    ):
        producer.put("held", group_size=1, index=0, x=X)
        [group] = consumer.take(1, 10)
        slot = producer.reserve("r", group_size=1, index=0, fields={"x": ("i4", (4, 2))})
        yield Ends(bus=bus, producer=producer, consumer=consumer, group=group, slot=slot)


def fill(producer: Producer) -> None:
    with pytest.raises(shmbus.BusFullError):
        for number in range(100):
            producer.put(f"fill{number}", group_size=1, index=0, x=PAGE, timeout=0)


# --- names and tree


def test_every_public_name_is_there() -> None:
    for name in shmbus.__all__:
        assert getattr(shmbus, name) is not None
    assert shmbus.__version__.count(".") == 2


def test_every_error_is_a_shmbus_error_and_hangs_where_the_tree_says() -> None:
    drawn = re.findall(r"([A-Z][A-Za-z]+Error)  ", errors.__doc__ or "")
    assert sorted(drawn) == sorted([*TREE, *BASES])
    assert issubclass(shmbus.ShmbusError, Exception)
    assert not issubclass(shmbus.ShmbusError, (ValueError, TypeError, OSError))
    for name, more in TREE.items():
        error = getattr(shmbus, name)
        assert error.__bases__ == (shmbus.ShmbusError, *more), name
        assert error.__doc__
    assert shmbus.BusFullError("full").accepted == 0


def test_no_error_of_shmbus_is_left_out_of_the_public_names() -> None:
    found = {
        name for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }  # fmt: skip
    public = {name for name in shmbus.__all__ if name.endswith("Error")}
    assert found == public | set(BASES)


def test_an_error_exists_once_so_that_except_catches_it_everywhere() -> None:
    found = [
        node.name
        for package in ("shmbus", "trainer_adapter")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    ]
    assert len(found) > 20
    assert sorted(found) == sorted(set(found))


def test_an_error_of_a_peer_says_which_and_travels() -> None:
    error = shmbus.PeerGoneError("gone", rank=1, side="sender", pid=7)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.side, again.pid) == ("gone", 1, "sender", 7)


# --- names and sizes


@pytest.mark.parametrize("name", ["", "a/b", "/", "a\0b", "x" * 201, "\N{SNOWMAN}" * 67])
@pytest.mark.parametrize("use", [Bus.create, Bus.open, shmbus.unlink, Producer, Consumer])
def test_other_names_are_refused_everywhere(use: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(ValueError, match="bus name: expected 1 to 200 bytes"):
        use(name)
    for wrong in (b"bytes", 5, None, Path("x")):
        with pytest.raises(TypeError, match=f"expected a str, got {type(wrong).__name__}"):
            use(wrong)


@pytest.mark.parametrize(
    "size",
    [0, -1, 4095, "0", "-1MiB", "", "MiB", "1e6", "1 PiB", "1MiBs", "nan", "inf", "1,000", "1_000",
     2**63, 2**64, 10**400, "9" * 400, "9" * 400 + "GiB"],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_and_leaves_nothing(bus_name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=r"capacity: expected"):
        Bus.create(bus_name, capacity=size)
    assert segments_named(bus_name) == []


@pytest.mark.parametrize("size", [1.5, True, b"1MiB", [1]])
def test_a_size_of_another_type_is_refused(bus_name: str, size: Any) -> None:
    with pytest.raises(TypeError, match=f"capacity: expected.*got {type(size).__name__}"):
        Bus.create(bus_name, capacity=size)
    assert segments_named(bus_name) == []


@pytest.mark.parametrize("too_much", [4096, 1 << 30, 1 << 45])
def test_what_does_not_fit_into_dev_shm_is_an_error_at_creation(
    bus_name: str, too_much: int
) -> None:
    room = os.statvfs("/dev/shm")
    size = room.f_bavail * room.f_frsize + too_much
    with pytest.raises(shmbus.CapacityError, match=r"[GT]iB.* /dev/shm has .* free"):
        Bus.create(bus_name, capacity=size)
    assert segments_named(bus_name) == []
    assert issubclass(shmbus.CapacityError, ValueError)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_producers": 0}, ValueError),
        ({"max_producers": -1}, ValueError),
        ({"max_producers": _core.MAX_PRODUCERS + 1}, ValueError),
        ({"max_producers": 2**40}, ValueError),
        ({"max_producers": 1.0}, TypeError),
        ({"max_producers": True}, TypeError),
        ({"extent_bytes": -4096}, ValueError),
        ({"extent_bytes": 1000}, ValueError),
        ({"extent_bytes": 1 << 30}, ValueError),
        ({"extent_bytes": 1 << 70}, ValueError),
        ({"extent_bytes": "4KiB"}, TypeError),
    ],
)
def test_bad_geometry_is_refused_and_leaves_nothing(
    bus_name: str, options: dict[str, Any], error: type[Exception]
) -> None:
    [name] = options
    with pytest.raises(error, match=name):
        Bus.create(bus_name, capacity="1MiB", **options)
    assert segments_named(bus_name) == []


@pytest.mark.parametrize("use", [Bus.open, shmbus.unlink, Producer, Consumer])
def test_a_bus_that_is_not_there_is_not_found(use: Callable[[str], Any], bus_name: str) -> None:
    with pytest.raises(shmbus.BusNotFoundError, match=f"there is no bus '{bus_name}'"):
        use(bus_name)


# --- arguments of put, put_many, aput and reserve

#: Overrides of good arguments, the error, and what its message must hold.
BAD: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"instance_id": None}, TypeError, ["instance_id", "str", "NoneType"]),
    ({"instance_id": b"a"}, TypeError, ["instance_id", "str", "bytes"]),
    ({"instance_id": ""}, ValueError, ["instance_id", "1 to 255", "got 0"]),
    ({"instance_id": "a" * 256}, ValueError, ["instance_id", "1 to 255", "got 256"]),
    ({"instance_id": "\N{SNOWMAN}" * 86}, ValueError, ["instance_id", "1 to 255", "got 258"]),
    ({"instance_id": "\ud800"}, ValueError, ["instance_id"]),
    ({"group_size": 0}, ValueError, ["group_size", f"1 to {_core.MAX_GROUP_SIZE}", "got 0"]),
    ({"group_size": -1}, ValueError, ["group_size", "got -1"]),
    ({"group_size": _core.MAX_GROUP_SIZE + 1}, ValueError, ["group_size", "16385"]),
    ({"group_size": 2**80}, ValueError, ["group_size", str(2**80)]),
    ({"group_size": 2.0}, TypeError, ["group_size", "int", "float"]),
    ({"group_size": "2"}, TypeError, ["group_size", "int", "str"]),
    ({"group_size": None}, TypeError, ["group_size", "int", "NoneType"]),
    ({"index": -1}, ValueError, ["index", "got -1"]),
    ({"index": 2}, ValueError, ["index", "0 to 1", "group_size=2", "got 2"]),
    ({"index": 2**70}, ValueError, ["index", str(2**70)]),
    ({"index": 0.0}, TypeError, ["index", "int", "float"]),
    ({"index": np.float32(1)}, TypeError, ["index", "int", "float32"]),
    ({"score": "1"}, TypeError, ["score", "float", "str"]),
    ({"score": []}, TypeError, ["score", "float", "list"]),
    ({"score": 1j}, TypeError, ["score", "float", "complex"]),
    ({"score": float("nan")}, ValueError, ["score", "finite", "nan"]),
    ({"score": float("-inf")}, ValueError, ["score", "finite", "-inf"]),
    ({"score": 10**400}, ValueError, ["score", "finite"]),
    ({"score": np.zeros(2)}, TypeError, ["score", "float", "ndarray"]),
    ({"policy_version": -1}, ValueError, ["policy_version", "got -1"]),
    ({"policy_version": 2**63}, ValueError, ["policy_version", str(2**63)]),
    ({"policy_version": 1.5}, TypeError, ["policy_version", "int", "float"]),
    ({"policy_version": None}, TypeError, ["policy_version", "int", "NoneType"]),
    ({"policy_version": (5, 3)}, ValueError, ["the oldest and then the newest", "(5, 3)"]),
    ({"policy_version": (1, 2, 3)}, ValueError, ["an int, or two", "(1, 2, 3)"]),
    ({"policy_version": ()}, ValueError, ["an int, or two"]),
    ({"policy_version": (0, 2**32)}, ValueError, ["at most 4294967295 later"]),
    ({"policy_version": (-1, 2)}, ValueError, ["policy_version", "got -1"]),
    ({"round": -1}, ValueError, ["round", "got -1"]),
    ({"round": 2**63}, ValueError, ["round", str(2**63)]),
    ({"round": "0"}, TypeError, ["round", "int", "str"]),
    ({"meta": object()}, TypeError, ["meta", "msgspec", "object"]),
    ({"meta": {"deep": [np.array([None])]}}, TypeError, ["meta", "ndarray"]),
    ({"meta": 2**64}, TypeError, ["meta", "int"]),
    ({"meta": "\ud800"}, ValueError, ["meta", "UTF-8"]),
]
BAD_PUT: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"x": [1, 2]}, TypeError, ["x", "array", "list", "np.asarray"]),
    ({"x": (1,)}, TypeError, ["x", "array", "tuple"]),
    ({"x": 5}, TypeError, ["x", "array", "int"]),
    ({"x": 5.0}, TypeError, ["x", "array", "float"]),
    ({"x": "text"}, TypeError, ["x", "array", "str"]),
    ({"x": b"bytes"}, TypeError, ["x", "array", "bytes"]),
    ({"x": None}, TypeError, ["x", "array", "NoneType"]),
    ({"x": np.array([object()])}, TypeError, ["x", "fixed size", "object"]),
    ({"x": np.array([(1, None)], "i4,O")}, TypeError, ["x", "fixed size"]),
    ({"rewards": 0.7}, TypeError, ["rewards", "did you mean score="]),
    ({"prompt_id": np.float32(7)}, TypeError, ["prompt_id", "did you mean instance_id="]),
    ({"version": np.asarray(7)}, TypeError, ["version", "did you mean policy_version="]),
    ({"timout": 0.7}, TypeError, ["timout", "did you mean timeout="]),
    ({"groupsize": 8.0}, TypeError, ["groupsize", "did you mean group_size="]),
    ({"n" * 256: X}, ValueError, ["n" * 256, "255 bytes"]),
    ({"": X}, ValueError, ["''", "1 to 255"]),
    ({f"f{i}": X for i in range(65)}, ValueError, ["at most 64 array fields"]),
    ({"x": np.zeros(60_000, np.uint8)}, shmbus.RecordTooLargeError, ["16384 bytes", "needs"]),
    ({"meta": "m" * 60_000}, shmbus.RecordTooLargeError, ["16384 bytes", "needs"]),
]
BAD_WAIT: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"timeout": -1}, ValueError, ["timeout", "0 or more", "-1"]),
    ({"timeout": -0.001}, ValueError, ["timeout", "0 or more"]),
    ({"timeout": float("nan")}, ValueError, ["timeout", "0 or more", "nan"]),
    ({"timeout": 10**400}, ValueError, ["timeout"]),
    ({"timeout": "1"}, TypeError, ["timeout", "seconds", "str"]),
    ({"timeout": 1j}, TypeError, ["timeout", "seconds", "complex"]),
]
BAD_FIELDS: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"fields": [("x", "i4", 3)]}, TypeError, ["fields", "mapping", "list"]),
    ({"fields": None}, TypeError, ["fields", "mapping", "NoneType"]),
    ({"fields": {5: ("i4", 3)}}, TypeError, ["fields", "str", "int"]),
    ({"fields": {"x": "i4"}}, TypeError, ["'x'", "(dtype, shape)", "'i4'"]),
    ({"fields": {"x": ("i4", 3, 4)}}, TypeError, ["'x'", "(dtype, shape)"]),
    ({"fields": {"x": ("i4", -1)}}, ValueError, ["'x'", "0 or more", "got -1"]),
    ({"fields": {"x": ("i4", 2.0)}}, TypeError, ["'x'", "int", "2.0"]),
    ({"fields": {"x": ("i4", (3, "4"))}}, TypeError, ["'x'", "int", "'4'"]),
    ({"fields": {"x": ("i4", True)}}, TypeError, ["'x'", "int", "True"]),
    ({"fields": {"x": ("i4", 2**62)}}, ValueError, ["'x'"]),
    ({"fields": {"x": ("O", 3)}}, TypeError, ["x", "fixed size", "object"]),
    ({"fields": {"x": ("no such", 3)}}, TypeError, ["x", "no such"]),
    ({"fields": {"x": ("i4", (1,) * 33)}}, ValueError, ["x", "32 dimensions", "33"]),
    ({"fields": {"score": ("i4", 3)}}, ValueError, ["'score'", "argument's name"]),
    ({"fields": {"": ("i4", 3)}}, ValueError, ["''", "1 to 255"]),
    ({"fields": {f"f{i}": ("i4", 3) for i in range(65)}}, ValueError, ["at most 64", "65"]),
    ({"fields": {"x": ("u1", 60_000)}}, shmbus.RecordTooLargeError, ["16384 bytes"]),
    ({"fields": {"x": ("i8", (2**31, 2**31))}}, shmbus.RecordTooLargeError, ["16384 bytes"]),
    ({"meta_room": -1}, ValueError, ["meta_room", "got -1"]),
    ({"meta_room": "9"}, TypeError, ["meta_room", "int", "str"]),
    ({"meta_room": 2**31}, ValueError, ["meta_room", "2 GiB"]),
    ({"meta_room": 2**30}, shmbus.RecordTooLargeError, ["16384 bytes"]),
]


def assert_refused(
    ends: Ends, use: Callable[[], Any], error: type[Exception], words: list[str]
) -> str:
    """The use raises that error with those words, and the bus is as it was and works."""
    before = ends.consumer.stats(), ends.producer.stats().committed
    with pytest.raises(error) as caught:
        use()
    message = str(caught.value)
    assert isinstance(caught.value, error)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} missing in: {message}"
    assert (ends.consumer.stats(), ends.producer.stats().committed) == before
    ends.producer.put("good", group_size=1, index=0, x=X, timeout=0)
    with ends.consumer.take(1, 10)[0] as group:
        assert group.instance_id == "good"
        assert np.array_equal(group[0]["x"], X)
    return message


def name_case(case: Any) -> str | None:
    # Without addresses: each process that runs a share of the tests must give the same names.
    return re.sub(r" at 0x\w+", "", repr(case))[:40] if isinstance(case, dict) else ""


@pytest.mark.parametrize("verb", ["put", "put_many", "aput"])
@pytest.mark.parametrize(("given", "error", "words"), BAD + BAD_PUT, ids=name_case)
def test_bad_arguments_of_put_are_refused(
    ends: Ends, verb: str, given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    arguments = {"instance_id": "a", "group_size": 2, "index": 0, **given}
    good = {"instance_id": "a", "group_size": 2, "index": 1}
    if verb == "put":
        assert_refused(ends, lambda: ends.producer.put(**arguments, timeout=0), error, words)
    elif verb == "put_many":
        items = [good, arguments, good]
        assert_refused(ends, lambda: ends.producer.put_many(items, timeout=0), error, words)
    else:
        # Refused at once, so that no event loop is needed.
        step = ends.producer.aput(**arguments, timeout=0)
        assert_refused(ends, lambda: step.send(None), error, words)


@pytest.mark.parametrize(("given", "error", "words"), BAD + BAD_WAIT + BAD_FIELDS, ids=name_case)
def test_bad_arguments_of_reserve_are_refused(
    ends: Ends, given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    arguments = {"instance_id": "a", "group_size": 2, "index": 0, "fields": {"x": ("i4", 3)}}
    arguments |= {"timeout": 0, **given}
    assert_refused(ends, lambda: ends.producer.reserve(**arguments), error, words)


@pytest.mark.parametrize(("given", "error", "words"), BAD_WAIT, ids=name_case)
def test_bad_timeouts_are_refused_everywhere(
    ends: Ends, given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: ends.producer.put("a", group_size=2, index=0, x=X, **given),
        lambda: ends.producer.put_many([], **given),
        lambda: ends.producer.aput("a", group_size=2, index=0, x=X, **given).send(None),
        lambda: ends.consumer.take(1, **given),
    ]
    for use in uses:
        assert_refused(ends, use, error, words)


def test_bad_arguments_of_a_producers_other_calls_are_refused(ends: Ends) -> None:
    producer: Any = ends.producer
    uses: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
        (
            lambda: producer.aput_many(7).send(None),
            TypeError,
            ["items", "iterable of dicts", "int"],
        ),
        (lambda: producer.wait_ready(below=2.0).send(None), ValueError, ["below", "at most 1"]),
        (lambda: producer.wait_ready(below="1").send(None), TypeError, ["below", "number", "str"]),
        (lambda: producer.put_group("q", [{"x": X}] * 2, need=3), ValueError, ["need", "got 3"]),
        (lambda: producer.fail("a", 0, 5), TypeError, ["reason", "int"]),
        (lambda: producer.fail("a", "0", "x"), TypeError, ["index", "str"]),
        (lambda: producer.fail("a", -1, "x"), ValueError, ["index", "got -1"]),
        (lambda: producer.fail("a", 4, "x", group_size=4), ValueError, ["index", "group_size=4"]),
        (lambda: producer.requests.retries(0), ValueError, ["limit", "1 or more"]),
        (lambda: producer.requests.retries("all"), TypeError, ["limit", "int"]),
    ]
    for use, error, words in uses:
        assert_refused(ends, use, error, words)


def test_a_call_without_what_it_needs_says_what_is_missing(ends: Ends) -> None:
    needed = {"instance_id": "a", "group_size": 2, "index": 0}
    for name in needed:
        rest = {key: value for key, value in needed.items() if key != name}
        for use in (
            lambda rest=rest: ends.producer.put(x=X, **rest),
            lambda rest=rest: ends.producer.put_many([needed, {**rest, "x": X}]),
        ):
            assert_refused(ends, use, TypeError, [name])
    assert_refused(ends, lambda: ends.producer.put("a", 2, 0), TypeError, ["positional", "got 3"])
    assert_refused(ends, lambda: ends.producer.put("a", **needed), TypeError, ["instance_id"])


@pytest.mark.parametrize("items", [5, None, "text", [5], [["a", 2]], [{5: X}], {"a": 1}])
def test_put_many_wants_dicts(ends: Ends, items: Any) -> None:
    assert_refused(ends, lambda: ends.producer.put_many(items), TypeError, [])


def test_a_reservation_refuses_what_put_refuses_and_goes_on(ends: Ends) -> None:
    slot = ends.slot
    uses: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
        (lambda: setattr(slot, "score", "1"), TypeError, ["score", "float", "str"]),
        (lambda: setattr(slot, "score", float("nan")), ValueError, ["score", "finite", "nan"]),
        (lambda: setattr(slot, "score", 10**400), ValueError, ["score"]),
        (lambda: delattr(slot, "score"), TypeError, ["score"]),
        (lambda: setattr(slot, "meta", object()), TypeError, ["meta", "msgspec", "object"]),
        (lambda: setattr(slot, "meta", "m" * 5000), ValueError, ["meta", "1024", "meta_room"]),
        (lambda: slot["y"], KeyError, ["y", "this reservation has the fields ('x',)"]),
        (lambda: setitem(slot, "x", X), TypeError, ["write into its view: slot['x'][:]"]),
        (lambda: slot[0], KeyError, ["0"]),  # type: ignore[index]
        (lambda: slot.resize("y", 1), KeyError, ["y"]),
        (lambda: slot.resize("x", 5), ValueError, ["x", "0 to 4", "got 5"]),
        (lambda: slot.resize("x", -1), ValueError, ["x", "0 to 4", "got -1"]),
        (lambda: slot.resize("x", 1.0), TypeError, ["float"]),  # type: ignore[arg-type]
    ]
    for use, error, words in uses:
        assert_refused(ends, use, error, words)
    slot["x"][:] = 5
    slot.commit()
    assert np.array_equal(ends.consumer.take(1, 10)[0][0]["x"], np.full((4, 2), 5))


@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_a_reservation_ends_once(ends: Ends, verb: str) -> None:
    slot = ends.slot
    getattr(slot, verb)()
    assert slot.ended
    ends.consumer.ack(ends.consumer.take(9, 0))
    uses: list[Callable[[], Any]] = [
        slot.commit, slot.abort, lambda: slot["x"], lambda: slot.resize("x", 1), slot.__enter__,
        lambda: setattr(slot, "score", 1.0), lambda: setattr(slot, "meta", {}),
    ]  # fmt: skip
    for use in uses:
        assert_refused(ends, use, shmbus.BusClosedError, ["committed or aborted"])
    assert ends.consumer.stats().committed == 1 + (verb == "commit") + len(uses)


# --- arguments of a consumer


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"group_timeout": 0}, ValueError, ["group_timeout", "more than 0", "0"]),
        ({"group_timeout": -1.0}, ValueError, ["group_timeout", "-1.0"]),
        ({"group_timeout": float("nan")}, ValueError, ["group_timeout", "nan"]),
        ({"group_timeout": "1"}, TypeError, ["group_timeout", "seconds", "str"]),
        ({"group_timeout": True}, TypeError, ["group_timeout", "seconds", "bool"]),
        ({"on_timeout": "explode"}, ValueError, ["on_timeout", "'wait', 'drop'", "'explode'"]),
        ({"on_timeout": None}, TypeError, ["on_timeout", "'wait', 'drop'", "NoneType"]),
        ({"on_overflow": "explode"}, ValueError, ["on_overflow", "'partial'", "'explode'"]),
        ({"on_overflow": 1}, TypeError, ["on_overflow", "'partial'", "int"]),
        ({"duplicate": "keep"}, ValueError, ["duplicate", "'drop' or 'error'", "'keep'"]),
        ({"duplicate": True}, TypeError, ["duplicate", "'drop' or 'error'", "bool"]),
        ({"max_policy_lag": -1}, ValueError, ["max_policy_lag", "-1"]),
        ({"max_policy_lag": 1.5}, TypeError, ["max_policy_lag", "int", "float"]),
        ({"max_stash_bytes": 0}, ValueError, ["max_stash_bytes", "0"]),
        ({"max_stash_bytes": "1MiB"}, TypeError, ["max_stash_bytes", "int", "str"]),
        ({"retry_backoff": 0.5}, TypeError, ["retry_backoff", "two numbers"]),
        ({"retry_backoff": (0.5, "30")}, TypeError, ["retry_backoff", "seconds", "str"]),
        ({"retry_backoff": (-1, 30)}, ValueError, ["retry_backoff", "0 <= first <= at most"]),
        ({"retry_backoff": (31, float("inf"))}, ValueError, ["retry_backoff", "31 and inf"]),
        ({"sample_retries": -1}, ValueError, ["sample_retries", "-1"]),
        ({"retry_timeout": 0}, ValueError, ["retry_timeout", "0"]),
        ({"on_failure": "wait"}, ValueError, ["on_failure", "'wait'"]),
        ({"on_stall": "warn"}, ValueError, ["on_stall", "'log', 'raise'", "'warn'"]),
        ({"on_stall": 5}, TypeError, ["on_stall", "callable", "int"]),
        ({"stall_timeout": True}, TypeError, ["stall_timeout", "seconds", "bool"]),
        ({"stall_timeout": 0}, ValueError, ["stall_timeout", "more than 0"]),
        ({"wait": True}, TypeError, ["wait", "seconds or None", "bool"]),
        ({"wait": -1}, ValueError, ["wait", "0 or more seconds"]),
        ({"no_such": 1}, TypeError, ["no_such"]),
        ({"label": 5}, TypeError, ["str", "int"]),
    ],
    ids=name_case,
)
def test_bad_arguments_of_a_consumer_are_refused_and_hold_no_bus(
    bus_name: str, given: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with Bus.create(bus_name, capacity=65536):
        with pytest.raises(error) as caught:
            Consumer(bus_name, **given)
        assert [word for word in words if word not in str(caught.value)] == []
        Consumer(bus_name).close()
        with pytest.raises(TypeError, match="str"):
            Producer(bus_name, label=5)  # type: ignore[arg-type]
        with Bus.open(bus_name) as bus:
            assert bus.stats().producers == []


def test_bad_arguments_of_a_consumers_methods_are_refused(ends: Ends) -> None:
    consumer = ends.consumer
    uses: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
        (lambda: consumer.take(0), ValueError, ["max_groups", "1 or more", "got 0"]),
        (lambda: consumer.take(-1), ValueError, ["max_groups", "got -1"]),
        (lambda: consumer.take(1.0), TypeError, ["max_groups", "int", "float"]),  # type: ignore[arg-type]
        (lambda: consumer.take(True), TypeError, ["max_groups", "int", "bool"]),
        (lambda: consumer.take(n=4), TypeError, ["Consumer.take()", "'n'"]),  # type: ignore[call-arg]
        (lambda: consumer.atake(0).send(None), ValueError, ["max_groups", "1 or more"]),
        (lambda: consumer.atake(1, -0.5).send(None), ValueError, ["timeout", "0 or more"]),
        *(
            (lambda v=verb, w=wrong: v(w), TypeError, ["Group", type(wrong).__name__])
            for wrong in (5, None, 1.5)
            for verb in (consumer.ack, consumer.drop, consumer.give_back)
        ),
        (lambda: consumer.ack([5]), TypeError, ["Group", "int"]),  # type: ignore[list-item]
        (lambda: ends.group[0]["y"], KeyError, ["y"]),
        (lambda: ends.group[0].shape("y"), KeyError, ["y"]),
        (lambda: ends.group[5], IndexError, []),
    ]
    for use, error, words in uses:
        assert_refused(ends, use, error, words)
    assert ends.group[0].get("y") is None
    assert ends.group[0].get("y", 5) == 5
    assert 5 not in ends.group[0]


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        (-1, ValueError, ["policy_version", "-1"]),
        (2**63, ValueError, ["policy_version", str(2**63)]),
        (1.0, TypeError, ["policy_version", "int", "float"]),
        (Decimal(1), TypeError, ["policy_version", "int", "Decimal"]),
        (None, TypeError, ["policy_version", "int", "NoneType"]),
    ],
)
def test_a_policy_version_is_an_int_from_0(
    ends: Ends, version: Any, error: type[Exception], words: list[str]
) -> None:
    for holder in (ends.bus, ends.consumer):
        assert_refused(ends, lambda h=holder: setattr(h, "policy_version", version), error, words)
        holder.policy_version = np.int32(7)
        assert ends.producer.policy_version == 7
        ends.bus.policy_version = 0


# --- leases

VERBS: dict[str, Callable[[Group], None]] = {
    "acknowledged": Group.ack, "given_back": Group.give_back, "dropped": Group.drop,
}  # fmt: skip


@pytest.mark.parametrize("first", VERBS)
@pytest.mark.parametrize("then", VERBS)
def test_a_delivered_group_ends_once(ends: Ends, first: str, then: str) -> None:
    before = ends.consumer.stats()
    assert (ends.group.state, before.leased, before.groups_leased) == ("leased", 1, 1)
    VERBS[first](ends.group)
    assert ends.group.state == first
    ended = first.replace("_", " ")
    with pytest.raises(shmbus.ProtocolError, match=f"'held'.*{ended} already; each"):
        VERBS[then](ends.group)
    ledger = ends.consumer.stats()
    assert ledger.balanced
    assert (ledger.acknowledged, ledger.leased) == (first == "acknowledged", 0)
    assert ledger.stashed == (first == "given_back")
    assert ledger.dropped == ({"malformed": 1} if first == "dropped" else {})


def test_several_groups_end_in_their_order_up_to_the_first_that_is_not_leased(ends: Ends) -> None:
    for key in "abcd":
        ends.producer.put(key, group_size=1, index=0)
    a, b, c, d = ends.consumer.take(9, 10)
    b.ack()
    with pytest.raises(shmbus.ProtocolError, match="'b'"):
        ends.consumer.ack([a, b, c])
    assert [group.state for group in (a, c)] == ["acknowledged", "leased"]
    ends.consumer.ack(group for group in (c, d))
    assert ends.consumer.stats().acknowledged == 4


def test_a_group_of_another_consumer_is_refused(ends: Ends, bus_name: str) -> None:
    with Bus.create(f"{bus_name}.other", capacity=65536), Consumer(f"{bus_name}.other") as other:
        for verb in (other.ack, other.drop, other.give_back):
            assert_refused(ends, lambda v=verb: v(ends.group), shmbus.ProtocolError, ["another"])
        assert other.stats().balanced
    ends.group.ack()


def test_released_trajectories_say_so_and_keep_what_they_know(ends: Ends) -> None:
    ends.producer.put("a", group_size=1, index=0, x=X, meta={"m": 1})
    [[seen], [unseen]] = [ends.consumer.take(1, 10)[0], ends.group]
    assert seen.meta == {"m": 1}
    ends.consumer.ack([ends.group])
    ends.consumer.close()
    for use in (lambda: unseen["x"], lambda: unseen.get("x")):
        with pytest.raises(shmbus.BusClosedError, match=r"'held'\[0\] was acknowledged or dropped"):
            use()
    with pytest.raises(shmbus.BusClosedError, match=r"'a'\[0\].*its Consumer is closed"):
        _ = seen["x"]
    assert (unseen.released, seen.released) == (True, False)
    assert (seen.index, seen.instance_id, seen.meta) == (0, "a", {"m": 1})
    assert (seen.keys(), seen.shape("x"), "x" in seen) == (("x",), (20,), True)


# --- a full bus


def full_message(producer: Producer) -> str:
    with pytest.raises(shmbus.BusFullError) as caught:
        producer.put("a", group_size=1, index=0, x=PAGE, timeout=0)
    assert "is full: a record of 3.6 KiB needs 1 free" in str(caught.value)
    return str(caught.value)


def test_the_message_of_a_full_bus_names_who_holds_the_space(bus_name: str) -> None:
    with (
        Bus.create(bus_name, capacity=65536),
        Producer(bus_name, label="greedy") as greedy,
        Producer(bus_name, label="modest") as modest,
    ):
        modest.put("a", group_size=1, index=0, x=PAGE)
        fill(greedy)
        message = full_message(modest)
        assert "no consumer has ever read this bus: start one" in message
        assert f"56.0 KiB by greedy (pid {os.getpid()})" in message
        assert f"4.0 KiB by modest (pid {os.getpid()})" in message
        assert "4.0 KiB by the collector, for stragglers" in message
        with Consumer(bus_name, label="slow trainer") as consumer:
            held = consumer.take(99, 10)
            message = full_message(modest)
            assert f"pid {os.getpid()} (slow trainer) holds {len(held)} unackn" in message, message
            held.pop().give_back()
            message = full_message(modest)
            assert f"holds {len(held)} unackn" in message and "1 trajectory" in message, message
        assert "no consumer is attached now: start one" in full_message(modest)


def test_a_dead_consumer_is_not_said_to_hold_anything(ends: Ends, spawn: Spawner) -> None:
    ends.group.ack()
    ends.consumer.close()
    fill(ends.producer)
    child = spawn.script(
        "import sys, time, shmbus\n"
        "consumer = shmbus.Consumer(sys.argv[1])\n"
        "held = consumer.take(99, 10)\n"
        "print('took', flush=True)\n"
        "time.sleep(600)\n",
        ends.bus.name,
    )
    child.expect("took")
    assert f"pid {child.pid}" in full_message(ends.producer)
    child.kill()
    message = full_message(ends.producer)
    assert "no consumer is attached now" in message, message
    assert "ack()" not in message


def test_a_closed_producer_refuses_everything_but_its_counts(ends: Ends) -> None:
    producer = ends.producer
    producer.close()
    uses: list[Callable[[], Any]] = [
        lambda: producer.put("a", group_size=1, index=0),
        lambda: producer.put_many([{"instance_id": "a", "group_size": 1, "index": 0}]),
        lambda: producer.reserve("a", group_size=1, index=0, fields={}),
        lambda: producer.aput("a", group_size=1, index=0).send(None),
        lambda: producer.fail("a", 0, "x"),
        producer.next_round,
    ]
    for use in uses:
        with pytest.raises(shmbus.BusClosedError, match="closed; make a new one"):
            use()
    assert producer.closed
    assert producer.stats().committed == 1
    assert "closed" in repr(producer)
