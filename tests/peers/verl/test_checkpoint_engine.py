"""verl's checkpoint engine over a slot pool takes only its own update; the cache stays."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
import torch
import verl
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from shmbus.errors import WaitTimeoutError

MODULE = "trainer_adapter.adapters.verl.checkpoint_engine"


HERE = Path(__file__).parent
THEIRS = Path(verl.__file__).parents[1] / "tests" / "checkpoint_engine"


@pytest.mark.timeout(600)
def test_verls_own_test_of_a_checkpoint_engine_passes(bus_name: str, tmp_path: Path) -> None:
    models = tmp_path / "models" / "Qwen"
    models.mkdir(parents=True)
    tiny_policy.make(models)
    model = (models / "model").rename(models / "Qwen3-8B-Base")
    # Its workers read and compare the file as bfloat16.
    file = model / "model.safetensors"
    brief = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(brief, file, {"format": "pt"})
    environment = {
        **os.environ, "HOME": str(tmp_path), "SHMBUS_TEST_BUS": bus_name, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "verl_on_a_cpu", "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda", "RAY_ADDRESS": "local",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "their_engine",
        "-W", "ignore", "-c", os.devnull, "--rootdir", str(THEIRS.parents[1]),
        str(THEIRS / "test_correctness_on_gpu.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=580, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-6000:]
    assert os.path.exists(f"/dev/shm/shmbus-weights.{bus_name}")


def make(bus: str, **options: Any) -> Any:
    """Made from the configuration, like verl's workers'."""
    import_external_libs(MODULE)
    return CheckpointEngineRegistry.new("shmbus", bucket_size=1 << 20, bus=bus, **options)


def weights(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Once through, as verl gathers them."""
    for layer in range(5):
        yield f"layer.{layer}", torch.full((3, 4), value + layer, dtype=torch.bfloat16)


def values(found: dict[str, torch.Tensor]) -> list[float]:
    return [float(tensor[0, 0]) for tensor in found.values()]


async def read(given: AsyncIterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in given}


def begin(senders: list[Any], receivers: list[Any]) -> None:
    """Do the work of verl's manager before each update."""
    metadata = [each.prepare() for each in senders + receivers]
    sends, receives = type(senders[0]).build_topology(len(senders), len(receivers), metadata)
    for engines, arguments in ((senders, sends), (receivers, receives)):
        for at, engine in enumerate(engines):
            engine.init_process_group(**{name: each[at] for name, each in arguments.items()})


def update(sender: Any, receivers: list[Any], value: float, step: int | None) -> list[list[float]]:
    begin([sender], receivers)

    async def both() -> list[Any]:
        received = [read(each.receive_weights(global_steps=step)) for each in receivers]
        return await asyncio.gather(sender.send_weights(weights(value), step), *received)

    found = [values(each) for each in asyncio.run(both())[1:]]
    for each in (sender, *receivers):
        each.finalize()
    return found


def test_each_update_reaches_each_receiver(bus_name: str) -> None:
    sender, receivers = make(bus_name, is_master=True), [make(bus_name), make(bus_name)]
    for step, value in ((1, 10.0), (2, 20.0), (2, 30.0), (1, 40.0), (None, 50.0)):
        expected = [value + layer for layer in range(5)]
        assert update(sender, receivers, value, step) == [expected, expected]


def test_the_version_of_an_earlier_trainer_is_not_taken_for_this_update(bus_name: str) -> None:
    first, receiver = make(bus_name, keep=True), make(bus_name)
    update(first, [receiver], 10.0, 1)
    first._publisher.close()
    late, second = make(bus_name, timeout=0.2), make(bus_name)
    begin([second], [late])  # without its weights
    with pytest.raises(WaitTimeoutError):
        asyncio.run(read(late.receive_weights(global_steps=1)))
    assert values(asyncio.run(read(late.get_weights())))[0] == 10.0
    assert (
        update(second, [make(bus_name), receiver], 20.0, 1) == [[20.0, 21.0, 22.0, 23.0, 24.0]] * 2
    )


SENDER = """
import asyncio, sys, time, torch
from trainer_adapter.adapters.verl.checkpoint_engine import ShmbusCheckpointEngine

engine = ShmbusCheckpointEngine(bus=sys.argv[1])

def weights(value, stops):
    for layer in range(5):
        if stops and layer == 3:
            print("half", flush=True)
            time.sleep(600)
        yield f"layer.{layer}", torch.full((3, 4), value + layer, dtype=torch.bfloat16)

engine.init_process_group(0, 1, "first")
asyncio.run(engine.send_weights(weights(10.0, False), 1))
engine.init_process_group(0, 1, "second")
asyncio.run(engine.send_weights(weights(20.0, True), 2))
"""


def test_a_trainer_that_is_killed_in_mid_update_leaves_the_version_before(bus_name: str) -> None:
    command = [sys.executable, "-c", SENDER, bus_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "half\n"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    receiver = make(bus_name)
    assert values(asyncio.run(read(receiver.get_weights()))) == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert update(make(bus_name), [receiver], 30.0, 1)[0][0] == 30.0


RECEIVER = """
import asyncio, sys, time
from trainer_adapter.adapters.verl.checkpoint_engine import ShmbusCheckpointEngine

engine = ShmbusCheckpointEngine(bus=sys.argv[1])

async def read():
    async for name, tensor in engine.get_weights():
        print("half", flush=True)
        time.sleep(600)

asyncio.run(read())
"""


def test_a_rollout_that_is_killed_in_mid_read_holds_nobody_back(bus_name: str) -> None:
    sender, other = make(bus_name), make(bus_name)
    update(sender, [other], 10.0, 1)
    command = [sys.executable, "-c", RECEIVER, bus_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rollout:
        assert rollout.stdout is not None and rollout.stdout.readline() == "half\n"
        rollout.send_signal(signal.SIGKILL)
        rollout.wait()
    for step, value in enumerate((20.0, 30.0, 40.0, 50.0), start=2):
        assert update(sender, [other], value, step) == [[value + layer for layer in range(5)]]


def test_two_ranks_write_a_version_together(bus_name: str) -> None:
    senders, receiver = [make(bus_name), make(bus_name)], make(bus_name)
    for value in (10.0, 20.0):
        begin(senders, [receiver])

        async def both(value: float = value) -> list[Any]:
            sent = [asyncio.to_thread(asyncio.run, each.send_weights(weights(value), 1))
                    for each in senders]  # fmt: skip
            return await asyncio.gather(read(receiver.receive_weights()), *sent)

        assert values(asyncio.run(both())[0]) == [value + layer for layer in range(5)]


def test_what_a_rollout_reads_is_shown(bus_name: str) -> None:
    from shmbus.pool.pool_status import read_pool

    receiver = make(bus_name)
    update(make(bus_name), [receiver], 10.0, 7)
    [reader] = read_pool(bus_name, "weights").readers
    assert (reader.label, reader.applied_version) == ("verl", 7)


def test_several_buckets_reach_the_device(bus_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender = make(bus_name), make(bus_name)
    receiver._bucket_bytes = 24  # a tensor of this size has a view
    monkeypatch.setattr(sys.modules[MODULE], "get_device_name", lambda: "meta")

    def devices() -> list[str]:
        given = asyncio.run(read(receiver.get_weights()))
        return [tensor.device.type for tensor in given.values()]

    update(sender, [], 10.0, 1)
    assert devices() == ["cpu"] * 5
    receiver._bucket_bytes = 23
    assert devices() == ["meta"] * 5
