"""TRL's real AsyncGRPOTrainer, fed from a bus: own rows, own protocol, nothing stale."""

import asyncio
import json
import math
import queue
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import PartialState
from numbered import put
from trl.experimental.async_grpo import async_rollout_worker as trl_worker

import shmbus
from trainer_adapter.adapters.trl import ShmbusRolloutWorker, scored

HERE = Path(__file__).parent
GROUPS = 40

pytestmark = pytest.mark.timeout(300)


class _Sequence:
    def __init__(self, ids: list[int], mask: list[int], logprobs: list[float]) -> None:
        self.input_ids, self.completion_mask, self.old_log_probs = ids, mask, logprobs


def trls_own(group: list[dict[str, Any]]) -> list[Any]:
    """TRL's own worker makes rows of a group, with the rewards given."""
    PartialState()  # required by TRL's logger
    loop: Any = object.__new__(trl_worker._AsyncRolloutLoop)
    rewards = [each["reward"] for each in group]
    loop.reward_funcs = [lambda **_: rewards]
    loop.reward_func_names = ["match"]
    loop._env_reward_types = []
    loop._provides_rollout_reward = False
    count = len(group)
    given: Any = type(
        "Group", (), {
            "prompts": [[]] * count, "completions": [[]] * count, "completions_ids": [[]] * count,
            "completions_sequences": [
                [_Sequence(row["tokens"], row["mask"], row["logprobs"]) for row in each["rows"]]
                for each in group
            ],
            "reward_kwargs": {}, "env_rewards": [None] * count, "rollout_rewards": [None] * count,
            "tool_call_counts": [0] * count, "tool_failure_counts": [0] * count,
            "model_version": 3, "group_id": 0,
        },
    )  # fmt: skip
    return asyncio.run(loop._score_group(given))


def conversation(dice: random.Random) -> list[dict[str, Any]]:
    rows = []
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        mask = [0] + [dice.randint(0, 1) for _ in range(dice.randint(1, 40))] + [1]
        rows.append({
            "tokens": [dice.randint(0, 2**31 - 1) for _ in mask],
            "mask": mask,
            "logprobs": [float(np.float32(-dice.random())) if bit else 0.0 for bit in mask],
        })  # fmt: skip
    return rows


def fields(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": np.array(row["tokens"], np.int32),
        "loss_mask": np.array(row["mask"], np.uint8),
        "logprobs": np.array(row["logprobs"], np.float32),
    }


def test_rows_and_forks_are_those_of_trls_own_worker_bit_for_bit(seed: int, bus_name: str) -> None:
    dice = random.Random(seed)
    worker = ShmbusRolloutWorker(bus_name, daemon=False)
    with shmbus.Bus.create(bus_name, capacity="4MiB"), shmbus.Producer(bus_name) as producer:
        worker.start()
        for number in range(GROUPS):
            group = []
            for _ in range(8):
                reward = dice.choice([None, 0.0, 1.0, dice.random()])
                group.append({"reward": reward, "rows": conversation(dice)})
            if all(each["reward"] is None for each in group):
                group[0]["reward"] = 1.0
            for index, each in enumerate(group):
                reward = each["reward"]
                named = {"rewards": {"match": float("nan") if reward is None else reward}}
                rows = [fields(row) for row in each["rows"]]
                one: dict[str, Any] = rows[0] if len(rows) == 1 else {"rows": rows}
                producer.put(
                    f"q{number}", group_size=8, index=index, policy_version=3, **one,
                    **scored(reward, named),
                )  # fmt: skip
            for theirs in trls_own(group):
                ours = worker.rollout_buffer.get(timeout=10.0)
                assert type(ours) is type(theirs)
                for name in ("input_ids", "completion_mask", "old_log_probs"):
                    mine, its = getattr(ours, name), getattr(theirs, name)
                    assert mine.dtype == its.dtype and mine.tobytes() == its.tobytes(), name
                assert ours.advantage == theirs.advantage
                assert ours.model_version == theirs.model_version == 3
                assert repr(dict(ours.metrics)) == repr(theirs.metrics)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=0.01)
        worker.stop()


