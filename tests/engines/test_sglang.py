"""SGLang servers: each request is decoded as by SGLang, each answer is understood."""

import asyncio
import base64
import logging
from typing import Any

import pytest
import torch
from sglang_types import named_tensors
from small_sglang import Model, SmallSglang, sglang
from small_vllm import SmallVllm
from trainers import TIMEOUT_S, Scene, Trainer, assert_serving, update

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, SglangServer, UpdateRolledBackError, VllmServer
from shmbus.engines.pause_note import paused_by
from shmbus.engines.sglang_loader import load
from shmbus.engines.sglang_order import Order, order_for_rank
from shmbus.pool import read_pool

pytest_plugins = ["engine_fixtures"]


@pytest.mark.parametrize(
    ("mode", "clear", "theirs"),
    [
        ("keep", False, "in_place"),
        ("keep", True, "retract"),
        ("abort", False, "abort"),
        ("abort", True, "abort"),
    ],
)
async def test_modes_have_sglangs_words(mode: str, clear: bool, theirs: str, scene: Scene) -> None:
    running = [scene.servers(1, SmallSglang), scene.servers(2, SmallSglang)]
    options: dict[str, Any] = {"mode": mode, "clear_cache": clear}
    await scene.update(0, *running, **options)
    requests = [asyncio.ensure_future(each.complete(200)) for each in running for _ in range(3)]
    await asyncio.sleep(0.05)
    report = await scene.update(1, *running, **options)
    assert [(each.version, each.warning) for each in report.servers] == [(1, ""), (1, "")]
    assert [each.ranks for each in report.servers] == [1, 2]
    for request in requests:
        answer = await request
        assert "torn" not in answer["tokens"]
        assert answer["tokens"] == sorted(answer["tokens"])
        assert answer["finish_reason"] == ("abort" if mode == "abort" else "length")
    calls = await running[1].calls()
    assert ["/pause_generation", {"mode": theirs}] in calls
    loaded = [fields for path, fields in calls if path == "/update_weights_from_tensor"]
    # Attached once, in the first pause; the rows show that it need not be done again.
    assert [each["weight_version"] for each in loaded] == [None, "0", "1"]
    assert {(each["flush_cache"], each["selector"]) for each in loaded} == {(False, "target")}
    assert (["/flush_cache", {}] in calls) is clear
    assert paused_by(scene.bus.name) is None and scene.bus.policy_version == 1


@pytest.mark.parametrize("kind", ["500", "503", "close"])
@pytest.mark.parametrize("step", ["begin", "end", "resume", "pause", "update"])
async def test_any_failure_leaves_one_whole_version(step: str, kind: str, scene: Scene) -> None:
    running = [scene.servers(1, SmallSglang), scene.servers(1, SmallSglang)]
    await scene.update(7, *running)
    await running[0].fault(step, kind)
    try:
        await scene.update(8, *running)
        expected = 8.0
    except (UpdateRolledBackError, EngineError):
        assert step in ("pause", "update") or (step, kind) == ("begin", "close")
        expected = 7.0
    await assert_serving(expected, *running)
    assert paused_by(scene.bus.name) is None and scene.bus.policy_version == expected


async def test_a_false_answer_of_failure_is_not_believed(scene: Scene) -> None:
    running = scene.servers(1, SmallSglang)
    await scene.update(7, running)
    await running.fault("update", "cache")
    report = await scene.update(8, running)
    assert report.servers[0].version == 8 and report.servers[0].error == ""
    assert "the cache was not flushed" in report.servers[0].warning
    assert await running.tokens(1) == [8.0]


async def test_an_uncleared_cache_is_a_warning(scene: Scene) -> None:
    running = scene.servers(1, SmallSglang)
    await running.fault("flush", "500")
    report = await scene.update(8, running, clear_cache=True)
    assert report.servers[0].version == 8
    assert "keys and values of the old ones" in report.servers[0].warning


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (sglang(dp_size=2), "dp_size is 2.*one server for each replica"),
        (sglang(custom_weight_loader=[]), "start the server"),
    ],
)
async def test_an_unfit_server_is_not_paused(make: Any, match: str, scene: Scene) -> None:
    running = scene.servers(1, make)
    with pytest.raises(EngineError, match=match):
        await scene.update(1, running)
    assert await running.calls() == []
    assert await running.tokens(1) == [0.0]


