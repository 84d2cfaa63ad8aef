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
from trainer_adapter.adapters.verl.stack import needed

__all__ = ["trajectories_of"]

_NEEDED: Final = ("tokens", "loss_mask")


def trajectories_of(
    group: shmbus.Group,
    uid: str,
    prompt: Mapping[str, Any],
    global_steps: int,
    logprobs: bool = True,
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the trajectories of a group.

    Parameters
    ----------
    group : Group
        Leased; the result has copies.
    uid : str
        verl's name of the prompt.
    prompt : mapping
        What else is known of the prompt, such as "data_source" and "reward_model".
    global_steps : int
        The step that asked for it.
    logprobs : bool
        Whether the sampler's logprobs are needed, as with ``calculate_log_probs``.

    Returns
    -------
    keys : list of str
    fields : list of dict
        As verl's AgentLoopOutput makes them: tensors of one row each.
    tags : list of dict

    Raises
    ------
    ValueError
        A field is missing, does not fit the others, or is not finite; or nothing was sampled.
    """
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
            keys.append(f"{uid}_{t.index}_{number}")
            fields.append(field)
            tags.append({
                "status": "success", "prompt_len": prompt_len, "response_len": response_len,
                "seq_len": prompt_len + response_len, "global_steps": global_steps,
                "min_global_steps": t.policy_version, "max_global_steps": t.newest_policy_version,
            })  # fmt: skip
    return keys, fields, tags


def _fields_of(t: shmbus.Trajectory, row: Mapping[str, Any], logprobs: bool) -> dict[str, Any]:
    import torch

    (output,) = needed("verl.experimental.agent_loop.agent_loop", "AgentLoopOutput")
    tokens = row.get("tokens")
    length = 0 if tokens is None else len(tokens)
    for name in (*_NEEDED, *(("logprobs",) if logprobs else ())):
        array = row.get(name)
        if array is None or array.ndim != 1 or len(array) != length or not length:
            got = "none" if array is None else f"shape {array.shape}"
            raise _bad(t, name, "one value a token", got)
    mask = row["loss_mask"] != 0
    sampled = np.flatnonzero(mask)
    if not len(sampled) or sampled[0] == 0:
        raise _bad(t, "loss_mask", "a prompt, and then a sampled token", f"{len(sampled)} sampled")
    begin = int(sampled[0])
    meta = t.meta if isinstance(t.meta, dict) else {}
    found = output(
        prompt_ids=tokens[:begin].tolist(),
        response_ids=tokens[begin:].tolist(),
        response_mask=mask[begin:].astype(np.int64).tolist(),
        reward_score=t.score,
        num_turns=int(meta.get("num_turns", 2)),
        metrics={},
        extra_fields={
            "min_global_steps": t.policy_version,
            "max_global_steps": t.newest_policy_version,
            "reward_extra_info": meta.get("reward_extra_info", {}),
        },
    )
    if logprobs:
        values = np.where(mask, row["logprobs"], 0)[begin:]
        if not np.isfinite(values).all():
            raise _bad(t, "logprobs", "finite numbers", "others")
        found.response_logprobs = values.tolist()
    experts = row.get("routed_experts")
    if experts is not None:
        found.routed_experts = np.asarray(experts).astype(np.int16).tolist()
    field: dict[str, Any] = found.as_dict()
    field["loss_mask"] = field["response_mask"]
    field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
    field["position_ids"] = torch.arange(length)
    field["multi_modal_inputs"] = {}
    return field


def _bad(t: shmbus.Trajectory, field: str, expected: str, got: str) -> ValueError:
    return ValueError(
        f"group {t.instance_id!r}, sample {t.index}, field {field!r}: expected {expected}, got "
        f"{got}; put the whole sequence, a mask of what was sampled, and the sampler's logprobs"
    )
