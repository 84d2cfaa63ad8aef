"""Labels of samples name the weights that sampled, or samples have no label."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner, wait_until
from http_requests import free_port
from recorders import ask, refused, user
from stub_engine import StubEngine
from versioned_engine import NO_WEIGHTS, version_of

import shmbus
from shmbus.engines.pause_note import PauseNote, PauseNotice
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, read_pool
from shmbus.pool.server_rows import drop_dead_rows
from shmbus.recorder import settings as limits
from shmbus.segment.fleet_note import Sleep

pytest_plugins = ["recorder_fixtures"]

SESSIONS = 40
GROUP = 4
TURNS = 4


class Engine:
    """An engine process that restarts at the same address."""

    def __init__(self, spawn: Spawner, bus: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start = lambda: spawn.file(
            Path(__file__).with_name("versioned_engine.py"), self.port, bus
        )
        self.start()

    def start(self) -> None:
        self.process = self._start()
        wait_until(self.answers)

    def answers(self) -> bool:
        try:
            return ask(f"{self.url}/health")[0] == 200
        except (OSError, ValueError):
            return False

    def load(self) -> None:
        assert ask(f"{self.url}/load", {})[0] == 200

    @property
    def calls(self) -> int:
        return int(ask(f"{self.url}/asked")[1]["calls"])


@pytest.fixture
def start(spawn: Spawner, bus: shmbus.Bus) -> Callable[[], Engine]:
    return lambda: Engine(spawn, bus.name)


@pytest.fixture
def publisher(bus: shmbus.Bus) -> Iterator[PoolPublisher]:
    with PoolPublisher(bus.name, "weights", spec=PoolSpec(slot_bytes=4096)) as publisher:
        yield publisher
        publisher.close(remove=True)


def publish(publisher: PoolPublisher, version: int) -> None:
    write = publisher.begin(version, 1)
    assert write is not None
    write.finish()


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VERSION_WAIT_S", 0.2)
    monkeypatch.setattr(limits, "RETRY_S", 0.05)


def known(recorder: Any) -> list[Any]:
    engines = ask(f"{recorder.url}/healthz")[1]["engines"]
    return [(each["version"], each["version_by"]) for each in engines]


def call(recorder: Any, key: str, text: str) -> tuple[int, dict[str, Any]]:
    body = {"model": "m", "messages": [user(text)]}
    return ask(f"{recorder.url}/v1/chat/completions", body, key)


def open_session(recorder: Any) -> Any:
    status, session = ask(f"{recorder.url}/sessions", {"timeout": 30})
    assert status == 200
    return session


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM])
def test_sessions_go_on_when_a_restarted_engine_has_weights_and_every_label_is_true(
    start: Any, start_recorder: Any, publisher: PoolPublisher, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer, ends_by: signal.Signals,
) -> None:  # fmt: skip
    engine = start()
    recorder = start_recorder(engine.url, assume_trainer_version=False)
    consumer.policy_version = 5
    publish(publisher, 5)
    engine.load()
    for number in range(SESSIONS // GROUP):
        feeder.request(f"q{number}", group_size=GROUP)
    arrived, go_on = threading.Semaphore(0), threading.Event()

    def work(number: int) -> None:
        session = open_session(recorder)
        messages = [user(str(number))]
        for turn in range(TURNS):
            if turn == 1:
                arrived.release()
            if turn == 2:
                go_on.wait()
            body = {"model": "m", "messages": messages}
            answer = ask(f"{recorder.url}/v1/chat/completions", body, session["api_key"])
            assert answer[0] == 200, answer
            messages += [answer[1]["choices"][0]["message"], user("go on")]
        assert ask(f"{recorder.url}/session/score", {"score": 1.0}, session["api_key"])[0] == 200

    with ThreadPoolExecutor(SESSIONS) as pool:
        working = [pool.submit(work, number) for number in range(SESSIONS)]
        for _ in range(SESSIONS):
            assert arrived.acquire(timeout=60)
        engine.process.send_signal(ends_by)
        engine.process.wait()
        engine.start()
        go_on.set()
        wait_until(lambda: known(recorder) == [(None, "unknown")])
        assert engine.calls == 0, "without weights it is asked for nothing"
        publish(publisher, 6)
        consumer.policy_version = 6
        engine.load()
        for each in working:
            each.result(120)
    samples = [t for group in consumer.take(SESSIONS // GROUP, timeout=30.0) for t in group]
    assert len(samples) == SESSIONS
    for sample in samples:
        sampled = sample["logprobs"][sample["loss_mask"].astype(bool)]
        met = {version_of(float(value)) for value in sampled}
        assert NO_WEIGHTS not in met
        assert (min(met), max(met)) == (sample.policy_version, sample.newest_policy_version)


def test_calls_go_to_an_engine_that_is_known_and_are_refused_where_none_is(
    start: Any, start_recorder: Any, publisher: PoolPublisher, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer, short_wait: None,
) -> None:  # fmt: skip
    first, second = start(), start()
    recorder = start_recorder(first.url, second.url, assume_trainer_version=False)
    publish(publisher, 3)
    consumer.policy_version = 3
    feeder.request("q", group_size=1)
    key = open_session(recorder)["api_key"]
    assert refused(call(recorder, key, "one")) == (503, "version_unknown")
    second.load()
    wait_until(lambda: known(recorder) == [(None, "unknown"), ([3, 3], "rows")])
    assert call(recorder, key, "one")[0] == 200
    assert (first.calls, second.calls) == (0, 1)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_gets_calls_after_its_wake(
    level: int, start: Any, start_recorder: Any, publisher: PoolPublisher,
    feeder: shmbus.Feeder, consumer: shmbus.Consumer, short_wait: None,
) -> None:  # fmt: skip
    engine = start()
    recorder = start_recorder(engine.url, assume_trainer_version=False)
    publish(publisher, 3)
    consumer.policy_version = 3
    engine.load()
    feeder.request("q", group_size=1)
    key = open_session(recorder)["api_key"]
    with PauseNote(feeder.name) as note:
        note.write(PauseNotice(1, [("vllm", engine.url)], 3, None))
        note.set_sleep(engine.url, Sleep(level))
        wait_until(lambda: known(recorder) == [(None, "asleep")])
        assert refused(call(recorder, key, "one")) == (503, "asleep") and engine.calls == 0
        note.clear({engine.url})
    wait_until(lambda: known(recorder) == [([3, 3], "rows")])
    assert call(recorder, key, "one")[0] == 200


def wrong_row(bus: str, publisher: PoolPublisher, url: str, kind: str) -> PoolReader:
    """Make a row that proves no version."""
    rank = PoolReader(bus, "weights", label=f"{url} rank 0", keeps_row=True)
    with rank.latest(timeout=10.0) as newest:
        if kind == "never published":
            rank.pool.applied(newest.sequence, 99)
        elif kind == "of the future":
            rank.pool.applied(newest.sequence + 7, 4)
        elif kind == "another model":
            rank.refused(newest, 1, "model.bias: this model has it, the version does not")
        else:
            rank.applied(newest)
    if kind == "dead":
        rank.close()
    return rank


@pytest.mark.parametrize("kind", ["never published", "of the future", "another model", "dead"])
def test_a_row_that_proves_no_version_gets_no_call_and_no_label(
    kind: str, start_recorder: Any, engine: StubEngine, publisher: PoolPublisher,
    producer: shmbus.Producer, feeder: shmbus.Feeder, bus: shmbus.Bus, short_wait: None,
) -> None:  # fmt: skip
    recorder = start_recorder(engine)
    feeder.request("q", group_size=1)
    key = open_session(recorder)["api_key"]
    feeder.request("own", group_size=1)
    publish(publisher, 3)
    with wrong_row(bus.name, publisher, engine.url, kind):
        wait_until(lambda: known(recorder) == [(None, "unknown")])
        assert refused(call(recorder, key, "one")) == (503, "version_unknown")
        assert engine.calls == 0
        with pytest.raises(shmbus.VersionUnknownError) as caught:
            _ = producer.policy_version
        assert caught.value.servers == [engine.url]
        with pytest.raises(shmbus.VersionUnknownError):
            producer.version_of(engine.url)
        assert producer.requests.next(0.1) is None, "its workers wait"
    drop_dead_rows(bus.name, lambda name: name == engine.url)
    assert wait_until(lambda: producer.requests.next(0.1)).instance_id == "own"


def test_without_rows_an_engine_runs_version_0_until_there_is_another(
    start_recorder: Any, engine: StubEngine, feeder: shmbus.Feeder, consumer: shmbus.Consumer,
    short_wait: None,
) -> None:  # fmt: skip
    strict = start_recorder(engine, assume_trainer_version=False)
    assuming = start_recorder(engine, assume_trainer_version=True)
    for number in range(2):
        feeder.request(f"q{number}", group_size=1)
    sessions = [open_session(strict), open_session(assuming)]
    for recorder, session in zip([strict, assuming], sessions, strict=True):
        assert known(recorder) == [([0, 0], "start")]
        assert call(recorder, session["api_key"], "one")[0] == 200
    consumer.policy_version = 4
    strict_key, assuming_key = (each["api_key"] for each in sessions)
    assert refused(call(strict, strict_key, "two")) == (503, "version_unknown")
    assert call(assuming, assuming_key, "two")[0] == 200
    for recorder, key in ((strict, strict_key), (assuming, assuming_key)):
        assert ask(f"{recorder.url}/session/score", {"score": 1.0}, key)[0] == 200
    found = {t.instance_id: t for group in consumer.take(2, timeout=30.0) for t in group}
    first, second = (found[each["instance_id"]] for each in sessions)
    assert (first.policy_version, first.newest_policy_version) == (0, 0)
    assert "version_by" not in first.meta
    assert (second.policy_version, second.newest_policy_version) == (0, 4)
    assert second.meta["version_by"] == "trainer"


def test_an_answer_that_says_a_version_which_was_never_published_is_not_trained(
    start_recorder: Any, engine: StubEngine, feeder: shmbus.Feeder, consumer: shmbus.Consumer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from shmbus.recorder.engine_api import Reading

    recorder = start_recorder(engine)
    consumer.policy_version = 4
    feeder.request("q", group_size=1)
    key = open_session(recorder)["api_key"]
    monkeypatch.setattr(Reading, "version", 99)
    assert refused(call(recorder, key, "one")) == (404, "bad_answer")


def test_the_oldest_living_server_labels_the_samples_of_own_workers(
    producer: shmbus.Producer, consumer: shmbus.Consumer, publisher: PoolPublisher, bus: shmbus.Bus
) -> None:
    consumer.policy_version = 7
    assert producer.policy_version == 7, "no server reads weights here"
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    ranks = [PoolReader(bus.name, "weights", label=f"{url} rank 0", keeps_row=True) for url in urls]
    for version in (7, 8):
        publish(publisher, version)
        for rank in ranks[version == 8 :]:
            with rank.latest(timeout=10.0) as newest:
                rank.applied(newest)
    wait_until(lambda: len(producer._servers.read(7)) == 2)
    assert producer.policy_version == 7
    assert [producer.version_of(url) for url in urls] == [7, 8]
    ranks[0].close()
    wait_until(lambda: not _is_known(producer))
    assert producer.version_of(urls[1]) == 8, "a worker of another server goes on"
    with PoolReader(bus.name, "weights", label=f"{urls[0]} rank 0") as back:
        assert len(read_pool(bus.name, "weights").readers) == 2, "it has the row of its life before"
        with back.latest(timeout=10.0) as newest:
            back.applied(newest)
        assert wait_until(lambda: _is_known(producer) and producer.policy_version == 8)
    ranks[1].close()


def test_a_server_has_version_0_until_it_loads_one_but_not_after_it_was_started_again(
    producer: shmbus.Producer, consumer: shmbus.Consumer, publisher: PoolPublisher, bus: shmbus.Bus
) -> None:
    url = "http://127.0.0.1:1"

    def known() -> int | None:
        found = producer._servers.read(consumer.policy_version, afresh=True).get(url)
        return producer.version_of(url) if found is None else found.oldest

    def attached() -> PoolReader:
        return PoolReader(bus.name, "weights", label=f"{url} rank 0", keeps_row=True)

    assert known() == 0, "the trainer has no version yet"
    publish(publisher, 5)
    with attached() as rank:
        assert known() == 0, "it runs what it was started with"
        consumer.policy_version = 5
        assert known() is None, "which may be anything now"
        with rank.latest(timeout=10.0) as newest:
            rank.applied(newest)
        assert known() == 5
    consumer.reset_policy_version(0)
    assert known() is None
    for _ in range(2):
        with attached() as rank:
            assert known() is None, "started again, it has the row and lacks the weights"
    with attached() as rank, rank.latest(timeout=10.0) as newest:
        rank.loading(newest, 4)
        assert known() == 5
        rank.applied(newest)
        assert known() == 5


def test_a_version_asked_behind_an_answer_is_of_now(
    producer: shmbus.Producer, consumer: shmbus.Consumer, publisher: PoolPublisher, bus: shmbus.Bus
) -> None:
    url = "http://127.0.0.1:1"
    with PoolReader(bus.name, "weights", label=f"{url} rank 0") as rank:
        for version in range(1, 20):
            publish(publisher, version)
            with rank.latest(timeout=10.0) as newest:
                rank.applied(newest)
            assert producer.version_of(url) == version


def _is_known(producer: shmbus.Producer) -> bool:
    try:
        return producer.policy_version >= 0
    except shmbus.VersionUnknownError:
        return False


def test_a_removed_pool_still_tells_what_living_servers_run_and_keeps_no_memory_for_dead_ones(
    producer: shmbus.Producer, publisher: PoolPublisher, bus: shmbus.Bus
) -> None:
    with PoolReader(bus.name, "weights", label="http://127.0.0.1:1 rank 0", keeps_row=True) as rank:
        publish(publisher, 2)
        with rank.latest(timeout=10.0) as newest:
            rank.applied(newest)
        wait_until(lambda: producer.policy_version == 2)
        publisher.close(remove=True)
        assert producer._servers.read(0, afresh=True) and producer.policy_version == 2
    wait_until(lambda: not _is_known(producer), what="a server that it lost")
    assert not _is_known(producer), "it may come back without weights"
    mapped = Path(f"/proc/{os.getpid()}/maps").read_text()
    assert f"shmbus-weights.{bus.name}" not in mapped
    with PoolPublisher(bus.name, "weights", spec=PoolSpec(slot_bytes=4096)) as next_publisher:
        publish(next_publisher, 3)
        assert not _is_known(producer), "the next pool says nothing of the server yet"
        with PoolReader(bus.name, "weights", label="http://127.0.0.1:2 rank 0") as rank:
            with rank.latest(timeout=10.0) as newest:
                rank.applied(newest)
            assert wait_until(lambda: _is_known(producer) and producer.policy_version) == 3
        next_publisher.close(remove=True)