async def test_quantised_models_are_always_loaded(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(2, sglang(quantization="fp8"))
    assert (await update(bus.name, trainer, 4, running)).servers[0].version == 4
    assert [path for path, _ in await running.calls()].count("/begin_weight_update") == 1


async def test_old_weights_stay_without_attaching(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1, SmallSglang)
    await running.fault("update", "lie")
    with pytest.raises(
        EngineError, match=r"0 of 1 ranks read the weights.*old weights are in force"
    ):
        await update(bus.name, trainer, 1, running)
    assert not await running.paused()
    assert paused_by(bus.name) is None
    await update(bus.name, trainer, 2, running)
    assert await running.tokens(1) == [2.0]


@pytest.mark.parametrize("step", ["begin", "update", "end"])
async def test_an_unattached_session_ends_before_any_token(step: str, scene: Scene) -> None:
    running = scene.servers(1, SmallSglang)
    await running.fault(step, "close")  # done, without an answer
    with pytest.raises(EngineError, match=f"{step}: .*the old weights are in force"):
        await scene.update(1, running)
    assert not await running.paused() and paused_by(scene.bus.name) is None
    assert await running.tokens(1) == [0.0]
    assert ["/end_weight_update", {}] in await running.calls()


async def test_a_session_of_unknown_end_keeps_its_server_paused(scene: Scene) -> None:
    running = [scene.servers(1, SmallSglang), scene.servers(1, SmallSglang)]
    await running[0].fault("begin", "close")
    await running[0].fault("end", "503")
    with pytest.raises(EngineError, match="the old weights are in force"):
        await scene.update(1, *running)
    assert await running[0].paused() and not await running[1].paused()
    left = paused_by(scene.bus.name)
    assert left is not None and left[0].servers == [("sglang", running[0].url)]
    await scene.update(2, *running)
    assert [await each.tokens(1) for each in running] == [[2.0]] * 2


async def test_one_fleet_has_both_kinds(bus: Bus, trainer: Trainer, servers: Any) -> None:
    first, second = servers(1, SmallSglang), servers(2, SmallVllm)
    both: list[Any] = [SglangServer(first.url), VllmServer(second.url)]
    async with EngineFleet(both, bus=bus.name, timeout=TIMEOUT_S) as fleet:
        for version in (0, 1):
            report = await fleet.update(trainer, version)
        assert [each.version for each in report.servers] == [1, 1]
        await first.fault("update", "break")
        with pytest.raises(UpdateRolledBackError):
            await fleet.update(trainer, 2)
    for each in (first, second):
        assert await each.tokens(1) == [1.0]


def test_the_loader_raises_nothing_whatever_it_is_given(
    bus_name: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.publish(1)
    model: Any = Model({"value": torch.zeros(1000)})
    marker = torch.empty(0)
    for name, tensors in {
        "no order": [("model.layers.0", marker)],
        "nothing": [],
        "two": [("a", marker), ("b", marker)],
        "another verb": [
            ('{"type":"shmbus/1","verb":"run","bus":"b","server":"s","rank":0}', marker)
        ],
        "no such version": named_tensors(
            base64.b64decode(order_for_rank(Order("load", bus_name, "s", 0, 99)))
        ),
    }.items():
        caplog.clear()
        with caplog.at_level(logging.ERROR, "sglang.shmbus"):
            load(model, tensors)
        assert "new weights were not loaded" in caplog.text, name
        assert not model.values["value"].any(), name
    model.breaks = True
    load(model, named_tensors(base64.b64decode(order_for_rank(Order("load", bus_name, "s", 0, 1)))))
    row = next(row for row in read_pool(bus_name, "weights").readers if row.label == "s rank 0")
    assert (row.applied_version, row.refused_version) == (None, 1)
    assert "injected" in row.error
