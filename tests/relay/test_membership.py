"""Nodes join and leave a running relay; names keep nodes apart; a start names late actors."""

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
from answering import answering
from conftest import Spawner, take_groups, wait_until
from relay.local import COORDINATOR, put_group, relay, stats
from relay.mirrors import SOURCE, Trainer, mirrors, version_of

import shmbus
from shmbus.relay.command import show_weights
from shmbus.relay.host import Host, PartyPlan
from shmbus.relay.keep import Keep
from shmbus.relay.mirror_party import MirrorParty
from shmbus.relay.source_party import SourceParty
from shmbus.relay.weights_party import WeightsNote

pytest_plugins = ["relay.relay_fixtures"]
SIZE, SEED = 1 << 16, 7
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def test_a_node_joins_a_running_relay_and_leaves_it(buses: dict[str, str]) -> None:
    a, b, t = (buses[each] for each in "abt")
    with relay([a], [t]) as made, shmbus.Consumer(t) as consumer:
        put_group([a], 0)
        take_groups(consumer, 1)[0].ack()
        made.coordinator.joined.append(b)
        made.start(b, lambda box: SourceParty(b, box, COORDINATOR))
        put_group([a, b], 1)
        take_groups(consumer, 1)[0].ack()
        wait_until(lambda: stats(b).acknowledged == 2)
        assert made.coordinator.note().missing == []
        made.end(b)
        made.coordinator.forgotten.append(b)
        wait_until(lambda: len(made.coordinator.note().peers) == 2)
        put_group([a], 2)
        take_groups(consumer, 1)[0].ack()


def test_workers_of_a_node_that_joined_make_prompts(buses: dict[str, str]) -> None:
    a, b, t = (buses[each] for each in "abt")
    with (
        relay([a], [t]) as made,
        shmbus.Consumer(t) as consumer,
        answering([b], lambda producer, request: producer.requests.answer(request, tokens=[1])),
    ):
        consumer.request("q", group_size=2, prompt=np.zeros(3, np.int32))
        made.coordinator.joined.append(b)
        made.start(b, lambda box: SourceParty(b, box, COORDINATOR))
        assert take_groups(consumer, 1)[0].instance_id == "q"


def test_a_mirror_joins_gets_the_newest_version_and_is_forgotten(bus_name: str) -> None:
    nodes = [f"{bus_name}.{n}" for n in range(3)]
    trainer = Trainer(bus_name, SIZE, SEED)
    with mirrors(bus_name, nodes[:2]) as made:
        party = made.parties[SOURCE]
        trainer.publish(1)
        wait_until(lambda: all(version_of(node) == 1 for node in nodes[:2]))
        made.start(nodes[2], lambda box: MirrorParty(nodes[2], box, SOURCE))
        party.joined.append(nodes[2])
        wait_until(lambda: version_of(nodes[2]) == 1)
        made.end(nodes[0])
        party.forgotten.append(nodes[0])
        wait_until(lambda: {each.address for each in party.note().mirrors} == {*nodes[1:]})
        trainer.publish(2)
        wait_until(lambda: all(version_of(node) == 2 for node in nodes[1:]))
    trainer.close()
    shmbus.pool.unlink_pool(nodes[2], "weights")


CHANGES = {
    "a source joins": ("coordinator", "c", True, ["a", "b", "c"], True),
    "a source joins twice": ("coordinator", "a", True, ["a", "b"], True),
    "a source leaves": ("coordinator", "a", False, ["b"], True),
    "a trainer's node leaves": ("coordinator", "t", False, ["a", "b"], True),
    "a stranger leaves": ("coordinator", "x", False, ["a", "b"], False),
    "a mirror joins": ("weights", "m2", True, ["m", "m2"], True),
    "a mirror leaves": ("weights", "m", False, [], True),
    "a stranger of mirrors leaves": ("weights", "a", False, ["m"], False),
}


