"""A real BaseEnv: ``environment.py URL NUMBER GROUP_SIZE TOKENIZER``; SHMBUS_BUS names a bus."""

import asyncio
import os
import sys
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from trainer_adapter.adapters.atropos import ShmbusEnv

#: Bound before BaseEnv in the class statement, or not at all.
THROUGH_THE_RING = (ShmbusEnv,) if os.environ.get("SHMBUS_BUS") else ()


def group_of(number: int, item: int, size: int) -> dict[str, Any]:
    """The group of an item; its floats need all of their digits."""
    rows = [[number, item, index, 7] for index in range(size)]
    return {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "scores": [1 / (3 + index + item) for index in range(size)],
        "inference_logprobs": [[1.0, 1.0, -0.1 / (1 + item), -2 / 3] for _ in rows],
        "messages": [[{"role": "user", "content": f"é{item}"}] for _ in rows],
        "advantages": None,
        "overrides": None,
        "group_overrides": {"item": item},
    }


class Counting(*THROUGH_THE_RING, BaseEnv):  # type: ignore[misc]
    number = 0
    _next = 0

    async def setup(self) -> None: ...

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    async def wandb_log(self, *args: Any, **kwargs: Any) -> None:
        """Their harness of a server has no metrics."""

    async def get_next_item(self) -> Any:
        self._next += 1
        return self._next - 1

    async def collect_trajectories(self, item: Any) -> Any:
        await asyncio.sleep(0.01)
        return group_of(self.number, item, self.config.group_size), []


def main() -> None:
    url, number, size, tokenizer = sys.argv[1:]
    Counting.number, Counting.name = int(number), f"counting{number}"
    config = BaseEnvConfig(
        group_size=int(size), rollout_server_url=url, tokenizer_name=tokenizer, use_wandb=False,
        max_num_workers=1, batch_size=8, max_batches_offpolicy=4, total_steps=100_000,
        steps_per_eval=0, wandb_name=Counting.name, include_messages=False,
        ensure_scores_are_not_same=False, max_token_length=64, worker_timeout=600,
    )  # fmt: skip
    server = APIServerConfig(model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x")
    environment = Counting(config, [server], testing=True)
    print("made", flush=True)
    asyncio.run(environment.env_manager())


if __name__ == "__main__":
    main()
