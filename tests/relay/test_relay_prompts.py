"""Requests of the trainer's bus are made by workers of other nodes, as on one node."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from answering import answering
from conftest import Spawner, next_request, take_groups, wait_until
from relay.local import COORDINATOR, LocalMailbox, relay, relayed, stats

import shmbus
from shmbus import Request
from shmbus.inspect.status import read_status
from shmbus.relay import messages as m
from shmbus.relay.prompt_lanes import TrainerLane
from shmbus.segment import lifecycle
from shmbus.stash.stash import StashPolicy

pytest_plugins = ["relay.relay_fixtures"]


def answer(producer: shmbus.Producer, request: Request) -> bool:
    tokens = [*request["prompt"].tolist(), request.index]
    return producer.requests.answer(request, score=float(request.index), tokens=tokens)


def offer(
    feeder: shmbus.Feeder | shmbus.Consumer, number: int, *, size: int = 4, **more: Any
) -> None:
    feeder.request(
        f"q{number}", group_size=size, prompt=np.full(5, number, np.int32), meta={"n": number},
        **more,
    )  # fmt: skip


def counts(name: str) -> tuple[int, int, int, int, int, int]:
    """Samples of a bus's lane: offered, open, claimed, done, given up; and open groups."""
    found = read_status(name).requests
    if found is None:
        return (0, 0, 0, 0, 0, 0)
    return (found.offered, found.open, found.claimed, found.done, found.given_up, found.groups)


def counting(made: Counter[str]) -> Callable[[shmbus.Producer, Request], None]:
    def make(producer: shmbus.Producer, request: Request) -> None:
        if answer(producer, request):
            made[producer.name] += 1

    return make


def test_a_request_is_made_on_another_node_as_it_was_offered(buses: dict[str, str]) -> None:
    with relayed(buses, "a") as (_, consumer, producer):
        consumer.request(
            "q", group_size=2, need=2, round=3, priority=1, meta={"x": [1, None]},
            prompt=np.arange(5, dtype=np.int32), image=np.ones((2, 3), np.float32),
        )  # fmt: skip
        first = producer.requests.next(timeout=30.0)
        second = producer.requests.next(timeout=30.0)
        assert first is not None and second is not None
        for index, request in enumerate((first, second)):
            assert (request.instance_id, request.round, request.split) == ("q", 3, "train")
            assert (request.group_size, request.need, request.index) == (2, 2, index)
            assert (request.priority, request.attempt) == (1, 0)
            assert request.meta == {"x": [1, None]} and request["image"].shape == (2, 3)
            assert request["prompt"].tolist() == [0, 1, 2, 3, 4]
            assert request.cache_salt == producer.cache_salt
            assert answer(producer, request)
        (group,) = take_groups(consumer, 1)
        assert [t["tokens"].tolist()[-1] for t in group] == [0, 1]
        assert counts(buses["t"]) == (2, 0, 0, 2, 0, 1)
        group.ack()
        assert counts(buses["t"]) == (2, 0, 0, 2, 0, 0)
        wait_until(lambda: read_status(buses["a"]).requests.groups == 0)
        assert producer.requests.next(timeout=0.2) is None


@pytest.mark.parametrize("split", ["train", "eval"])
def test_what_a_forgotten_node_had_is_asked_of_another(unlike: dict[str, str], split: str) -> None:
    with relayed(unlike, "ab", {"split": split}) as (made, consumer, one, other):
        consumer.request("q", group_size=2, split=split, prompt=np.arange(3, dtype=np.int32))
        assert answer(one, next_request(one))
        assert other.requests.next(timeout=0.3) is None
        wait_until(lambda: made.coordinator.note().announced == 1)
        made.end(unlike["a"])
        made.coordinator.forgotten.append(unlike["a"])
        for index in range(2):
            again = next_request(other)
            assert again.index == index and answer(other, again)
        (group,) = take_groups(consumer, 1)
        group.ack()
        assert made.coordinator.lost == 1
        assert counts(unlike["t"]) == (2, 0, 0, 2, 0, 0)


