"""torchtitan's own RL batcher on the CPU, with groups from outside processes."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import doc_pages
import numpy as np
import pytest
import torch
import torchtitan

import shmbus
from trainer_adapter.adapters.torchtitan import ShmbusBatches, sample_group

pytestmark = pytest.mark.timeout(120)

GROUP_SIZE = 4


@pytest.fixture(scope="module")
def rl() -> Any:
    """Its batcher and types, without the packages' ``__init__``, which import vLLM and Monarch."""
    root = Path(str(torchtitan.__file__)).parent / "experiments" / "rl"
    for name in ("", ".components", ".rollout"):
        module = ModuleType(f"torchtitan.experiments.rl{name}")
        module.__path__ = [str(root / name.removeprefix("."))]
        sys.modules[module.__name__] = module
    return (
        importlib.import_module("torchtitan.experiments.rl.components.batcher"),
        importlib.import_module("torchtitan.experiments.rl.types"),
    )


WORKER = """
import sys
import shmbus
name, first = sys.argv[1], int(sys.argv[2])
with shmbus.Producer(name, wait=30.0) as producer:
    for number in range(first, first + 2):
        producer.put_group(f"q{number}", [
            {"score": float(index % 2), "policy_version": 3,
             "tokens": [1, 2, *([10 + number] * (index + 1))],
             "loss_mask": [0, 0, *([1] * (index + 1))],
             "logprobs": [0.0, 0.0, *([-0.5] * (index + 1))]}
            for index in range(4)])
"""


def batcher_of(rl: Any, prompts: int) -> Any:
    module, _ = rl
    config = module.Batcher.Config(batch=module.BatchConfig(local_batch_size=2, seq_len=16))
    return config.build(num_prompts_per_train_step=prompts, dp_degree=2, pad_id=0)


def by_hand(types: Any, number: int, group_id: int) -> Any:
    """The group of a prompt as torchtitan's own rollouts would give it."""
    samples = []
    for index in range(GROUP_SIZE):
        count = index + 1
        credit = 0.5 if index % 2 else -0.5
        samples.append(types.TrainingSample(
            min_policy_version=3, max_policy_version=3,
            rollout_id=types.RolloutTurnID(group_id=group_id, rollout_id=index, turn_id=0),
            token_ids=[1, 2, *([10 + number] * count)], loss_mask=[False] * 2 + [True] * count,
            logprobs=[0.0] * 2 + [-0.5] * count, advantage=[0.0] * 2 + [credit] * count,
        ))  # fmt: skip
    return types.TrainingSampleGroup(group_id=group_id, training_samples=samples, metrics=[])


def test_a_batch_of_four_outside_processes_is_torchtitans_own(rl: Any, bus_name: str) -> None:
    _, types = rl
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus:
        processes = [
            subprocess.Popen([sys.executable, "-c", WORKER, bus_name, str(2 * first)])
            for first in range(4)
        ]
        batches = ShmbusBatches(bus_name, batcher_of(rl, 4))
        own = batcher_of(rl, 4)
        seen: set[int] = set()
        for step in range(2):
            batch = batches.next(timeout=60.0)
            order = [group.instance_id for group in batches._given]
            for place, name in enumerate(order):
                group = by_hand(types, int(name[1:]), 4 * step + place)
                expected = own.add_training_samples(training_sample_group=group)
            assert batch.num_global_valid_tokens == expected.num_global_valid_tokens == 40
            assert batch.min_policy_versions == expected.min_policy_versions
            assert len(batch.microbatches) == len(expected.microbatches)
            for ours, theirs in zip(batch.microbatches, expected.microbatches, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    for field in ("token_ids", "labels", "positions", "generator_logprobs",
                                  "loss_mask", "advantages"):  # fmt: skip
                        assert torch.equal(getattr(one, field), getattr(other, field)), field
            assert bus.stats().acknowledged == 16 * step, "not before it was trained"
            batches.ack(policy_version=step + 1)
            assert bus.stats().acknowledged == 16 * (step + 1)
            seen |= {int(name[1:]) for name in order}
        assert seen == set(range(8)) and bus.policy_version == 2
        assert batches.next(timeout=0.0) is None
        batches.close()
        for process in processes:
            assert process.wait(30) == 0


def test_the_page_trains_until_it_ends(rl: Any, bus_name: str) -> None:
    class Enough(Exception):
        pass

    seen: list[int] = []

    def step(batch: Any) -> None:
        seen.append(len(batch.microbatches))
        if len(seen) == 2:
            raise Enough

    row = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0]}
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus:
        with shmbus.Producer(bus_name) as producer:
            for number in range(32):
                producer.put_group(f"q{number}", [{"score": float(i), **row} for i in range(2)])
        with pytest.raises(Enough):
            doc_pages.run("torchtitan.md", "batches.ack(", bus_name, step=step, version=0)
        assert seen == [1, 1] and bus.stats().acknowledged == 32, "a batch that was trained"
        assert bus.policy_version == 1


