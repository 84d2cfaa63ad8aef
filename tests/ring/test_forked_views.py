"""Views inherited by a forked child keep their content, whatever the parent does."""

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, Daemon, Spawner, ends_of, take_groups, wait_until

from shmbus import Bus, Consumer, Producer

FORK = get_context("fork")


def put(producer: Producer, key: str, value: int, size: int = 5000) -> None:
    producer.put(key, group_size=1, index=0, timeout=10, x=np.full(size, value, np.int32))


def overwrite(producer: Producer, consumer: Consumer, rounds: int = 200) -> None:
    """Overwrite every place without a holder, with a bus's worth of records."""
    for i in range(rounds):
        put(producer, f"other{i}", -1)
        consumer.ack(take_groups(consumer))


class Child:
    def __init__(self, look: Callable[[], Any], first: Callable[[], None] = lambda: None) -> None:
        self._go = FORK.Event()
        self._here, there = FORK.Pipe()

        def run() -> None:
            first()
            there.send("runs")
            # Nobody ends a child without a parent.
            self._go.wait(DEFAULT_DEADLINE_S)
            try:
                there.send(look())
            except BaseException as error:
                there.send(f"{type(error).__name__}: {error}")

        self._process = FORK.Process(target=run, daemon=True)
        self._process.start()
        assert self._answer() == "runs"

    def _answer(self) -> Any:
        assert self._here.poll(DEFAULT_DEADLINE_S), "the child does not answer"
        return self._here.recv()

    def looks(self) -> Any:
        self._go.set()
        answer = self._answer()
        self._process.join(DEFAULT_DEADLINE_S)
        return answer


@pytest.mark.parametrize("served", [False, True])
def test_a_childs_views_are_right_after_its_parent_went_on(
    bus_name: str, daemon: Callable[..., Daemon], served: bool
) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        if served:
            daemon()
        with Consumer(bus_name, daemon=served) as consumer:
            for i in range(8):
                put(producer, f"g{i}", i)
            groups = take_groups(consumer, 8)
            views = [group[0]["x"] for group in groups]
            slices = [view[10:20] for view in views]
            keys = [int(group.instance_id[1:]) for group in groups]
            child = Child(
                lambda: [
                    (set(view.tolist()), set(part.tolist()), view.flags.writeable)
                    for view, part in zip(views, slices, strict=True)
                ]
            )
            consumer.ack(groups)
            views.clear()
            slices.clear()
            overwrite(producer, consumer)
            assert child.looks() == [({key}, {key}, False) for key in keys]


@pytest.mark.parametrize("then", ["close", "kept", "dropped", "killed"])
def test_a_childs_views_are_right_whatever_becomes_of_the_consumer(
    bus_name: str, then: str
) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        put(producer, "a", 7)
        views: list[np.ndarray[Any, Any]] = []

        def hold() -> Consumer:
            consumer = Consumer(bus_name, daemon=False)
            (group,) = take_groups(consumer)
            views.append(group[0]["x"])
            group.ack()
            return consumer

        def hold_in_a_parent_that_dies() -> None:
            consumer, parent = hold(), os.getpid()
            if os.fork():
                os.kill(parent, signal.SIGKILL)
            wait_until(lambda: os.getppid() != parent)
            del consumer

        if then == "killed":
            child = Child(lambda: set(views[0].tolist()), hold_in_a_parent_that_dies)
        else:
            consumer = hold()
            if then == "close":
                consumer.close()  # before the fork: the view has a copy of its own already
            child = Child(lambda: set(views[0].tolist()))
            if then == "dropped":
                views.clear()
            consumer.close()
        with Consumer(bus_name, daemon=False) as successor:
            overwrite(producer, successor)
        assert child.looks() == {7}


def test_children_of_children_and_several_forks_see_what_was_there_at_each(bus_name: str) -> None:
    with ends_of(Bus.create(bus_name, "1MiB"), daemon=False) as (producer, consumer):
        children = []
        views: list[np.ndarray[Any, Any]] = []
        for i in range(4):
            put(producer, f"g{i}", i)
            (group,) = take_groups(consumer)
            views.append(group[0]["x"])
            group.ack()
            here = list(views)

            def look(here: list[np.ndarray[Any, Any]] = here) -> list[list[int]]:
                mine = [list(set(v.tolist())) for v in here]
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit([list(set(v.tolist())) for v in here] != mine)
                assert os.waitpid(grandchild, 0)[1] == 0
                return mine

            children.append(Child(look))
            if i == 1:
                views.clear()
            del here, look
        del group
        views.clear()
        overwrite(producer, consumer)
        expected = [[[0]], [[0], [1]], [[2]], [[2], [3]]]
        assert [child.looks() for child in children] == expected


CROWDED = """
import os, resource, sys, numpy as np, shmbus
consumer = shmbus.Consumer(sys.argv[1], daemon=False)
(group,) = consumer.take(timeout=30)
view = group[0]["x"]
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 18), resource.RLIM_INFINITY))
child = os.fork()
if child == 0:
    os.write(1, b"saw %d" % int(view[0]))
    os._exit(0)
ended = os.waitpid(child, 0)[1]
assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == 11, ended
assert set(view[:10].tolist()) == {7}
group.ack()
"""


def test_a_fork_without_memory_for_copies_leaves_a_child_that_sees_nothing(
    bus_name: str, spawn: Spawner
) -> None:
    with Bus.create(bus_name, "16MiB"), Producer(bus_name) as producer:
        put(producer, "a", 7, size=500_000)
        assert "saw" not in spawn.script(CROWDED, bus_name).finish()


def test_workers_of_a_data_loader_read_the_views_of_a_data_set(bus_name: str) -> None:
    data = pytest.importorskip("torch.utils.data")

    class Views(data.Dataset[int]):  # type: ignore[misc,name-defined]
        def __init__(self, views: list[np.ndarray[Any, Any]]) -> None:
            self.views = views

        def __len__(self) -> int:
            return len(self.views)

        def __getitem__(self, at: int) -> int:
            assert len(set(self.views[at].tolist())) == 1
            return int(self.views[at][0])

    with ends_of(Bus.create(bus_name, "1MiB"), daemon=False) as (producer, consumer):
        for i in range(16):
            put(producer, f"g{i}", i)
        groups = take_groups(consumer, 16)
        views = [group[0]["x"] for group in groups]
        wanted = [int(group.instance_id[1:]) for group in groups]
        loader = iter(
            data.DataLoader(
                Views(views),
                batch_size=1,
                num_workers=2,
                prefetch_factor=1,
                multiprocessing_context="fork",
            )
        )
        got = [int(next(loader))]
        consumer.ack(groups)
        del views, groups
        # The workers hold the data set still; this process does not.
        loader._dataset.views = []
        overwrite(producer, consumer)
        got += [int(value) for value in loader]
        assert got == wanted
