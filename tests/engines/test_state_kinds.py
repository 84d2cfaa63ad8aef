"""No state that older weights made answers after an update: renewed, warned of, or refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_engine import Configured
from small_sglang import SmallSglang, sglang
from small_vllm import SmallVllm, vllm
from trainers import Scene, Trainer, fleet_of, update

from shmbus import Bus
from shmbus.engines import EngineError, UpdateRolledBackError
from shmbus.engines.rows import RankRows
from shmbus.engines.state_kinds import vllm_refusal
from shmbus.pool import PoolReader

pytest_plugins = ["engine_fixtures"]

#: Servers with state that an update leaves as it was.
UNRENEWED = [
    (sglang(enable_eplb=True), "enable_eplb"),
    (sglang(device="cpu", enable_torch_compile=True), "enable_torch_compile"),
]


@pytest.mark.parametrize(
    ("kind", "mode", "clear"),
    [
        (SmallVllm, "keep", False), (SmallVllm, "keep", True), (SmallVllm, "wait", False),
        (SmallVllm, "abort", False), (SmallSglang, "keep", False), (SmallSglang, "abort", False),
    ],
)  # fmt: skip
async def test_images_are_encoded_anew(kind: Any, mode: str, clear: bool, scene: Scene) -> None:
    running = scene.servers(1, kind)
    for version in (1, 2, 3):
        await scene.update(version, running, mode=mode, clear_cache=clear)
        for _ in range(2):
            said = await running.post("/encode", {"image": "a"})
            assert said == {"encoded": version, "runs": version}


async def test_a_reload_has_images_encoded_anew(
    bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    running = servers(1)
    async with fleet_of(bus.name, running) as fleet:
        for version in (1, 2):
            writer.publish(version)
            await fleet.reload(tmp_path)
            assert (await running.post("/encode", {"image": "a"}))["encoded"] == version


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Configured(SmallSglang, {"sees": True}), "has_image_understanding"), *UNRENEWED,
        (vllm(parallel_config={"enable_eplb": True}), "enable_eplb"),
    ],
)  # fmt: skip
async def test_a_reload_that_keeps_state_is_refused(
    kind: Any, named: str, bus: Bus, writer: Trainer, servers: Any, tmp_path: Path
) -> None:
    running = servers(1, kind)
    writer.publish(1)
    async with fleet_of(bus.name, running) as fleet:
        with pytest.raises(EngineError) as caught:
            await fleet.reload(tmp_path)
    assert named in caught.value.body and not caught.value.gone
    assert await running.calls() == [] and bus.policy_version == 0


async def test_kept_encoder_outputs_keep_weights(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1)
    await update(bus.name, trainer, 1, running)
    await running.fault("encoder", "500")
    with pytest.raises(UpdateRolledBackError) as caught:
        await update(bus.name, trainer, 2, running)
    assert (caught.value.in_force, bus.policy_version) == (1, 1)
    assert await running.tokens(1) == [1.0]


@pytest.mark.parametrize(("kind", "named"), UNRENEWED)
async def test_unrenewed_state_is_refused_first(kind: Any, named: str, scene: Scene) -> None:
    running = scene.servers(1, kind)
    with pytest.raises(EngineError, match=named) as caught:
        await scene.update(1, running)
    assert caught.value.step == "server_info"
    assert await running.calls() == [] and scene.bus.policy_version == 0


def config(**given: Any) -> Any:
    asked = {"enable_eplb": False, "inductor": {}, "ec": None, "kv": None, **given}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=asked["enable_eplb"]),
        ec_transfer_config=asked["ec"],
        kv_transfer_config=asked["kv"],
        compilation_config=SimpleNamespace(inductor_compile_config=asked["inductor"]),
    )


def connector(name: str, *inner: str) -> Any:
    listed = {"connectors": [{"kv_connector": each} for each in inner]} if inner else None
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=listed)


@pytest.mark.parametrize(
    ("given", "on_cpu", "named"),
    [
        ({}, True, ""),
        ({"enable_eplb": True}, False, "parallel_config.enable_eplb"),
        ({"ec": object()}, False, "ec_transfer_config"),
        ({"kv": connector("ExampleConnector")}, False, "ExampleConnector"),
        ({"kv": connector("MultiConnector", "OffloadingConnector")}, False, ""),
        (
            {"kv": connector("MultiConnector", "NixlConnector", "LMCacheConnectorV1")},
            False,
            "LMCacheConnectorV1",
        ),
        ({"inductor": {"freezing": True}}, False, "inductor_compile_config"),
        ({"inductor": {"max_autotune": True}}, True, "inductor_compile_config"),
        ({"inductor": {"max_autotune": True}}, False, ""),
    ],
)
def test_lasting_vllm_state_is_named(given: dict[str, Any], on_cpu: bool, named: str) -> None:
    said = vllm_refusal(config(**given), on_cpu=on_cpu)
    assert named in said and bool(said) == bool(named)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (vllm(drafts=True, speculative_config={"method": "eagle3"}), "speculative_config"),
        (sglang(speculative_algorithm="EAGLE"), "speculative_algorithm"),
    ],
)
async def test_each_report_warns_of_a_draft_model(
    kind: Any, named: str, scene: Scene, tmp_path: Path
) -> None:
    async with scene.fleet(scene.servers(2, kind)) as fleet:
        reports = [await fleet.update(scene.trainer, version) for version in (1, 2)]
        scene.trainer.publisher.close()
        trainer = Trainer(scene.bus.name, carrier="checkpoint", directory=tmp_path)
        trainer.publish(3)
        reports.append(await fleet.reload(tmp_path))
    for version, report in enumerate(reports, 1):
        (told,) = report.servers
        assert (told.version, told.error) == (version, "") and named in told.warning
    trainer.publisher.close()


async def test_an_unpublished_version_is_refused(bus: Bus, trainer: Trainer, servers: Any) -> None:
    server, rows = servers(1).server(), RankRows(bus.name)
    trainer.publish(1)
    with PoolReader(bus.name, "weights", label=f"{server.address} rank 0") as rank:
        for sequence, version in ((77, 9), (1, 9)):
            rank.pool.applied(sequence, version)
            assert rows.whole_version(server, 1) is None
            assert rows.missing(server, 1, version) is not None
        rank.pool.applied(1, 1)
        assert rows.whole_version(server, 1) == 1 and rows.missing(server, 1, 1) is None
