"""Samples of a recorder in both trainers of TRL: they are what the engine sampled."""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_async import run, trls_own
from test_sync import calls, train
from tiny import make_model

import shmbus
from trainer_adapter.adapters.trl import ShmbusRollouts, ShmbusRolloutWorker
from trainer_adapter.adapters.trl.rollouts import key_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recorder"))
from http_harness import Sample, log_of, play, playing, recording

pytestmark = pytest.mark.timeout(300)

SIZE = 4
#: Its ids are letters'; an answer has 13 tokens at most, a sequence some hundred.
LIMITS = {"max_completion_length": 16, "num_generations": SIZE}
VOCABULARY = 256


def of_trl(samples: list[Sample]) -> list[Any]:
    rows = [[row._asdict() for row in each.rows] for each in samples]
    rewards = [each.score for each in samples]
    return trls_own([{"reward": r, "rows": of} for r, of in zip(rewards, rows, strict=True)])


def test_rows_of_sessions_are_those_of_trls_own_worker(seed: int, bus_name: str) -> None:
    worker = ShmbusRolloutWorker(bus_name)
    with (
        shmbus.Bus.create(bus_name, capacity="4MiB"),
        shmbus.Feeder(bus_name) as feeder,
        recording(bus_name, seed) as (engine, url),
    ):
        worker.start()
        worker.update_model_version(1)
        feeder.request("q", group_size=SIZE)
        for index in range(SIZE):
            newer = partial(worker.update_model_version, index + 2)
            assert play(url, rewritten=True, between=newer)
        log = log_of(engine)
        samples = [log[f"q[{index}]"] for index in range(SIZE)]
        of_rows = [sample for sample in samples for _ in sample.rows]
        assert len(of_rows) == SIZE + SIZE // 2, "a history that was rewritten is a row more"
        assert [sample.versions for sample in samples] == [(n, n + 1) for n in range(1, SIZE + 1)]
        for theirs, sample in zip(of_trl(samples), of_rows, strict=True):
            ours = worker.rollout_buffer.get(timeout=30.0)
            for name in ("input_ids", "completion_mask", "old_log_probs"):
                assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes(), name
            assert (ours.advantage, ours.metrics["reward"]) == (theirs.advantage, sample.score)
            assert ours.model_version == sample.versions[0]
        assert worker.rollout_buffer.empty()
        worker.stop()


def test_trls_loss_covers_sampled_tokens(seed: int, bus_name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", vocabulary=VOCABULARY)
    with (
        shmbus.Bus.create(bus_name, capacity="4MiB") as bus,
        shmbus.Feeder(bus_name) as feeder,
        recording(bus_name, seed) as (engine, url),
        playing(url, rewritten=True),
    ):
        for number in range(12):
            feeder.request(f"q{number}", group_size=SIZE)
        done = run(bus_name, tmp_path, 2, "version", tell=True, token_budget=400, **LIMITS)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not sum(bus.stats().dropped.values())
    log = log_of(engine)
    sampled: Counter[str] = Counter()
    for number in range(len(log) // SIZE):
        for row in of_trl([log[f"q{number}[{index}]"] for index in range(SIZE)]):
            mask = row.completion_mask == 1
            advantages = np.full(mask.sum(), row.advantage, np.float32)
            columns = row.input_ids[mask], row.old_log_probs[mask], advantages
            sampled[json.dumps([column.tolist() for column in columns])] += 1
    trained = Counter((tmp_path / "losses.jsonl").read_text().splitlines())
    assert trained and trained <= sampled


def test_completions_are_in_grpos_slots(seed: int, bus_name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", vocabulary=VOCABULARY)
    with (
        shmbus.Bus.create(bus_name, capacity="4MiB") as bus,
        recording(bus_name, seed) as (engine, url),
        playing(url),
    ):
        train(bus_name, tmp_path, 2, **LIMITS)
        assert bus.stats().acknowledged == bus.stats().committed > 0
    log = log_of(engine)
    for _rank, _training, prompts, answer in calls(tmp_path):
        for slot in range(len(prompts)):
            sample = log[f"{key_of(prompts[slot])}[{slot % SIZE}]"]
            [row] = sample.rows
            assert answer["prompt_ids"][slot] == row.tokens[: row.begin]
            assert answer["completion_ids"][slot] == row.tokens[row.begin :]
            assert answer["env_mask"][slot] == row.mask[row.begin :]
            assert answer["logprobs"][slot] == row.logprobs[row.begin :]
            assert answer["bus_score"][slot] == sample.score


def test_grpo_trainer_refuses_a_rewritten_history(seed: int, bus_name: str) -> None:
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=SimpleNamespace(num_processes=1), **LIMITS
    )
    rollouts = ShmbusRollouts(bus_name, tokenize=False)
    with (
        shmbus.Bus.create(bus_name, capacity="4MiB"),
        recording(bus_name, seed) as (_engine, url),
        playing(url, rewritten=True),
        pytest.raises(
            ValueError, match=r"sample 1: expected one row, got 2: .* train with AsyncGRPOTrainer"
        ),
    ):
        rollouts(["a"] * SIZE, trainer)
    rollouts.close()
