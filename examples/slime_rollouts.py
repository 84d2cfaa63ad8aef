"""slime on a bus: a rollout function that takes groups from it.

    SHMBUS_BUS=run1 ... --rollout-function-path slime_rollouts.generate_rollout

Rollout workers put their samples with `put_sample`, from any process of this machine, or POST them
to the gateway's ``/buffer/write``. slime installs with CUDA only, so this is written for, and
tested by, the interface that it published (624b824).

- A sample that slime cannot have is dropped and ends the call by name; the next call goes on.
- Groups are acknowledged by the call for the next step, when slime has trained on them; those of a
  trainer that died before are delivered again.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import shmbus
from shmbus.peers.slime import Sample, SampleGroups, is_slime, item_of, sample_of

_LOG = logging.getLogger("shmbus.slime")
_TAKE_GROUPS = 256
#: Seconds that one wait for groups lasts; between two of them Ctrl-C is seen to.
_WAIT_S = 1.0
#: Numbers of this process's samples; a producer's id is unique on its bus.
_numbers = itertools.count()


def put_sample(producer: shmbus.Producer, item: Mapping[str, Any]) -> None:
    """Put a sample as slime's rollout buffer takes it: `instance_id` says its group."""
    key = f"slime-{producer.producer_id}-{next(_numbers)}"
    producer.put_group(key, [sample_of(item, policy_version=producer.policy_version)])


def _fill(sample: Any, item: Mapping[str, Any]) -> Any:
    """Set what an item has and a Sample knows; what is put is completed, unless it says else."""
    try:
        sample.status = type(sample).Status(item.get("status", "completed"))
    except ValueError as error:
        raise ValueError(
            f"status of a sample of group {item.get('instance_id')!r}, uid {item.get('uid')!r}: "
            f"{error}; report what slime knows"
        ) from error
    # Its fields alone: whoever puts an item replaces no method of it.
    known = vars(sample)
    for name, value in item.items():
        if name != "status" and name in known:
            setattr(sample, name, value)
    if not getattr(sample, "response_length", 0) and isinstance(item.get("loss_mask"), list):
        sample.response_length = len(item["loss_mask"])
    return sample


class SlimeRollouts:
    """Groups of a bus as slime's Samples."""

    def __init__(
        self, name: str, group_size: int, make_sample: Callable[[], Any] | None = None
    ) -> None:
        self._make = make_sample
        self._groups = SampleGroups(group_size)
        self._given: list[shmbus.Group] = []
        self._next_index = 0
        self._consumer = shmbus.Consumer(name)

    def take(self, count: int, timeout: float | None = None) -> list[list[Any]]:
        """Return groups of Samples, fewer only at the timeout; acknowledges the last call's."""
        self.ack()
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._groups.complete() < count:
            left = _WAIT_S if deadline is None else min(_WAIT_S, deadline - time.monotonic())
            problem: ValueError | None = None
            for group in self._consumer.take(_TAKE_GROUPS, timeout=max(0.0, left)):
                try:
                    self._collect(group)
                except ValueError as error:
                    self._consumer.drop(group)
                    _LOG.warning("dropped: %s", error)
                    problem = problem or error
            if problem is not None:
                raise problem
            if deadline is not None and time.monotonic() >= deadline:
                break
        found = []
        for number, samples in enumerate(self._groups.take(count)):
            self._given += [sample.group for sample in samples]
            found.append([self._sample(each.item, number) for each in samples])
        return found

    def _collect(self, group: shmbus.Group) -> None:
        item = item_of(group) if is_slime(group) else None
        if item is not None:
            _fill(self._empty(), item)
        if item is None or not self._groups.add(Sample(item, group)):
            self._consumer.drop(group)

    def _empty(self) -> Any:
        if self._make is None:
            from slime.utils.types import Sample as SlimeSample

            self._make = SlimeSample
        return self._make()

    def _sample(self, item: Mapping[str, Any], group_index: int) -> Any:
        sample = _fill(self._empty(), item)
        sample.group_index, sample.index = group_index, self._next_index
        self._next_index += 1
        return sample

    def ack(self) -> None:
        """Acknowledge what the last call returned: it was trained on."""
        # A call that Ctrl-C has interrupted may have acknowledged some of it.
        self._consumer.ack([group for group in self._given if group.state == "leased"])
        self._given = []

    def close(self) -> None:
        """Leave the bus; what was not acknowledged is delivered to the next trainer."""
        self._consumer.close()


_rollouts: SlimeRollouts | None = None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the next step's groups, as slime calls ``--rollout-function-path``."""
    global _rollouts
    if evaluation:
        raise ValueError("a bus has no evaluation prompts; give slime --eval-function-path")
    from slime.rollout.base_types import RolloutFnTrainOutput

    if _rollouts is None:
        name = getattr(args, "shmbus_bus", None) or os.environ["SHMBUS_BUS"]
        _rollouts = SlimeRollouts(name, args.n_samples_per_prompt)
    return RolloutFnTrainOutput(samples=_rollouts.take(args.rollout_batch_size), metrics=None)
