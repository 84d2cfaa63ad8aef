"""TRL's asynchronous trainer under faults: rollouts of its own worker, and of a bus.

    python -m bench.adapters.trl_faults [SECONDS] [EVERY] [FILE]

By turns the trainer, and the process that samples, are killed every so many seconds and started
again, the trainer from its last checkpoint. Each sample has a number, which travels as the logprob
of its first token; what the surviving checkpoints were trained on is read from the loss. *Lost* is
what was sampled and neither trained nor left for the next step. The sampler is that of
`bench.adapters.trl_learning`: TRL's worker asks it over HTTP, as it asks vLLM.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "peers" / "trl"))

from numbered import SCALE, number_of
from tiny import COMPLETION_TOKENS, make_model, on_a_cpu, write_line

import shmbus
from bench.adapters import trl_learning
from bench.adapters.trl_learning import AHEAD, GROUP_SIZE, WORDS, own_worker

#: Steps between two checkpoints.
SAVE_STEPS = 4
#: Seconds that a trainer has for its end.
ENDS_S = 180.0


class Numbered(trl_learning.Sampler):
    """Numbers each sample, in a file that outlives it."""

    def __init__(self, bus: str, directory: str, seed: int) -> None:
        super().__init__(bus, directory, seed)
        self.file = open(Path(directory).parent / "made", "ab", buffering=0)  # noqa: SIM115

    def __call__(self, word: int, count: int) -> Any:
        tokens, logprobs, rewards = super().__call__(word, count)
        for row in logprobs:
            row[1] = -(self.file.tell() + 1) / SCALE
            self.file.write(b".")
        return tokens, logprobs, rewards


def train(kind: str, root: Path, bus: str, port: int) -> None:
    """Train from the last checkpoint until the file ``stop`` is there."""
    model = root / "model"
    module = on_a_cpu()
    from datasets import Dataset
    from transformers import TrainerCallback

    from trainer_adapter.adapters.trl import (
        ShmbusRolloutWorker,
        ShmbusWeights,
        last_whole_checkpoint,
    )

    numbers: list[int] = []

    class Trainer(module.AsyncGRPOTrainer):  # type: ignore[misc,name-defined]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            chosen = inputs["token_index"] >= 0
            old, segment = inputs["old_log_probs"][chosen], inputs["segment_id"][chosen]
            seen: set[int] = set()
            for logprob, which in zip(old.tolist(), segment.tolist(), strict=True):
                if which not in seen:
                    seen.add(which)
                    numbers.append(round(-logprob * SCALE) - 1)
            return super().compute_loss(model, inputs, *rest, **more)

    class Account(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            write_line(root / "trained.jsonl", [state.global_step, numbers.copy()])
            numbers.clear()
            if (root / "stop").exists():
                control.should_save = control.should_training_stop = True

    dataset = Dataset.from_dict({
        "prompt": [[{"role": "user", "content": f"w{word}"}] for word in WORDS],
        "word": list(WORDS),
    })  # fmt: skip
    if kind == "bus":
        worker: Any = ShmbusRolloutWorker(bus, daemon=False, acknowledge="save")
        weights: Any = ShmbusWeights(bus)
    else:
        worker, weights = own_worker(module, bus, model, port, dataset)
    config = module.AsyncGRPOConfig(
        output_dir=str(root / "out"), max_steps=10**6, num_generations=GROUP_SIZE,
        max_completion_length=COMPLETION_TOKENS, token_budget=256, learning_rate=1e-4,
        max_staleness=64, save_strategy="steps", save_steps=SAVE_STEPS, save_total_limit=4,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=1, heartbeat_stale_after_s=60.0,
    )  # fmt: skip
    trainer = Trainer(
        model=str(model), args=config, train_dataset=dataset, rollout_worker=worker,
        weight_transfer=weights,
        callbacks=[Account(), *([worker.callback] if kind == "bus" else [])],
    )  # fmt: skip
    last = last_whole_checkpoint(config.output_dir)
    write_line(root / "trained.jsonl", ["resumed", int(last.rpartition("-")[2]) if last else 0])
    trainer.train(resume_from_checkpoint=last)


def survived(root: Path) -> list[int]:
    """Return the samples that the last checkpoint was trained on."""
    steps: list[tuple[int, list[int]]] = []
    for line in (root / "trained.jsonl").read_text().splitlines():
        step, value = json.loads(line)
        if step == "resumed":
            steps = [each for each in steps if each[0] <= value]
        else:
            steps.append((step, value))
    return [number for _, numbers in steps for number in numbers]


def left_on(bus: str) -> set[int]:
    """Return what the next step would get."""
    left: set[int] = set()
    with shmbus.Consumer(bus) as consumer:
        while groups := consumer.take(timeout=1.0):
            left.update(number_of(t) for group in groups for t in group)
            consumer.ack(groups)
    return left


@contextmanager
def processes(kind: str, root: Path, bus: str, port: int) -> Iterator[dict[str, Any]]:
    """Start both processes; whoever ends unasked is started again, by `watch`."""
    common = [sys.executable, "-W", "ignore", "-m", "bench.adapters.trl_faults"]
    place = [bus, str(root / "model"), "0"]
    commands = {
        "trainer": [*common, "--train", kind, str(root), bus, str(port)],
        "sampler": [*common, "--work" if kind == "bus" else "--serve", *place, str(port)],
    }
    running: dict[str, Any] = {}

    def start(name: str) -> None:
        log = open(root / f"{name}.log", "ab")  # noqa: SIM115
        running[name] = subprocess.Popen(commands[name], stdout=log, stderr=log)
        log.close()

    for name in commands:
        start(name)
    try:
        yield {"start": start, "running": running}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def measure(kind: str, seconds: float, every_s: float) -> dict[str, Any]:
    """Train under faults, and account for every sample."""
    kills, ends = {"trainer": 0, "sampler": 0}, {"trainer": 0, "sampler": 0}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(root / "model", 0)
        bus = f"faults-{kind}-{root.name}"
        stack.enter_context(shmbus.Bus.create(bus, "4MiB", max_lead=AHEAD))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        both = stack.enter_context(processes(kind, root, bus, port))
        running, began = both["running"], time.monotonic()
        next_kill_s = began + every_s
        while (now_s := time.monotonic()) < began + seconds:
            time.sleep(0.2)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    ends[name] += 1
                    both["start"](name)
            if now_s >= next_kill_s:
                name = "trainer" if sum(kills.values()) % 2 else "sampler"
                running[name].send_signal(signal.SIGKILL)
                running[name].wait()
                kills[name] += 1
                both["start"](name)
                next_kill_s += every_s
        (root / "stop").touch()
        ended_s = time.monotonic() + ENDS_S
        while running["trainer"].poll() is None and time.monotonic() < ended_s:
            time.sleep(0.2)
        whole = running["trainer"].poll() == 0
        for process in running.values():
            process.kill()
            process.wait()
        made, trained = (root / "made").stat().st_size, survived(root)
        left = left_on(bus) if kind == "bus" else set[int]()
        with shmbus.Bus.open(bus) as opened:
            dropped = {reason: n for reason, n in opened.stats().dropped.items() if n}
    once = set(trained)
    return {
        "kind": kind, "seconds": seconds, "kills": kills, "ended by themselves": ends,
        "whole": whole, "sampled": made, "trained": len(once), "twice": len(trained) - len(once),
        "dropped": dropped, "left": len(left - once), "lost": made - len(once | left),
        "goodput": round(len(once) / (made - len(left - once)), 4),
    }  # fmt: skip


def main() -> None:
    """Measure both kinds, print and write."""
    given = sys.argv[1:]
    seconds, every_s = (float(each) for each in (*given[:2], *("1800", "60")[len(given[:2]) :]))
    found = []
    for kind in ("bus", "own"):
        found.append(measure(kind, seconds, every_s))
        print(json.dumps(found[-1]), flush=True)
        if len(given) > 2:
            Path(given[2]).write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


if __name__ == "__main__":
    how, *more = sys.argv[1:] or [""]
    trl_learning.Sampler = Numbered  # type: ignore[misc]
    if how == "--work":
        trl_learning.work(more[0], more[1], int(more[2]))
    elif how == "--serve":
        trl_learning.serve(more[0], more[1], int(more[2]), int(more[3]))
    elif how == "--train":
        train(more[0], Path(more[1]), more[2], int(more[3]))
    else:
        main()
