"""Splits: a group goes to who asks for its split, and is never trained on by accident."""

import logging
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, Spawner, client_of, ends_of

from shmbus import Bus, BusBusyError, BusFullError, Consumer, Producer, unlink
from shmbus.base.ledger import SplitCounts
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text
from shmbus.store import snapshot

Served = Callable[..., Daemon]
DATA = np.arange(50, dtype=np.int32)


def put(producer: Producer, key: str, size: int = 2, **more: Any) -> None:
    for index in range(size):
        producer.put(key, group_size=size, index=index, score=float(index), data=DATA, **more)


def taken(consumer: Consumer, **more: Any) -> list[tuple[str, str]]:
    groups = consumer.take(64, timeout=0.05, **more)
    consumer.ack(groups)
    return [(group.split, group.instance_id) for group in groups]


def test_a_group_goes_to_who_asks_for_its_split(bus: Bus, producer: Producer) -> None:
    put(producer, "a")
    put(producer, "a", split="eval")
    put(producer, "b", split="train")
    put(producer, "c", split="a label, 31 bytes: 12345678901")
    with Consumer(bus.name) as consumer:
        assert taken(consumer) == [("train", "a"), ("train", "b")]
        assert taken(consumer) == []
        assert taken(consumer, split="eval") == [("eval", "a")]
        label = "a label, 31 bytes: 12345678901"
        assert taken(consumer, split=label) == [(label, "c")]
        assert consumer.stats().balanced


def test_a_consumer_of_a_split_takes_that_one(bus: Bus, producer: Producer) -> None:
    put(producer, "a")
    put(producer, "b", split="eval")
    with Consumer(bus.name, split="eval") as consumer:
        assert taken(consumer) == [("eval", "b")]
        assert taken(consumer, split="train") == [("train", "a")]


@pytest.mark.parametrize("options", [{"max_stash_bytes": 1 << 20}, {"sample_retries": 1}])
def test_a_group_of_another_split_holds_up_no_take(
    bus: Bus, producer: Producer, options: dict[str, int]
) -> None:
    put(producer, "e", split="eval")
    with Consumer(bus.name, **options) as consumer:  # type: ignore[arg-type]
        assert taken(consumer) == []
        producer.fail("failing", 0, "why", group_size=2)
        put(producer, "a")
        assert taken(consumer) == [("train", "a")]
        assert taken(consumer) == []


def test_one_prompt_in_two_splits_is_two_groups(bus: Bus, producer: Producer) -> None:
    more: list[dict[str, Any]] = [{}, {"split": "eval"}, {"round": 4}, {"round": 4, "split": "x"}]
    for index in range(2):
        for options in more:
            producer.put("q", group_size=2, index=index, data=DATA, **options)
    with Consumer(bus.name) as consumer:
        groups = [g for label in ("train", "eval", "x") for g in consumer.take(split=label)]
        assert [(g.split, g.round, len(g)) for g in groups] == [
            ("train", None, 2), ("train", 4, 2), ("eval", None, 2), ("x", 4, 2),
        ]  # fmt: skip
        assert [g[0].key for g in groups] == ["q", ("q", 4), ("q", None, 1), ("q", 4, 2)]
        assert consumer.stats().dropped == {}


def test_an_old_group_and_one_of_equal_scores_are_dropped_for_training_only(
    bus: Bus, producer: Producer
) -> None:
    for split in ("train", "eval"):
        producer.put("old", group_size=1, index=0, data=DATA, policy_version=1, split=split)
        producer.put("equal", group_size=1, index=0, data=DATA, policy_version=9, split=split)
    with Consumer(bus.name, max_policy_lag=2, skip_zero_variance=True) as consumer:
        consumer.policy_version = 9
        assert taken(consumer) == []
        assert taken(consumer, split="eval") == [("eval", "old"), ("eval", "equal")]
        # Of equal scores, the old group of "train" too.
        assert consumer.stats().dropped == {"zero_variance": 2}


def test_a_group_of_any_split_has_its_deadline(bus: Bus, producer: Producer) -> None:
    for split in ("train", "eval"):
        producer.put("half", group_size=2, index=0, data=DATA, split=split)
    with Consumer(bus.name, group_timeout=0.01, on_timeout="partial") as consumer:
        time.sleep(0.02)
        assert taken(consumer) == [("train", "half")]
        assert taken(consumer, split="eval") == [("eval", "half")]


