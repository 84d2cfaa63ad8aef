"""Refusals: their exception and words, without traces."""

import ast
import inspect
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from operator import setitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, ends_of, segments_named
from refusals import INT, SECONDS, Wrong, let_through, of_type, of_value, tells
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

BASES = ("ChannelError", "WeightsError")

X = np.arange(20, dtype=np.int32)
PAGE = np.zeros(3500, np.uint8)


class Ends(SimpleNamespace):
    bus: Bus
    producer: Producer
    consumer: Consumer
    group: Group
    slot: shmbus.Reservation


@pytest.fixture
def ends(bus_name: str) -> Iterator[Ends]:
    bus = Bus.create(bus_name, capacity=65536, max_producers=4)
    with ends_of(bus) as (producer, consumer):
        producer.put("held", group_size=1, index=0, x=X)
        [group] = consumer.take(1, 10)
        slot = producer.reserve("r", group_size=1, index=0, fields={"x": ("i4", (4, 2))})
        yield Ends(bus=bus, producer=producer, consumer=consumer, group=group, slot=slot)


def fill(producer: Producer) -> None:
    with pytest.raises(shmbus.BusFullError):
        for number in range(100):
            producer.put(f"fill{number}", group_size=1, index=0, x=PAGE, timeout=0)


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


@pytest.mark.parametrize("name", ["", "a/b", "/", "a\0b", "x" * 201, "\N{SNOWMAN}" * 67, "a.sock"])
@pytest.mark.parametrize("use", [Bus.create, Bus.open, shmbus.unlink, Producer, Consumer])
def test_other_names_are_refused_everywhere(use: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(ValueError, match=r"bus name: expected (1 to 200 bytes|a name that)"):
        use(name)
    for wrong in (b"bytes", 5, None, Path("x")):
        with pytest.raises(TypeError, match=f"expected a str, got {type(wrong).__name__}"):
            use(wrong)


SIZES = of_type(1.5, True, b"1MiB", [1]) + of_value(
    0, -1, 4095, "0", "-1MiB", "", "MiB", "1e6", "1 PiB", "1MiBs", "nan", "inf", "1,000", "1_000",
    2**63, 2**64, 10**400, "9" * 400, "9" * 400 + "GiB",
)  # fmt: skip
GEOMETRY = {
    "capacity": SIZES,
    "max_producers": of_type(1.0, True) + of_value(0, -1, _core.MAX_PRODUCERS + 1, 2**40),
    "extent_bytes": of_type("4KiB") + of_value(-4096, 1000, 1 << 30, 1 << 70),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_bad_geometry_is_refused_and_leaves_nothing(bus_name: str, name: str) -> None:
    def create(**given: Any) -> None:
        Bus.create(bus_name, **{"capacity": "1MiB", **given})

    assert let_through(create, name, GEOMETRY[name]) == []
    assert segments_named(bus_name) == []


@pytest.mark.parametrize("too_much", [4096, 1 << 30, 1 << 45])
def test_a_bus_beyond_dev_shm_is_refused_at_creation(bus_name: str, too_much: int) -> None:
    room = os.statvfs("/dev/shm")
    size = room.f_bavail * room.f_frsize + too_much
    with pytest.raises(shmbus.CapacityError, match=r"[GT]iB.* /dev/shm has .* free"):
        Bus.create(bus_name, capacity=size)
    assert segments_named(bus_name) == []
    assert issubclass(shmbus.CapacityError, ValueError)


@pytest.mark.parametrize("use", [Bus.open, shmbus.unlink, Producer, Consumer])
def test_a_bus_that_is_not_there_is_not_found(use: Callable[[str], Any], bus_name: str) -> None:
    with pytest.raises(shmbus.BusNotFoundError, match=f"there is no bus '{bus_name}'"):
        use(bus_name)


#: A flag counts as a number of seconds here.
TIMEOUT = tuple(row for row in SECONDS if row[0] is not True)
BAD: dict[str, Wrong] = {
    "instance_id": of_type(None, b"a") + of_value("", "a" * 256, "\N{SNOWMAN}" * 86, "\ud800"),
    "group_size": of_type(2.0, "2", None) + of_value(0, -1, _core.MAX_GROUP_SIZE + 1, 2**80),
    "index": of_type(0.0, np.float32(1)) + of_value(-1, 2, 2**70),
    "score": of_type("1", [], 1j, np.zeros(2)) + of_value(math.nan, -math.inf, 10**400),
    "policy_version": of_type(1.5, None)
    + of_value(-1, 2**63, (5, 3), (1, 2, 3), (), (0, 2**32), (-1, 2)),
    "round": of_type("0") + of_value(-1, 2**63),
    "meta": of_type(object(), {"deep": [np.array([None])]}, 2**64) + of_value("\ud800"),
}
BAD_PUT: dict[str, list[tuple[dict[str, Any], type[Exception]]]] = {
    "x": [
        *(
            ({"x": value}, TypeError)
            for value in (
                [1, 2], (1,), 5, 5.0, "text", b"bytes", None, np.array([object()]),
                np.array([(1, None)], "i4,O"),
            )
        ),
    ],
    "did you mean score=": [({"rewards": 0.7}, TypeError)],
    "did you mean instance_id=": [({"prompt_id": np.float32(7)}, TypeError)],
    "did you mean policy_version=": [({"version": np.asarray(7)}, TypeError)],
    "did you mean timeout=": [({"timout": 0.7}, TypeError)],
    "did you mean group_size=": [({"groupsize": 8.0}, TypeError)],
    "n" * 256: [({"n" * 256: X}, ValueError)],
    "1 to 255": [({"": X}, ValueError)],
    "at most 64": [({f"f{i}": X for i in range(65)}, ValueError)],
    "16384 bytes": [
        ({"meta": "m" * 60_000}, shmbus.RecordTooLargeError),
        ({"x": np.zeros(60_000, np.uint8)}, shmbus.RecordTooLargeError),
    ],
}  # fmt: skip
BAD_FIELDS: dict[str, Wrong] = {
    "fields": of_type([("x", "i4", 3)], None, {5: ("i4", 3)}),
    "x": of_type(
        {"x": "i4"}, {"x": ("i4", 3, 4)}, {"x": ("i4", 2.0)}, {"x": ("i4", (3, "4"))},
        {"x": ("i4", True)}, {"x": ("O", 3)}, {"x": ("no such", 3)},
    )
    + of_value({"x": ("i4", -1)}, {"x": ("i4", 2**62)}, {"x": ("i4", (1,) * 33)}),
    "'score'": of_value({"score": ("i4", 3)}),
    "1 to 255": of_value({"": ("i4", 3)}),
    "at most 64": of_value({f"f{i}": ("i4", 3) for i in range(65)}),
    "16384 bytes": tuple(
        ({"x": spec}, (shmbus.RecordTooLargeError,))
        for spec in (("u1", 60_000), ("i8", (2**31, 2**31)))
    ),
}  # fmt: skip
MORE = {
    "meta_room": of_type("9") + of_value(-1, 2**31), "timeout": TIMEOUT,
}  # fmt: skip


def assert_refused(
    ends: Ends,
    use: Callable[[], Any],
    error: type[Exception] | tuple[type[Exception], ...],
    words: list[str],
) -> str:
    """The use raises the error with these words, and leaves the bus unchanged and working."""
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


def put_by(verb: str, producer: Producer, given: dict[str, Any]) -> None:
    arguments = {"instance_id": "a", "group_size": 2, "index": 0, **given}
    good = {"instance_id": "a", "group_size": 2, "index": 1}
    if verb == "put":
        producer.put(**arguments, timeout=0)
    elif verb == "put_many":
        producer.put_many([good, arguments, good], timeout=0)
    elif verb == "aput":
        # Refused at once, without need of an event loop.
        producer.aput(**arguments, timeout=0).send(None)
    else:
        fields = {"fields": {"x": ("i4", 3)}}
        producer.reserve(**{"timeout": 0, **fields, **arguments})


@pytest.mark.parametrize("verb", ["put", "put_many", "aput", "reserve"])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_put_and_reserve_are_refused(ends: Ends, verb: str, name: str) -> None:
    for value, kinds in BAD[name]:
        use = partial(put_by, verb, ends.producer, {name: value})
        assert tells(assert_refused(ends, use, kinds, [name]), value)


@pytest.mark.parametrize("verb", ["put", "put_many", "aput"])
@pytest.mark.parametrize("said", BAD_PUT)
def test_bad_array_fields_of_put_are_refused(ends: Ends, verb: str, said: str) -> None:
    for given, error in BAD_PUT[said]:
        assert_refused(ends, lambda g=given: put_by(verb, ends.producer, g), error, [said])


def test_bad_fields_of_reserve_are_refused(ends: Ends) -> None:
    rows = [("fields", said, wrong) for said, wrong in BAD_FIELDS.items()]
    rows += [(name, name, wrong) for name, wrong in MORE.items()]
    rows.append(("meta_room", "16384 bytes", ((2**30, (shmbus.RecordTooLargeError,)),)))
    for name, said, wrong in rows:
        for value, kinds in wrong:
            use = partial(put_by, "reserve", ends.producer, {name: value})
            assert_refused(ends, use, kinds, [said])


def test_bad_timeouts_are_refused_everywhere(ends: Ends) -> None:
    group = {"group_size": 2, "index": 0, "x": X}
    for value, kinds in TIMEOUT:
        uses: list[Callable[[], Any]] = [
            partial(ends.producer.put, "a", **group, timeout=value),
            partial(ends.producer.put_many, [], timeout=value),
            lambda v=value: ends.producer.aput("a", **group, timeout=v).send(None),
            partial(ends.producer.put_group, "q", [{"x": X}], timeout=value),
            partial(ends.producer.requests.next, value),
            partial(ends.consumer.take, 1, timeout=value),
        ]
        for use in uses:
            assert_refused(ends, use, kinds, ["timeout"])


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


def test_a_policy_version_is_an_int_from_0(ends: Ends) -> None:
    wrong = INT + of_type(Decimal(1), None) + of_value(-1, 2**63)
    for holder in (ends.bus, ends.consumer):
        for value, kinds in wrong:
            use = partial(setattr, holder, "policy_version", value)
            assert tells(assert_refused(ends, use, kinds, ["policy_version"]), value)
        holder.policy_version = np.int32(7)
        assert ends.producer.policy_version == 7
        ends.bus.policy_version = 0


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
        until="took",
    )
    assert f"pid {child.pid}" in full_message(ends.producer)
    child.kill()
    message = full_message(ends.producer)
    assert "no consumer is attached now" in message, message
    assert "ack()" not in message


def test_a_closed_producer_refuses_everything_but_its_counts(ends: Ends) -> None:
    producer = ends.producer
    producer.close()
    ends.bus.close()
    uses: list[Callable[[], Any]] = [
        lambda: producer.put("a", group_size=1, index=0),
        lambda: producer.put_many([{"instance_id": "a", "group_size": 1, "index": 0}]),
        lambda: producer.reserve("a", group_size=1, index=0, fields={}),
        lambda: producer.aput("a", group_size=1, index=0).send(None),
        lambda: producer.fail("a", 0, "x"),
        producer.next_round,
        lambda: producer.version_of("http://127.0.0.1:8000"),
        *(partial(getattr, producer, each) for each in ("paused", "policy_version", "cache_salt")),
        *(partial(getattr, ends.bus, each) for each in ("paused", "policy_version", "schema")),
    ]
    for use in uses:
        with pytest.raises(shmbus.BusClosedError, match="closed; make a new one"):
            use()
    assert producer.closed
    assert producer.stats().committed == 1
    assert "closed" in repr(producer)
