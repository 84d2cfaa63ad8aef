"""slime on a bus: a rollout function that takes groups from it, for ``--rollout-function-path``.

Rollout workers put their samples with `put_sample`, from any process of this machine, or POST them
to the gateway's ``/buffer/write``. The function returns whole groups of slime's own Samples.

Invariants:

- Importing this needs no slime: it is imported by the first call, which slime makes.
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
from typing import Any, Final

import shmbus
from shmbus._arguments import check_int, check_timeout
from shmbus.peers.slime import Sample, SampleGroups, is_slime, item_of, sample_of
from trainer_adapter.adapters.ended import still_leased
from trainer_adapter.adapters.stack import BUS_VARIABLE

__all__ = ["SlimeRollouts", "generate_rollout", "put_sample"]

_LOG: Final = logging.getLogger("shmbus.slime")
_TAKE_GROUPS: Final = 256
_LARGEST: Final = 2**31 - 1
#: Seconds that one look for groups lasts.
_LOOK_S: Final = 1.0

#: Numbers of this process's samples; a producer's id is unique on its bus.
_numbers = itertools.count()


def put_sample(
    producer: shmbus.Producer, item: Mapping[str, Any], *, timeout: float | None = None
) -> None:
    """Put a sample as slime's rollout buffer takes it.

    Parameters
    ----------
    producer : Producer
        Of the bus.
    item : mapping
        ``instance_id`` says its group and ``reward`` is its score. ``tokens``, ``loss_mask`` and
        ``rollout_log_probs`` travel as arrays, where they are lists of numbers.
    timeout : float, optional
        Seconds to wait for room, as for `Producer.put`.

    Raises
    ------
    TypeError, ValueError
        It is no mapping, has no instance_id or no finite reward, or something that MessagePack has
        not.
    BusFullError, BusClosedError, BusRemovedError, RecordTooLargeError
        As for `Producer.put`.
    """
    key = f"slime-{producer.producer_id}-{next(_numbers)}"
    sample = sample_of(item, policy_version=producer.policy_version)
    producer.put_group(key, [sample], timeout=timeout)


def _fill(sample: Any, item: Mapping[str, Any]) -> Any:
    """Set what an item has and a Sample knows; what is put is completed, unless it says else."""
    status = item.get("status", "completed")
    try:
        sample.status = type(sample).Status(status)
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
    """Groups of a bus as slime's Samples.

    Parameters
    ----------
    name : str
        The bus.
    group_size : int
        Samples of a group: slime's ``n_samples_per_prompt``.
    make_sample : callable, optional
        Makes an empty Sample; slime's own by default.
    **options : object
        Of `shmbus.Consumer`.

    Raises
    ------
    TypeError, ValueError
        The group size is no int of 1 or more, or an option is unknown.
    """

    def __init__(
        self,
        name: str,
        group_size: int,
        make_sample: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        self._make = make_sample
        self._groups = SampleGroups(check_int("group_size", group_size, 1, _LARGEST))
        self._given: list[shmbus.Group] = []
        self._next_index = 0
        self._consumer = shmbus.Consumer(name, **options)

    def take(self, count: int, timeout: float | None = None) -> list[list[Any]]:
        """Return groups of Samples; acknowledges those that the last call returned.

        Parameters
        ----------
        count : int
            How many groups.
        timeout : float, optional
            Seconds to wait for all of them; None waits for ever.

        Returns
        -------
        list of list of Sample
            Fewer only at the timeout.

        Raises
        ------
        TypeError, ValueError
            An argument is of another kind. Or a sample is none that slime can have: it was dropped,
            so the next call goes on; where there were several, the log names each.
        """
        count = check_int("count", count, 0, _LARGEST)
        check_timeout(timeout, "timeout")
        self.ack()
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._groups.complete() < count:
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
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
        make = self._make
        if make is None:
            from slime.utils.types import Sample as SlimeSample

            make = SlimeSample
        return make()

    def _sample(self, item: Mapping[str, Any], group_index: int) -> Any:
        sample = _fill(self._empty(), item)
        sample.group_index = group_index
        sample.index = self._next_index
        self._next_index += 1
        return sample

    def ack(self) -> None:
        """Acknowledge what the last call returned: it was trained on."""
        if self._given:
            self._consumer.ack(still_leased(self._given))
            self._given = []

    def close(self) -> None:
        """Leave the bus; what was not acknowledged is delivered to the next trainer."""
        self._consumer.close()


_rollouts: SlimeRollouts | None = None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the next step's groups, as slime calls ``--rollout-function-path``.

    Parameters
    ----------
    args : object
        slime's arguments: ``rollout_batch_size`` groups of ``n_samples_per_prompt`` samples, of
        the bus ``shmbus_bus``, or that of the variable SHMBUS_BUS.
    rollout_id : int
        The step.
    data_source : object
        Not used: the bus is the source.
    evaluation : bool
        Must be False: evaluation needs prompts of its own.

    Returns
    -------
    RolloutFnTrainOutput
        slime's, with the groups.

    Raises
    ------
    ValueError
        It was called for an evaluation, or there is no name of a bus.
    """
    global _rollouts
    if evaluation:
        raise ValueError(
            "evaluation: expected False, since a bus has no evaluation prompts; give slime "
            "--eval-function-path"
        )
    from slime.rollout.base_types import RolloutFnTrainOutput

    if _rollouts is None:
        name = getattr(args, "shmbus_bus", None) or os.environ.get(BUS_VARIABLE)
        if not name:
            raise ValueError(
                f"shmbus_bus: expected the name of a bus, got none; set the variable {BUS_VARIABLE}"
            )
        _rollouts = SlimeRollouts(name, args.n_samples_per_prompt)
    return RolloutFnTrainOutput(samples=_rollouts.take(args.rollout_batch_size), metrics=None)
