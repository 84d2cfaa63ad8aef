"""What the public names take: NumPy's integers, no text for a flag, and errors that say which."""

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ends_of, segments_named, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer


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


def test_an_error_within_the_iterable_is_its_own(bus: Bus) -> None:
    with (
        Producer(bus.name) as producer,
        pytest.raises(ZeroDivisionError, match=r"^[a-z]+ division"),
    ):
        producer.put_many(1 // 0 for _ in range(2))


def test_a_reason_with_surrogates_is_still_a_reason(bus: Bus) -> None:
    with ends_of(bus, sample_retries=1, retry_backoff=(0, 0)) as (producer, consumer):
        producer.fail("a", 0, "no utf-8: \udcff", group_size=2)
        assert consumer.take(timeout=0) == []
        (wanted,) = producer.requests.retries()
        assert wanted.reason == "no utf-8: ?"


@pytest.mark.parametrize("reason", ["x" * 120, "ü" * 60, "a\0b"])
def test_a_reason_that_does_not_fit_pauses_nobody(bus: Bus, reason: str) -> None:
    with pytest.raises(ValueError, match="reason: expected at most 119 bytes"):
        bus.pause(reason)
    assert bus.paused is None


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
