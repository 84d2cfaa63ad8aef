"""Samples of a bus as the trajectories that verl v1 keeps in its TransferQueue.

Invariants:

- Each row of a sample is a trajectory ``{uid}_{session}_{row}``; the last one's score is theirs, as
  verl's own agent loops have it.
- A row is parted at its first sampled token: what comes before is the prompt.
- What verl cannot take as it is ends in an error that names the sample, never in another objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

import shmbus
from trainer_adapter.adapters.prompt_response import experts_of, part_row
from trainer_adapter.adapters.verl.stack import needed

__all__ = ["trajectories_of"]

#: verl keeps scores in tensors of this type.
_LARGEST_SCORE: Final = float(np.finfo(np.float32).max)


def trajectories_of(
    group: shmbus.Group,
    uid: str,
    prompt: Mapping[str, Any],
    global_steps: int,
    logprobs: bool = True,
    limits: Mapping[str, int] | None = None,
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the trajectories of a group."""
    keys, fields, tags = [], [], []
    for t in group:
        rows = t.rows
        for number, row in enumerate(rows):
            field = _fields_of(t, row, logprobs)
            field |= prompt
            field["uid"] = uid
            field["session_id"] = t.index
            field["global_steps"] = global_steps
            prompt_len, response_len = len(field["prompts"]), len(field["responses"])
            _check_limits(t, prompt_len, response_len, limits or {})
            keys.append(f"{uid}_{t.index}_{number}")
            fields.append(field)
            tags.append({
                "status": "success", "prompt_len": prompt_len, "response_len": response_len,
                "seq_len": prompt_len + response_len, "global_steps": global_steps,
                "min_global_steps": t.policy_version, "max_global_steps": t.newest_policy_version,
            })  # fmt: skip
    return keys, fields, tags


def _check_limits(
    t: shmbus.Trajectory, prompt: int, response: int, limits: Mapping[str, int]
) -> None:
    of_response = limits.get("response_length")
    if of_response is None:
        return
    most = {"max_response_length": (response, of_response)}
    if "prompt_length" in limits:
        total = limits["prompt_length"] + of_response
        most["max_prompt_length and max_response_length"] = (prompt + response, total)
    for name, (got, limit) in most.items():
        if got > limit:
            raise ValueError(
                f"group {t.instance_id!r}, sample {t.index}, field 'tokens': expected at most "
                f"{limit}, data.{name}, got {got}; raise it, or lower the workers' limit"
            )


def _score_of(t: shmbus.Trajectory) -> float:
    if abs(t.score) > _LARGEST_SCORE:
        raise ValueError(
            f"group {t.instance_id!r}, sample {t.index}: expected a score that a float of 32 bits "
            f"holds, got {t.score}; clip it"
        )
    return t.score


def _turns_of(t: shmbus.Trajectory, meta: Mapping[str, Any]) -> int:
    turns = meta.get("num_turns", 2)
    if isinstance(turns, bool) or not isinstance(turns, int):
        raise ValueError(
            f"group {t.instance_id!r}, sample {t.index}: expected an int as num_turns of its meta, "
            f"got {turns!r:.80}; leave it out, or count the turns"
        )
    return turns


def _extra_of(t: shmbus.Trajectory, meta: Mapping[str, Any]) -> dict[str, Any]:
    extra = meta.get("reward_extra_info", {})
    if not isinstance(extra, dict):
        raise ValueError(
            f"group {t.instance_id!r}, sample {t.index}: expected a dict as reward_extra_info of "
            f"its meta, got {extra!r:.80}; leave it out, or name each value"
        )
    return extra


def _fields_of(t: shmbus.Trajectory, row: Mapping[str, Any], logprobs: bool) -> dict[str, Any]:
    import torch

    (output,) = needed("verl.experimental.agent_loop.agent_loop", "AgentLoopOutput")
    parted = part_row(t, row, logprobs)
    meta = t.meta if isinstance(t.meta, dict) else {}
    found = output(
        prompt_ids=parted.prompt,
        response_ids=parted.response,
        response_mask=parted.mask,
        reward_score=_score_of(t),
        num_turns=_turns_of(t, meta),
        metrics={},
        extra_fields={
            "min_global_steps": t.policy_version,
            "max_global_steps": t.newest_policy_version,
            "reward_extra_info": _extra_of(t, meta),
        },
    )
    if parted.logprobs is not None:
        found.response_logprobs = parted.logprobs
    experts = experts_of(t, row)
    if experts is not None:
        found.routed_experts = experts.tolist()
    field: dict[str, Any] = found.as_dict()
    field["loss_mask"] = field["response_mask"]
    field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
    field["position_ids"] = torch.arange(len(field["input_ids"]))
    field["multi_modal_inputs"] = {}
    return field
