"""A week of a run, in minutes: a whole system under a week's faults, and an exact audit.

Ranks train in step as under torchrun, with a daemon, prefetch, evaluation, weights, workers; every
part is killed or stopped, samples fail, and the bus is saved, removed and restored. A checkpoint
lists its model's training samples, so every prompt must have been trained once, or given up.

Usage: ``PYTHONPATH=tests python tests/process/week.py NAME STEPS SEED [alone]``; ``alone`` runs one
embedded trainer without a daemon. Prints a JSON report, and exits with 1 for any finding.
"""

import contextlib
import io
import json
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from supervisor import Supervisor

import shmbus
from shmbus.cli import main as shmbus_main
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler

WORKERS, GROUP_SIZE, GROUPS_PER_RANK = 3, 4, 2
SCHEMA = {"tokens": "int32", "logprobs": "float32"}
#: Prompts with a sample that always fails, to be given up.
ALWAYS_FAILS_EVERY, ALWAYS_FAILS_AT = 41, 17
FAILS, JUDGE_RAISES = 0.01, 0.02
EVALUATE_EVERY, EVALUATED = 10, 3
#: A step's time of computing; the system does the rest meanwhile.
STEP_S = 0.02
#: An outage of half a minute among steps of seconds, scaled to these steps.
ENGINE_AWAY_S = 1.5
HANG_S = 60.0 * float(os.environ.get("SHMBUS_TEST_PATIENCE", "1"))
BACKOFF = (0.05, 0.5)
#: A line for each chance failure: a sample with failures only is given up.
UNLUCKY, SAMPLE_RETRIES = "unlucky-samples", 2


def fails_always(number: int) -> bool:
    return number % ALWAYS_FAILS_EVERY == ALWAYS_FAILS_AT


def prompts() -> Iterator[tuple[str, np.ndarray]]:
    number = 0
    while True:
        yield f"prompt-{number}", np.array([number], np.int32)
        number += 1


# --- the parts of the system, each a process


def serve(name: str) -> None:
    options = [
        "--sample-retries",
        str(SAMPLE_RETRIES),
        "--retry-backoff",
        ",".join(map(str, BACKOFF)),
    ]
    assert shmbus_main(["serve", name, *options]) == 0


def work(name: str, folder: Path, seed: int) -> None:
    """Answer requests with the newest weights; the engine may be away, and samples fail."""
    rng = random.Random(seed)
    version, model = -1, torch.nn.Linear(4, 4, bias=False)
    with (
        shmbus.Producer(name, wait=HANG_S) as producer,
        WeightSubscriber(name) as weights,
    ):
        while True:
            request = producer.requests.next(timeout=5.0)
            if request is None:
                continue
            if producer.policy_version != version:
                with weights.latest(timeout=HANG_S) as newest:
                    newest.load_into(model)
                    version = newest.version
                assert len(model.weight.unique()) == 1, "torn weights"
            number = int(request["prompt"][0])
            if (folder / "engine-away").exists():
                if rng.random() < 0.5:
                    producer.requests.release(request)
                else:
                    producer.requests.fail(request, "ConnectionRefusedError: [Errno 111]")
            elif fails_always(number) and request.index == 1 and request.split == "train":
                producer.requests.fail(request, f"sandbox of {request.instance_id} timed out")
            elif rng.random() < FAILS:
                with (folder / UNLUCKY).open("a") as told:
                    told.write(f"{number} {request.index}\n")
                producer.requests.fail(request, f"tool call {rng.random()} failed")
            else:
                producer.requests.answer(
                    request,
                    score=None if number % 3 else float(request.index),
                    policy_version=version,
                    tokens=[number, request.index, 1],
                    logprobs=[0.0, -1.0, -1.0],
                )


