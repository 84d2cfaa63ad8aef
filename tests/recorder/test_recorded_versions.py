"""The versions that a call met: by the rows of its engine's ranks, which salt its prefix cache."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from recorders import ask, chat, user
from stub_engine import StubEngine

import shmbus
from shmbus.pool.lifecycle import pool_path
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]

torch = pytest.importorskip("torch")


def test_a_call_during_which_new_weights_came_has_met_both_versions_and_the_next_has_another_salt(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

    model = torch.nn.Linear(2, 2)
    consumer.policy_version = 9
    feeder.request("q", group_size=1)
    session = producer.session(producer.requests.next(30.0))
    with (
        WeightPublisher(producer.name, ModuleSource(model)) as publisher,
        WeightSubscriber(producer.name, label=f"{engine.url} rank 0") as rank,
    ):

        def load(version: int) -> None:
            publisher.publish(version=version)
            with rank.latest(timeout=30.0) as newest:
                newest.load_into(model)

        def known() -> Any:
            (one,) = ask(f"{recorder.url}/healthz")[1]["engines"]
            return one["version_by"] == "rows" and one["version"]

        load(3)
        assert wait_until(known) == [3, 3]
        chat(session, [user("one")])
        engine.gate = asyncio.Event()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(chat, session, [user("two")])
            wait_until(lambda: engine.calls == 2)
            load(4)
            engine.let_go()
            waiting.result(60)
        wait_until(lambda: known() == [4, 4])
        chat(session, [user("three")], cache_salt="mine")
        chat(session, [user("four")])
        assert session.finish(1.0)
        (group,) = consumer.take(1, timeout=30.0)
    assert (group[0].policy_version, group[0].newest_policy_version) == (3, 4)
    salts = [one.body["cache_salt"] for one in engine.record]
    assert [salt.partition(".")[0] for salt in salts] == ["3", "3", "mine", "4"]
    assert salts[0] == salts[1]


def test_without_rows_the_trainers_version_counts(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    consumer.policy_version = 9
    feeder.request("q", group_size=1)
    session = producer.session(producer.requests.next(30.0))
    chat(session, [user("one")])
    assert session.finish(1.0)
    (group,) = consumer.take(1, timeout=30.0)
    assert group[0].policy_version == 9
    assert engine.record[0].body["cache_salt"] == producer.cache_salt
    assert producer.cache_salt.partition(".")[0] == "9"


def test_a_call_while_the_pool_of_weights_is_made_has_the_trainers_version(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    consumer.policy_version = 9
    feeder.request("q", group_size=1)
    session = producer.session(producer.requests.next(30.0))
    made = Path(pool_path(producer.name, "weights"))
    made.touch()
    try:
        chat(session, [user("one")])
    finally:
        made.unlink()
    assert session.finish(1.0)
    (group,) = consumer.take(1, timeout=30.0)
    assert group[0].policy_version == 9
