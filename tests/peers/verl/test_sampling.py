"""verl v1's own sampling on the CPU, with groups from outside processes."""

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recorder"))
from http_harness import log_of, playing, recording

os.environ["RAY_AUTH_MODE"] = "disabled"
HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    import ray
    import transfer_queue as tq

    memory = 200 * 2**20
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=memory,
    )
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()
    ray.shutdown()


@contextmanager
def workers(bus: str, count: int, *arguments: str) -> Iterator[None]:
    command = [sys.executable, str(HERE / "verl_answering.py"), bus, *arguments]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def config_of(bus: str, n: int = 3, longest: int = 4) -> Any:
    return OmegaConf.create({
        "actor_rollout_ref": {"rollout": {
            "n": n, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "prompt_length": longest, "response_length": longest + 2,
            "val_kwargs": {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1},
        }},
        "trainer": {"v1": {"sampler": {"sampler_kwargs": {"bus": bus}}}},
    })  # fmt: skip


def load(name: str) -> Any:
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

    def start(kind: str, longest: int = 4, **options: Any) -> tuple[Any, Any]:
        fqn = "trainer_adapter.adapters.verl.manager.ShmbusAgentLoopManager"
        manager_class = load_class_from_fqn(fqn, "AgentLoopManager")
        manager = manager_class.create(config=config_of(bus_name, 3, longest), llm_client=None)
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


def test_trajectories_of_recorded_sessions_are_what_their_engine_sampled(
    seed: int, queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    manager, sampler = parts("ShmbusSamplerAsync", longest=400)
    with shmbus.Bus.open(bus_name) as bus, recording(bus_name, seed) as (engine, url):

        def newer() -> None:
            bus.policy_version += 1

        with playing(url, rewritten=True, between=newer):
            uids = submit(queue, manager, [5, 6], 4)
            batch, _ = sampler.sample(global_steps=4, partition_id="train", batch_size=2)
        assert bus.stats().acknowledged == bus.stats().committed == 6
    log = log_of(engine)
    told = {
        f"{uid}_{index}_{number}": (log[f"{uid}[{index}]"], row)
        for uid in uids
        for index in range(3)
        for number, row in enumerate(log[f"{uid}[{index}]"].rows)
    }
    assert set(batch.keys) == set(told)
    assert len(told) == 8, "a history that was rewritten is an output more"
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "uid",
              "session_id", "num_turns"]  # fmt: skip
    data = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=fields)
    for place, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        sample, row = told[key]
        assert data["prompts"][place].tolist() == row.tokens[: row.begin]
        assert data["responses"][place].tolist() == row.tokens[row.begin :]
        assert data["response_mask"][place].tolist() == row.mask[row.begin :]
        assert data["rollout_log_probs"][place].tolist() == row.logprobs[row.begin :]
        assert data["rm_scores"][place].sum() == sample.score
        assert f"{data['uid'][place]}_{data['session_id'][place]}" == key.rpartition("_")[0]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == sample.versions
        assert data["num_turns"][place] == 2 * sample.calls
    assert len({sample.versions for sample, _ in told.values()}) == 6, "each met two of its own"
    queue.kv_clear(keys=batch.keys, partition_id="train")


