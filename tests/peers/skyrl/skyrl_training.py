"""SkyRL's trainer with outside rollouts: ``skyrl_training.py BUS DIRECTORY [KEY=VALUE]``."""

import json
import sys
from pathlib import Path
from typing import Any

import doc_pages
import ray
from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.utils import validate_cfg
from skyrl_on_a_cpu import PolicyWorker

BUS, ROOT = sys.argv[1], Path(sys.argv[2])


class Trainer(RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's trainer, without engines to send weights to."""

    def build_models(self, *workers: Any) -> None:
        super().build_models(PolicyWorker, *workers[1:])

        async def nobody(model_id: str | None = None) -> None: ...

        self.dispatch.save_weights_for_sampler = nobody

    def init_weight_sync_state(self) -> None: ...


class Tracker:
    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        with open(ROOT / "log.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **data}, default=float) + "\n")

    def finish(self) -> None: ...

    def log_exception(self, error: Exception, step: int) -> None: ...


OfThePage: Any = doc_pages.run("skyrl.md", "class Experiment", BUS)["Experiment"]


class Experiment(OfThePage):  # type: ignore[misc]
    def get_inference_client(self) -> None: ...

    def get_tracker(self) -> Tracker:
        return Tracker()

    def get_trainer(self, **options: Any) -> Trainer:
        return Trainer(**options)

    def get_train_dataset(self) -> Any:
        path, length = self.cfg.data.train_data, self.cfg.trainer.max_prompt_length
        return PromptDataset(path, self.tokenizer, max_prompt_length=length, num_workers=1)


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[3:])
    validate_cfg(cfg)
    ray.init(
        num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=200 * 2**20,
        runtime_env={"env_vars": {"SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1"}},
    )  # fmt: skip
    sync_registries()
    Experiment(cfg).run()


if __name__ == "__main__":
    main()
