"""TRL's AsyncGRPOTrainer: ``trainer.py BUS DIRECTORY STEPS ACKNOWLEDGE [OPTIONS as JSON]``.

``trained.jsonl`` has the samples' numbers of each step, as read from the loss; with the option
"tell", ``losses.jsonl`` has the loss's inputs of each sequence.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from tiny import NoWeights, make_model, on_a_cpu, write_line

torch.set_num_threads(1)

#: A sample's number n travels as the logprob -(n + 1) / SCALE of its first sampled token.
SCALE = 65536.0
#: Seconds a trainer waits at its end for its kill.
LINGER_S = 60.0


def settings(root: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": str(root / "out"),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "token_budget": 40,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_steps": 4,
        "save_strategy": "steps",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "max_staleness": 1000,
        "heartbeat_stale_after_s": 60.0,
        **options,
    }


def main() -> None:
    bus, directory, steps, acknowledge = sys.argv[1:5]
    options: dict[str, Any] = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    die_at: str | None = options.pop("die_at", None)
    linger: bool = options.pop("linger", False)
    worker_options = options.pop("worker", {})
    without_callback = options.pop("without_callback", False)
    tell: bool = options.pop("tell", False)
    root = Path(directory)
    root.mkdir(exist_ok=True)
    model = make_model(root / "model")
    module = on_a_cpu()
    from datasets import Dataset
    from transformers import TrainerCallback

    from trainer_adapter.adapters.trl import ShmbusRolloutWorker, last_whole_checkpoint

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
            if tell:
                labels = inputs["shift_labels"][0][inputs["token_index"][chosen]]
                columns = labels, old, inputs["advantages"][chosen]
                for which in seen:
                    line = [column[segment == which].tolist() for column in columns]
                    write_line(root / "losses.jsonl", line)
            return super().compute_loss(model, inputs, *rest, **more)

        def _save_checkpoint(self, *rest: Any) -> None:
            super()._save_checkpoint(*rest)
            if die_at == f"saved-{self.state.global_step}":
                # Between a whole checkpoint and on_save.
                os.kill(os.getpid(), signal.SIGKILL)

        def _save_rng_state(self, *rest: Any) -> None:
            super()._save_rng_state(*rest)
            if die_at == f"saving-{self.state.global_step}":
                # The last file of the checkpoint is missing.
                os.kill(os.getpid(), signal.SIGKILL)

    class Keeper(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            write_line(root / "trained.jsonl", [state.global_step, numbers.copy()])
            numbers.clear()
            if die_at == f"step-{state.global_step}":
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if linger:
                time.sleep(LINGER_S)

    args = module.AsyncGRPOConfig(**settings(root, int(steps), options))
    worker = ShmbusRolloutWorker(bus, acknowledge=acknowledge, **worker_options)
    trainer = Trainer(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
        rollout_worker=worker,
        weight_transfer=NoWeights(),
        callbacks=[Keeper()] if without_callback else [Keeper(), worker.callback],
    )
    last = last_whole_checkpoint(args.output_dir)
    write_line(root / "trained.jsonl", ["resumed", int(last.rpartition("-")[2]) if last else 0])
    trainer.train(resume_from_checkpoint=last)
    write_line(root / "log.jsonl", trainer.state.log_history)


if __name__ == "__main__":
    main()