def test_groups_that_nobody_asked_for_are_prompts_of_their_own(
    queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    with workers(bus_name, 4, "own"):
        batch, _ = sampler.sample(global_steps=4, partition_id="train", batch_size=4)
    assert len(batch.keys) == 8 and len({key.split("_")[0] for key in batch.keys}) == 4
    assert {tag["min_global_steps"] for tag in batch.tags} == {3}
    queue.kv_clear(keys=batch.keys, partition_id="train")


def statuses(queue: Any, uids: list[str]) -> list[str]:
    known = queue.kv_list(partition_id="train")["train"]
    return [known[uid]["status"] for uid in uids]


def submitted(
    queue: Any, bus_name: str, manager: Any, words: list[int], step: int, *worker: str
) -> list[str]:
    """Have prompts answered by one worker process; return their uids."""
    with shmbus.Bus.open(bus_name) as bus, workers(bus_name, 1, *worker):
        answered = bus.stats().committed + 3 * len(words)
        uids = submit(queue, manager, words, step)
        wait_until(lambda: bus.stats().committed >= answered)
    return uids


def test_a_worker_with_weights_older_than_verls_bound_is_replaced_as_stale(
    queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    manager, sampler = parts("ShmbusSamplerAsync")
    submitted(queue, bus_name, manager, [5], 9, "version", "3")
    refilled: list[str] = []

    def refill(count: int) -> None:
        assert count == 1
        refilled.extend(submitted(queue, bus_name, manager, [6], 9, "version", "11"))

    sampler.refill_fn = refill
    batch, metrics = sampler.sample(global_steps=9, partition_id="train", batch_size=1)
    assert {key.split("_")[0] for key in batch.keys} == set(refilled), "of newer weights"
    # Made by version 3, which verl samples with in step 4: the sixth step, and 4 are allowed.
    assert metrics["training/off_policy/evicted_samples_staleness/max"] == 6
    assert {tag["min_global_steps"] for tag in batch.tags} == {11}
    queue.kv_clear(keys=batch.keys, partition_id="train")


@pytest.mark.parametrize(
    ("options", "worker"), [({"max_policy_lag": 1}, ("version", "3")), ({}, ("fail",))]
)
def test_a_prompt_whose_group_the_bus_dropped_ends_as_failed(
    options: dict[str, Any], worker: tuple[str, ...], queue: Any, bus_name: str,
    parts: Callable[..., tuple[Any, Any]],
) -> None:  # fmt: skip
    manager, sampler = parts("ShmbusSampler", **options)
    uids = submitted(queue, bus_name, manager, [5, 6], 9, *worker)
    with shmbus.Bus.open(bus_name) as bus:
        assert bus.policy_version == 8, "a worker sees it with the prompt"

    def ended() -> bool:
        sampler._sync_metadata_from_transfer_queue()
        return statuses(queue, uids) == ["failure"] * 2

    wait_until(ended)
    queue.kv_clear(keys=uids, partition_id="train")


def test_samples_with_and_without_a_field_each_keep_theirs(
    queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    row = {"tokens": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5]}
    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    with shmbus.Producer(bus_name) as producer:
        producer.put_group("q", [{"score": 0.0, **row}, {"score": 1.0, **row}])
        producer.put_group("r", [{"score": 0.0, **row, "routed_experts": experts}])
    batch, _ = sampler.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sorted(key.split("_", 1)[1] for key in batch.keys) == ["0_0", "0_0", "1_0"]
    by_size = {}
    for key in batch.keys:
        by_size.setdefault(key.split("_")[0], []).append(key)
    [mixed] = [keys for keys in by_size.values() if len(keys) == 1]
    data = queue.kv_batch_get(
        keys=mixed, partition_id="train", select_fields=["routed_experts", "rollout_log_probs"]
    )
    assert np.asarray(data["routed_experts"][0]).tolist() == experts.tolist()
    assert data["rollout_log_probs"][0].tolist() == [-0.5]
    queue.kv_clear(keys=batch.keys, partition_id="train")


def test_what_verl_cannot_take_is_named_or_a_failed_prompt(
    queue: Any, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    with shmbus.Producer(bus_name) as producer:
        producer.put("bare", group_size=1, index=0, tokens=[1, 2], loss_mask=[0, 1])
        wait_until(lambda: producer.stats().committed == 1)
        for _ in range(2):  # it comes again: no undecided group was dropped
            with pytest.raises(ValueError, match="group 'bare', sample 0, field 'logprobs'"):
                sampler.sample(global_steps=1, partition_id="train", batch_size=1)


@pytest.mark.parametrize(
    ("prompt", "response", "words"),
    [
        (1, 7, r"expected at most 6, data\.max_response_length, got 7"),
        (6, 5, r"expected at most 10, data\.max_prompt_length and max_response_length, got 11"),
    ],
)
def test_a_row_that_is_longer_than_verl_allows_is_named(
    prompt: int, response: int, words: str, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    tokens = [1] * (prompt + response)
    mask, logprobs = [0] * prompt + [1] * response, [-0.5] * (prompt + response)
    with shmbus.Producer(bus_name) as producer:
        producer.put(
            "long", group_size=1, index=0, tokens=tokens, loss_mask=mask, logprobs=logprobs
        )
    with pytest.raises(ValueError, match=f"group 'long', sample 0, field 'tokens': {words}"):
        sampler.sample(global_steps=1, partition_id="train", batch_size=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"meta": {"num_turns": None}}, "expected an int as num_turns of its meta, got None"),
        ({"meta": {"reward_extra_info": 5}}, "expected a dict as reward_extra_info of its meta"),
        ({"routed_experts": np.full((2, 1, 1), 70_000)}, "'routed_experts': expected the numbers"),
    ],
)
def test_what_verl_would_take_as_something_else_is_named(
    changes: dict[str, Any], words: str, bus_name: str, parts: Callable[..., tuple[Any, Any]]
) -> None:
    _manager, sampler = parts("ShmbusSamplerAsync")
    sample = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5], **changes}
    with shmbus.Producer(bus_name) as producer:
        producer.put("odd", group_size=1, index=0, **sample)
    with pytest.raises(ValueError, match=f"group 'odd', sample 0.*{words}"):
        sampler.sample(global_steps=1, partition_id="train", batch_size=1)


def test_a_missing_bus_and_a_wrong_option_are_named(bus_name: str) -> None:
    from trainer_adapter.adapters.verl.manager import ShmbusAgentLoopManager

    with pytest.raises(ValueError, match=r"set trainer\.v1\.sampler\.sampler_kwargs\.bus"):
        make("ShmbusSampler", "")
    with pytest.raises(ValueError, match=r"set trainer\.v1\.sampler\.sampler_kwargs\.bus"):
        ShmbusAgentLoopManager(config_of(""))
    with pytest.raises(ValueError, match="refused: expected 'raise' or 'drop', got 'skip'"):
        make("ShmbusSampler", bus_name, refused="skip")
