"""The TRL adapter without TRL: its account of rows, its checks of samples, its saved state."""

import importlib.util
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from answering import answering
from conftest import wait_until

import shmbus
from shmbus.pool.pool_file import pool_path
from shmbus.weights import ManifestError, WeightSubscriber
from trainer_adapter.adapters.trl import (
    ShmbusRollouts,
    ShmbusRolloutWorker,
    ShmbusWeights,
    last_whole_checkpoint,
    scored,
)
from trainer_adapter.adapters.trl.held import (
    FORGET_AFTER_GROUPS,
    Account,
    OpenGroup,
    Row,
    RowMetrics,
    TrainedRows,
)
from trainer_adapter.adapters.trl.rows import read_rows, read_sample
from trainer_adapter.adapters.trl.samples import Expected, advantages_of, check_size, rewards_of

ROUNDS = 300


def play(dice: random.Random) -> None:
    """Play TRL's batcher, with accelerate's look-ahead; some rows are dropped as stale."""
    account = Account()
    trained: list[int] = []
    dropped: list[int] = []
    ended: list[OpenGroup] = []
    batches: deque[list[int]] = deque()
    waiting: deque[Row] = deque()
    held: list[Row] = []
    rows: list[Row] = []

    def hand_out() -> Row:
        if not waiting:
            group = OpenGroup(len(rows))
            for index in range(4):
                waiting.append(group.add((0, len(rows) + index, 0), index, known=False))
        row = waiting.popleft()
        rows.append(row)
        ended.extend(account.hand_out(row))
        return row

    for _ in range(dice.randint(1, 12)):
        for _ in range(dice.randint(0, 2)):  # the look-ahead packs before a step ends
            chosen = held.copy()
            for _ in range(dice.randint(1, 6)):
                row = hand_out()
                if dice.random() < 0.15:
                    dropped.append(row.identity[1])
                else:
                    chosen.append(row)
            if not chosen:
                continue
            keep = dice.random() < 0.5 and chosen[-1] is rows[-1] and len(chosen) > 1
            held = [chosen.pop()] if keep else []
            for row in chosen:
                metrics = RowMetrics({"reward": 1.0}, account, row)
                assert list(metrics) == list(metrics) == ["reward"], "read twice, marked once"
            batches.append([row.identity[1] for row in chosen])
        if batches:
            trained += batches.popleft()
            ended += account.finish(1)
        assert [r.identity[1] for r in rows if r.state == "trained"] == sorted(trained)
        assert {r.identity[1] for r in rows if r.state == "dropped"} <= set(dropped)
    for group in {id(row.group): row.group for row in rows}.values():
        over = all(row.state in ("trained", "dropped") for row in group.rows)
        assert ended.count(group) == over


def test_rows_are_trained_when_their_micro_batch_is_finished(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(ROUNDS):
        play(dice)


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, capacity="1MiB"):
        yield bus_name


def put_group(bus: str, *changes: dict[str, Any], size: int = 2) -> shmbus.Group:
    with shmbus.Producer(bus) as producer:
        for index in range(size):
            sample: dict[str, Any] = {
                "score": float(index),
                "tokens": np.array([5, 6, 7, 8], np.int32),
                "loss_mask": np.array([0, 1, 1, 0], np.uint8),
                "logprobs": np.array([0, -1, -2, 0], np.float32),
            }
            sample |= changes[index] if index < len(changes) else {}
            sample = {name: value for name, value in sample.items() if value is not None}
            producer.put("q1", group_size=size, index=index, **sample)
    with shmbus.Consumer(bus) as consumer:
        [group] = consumer.take(1, 10.0)
        # The arrays stay valid; the tests read them after the lease.
        return group.copy()  # type: ignore[return-value]


def test_a_row_is_the_whole_sequence_in_the_types_of_trl(bus: str) -> None:
    [(ids, mask, logprobs)] = read_sample(put_group(bus)[0], Expected())
    assert (ids.dtype, mask.dtype, logprobs.dtype) == (np.int64, np.int64, np.float32)
    assert ids.tolist() == [5, 6, 7, 8] and mask.tolist() == [0, 1, 1, 0]
    assert logprobs.tolist() == [0, -1, -2, 0]


