"""Numbers of versions: they rise within a life, and readers follow from one life to the next."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Spawner, beside, wait_until
from weight_models import fill, load_newest, many

from shmbus import BusRemovedError, VersionUnknownError, WaitTimeoutError
from shmbus.engines.rows import RankRows
from shmbus.pool import pool_status, read_pool, unlink_pool
from shmbus.pool.pool_file import pool_path
from shmbus.pool.server_rows import ServerRows
from shmbus.weights import ModuleSource, VersionOrderError, WeightPublisher, WeightSubscriber

CARRIERS = ["shm", "memfd"]


class Trainer:
    """Publishes a model filled with a given number."""

    def __init__(self, bus: str, **options: object) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.publisher = WeightPublisher(bus, ModuleSource(self.model), **options)  # type: ignore[arg-type]

    def publish(self, version: int, value: float) -> None:
        fill(self.model, value)
        self.publisher.publish(version)


@pytest.fixture
def clean(bus_name: str) -> Iterator[None]:
    yield
    Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)


pytestmark = pytest.mark.usefixtures("clean")


def follow(subscriber: WeightSubscriber, newest: int | None) -> tuple[int, float]:
    """The loop of docs/weights.md, once."""
    version = subscriber.wait(newer_than=newest, timeout=10)
    with subscriber.latest(timeout=0) as weights:
        return version, float(weights["bias"][0])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_number_is_used_once_in_a_life_and_rises(bus_name: str, carrier: str) -> None:
    trainer = Trainer(bus_name, carrier=carrier)
    with trainer.publisher, WeightSubscriber(bus_name) as subscriber:
        trainer.publish(7, 1)
        for version in (7, 6, -1):
            with pytest.raises(VersionOrderError, match=rf"above 7.*got {version}.*new_life"):
                trainer.publish(version, 2)
            with pytest.raises(VersionOrderError):
                trainer.publisher.publish_async(version).wait(10)
        assert follow(subscriber, None) == (7, 1)
        trainer.publish(8, 3)
        assert follow(subscriber, 7) == (8, 3)


def test_a_version_that_was_not_published_leaves_its_number_free(bus_name: str) -> None:
    trainer = Trainer(bus_name, timeout=0.05)
    with trainer.publisher, WeightSubscriber(bus_name) as subscriber:
        trainer.publish(1, 1)
        with subscriber.latest(timeout=5):
            trainer.publish(2, 2)
            with pytest.raises(WaitTimeoutError, match="no slot became free for version 3"):
                trainer.publish(3, 3)
        trainer.publish(3, 3)
        assert follow(subscriber, 1) == (3, 3)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("how", ["said", "new publisher", "made again"])
def test_a_reader_follows_where_training_went_back(bus_name: str, carrier: str, how: str) -> None:
    trainer = Trainer(bus_name, carrier=carrier, keep=carrier == "shm" and how != "made again")
    with WeightSubscriber(bus_name) as subscriber:
        newest = None
        for version in (8, 9):
            trainer.publish(version, version)
            newest, value = follow(subscriber, newest)
            assert (newest, value) == (version, version)
        with pytest.raises(WaitTimeoutError, match="newer"):
            subscriber.wait(newer_than=newest, timeout=0)
        if how == "said":
            trainer.publisher.new_life()
        else:
            trainer.publisher.close()
            trainer = Trainer(bus_name, carrier=carrier)
        for version in (5, 6, 9, 10):
            trainer.publish(version, version + 0.5)
            newest, value = follow(subscriber, newest)
            assert (newest, value) == (version, version + 0.5)
        trainer.publisher.close()


@pytest.mark.parametrize("version", [5, 9])
def test_a_waiting_reader_gets_a_new_lifes_first_version(bus_name: str, version: int) -> None:
    trainer = Trainer(bus_name)
    with trainer.publisher, WeightSubscriber(bus_name) as subscriber:
        trainer.publish(9, 1)
        # It knows 9 from elsewhere: this subscriber received nothing yet.
        with beside(subscriber.wait, newer_than=9, timeout=30) as got:
            wait_until(lambda: read_pool(bus_name, "weights").readers)
            time.sleep(0.1)
            trainer.publisher.new_life()
            trainer.publish(version, 2)
    assert got.result() == version


DIES = """
import os, sys, torch
from shmbus.weights import ModuleSource, WeightPublisher
model = torch.nn.Linear(8, 8)
publisher = WeightPublisher(sys.argv[1], ModuleSource(model), patches=True)
for version in (6, 7):
    with torch.no_grad():
        model.weight.fill_(version)
        model.bias.fill_(version)
    publisher.publish(version)