def test_a_group_chosen_by_workers_is_cancelled_everywhere(buses: dict[str, str]) -> None:
    with relayed(buses, "ab") as (_, _, one, other):
        for index in range(2):
            one.put("q", group_size=4, need=2, round=1, index=index, tokens=[1])
        wait_until(lambda: other.cancelled("q", round=1))
        assert not other.cancelled("q", round=2)


def test_a_request_whose_group_a_policy_drops_ends_on_every_bus(buses: dict[str, str]) -> None:
    with relayed(buses, "a", policy=StashPolicy(skip_zero_variance=True)) as (
        _,
        consumer,
        producer,
    ):
        consumer.request("q", group_size=2, prompt=np.arange(3, dtype=np.int32))
        for _ in range(2):
            request = next_request(producer)
            assert producer.requests.answer(request, tokens=[1])
        wait_until(lambda: counts(buses["t"]) == (2, 0, 0, 0, 2, 0))
        wait_until(lambda: counts(buses["a"])[5] == 0)
        assert consumer.open_requests() == []


def test_groups_are_begun_as_far_ahead_as_the_trainers_bus_says(buses: dict[str, str]) -> None:
    a, b, t = buses.values()
    shmbus.unlink(t)
    shmbus.Bus.create(t, "4MiB", max_lead=3).close()
    made: Counter[str] = Counter()
    with (
        relay([a, b], [t]),
        shmbus.Consumer(t) as consumer,
        shmbus.Feeder(t) as feeder,
        answering([a, b], counting(made)),
    ):
        for number in range(12):
            offer(feeder, number)
        delivered = 0
        while delivered < 12:
            most = 4 * min(delivered + 3, 12)
            wait_until(lambda most=most: made.total() == most)
            time.sleep(0.2)
            assert made.total() == most
            (group,) = consumer.take(1, timeout=30.0)
            group.ack()
            delivered += 1


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_failed_sample_is_asked_again_with_its_prompt(unlike: dict[str, str], split: str) -> None:
    policy = StashPolicy(sample_retries=2, retry_timeout_s=60.0)
    with relayed(unlike, "ab", {"split": split}, policy=policy) as (_, consumer, producer, _):
        consumer.request("q", group_size=2, split=split, prompt=np.arange(3, dtype=np.int32))
        request = next_request(producer)
        assert answer(producer, request)
        request = producer.requests.next(timeout=30.0)
        for attempt in (1, 2):
            assert request is not None and producer.requests.fail(request, "out of memory")
            request = next_request(producer)
            assert (request.index, request.attempt) == (1, attempt)
            assert request.split == split and request["prompt"].tolist() == [0, 1, 2]
        assert answer(producer, request)
        (group,) = take_groups(consumer, 1)
        group.ack()
        assert counts(unlike["t"]) == (2, 0, 0, 2, 0, 0)


