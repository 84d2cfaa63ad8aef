"""The relay on a Ray cluster of several nodes on this machine, with token authentication on."""

import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import answering
from relay.mirrors import version_of

import shmbus
import shmbus.relay
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, read_pool, unlink_pool

# Read by Ray during its import, and inherited by its processes.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
ray = pytest.importorskip("ray")
on_ray = pytest.importorskip("shmbus.relay.on_ray")
pytestmark = pytest.mark.timeout(240)
DEADLINE_S = 60.0
KILLS = int(os.environ.get("SHMBUS_TEST_RAYLETS", "2"))
#: Far above the time that Ray needs to see a death and to start an actor on a busy machine.
RAYLET_S = 150.0


def wait_until(holds: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"waited {DEADLINE_S:g} s for {what}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    for name in ("left", "right", "trainer"):
        made.add_node(num_cpus=1, resources={name: 1}, object_store_memory=100 << 20)
    ray.init(address=made.address, namespace="shmbus", log_to_driver=True)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def buses() -> Iterator[dict[str, str]]:
    prefix = f"test-ray-{os.getpid()}-{secrets.token_hex(3)}"
    names = {each: f"{prefix}.{each}" for each in ("left", "right", "trainer")}
    for name in names.values():
        shmbus.Bus.create(name, "16MiB").close()
    yield names
    for name in names.values():
        shmbus.unlink(name)


def put(names: list[str], first: int, groups: int, pause_s: float = 0.0) -> None:
    producers = [shmbus.Producer(name) for name in names]
    for group in range(first, first + groups):
        for index in range(4):
            producers[index % 2].put(
                f"q{group}", group_size=4, index=index, score=float(index),
                tokens=np.full(500, group, np.int32),
            )  # fmt: skip
        time.sleep(pause_s)
    for producer in producers:
        producer.close()


def take(
    consumers: list[shmbus.Consumer], first: int, groups: int, within_s: float = DEADLINE_S
) -> None:
    seen: set[str] = set()
    deadline = time.monotonic() + within_s
    while len(seen) < groups:
        assert time.monotonic() < deadline, f"{len(seen)} of {groups} groups"
        for group in itertools.chain(*(consumer.take(timeout=0.2) for consumer in consumers)):
            assert group.instance_id not in seen
            seen.add(group.instance_id)
            assert all((t["tokens"] == int(group.instance_id[1:])).all() for t in group)
            group.ack()
    assert seen == {f"q{i}" for i in range(first, first + groups)}


def acknowledged(name: str) -> int:
    with shmbus.Bus.open(name) as bus:
        return bus.stats().acknowledged


@pytest.mark.slow
def test_groups_cross_nodes_and_every_actor_may_die(cluster: Any, buses: dict[str, str]) -> None:
    sources = [buses["left"], buses["right"]]
    relay = shmbus.relay.start(
        [f"{buses['left']}@left", f"{buses['right']}@right"], [f"{buses['trainer']}@trainer"]
    )
    try:
        with shmbus.Consumer(buses["trainer"]) as consumer:
            put(sources, 0, 50)
            take([consumer], 0, 50)
            said = relay.describe()
            assert sorted(each["kind"] for each in said) == [
                "coordinator", "sink", "source", "source"
            ]  # fmt: skip
            for round_, each in enumerate(said):
                first = 50 + 50 * round_
                put(sources, first, 25)
                os.kill(each["pid"], signal.SIGKILL)
                put(sources, first + 25, 25)
                take([consumer], first, 50)
            wait_until(
                lambda: all(acknowledged(name) == 500 for name in sources),
                "all sources to let go of what was acknowledged",
            )
            note = wait_until(lambda: idle(relay), "a relay with nothing under way")
            assert (note.lost, note.refused, note.missing) == (0, 0, [])
    finally:
        relay.stop()


def answer(producer: shmbus.Producer, request: shmbus.Request) -> None:
    producer.requests.answer(request, tokens=np.repeat(request["prompt"], 50))


@pytest.mark.slow
def test_prompts_cross_nodes_and_every_actor_may_die(cluster: Any, buses: dict[str, str]) -> None:
    sources = [buses["left"], buses["right"]]
    relay = shmbus.relay.start(
        [f"{buses['left']}@left", f"{buses['right']}@right"], [f"{buses['trainer']}@trainer"]
    )

    def offer(first: int, groups: int) -> None:
        for group in range(first, first + groups):
            feeder.request(f"q{group}", group_size=4, prompt=np.full(10, group, np.int32))

    try:
        with (
            shmbus.Consumer(buses["trainer"]) as consumer,
            shmbus.Feeder(buses["trainer"]) as feeder,
            answering(sources, answer),
        ):
            offer(0, 50)
            take([consumer], 0, 50)
            for round_, each in enumerate(relay.describe(), 1):
                offer(50 * round_, 25)
                os.kill(each["pid"], signal.SIGKILL)
                offer(50 * round_ + 25, 25)
                take([consumer], 50 * round_, 50)
            wait_until(
                lambda: sum(map(acknowledged, sources)) == 1000,
                "all sources to let go of what was acknowledged, with no sample made twice",
            )
    finally:
        relay.stop()


def idle(relay: on_ray.Relay) -> Any:
    note = relay.status()
    return note if not (note.announced or note.ready or note.assigned) else None


@pytest.mark.slow
def test_weights_cross_nodes_and_every_actor_may_die(cluster: Any, buses: dict[str, str]) -> None:
    sources = [buses["left"], buses["right"]]
    relay = shmbus.relay.start(
        [f"{buses['left']}@left", f"{buses['right']}@right"], [f"{buses['trainer']}@trainer"],
        weights=True,
    )  # fmt: skip
    payload = np.zeros(3 << 20, np.uint8)
    spec = PoolSpec(slot_bytes=payload.nbytes)

    def publish(version: int) -> None:
        with publisher.begin(version, payload.nbytes) as write:
            np.copyto(write.view(), payload + version)

    def arrived(version: int) -> bool:
        note = relay.weights()
        return {each.version for each in note.mirrors} == {version}

    try:
        with PoolPublisher(buses["trainer"], "weights", spec=spec) as publisher:
            publish(1)
            wait_until(lambda: not any("error" in each for each in relay.describe()), "actors")
            wait_until(lambda: arrived(1), "the first version on each node")
            said = [each for each in relay.describe() if each["kind"] in ("weights", "mirror")]
            assert sorted(each["kind"] for each in said) == ["mirror", "mirror", "weights"]
            for version, each in enumerate(said, 2):
                os.kill(each["pid"], signal.SIGKILL)
                publish(version)
                wait_until(
                    lambda version=version: on_all(sources, version), "a version after a death"
                )
            for name in sources:
                with PoolReader(name, "weights") as reader, reader.latest(timeout=10) as lease:
                    assert (lease.view() == lease.version).all()
            with pytest.raises(shmbus.BusBusyError, match="with different"):
                shmbus.relay.start(
                    [f"{buses['left']}@left", f"{buses['right']}@right"],
                    [f"{buses['trainer']}@trainer"],
                )
            assert all(each["balanced"] for each in relay.ledgers())
            publisher.close(remove=True)
    finally:
        relay.stop()
        for name in sources:
            with contextlib.suppress(shmbus.BusNotFoundError):
                unlink_pool(name, "weights")


def on_all(names: list[str], version: int) -> bool:
    return all(read_pool(name, "weights").version == version for name in names)


@pytest.mark.slow
def test_a_lost_trainers_node_is_forgotten(cluster: Any, buses: dict[str, str]) -> None:
    node = cluster.add_node(num_cpus=1, resources={"gone": 1}, object_store_memory=100 << 20)
    doomed = f"{buses['trainer']}.doomed"
    shmbus.Bus.create(doomed, "16MiB").close()
    relay = shmbus.relay.start(
        [f"{buses['left']}@left", f"{buses['right']}@right"],
        [f"{buses['trainer']}@trainer", f"{doomed}@gone"],
    )
    try:
        put([buses["left"], buses["right"]], 0, 40)

        def committed() -> int:
            with shmbus.Bus.open(doomed) as bus:
                return bus.stats().committed

        wait_until(committed, "groups at the node that dies")
        cluster.remove_node(node)
        shmbus.unlink(doomed)
        (lost,) = [each for each in relay.addresses if "doomed" in each]
        relay.forget(lost)
        with shmbus.Consumer(buses["trainer"]) as consumer:
            take([consumer], 0, 40)
        with pytest.raises(KeyError, match="no peer"):
            relay.forget(lost)
        (coordinator,) = [each for each in relay.describe() if each.get("kind") == "coordinator"]
        os.kill(coordinator["pid"], signal.SIGKILL)
        put([buses["left"], buses["right"]], 40, 20)
        with shmbus.Consumer(buses["trainer"]) as consumer:
            take([consumer], 40, 20)
        assert relay.status().missing == []
    finally:
        relay.stop()


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_raylets_lose_double_and_tear_nothing(
    cluster: Any, buses: dict[str, str], seed: int
) -> None:
    """One node or two at a time; a node returns with its resource under another id."""

    def start(place: str) -> Any:
        return cluster.add_node(num_cpus=1, resources={place: 1}, object_store_memory=100 << 20)

    rng = random.Random(seed)
    second = f"{buses['trainer']}.second"
    shmbus.Bus.create(second, "16MiB").close()
    sources, trainers = [buses["left"], buses["right"]], [buses["trainer"], second]
    nodes = {f"node-{number}": start(f"node-{number}") for number in range(4)}
    places = [f"{bus}@{place}" for bus, place in zip(sources + trainers, nodes, strict=True)]
    relay = shmbus.relay.start(places[:2], places[2:])
    try:
        with contextlib.ExitStack() as stack:
            consumers = [stack.enter_context(shmbus.Consumer(name)) for name in trainers]
            pool = stack.enter_context(ThreadPoolExecutor(1))
            for first in range(0, 50 * KILLS, 50):
                putting = pool.submit(put, sources, first, 50, 0.04)
                for place in rng.sample(list(nodes), rng.choice([1, 1, 1, 2])):
                    time.sleep(rng.uniform(0.0, 1.0))
                    cluster.remove_node(nodes[place], allow_graceful=False)
                    nodes[place] = start(place)
                take(consumers, first, 50, RAYLET_S)
                putting.result()
        wait_until(
            lambda: all(acknowledged(name) == 100 * KILLS for name in sources), "sources to let go"
        )
        assert sum(map(acknowledged, trainers)) == 200 * KILLS
        assert all(each["balanced"] for each in relay.ledgers())
    finally:
        relay.stop()
        for node in nodes.values():
            cluster.remove_node(node)
        shmbus.unlink(second)


def test_a_bus_that_no_node_has_is_named(cluster: Any, buses: dict[str, str]) -> None:
    with pytest.raises(shmbus.BusNotFoundError, match="no node has the trainer's bus 'nowhere'"):
        shmbus.relay.start(f"{buses['left']}@left", ["nowhere"])
    with pytest.raises(TypeError, match="max_policy_lag"):
        shmbus.relay.start(f"{buses['left']}@left", ["nowhere"], max_lag=3)


def test_a_bus_as_source_and_trainers_is_refused(cluster: Any, buses: dict[str, str]) -> None:
    left, trainer = f"{buses['left']}@left", f"{buses['trainer']}@trainer"
    for source, trainers in ((left, [left]), (left, [trainer, trainer]), ([left, left], [trainer])):
        with pytest.raises(ValueError, match="is named twice"):
            shmbus.relay.start(source, trainers)


def test_a_second_start_returns_or_refuses_a_relay(cluster: Any, buses: dict[str, str]) -> None:
    left, trainer = f"{buses['left']}@left", f"{buses['trainer']}@trainer"
    relay = shmbus.relay.start(left, [trainer])
    try:
        assert shmbus.relay.start(left, [trainer]).addresses == relay.addresses
        with pytest.raises(shmbus.BusBusyError, match="runs already, with different"):
            shmbus.relay.start(left, [trainer], release="put")
        with pytest.raises(shmbus.BusBusyError, match="runs already, with different"):
            shmbus.relay.start(left, [trainer], keep="/tmp")
        with pytest.raises(ValueError, match="groups would come back to"):
            shmbus.relay.start(trainer, [left])
    finally:
        relay.stop()
    wait_until(lambda: all("error" in each for each in relay.describe()), "all to end")
    assert not any(each["balanced"] for each in relay.ledgers())
    with pytest.raises(shmbus.DaemonUnavailableError, match="does not answer"):
        relay.forget(relay.addresses[0])
    relay.stop()


def test_the_command_starts_shows_and_stops_it(cluster: Any, buses: dict[str, str]) -> None:
    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "shmbus", *words, "--ray", cluster.address],
            check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    name = buses["left"]
    trainer = f"{buses['trainer']}@trainer"
    said = command("relay", f"{name}@left", "--trainer", trainer, "--sample-retries", "2")
    assert "relays" in said
    with shmbus.Producer(name) as producer, shmbus.Consumer(buses["trainer"]) as consumer:
        producer.put("q", group_size=2, index=0, score=0.0)
        producer.fail("q", 1, "out of memory", group_size=2)
        wait_until(lambda: producer.requests.retries(), "the failed sample to be asked for")
        shown = command("relay", name, "--status")
        assert buses["trainer"] in shown and "source" in shown
        assert "1 samples are asked for again" in shown and "1 of 2" in shown
        producer.put("q", group_size=2, index=1, score=1.0)
        (group,) = wait_until(lambda: consumer.take(timeout=0.2), "the group")
        group.ack()
        wait_until(lambda: acknowledged(name) == 2, "its source to let go")
        with shmbus.Bus.open(name) as bus:
            wait_until(lambda: bus.stats().dropped == {"failed": 1}, "the report to be released")
        nodes = command("status", name)
        assert "the ledgers of 2 buses" in nodes and "dropped by sources: 1 failed" in nodes
        (source, sink) = sorted(
            json.loads(command("status", name, "--json")), key=itemgetter("kind"), reverse=True
        )
        assert source["kind"] == "source" and sink["kind"] == "sink"
        assert source["ledger"]["committed"] == 3 and source["ledger"]["dropped"] == {"failed": 1}
        assert sink["ledger"]["acknowledged"] == 2 and sink["balanced"] and source["balanced"]
    assert "ended" in command("relay", name, "--stop")


