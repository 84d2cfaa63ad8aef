"""Splits over a relay: each bus numbers them in its own order, and nobody sees a difference."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from answering import answering
from conftest import next_request, next_retry, take_groups, wait_until
from relay.local import COORDINATOR, TWICE, have_splits, put_group, relay, relayed, stats

import shmbus
from shmbus import Request
from shmbus.inspect.status import read_status
from shmbus.relay import coordinator_party, prompt_lanes, sink_party
from shmbus.relay.command import show_relay
from shmbus.relay.record_reader import RecordReader
from shmbus.relay.source_party import SourceParty
from shmbus.relay.splits import Splits
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core
from trainer_adapter import OnlineDataHandler

pytest_plugins = ["relay.relay_fixtures"]
PROMPT = np.arange(3, dtype=np.int32)


def ended(name: str, split: str = "eval") -> tuple[int, int, int]:
    """Of a bus's split: acknowledged, dropped, and what waits."""
    (found,) = [each for each in read_status(name).splits if each.split == split]
    return found.acknowledged, found.dropped, found.stashed


def put_sample(
    producer: shmbus.Producer, index: int, *, size: int = 2, split: str = "eval", **more: Any
) -> None:
    producer.put(
        "q", group_size=size, index=index, split=split, score=1.0,
        tokens=np.full(9, index, np.int32), **more,
    )  # fmt: skip


def test_two_nodes_make_an_evaluation_during_training(unlike: dict[str, str]) -> None:
    made: Counter[tuple[str, str]] = Counter()

    def make(producer: shmbus.Producer, request: Request) -> None:
        assert request["prompt"].tolist() == [int(request.instance_id[1:])] * 5
        tokens = np.array([*request["prompt"], request.index], np.int32)
        if producer.requests.answer(request, score=float(request.index), tokens=tokens):
            made[producer.name, request.split] += 1

    a, b, t = (unlike[each] for each in "abt")
    with (
        relay([a, b], [t]),
        shmbus.Consumer(t) as consumer,
        shmbus.Feeder(t) as feeder,
        answering([a, b], make),
    ):
        offered = {"train": 20, "eval": 10}
        for number in range(20):
            for split in ("train", "eval")[: 1 + (number < 10)]:
                feeder.request(
                    f"q{number}", group_size=4, split=split, prompt=np.full(5, number, np.int32)
                )
        for split in ("eval", "train"):
            expected = {f"q{number}" for number in range(offered[split])}
            found = take_groups(consumer, len(expected), split=split)
            assert {group.instance_id for group in found} == expected
            for group in found:
                assert group[0].split == split
                number = int(group.instance_id[1:])
                assert [each["tokens"].tolist() for each in group] == [
                    [number] * 5 + [index] for index in range(4)
                ]
                group.ack()
            assert not consumer.take(split=split, timeout=0.2)
        wait_until(lambda: all(read_status(n).requests.groups == 0 for n in (a, b, t)))
        wait_until(lambda: stats(a).undelivered == stats(b).undelivered == 0)
        assert {name for name, _ in made} == {a, b}
        for split, count in (("eval", 40), ("train", 80)):
            assert sum(n for (_, of), n in made.items() if of == split) == count
            assert ended(t, split) == (count, 0, 0)
            for name in (a, b):
                assert ended(name, split) == (made[name, split], 0, 0)


def test_a_prompt_of_two_splits_is_two_groups_at_one_node(unlike: dict[str, str]) -> None:
    with relayed(unlike, "a") as (_, consumer, producer):
        for split in ("train", "eval"):
            consumer.request("q", group_size=1, round=1, split=split, prompt=PROMPT)
        requests = [next_request(producer) for _ in range(2)]
        assert {request.split for request in requests} == {"train", "eval"}


