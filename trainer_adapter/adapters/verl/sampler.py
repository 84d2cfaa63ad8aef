"""verl v1's replay buffer, filled from a bus before each look into it.

A module for ``trainer.v1.sampler.custom_sampler``. verl keeps its policies: staleness, group
filtering, refill, warm-up. Only the source of the trajectories changes.

Invariants:

- A group is acknowledged after its trajectories reach the TransferQueue, from then on responsible
  for them: verl re-issues unfinished prompts of a checkpoint itself.
- A group without a prompt of this trainer is trained as a separate prompt.
- verl's staleness is counted from the prompt's step, since its own servers run that step's weights
  or newer. A worker may run older weights: the prompt then counts from the step of these weights.
- A prompt with a group dropped by the bus ends like a failed prompt, which verl replaces.
- A sample unfit for verl raises an error with the sample's name, or ends like verl's own failed
  prompts.
- Each row of a sample forms a trajectory ``{uid}_{session}_{row}``, split at its first sampled
  token; the last row's score counts for every row, as in verl's own agent loops.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import shmbus
from shmbus.base.arguments import check_choice
from trainer_adapter.adapters.prompt_response import experts_of, part_row
from trainer_adapter.adapters.requested_groups import EndedGroups, SplitConsumer
from trainer_adapter.adapters.verl.manager import LIMITS, OFFERED, PROMPTS, bus_of, needed


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


def _turns_of(t: shmbus.Trajectory, meta: Mapping[str, Any]) -> int:
    calls = meta.get("turns")  # as a recorder counts them: verl counts the questions, too
    turns = meta.get("num_turns", 2 * calls if type(calls) is int else 2)
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
        reward_score=t.score,
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
    field["position_ids"] = torch.arange(len(field["input_ids"]), device="cpu")
    field["multi_modal_inputs"] = {}
    return field


_LOG: Final = logging.getLogger("shmbus.verl")
_TAKE_GROUPS: Final = 64
#: Splits of a bus, by verl's partitions.
SPLITS: Final = {"train": "train", "val": "eval"}
#: Options of this sampler among ``sampler_kwargs``; the rest go to the Consumer.
_OWN: Final = ("bus", "logprobs", "refused")

ReplayBuffer, ReplayBufferAsync = needed(
    "verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer", "ReplayBufferAsync"
)
kv_batch_put, kv_put, kv_list = needed("transfer_queue", "kv_batch_put", "kv_put", "kv_list")
(to_tensordict,) = needed("verl.utils.tensordict_utils", "list_of_dict_to_tensordict")


class _Prompt(NamedTuple):
    uid: str
    tag: dict[str, Any]
    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    group: shmbus.Group


class _FromBus:
    """Common part of both kinds of replay buffer."""

    sampler_kwargs: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        given: Mapping[str, Any] = dict(self.sampler_kwargs or {})
        bus = bus_of(given)
        self._refused = given.get("refused", "raise")
        check_choice("refused", self._refused, ("raise", "drop"))
        self._logprobs = bool(given.get("logprobs", True))
        more = {name: value for name, value in given.items() if name not in _OWN}
        self._consumers = SplitConsumer(bus, **{"label": "verl", **more})
        self._ended = EndedGroups(self._consumers.consumer)

    def _sync_metadata_from_transfer_queue(self) -> None:
        for partition, split in SPLITS.items():
            self._fill(partition, split)
        super()._sync_metadata_from_transfer_queue()  # type: ignore[misc]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """Sample like verl, and tell the bus the current policy version."""
        consumer = self._consumers.consumer
        if global_steps - 1 > consumer.policy_version:
            consumer.policy_version = global_steps - 1
        return super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]

    def _fill(self, partition: str, split: str) -> None:
        consumer, groups = self._consumers.take(split, _TAKE_GROUPS, 0)
        if not groups:
            self._end_dropped(partition)
            return
        known = (kv_list(partition_id=partition) or {}).get(partition, {})
        made: list[_Prompt] = []
        for place, group in enumerate(groups):
            try:
                made.append(self._prompt_of(group, known.get(group.instance_id, {})))
            except ValueError as error:
                if self._refused == "raise":
                    self._put(partition, made, consumer)
                    # The refused group comes again, too: no group is dropped without a decision.
                    for each in groups[place:]:
                        consumer.give_back(each)
                    raise
                _LOG.warning("dropped: %s", error)
                PROMPTS.pop(group.instance_id, None)
                if group.instance_id in known:
                    kv_put(key=group.instance_id, partition_id=partition, tag={"status": "failure"})
                consumer.drop(group)
        self._put(partition, made, consumer)

    def _prompt_of(self, group: shmbus.Group, asked: Mapping[str, Any]) -> _Prompt:
        uid = group.instance_id if asked.get("is_prompt") else uuid.uuid4().hex
        # The step of a submission of its prompt to that version.
        of_weights = min(t.policy_version for t in group) + 1
        steps = int(asked.get("global_steps", of_weights))
        made = trajectories_of(group, uid, PROMPTS.get(uid, {}), steps, self._logprobs, LIMITS)
        tag = {
            "is_prompt": True, "status": "finished", "global_steps": min(steps, of_weights),
        }  # fmt: skip
        return _Prompt(uid, tag, *made, group)

    def _put(self, partition: str, made: list[_Prompt], consumer: shmbus.Consumer) -> None:
        """Put trajectories in as few calls as their fields allow."""
        if not made:
            return
        alike: dict[frozenset[str], list[tuple[str, dict[str, Any], dict[str, Any]]]] = {}
        for each in made:
            for one in zip(each.keys, each.fields, each.tags, strict=True):
                alike.setdefault(frozenset(one[1]), []).append(one)
        for rows in alike.values():
            keys, fields, tags = (list(column) for column in zip(*rows, strict=True))
            kv_batch_put(keys=keys, fields=to_tensordict(fields), tags=tags, partition_id=partition)
        kv_batch_put(
            keys=[each.uid for each in made], tags=[each.tag for each in made],
            partition_id=partition,
        )  # fmt: skip
        for each in made:
            PROMPTS.pop(each.uid, None)
        consumer.ack([each.group for each in made])

    def _end_dropped(self, partition: str) -> None:
        """End prompts with groups dropped by the bus, as stale or failed: they never come."""
        OFFERED.intersection_update(PROMPTS)  # forget delivered prompts
        if not OFFERED:
            return
        ended = self._ended.among([(uid, None) for uid in OFFERED])
        if not ended:
            return
        known = (kv_list(partition_id=partition) or {}).get(partition, {})
        for uid, _ in ended:
            if known.get(uid, {}).get("status") == "running":
                PROMPTS.pop(uid, None)
                _LOG.warning("prompt %s: dropped by the bus (%s)", uid, self._ended.why())
                kv_put(key=uid, partition_id=partition, tag={"status": "failure"})

    def close(self) -> None:
        self._consumers.close()


class ShmbusSampler(_FromBus, ReplayBuffer):  # type: ignore[misc, valid-type]
    """For ``trainer_mode: sync``."""


class ShmbusSamplerAsync(_FromBus, ReplayBufferAsync):  # type: ignore[misc, valid-type]
    """For the asynchronous trainer modes."""
