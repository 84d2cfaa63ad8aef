"""The blocks of TRL's page as processes: ``page.py async|rollouts|sync|answers BUS DIRECTORY``."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import doc_pages
import torch
from tiny import COMPLETION_TOKENS, make_model, on_a_cpu, sample, write_line
from trainer import settings

import shmbus

torch.set_num_threads(1)

GROUP_SIZE = 8
WORD = 3


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def train_async(bus: str, root: Path) -> None:
    model = str(make_model(root / "model"))
    module = on_a_cpu()
    from datasets import Dataset

    options = {"num_generations": GROUP_SIZE, "token_budget": 64, "save_steps": 2}
    space = doc_pages.run(
        "trl.md", "AsyncGRPOTrainer(", bus, AsyncGRPOTrainer=module.AsyncGRPOTrainer, model=model,
        dataset=Dataset.from_dict({"prompt": ["w2"]}),
        args=module.AsyncGRPOConfig(**settings(root, 4, options)),
    )  # fmt: skip
    write_line(root / "log.jsonl", space["trainer"].state.log_history)


def put_rollouts(bus: str, root: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def rollout(model: Any) -> tuple[Any, ...]:
        tokens, logprobs, rewards = sample(model, WORD, 1, generator)
        return tokens[0], [0] + [1] * COMPLETION_TOKENS, logprobs[0], rewards[0]

    doc_pages.run(
        "trl.md", "subscriber.latest(", bus, model=load(make_model(root / "model")), rollout=rollout
    )


def train_sync(bus: str, root: Path) -> None:
    model = make_model(root / "model")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    # By its model's type transformers would take another tokenizer.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    args = GRPOConfig(
        output_dir=str(root / "out"), max_steps=4, per_device_train_batch_size=2 * GROUP_SIZE,
        num_generations=GROUP_SIZE, max_completion_length=COMPLETION_TOKENS, report_to=[],
        save_strategy="no", logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    space = doc_pages.run(
        "trl.md", "rollouts.attach(", bus, model=str(model), args=args,
        prompts=Dataset.from_dict({"prompt": [f"w{word}" for word in range(2, 10)]}),
        GRPOTrainer=partial(GRPOTrainer, processing_class=tokenizer),
    )  # fmt: skip
    write_line(root / "log.jsonl", space["trainer"].state.log_history)
    space["rollouts"].close()


def answer(bus: str, root: Path) -> None:
    model = load(make_model(root / "model"))
    generator = torch.Generator().manual_seed(0)

    def rollout(prompt: Any, sampling: dict[str, Any]) -> tuple[Any, ...]:
        assert sampling["max_completion_length"] == COMPLETION_TOKENS
        tokens, logprobs, rewards = sample(model, int(prompt[-1]), 1, generator)
        mask = [0] + [1] * COMPLETION_TOKENS
        return tokens[0], mask, logprobs[0], rewards[0], producer.policy_version

    with shmbus.Producer(bus, wait=60.0) as producer:
        doc_pages.run("trl.md", "producer.requests.next()", bus, producer=producer, rollout=rollout)


KINDS = {"async": train_async, "rollouts": put_rollouts, "sync": train_sync, "answers": answer}

if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
