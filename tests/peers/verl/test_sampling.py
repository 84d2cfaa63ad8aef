"""verl v1's own sampling on the CPU, with groups from outside processes: its TransferQueue, its
replay buffers, its loading by configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from omegaconf import OmegaConf

import shmbus

os.environ["RAY_AUTH_MODE"] = "disabled"
HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    import ray
    import transfer_queue as tq

    memory = 200 * 2**20
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=memory)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()
    ray.shutdown()


@contextmanager
def workers(bus: str, count: int, *arguments: str) -> Iterator[None]:
    command = [sys.executable, str(HERE / "answering.py"), bus, *arguments]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def config_of(bus: str, n: int = 3) -> Any:
    return OmegaConf.create({
        "actor_rollout_ref": {"rollout": {
            "n": n, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "val_kwargs": {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1},
        }},
        "trainer": {"v1": {"sampler": {"sampler_kwargs": {"bus": bus}}}},
    })  # fmt: skip


def load(name: str) -> Any:
    """Load a class as verl's trainer does by its configuration."""
    from verl.utils.import_utils import load_extern_type

    return load_extern_type("pkg://trainer_adapter.adapters.verl.sampler", name)


def make(kind: str, bus: str, **options: Any) -> Any:
    return load(kind)(
        trainer_mode="sync" if kind == "ShmbusSampler" else "separate_async",
        trainer_config=OmegaConf.create({}), max_off_policy_threshold=4,
        max_off_policy_strategy="drop", poll_interval=0.05, refill_fn=None,
        sampler_kwargs=OmegaConf.create({"bus": bus, **options}),
    )  # fmt: skip


def submit(queue: Any, manager: Any, words: list[int], step: int, **columns: Any) -> list[str]:
    """Register prompts and have them sampled, as verl's trainer does."""
    import verl.utils.tensordict_utils as tu

    uids = [f"uid-{step}-{word}" for word in words]
    raw = np.empty(len(words), object)
    raw[:] = [[{"role": "user", "content": str(word)}] for word in words]
    batch = tu.get_tensordict({
        "uid": np.array(uids, object), "raw_prompt": raw,
        "data_source": np.array(["math"] * len(words), object),
        **{name: np.array([value] * len(words), object) for name, value in columns.items()},
    })  # fmt: skip
    tu.assign_non_tensor_data(batch, "global_steps", step)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    queue.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    return uids


@pytest.fixture
def parts(queue: Any, bus_name: str) -> Iterator[Callable[..., tuple[Any, Any]]]:
    from verl.utils.import_utils import load_class_from_fqn

    made: list[Any] = []

    def start(kind: str, **options: Any) -> tuple[Any, Any]:
        fqn = "trainer_adapter.adapters.verl.manager.ShmbusAgentLoopManager"
        manager_class = load_class_from_fqn(fqn, "AgentLoopManager")
        manager = manager_class.create(config=config_of(bus_name), llm_client=None)
        made.extend([manager, make(kind, bus_name, **options)])
        return made[0], made[1]

    with shmbus.Bus.create(bus_name, capacity="1MiB"):
        yield start
        for each in made:
            each.close()


@pytest.mark.parametrize("kind", ["ShmbusSampler", "ShmbusSamplerAsync"])
def test_a_step_of_prompts_comes_back_from_four_outside_processes(
    kind: str, queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    manager, sampler = parts(kind)
    with workers(bus_name, 4):
        uids = submit(queue, manager, [5, 6, 7, 8], 1, fork=True)
        batch, metrics = sampler.sample(global_steps=1, partition_id="train", batch_size=4)
    expected = {f"{uid}_{index}_0" for uid in uids for index in range(3)}
    assert set(batch.keys) == expected | {f"{uid}_1_1" for uid in uids}, "a fork is an output more"
    assert not metrics
    fields = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "uid",
              "input_ids", "position_ids", "loss_mask", "data_source", "raw_prompt"]  # fmt: skip
    data = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=fields)
    for place, key in enumerate(batch.keys):
        uid, index, row = key.split("_")
        word, count = int(uid.rpartition("-")[2]), int(index) + 1
        assert data["prompts"][place].tolist() == ([1, word, word] if row == "1" else [1, word])
        assert data["responses"][place].tolist() == [word] * (1 if row == "1" else count)
        assert data["rm_scores"][place].sum() == 0.25 * int(index)
        assert (data["rollout_log_probs"][place] == -0.5).all()
        assert data["uid"][place] == uid and data["data_source"][place] == "math"
        length = len(data["input_ids"][place])
        assert data["position_ids"][place].tolist() == list(range(length))
    assert [tag["seq_len"] for tag in batch.tags] == [len(ids) for ids in data["input_ids"]]
    queue.kv_clear(keys=batch.keys, partition_id="train")
    with shmbus.Bus.open(bus_name) as bus:
        stats = bus.stats()
        assert stats.acknowledged == stats.committed == 12 and bus.policy_version == 0


def test_groups_that_nobody_asked_for_are_prompts_of_their_own(
    queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    with workers(bus_name, 4, "own"):
        batch, _ = sampler.sample(global_steps=4, partition_id="train", batch_size=4)
    assert len(batch.keys) == 8 and len({key.split("_")[0] for key in batch.keys}) == 4
    assert {tag["min_global_steps"] for tag in batch.tags} == {3}
    queue.kv_clear(keys=batch.keys, partition_id="train")


def test_what_verl_cannot_take_is_named_or_a_failed_prompt(
    queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    with shmbus.Producer(bus_name) as producer:
        producer.put("bare", group_size=1, index=0, tokens=[1, 2], loss_mask=[0, 1])
        wait_until(lambda: producer.stats().committed == 1)
        for _ in range(2):  # it comes again: nothing was dropped that nobody decided about
            with pytest.raises(ValueError, match="group 'bare', sample 0, field 'logprobs'"):
                sampler.sample(global_steps=1, partition_id="train", batch_size=1)


def test_a_missing_bus_and_a_wrong_option_are_named(bus_name: str) -> None:
    from trainer_adapter.adapters.verl.manager import ShmbusAgentLoopManager

    with pytest.raises(ValueError, match=r"set trainer\.v1\.sampler\.sampler_kwargs\.bus"):
        make("ShmbusSampler", "")
    with pytest.raises(ValueError, match=r"set trainer\.v1\.sampler\.sampler_kwargs\.bus"):
        ShmbusAgentLoopManager(config_of(""))
    with pytest.raises(ValueError, match="refused: expected 'raise' or 'drop', got 'skip'"):
        make("ShmbusSampler", bus_name, refused="skip")
