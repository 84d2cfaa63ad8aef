"""What a caller may keep: copies of groups and trajectories, plain values, and how they travel."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fork_server import TEMPLATE

import shmbus
from shmbus import Bus, Consumer, Group, Producer, Trajectory
from shmbus.data.copies import GroupCopy, TrajectoryCopy

SIZE = 4


@pytest.fixture
def name(bus_name: str) -> Iterator[str]:
    with Bus.create(bus_name, "2MiB"):
        yield bus_name


def fill(name: str, key: str = "q", **more: Any) -> None:
    with Producer(name) as producer:
        for index in range(SIZE):
            producer.put(
                key, group_size=SIZE, index=index, score=index / 2, policy_version=3,
                tokens=np.arange(index + 5, dtype=np.int32),
                image=np.full((2, 3), index, np.float16), empty=np.zeros(0, np.uint8),
                meta={"env": "gsm8k", "turns": [index]}, timeout=10, **more,
            )  # fmt: skip


def take(name: str) -> tuple[Consumer, Group]:
    consumer = Consumer(name)
    [group] = consumer.take(1, 10)
    return consumer, group


def names_to_read(kind: type) -> set[str]:
    return {each for each in dir(kind) if not each.startswith("_")}


#: Of a lease: its end, and additions in this process.
OF_A_LEASE = {
    "ack", "annotated", "columns", "drop", "give_back", "make", "require_leased", "state",
}  # fmt: skip


def test_a_copy_is_read_by_the_names_of_its_original() -> None:
    assert names_to_read(Trajectory) == names_to_read(TrajectoryCopy)
    assert names_to_read(Group) - OF_A_LEASE == names_to_read(GroupCopy)
    for special in ("__getitem__", "__len__", "__iter__", "__contains__"):
        assert hasattr(Trajectory, special) and hasattr(TrajectoryCopy, special)


def same(one: Any, other: Any) -> None:
    for attribute in sorted(names_to_read(TrajectoryCopy)):
        value = getattr(one, attribute)
        if attribute == "rows":
            for row, its in zip(value, other.rows, strict=True):
                assert row.keys() == its.keys() and row.prefix_length == its.prefix_length
                assert all(np.array_equal(row[name], its[name]) for name in row)
        elif not callable(value):
            assert value == getattr(other, attribute), attribute
    assert one.keys() == other.keys() == tuple(one) == tuple(other)
    assert len(one) == len(other) == len(one.keys())
    for (key, array), (_, wanted), view in zip(
        one.items(), other.items(), one.values(), strict=True
    ):
        for each in (array, view, one[key], one.get(key)):
            assert each.dtype == wanted.dtype and np.array_equal(each, wanted)
        assert one.shape(key) == wanted.shape and key in one and key in other
    assert one.get("none") is None and one.get("none", 7) == 7 and "none" not in one
    for each in (one, other):
        with pytest.raises(KeyError, match=r"'none'.*fields.*tokens"):
            each["none"]


@pytest.mark.parametrize("more", [{}, {"round": 5}])
def test_a_copy_says_what_its_original_said_after_the_bus_is_gone(
    bus_name: str, more: dict[str, int]
) -> None:
    with Bus.create(bus_name, "2MiB"):
        fill(bus_name, **more)
        consumer, group = take(bus_name)
        made = group.copy()
        for one, other in zip(made, group, strict=True):
            same(one, other)
        assert (made.instance_id, made.round, made.size) == ("q", more.get("round"), SIZE)
        assert made.complete and group.complete
        assert np.array_equal(made.scores, group.scores) and made.metas == group.metas
        group.ack()
        consumer.close()
    assert made.scores.tolist() == [0.0, 0.5, 1.0, 1.5] and made.scores.dtype == np.float64
    assert made.metas[3] == {"env": "gsm8k", "turns": [3]}
    assert made[3]["tokens"].tolist() == list(range(8)) and len(made[1:]) == 3
    assert repr(made).startswith("<GroupCopy 'q'") and repr(made).endswith("4/4>")
    assert repr(made[0]) == (
        "<TrajectoryCopy 'q'[0/4] score=0.0 policy_version=3 fields=('tokens', 'image', 'empty')>"
    )


def test_a_copy_is_its_holders_own(name: str) -> None:
    fill(name)
    consumer, group = take(name)
    with consumer:
        made = group[2].copy()
        made["tokens"][:] = 7
        made.meta["env"] = "mine"
        assert group[2]["tokens"].tolist() == list(range(7)) and group[2].meta["env"] == "gsm8k"
        again = made.copy()
        again["tokens"][:] = 8
        again.meta["env"] = "again"
        assert set(made["tokens"]) == {7} and made.meta["env"] == "mine"
        whole = group.copy()
        whole.copy()[0]["tokens"][:] = 9
        assert whole[0]["tokens"].tolist() == list(range(5))


def test_copies_keep_no_space_of_the_ring(bus_name: str) -> None:
    with Bus.create(bus_name, "256KiB", max_producers=2) as bus, Producer(bus_name) as producer:
        kept = []
        with Consumer(bus_name) as consumer:
            for number in range(40):
                for index in range(2):
                    producer.put(
                        f"k{number}", group_size=2, index=index, timeout=10,
                        x=np.full(20_000, number, np.uint8),
                    )  # fmt: skip
                [group] = consumer.take(1, 10)
                kept.append(group.copy())
                group.to_dict()
                group.ack()
        assert bus.stats().undelivered == 0
    assert all(set(group[1]["x"]) == {n} for n, group in enumerate(kept))


def test_copies_and_leased_groups_die_with_their_last_reference(name: str) -> None:
    fill(name)
    consumer, group = take(name)
    with consumer:
        array = weakref.ref(group[0].copy()["tokens"])
        gc.collect()
        assert array() is None


def test_a_trajectory_is_put_again_by_its_dict(name: str, seed: int) -> None:
    fill(name, round=1)
    consumer, group = take(name)
    with consumer, Producer(name) as producer:
        values = group.to_dict()
        assert values["instance_id"] == "q" and values["size"] == SIZE and values["round"] == 1
        for values_of_one, one in zip(values["trajectories"], group, strict=True):
            assert values_of_one["score"] == one.score
            assert values_of_one["tokens"].flags.owndata
        kept = group.copy()
        group.ack()
        samples = values["trajectories"]
        for sample in samples:
            sample["round"] = 2
        assert producer.put_many(samples, timeout=10) == SIZE
        [again] = consumer.take(1, 10)
        for one, other in zip(again, kept, strict=True):
            assert one.meta == other.meta and one.score == other.score
            assert all(np.array_equal(one[key], other[key]) for key in other.keys())  # noqa: SIM118
        producer.put(**kept[0].to_dict() | {"round": 3, "group_size": 1})
        assert consumer.take(1, 10)[0].round == 3


def doubled(group: GroupCopy) -> GroupCopy:
    for sample in group:
        sample["tokens"][:] *= 2
    return group


def test_a_copy_travels_to_another_process_and_back(name: str) -> None:
    fill(name)
    consumer, group = take(name)
    with consumer:
        made = group.copy()
        group.ack()
    with TEMPLATE.Pool(1) as pool:
        back = pool.apply(doubled, (made,))
    for one, other in zip(back, made, strict=True):
        assert np.array_equal(one["tokens"], 2 * other["tokens"])
        other["tokens"][:] *= 2
        same(one, other)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_takes_a_copy_and_refuses_a_lease(
    name: str, protocol: int
) -> None:
    fill(name)
    consumer, group = take(name)
    with consumer:
        for one, other in zip(
            pickle.loads(pickle.dumps(group.copy(), protocol)), group, strict=True
        ):
            same(one, other)
        for leased in (group, group[0], [group]):
            with pytest.raises(TypeError, match=r"under lease.*cannot be pickled.*\.copy\(\)"):
                pickle.dumps(leased, protocol)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_the_copy_module_is_told_of_the_copies_here(
    name: str, make: Callable[[object], object]
) -> None:
    fill(name)
    consumer, group = take(name)
    with consumer:
        for leased in (group, group[0]):
            with pytest.raises(TypeError, match=r"\.copy\(\)"):
                make(leased)


def test_what_was_acknowledged_cannot_be_copied_any_more_and_says_so(name: str) -> None:
    fill(name)
    consumer, group = take(name)
    with consumer:
        first = group[0]
        view = first["tokens"]
        group.ack()
        reads: list[Callable[[], object]] = [
            group.copy, group.to_dict, first.copy, first.to_dict, first.items, first.values,
        ]  # fmt: skip
        for read in reads:
            with pytest.raises(shmbus.BusClosedError, match="acknowledged or dropped"):
                read()
        assert view.tolist() == list(range(5))
        assert group.scores.tolist() == [0.0, 0.5, 1.0, 1.5]  # scores are no views


def test_a_part_of_a_group_has_the_scores_of_those_who_are_here(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "1MiB"),
        Consumer(bus_name, group_timeout=0.05, on_timeout="partial") as consumer,
    ):
        with Producer(bus_name) as producer:
            producer.put("q", group_size=3, index=1, score=2.0, x=np.arange(3))
        [group] = consumer.take(1, 10)
        made = group.copy()
        assert (len(made), made.size, made.complete) == (1, 3, False)
        assert made.scores.tolist() == [2.0] and made.metas == [None]
