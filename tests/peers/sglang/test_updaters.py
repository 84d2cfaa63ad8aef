"""SGLang's own session and weight updater take a version; model and scheduler are stand-ins."""

import asyncio
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.managers.scheduler_components.weight_updater as sessions
import sglang.srt.model_executor.model_runner_components.weight_updater as updaters
import torch
from pydantic import TypeAdapter
from sglang.srt.managers import io_struct
from sglang.srt.utils.common import MultiprocessingSerializer

from shmbus.engines import SglangServer
from shmbus.engines.sglang_order import LOADER, Order, order_for_rank
from shmbus.pool import read_pool
from shmbus.weights import ModuleSource, WeightPublisher


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
        self.breaks = False

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if self.breaks:
                raise RuntimeError("injected")
            self.get_parameter(name).copy_(tensor)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Model]]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    parallel = SimpleNamespace(tp_group=group, tp_rank=0)
    for module in (sessions, updaters):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(updaters, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    model = Model()
    updater = updaters.WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=None,
        custom_weight_loaders={LOADER: None}, get_model=lambda: model,
        update_model_fields=lambda **_: None, recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )  # fmt: skip
    runner = SimpleNamespace(weight_updater=updater)
    worker = SimpleNamespace(
        weight_update_runners=lambda: [("target", runner)],
        deserialize_own_rank=lambda payloads: MultiprocessingSerializer.deserialize(payloads[0]),
    )
    yield (
        sessions.SchedulerWeightUpdaterManager(
            tp_worker=worker, draft_worker=None, memory_saver_adapter=None,
            flush_cache=lambda **_: True, is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        ),
        model,
    )  # fmt: skip
    torch.distributed.destroy_process_group()


def request(order: Order) -> Any:
    body = {
        "serialized_named_tensors": [order_for_rank(order)], "load_format": LOADER,
        "flush_cache": False, "selector": "target", "weight_version": str(order.version),
    }  # fmt: skip
    return TypeAdapter(io_struct.UpdateWeightsFromTensorReqInput).validate_python(body)


def test_a_sglang_session_loads_a_version(manager: tuple[Any, Model], bus_name: str) -> None:
    session, model = manager
    source = torch.nn.Module()
    source.value = torch.nn.Parameter(torch.full((8,), 3.0), requires_grad=False)
    begin = io_struct.BeginWeightUpdateReqInput(selector="target")
    with WeightPublisher(bus_name, ModuleSource(source)) as publisher:
        publisher.publish(version=3)

        def run(order: Order) -> Any:
            assert session.begin_weight_update(begin).success
            assert not session.begin_weight_update(begin).success, "one session at a time"
            answer = session.update_weights_from_tensor(request(order))
            assert session.end_weight_update(io_struct.EndWeightUpdateReqInput()).success
            return answer

        def row() -> Any:
            readers = read_pool(bus_name, "weights").readers
            return next(each for each in readers if each.label == "s rank 0")

        assert run(Order("attach", bus_name, "s", 0)).success
        assert row().applied_version is None and not model.value.any()
        model.breaks = True  # before a load that succeeds: later loads copy by its plan
        assert run(Order("load", bus_name, "s", 0, 3)).success
        assert row().applied_version is None and "injected" in row().error
        model.breaks = False
        assert run(Order("load", bus_name, "s", 0, 3)).success
        assert row().applied_version == 3 and (model.value == 3).all() and not row().error
        outside = session.update_weights_from_tensor(request(Order("load", bus_name, "s", 0, 3)))
        assert not outside.success and "must run between" in outside.message


def test_a_sglang_scheduler_moves_the_memory_that_a_turn_names(
    manager: tuple[Any, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`release_memory_occupation` and `resume_memory_occupation` are SGLang's own."""
    session, model = manager
    monkeypatch.setattr(sessions, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    device = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    moved: list[tuple[str, str]] = []
    session.memory_saver_adapter = SimpleNamespace(
        pause=lambda tag: moved.append(("free", tag)),
        resume=lambda tag: moved.append(("take", tag)),
    )
    session.tp_worker.model_runner = SimpleNamespace(model=model)
    session.scheduler._engine_paused, session.scheduler.disaggregation_mode = True, None
    names = {"/release_memory_occupation": "Release", "/resume_memory_occupation": "Resume"}

    class Direct(SglangServer):
        async def call(self, step: str, method: str, path: str, *rest: Any, **options: Any) -> Any:
            kind = getattr(io_struct, f"{names[path]}MemoryOccupationReqInput")
            getattr(session, path[1:])(TypeAdapter(kind).validate_python(options["body"]))
            return 200, "null"

    server = Direct("http://127.0.0.1:1")
    for cache in (True, False):
        asyncio.run(server.sleep(2, 1.0, cache=cache))
        assert session.offload_tags == {"weights", "kv_cache", "cuda_graph"}
        asyncio.run(server.wake_weights(2, 1.0, in_doubt=False))
        assert moved[-1] == ("take", "weights")
        assert session.offload_tags == {"kv_cache", "cuda_graph"}
    asyncio.run(server.wake_cache(1.0, in_doubt=False))
    assert not session.offload_tags
    assert {each for each in moved if each[0] == "take"} == {
        ("take", tag) for tag in ("weights", "kv_cache", "cuda_graph")
    }
    with pytest.raises(KeyError):  # memory that is awake
        asyncio.run(server.wake_weights(2, 1.0, in_doubt=True))
