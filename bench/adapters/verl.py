"""Processor time of a sample's way into verl's TransferQueue: by its own worker, and by a bus.

    python -m bench.adapters.verl [GROUPS] [TOKENS]

Own: what AgentLoopWorkerTQ does with each output of an agent loop, called here without a Ray actor;
verl runs it in actors of their own. A bus: another process puts groups, and the sampler puts them
into the TransferQueue, in the trainer's process. What verl then samples is the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import transfer_queue as tq
from omegaconf import OmegaConf

import shmbus
from bench.adapters import (
    GROUP_SIZE,
    PROMPT_SHARE,
    numbers,
    put_group,
    report,
    sample_of,
)

CAPACITY = "64MiB"
PROMPT = {"data_source": "math", "raw_prompt": [{"role": "user", "content": "7"}]}


def submit(groups: int, number: int) -> list[str]:
    """Register prompts as verl's trainer does."""
    uids = [f"u{number}x{group}" for group in range(groups)]
    tags = [{"is_prompt": True, "status": "running", "global_steps": 1} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    return uids


def settle(uids: list[str]) -> None:
    """Check that all is there, and empty the queue."""
    known = tq.kv_list(partition_id="train")["train"]
    assert all(known[uid]["status"] == "finished" for uid in uids)
    assert len(known) == len(uids) * (1 + GROUP_SIZE), len(known)
    tq.kv_clear(keys=list(known), partition_id="train")


def by_verl(groups: int, tokens: int, number: int) -> float:
    """Return the microseconds of processor time of a sample."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    worker = object.__new__(AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.processor, worker.reward_loop_worker_handles = None, None
    worker.distillation_enabled = False
    begin = tokens // PROMPT_SHARE
    ids = list(range(tokens))
    uids = submit(groups, number)

    async def put_all() -> None:
        for uid in uids:
            for index in range(GROUP_SIZE):
                output = AgentLoopOutput(
                    prompt_ids=ids[:begin], response_ids=ids[begin:],
                    response_mask=[1] * (tokens - begin), reward_score=float(index % 2),
                    response_logprobs=[-0.25] * (tokens - begin), num_turns=2, metrics={},
                    extra_fields={"min_global_steps": 0, "max_global_steps": 0},
                )  # fmt: skip
                output.extra_fields["reward_extra_info"] = {}
                await worker._agent_loop_postprocess(
                    output, False, uid=uid, session_id=index, global_steps=1, **PROMPT
                )
            await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    began_s = time.process_time()
    asyncio.run(put_all())
    spent_s = time.process_time() - began_s
    settle(uids)
    return spent_s / (groups * GROUP_SIZE) * 1e6


def put(bus: str, uids: list[str], tokens: int) -> None:
    fields = sample_of(tokens)
    with shmbus.Producer(bus) as producer:
        for uid in uids:
            put_group(producer, uid, fields)


def by_bus(groups: int, tokens: int, number: int) -> float:
    """The same over a bus."""
    from trainer_adapter.adapters.verl.manager import PROMPTS
    from trainer_adapter.adapters.verl.sampler import ShmbusSamplerAsync

    name = f"verl-cost-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    with shmbus.Bus.create(name, capacity=CAPACITY) as bus:
        sampler = ShmbusSamplerAsync(
            trainer_mode="separate_async", trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=4, max_off_policy_strategy="drop", poll_interval=0.05,
            refill_fn=None, sampler_kwargs=OmegaConf.create({"bus": name, "daemon": False}),
        )  # fmt: skip
        uids = submit(groups, number)
        PROMPTS.update((uid, dict(PROMPT)) for uid in uids)
        process = context.Process(target=put, args=(name, uids, tokens))
        process.start()
        process.join(120)
        began_s = time.process_time()
        while bus.stats().acknowledged < groups * GROUP_SIZE:
            sampler._fill("train", "train")
        spent_s = time.process_time() - began_s
        settle(uids)
        sampler.close()
    return spent_s / (groups * GROUP_SIZE) * 1e6


def main() -> None:
    groups, tokens = numbers(32, 2048)
    memory = 200 * 2**20
    ray.init(
        address="local", num_cpus=16, include_dashboard=False, log_to_driver=False,
        object_store_memory=memory,
    )  # fmt: skip
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    report(
        lambda number: by_verl(groups, tokens, number),
        lambda number: by_bus(groups, tokens, number),
    )
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