os.kill(os.getpid(), 9)
"""


def test_a_number_used_twice_is_the_last_and_unpatched(bus_name: str, spawn: Spawner) -> None:
    model = torch.nn.Linear(8, 8)
    spawn.script(DIES, bus_name).wait(60)
    with WeightSubscriber(bus_name) as subscriber:
        load_newest(subscriber, model)
        trainer = Trainer(bus_name, patches=True, slots=2)
        with trainer.publisher:
            for version, value in ((6, 60), (7, 70)):
                trainer.publish(version, value)
                if version == 6:
                    continue  # it knew 7 of the previous life, and skips this version
                with subscriber.at(7) as weights:
                    assert weights["bias"][0] == 70
                    weights.load_into(model)
                    assert model.bias[0] == 70 and model.weight[3, 3] == 70


def test_an_exception_keeps_the_weights_and_a_normal_end_removes_them(bus_name: str) -> None:
    path = pool_path(bus_name, "weights")
    with Trainer(bus_name).publisher as publisher:
        publisher.publish(1)
    assert not os.path.exists(path)
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), Trainer(bus_name).publisher as publisher:
            publisher.publish(2)
            raise error
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=0) as weights:
            assert weights.version == 2
    with Trainer(bus_name).publisher:
        pass
    assert not os.path.exists(path)


class Named:
    address = "http://127.0.0.1:1"


def test_a_number_of_an_earlier_life_is_not_taken_for_the_new_version(bus_name: str) -> None:
    rows, of_workers = RankRows(bus_name), ServerRows(bus_name)
    trainer = Trainer(bus_name)
    subscriber = WeightSubscriber(bus_name, label=f"{Named.address} rank 0")
    with trainer.publisher:
        for value in (1, 2):
            trainer.publish(7, value)
            trainer.publisher.new_life()
            if value == 2:
                missing = rows.missing(Named(), 1, 7)
                assert missing is not None and not missing.final
            load_newest(subscriber, trainer.model)
            assert rows.missing(Named(), 1, 7) is None
            assert rows.whole_version(Named(), 1) == 7
        subscriber.close()  # the process lives on, as an engine under another bus
        with pytest.raises(VersionUnknownError, match="7, or reads another bus"):
            of_workers.version_of(Named.address, 7)
        of_workers.close()


def test_a_look_at_one_server_reads_its_rows_alone(
    bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = [f"{Named.address}{more} rank {rank}" for more in ("", "0", "1") for rank in (0, 1)]
    described: list[str] = []
    describe = pool_status._reader

    def counting(row: dict[str, Any], life: int) -> pool_status.ReaderStatus:
        described.append(row["label"])
        return describe(row, life)

    trainer = Trainer(bus_name)
    with trainer.publisher, contextlib.ExitStack() as stack:
        trainer.publish(7, 1)
        for label in labels:
            stack.enter_context(WeightSubscriber(bus_name, label=label)).latest(timeout=5).close()
        monkeypatch.setattr(pool_status, "_reader", counting)
        assert RankRows(bus_name).missing(Named(), 2, 7) is not None
    assert described == labels[:2]


def test_weights_that_were_removed_are_not_published_to_nobody(bus_name: str) -> None:
    with WeightPublisher(bus_name, ModuleSource(many(2))) as publisher:
        publisher.publish(version=1)
        unlink_pool(bus_name, "weights")
        with pytest.raises(BusRemovedError, match="make a new publisher"):
            publisher.publish(version=2)
