"""The versions that a call met: by the rows of its engine's ranks, which salt its prefix cache."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from recorders import Scene, ask, chat, user

from shmbus.pool.pool_file import pool_path

pytest_plugins = ["recorder_fixtures"]

torch = pytest.importorskip("torch")


def test_a_call_over_new_weights_has_both_versions_and_the_next_a_new_salt(scene: Scene) -> None:
    from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

    model = torch.nn.Linear(2, 2)
    scene.consumer.policy_version = 9
    session = scene.open()
    with (
        WeightPublisher(scene.producer.name, ModuleSource(model)) as publisher,
        WeightSubscriber(scene.producer.name, label=f"{scene.engine.url} rank 0") as rank,
    ):

        def load(version: int) -> None:
            publisher.publish(version=version)
            with rank.latest(timeout=30.0) as newest:
                newest.load_into(model)

        def known() -> Any:
            (one,) = ask(f"{scene.recorder.url}/healthz")[1]["engines"]
            return one["version_by"] == "rows" and one["version"]

        load(3)
        assert wait_until(known) == [3, 3]
        chat(session, [user("one")])
        scene.engine.gate = asyncio.Event()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(chat, session, [user("two")])
            wait_until(lambda: scene.engine.calls == 2)
            load(4)
            scene.engine.let_go()
            waiting.result(60)
        wait_until(lambda: known() == [4, 4])
        chat(session, [user("three")], cache_salt="mine")
        chat(session, [user("four")])
        assert session.finish(1.0)
        (sample,) = scene.taken()
    assert (sample.policy_version, sample.newest_policy_version) == (3, 4)
    salts = [one.body["cache_salt"] for one in scene.engine.record]
    assert [salt.partition(".")[0] for salt in salts] == ["3", "3", "mine", "4"]
    assert salts[0] == salts[1]


@pytest.mark.parametrize("pool_is_made", [False, True])
def test_without_rows_the_trainers_version_counts(pool_is_made: bool, scene: Scene) -> None:
    scene.consumer.policy_version = 9
    session = scene.open()
    made = Path(pool_path(scene.producer.name, "weights"))
    if pool_is_made:
        made.touch()
    try:
        chat(session, [user("one")])
    finally:
        made.unlink(missing_ok=True)
    assert session.finish(1.0)
    assert scene.taken()[0].policy_version == 9
    assert scene.engine.record[0].body["cache_salt"] == scene.producer.cache_salt
    assert scene.producer.cache_salt.partition(".")[0] == "9"