class Checkpoints:
    """A folder with a folder a step, whole once named."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self.folder.mkdir(exist_ok=True)

    def steps(self) -> list[int]:
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]

    def newest(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the newest step and the ranks' states; step 0 and no states at first."""
        steps = self.steps()
        if not steps:
            return 0, []
        ranks = sorted((self.folder / str(max(steps))).iterdir())
        return max(steps), [pickle.loads(path.read_bytes()) for path in ranks]

    def save(self, life: str, step: int, rank: int, ranks: int, state: dict[str, Any]) -> None:
        """Save a rank's state, and wait for its siblings': the barrier of a step."""
        part = self.folder / f"{step}-{life}"
        part.mkdir(exist_ok=True)
        written = self.folder / f"{step}-{life}-{rank}"
        written.write_bytes(pickle.dumps(state))
        with contextlib.suppress(FileNotFoundError):
            written.replace(part / str(rank))
        end = time.monotonic() + HANG_S
        while not (self.folder / str(step)).exists():
            assert time.monotonic() < end, f"rank {rank} waited for the others"
            if rank == 0 and len(list(part.iterdir())) == ranks:
                part.rename(self.folder / str(step))
                old = self.folder / str(step - 3)
                shutil.rmtree(old, ignore_errors=True)
            time.sleep(0.002)


def train(name: str, folder: Path, life: str, rank: int, ranks: int, last: int, seed: int) -> None:
    rng = random.Random(seed)
    checkpoints = Checkpoints(folder)

    def judge(group: shmbus.Group) -> list[float]:
        if rng.random() < JUDGE_RAISES:
            raise ConnectionError("the judge is away")
        return [float(sample.index) for sample in group]

    alone = ranks == 1 and (folder / "alone").exists()
    more: dict[str, Any] = (
        {"sample_retries": SAMPLE_RETRIES, "retry_backoff": BACKOFF} if alone else {}
    )
    more["prefetch"] = 2 * ((rank + int(life)) % 2)
    step, states = checkpoints.newest()
    trained: set[tuple[str, int]] = set()
    twice: list[tuple[str, int]] = []
    version = 0
    model = torch.nn.Linear(4, 4, bias=False)
    with (
        join(name, rank, ranks, alone, score_group=judge, **more) as handler,
        contextlib.ExitStack() as stack,
    ):
        publisher = None
        if rank == 0:
            publisher = stack.enter_context(WeightPublisher(name, ModuleSource(model)))
        if states:
            handler.load_state_dict([state["handler"] for state in states])
            trained = {each for state in states for each in state["trained"]}
            twice = [each for state in states for each in state["twice"]]
            version = states[0]["version"]
        assert handler.step == step, (handler.step, step)
        handler.offer(prompts(), ahead=2, group_size=GROUP_SIZE)
        publish(model, publisher, version)
        while handler.step < last:
            try:
                batch = handler.next_batch(HANG_S)
            except ConnectionError:
                continue
            new = sorted(sample_ids(batch))
            twice += [each for each in new if each in trained]
            trained.update(new)
            time.sleep(STEP_S)
            version = handler.step
            publish(model, publisher, version)
            if rank == 0:
                handler.set_policy_version(version)
            state = {"handler": handler.state_dict(), "version": version}
            state |= {"trained": trained, "twice": twice}
            checkpoints.save(life, handler.step, rank, ranks, state)
            time.sleep(STEP_S * rng.random())  # a death here leaves a trained batch unacknowledged
            handler.ack(batch)
            if rank == 0 and handler.step % EVALUATE_EVERY == 0:
                evaluate(handler)


