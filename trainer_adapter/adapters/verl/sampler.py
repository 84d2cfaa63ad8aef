"""verl v1's replay buffer, filled from a bus before it looks at what there is.

A module for ``trainer.v1.sampler.custom_sampler``. All of verl's policies stay its own: staleness,
group filtering, refill, warm-up. Only who puts the trajectories is another.

Invariants:

- A group is acknowledged when its trajectories are in the TransferQueue, which is from then on
  responsible for them: verl re-issues unfinished prompts of a checkpoint itself.
- A group that nobody of this trainer asked for is trained as a prompt of its own.
- verl's staleness is counted from the prompt's step, since its own servers have that step's weights
  or newer ones. A worker may have older ones: the prompt then counts from the step of these.
- A prompt whose group the bus has dropped ends as a failed prompt does, which verl replaces.
- What verl cannot take is an error, or ends as verl's own failed prompts do.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import shmbus
from shmbus._arguments import check_choice
from trainer_adapter.adapters.ended import EndedGroups
from trainer_adapter.adapters.splits import SplitConsumer
from trainer_adapter.adapters.verl.manager import LIMITS, OFFERED, PROMPTS
from trainer_adapter.adapters.verl.stack import BUS_VARIABLE, needed
from trainer_adapter.adapters.verl.trajectories import trajectories_of

__all__ = ["ShmbusSampler", "ShmbusSamplerAsync"]

_LOG: Final = logging.getLogger("shmbus.verl")
_TAKE_GROUPS: Final = 64
#: Splits of a bus, by verl's partitions.
SPLITS: Final = {"train": "train", "val": "eval"}
#: Options of this sampler among ``sampler_kwargs``; all others are the Consumer's.
_OWN: Final = ("bus", "logprobs", "refused")

ReplayBuffer, ReplayBufferAsync = needed(
    "verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer", "ReplayBufferAsync"
)
kv_batch_put, kv_put, kv_list = needed("transfer_queue", "kv_batch_put", "kv_put", "kv_list")
(to_tensordict,) = needed("verl.utils.tensordict_utils", "list_of_dict_to_tensordict")


class _Prompt(NamedTuple):
    """A group as verl keeps it."""

    uid: str
    tag: dict[str, Any]
    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    group: shmbus.Group


class _FromBus:
    """What both kinds of replay buffer add.

    Parameters
    ----------
    sampler_kwargs : mapping
        ``bus``, ``logprobs`` (True: the sampler's are needed), ``refused`` ("raise" or "drop" for
        groups that verl cannot take), and options of `shmbus.Consumer`.
    """

    sampler_kwargs: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        given: Mapping[str, Any] = dict(self.sampler_kwargs or {})
        bus = given.get("bus") or os.environ.get(BUS_VARIABLE)
        if not bus:
            raise ValueError(
                "sampler_kwargs: expected bus, the name of a bus, got none; set "
                f"trainer.v1.sampler.sampler_kwargs.bus, or the variable {BUS_VARIABLE}"
            )
        self._refused = given.get("refused", "raise")
        check_choice("refused", self._refused, ("raise", "drop"))
        self._logprobs = bool(given.get("logprobs", True))
        more = {name: value for name, value in given.items() if name not in _OWN}
        self._consumers = SplitConsumer(str(bus), **{"label": "verl", **more})
        self._ended = EndedGroups(self._consumers.consumer)

    def _sync_metadata_from_transfer_queue(self) -> None:
        for partition, split in SPLITS.items():
            self._fill(partition, split)
        super()._sync_metadata_from_transfer_queue()  # type: ignore[misc]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """Sample as verl does, and tell the bus which policy version is current.

        verl counts its weights by the step after which they are sent: in step n, samples are made
        with version n - 1.

        Parameters
        ----------
        global_steps : int
        partition_id : str
        batch_size : int
            Prompts.

        Returns
        -------
        KVBatchMeta, dict
            As verl's.
        """
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
                    # This one comes again, too: nothing is dropped that nobody decided about.
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
        # The step in which its prompt would have been submitted to that version.
        of_weights = min(t.policy_version for t in group) + 1
        steps = int(asked.get("global_steps", of_weights))
        made = trajectories_of(group, uid, PROMPTS.get(uid, {}), steps, self._logprobs, LIMITS)
        tag = {
            "is_prompt": True, "status": "finished", "global_steps": min(steps, of_weights),
        }  # fmt: skip
        return _Prompt(uid, tag, *made, group)

    def _put(self, partition: str, made: list[_Prompt], consumer: shmbus.Consumer) -> None:
        """Put trajectories in as few calls as their fields allow: verl's own workers make one each.

        A prompt counts as finished only after its trajectories are there.
        """
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
        """End prompts whose groups the bus has dropped, as stale or failed: they never come."""
        OFFERED.intersection_update(PROMPTS)  # what came is known no more
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
        """Leave the bus."""
        self._consumers.close()


class ShmbusSampler(_FromBus, ReplayBuffer):  # type: ignore[misc, valid-type]
    """For ``trainer_mode: sync``."""


class ShmbusSamplerAsync(_FromBus, ReplayBufferAsync):  # type: ignore[misc, valid-type]
    """For the asynchronous trainer modes."""
