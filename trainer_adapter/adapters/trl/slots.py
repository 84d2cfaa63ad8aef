"""One slot of TRL's GRPOTrainer: what its prompt is called, and how a sample fills it.

Invariant: a slot is one completion, the part of a sequence from the first sampled token on.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import numpy as np

import shmbus
from trainer_adapter.adapters.request_meta import columns_for
from trainer_adapter.adapters.trl.rows import RowArrays

__all__ = [
    "check_equal",
    "check_for_grpo",
    "key_of",
    "lay_out",
    "offer",
    "one_row_each",
    "sampling_of",
]

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length",
)  # fmt: skip


def check_equal(prompts: list[Any], slot: int, size: int) -> None:
    """Refuse slots whose prompts are not one prompt."""
    if any(each != prompts[slot] for each in prompts[slot : slot + size]):
        raise ValueError(
            f"rollouts: expected {size} equal prompts from slot {slot} on, got others; TRL gives "
            "them so, unless num_generations was changed after its constructor"
        )


def offer(
    consumer: shmbus.Consumer,
    key: tuple[str, int],
    prompt: Any,
    size: int,
    meta: dict[str, Any],
    tokenizing: Any,
) -> bool:
    """Ask workers for the samples of a slot."""
    fields = {} if tokenizing is None else {"prompt": _token_ids(prompt, tokenizing)}
    try:
        consumer.request(
            key[0], group_size=size, round=key[1], split=meta["split"],
            meta={**meta, "prompt": prompt}, timeout=0, **fields,
        )  # fmt: skip
    except shmbus.BusFullError:
        return False
    return True


def sampling_of(trainer: Any) -> dict[str, Any]:
    """Return a trainer's parameters of sampling, by TRL's names."""
    own = {name: getattr(trainer, name, None) for name in _SAMPLING}
    more = getattr(getattr(trainer, "args", None), "generation_kwargs", None) or {}
    known = {name: value for name, value in {**own, **more}.items() if value is not None}
    return columns_for("TRL's generation_kwargs", known)


def one_row_each(group: shmbus.Group, rows: list[list[RowArrays]]) -> list[RowArrays]:
    """Return the row of each sample; GRPOTrainer has one completion a slot."""
    for t, of_sample in zip(group, rows, strict=True):
        if len(of_sample) != 1:
            raise ValueError(
                f"group {t.instance_id!r}, sample {t.index}: expected one row, got "
                f"{len(of_sample)}: GRPOTrainer has one completion a slot; put one row, or train "
                "with AsyncGRPOTrainer, which takes forks as rows"
            )
    return [row for (row,) in rows]


def check_for_grpo(group: shmbus.Group, rows: list[RowArrays], zeroed: list[bool]) -> None:
    """Refuse what GRPOTrainer would train on without being able to."""
    for t, row, zero in zip(group, rows, zeroed, strict=True):
        where = f"group {t.instance_id!r}, sample {t.index}"
        if not row.completion_mask.any():
            raise ValueError(
                f"{where}, field 'loss_mask': expected a sampled token, got none; GRPOTrainer "
                "takes no empty completion: report such a sample by Producer.requests.fail"
            )
        if zero:
            raise ValueError(
                f"{where}: set_advantage_to_zero: GRPOTrainer computes the advantages itself; give "
                "the sample no score (scored(None)), or report it by Producer.requests.fail"
            )


def key_of(prompt: Any) -> str:
    """Name a prompt by what it says, so that logs of two runs have the same names."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _token_ids(prompt: Any, trainer: Any) -> Any:
    """Tokenize a prompt as TRL does: text as it is, messages by the chat template."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return np.asarray(ids, np.int32).reshape(-1)


def lay_out(arrays: RowArrays, score: float | None, answer: dict[str, list[Any]]) -> None:
    """Part a sequence: what comes before the first sampled token is the prompt."""
    sampled = np.flatnonzero(arrays.completion_mask)
    begin = int(sampled[0]) if len(sampled) else len(arrays.input_ids)
    answer["prompt_ids"].append(arrays.input_ids[:begin].tolist())
    answer["completion_ids"].append(arrays.input_ids[begin:].tolist())
    answer["logprobs"].append(arrays.old_log_probs[begin:].tolist())
    answer["env_mask"].append(arrays.completion_mask[begin:].tolist())
    answer["bus_score"].append(score)