def names_of(note: Any) -> set[str]:
    return {peer.name for peer in note.peers if peer.heard_s < DEADLINE_S}


@pytest.mark.slow
def test_a_node_joins_and_leaves_with_its_mirror(cluster: Any, buses: dict[str, str]) -> None:
    left, right, trainer = (buses[each] for each in ("left", "right", "trainer"))
    relay = shmbus.relay.start(f"{left}@left", [f"{trainer}@trainer"], weights=True)
    payload = np.zeros(1 << 16, np.uint8)
    spec = PoolSpec(slot_bytes=payload.nbytes)

    def kill(kind: str) -> None:
        for each in relay.describe():
            if each.get("kind") == kind:
                os.kill(each["pid"], signal.SIGKILL)

    try:
        with (
            PoolPublisher(trainer, "weights", spec=spec) as publisher,
            shmbus.Consumer(trainer) as consumer,
        ):
            with publisher.begin(1, payload.nbytes) as write:
                np.copyto(write.view(), payload)
            joined = relay.join(f"{right}@right")
            assert len(joined) == 2
            put([left, right], 0, 20)
            take([consumer], 0, 20)
            wait_until(lambda: version_of(right) == 1, "the version on the new node")
            with pytest.raises(shmbus.BusNotFoundError, match="no further node"):
                relay.join(f"{right}@right")
            kill("coordinator")
            kill("weights")
            put([left, right], 20, 20)
            take([consumer], 20, 20)
            found = shmbus.relay.start(
                [f"{left}@left", f"{right}@right"], [f"{trainer}@trainer"], weights=True
            )
            assert sorted(found.addresses) == sorted(relay.addresses)
            (source,) = [each for each in joined if "weights:" not in each]
            relay.forget(source)
            with pytest.raises(KeyError, match="no peer"):
                relay.forget(source)
            wait_until(lambda: names_of(relay.status()) == {left, trainer}, "one source less")
            note = wait_until(relay.weights, "the mirrors")
            wait_until(lambda: len(relay.weights().mirrors) == 1, f"one mirror less than {note}")
            kill("coordinator")
            put([left, left], 40, 5)
            take([consumer], 40, 5)
            wait_until(lambda: names_of(relay.status()) == {left, trainer}, "no more than before")
    finally:
        relay.stop()
        for name in (left, right, trainer):
            with contextlib.suppress(shmbus.BusNotFoundError):
                unlink_pool(name, "weights")


