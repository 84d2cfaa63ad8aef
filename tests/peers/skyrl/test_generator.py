"""A generator of SkyRL's own interface, whose outputs SkyRL's own checks take."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from skyrl.train.generators.base import BatchMetadata, GeneratorInterface, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output

import shmbus
from trainer_adapter.adapters.skyrl import make_generator

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, capacity="1MiB"):
        yield bus_name


@contextmanager
def workers(bus: str, count: int, *arguments: str) -> Iterator[None]:
    command = [sys.executable, str(HERE / "skyrl_answering.py"), bus, *arguments]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def batch_of(words: list[int], size: int, step: int = 1, phase: Any = "train") -> dict[str, Any]:
    ids = [TrajectoryID(f"q{word}", index) for word in words for index in range(size)]
    return {
        "prompts": [[{"role": "user", "content": each.instance_id}] for each in ids],
        "env_classes": ["echo"] * len(ids),
        "env_extras": [{"word": int(each.instance_id[1:])} for each in ids],
        "sampling_params": {"temperature": 1.0},
        "trajectory_ids": ids,
        "batch_metadata": BatchMetadata(global_step=step, training_phase=phase),
    }


def check(batch: dict[str, Any], output: Any) -> None:
    validate_generator_output(len(batch["prompts"]), output)
    for place, each in enumerate(batch["trajectory_ids"]):
        count = each.repetition_id + 1
        assert output["prompt_token_ids"][place] == [1, 2]
        assert output["response_ids"][place] == [int(each.instance_id[1:])] * count
        assert output["loss_masks"][place] == [1] * count
        assert output["rollout_logprobs"][place] == [-0.5] * count
        assert output["rewards"][place] == 0.25 * each.repetition_id
    assert set(output["stop_reasons"]) == {"length"}
    assert output["trajectory_ids"] == batch["trajectory_ids"]


def test_outputs_stand_in_the_order_of_the_input(bus: str, seed: int) -> None:
    generator = make_generator(bus)
    assert isinstance(generator, GeneratorInterface)
    batch = batch_of([5, 6, 7], 4)
    order = list(range(12))
    random.Random(seed).shuffle(order)
    for name in ("prompts", "env_classes", "env_extras", "trajectory_ids"):
        batch[name] = [batch[name][place] for place in order]
    with workers(bus, 3):
        check(batch, asyncio.run(generator.generate(batch)))
        evaluation = batch_of([8], 2, phase="eval")
        check(evaluation, asyncio.run(generator.generate(evaluation)))
    generator.close()
    with shmbus.Consumer(bus) as consumer:
        stats = consumer.stats()
        assert stats.splits["eval"].acknowledged == 2 and stats.acknowledged == 14
        assert consumer.policy_version == 1


def test_calls_that_overlap_each_get_their_own_groups(bus: str) -> None:
    generator = make_generator(bus)

    async def all_at_once() -> list[Any]:
        batches = [batch_of([word], 3) for word in (5, 6, 7, 5)]
        return [batches, await asyncio.gather(*map(generator.generate, batches))]

    with workers(bus, 2):
        batches, outputs = asyncio.run(all_at_once())
    for batch, output in zip(batches, outputs, strict=True):
        check(batch, output)
    generator.close()


def test_a_rollout_that_fails_is_asked_for_again_alone(bus: str) -> None:
    generator = make_generator(bus, sample_retries=2)
    batch = batch_of([5, 6], 3)
    with workers(bus, 2, "fail"):
        check(batch, asyncio.run(generator.generate(batch)))
    generator.close()


def test_what_skyrl_cannot_take_is_an_error_that_names_it(bus: str) -> None:
    generator = make_generator(bus, timeout=0.3)
    with pytest.raises(TimeoutError, match=r"the group \('q5', \d+\) did not come in 0.3 s"):
        asyncio.run(generator.generate(batch_of([5], 2)))
    with pytest.raises(ValueError, match="expected a trajectory_id for each prompt, got none"):
        asyncio.run(generator.generate({**batch_of([5], 2), "trajectory_ids": None}))
    generator.close()
    generator = make_generator(bus, timeout=20.0)

    async def answered(**fields: Any) -> None:
        with shmbus.Producer(bus) as producer:
            call = asyncio.ensure_future(generator.generate(batch_of([6], 1)))
            request = None
            while request is None or request.instance_id != "q6":
                await asyncio.sleep(0.01)
                request = producer.requests.next(timeout=0.0)
            producer.requests.answer(request, **fields)
            await call

    with pytest.raises(ValueError, match="group 'q6', sample 0, field 'logprobs': expected one"):
        asyncio.run(answered(tokens=[1, 2], loss_mask=[0, 1]))
    row = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]}
    with pytest.raises(ValueError, match="sample 0: expected one row, got 2: SkyRL has one"):
        asyncio.run(answered(rows=[row, row]))
    generator.close()