def test_limits_of_the_trainer_are_checked(bus: str) -> None:
    group = put_group(bus)
    read_sample(group[0], Expected(2, 2, 4))
    with pytest.raises(ValueError, match="at most 1 sampled in a turn, max_completion_length"):
        read_sample(group[0], Expected(2, 1, 4))
    with pytest.raises(ValueError, match=r"at most 3, the trainer's token_budget, got 4"):
        read_sample(group[0], Expected(2, 2, 3))
    with pytest.raises(ValueError, match="expected 8 samples, which num_generations"):
        check_size(group, Expected(8))


def random_sample(dice: np.random.Generator) -> dict[str, Any]:
    length = int(dice.integers(1, 30))
    mask = dice.integers(0, 2, length)
    return {
        "tokens": dice.integers(0, 2**31, length, dtype=dice.choice([np.int32, np.int64])),
        "loss_mask": mask.astype(dice.choice([np.uint8, np.bool_, np.float32])),
        "logprobs": np.where(mask, -dice.random(length), np.nan).astype(np.float32),
    }


def test_a_whole_group_is_read_as_its_samples_are_one_by_one(seed: int, bus: str) -> None:
    dice = np.random.default_rng(seed)
    with shmbus.Producer(bus) as producer, shmbus.Consumer(bus) as consumer:
        for _ in range(ROUNDS // 10):
            round = producer.next_round()
            for index in range(4):
                rows = [random_sample(dice) for _ in range(int(dice.integers(1, 4)))]
                same = len({tuple(v.dtype for v in row.values()) for row in rows}) == 1
                fields = {"rows": rows} if same and len(rows) > 1 else rows[0]
                producer.put("q1", group_size=4, index=index, round=round, **fields)
            [group] = consumer.take(1, 10.0)
            together = read_rows(group, Expected())
            for t, mine in zip(group, together, strict=True):
                alone = read_sample(t, Expected())
                assert len(alone) == len(mine) == len(t.rows)
                for one, other in zip(alone, mine, strict=True):
                    for left, right in zip(one, other, strict=True):
                        assert left.dtype == right.dtype and left.tobytes() == right.tobytes()
            consumer.ack(group)
            assert together[0][0].input_ids.tolist(), "copies: the lease is over"


def test_what_is_wrong_with_a_leased_group_is_said_by_sample_and_field(bus: str) -> None:
    good = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]}
    bad: list[tuple[dict[str, Any], str]] = [
        ({**good, "logprobs": [0.0, float("nan")]}, "'logprobs': expected finite"),
        ({**good, "advantages": [0.0, 1.0]}, "'advantages': expected no such field"),
        ({**good, "logprobs": [0.0]}, "'logprobs'"),
        ({"tokens": [1, 2], "loss_mask": [0, 1]}, "'logprobs': expected one value"),
        ({"rows": [good, {**good, "logprobs": [0.0, math.inf]}]}, "'logprobs': expected finite"),
        ({"rows": [{"tokens": [1, 2]}], "loss_mask": [0, 1], "logprobs": [0.0, 1.0]}, "loss_mask"),
    ]
    with shmbus.Producer(bus) as producer, shmbus.Consumer(bus) as consumer:
        for fields, words in bad:
            round = producer.next_round()
            producer.put("q1", group_size=2, index=0, round=round, **good)
            producer.put("q1", group_size=2, index=1, round=round, **fields)
            [group] = consumer.take(1, 10.0)
            with pytest.raises(ValueError, match="group 'q1', sample 1, field") as refused:
                read_rows(group, Expected())
            assert words in str(refused.value)
            consumer.drop(group)


class _Model:
    training = True


class _RowsOf:
    def __init__(self, *names: str) -> None:
        self.column_names = list(names)


