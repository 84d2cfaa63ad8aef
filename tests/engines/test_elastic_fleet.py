"""Servers join and leave a fleet, and those that come back get what the others run."""

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from conftest import wait_until
from trainers import Scene, Trainer, fleet_of, token

from shmbus import Bus, Feeder, Producer, VersionUnknownError
from shmbus.engines import EngineError, VllmServer
from shmbus.engines.pause_note import paused_by

pytest_plugins = ["engine_fixtures"]


async def test_a_server_joins_at_the_newest(bus: Bus, trainer: Trainer, servers: Any) -> None:
    first, second = servers(1), servers(2)
    async with fleet_of(bus.name, first) as fleet:
        assert await fleet.add(VllmServer(second.url)) is None, "nothing was published"
        await fleet.remove(second.url)
        await fleet.update(trainer, 1)
        going_on = asyncio.ensure_future(first.complete(300))
        joined = await fleet.add(VllmServer(second.url))
        assert joined is not None and (joined.version, joined.state) == (1, "serving")
        assert (fleet.quorum, await token(second)) == (2, 1.0)
        assert set((await going_on)["tokens"]) == {1.0}
        await fleet.update(trainer, 2)
        assert [await token(each) for each in (first, second)] == [2.0, 2.0]
        with pytest.raises(ValueError, match="already"):
            await fleet.add(VllmServer(second.url))


async def test_a_server_that_joins_during_an_update_waits_for_its_end(scene: Scene) -> None:
    first, second = scene.servers(1), scene.servers(1)
    async with scene.fleet_at_1(first) as fleet:
        await first.fault("update", "slow")
        updating = asyncio.ensure_future(fleet.update(scene.trainer, 2))
        await asyncio.sleep(0.2)
        joined = await fleet.add(VllmServer(second.url))
        assert updating.done() and joined is not None and joined.version == 2
        assert [await token(each) for each in (first, second)] == [2.0, 2.0]


async def test_a_server_without_weights_is_out(bus: Bus, trainer: Trainer, servers: Any) -> None:
    first, second = servers(1), servers(1)
    async with fleet_of(bus.name, first) as fleet:
        await fleet.update(trainer, 1)
        await second.fault("init", "500")
        with pytest.raises(EngineError):
            await fleet.add(VllmServer(second.url))
        assert [each.address for each in fleet.servers] == [first.url]
        assert paused_by(bus.name) is None and await token(second) == 0.0
        joined = await fleet.add(VllmServer(second.url))
        assert joined is not None and joined.version == 1


async def test_a_restarted_server_catches_up_and_no_other_is_paused(scene: Scene) -> None:
    first, second = scene.servers(1), scene.servers(1)
    async with scene.fleet(first, second) as fleet:
        assert await fleet.catch_up() is None
        await fleet.update(scene.trainer, 1)
        assert await fleet.catch_up() is None
        second.kill()
        assert await fleet.catch_up() is None, "it is gone, and there is nothing to bring"
        second.start_anew()
        assert await token(second) == 0.0
        report = await fleet.catch_up()
        assert report is not None and [each.address for each in report.servers] == [second.url]
        assert [await token(each) for each in (first, second)] == [1.0, 1.0]


def versions_of(producer: Producer, *running: Any) -> list[int | None]:
    def asked(version: Callable[[], int]) -> int | None:
        try:
            return version()
        except VersionUnknownError:
            return None

    own = [asked(lambda at=each.url: producer.version_of(at)) for each in running]  # type: ignore[misc]
    return [asked(lambda: producer.policy_version), *own]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_restarted_server_has_no_version_until_it_catches_up(
    kind: str, scene: Scene
) -> None:
    first, second = scene.servers(1, kind), scene.servers(2, kind)
    with Producer(scene.bus.name) as producer, Feeder(scene.bus.name) as feeder:

        async def known(*versions: int | None) -> None:
            await asyncio.to_thread(
                wait_until, lambda: versions_of(producer, first, second) == [*versions]
            )

        async with scene.fleet(first, second) as fleet:
            await fleet.update(scene.trainer, 7)
            await known(7, 7, 7)
            second.kill()
            await known(None, 7, None)
            second.start_anew()
            assert await token(second) == 0.0
            assert versions_of(producer, first, second) == [None, 7, None]
            await fleet.catch_up()
            await known(7, 7, 7)
            for each in (first, second):
                each.kill()
            await known(None, None, None)
            feeder.request("q", group_size=1)
            assert producer.requests.next(0.1) is None, "nobody could make a sample"
            first.start_anew()
            await fleet.remove(second.url)
            await fleet.catch_up()
            await known(7, 7, None)
            assert producer.requests.next(5.0) is not None


async def test_a_refused_connection_is_one_error(bus: Bus, trainer: Trainer, servers: Any) -> None:
    gone = servers(1)
    gone.kill()
    async with fleet_of(bus.name, gone) as fleet:
        with pytest.raises(EngineError) as caught:
            await fleet.update(trainer, 1)
    told = "".join(traceback.format_exception(caught.value))
    assert (told.count("Traceback"), caught.value.gone) == (1, True)
    assert (caught.value.__cause__, caught.value.server) == (None, gone.url)


async def test_a_server_leaves_the_last_stays(bus: Bus, trainer: Trainer, servers: Any) -> None:
    first, second = servers(1), servers(1)
    async with fleet_of(bus.name, first, second, quorum=1) as fleet:
        await fleet.update(trainer, 1)
        await fleet.remove(fleet.servers[1])
        await fleet.update(trainer, 2)
        assert [await token(each) for each in (first, second)] == [2.0, 1.0]
        with pytest.raises(ValueError, match="expected one of"):
            await fleet.remove(second.url)
        with pytest.raises(ValueError, match="0 servers remain, below the quorum of 1"):
            await fleet.remove(first.url)