def test_each_split_has_its_own_counters(bus: Bus, producer: Producer) -> None:
    put(producer, "a")
    put(producer, "a", split="eval")
    put(producer, "b", 3, split="eval")
    producer.put("c", group_size=2, index=0, data=DATA, split="eval")
    with Consumer(bus.name) as consumer:
        assert taken(consumer) == [("train", "a")]
        first, second = consumer.take(split="eval")
        first.ack()
        splits = consumer.stats().splits
        assert splits["train"] == SplitCounts(acknowledged=2)
        assert splits["eval"] == SplitCounts(
            acknowledged=2, leased=3, stashed=1, groups_leased=1, groups_open=1
        )
        second.drop()
        assert consumer.stats().splits["eval"].dropped == 3
        status = read_status(bus.name)
        assert [(s.split, s.acknowledged, s.dropped) for s in status.splits] == [
            ("train", 2, 0), ("eval", 2, 3),
        ]  # fmt: skip


def test_a_split_that_nobody_takes_is_named_by_status_and_by_a_full_bus(bus_name: str) -> None:
    bus = Bus.create(bus_name, "64KiB", max_producers=2, extent_bytes=4096)
    with ends_of(bus) as (producer, consumer):
        put(producer, "t")
        with pytest.raises(BusFullError) as caught:
            for number in range(1000):
                put(producer, f"e{number}", 1, split="eval", timeout=0)
                if number == 20:
                    assert taken(consumer) == [("train", "t")]
        assert "split 'eval' has 21 complete groups: take" in str(caught.value)
        assert "take(split=...)" in str(caught.value)
        consumer.take(timeout=0)
        text = status_text(read_status(bus_name))
        assert re.search(r"split 'eval' has \d+ complete groups: take", text)
        assert f"Consumer('{bus_name}', split='eval')" in text
        while taken(consumer, split="eval"):
            pass
        put(producer, "t", timeout=10)
        assert taken(consumer) == [("train", "t")]


def test_a_bus_has_no_more_splits_than_it_can_count(bus: Bus, producer: Producer) -> None:
    for number in range(15):
        producer.put("q", group_size=1, index=0, data=DATA, split=f"s{number}")
    with pytest.raises(ValueError, match=r"split: a bus has at most 16.*'s14'.*'one more'"):
        producer.put("q", group_size=1, index=0, data=DATA, split="one more")
    with Consumer(bus.name) as consumer:
        with pytest.raises(ValueError, match="at most 16"):
            consumer.take(split="one more")
        assert taken(consumer, split="s14") == [("s14", "q")]
        assert consumer.stats().committed == 15


@pytest.mark.parametrize("split", ["", "x" * 32, "é" * 16, "a\0b", "\ud800"])
def test_a_label_that_cannot_be_one_is_refused(bus: Bus, producer: Producer, split: str) -> None:
    with pytest.raises(ValueError, match="split: expected"):
        producer.put("q", group_size=1, index=0, data=DATA, split=split)
    with pytest.raises(ValueError, match="split: expected"):
        Consumer(bus.name, split=split)
    with Consumer(bus.name) as consumer:
        with pytest.raises(ValueError, match="split: expected"):
            consumer.take(split=split)
        with pytest.raises(TypeError, match="split: expected a str, got int"):
            consumer.take(split=7)  # type: ignore[arg-type]
        assert consumer.stats().committed == 0


def test_a_failed_sample_is_asked_for_in_its_split(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name, sample_retries=1, retry_backoff=(0, 0)) as consumer:
        producer.put("q", group_size=2, index=0, data=DATA, split="eval", round=3)
        producer.fail("q", 1, "lost", group_size=2, split="eval", round=3)
        assert taken(consumer) == []
        [wanted] = producer.requests.retries()
        assert (wanted.split, wanted.round, wanted.index, wanted.need) == ("eval", 3, 1, 2)
        producer.put("q", group_size=2, index=1, data=DATA, split=wanted.split, round=3)
        assert taken(consumer, split="eval") == [("eval", "q")]
        assert consumer.stats().balanced


KILLED = """
import sys, numpy as np
from shmbus import Consumer, Producer
consumer = Consumer(sys.argv[1])
groups = consumer.take(64, split="eval", timeout=10)
consumer.ack(groups[0])
print("ready", flush=True)
sys.stdin.read()
import time; time.sleep(600)
"""