def test_unbegun_work_moves_on(buses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmbus.relay.prompt_lanes._IDLE_S", 0.5)
    with relayed(buses, "ab") as (_, consumer, one, other):
        assert one.requests.next(timeout=0) is None  # it asks, and comes no more
        consumer.request("q", group_size=2, prompt=np.arange(3, dtype=np.int32))
        wait_until(lambda: counts(buses["a"])[1] == 2)
        for _ in range(2):
            assert answer(other, next_request(other))
        take_groups(consumer, 1)[0].ack()
        assert counts(buses["a"]) == (2, 0, 0, 0, 2, 0)


def test_a_checkpoint_has_what_is_under_way_on_other_nodes(buses: dict[str, str]) -> None:
    with relayed(buses, "a") as (_, consumer, producer):
        consumer.request("q", group_size=2, prompt=np.arange(3, dtype=np.int32))
        next_request(producer)
        state = consumer.state_dict()
        assert [each["instance_id"] for each in state["open"]] == ["q"]
        restored = consumer.load_state_dict(state)
        assert (restored.offered, restored.kept) == (0, 1)


class LateReleases(LocalMailbox):
    """A mailbox of a sink; releases of trained records come after a release of surplus records."""

    late = True

    def send(self, to: str, message: m.Message, payload: Any = b"") -> None:
        if isinstance(message, m.Release):
            if self.late and message.reason == "acknowledged":
                return  # repeated after a while
            self.late = self.late and message.reason != "surplus"
        super().send(to, message, payload)


@pytest.mark.parametrize("releases", [LocalMailbox, LateReleases])
def test_a_prompt_offered_again_is_trained_though_the_coordinator_did_not_hear_of_the_offer(
    buses: dict[str, str], releases: type[LocalMailbox]
) -> None:
    """The coordinator remembers the earlier group of this round, and drops the records once."""
    with relayed(buses, "a") as (made, consumer, _), answering(buses["a"], answer):
        made.kinds[buses["t"]] = releases
        made.restart(buses["t"])

        def ask() -> None:
            consumer.request("q", group_size=2, round=0, prompt=np.arange(3, dtype=np.int32))

        ask()
        take_groups(consumer, 1)[0].ack()
        wait_until(lambda: counts(buses["a"])[5] == 0)
        made.boxes.cut = {COORDINATOR}
        ask()
        wait_until(lambda: stats(buses["a"]).committed == 4)
        made.boxes.cut = set()
        take_groups(consumer, 1)[0].ack()


def test_prompts_that_were_cut_or_fit_no_row_are_not_offered(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]) as made:
        party = made.parties[buses["a"]]
        offered = m.PromptOffer(1, ("q", None, "train"), 2, 2, 0, 10)
        source = party.source
        message = m.Prompts(source.bus, "f" * 32, source.incarnation, (9, 9), (), (offered,))
        made.send("somebody", buses["a"], message, b"short")
        for changes in ({"need": 3}, {"group": ("\N{SNOWMAN}" * 200, None, "train")}):
            unsound = message._replace(offers=(offered._replace(**changes),))
            made.send("somebody", buses["a"], unsound, b"0123456789")
        made.send("somebody", buses["a"], message._replace(offers=()))
        wait_until(lambda: party.prompts.taker.taken)
        assert counts(buses["a"])[0] == 0


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_restored_trainer_repeats_its_request(unlike: dict[str, str], split: str) -> None:
    made: Counter[str] = Counter()
    with (
        relayed(unlike, "a", {"split": split}) as (_, consumer, _),
        answering([unlike["a"]], counting(made)),
    ):
        for _ in range(3):
            offer(consumer, 1, round=1, split=split)
            (group,) = take_groups(consumer, 1)
            assert len(group) == 4
            group.ack()
        assert made.total() == 12


def test_requests_of_a_removed_bus_are_over(buses: dict[str, str]) -> None:
    with relay([buses["a"]], [buses["t"]]), shmbus.Producer(buses["a"]) as producer:
        with shmbus.Feeder(buses["t"]) as feeder:
            offer(feeder, 1)
            old = producer.requests.next(timeout=30.0)
        shmbus.unlink(buses["t"])
        shmbus.Bus.create(buses["t"], "4MiB").close()
        assert old is not None
        with shmbus.Feeder(buses["t"]) as feeder, shmbus.Consumer(buses["t"]) as consumer:
            offer(feeder, 2)
            wait_until(lambda: not producer.requests.is_wanted(old))
            for _ in range(4):
                request = next_request(producer)
                assert request.instance_id == "q2"
                assert answer(producer, request)
            take_groups(consumer, 1)[0].ack()


def test_a_dead_workers_sample_is_made_on_its_node(buses: dict[str, str], spawn: Spawner) -> None:
    with relayed(buses, "a") as (_, consumer, producer):
        consumer.request("q", group_size=1, prompt=np.arange(3, dtype=np.int32))
        spawn.holder(HOLDS, buses["a"]).kill()
        assert answer(producer, next_request(producer))
        take_groups(consumer, 1)[0].ack()