@pytest.mark.parametrize(
    ("kind", "address", "joins", "left", "known"), CHANGES.values(), ids=CHANGES
)
def test_the_plan_of_a_party_that_begins_again_has_its_peers_of_now(
    kind: str, address: str, joins: bool, left: list[str], known: bool
) -> None:
    if kind == "coordinator":
        plan = PartyPlan(kind, "own", "own", sources=["a", "b"], sinks=["t"])
    else:
        plan = PartyPlan(kind, "own", "own", "no-such-bus", mirrors=["m"])
    host = Host(plan, lambda *message: None)
    assert host.change_peers(address, joins) == known
    assert (host.plan.sources if kind == "coordinator" else host.plan.mirrors) == left
    assert host.plan.sinks == (["t"] if kind == "coordinator" and address != "t" else [])


@needs_ray
def test_each_resource_has_an_address_of_its_own() -> None:
    from shmbus.relay.on_ray import _Place

    resources = ["roll/out", "roll-out", "roll out", "node:10.0.0.7", "node-10.0.0.7", "é", "ü"]
    addresses = [_Place("run1", each).address("run1") for each in resources]
    assert len(set(addresses)) == len(resources)
    assert addresses[1] == "relay.run1.run1@roll-out"
    assert addresses[3] == "relay.run1.run1@node-10.0.0.7"


@pytest.mark.parametrize("same_node", [True, False])
def test_two_trainers_may_share_it(buses: dict[str, str], tmp_path: Path, same_node: bool) -> None:
    plan = PartyPlan("sink", "t@one", COORDINATOR, buses["t"], keep=str(tmp_path), node="one")
    with closing(Keep(plan.keep, plan.bus, 1.0, node=plan.node)):
        if same_node:
            with pytest.raises(shmbus.BusBusyError, match="another relay"):
                Keep(plan.keep, plan.bus, 1.0, node=plan.node)
        else:
            Keep(plan.keep, plan.bus, 1.0, node="two").close()
            files = sorted(each.name for each in tmp_path.glob("*.kept"))
            assert files == [f"{buses['t']}@one.kept", f"{buses['t']}@two.kept"]


PARTY = """
import sys, time
from shmbus.relay.host import Host, PartyPlan

kind, bus, keep = sys.argv[1:]
host = Host(PartyPlan(kind, "own", "own", bus, keep=keep), lambda *message: None)
host.start()
before = None
while True:
    said = host.describe()
    names_it = keep in said.get("error", "")
    found = "begun" if said["begun"] else "lacks it" if names_it else "waits"
    if found != before:
        print(found, flush=True)
        before = found
    time.sleep(0.01)
"""


def foreign(path: Path, bus: str) -> None:
    path.mkdir()
    (path / f"{bus}.kept").write_bytes(b"somebody's text, of more bytes than a head has")


def no_directory(path: Path, bus: str) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("make", [foreign, no_directory])
def test_a_sink_that_cannot_keep_has_not_begun_and_says_why(
    buses: dict[str, str], tmp_path: Path, make: object, spawn: Spawner
) -> None:
    path = tmp_path / "kept"
    make(path, buses["t"])  # type: ignore[operator]
    party = spawn.script(PARTY, "sink", buses["t"], path, until="lacks it")
    path.rename(tmp_path / "elsewhere")
    party.expect("begun")


def test_weights_without_a_publisher_say_so(bus_name: str) -> None:
    host = Host(PartyPlan("weights", "own", "own", bus_name, mirrors=["m"]), lambda *message: None)
    host.start()
    wait_until(lambda: not host.describe()["begun"] and host.describe().get("error"))
    trainer = Trainer(bus_name, SIZE, SEED)
    trainer.publish(3)
    wait_until(lambda: host.describe().get("weights", {}).get("version") == 3)
    assert host.describe()["weights"]["error"] == ""
    trainer.close()
    wait_until(lambda: host.describe()["weights"]["error"])
    said = host.describe()
    assert bus_name in said["weights"]["error"] and not said["begun"]
    note = msgspec.convert(said["weights"], WeightsNote)
    assert (note.version, note.mirrors[0].heard_s) == (3, None)
    assert note.error in show_weights(note) and "never" not in show_weights(note)