class _SyncTrainer:
    def __init__(self, training: bool) -> None:
        self.model = _Model()
        self.model.training = training
        self.num_generations, self.num_generations_eval = 2, 4
        self.max_completion_length = 8
        self.accelerator = SimpleNamespace(num_processes=1, is_main_process=True)
        self.processing_class = None
        self.temperature, self.top_p, self.top_k, self.min_p = 0.7, 0.9, 20, None
        self.repetition_penalty = 1.1
        self.args = SimpleNamespace(generation_kwargs={"top_k": 5, "stop": ["</a>"]})
        self.use_vllm, self.vllm_importance_sampling_correction = False, True
        self.rollout_func: ShmbusRollouts | None = None
        self.train_dataset = _RowsOf("prompt")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        """Like TRL: a rollout function gets the prompts, and no other column."""
        assert self.rollout_func is not None
        return self.rollout_func([row["prompt"] for row in inputs], self)


@contextmanager
def answers(bus: str, rows: int = 1, metas: list[Any] | None = None) -> Iterator[list[str]]:
    """Answer requests until the block ends; yields the splits that were asked for."""
    asked: list[str] = []
    good = {"tokens": [3, 4], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]}
    fields: dict[str, Any] = good if rows == 1 else {"rows": [good] * rows}

    def answer(producer: shmbus.Producer, request: shmbus.Request) -> None:
        asked.append(request.split)
        if metas is not None:
            metas.append(request.meta)
        producer.requests.answer(request, score=request.index, **fields)

    with answering(bus, answer):
        yield asked


@pytest.mark.parametrize("served", [False, True])
def test_evaluations_have_a_split(served: bool, bus_name: str, daemon: Callable[..., Any]) -> None:
    if served:
        daemon("--capacity", "1MiB")
    with shmbus.Bus.ensure(bus_name, capacity="1MiB") as handle, answers(bus_name) as asked:
        rollouts = ShmbusRollouts(bus_name, timeout=20.0, tokenize=False)
        for training, prompts in ((True, ["a"] * 2), (False, ["a"] * 4), (True, ["b"] * 2)):
            answer = rollouts(prompts, _SyncTrainer(training))
            assert answer["bus_score"] == list(range(len(prompts)))
            assert answer["completion_ids"] == [[4]] * len(prompts)
        rollouts.close()
        assert asked == ["train"] * 2 + ["eval"] * 4 + ["train"] * 2
        wait_until(lambda: handle.stats().acknowledged == 8)
        with shmbus.Consumer(bus_name) as consumer:
            splits = consumer.stats().splits
        assert (splits["train"].acknowledged, splits["eval"].acknowledged) == (4, 4)


def sample_rows(bus: str, trainer: _SyncTrainer, *rows: dict[str, Any]) -> list[Any]:
    """Sample rows of a data set as often as TRL does; return the workers' requests."""
    metas: list[Any] = []
    with answers(bus, metas=metas):
        assert trainer.rollout_func is not None
        trainer._generate_and_score_completions(
            [dict(row) for row in rows for _ in range(trainer.num_generations)]
        )
        trainer.rollout_func.close()
    return metas


def test_workers_are_told_how_the_trainer_samples(bus: str) -> None:
    trainer = _SyncTrainer(True)
    trainer.rollout_func = ShmbusRollouts(bus, timeout=20.0, tokenize=False)
    for meta in sample_rows(bus, trainer, {"prompt": "a"}):
        assert meta["prompt"] == "a" and meta["split"] == "train"
        assert meta["sampling"] == {
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1,
            "max_completion_length": 8, "stop": ["</a>"],
        }  # fmt: skip


def test_workers_are_told_the_other_columns_of_each_prompts_own_row(bus: str) -> None:
    trainer = _SyncTrainer(True)
    trainer.rollout_func = ShmbusRollouts(bus, timeout=20.0, tokenize=False)
    trainer.rollout_func.attach(trainer)
    # Equal prompts of two rows, and TRL's additions to a row given again.
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": "4", "levels": np.arange(2), "bus_score": 1.0},
        {"prompt": "a", "answer": "5", "levels": np.arange(3), "split": "hard"},
    ]
    metas = sample_rows(bus, trainer, *rows)
    told = sorted((meta["answer"], meta["levels"]) for meta in metas)
    assert told == [("4", [0, 1])] * 2 + [("5", [0, 1, 2])] * 2
    assert all(meta["split"] == "train" and "bus_score" not in meta for meta in metas)


