"""TRL's GRPOTrainer over a bus: ``sync_trainer.py BUS DIRECTORY STEPS [OPTIONS as JSON]``."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from tiny import make_model, write_line

torch.set_num_threads(1)


def main() -> None:
    bus, directory, steps = sys.argv[1:4]
    options: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    attach = options.pop("attach", True)
    evaluate = options.pop("evaluate", False)
    rollout_options = options.pop("rollouts", {})
    root = Path(directory)
    model = make_model(root / "model")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from shmbus.weights import ModuleSource, WeightPublisher
    from trainer_adapter.adapters.trl import ShmbusRollouts

    rollouts = ShmbusRollouts(bus, timeout=100.0, **rollout_options)

    def called(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        answer = rollouts(prompts, trainer)
        line = [trainer.accelerator.process_index, bool(trainer.model.training), prompts, answer]
        write_line(root / f"calls-{trainer.accelerator.process_index}.jsonl", line)
        return answer

    words = range(2, 10)
    prompts = Dataset.from_dict({"prompt": [f"w{word}" for word in words], "answer": list(words)})
    args = GRPOConfig(
        **{
            "output_dir": str(root / "out"),
            "max_steps": int(steps),
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "max_completion_length": 8,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "beta": 0.0,
            **options,
        }
    )
    trainer = GRPOTrainer(
        model=str(model),
        args=args,
        train_dataset=prompts,
        eval_dataset=prompts if evaluate else None,
        rollout_func=called,
        reward_funcs=rollouts.reward,
        # By its model's type transformers would take another tokenizer.
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )
    publisher = None
    if attach:
        if trainer.accelerator.is_main_process:
            publisher = WeightPublisher(
                bus, ModuleSource(trainer.accelerator.unwrap_model(trainer.model))
            )
        rollouts.attach(trainer, publisher.publish if publisher else None)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    if trainer.accelerator.is_main_process:
        write_line(root / "log.jsonl", trainer.state.log_history)
    rollouts.close()
    if publisher is not None:
        publisher.close()


if __name__ == "__main__":
    main()
