"""Samples of a recorder as outputs of SkyRL's generator: they are what the engine sampled."""

import asyncio
import sys
from pathlib import Path

import pytest
from skyrl.train.utils.trainer_utils import validate_generator_output
from test_generator import batch_of

import shmbus
from trainer_adapter.adapters.skyrl import make_generator

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recorder"))
from http_harness import log_of, playing, recording

pytestmark = pytest.mark.timeout(120)


def test_outputs_of_sessions_are_what_the_engine_sampled(seed: int, bus_name: str) -> None:
    batch = batch_of([5, 6, 7], 3, step=4)
    with (
        shmbus.Bus.create(bus_name, capacity="4MiB") as bus,
        recording(bus_name, seed) as (engine, url),
        playing(url),
    ):
        generator = make_generator(bus_name, timeout=60.0)
        output = asyncio.run(generator.generate(batch))
        generator.close()
        assert bus.stats().acknowledged == bus.stats().committed == 9
    validate_generator_output(9, output)
    log = log_of(engine)
    assert output["trajectory_ids"] == batch["trajectory_ids"]
    for place, each in enumerate(batch["trajectory_ids"]):
        sample = log[f"{each.instance_id}[{each.repetition_id}]"]
        [row] = sample.rows
        assert output["prompt_token_ids"][place] == row.tokens[: row.begin]
        assert output["response_ids"][place] == row.tokens[row.begin :]
        assert output["loss_masks"][place] == row.mask[row.begin :]
        assert output["rollout_logprobs"][place] == row.logprobs[row.begin :]
        assert output["rewards"][place] == sample.score
        assert sample.versions == (4, 4), "SkyRL has no versions: its step was the engine's"
    assert set(output["stop_reasons"]) == {"stop"}


def test_a_session_whose_history_was_rewritten_is_refused_by_name(seed: int, bus_name: str) -> None:
    generator = make_generator(bus_name, timeout=60.0)
    with (
        shmbus.Bus.create(bus_name, capacity="4MiB"),
        recording(bus_name, seed) as (_engine, url),
        playing(url, rewritten=True),
        pytest.raises(ValueError, match=r"group 'q5', sample 1: expected one row, got 2: .* put"),
    ):
        asyncio.run(generator.generate(batch_of([5], 2)))
    generator.close()