@pytest.mark.slow
def test_a_start_names_a_late_actor(cluster: Any, buses: dict[str, str], tmp_path: Path) -> None:
    left, trainer = f"{buses['left']}@left", f"{buses['trainer']}@trainer"
    file = tmp_path / f"{buses['trainer']}.kept"
    file.write_bytes(b"somebody's text, of more bytes than a head has")
    with pytest.raises(shmbus.DaemonUnavailableError, match=r"1 of 3 actors.*another directory"):
        shmbus.relay.start(left, [trainer], keep=str(tmp_path))
    file.unlink()
    relay = shmbus.relay.start(left, [trainer], keep=str(tmp_path))
    try:
        # A longer name belongs to another relay.
        other = f"{buses['left']}.eval"
        shmbus.Bus.create(other, "4MiB").close()
        shmbus.Bus.create(f"{other}-trainer", "4MiB").close()
        longer = shmbus.relay.start(f"{other}@left", [f"{other}-trainer@trainer"])
        assert not set(on_ray.find(buses["left"]).addresses) & set(longer.addresses)
        relay.stop()
        wait_until(lambda: longer.status().missing == [], "all of the longer name's actors")
        longer.stop()
    finally:
        relay.stop()
        for name in (other, f"{other}-trainer"):
            shmbus.unlink(name)
