"""A fleet with servers on other nodes, which read what a relay carries to a bus of their own."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_until
from relay.local import LocalRelay
from relay.mirrors import mirrors
from trainers import TIMEOUT_S, Scene, Trainer, token

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, UpdateRolledBackError, VllmServer
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by
from shmbus.engines.resume import resume
from shmbus.pool.pool_status import describe_pool, read_pool

pytest_plugins = ["engine_fixtures"]


@pytest.fixture
def nodes(bus_name: str) -> list[str]:
    return [f"{bus_name}.{each}" for each in "ab"]


@pytest.fixture
def relay(bus: Bus, trainer: Trainer, nodes: list[str]) -> Iterator[LocalRelay]:
    """What carries the trainer's weights to the nodes, from version 1 on."""
    trainer.publish(1)
    with mirrors(bus.name, nodes) as made:
        yield made


def fleet_of(bus: Bus, here: Any, there: Any, node: str, **options: Any) -> EngineFleet:
    servers = [VllmServer(here.url), VllmServer(there.url, bus=node)]
    return EngineFleet(servers, bus=bus.name, **{"timeout": TIMEOUT_S, **options})


async def settled(bus: Bus, running: Any, version: int) -> None:
    def runs() -> bool:
        rows = [row for row in read_pool(bus.name, "weights").readers if running.url in row.label]
        return bool(rows) and all(row.applied_version == version for row in rows)

    await asyncio.to_thread(wait_until, runs)


async def test_both_nodes_get_versions(relay: LocalRelay, nodes: list[str], scene: Scene) -> None:
    here, there = scene.servers(1), scene.servers(2)
    async with fleet_of(scene.bus, here, there, nodes[0]) as fleet:
        for version in (2, 3, 4):
            report = await fleet.update(scene.trainer, version)
            assert [each.version for each in report.servers] == [version, version]
            assert [await token(each) for each in (here, there)] == [version, version]
        newest = read_pool(scene.bus.name, "weights")
        labels = {row.label for row in newest.readers if row.state == "alive"}
        assert {f"{there.url} rank 0", f"{there.url} rank 1", f"{here.url} rank 0"} <= labels
        assert await fleet.catch_up() is None


async def test_pauses_follow_the_copy(relay: LocalRelay, nodes: list[str], scene: Scene) -> None:
    here, there = scene.servers(1), scene.servers(1)
    async with fleet_of(scene.bus, here, there, nodes[0]) as fleet:
        await fleet.update(scene.trainer, 2)
        relay.end(nodes[0])  # its readers go on with the present version
        updating = asyncio.ensure_future(fleet.update(scene.trainer, 3))
        await asyncio.sleep(1.0)
        assert not updating.done()
        assert not any([await each.paused(1.0) for each in fleet.servers])
        relay.start_again(nodes[0])
        report = await updating
        assert [each.version for each in report.servers] == [3, 3]


async def test_a_cut_node_keeps_its_own(relay: LocalRelay, nodes: list[str], scene: Scene) -> None:
    here, there = scene.servers(1), scene.servers(1)
    async with fleet_of(scene.bus, here, there, nodes[0], quorum=1, timeout=2.0) as fleet:
        await fleet.update(scene.trainer, 2)
        relay.end(nodes[0])
        report = await fleet.update(scene.trainer, 3)
        assert [each.version for each in report.servers] == [3, None]
        assert "relay" in report.servers[1].error
        assert [await token(each) for each in (here, there)] == [3.0, 2.0]
        relay.start_again(nodes[0])
        await settled(scene.bus, here, 3)
        fleet.timeout = TIMEOUT_S
        caught_up = await fleet.catch_up()
        assert caught_up is not None and caught_up.servers[0].version == 3
        assert [await token(each) for each in (here, there)] == [3.0, 3.0]


async def test_a_refusal_is_taken_back(relay: LocalRelay, nodes: list[str], scene: Scene) -> None:
    here, there = scene.servers(1), scene.servers(1)
    async with fleet_of(scene.bus, here, there, nodes[0]) as fleet:
        await fleet.update(scene.trainer, 2)
        await there.fault("update", "refuse")
        with pytest.raises(UpdateRolledBackError, match="half of it was loaded"):
            await fleet.update(scene.trainer, 3)
        assert [await token(each) for each in (here, there)] == [2.0, 2.0]
        report = await fleet.update(scene.trainer, 3)
        assert [each.version for each in report.servers] == [3, 3]


async def test_rows_of_a_gone_node_end(relay: LocalRelay, nodes: list[str], scene: Scene) -> None:
    here, there = scene.servers(1), scene.servers(1)
    async with fleet_of(scene.bus, here, there, nodes[0]) as fleet:
        await fleet.update(scene.trainer, 2)
        await settled(scene.bus, there, 2)
        assert "refused" not in describe_pool(read_pool(scene.bus.name, "weights"))
        there.kill()

        def is_gone() -> bool:
            rows = read_pool(scene.bus.name, "weights").readers
            return not any(there.url in row.label and row.state == "alive" for row in rows)

        await asyncio.to_thread(wait_until, is_gone)
        with pytest.raises(EngineError):
            await fleet.update(scene.trainer, 3)
        assert await token(here) == 2.0


async def test_its_note_ends_a_pause(relay: LocalRelay, nodes: list[str], scene: Scene) -> None:
    there = scene.servers(1)
    server = VllmServer(there.url, bus=nodes[1])
    async with EngineFleet([server], bus=scene.bus.name) as fleet:
        await fleet.update(scene.trainer, 2)
    with PauseNote(scene.bus.name) as note:
        kept = {there.url: nodes[1]}
        note.write(PauseNotice(os.getpid(), [("vllm", there.url)], 3, 2, buses=kept))
        await server.pause("keep", False, TIMEOUT_S)
        await server.post("start", "/start_weight_update", TIMEOUT_S)
    scene.trainer.publish(3)
    report = await resume(scene.bus.name, timeout=TIMEOUT_S)
    assert report is not None and report.servers[0].version == 3
    assert paused_by(scene.bus.name) is None and await token(there) == 3.0