def join(name: str, rank: int, ranks: int, alone: bool, **options: Any) -> OnlineDataHandler:
    """Attach as soon as a daemon knows the end of the previous life."""
    end = time.monotonic() + HANG_S
    while True:
        try:
            return OnlineDataHandler(
                name,
                groups_per_batch=GROUPS_PER_RANK * (2 if ranks == 1 else 1),
                rank=rank,
                world_size=ranks,
                daemon=not alone,
                **options,
            )
        except (shmbus.BusBusyError, shmbus.DaemonUnavailableError, shmbus.BusNotFoundError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def sample_ids(batch: Any) -> Iterator[tuple[str, int]]:
    """Yield prompt and index of each sample, as told by the tokens; the score is the index."""
    starts = batch.cu_seqlens[:-1].tolist()
    for id_, start, score in zip(batch.instance_ids, starts, batch.scores.tolist(), strict=True):
        number, index = batch.tokens[start : start + 2].tolist()
        assert (id_, score) == (f"prompt-{number}", index), (id_, score, number, index)
        yield id_, index


def publish(model: torch.nn.Linear, publisher: WeightPublisher | None, version: int) -> None:
    if publisher is not None:
        with torch.no_grad():
            model.weight.fill_(float(version))
        publisher.publish(version=version)


def evaluate(handler: OnlineDataHandler) -> None:
    """Request prompts of the eval split, and wait for their groups."""
    asked = {f"eval-{handler.step}-{number}" for number in range(EVALUATED)}
    for number, id_ in enumerate(sorted(asked)):
        prompt = np.array([3 * number], np.int32)
        handler.request(id_, group_size=1, split="eval", priority=7, prompt=prompt)
    end = time.monotonic() + HANG_S
    while asked:
        assert time.monotonic() < end, f"not evaluated: {asked}"
        with contextlib.suppress(ConnectionError, shmbus.DaemonUnavailableError):
            for group in handler.take("eval", timeout=0.2):
                with group:
                    asked.discard(group.instance_id)
        asked &= {id_ for id_, _, split in handler._consumer.open_requests() if split == "eval"}


# --- the faults


class Week(Supervisor):
    def __init__(self, name: str, folder: Path, steps: int, seed: int, *, alone: bool) -> None:
        super().__init__(seed)
        self.name, self.folder, self.steps, self.alone = name, folder, steps, alone
        self.seed, self.lives = seed, 0
        self.ranks_wanted = 1 if alone else 2
        if alone:
            (folder / "alone").touch()
        shmbus.Bus.ensure(name, "16MiB", schema=SCHEMA).close()
        (folder / UNLUCKY).touch()
        self.start_all()

    def start(self, name: str, program: Callable[[int], None] | None = None) -> None:
        def single_threaded(number: int) -> None:
            torch.set_num_threads(1)
            program(number)

        sys.stdout.flush()
        super().start(name, single_threaded if program is not None else None)

    def start_all(self) -> None:
        if not self.alone:
            self.start("daemon", lambda _: serve(self.name))
        for at in range(WORKERS):
            self.start(
                f"worker {at}", lambda number: work(self.name, self.folder, self.seed + number)
            )
        self.start_ranks()

    def start_ranks(self) -> None:
        self.lives += 1
        for rank in range(self.ranks_wanted):
            self.programs.pop(f"rank {rank}", None)
            told = (str(self.lives), rank, self.ranks_wanted, self.steps)
            self.start(
                f"rank {rank}",
                lambda number, told=told: train(self.name, self.folder, *told, self.seed + number),
            )

    def stop_all(self) -> None:
        order = [*self.children]
        self.rng.shuffle(order)
        self.kill(*order)

    def step(self) -> int:
        return max(Checkpoints(self.folder).steps(), default=0)

    # each fault -----------------------------------------------------------------------------

    def worker_killed(self) -> None:
        self.restart(self.rng.choice(self.named("worker")))

    def worker_stopped(self) -> None:
        self.pause(self.rng.choice(self.named("worker")))

    def rank_stopped(self) -> None:
        child = self.children[self.rng.choice(self.named("rank"))]
        child.stop()
        time.sleep(self.rng.random())
        if self.rng.random() < 0.5:
            self.daemon_killed()
        time.sleep(self.rng.random())
        child.go_on()

    def rank_killed(self) -> None:
        ranks = self.named("rank")
        self.rng.shuffle(ranks)
        self.kill(*ranks)
        self.start_ranks()

    def daemon_killed(self) -> None:
        if not self.alone:
            self.restart("daemon")

    def all_killed(self) -> None:
        self.stop_all()
        self.start_all()

    def engine_away(self) -> None:
        (self.folder / "engine-away").touch()
        time.sleep(ENGINE_AWAY_S)
        (self.folder / "engine-away").unlink()

    def ranks_changed(self) -> None:
        if self.alone:
            return
        self.kill(*self.named("rank"))
        self.ranks_wanted = self.rng.choice(
            [count for count in (1, 2, 3) if count != self.ranks_wanted]
        )
        if self.rng.random() < 0.5:
            self.daemon_killed()
        self.start_ranks()

    def bus_restored(self) -> None:
        self.stop_all()
        saved = self.folder / f"snapshot-{self.done['bus_restored']}"
        assert shmbus_main(["snapshot", self.name, str(saved)]) == 0
        shmbus.unlink(self.name)
        assert shmbus_main(["restore", str(saved), self.name]) == 0
        shutil.rmtree(saved)
        self.start_all()

    # --- the run

    def run(self, every: int) -> None:
        faults = [
            self.worker_killed, self.worker_stopped, self.rank_killed, self.rank_stopped,
            self.daemon_killed, self.all_killed, self.engine_away, self.ranks_changed,
            self.bus_restored,
        ]  # fmt: skip
        self.rng.shuffle(faults)
        next_at = every
        moved, seen = time.monotonic(), 0
        while (step := self.step()) < self.steps:
            self.check()
            if step != seen:
                moved, seen = time.monotonic(), step
            if time.monotonic() - moved > HANG_S:
                raise AssertionError(f"no step after {step} in {HANG_S} s: {self.status()}")
            if step >= next_at:
                time.sleep(self.rng.random() * 0.2)
                fault = faults[self.done.total() % len(faults)]
                fault()
                self.done[fault.__name__] += 1
                next_at = step + self.rng.randint(1, 2 * every)
                moved = time.monotonic()
            time.sleep(0.01)
        for name in self.named("rank"):
            assert self.children.pop(name).wait() == 0, name

    def check(self) -> None:
        """Check the processes for failures; a rank may be at its end."""
        for name, child in self.children.items():
            assert not child.look() or child.status == 0, f"{name} ended with {child.status}"

    def status(self) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            shmbus_main(["status", self.name])
        return out.getvalue()

    def audit(self) -> dict[str, Any]:
        """Compare the last checkpoint's training samples with the data."""
        step, states = Checkpoints(self.folder).newest()
        # A rank's list begins with the common list of its resumed checkpoint.
        whole = {each for state in states for each in state["trained"]}
        common = set.intersection(*(state["trained"] for state in states))
        since = Counter(each for state in states for each in state["trained"] - common)
        twice = {each for state in states for each in state["twice"]}
        twice |= {each for each, count in since.items() if count > 1}
        position = offered(states)
        by_prompt = Counter(id_ for id_, _ in whole)
        open_ids = {each["instance_id"] for state in states for each in open_of(state)}
        chance = Counter((self.folder / UNLUCKY).read_text().splitlines())
        unlucky = {int(at.split()[0]) for at, count in chance.items() if count > SAMPLE_RETRIES}
        skipped, torn, given_up = [], [], 0
        for number in range(position):
            id_ = f"prompt-{number}"
            if fails_always(number):
                given_up += id_ not in by_prompt
                if id_ in by_prompt:
                    torn.append(id_)
            elif by_prompt[id_] == 0 and id_ not in open_ids:
                if number in unlucky:
                    given_up += 1
                else:
                    skipped.append(id_)
            elif by_prompt[id_] not in (0, GROUP_SIZE):
                torn.append(id_)
        return {
            "step": step, "trained": len(whole), "prompts": position, "given_up": given_up,
            "open": len(open_ids), "twice": sorted(twice), "skipped": skipped, "torn": torn,
            "faults": dict(self.done), "lives": self.lives,
        }  # fmt: skip


def offered(states: list[dict[str, Any]]) -> int:
    return max(state["handler"]["offer"].get("position", 0) for state in states)


def open_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    return (state["handler"].get("requests") or {}).get("open", [])


def main() -> int:
    name, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    alone = len(sys.argv) > 4 and sys.argv[4] == "alone"
    logging.basicConfig(level=logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        week = Week(name, Path(folder), steps, seed, alone=alone)
        try:
            week.run(every=6)
            week.stop_all()
            ledger = final_ledger(name)
            report = week.audit() | {"ledger": ledger, "seconds": time.monotonic() - began}
        finally:
            week.stop_all()
            shmbus_main(["rm", "--force", name])  # the weights of a killed publisher, too
    print(json.dumps(report | {"seed": seed}))
    wrong = [report[what] for what in ("twice", "skipped", "torn")]
    return 1 if any(wrong) or report["step"] != steps or not ledger["balanced"] else 0


def final_ledger(name: str) -> dict[str, Any]:
    """Return the ledger of a last life: a reader that takes nothing, after everybody's end."""
    with shmbus.Consumer(name, daemon=False) as consumer:
        consumer.take(timeout=0)
        ledger = consumer.stats()
    return {"balanced": ledger.balanced, "dropped": ledger.dropped}


if __name__ == "__main__":
    sys.exit(main())
