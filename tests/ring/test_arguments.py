"""What the public names take: NumPy's integers, no text for a flag, and errors that say which."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import segments_named, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="1MiB", max_producers=4) as handle:
        yield handle


def sample(index: int = 0, **more: Any) -> dict[str, Any]:
    return {"instance_id": "a", "group_size": 2, "index": index, "x": np.arange(3), **more}


def test_integers_of_numpy_are_integers(bus_name: str) -> None:
    with (
        Bus.create(bus_name, np.int64(1 << 20), max_producers=np.int32(3)) as bus,  # type: ignore[arg-type]
        Producer(bus_name) as producer,
        Consumer(
            bus_name,
            max_policy_lag=np.int64(1),  # type: ignore[arg-type]
            group_timeout=np.float32(30),  # type: ignore[arg-type]
            rank=np.int64(0),  # type: ignore[arg-type]
        ) as consumer,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        assert (bus.capacity, bus.max_producers) == (1 << 20, 3)
        producer.put_many([sample(0), sample(1)])
        (group,) = consumer.take(np.int64(1), timeout=np.float32(5))  # type: ignore[arg-type]
        group.ack()
        assert consumer.take(1 << 70, timeout=0) == []


def test_a_long_label_is_cut_between_two_characters(bus: Bus) -> None:
    with Producer(bus.name, label="ü" * 100):
        (info,) = bus.stats().producers
    assert info.label == "ü" * 23


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"x": (None, 3)}, TypeError, "field 'x': expected a dtype, got None"),
        ({"x": ("int32", 1 << 40)}, shmbus.RecordTooLargeError, "needs 4398046511104"),
        ({"x": ("int64", 1 << 70)}, shmbus.RecordTooLargeError, "needs 9444732965739290427392"),
        ({"x": ("int64", (1 << 70, 0))}, shmbus.RecordTooLargeError, "1180591620717411303424"),
    ],
)
def test_a_reservation_of_nonsense_is_refused_with_what_it_asked_for(
    bus: Bus, fields: Any, error: type[Exception], match: str
) -> None:
    with Producer(bus.name) as producer:
        with pytest.raises(error, match=match):
            producer.reserve("a", group_size=1, index=0, fields=fields)
        assert producer.stats().aborted == 0


@pytest.mark.parametrize(
    ("items", "error", "match"),
    [
        (None, TypeError, "put_many: expected an iterable of dicts"),
        ([sample(0), 3], TypeError, "put_many: item 1: expected a dict .* got int"),
        ([sample(0), sample(1, score=float("nan"))], ValueError, "put_many: item 1: score"),
        ([sample(0), {"index": 0}], TypeError, "put_many: item 1: missing the argument"),
        ([sample(0, x=np.zeros(1 << 20))], shmbus.RecordTooLargeError, "put_many: item 0: bus"),
    ],
)
def test_put_many_names_the_bad_item_and_puts_none(
    bus: Bus, items: Any, error: type[Exception], match: str
) -> None:
    with Producer(bus.name) as producer:
        with pytest.raises(error, match=match):
            producer.put_many(items)
        assert producer.stats().committed == 0


def test_an_error_within_the_iterable_is_its_own(bus: Bus) -> None:
    with (
        Producer(bus.name) as producer,
        pytest.raises(ZeroDivisionError, match=r"^[a-z]+ division"),
    ):
        producer.put_many(1 // 0 for _ in range(2))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda p: p.fail("a", -1, "why"), ValueError, "index: expected 0 or more, got -1"),
        (lambda p: p.put(**sample(meta="\ud800")), ValueError, "meta: expected text that UTF-8"),
        (lambda p: p.put(**sample(), timeout=0 * "x"), TypeError, "timeout: expected seconds"),
    ],
)
def test_a_producer_call_names_the_argument_that_is_wrong(
    bus: Bus, call: Callable[[Producer], object], error: type[Exception], match: str
) -> None:
    with Producer(bus.name) as producer:
        with pytest.raises(error, match=match):
            call(producer)
        assert producer.stats().committed == 0


def test_a_reason_with_surrogates_is_still_a_reason(bus: Bus) -> None:
    with (
        Producer(bus.name) as producer,
        Consumer(bus.name, sample_retries=1, retry_backoff=(0, 0)) as consumer,
    ):
        producer.fail("a", 0, "no utf-8: \udcff", group_size=2)
        assert consumer.take(timeout=0) == []
        (wanted,) = producer.requests.retries()
        assert wanted.reason == "no utf-8: ?"


@pytest.mark.parametrize("reason", ["x" * 120, "ü" * 60, "a\0b"])
def test_a_reason_that_does_not_fit_pauses_nobody(bus: Bus, reason: str) -> None:
    with pytest.raises(ValueError, match="reason: expected at most 119 bytes"):
        bus.pause(reason)
    assert bus.paused is None


def test_an_unknown_field_is_told_the_ones_that_are_there(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        with producer.reserve("a", group_size=1, index=0, fields={"x": ("i4", 2)}) as slot:
            with pytest.raises(KeyError, match=r"'y': this reservation has the fields \('x',\)"):
                slot["y"]
            with pytest.raises(TypeError, match=r"write into its view: slot\['x'\]\[:\]"):
                slot["x"] = np.zeros(2, np.int32)  # type: ignore[index]
            slot["x"][:] = 7
        (group,) = consumer.take(timeout=5)
        with pytest.raises(KeyError, match=r"'y': this trajectory has the fields \('x',\)"):
            group[0]["y"]
        assert group[0]["x"].tolist() == [7, 7]
        group.give_back()
        with pytest.raises(shmbus.ProtocolError, match="cannot ack group 'a', since it is given b"):
            group.ack()


def test_a_wait_of_nothing_is_0_s(bus: Bus) -> None:
    bus.pause("weights")
    with Producer(bus.name) as producer, pytest.raises(shmbus.BusFullError, match="for 0 s;"):
        producer.put(**sample(), timeout=0)


def test_a_forked_child_that_leaves_the_block_leaves_the_bus(bus_name: str) -> None:
    with Bus.create(bus_name, "64KiB") as bus:
        child = os.fork()
        if child == 0:
            bus.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert segments_named(bus_name) != []
    assert segments_named(bus_name) == []


def test_the_end_of_a_block_spares_another_bus_of_the_same_name(bus_name: str) -> None:
    with Bus.create(bus_name, "64KiB"):
        shmbus.unlink(bus_name)
        second = Bus.create(bus_name, "64KiB")
    assert segments_named(bus_name) != []
    second.unlink()
    second.close()


def test_a_bus_pickles_by_name(bus: Bus) -> None:
    with pickle.loads(pickle.dumps(bus)) as copy:
        assert (copy.name, copy.created_unix_ns) == (bus.name, bus.created_unix_ns)
    assert segments_named(bus.name) != []


@pytest.mark.parametrize(
    ("title", "label"),
    [
        ("ray::rollout-7:Rollout.__init__", "rollout-7:Rollout"),
        ("ray::Rollout.look", "Rollout"),
        ("ray::sample", "sample"),
        ("python", "default_worker.py"),
    ],
)
def test_a_process_of_ray_is_named_by_its_actor(
    bus: Bus, tmp_path: Path, title: str, label: str
) -> None:
    script = tmp_path / "default_worker.py"
    script.write_text(
        "import sys\nfrom shmbus import Producer\n"
        "with Producer(sys.argv[1]) as producer:\n    sys.stdin.read()\n"
    )
    # As Ray does it: the process's title is in the place of its command line. An environment would
    # be found by that.
    child = subprocess.Popen(
        [title, str(script), bus.name],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        try:
            rows = wait_until(lambda: bus.stats().producers, what="the producer")
        finally:
            child.communicate()
    assert [row.label.rpartition("@")[0] for row in rows] == [label]


def test_a_copy_takes_finite_scores_and_names_what_it_refuses(
    bus: Bus,
) -> None:
    with Producer(bus.name) as producer:
        producer.put("a", group_size=1, index=0, tokens=np.arange(4))
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(timeout=30.0)
        [copy] = group.copy()
        group.ack()
    for value, error in ((10**400, ValueError), (float("nan"), ValueError), ((), TypeError)):
        with pytest.raises(error, match="score: expected"):
            copy.score = value
    copy.score = np.float32(0.5)  # type: ignore[assignment]
    assert copy.score == 0.5


def test_a_request_is_made_by_the_bus_only() -> None:
    with pytest.raises(TypeError, match=r"requests\.next"):
        shmbus.Request()
