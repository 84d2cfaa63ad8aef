"""Weights and forks: a child holds nothing, ends nothing, and reports the fork."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from supervisor import forked
from weight_models import many, published, same

from shmbus import BusBusyError, BusClosedError, WaitTimeoutError
from shmbus.pool.pool_file import pool_path
from shmbus.weights import (
    ModuleSource,
    WeightPublisher,
    WeightSubscriber,
    attach_model,
    share_model,
)

#: Seconds before the end of a child that waits for its parent's threads.
CHILD_S = 30


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(BusClosedError, match="before a fork"):
        call()


def test_a_child_that_closes_its_parents_publisher_removes_nothing(bus_name: str) -> None:
    model, replica = many(3), many(3, 7)
    with WeightPublisher(bus_name, ModuleSource(model)) as publisher:
        publisher.publish(version=1)

        def work() -> None:
            refused(lambda: publisher.publish(version=2))
            refused(lambda: publisher.publish_async(version=2))
            publisher.close()

        assert forked(work) == 0
        publisher.publish(version=3)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=30) as weights:
            weights.load_into(replica)
            assert weights.version == 3 and same(model, replica)


def test_a_child_does_not_wait_for_its_parents_publication(bus_name: str) -> None:
    with WeightPublisher(bus_name, ModuleSource(many(3))) as publisher:

        def work() -> None:
            refused(lambda: publisher.publish(version=2))
            publisher.close()

        with publisher._lock:  # as held by a thread in the middle of a version
            assert forked(work) == 0


def test_a_childs_weights_say_that_they_were_leased_before_the_fork(bus_name: str) -> None:
    with published(bus_name, ModuleSource(many(3))) as (publisher, subscriber):
        publisher.publish(version=1)
        with subscriber.latest(timeout=30) as weights:

            def work() -> None:
                refused(lambda: weights.load_into(many(3)))
                refused(lambda: weights["p1"])
                refused(weights.report_applied)
                weights.close()

            assert forked(work) == 0
            assert weights.load_into(many(3))


def test_a_publisher_that_was_replaced_removes_nothing_of_its_successors(bus_name: str) -> None:
    first = WeightPublisher(bus_name, ModuleSource(many(3)))
    Path(pool_path(bus_name, "weights")).unlink()
    with WeightPublisher(bus_name, ModuleSource(many(3))) as second:
        first.close()
        second.publish(version=1)


def test_a_child_that_closes_shared_weights_ends_nothing(bus_name: str) -> None:
    with share_model(bus_name, many(3)) as shared, attach_model(bus_name, many(3)) as seen:
        with seen.reading(timeout=30):

            def work() -> None:
                for copy in (seen, shared):
                    with pytest.raises(BusClosedError, match="before a fork"), copy.reading():
                        pass
                with pytest.raises(BusClosedError, match="before a fork"), shared.stepping(1):
                    pass
                seen.close()
                shared.close()

            assert forked(work) == 0
            with pytest.raises(WaitTimeoutError), shared.stepping(1, timeout=0.05):
                pass
        with pytest.raises(BusBusyError):
            attach_model(bus_name, many(3), timeout=0, writable=True)
        with shared.stepping(1, timeout=30):
            pass


def test_the_child_of_a_dead_process_holds_no_step_up_and_is_no_trainer(bus_name: str) -> None:
    """For example a loader's worker, outliving its forking process."""
    ours, theirs = os.pipe()
    trainer = os.fork()
    if not trainer:
        try:
            with share_model(bus_name, many(3, dtype=torch.float32)) as shared, shared.reading():
                worker = os.fork()
                if not worker:
                    signal.alarm(CHILD_S)
                    signal.pause()
                os.write(theirs, str(worker).encode())
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    worker = int(os.read(ours, 20))
    try:
        os.waitpid(trainer, 0)
        successor = many(3, dtype=torch.float32)
        with (
            attach_model(bus_name, successor, timeout=30, writable=True) as shared,
            shared.stepping(1, timeout=30),
        ):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(ours)
        os.close(theirs)


def test_readers_in_the_trainers_own_process_keep_its_step_out(bus_name: str) -> None:
    with share_model(bus_name, many(3), version=1) as shared:
        late = pytest.raises(WaitTimeoutError, match="has not left")
        with shared.reading(timeout=30):
            with late, shared.stepping(2, timeout=0.05):
                pass
            with shared.reading(timeout=30) as version:
                assert version == 1
        late = pytest.raises(WaitTimeoutError, match="has not ended")
        with shared.stepping(2, timeout=30), late, shared.reading(timeout=0.05):
            pass
        with shared.reading(timeout=30) as version:
            assert version == 2