def test_what_a_dead_collector_held_of_a_split_is_delivered_again(
    bus: Bus, producer: Producer, spawn: Spawner
) -> None:
    for key in "abc":
        put(producer, key, split="eval")
    child = spawn.script(KILLED, bus.name, until="ready")
    child.send_signal(signal.SIGKILL)
    child.wait()
    with Consumer(bus.name) as consumer:
        assert taken(consumer) == []
        assert taken(consumer, split="eval") == [("eval", "b"), ("eval", "c")]
        assert consumer.stats().splits["eval"] == SplitCounts(acknowledged=6)


def test_the_daemon_leases_each_client_its_own_split(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "4MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as train:
        put(producer, "a")
        put(producer, "a", split="eval")
        with Consumer(bus_name, split="eval") as evaluation:
            assert client_of(evaluation)
            assert taken(evaluation) == [("eval", "a")]
            assert taken(train) == [("train", "a")]
            assert taken(evaluation) == taken(train) == []
            with pytest.raises(ValueError, match="with a daemon each split has its own"):
                train.take(split="eval")
            put(producer, "b", split="eval")
            assert len(evaluation.take(timeout=10)) == 1
        # It left without an acknowledgement.
        with Consumer(bus_name, split="eval") as successor:
            assert taken(successor) == [("eval", "b")]
            assert train.stats().splits["eval"].acknowledged == 4
        status = read_status(bus_name)
        assert status.daemon is not None
        assert [lease.split for lease in status.daemon.leases] == ["train"]


def test_evaluation_goes_on_beside_ranks_and_through_the_daemons_death(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "4MiB")
    with (
        Producer(bus_name) as producer,
        Consumer(bus_name, rank=0, world_size=2) as zero,
        Consumer(bus_name, split="eval") as evaluation,
        Consumer(bus_name, rank=1, world_size=2) as one,
    ):
        with pytest.raises(BusBusyError, match="ranks of a world of 2"):
            Consumer(bus_name)
        put(producer, "e", split="eval")
        for key in "ab":
            put(producer, key)
        assert taken(evaluation) == [("eval", "e")]
        assert {*taken(zero), *taken(one)} == {("train", "a"), ("train", "b")}
        put(producer, "f", split="eval")
        [held] = evaluation.take(timeout=10)
        served.restart()
        put(producer, "g", split="eval")
        held.ack()
        deadline = time.monotonic() + 30
        found: list[tuple[str, str]] = []
        while not found and time.monotonic() < deadline:
            found = taken(evaluation)
        assert found == [("eval", "g")]
        assert evaluation.stats().balanced
    with pytest.raises(ValueError, match="split='eval': expected 'train' with world_size=2"):
        Consumer(bus_name, rank=0, world_size=2, split="eval")


def test_a_snapshot_keeps_split_need_and_versions(bus_name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    label = "held-out"
    with Bus.create(bus_name, "4MiB", max_producers=4), Producer(bus_name) as producer:
        put(producer, "done", split=label)
        with Consumer(bus_name) as consumer:
            assert taken(consumer, split=label) == [(label, "done")]
        for index in range(2):
            producer.put(
                "q", group_size=4, need=2, index=index, round=5, split=label, data=DATA,
                policy_version=(3, 8),
            )  # fmt: skip
        snapshot.take(bus_name, tmp_path / "snapshot")
    name = f"{bus_name}-restored"
    snapshot.restore(tmp_path / "snapshot", name)
    with Bus.open(name), Consumer(name) as consumer:
        [group] = consumer.take(timeout=10, split=label)
        assert (group.split, group.need, group.size, len(group)) == (label, 2, 4, 2)
        assert (group[0].policy_version, group[0].newest_policy_version) == (3, 8)
        group.ack()
        assert consumer.stats().splits[label].acknowledged == 4
    unlink(name)


def test_a_sample_that_is_not_needed_is_told_of_quietly(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shmbus.drops")
    with Consumer(bus.name) as consumer:
        for index in range(3):
            producer.put("q", group_size=3, need=2, index=index, round=1, data=DATA)
        assert taken(consumer) == [("train", "q")]
        [record] = [r for r in caplog.records if "surplus" in r.getMessage()]
        assert record.levelno == logging.INFO and "held its needed samples" in record.message