HOLDS = """
import sys, shmbus
producer = shmbus.Producer(sys.argv[1])
request = producer.requests.next()
"""


def lane(bus_name: str, rows: int = 64) -> None:
    """Create a bus with room for `rows` groups in the request lane."""
    shmbus.Bus.create(bus_name, "4MiB", request_capacity=rows * 2048).close()


def send_all(name: str) -> Callable[[int], None]:
    """Send requests as a sink does, and end all but the first group."""
    sender = TrainerLane(lifecycle.open_segment(name))

    def work(number: int) -> None:
        for each in sender.rows():
            sender.send(each)
            if each != 1:
                sender.end(each)

    return work


def answer_others(producer: shmbus.Producer, kept: list[Request]) -> None:
    """Answer as a worker does, and keep every sample of the first group."""
    while (request := producer.requests.next(timeout=0)) is not None:
        if request.instance_id == "q0":
            kept.append(request)
        else:
            producer.requests.answer(request, score=0.0, tokens=[1])


def claim_all(name: str) -> Callable[[int], None]:
    producer, kept = shmbus.Producer(name), list[Request]()
    return lambda number: answer_others(producer, kept)


def give_back(name: str) -> Callable[[int], None]:
    """Answer likewise, and give a sample of the first group back in the middle of the order."""
    producer, kept = shmbus.Producer(name), list[Request]()

    def work(number: int) -> None:
        taker = producer if number < 150 else shmbus.Producer(name)
        if number == 150:
            producer.requests.release(kept[0])
            assert next_request(taker).instance_id == "q0"
        answer_others(taker, kept)
        if taker is not producer:
            taker.close()

    return work


@pytest.mark.parametrize("maker", [send_all, claim_all, give_back])
def test_stragglers_are_left(bus_name: str, maker: Callable[[str], Callable[[int], None]]) -> None:
    lane(bus_name)
    with shmbus.Consumer(bus_name) as consumer, shmbus.Feeder(bus_name) as feeder:
        work = maker(bus_name)
        for number in range(300):
            offer(feeder, number, timeout=0.0)
            work(number)
            consumer.ack(consumer.take(timeout=0.0))
    shmbus.unlink(bus_name)


def test_a_prompt_that_waits_for_its_turn_holds_its_place(bus_name: str) -> None:
    lane(bus_name)
    with shmbus.Feeder(bus_name) as feeder, shmbus.Producer(bus_name) as producer:
        with pytest.raises(shmbus.BusFullError):
            for number in range(65):
                offer(feeder, number, size=1, timeout=0.0)
        taken = [producer.requests.next(timeout=0) for _ in range(64)]
        assert [each and each.instance_id for each in taken] == [f"q{n}" for n in range(64)]
    shmbus.unlink(bus_name)


def test_a_straggler_behind_a_relay_stops_no_prompt(buses: dict[str, str]) -> None:
    shmbus.unlink(buses["t"])
    lane(buses["t"])
    kept: list[Request] = []

    def make(producer: shmbus.Producer, request: Request) -> None:
        if request.instance_id == "q0" and not kept:
            kept.append(request)
        else:
            answer(producer, request)

    sources = [buses["a"]]
    with (
        relay(sources, [buses["t"]]) as running,
        shmbus.Consumer(buses["t"]) as consumer,
        shmbus.Feeder(buses["t"]) as feeder,
        answering(sources, make),
    ):
        trained = offered = 0
        while trained < 199:
            with contextlib.suppress(shmbus.BusFullError):
                while offered < 200:
                    offer(feeder, offered, size=2, timeout=0.0)
                    offered += 1
            groups = consumer.take(timeout=10.0)
            assert groups, f"{trained} groups came, and no more"
            for group in groups:
                trained += 1
                group.ack()
        party = running.parties[buses["t"]]
        wait_until(lambda: party.held_prompt is not None)
        assert (party.held_prompt.instance_id, party.held_prompt.at) == ("q0", buses["a"])