def test_a_handler_evaluates_what_another_node_makes(unlike: dict[str, str]) -> None:
    a, t = unlike["a"], unlike["t"]

    def make(producer: shmbus.Producer, request: Request) -> None:
        producer.requests.answer(request, score=float(request.index), tokens=request["prompt"])

    with relay([a], [t]), OnlineDataHandler(t, groups_per_batch=2) as handler, answering([a], make):
        for number in range(3):
            handler.request(f"q{number}", group_size=2, split="eval", prompt=PROMPT)
        figures = handler.evaluate(3, timeout=60.0)
        assert (figures["eval/groups"], figures["eval/samples"]) == (3, 6)
        assert figures["eval/reward/mean"] == 0.5
        wait_until(lambda: ended(a) == (6, 0, 0))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_groups_made_on_two_nodes_come_whole_and_ledgers_balance(
    unlike: dict[str, str], split: str
) -> None:
    a, b, t = (unlike[each] for each in "abt")
    more = {"split": split, "policy_version": 7}
    with relay([a, b], [t]), shmbus.Consumer(t, split=split) as consumer:
        for number in range(20):
            put_group([a, b], number, round=number % 2 or None, meta={"n": number}, **more)
        for group in take_groups(consumer, 20):
            number = int(group.instance_id[1:])
            assert [t.index for t in group] == [0, 1, 2, 3]
            assert {(t.split, t.policy_version, t.meta["n"]) for t in group} == {(split, 7, number)}
            assert all((t["tokens"] == number).all() for t in group)
            group.ack()
        wait_until(lambda: stats(a).acknowledged == stats(b).acknowledged == 40)
        assert [ended(name, split) for name in (a, b, t)] == [(40, 0, 0), (40, 0, 0), (80, 0, 0)]
        assert stats(a).undelivered == stats(b).undelivered == stats(t).undelivered == 0


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every question asked again ten times a second."""
    for module in (coordinator_party, sink_party):
        monkeypatch.setattr(module, "ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(prompt_lanes, "_AGAIN_S", 0.1)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("who", ["a", "t", COORDINATOR])
def test_a_restarted_party_keeps_groups_exact_and_asks_nothing_twice(
    unlike: dict[str, str], who: str, split: str
) -> None:
    a, b, t = (unlike[each] for each in "abt")
    address = unlike.get(who, who)
    with relayed(unlike, "ab", {"split": split}) as (made, consumer, one, other):
        put_sample(one, 0, split=split)
        wait_until(lambda: made.coordinator.note().announced == 1)
        made.restart(address)
        put_sample(other, 1, split=split)
        (group,) = take_groups(consumer, 1)
        made.restart(address)
        consumer.request("e", group_size=2, split=split, round=1, prompt=PROMPT)
        requests = [next_request(one) for _ in range(2)]
        made.restart(address)
        assert other.requests.next(timeout=0.5) is None
        for request in requests:
            assert request.split == split and one.requests.answer(request, tokens=PROMPT)
        (second,) = take_groups(consumer, 1)
        made.restart(address)
        assert other.requests.next(timeout=0.2) is None
        group.ack()
        second.ack()
        wait_until(lambda: stats(a).undelivered == stats(b).undelivered == 0)
        assert [ended(name, split) for name in (a, b, t)] == [(3, 0, 0), (1, 0, 0), (4, 0, 0)]
        wait_until(lambda: read_status(a).requests.groups == read_status(t).requests.groups == 0)
        assert not consumer.take(timeout=0.2)


def test_a_half_put_evaluation_is_completed(unlike: dict[str, str]) -> None:
    a, t = unlike["a"], unlike["t"]
    with relay([a], [t]) as made:
        sink = made.parties[t]
        sink._put_some = lambda: 0  # a full bus, until it begins again
        put_group([a], 1, split="eval")
        wait_until(lambda: sink._order)
        made.restart(t)
        with shmbus.Consumer(t, split="eval") as consumer:
            (group,) = take_groups(consumer, 1)
            assert len(group) == 4 and group[0].split == "eval"
            group.ack()
        wait_until(lambda: ended(a) == (4, 0, 0))


def test_groups_of_a_split_that_the_trainer_has_not_wait_are_told_once_and_come_later(
    buses: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, t = (buses[each] for each in "abt")
    monkeypatch.setattr("shmbus.relay.sink_party.HELLO_S", 600.0)  # it tells a new split at once
    with relay([a, b], [t]) as made:
        put_group([a, b], 1, split="warmup")
        put_group([a], 2, split="warmup")
        put_group([a, b], 3)
        with shmbus.Consumer(t) as consumer:
            take_groups(consumer, 1)[0].ack()
            wait_until(lambda: "split 'warmup'" in caplog.text)
            note = made.coordinator.note()
            assert "split warmup waits for the first trainer's bus" in show_relay("x", note)
            assert note.unplaced == ["warmup"]
            assert stats(t).committed == 4 and ended(a, "warmup")[:2] == (0, 0)
            (told,) = [r for r in caplog.records if "warmup" in r.getMessage()]
            assert t in told.getMessage()
            for who in (a, COORDINATOR):
                made.restart(who)
            put_group([b], 4, split="warmup")
            wait_until(lambda: made.coordinator.note().ready == 12)
            found = take_groups(consumer, 3, split="warmup")
            assert sorted(group.instance_id for group in found) == ["q1", "q2", "q4"]
            consumer.ack(found)
            wait_until(lambda: stats(a).undelivered == stats(b).undelivered == 0)
            assert made.coordinator.note().unplaced == []


def test_what_waits_for_its_split_goes_with_its_bus(buses: dict[str, str]) -> None:
    with relay([buses["a"], buses["b"]], [buses["t"]]) as made:
        put_group([buses["a"], buses["b"]], 1, split="warmup")
        wait_until(lambda: made.coordinator.note().ready == 4)
        made.end(buses["a"])
        made.coordinator.forgotten.append(buses["a"])
        wait_until(lambda: made.coordinator.lost == 2)
        note = made.coordinator.note()
        assert (note.ready, note.announced) == (0, 2)
        assert [(each.split, each.here) for each in note.waiting] == [("warmup", 2)]
        assert "q1 of warmup" in show_relay("x", note)


@pytest.mark.usefixtures("hurried")
def test_of_several_trainers_the_first_has_all_that_is_not_trained_on(
    buses: dict[str, str],
) -> None:
    a, second, first = buses.values()
    have_splits(second, "eval")
    with (
        relay([a], [first, second]),
        shmbus.Consumer(first) as one,
        shmbus.Consumer(second) as other,
        shmbus.Producer(a) as far,
        shmbus.Producer(second) as near,
    ):
        other.request("mine", group_size=1, split="eval", priority=3, prompt=PROMPT)
        one.request("e", group_size=1, split="eval", prompt=PROMPT)
        request = next_request(far)
        assert (request.instance_id, request.split) == ("e", "eval")
        assert far.requests.answer(request, tokens=PROMPT)
        assert far.requests.next(timeout=0.5) is None
        assert near.requests.next(timeout=0).instance_id == "mine"
        for number in range(20):
            put_group([a], number, split="eval")
        take_groups(one, 21, split="eval")
        assert stats(second).committed == 0


MANY = [f"split{n}" for n in range(_core.MAX_SPLITS - 1)]


def test_an_unknown_split_waits(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    a, t = buses["a"], buses["t"]
    have_splits(a, *MANY)
    have_splits(t, "eval")
    with relay([a], [t]), shmbus.Consumer(t) as consumer, shmbus.Producer(a) as producer:
        for number in range(2):
            consumer.request(f"e{number}", group_size=1, split="eval", priority=3, prompt=PROMPT)
        consumer.request("q", group_size=1, prompt=PROMPT)
        assert next_request(producer).instance_id == "q"
        told = [r.getMessage() for r in caplog.records if "'eval'" in r.getMessage()]
        assert len(told) == 2 and "fewer splits" in told[0]


def test_splits_of_a_bus_are_all(buses: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    a, b, t = (buses[each] for each in "abt")
    have_splits(a, *MANY)
    with relay([a], [t]) as made, shmbus.Consumer(t) as consumer:
        put_group([a], 1, split=MANY[-1])
        (group,) = consumer.take(split=MANY[-1], timeout=30.0)
        group.ack()
        made.coordinator.joined.append(b)
        made.start(b, lambda box: SourceParty(b, box, COORDINATOR))
        put_group([b], 2, split="more")
        put_group([b], 3)
        (group,) = take_groups(consumer, 1)
        assert group.instance_id == "q3"
        group.ack()
        wait_until(lambda: "split 'more'" in caplog.text)
        assert made.coordinator.note().unplaced == ["more"]
        wait_until(lambda: stats(b).acknowledged == 4)
        assert ended(b, "more")[:2] == (0, 0)


def test_numbers_of_labels_are_given_once_and_to_no_label_that_is_none() -> None:
    splits = Splits()
    assert [splits.number(each) for each in ("eval", "train", "eval", "")] == [1, 0, 1, 16]
    assert splits.key(("q", 2, "eval")) == ("q", 2, 1) and splits.key(("q", 2, "train")) == ("q", 2)
    assert splits.name(("q", None, 1)) == ("q", None, "eval") and splits.name("q")[2] == "train"
    for label in MANY:
        splits.number(label)
    assert splits.number(MANY[-1]) == 16 == splits.number("again") and splits.number("eval") == 1
    assert splits.left_out == {MANY[-1], "again"}


def test_neither_equal_scores_nor_an_old_policy_end_an_evaluation(unlike: dict[str, str]) -> None:
    a, t = unlike["a"], unlike["t"]
    policy = StashPolicy(skip_zero_variance=True, max_policy_lag=1)
    with relayed(unlike, "a", policy=policy) as (made, consumer, producer):
        consumer.policy_version = 9
        wait_until(lambda: (pure := made.coordinator.pure) and pure.policy_version == 9)
        for split in ("train", "eval"):
            for index in range(2):
                put_sample(producer, index, split=split)
                put_sample(producer, index, split=split, round=1, policy_version=index)
        for _ in range(2):
            (group,) = consumer.take(1, split="eval", timeout=30.0)
            group.ack()
        wait_until(lambda: stats(a).undelivered == 0)
        assert ended(a) == (4, 0, 0) and ended(a, "train")[:2] == (0, 4)
        assert stats(t).committed == 4


@pytest.mark.parametrize(("split", "round"), [("train", None), ("eval", None), ("eval", 5)])
def test_a_failed_samples_second_attempt_goes_to_another_node(
    unlike: dict[str, str], split: str, round: int | None
) -> None:
    a, b, t = (unlike[each] for each in "abt")
    of: dict[str, Any] = {"split": split, "round": round}
    with relayed(unlike, "ab", {"split": split}, policy=TWICE) as (
        made,
        consumer,
        one,
        other,
    ):
        put_sample(one, 0, **of)
        one.fail("q", 1, "first", group_size=2, **of)
        asked = next_retry(one)
        assert (asked.instance_id, asked.round, asked.split) == ("q", round, split)
        # The first sample tells its needs.
        assert (asked.group_size, asked.attempt, asked.reason) == (2, 1, "first")
        assert read_status(a).wanted[0].taken_by is not None
        made.restart(a)
        made.restart(COORDINATOR)
        wait_until(lambda: (pure := made.coordinator.pure) and pure.retries.open == 1)
        one.fail("q", 1, "second", group_size=2, **of)
        asked = next_retry(other)
        assert (asked.split, asked.index, asked.reason) == (split, 1, "second")
        assert asked.attempt == 2
        put_sample(other, 1, **of)
        (group,) = take_groups(consumer, 1)
        assert [t.index for t in group] == [0, 1] and group.round == round
        group.ack()
        wait_until(lambda: stats(a).undelivered == stats(b).undelivered == 0)
        wait_until(lambda: not read_status(a).wanted and not read_status(b).wanted)
        assert ended(t, split) == (2, 0, 0) and ended(a, split) == (1, 2, 0)


@pytest.mark.parametrize(("split", "another"), [("train", "eval"), ("eval", "train")])
def test_a_group_that_needs_no_more_ends_alone_on_every_node(
    unlike: dict[str, str], split: str, another: str
) -> None:
    a, t = unlike["a"], unlike["t"]
    with relayed(unlike, "ab", {"split": split}) as (_, consumer, one, other):
        consumer.request("e", group_size=4, need=2, round=1, split=split, prompt=PROMPT)
        requests = [next_request(one) for _ in range(3)]
        for request in requests[:2]:
            assert one.requests.answer(request, tokens=PROMPT)
        for producer in (one, other):
            wait_until(lambda p=producer: p.cancelled("e", round=1, split=split))
            assert not producer.cancelled("e", round=1, split=another)
            assert not producer.cancelled("e", round=1, split="warmup")
        wait_until(lambda: not one.requests.is_wanted(requests[2]))
        assert not one.requests.answer(requests[2], tokens=PROMPT)
        assert one.requests.next(timeout=0.2) is None
        (group,) = take_groups(consumer, 1)
        assert len(group) == 2
        group.ack()
        wait_until(lambda: read_status(a).requests.groups == read_status(t).requests.groups == 0)
        found = read_status(t).requests
        assert (found.offered, found.done, found.given_up) == (4, 2, 2)


def test_a_release_of_several_splits_is_in_the_ledger_of_each(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), shmbus.Producer(bus_name) as producer:
        for index in range(6):
            put_sample(producer, index, size=6, split=("train", "eval", "test")[index % 3])
        with RecordReader(bus_name) as reader:
            origins, _ = reader.poll(10)
            reader.release(origins[:5])
            reader.release(origins[5:], "stale")
            found = {split: ended(bus_name, split)[:2] for split in ("train", "eval", "test")}
            assert found == {"train": (2, 0), "eval": (2, 0), "test": (1, 1)}
            assert read_status(bus_name).ledger.balanced
