"""TRL AsyncGRPO's own rollout worker, a process of the trainer, and its queue of samples.

A worker's death kills the rollout process; the trainer's health check then fails, and the
supervisor restarts the trainer.
"""

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.goodput.adapters import About, End, Link, kill
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario
from bench.processes import descendants

__all__ = ["ABOUT", "link", "train"]

#: Seconds without a heartbeat; TRL's default, 300, would only lengthen the idle time.
STALE_S: Final = 10.0
ABOUT: Final = About(
    title="TRL AsyncGRPO's own worker", packages=("trl", "transformers", "torch"),
    environment="trl", workers=False, start_s=60.0,
    fairness="the rollout worker of AsyncGRPOTrainer with a loop that takes from its buffer and "
    "checks its health; heartbeat_stale_after_s is 10 in place of 300; promises no sample after a "
    "death; its stop(), which the trainer calls at any end, waits for ever for a killed process",
)  # fmt: skip
CHAT: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ANSWER: Final = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
WORDS: Final = ["<pad>", "</s>", "w2", "w3"]


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Make nothing: TRL's trainer brings worker and queue."""

    def kill_rollouts(trainer: int) -> None:
        for pid in descendants(trainer):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    kill(pid)

    yield Link(None, {"worker": kill_rollouts})


class Reward:
    """The reward function, called with each whole group right before the samples are queued."""

    def __init__(self, root: Path, scenario: Scenario, port: int) -> None:
        self._arguments = root, scenario, port, "rollouts"

    @functools.cached_property
    def _stub(self) -> Stub:
        return Stub(*self._arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {"_arguments": self._arguments}

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Score by place, and record the answers as handed over."""
        self._stub.handed(*map(np.array, completion_ids))
        return [float(place) for place in range(len(completion_ids))]


class _End(End):
    def __init__(self, worker: Any, stub: Stub) -> None:
        self._worker, self._stub, self._began = worker, stub, False
        self._stopping: threading.Thread | None = None

    def take(self, timeout_s: float) -> list[NDArray[Any]]:
        """Return one sample."""
        if self._stub.stopping and self._stopping is None:
            # Aside: the worker hands over its last samples meanwhile.
            self._stopping = threading.Thread(target=self._worker.stop)
            self._stopping.start()
        try:
            sample = self._worker.rollout_buffer.get(timeout=timeout_s)
        except queue.Empty:
            if self._began and self._stopping is None:
                self._worker.check_health(STALE_S)
            return []
        self._began = True
        return [sample.input_ids[sample.completion_mask > 0]]

    def close(self) -> None:
        """Stop the worker."""
        if self._stopping is not None:
            self._stopping.join()
        else:
            self._worker.stop()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )
    made.chat_template = CHAT
    made.response_template = ANSWER
    return made


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[_End]:
    """Start TRL's worker."""
    from accelerate import PartialState
    from datasets import Dataset
    from trl.experimental.async_grpo import async_rollout_worker as rollouts

    PartialState(cpu=True)
    rollouts.is_vllm_available = lambda: True  # the engine stub stands in
    scenario = stub.scenario
    room = scenario.ahead_groups * scenario.group_size
    prompt = [{"role": "user", "content": "w2"}]
    worker = rollouts.AsyncRolloutWorker(
        model_name="stub", dataset=Dataset.from_dict({"prompt": [prompt] * 8}),
        reward_funcs=[Reward(stub.root, scenario, stub.port)], processing_class=_tokenizer(),
        eos_token_ids=[1], num_generations=scenario.group_size,
        max_inflight_tasks=scenario.workers, queue_maxsize=room,
        max_tokens=scenario.tokens_longest, vllm_server_url=f"http://127.0.0.1:{stub.port}",
    )  # fmt: skip
    worker.start()
    end = _End(worker, stub)
    try:
        yield end
    finally:
        end.close()
