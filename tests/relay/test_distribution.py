"""Chains of mirrors in simulated time: waits, and numbers of sends."""

import os
import random

import pytest
from relay.mirror_world import PIECES, SOURCE, World

from shmbus.relay.distribution import KEEP_S, SILENT_S, STALL_S
from shmbus.relay.messages import Transfer

WORLDS = int(os.environ.get("SHMBUS_TEST_WORLDS", "40"))
FOUR = ["a", "b", "c", "d"]


def begun(names: list[str], seed: int = 0, **options: float) -> World:
    world = World(names, seed, **options)
    world.run(1.0)
    return world


def seconds_of_a_version(names: list[str], **options: float) -> float:
    world = begun(names, **options)
    began_s = world.now_s
    world.publish()
    world.run_until_all_have(1)
    return max(world.finished.values()) - began_s


def test_the_trainers_node_sends_a_version_once_however_many_mirrors_there_are() -> None:
    world = begun(FOUR)
    world.publish()
    world.run_until_all_have(1)
    assert world.sent[SOURCE] == PIECES
    assert sum(world.sent.values()) == len(FOUR) * PIECES


def test_eight_mirrors_have_a_version_almost_as_soon_as_one() -> None:
    assert seconds_of_a_version([f"m{i}" for i in range(8)]) < 1.3 * seconds_of_a_version(["m"])


def test_who_has_the_base_gets_the_patch_and_who_has_not_all_of_it() -> None:
    world = begun(FOUR)
    world.publish()
    world.run_until_all_have(1)
    world.kill("b")
    world.sent.clear()
    world.publish(patch=True)
    world.run_until_all_have(2)
    assert {name: node.done and node.done.base for name, node in world.nodes.items()} == {
        "a": 1, "b": 0, "c": 1, "d": 1,
    }  # fmt: skip
    assert world.sent[SOURCE] == PIECES + PIECES // 20


@pytest.mark.parametrize("who", FOUR)
@pytest.mark.parametrize(
    ("how", "rate"),
    [("stopped", 400), ("stopped", 60), ("killed", 400), ("killed", 60), ("slow", 400)],
)
def test_one_mirror_in_trouble_delays_the_others_by_little(who: str, how: str, rate: float) -> None:
    usual_s = seconds_of_a_version(FOUR, rate=rate)
    world = begun(FOUR, rate=rate)
    began_s = world.now_s
    world.publish()
    if how == "slow":
        world.rate[who] = rate / 40
    world.run(usual_s / 2)
    if how == "stopped":
        world.stopped[who] = world.now_s + 20.0
    elif how == "killed":
        world.kill(who)
        world.stopped[who] = world.now_s + 20.0
    world.run(40.0)
    others = [at for (name, _), at in world.finished.items() if name != who]
    assert len(others) == 3
    # The pieces under way to it, until it counted as stalled or behind.
    assert max(others) - began_s < usual_s + 4 * STALL_S
    assert how != "stopped" or world.sent[SOURCE] < 1.2 * PIECES
    world.publish()
    world.run_until_all_have(2)


def test_a_slow_mirror_skips_versions_and_is_not_starved_by_newer_ones() -> None:
    world = begun(FOUR)
    world.rate["d"] = 20.0  # its own link for handing on delays nobody
    for _ in range(30):
        world.publish()
        world.run(0.7)
    for name in "abc":
        assert world.nodes[name].sequence >= 29
    world.run_until_all_have(30)


def test_a_version_is_kept_until_one_mirror_has_it_and_for_no_dead_one() -> None:
    world = begun(["a", "b"])
    first = Transfer("p", 1, 0)
    world.publish()
    world.run(0.1)
    world.publish()
    world.run(0.1)
    assert first in world.here  # both get it; neither had it
    world.run_until_all_have(1)
    world.run(0.2)
    assert first not in world.here
    world.publish()
    world.run(0.1)
    world.stopped = {"a": 1e9, "b": 1e9}
    world.publish()
    world.run(SILENT_S + 1.0)
    assert Transfer("p", 3, 0) not in world.here
    assert SILENT_S + 1.0 < KEEP_S


def test_a_mirror_that_comes_late_gets_the_newest_version_alone() -> None:
    world = begun(FOUR)
    world.stopped["d"] = 30.0
    for _ in range(5):
        world.publish()
        world.run(2.0)
    assert {world.nodes[name].sequence for name in "abc"} == {5}
    world.kill("d")
    world.run(30.0)
    assert [at for name, at in world.finished if name == "d"] == [5]


def test_whatever_is_lost_doubled_stopped_or_killed_all_end_with_the_newest(seed: int) -> None:
    for number in range(WORLDS):
        rng = random.Random(seed + number)
        names = [f"m{i}" for i in range(rng.randint(1, 5))]
        world = begun(names, seed + number, loss=rng.choice([0.0, 0.02, 0.2]))
        for _ in range(rng.randint(3, 10)):
            world.publish(patch=rng.random() < 0.6)
            world.run(rng.uniform(0.0, 1.5))
            name = rng.choice(names)
            match rng.choice(["none", "stop", "kill", "slow"]):
                case "stop":
                    world.stopped[name] = world.now_s + rng.uniform(0.0, 6.0)
                case "kill":
                    world.kill(name)
                case "slow":
                    world.rate[name] = rng.choice([20.0, 100.0, 400.0])
        world.run_until_all_have(world.newest, 300.0)
        world.run(1.0 + KEEP_S)
        assert {each.sequence for each in world.here} == {world.newest}, f"seed {seed + number}"
