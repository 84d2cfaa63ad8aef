"""SkyRL's generator over a bus: its prompts go out as requests, groups come back in its order.

::

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return make_generator("run1", sample_retries=2)

SkyRL's TrajectoryID(instance_id, repetition_id) is the key of a bus and a sample's index. A failed
rollout is requested again alone (`sample_retries`), where SkyRL would end the step.

Invariants:

- Each output stands at the place of its input, for any order of the workers' answers.
- Overlapping calls, as in the fully asynchronous trainer, each get their own groups, even if one
  call is cancelled.
- Importing this module loads neither torch nor SkyRL.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import shmbus
from shmbus.base.arguments import check_flag, check_seconds
from trainer_adapter.adapters.optional_imports import Stack
from trainer_adapter.adapters.prompt_response import Parted, experts_of, part_row
from trainer_adapter.adapters.requested_groups import EndedGroups, SplitConsumer, columns_for

__all__ = ["GenerateByBus", "make_generator"]

#: Its generators need Python 3.12.
_SKYRL: Final = Stack("SkyRL", {"skyrl": "0.3.0"}, "skyrl==0.3.0 with Python 3.12")
#: Seconds of one wait for groups, and a call's default wait in total.
_LOOK_S: Final = 0.2
GENERATE_TIMEOUT_S: Final = 3600.0
_TAKE_GROUPS: Final = 64


class _Output(NamedTuple):
    parted: Parted
    experts: list[Any] | None
    reward: float
    stop_reason: str


class _OneTake(NamedTuple):
    """Lock for a single taking call at a time, with its event loop."""

    loop: asyncio.AbstractEventLoop
    lock: asyncio.Lock


class GenerateByBus:
    """Addition of `make_generator` to SkyRL's GeneratorInterface.

    Parameters
    ----------
    bus : str
    logprobs : bool
        True to require the sampler's logprobs, as for SkyRL's off-policy correction.
    timeout : float
        Seconds for the groups of one call.
    **options : object
        Of `shmbus.Consumer`, for example `sample_retries`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, or an unknown option.
    """

    def __init__(
        self,
        bus: str,
        *,
        logprobs: bool = True,
        timeout: float = GENERATE_TIMEOUT_S,
        **options: Any,
    ) -> None:
        self._consumers: Final = SplitConsumer(bus, **{"label": "SkyRL", **options})
        check_flag("logprobs", logprobs)
        check_seconds("timeout", timeout)
        self.bus: Final = bus
        self._logprobs = logprobs
        self._timeout_s = timeout
        self._rounds = itertools.count(time.time_ns())
        self._wanted: set[tuple[str, int | None]] = set()
        self._arrived: dict[tuple[str, int | None], list[_Output] | Exception] = {}
        self._taking: _OneTake | None = None

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Have a batch sampled.

        Parameters
        ----------
        input_batch : GeneratorInput
            With trajectory_ids. A request's ``meta`` holds "prompt", "env_class", "env_extras" and
            "sampling_params" of its prompt.

        Returns
        -------
        GeneratorOutput
            In the order of the input.

        Raises
        ------
        TimeoutError
            Groups are missing; the message names them, and the workers.
        RuntimeError
            The bus dropped a group of this call, as stale or failed; named in the message.
        ValueError
            Missing trajectory_ids, or a sample unfit for the trainer.
        """
        ids, prompts = input_batch.get("trajectory_ids"), input_batch.get("prompts") or []
        if not ids or len(ids) != len(prompts):
            raise ValueError(
                "generate: expected a trajectory_id for each prompt, got "
                f"{len(ids) if ids else 'none'} for {len(prompts)}; SkyRL's trainers give them"
            )
        metadata = input_batch.get("batch_metadata")
        # SkyRL's phases share the names of splits.
        split = str(metadata.training_phase) if metadata is not None else "train"
        consumer = self._consumers.consumer
        if metadata is not None and metadata.global_step > consumer.policy_version:
            consumer.policy_version = metadata.global_step
        deadline = time.monotonic() + self._timeout_s
        ended = EndedGroups(consumer)
        places: dict[str, list[int]] = {}
        for place, each in enumerate(ids):
            places.setdefault(str(each.instance_id), []).append(place)
        keys: dict[tuple[str, int | None], list[int]] = {}
        try:
            for instance_id, of_group in places.items():
                of_group.sort(key=lambda place: ids[place].repetition_id)
                if any(prompts[place] != prompts[of_group[0]] for place in of_group):
                    raise ValueError(
                        f"generate: group {instance_id!r}: expected the same prompt for its "
                        "samples, got different prompts; give each prompt its own instance_id"
                    )
                key: tuple[str, int | None] = (instance_id, next(self._rounds))
                self._wanted.add(key)
                keys[key] = of_group
                await self._offer(key, input_batch, of_group, split, deadline)
            found: dict[int, _Output] = {}
            for key, of_group in keys.items():
                outputs = await self._group(key, split, deadline, ended)
                found |= dict(zip(of_group, outputs, strict=True))
        finally:
            self._wanted -= set(keys)
            for key in keys:
                self._arrived.pop(key, None)
        return self._output([found[place] for place in range(len(ids))], ids)

    def close(self) -> None:
        """Leave the bus."""
        self._consumers.close()

    async def _offer(
        self,
        key: tuple[str, int | None],
        batch: Mapping[str, Any],
        places: list[int],
        split: str,
        deadline: float,
    ) -> None:
        first = places[0]
        extras, sampling = batch.get("env_extras"), batch.get("sampling_params")
        meta = {
            "prompt": batch["prompts"][first],
            "env_class": batch["env_classes"][first],
            "env_extras": columns_for("SkyRL", extras[first]) if extras and extras[first] else None,
            "sampling_params": columns_for("SkyRL", sampling) if sampling else None,
        }
        while True:
            try:
                self._consumers.consumer.request(
                    key[0], group_size=len(places), round=key[1], split=split, meta=meta,
                    timeout=0,
                )  # fmt: skip
                return
            except shmbus.BusFullError:
                # Taking groups meanwhile empties a full lane.
                self._check(key, deadline)
                await self._take(split)

    async def _group(
        self, key: tuple[str, int | None], split: str, deadline: float, ended: EndedGroups
    ) -> list[_Output]:
        while key not in self._arrived:
            self._check(key, deadline)
            if not await self._take(split) and key not in self._arrived:
                ended.raise_for([key])
        found = self._arrived.pop(key)
        if isinstance(found, Exception):
            raise found
        return found

    def _check(self, key: tuple[str, int | None], deadline: float) -> None:
        if time.monotonic() > deadline:
            raise self._consumers.late(f"the group {key!r}", self._timeout_s)

    async def _take(self, split: str) -> bool:
        """Take available groups for every waiting call; return False for no groups."""
        loop = asyncio.get_running_loop()
        if self._taking is None or self._taking.loop is not loop:
            self._taking = _OneTake(loop, asyncio.Lock())
        # A cancelled call must not take another call's groups along.
        return await asyncio.shield(self._take_for_all(self._taking.lock, split))

    async def _take_for_all(self, lock: asyncio.Lock, split: str) -> bool:
        async with lock:
            consumer, groups = await asyncio.to_thread(
                self._consumers.take, split, _TAKE_GROUPS, _LOOK_S
            )
            for group in groups:
                key = (group.instance_id, group.round)
                if key not in self._wanted:
                    # From an abandoned call, or from an earlier trainer.
                    consumer.drop(group)
                    continue
                try:
                    self._arrived[key] = [_read(t, self._logprobs) for t in group]
                except ValueError as error:
                    self._arrived[key] = error
                    consumer.drop(group)
                    continue
                consumer.ack(group)
            return bool(groups)

    def _output(self, found: list[_Output], ids: list[Any]) -> dict[str, Any]:
        experts = [each.experts for each in found]
        if any(each is None for each in experts) and not all(each is None for each in experts):
            raise ValueError(
                "generate: expected routed_experts in each sample or in none; put them in all"
            )
        logprobs = [each.parted.logprobs for each in found]
        return {
            "prompt_token_ids": [each.parted.prompt for each in found],
            "response_ids": [each.parted.response for each in found],
            "rewards": [each.reward for each in found],
            "loss_masks": [each.parted.mask for each in found],
            "stop_reasons": [each.stop_reason for each in found],
            "rollout_metrics": {},
            "rollout_logprobs": logprobs if self._logprobs else None,
            "trajectory_ids": list(ids),
            "rollout_expert_indices": None if experts[0] is None else experts,
            "is_last_step": None,
        }


def _read(t: shmbus.Trajectory, logprobs: bool) -> _Output:
    where = f"group {t.instance_id!r}, sample {t.index}"
    rows = t.rows
    if len(rows) != 1:
        raise ValueError(
            f"{where}: expected one row, got {len(rows)}: SkyRL has one output a trajectory; put "
            "one row, or give each its own instance"
        )
    meta = t.meta if isinstance(t.meta, dict) else {}
    parted = part_row(t, rows[0], logprobs)
    experts = experts_of(t, rows[0])
    return _Output(
        parted,
        None if experts is None else experts.tolist(),
        float(t.score),
        str(meta.get("finish_reason", "stop")),
    )


def make_generator(bus: str, **options: Any) -> Any:
    """Make a generator for SkyRL's ``get_generator``.

    Parameters
    ----------
    bus : str
    **options : object
        As for `GenerateByBus`.

    Returns
    -------
    skyrl.train.generators.base.GeneratorInterface

    Raises
    ------
    ImportError
        SkyRL is missing, or uses different names.
    """
    (interface,) = _SKYRL.needed("skyrl.train.generators.base", "GeneratorInterface")
    return type("ShmbusGenerator", (GenerateByBus, interface), {})(bus, **options)