def test_an_unfit_column_is_named_once(bus: str, caplog: pytest.LogCaptureFixture) -> None:
    name = f"image of {bus}"
    for _ in range(2):
        trainer = _SyncTrainer(True)
        trainer.rollout_func = ShmbusRollouts(bus, timeout=20.0, tokenize=False)
        trainer.rollout_func.attach(trainer)
        for meta in sample_rows(bus, trainer, {"prompt": "a", "answer": 4, name: object()}):
            assert meta["answer"] == 4 and name not in meta
    [said] = [record.message for record in caplog.records if name in record.message]
    assert "does not go to workers" in said and "object" in said


def test_columns_out_of_sight_are_named(bus: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        trainer = _SyncTrainer(True)
        trainer.train_dataset = _RowsOf("prompt", "answer", "level")
        rollouts = trainer.rollout_func = ShmbusRollouts(bus, timeout=20.0, tokenize=False)
        sample_rows(bus, trainer, {"prompt": "a", "answer": 4})
        rollouts.close()
    said = [r.message for r in caplog.records if "do not go to workers" in r.message]
    assert len(said) == 2, "once an object"
    assert "'answer', 'level'" in said[0] and "rollouts.attach(trainer)" in said[0]


def test_forks_are_refused_by_the_rollout_function(bus: str) -> None:
    with answers(bus, rows=2):
        rollouts = ShmbusRollouts(bus, timeout=20.0, tokenize=False)
        with pytest.raises(ValueError, match="sample 0: expected one row, got 2: GRPOTrainer has"):
            rollouts(["a"] * 2, _SyncTrainer(True))
        rollouts.close()


def test_the_default_advantage_is_trls_own(seed: int) -> None:
    dice = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        rewards = dice.normal(size=8)
        rewards[dice.random(8) < 0.2] = np.nan
        found, std = advantages_of(rewards, [False] * 8, "grpo")
        known = rewards[~np.isnan(rewards)]
        assert std == known.std()
        for reward, advantage in zip(rewards, found, strict=True):
            if math.isnan(reward):
                assert advantage == 0
            else:
                assert advantage == (reward - known.mean()) / (known.std() + 1e-8)


def test_other_advantages_are_ours_and_those_of_a_batch_are_refused() -> None:
    rewards = np.array([0.0, 1.0, 1.0, np.nan])
    centred, _std = advantages_of(rewards, [False] * 4, "dr_grpo")
    assert centred == pytest.approx([-2 / 3, 1 / 3, 1 / 3, 0])
    assert advantages_of(rewards, [True, False, False, False], "dr_grpo")[0][0] == 0
    with pytest.raises(ValueError, match="compares within a group, got 'batch'"):
        advantages_of(rewards, [False] * 4, "batch")  # type: ignore[arg-type]


def test_a_sample_without_a_reward_travels_as_unscorable(bus: str) -> None:
    group = put_group(bus, scored(float("nan"), {"env": "math"}), scored(0.5), size=2)
    rewards, zeroed = rewards_of(group)
    assert math.isnan(rewards[0]) and rewards[1] == 0.5 and zeroed == [False, False]
    assert group[0].meta == {"env": "math", "unscorable": True}
    with pytest.raises(ValueError, match="a finite number, NaN or None"):
        scored(float("inf"))


def test_only_a_checkpoint_with_its_last_file_counts(tmp_path: Path) -> None:
    assert last_whole_checkpoint(tmp_path) is None
    for step, text in [(8, "{}"), (16, "{}"), (24, '{"global'), (32, None)]:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-16")


def saved_rows(created: int = 1) -> dict[str, Any]:
    group = OpenGroup(type("Lease", (), {"instance_id": "q1", "round": None}))
    for sequence in range(3):
        row = group.add((7, sequence, 0), sequence, known=False)
        row.state = "trained" if sequence < 2 else "handed"
    saved = TrainedRows(created).save("run1", 12, True, [group])
    result: dict[str, Any] = json.loads(json.dumps(saved))
    return result


def test_trained_rows_are_recognized_once_and_on_their_bus_only() -> None:
    rows = TrainedRows(1)
    assert rows.load(saved_rows()) and len(rows) == 2
    assert rows.take((7, 0, 0)) and not rows.take((7, 0, 0)) and not rows.take((7, 2, 0))
    assert not TrainedRows(2).load(saved_rows())
    with pytest.raises(ValueError, match="in form 1, got 9"):
        TrainedRows(1).load(saved_rows() | {"version": 9})


def test_rows_that_never_come_again_are_forgotten_at_last() -> None:
    rows = TrainedRows(1)
    rows.load(saved_rows())
    for _ in range(FORGET_AFTER_GROUPS - 1):
        rows.note_group(known=False)
    assert len(rows) == 2
    rows.note_group(known=False)
    assert len(rows) == 0


def test_wrong_options_are_refused_when_the_worker_is_made() -> None:
    with pytest.raises(TypeError, match="max_policy_lags"):
        ShmbusRolloutWorker("none", max_policy_lags=4)
    with pytest.raises(TypeError, match="TRL's main process takes all rows"):
        ShmbusRolloutWorker("none", rank=1)
    with pytest.raises(ValueError, match="expected 'version' or 'save', got 'step'"):
        ShmbusRolloutWorker("none", acknowledge="step")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 'raise' or 'drop'"):
        ShmbusRolloutWorker("none", refused="skip")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_policy_lags"):
        ShmbusRollouts("none", max_policy_lags=4)
    with pytest.raises(ValueError, match="'grpo', 'dr_grpo', 'rloo' or 'none', got 'gae'"):
        ShmbusRolloutWorker("none", advantages="gae")  # type: ignore[arg-type]
    for name in ("num_generations", "max_completion_length", "token_budget"):
        options: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=f"{name}: expected 1 or more, got 0"):
            ShmbusRolloutWorker("none", **options)
        options[name] = "8"
        with pytest.raises(TypeError, match=f"{name}: expected an int, got str"):
            ShmbusRolloutWorker("none", **options)
    for kind in (ShmbusRolloutWorker, ShmbusRollouts, ShmbusWeights):
        with pytest.raises(ValueError, match="bus name: expected 1 to 200 bytes"):
            kind("a/b")


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed here")
def test_without_trl_the_message_says_what_to_install(bus: str) -> None:
    worker = ShmbusRolloutWorker(bus)
    with pytest.raises(ImportError, match=r"no trl \(tested: 1\.16\.0\).*install trl==1\.16\.0"):
        worker.start()
    worker.stop()