def test_forks_are_samples_and_equal_scores_teach_nothing(rl: Any, bus_name: str) -> None:
    _, types = rl
    row = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]}
    with (
        shmbus.Bus.create(bus_name, capacity="1MiB"),
        shmbus.Producer(bus_name) as producer,
        shmbus.Consumer(bus_name) as consumer,
    ):
        samples = [{"score": 1.0, "rows": [row, row]}, {"score": 0.0, **row}]
        producer.put_group("q", samples)
        producer.put_group("equal", [{"score": 1.0, **row}] * 2)
        forked, equal = consumer.take(2, 5.0)
        made = sample_group(forked, 7, advantages="grpo").training_samples
        assert [(s.rollout_id.rollout_id, s.rollout_id.turn_id) for s in made] == [
            (0, 0), (0, 1), (1, 0),
        ]  # fmt: skip
        assert made[0].advantage == made[1].advantage and made[0].advantage[0] == 0.0
        assert sample_group(equal, 8).training_samples == []
        assert len(sample_group(equal, 8, drop_equal=False).training_samples) == 2
        with pytest.raises(
            ValueError,
            match="expected 'dr_grpo', 'grpo', 'rloo' or 'none', got 'batch'",
        ):
            sample_group(forked, 7, advantages="batch")
        producer.put("bare", group_size=1, index=0, tokens=[1], loss_mask=[1])
        [bare] = consumer.take(1, 5.0)
        with pytest.raises(ValueError, match="group 'bare', sample 0, field 'logprobs'"):
            sample_group(bare, 9)
        assert isinstance(made[0], types.TrainingSample)


def test_lists_of_a_row_are_those_of_whole_arrays(rl: Any, seed: int, bus_name: str) -> None:
    dice = np.random.default_rng(seed)
    with (
        shmbus.Bus.create(bus_name, capacity="1MiB"),
        shmbus.Producer(bus_name) as producer,
        shmbus.Consumer(bus_name) as consumer,
    ):
        for number in range(30):
            rows = []
            for _ in range(4):
                length = int(dice.integers(1, 60))
                mask = dice.integers(0, 2, length)
                if dice.random() < 0.5:
                    mask = np.sort(mask)
                logprobs = np.where(mask, -dice.random(length), np.nan).astype(np.float32)
                rows.append({"tokens": dice.integers(0, 9, length), "loss_mask": mask,
                             "logprobs": logprobs, "score": dice.random()})  # fmt: skip
            if number % 2:
                for row in rows:
                    row["advantages"] = dice.random(len(row["tokens"])).astype(np.float32)
            producer.put_group(f"q{number}", rows)
            [group] = consumer.take(1, 5.0)
            mean = np.mean([row["score"] for row in rows])
            for sample, row in zip(sample_group(group, 0).training_samples, rows, strict=True):
                sampled = row["loss_mask"] != 0
                credit = row.get("advantages", np.full(len(sampled), row["score"] - mean))
                assert sample.token_ids == row["tokens"].tolist()
                assert sample.loss_mask == sampled.tolist()
                assert sample.logprobs == np.where(sampled, row["logprobs"], 0.0).tolist()
                assert sample.advantage == pytest.approx(np.where(sampled, credit, 0.0))
            consumer.ack(group)


def test_a_worker_with_too_old_weights_is_left_out(rl: Any, bus_name: str) -> None:
    row = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0]}
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus:
        bus.policy_version = 5
        with shmbus.Producer(bus_name) as producer:
            for version in (3, 9, 4):
                producer.put_group(
                    f"q{version}",
                    [{"score": float(i), "policy_version": version, **row} for i in range(2)],
                )
        batches = ShmbusBatches(bus_name, batcher_of(rl, 2), max_policy_lag=1)
        batch = batches.next(timeout=5.0)
        assert sorted(batch.min_policy_versions) == [4, 4, 9, 9]
        assert bus.stats().dropped["stale"] == 2
        batches.close()


def test_its_batcher_leaves_out_the_same_of_its_own_rollouts(rl: Any, bus_name: str) -> None:
    """Samples longer than seq_len, and sampled tokens whose logprob is not finite."""
    row = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -1.0]}
    long = {"tokens": [1] * 18, "loss_mask": [0] + [1] * 17, "logprobs": [-1.0] * 18}
    unknown = {**row, "logprobs": [0.0, -1.0, float("nan")]}
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus:
        with shmbus.Producer(bus_name) as producer:
            producer.put_group("q", [{"score": 0.0, **long}, {"score": 1.0, **row}])
            producer.put_group("r", [{"score": 0.0, **unknown}, {"score": 1.0, **row}])
        batches = ShmbusBatches(bus_name, batcher_of(rl, 2))
        batch = batches.next(timeout=5.0)
        assert batch.num_global_valid_tokens == 2 + 2 + 1
        batches.ack()
        assert bus.stats().acknowledged == 4
        batches.close()
