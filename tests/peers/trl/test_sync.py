"""TRL's GRPOTrainer itself, whose prompts go to workers over a bus and come back as groups."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_requests import free_port
from tiny import make_model

import shmbus

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(400)


def start_worker(bus: str, model: Path, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", str(HERE / "trl_answering.py"), bus, str(model)]
    return subprocess.Popen([*command, str(seed)])


@contextmanager
def workers(bus: str, model: Path, count: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [start_worker(bus, make_model(model), seed) for seed in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(bus: str, directory: Path, steps: int, ranks: int = 1, **options: Any) -> str:
    """Run a trainer of so many ranks to its end; return what it wrote to stderr."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", str(HERE / "sync_trainer.py"), bus, str(directory)]
    running = [
        subprocess.Popen(
            [*command, str(steps), json.dumps(options)], stderr=subprocess.PIPE, text=True,
            env=os.environ | ({} if ranks == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "ACCELERATE_USE_CPU": "true",
            }),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    errors = []
    try:
        for process in running:
            errors.append(process.communicate(timeout=300)[1])
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in running), errors[0][-3000:]
    return errors[0]


def calls(directory: Path, rank: int = 0) -> list[Any]:
    lines = (directory / f"calls-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_slots(prompts: list[str], answer: dict[str, list[Any]]) -> None:
    for slot, prompt in enumerate(prompts):
        word = int(prompt[1:])
        assert answer["prompt_ids"][slot] == [word], prompt
        completion = answer["completion_ids"][slot]
        assert len(completion) == len(answer["logprobs"][slot]) == len(answer["env_mask"][slot])
        share = sum(token == word for token in completion) / len(completion)
        assert answer["bus_score"][slot] == pytest.approx(share)


@pytest.mark.slow
def test_the_reward_rises_under_policy_correction(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus, workers(bus_name, tmp_path / "model"):
        train(bus_name, tmp_path, 60, evaluate=True, per_device_train_batch_size=32)
        counts = bus.stats()
        assert counts.acknowledged == counts.committed and not sum(counts.dropped.values())
        with shmbus.Consumer(bus_name) as consumer:
            evaluated = consumer.stats().splits["eval"].acknowledged
        assert evaluated == 8 * 4, "a group for each prompt, once"
    for _rank, _training, prompts, answer in calls(tmp_path):
        check_slots(prompts, answer)
    [log] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rewards = [step["reward"] for step in log if "reward" in step]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1, rewards
    assert any("importance_sampling_ratio" in key for key in log[0]), sorted(log[0])
    assert any("eval_reward" in step for step in log)
    assert not calls(tmp_path)[-1][1], "the evaluation came last"


@pytest.mark.slow
def test_two_ranks_share_groups_that_straddle_them(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus, workers(bus_name, tmp_path / "model"):
        train(bus_name, tmp_path, 3, ranks=2, per_device_train_batch_size=6, ddp_backend="gloo")
        assert bus.stats().acknowledged == bus.stats().committed
    ours, theirs = calls(tmp_path, 0), calls(tmp_path, 1)
    assert len(ours) == len(theirs) > 0
    for mine, its in zip(ours, theirs, strict=True):
        assert mine[2][4:] == its[2][:2], "the group straddles"
        check_slots(mine[2], mine[3])
        check_slots(its[2], its[3])


def test_workers_of_two_ranks_are_told_how_to_sample(bus_name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    metas: list[Any] = []
    over = threading.Event()

    def work(producer: shmbus.Producer) -> None:
        while not over.is_set():
            request = producer.requests.next(timeout=0.1)
            if request is not None:
                metas.append(request.meta)
                tokens = [*request["prompt"].tolist(), 3, 4]
                mask, logprobs = [0] * (len(tokens) - 2) + [1, 1], [0.0] * (len(tokens) - 2)
                producer.requests.answer(
                    request, score=request.index, tokens=tokens, loss_mask=mask,
                    logprobs=[*logprobs, -1.0, -1.0],
                )  # fmt: skip

    with shmbus.Bus.create(bus_name, capacity="4MiB"), shmbus.Producer(bus_name) as producer:
        worker = threading.Thread(target=work, args=(producer,))
        worker.start()
        try:
            train(
                bus_name, tmp_path, 1, ranks=2, per_device_train_batch_size=6, ddp_backend="gloo",
                temperature=0.7, top_p=0.9, top_k=5, generation_kwargs={"min_p": 0.1},
            )  # fmt: skip
        finally:
            over.set()
            worker.join()
    assert len(metas) == 12
    for meta in metas:
        assert meta["prompt"] == f"w{meta['answer']}", "the row is the prompt's own"
        assert meta["sampling"] == {
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0,
            "max_completion_length": 8,
        }  # fmt: skip


@pytest.mark.slow
def test_workers_that_are_killed_lose_no_group(seed: int, bus_name: str, tmp_path: Path) -> None:
    dice = random.Random(seed)
    model = tmp_path / "model"
    with shmbus.Bus.create(bus_name, capacity="4MiB") as bus, workers(bus_name, model) as processes:
        command = [sys.executable, "-W", "ignore", str(HERE / "sync_trainer.py"), bus_name]
        trainer = subprocess.Popen([*command, str(tmp_path), "30"])
        kills = 0
        at_kill = 0
        while trainer.poll() is None:
            time.sleep(dice.uniform(0.0, 0.5))
            # A worker that has just been started needs a while: let somebody work between kills.
            if bus.stats().committed < at_kill + 40:
                continue
            at_kill = bus.stats().committed
            place = dice.randrange(len(processes))
            processes[place].send_signal(signal.SIGKILL)
            processes[place].wait()
            processes[place] = start_worker(bus_name, model, 100 + kills)
            kills += 1
        assert trainer.returncode == 0 and kills > 0
        counts = bus.stats()
        assert counts.acknowledged == 30 * 16 and not sum(counts.dropped.values()), counts


def test_a_call_that_nobody_answers_says_what_is_missing(bus_name: str) -> None:
    from types import SimpleNamespace

    from trainer_adapter.adapters.trl import ShmbusRollouts

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), num_generations=2, max_completion_length=8,
        accelerator=SimpleNamespace(num_processes=1), processing_class=None,
    )  # fmt: skip
    with shmbus.Bus.create(bus_name, capacity="1MiB"):
        rollouts = ShmbusRollouts(bus_name, timeout=0.2, tokenize=False)
        with pytest.raises(TimeoutError, match=r"1 group, the first .* did not come in"):
            rollouts(["a", "a"], trainer)
        with pytest.raises(ValueError, match="a multiple of 2 prompts"):
            rollouts(["a", "a", "b"], trainer)
        with pytest.raises(ValueError, match="2 equal prompts from slot 0"):
            rollouts(["a", "b"], trainer)
        rollouts.close()