WAIT_S = 20.0


@pytest.fixture
def weights(bus: str) -> Iterator[ShmbusWeights]:
    made = ShmbusWeights(bus)
    yield made
    made.destroy()


def model(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    return iter([("a", torch.full((2,), value)), ("b", torch.full((3,), value))])


def test_a_first_sync_of_no_parameters_sends_nothing(bus: str, weights: ShmbusWeights) -> None:
    with pytest.raises(ValueError, match="send_weights: expected the model's parameters, got none"):
        weights.send_weights(iter([]))
    with pytest.raises(FileNotFoundError):
        open(pool_path(bus, "weights")).close()
    weights.send_weights(model(1.0))
    with WeightSubscriber(bus) as subscriber, subscriber.latest(timeout=WAIT_S) as found:
        assert found.version == 1 and found["a"].tolist() == [1.0, 1.0]


def test_a_later_sync_of_no_parameters_changes_nothing(bus: str, weights: ShmbusWeights) -> None:
    weights.send_weights(model(1.0))
    with pytest.raises(ManifestError, match="'a' is missing"):
        weights.send_weights(iter([]))
    with WeightSubscriber(bus) as subscriber:
        with subscriber.latest(timeout=WAIT_S) as found:
            assert found["b"].tolist() == [1.0] * 3
        weights.send_weights(model(2.0))
        with subscriber.latest(timeout=WAIT_S) as found:
            assert found["b"].tolist() == [2.0] * 3