def run(bus: str, directory: Path, steps: int, acknowledge: str, **options: Any) -> Any:
    command = [sys.executable, "-W", "ignore", str(HERE / "trainer.py"), bus, str(directory)]
    return subprocess.run(
        [*command, str(steps), acknowledge, json.dumps(options)], capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


def put_groups(bus: str, first: int, count: int) -> None:
    with shmbus.Producer(bus) as producer:
        for number in range(first * 4, (first + count) * 4):
            put(producer, number)


def test_the_bus_leaves_stale_groups_out(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus:
        put_groups(bus_name, 0, 10)
        bus.policy_version = 9
        put_groups(bus_name, 10, 40)
        done = run(bus_name, tmp_path, 6, "version", max_staleness=8)
        assert done.returncode == 0, done.stderr[-3000:]
        stats = bus.stats()
        assert stats.dropped["stale"] == 40, "the groups of policy 0"
        [log] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert all("sample/dropped_stale_total" not in step for step in log)
        assert log[0]["sample/staleness_max"] == 1 and bus.policy_version == 9 + 1 + 6
        lines = (tmp_path / "trained.jsonl").read_text().splitlines()[1:]
        assert min(number for line in lines for number in json.loads(line)[1]) == 40


@pytest.mark.slow
def test_samples_of_newer_weights_are_trained(bus_name: str, tmp_path: Path) -> None:
    """As after a resume: workers with weights newer than the checkpoint."""
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus:
        bus.policy_version = 50
        put_groups(bus_name, 0, 40)
        with shmbus.Consumer(bus_name) as consumer:
            consumer.reset_policy_version(9)
        done = run(bus_name, tmp_path, 4, "version", max_staleness=8)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not sum(bus.stats().dropped.values())
        [log] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        steps = [step for step in log if "loss" in step]
        # TRL's ratio starts from the sampler's logprobs, and its metrics show the versions ahead.
        assert len(steps) == 4 and all(math.isfinite(step["loss"]) for step in steps)
        assert [step["sample/staleness_max"] for step in steps] == [-40, -39, -38, -37]


@pytest.mark.slow
def test_what_trl_drops_as_stale_ends_and_blocks_nothing(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus:
        put_groups(bus_name, 0, 10)
        bus.policy_version = 9
        put_groups(bus_name, 10, 40)
        done = run(
            bus_name, tmp_path, 6, "save", max_staleness=8, worker={"max_policy_lag": None},
            save_steps=3,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert bus.stats().dropped["malformed"] == 40, "groups that TRL left out"
        assert bus.stats().acknowledged % 4 == 0 and bus.stats().acknowledged > 40


@pytest.mark.slow
def test_without_the_callback_acks_come_two_versions_on(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus:
        put_groups(bus_name, 0, 60)
        done = run(bus_name, tmp_path, 6, "version", without_callback=True)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path / "trained.jsonl").read_text().splitlines()[1:]
        trained = {number for line in lines for number in json.loads(line)[1]}
        earlier = {number for line in lines[:4] for number in json.loads(line)[1]}
        acknowledged = bus.stats().acknowledged
        # Whole groups, from every step but the last, and nothing untrained.
        assert acknowledged % 4 == 0 and len(earlier) - 4 < acknowledged <= len(trained)
        done = run(bus_name, tmp_path, 6, "save", without_callback=True)
        assert "pass callbacks=[worker.callback]" in done.stderr


@pytest.mark.slow
def test_a_misfit_ends_the_run_or_is_dropped(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus:
        put_groups(bus_name, 0, 5)
        done = run(bus_name, tmp_path / "a", 2, "version", num_generations=8)
        assert done.returncode == 1
        assert "group 'g0': expected 8 samples, which num_generations" in done.stderr
        with shmbus.Producer(bus_name) as producer:
            for index in range(4):
                tokens = np.full(90, 3, np.int32)
                producer.put(
                    "long", group_size=4, index=index, tokens=tokens, loss_mask=tokens,
                    logprobs=np.zeros(90, np.float32),
                )  # fmt: skip
            for number in range(20, 300):
                put(producer, number)
        options = {"refused": "drop"}
        done = run(bus_name, tmp_path / "b", 10, "version", worker=options)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "group 'long', sample 0, field 'tokens': expected at most 40" in done.stderr
        assert bus.stats().dropped["malformed"] == 4
