"""Rollouts of TRL's GRPOTrainer from a bus: its prompts go out as requests, groups come back.

Invariants:

- The samples of a slot belong to its prompt: groups are found by the request's id and round, never
  by their order.
- A slot is one completion: the part of a sequence from the first sampled token on.
- The main process asks and takes for every rank, so a group may straddle ranks.
- A group is acknowledged after its complete arrival: TRL asks again for lost groups.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

import shmbus
from shmbus.base.arguments import check_flag, check_seconds
from shmbus.base.format import several
from trainer_adapter.adapters.requested_groups import (
    EndedGroups,
    SplitConsumer,
    columns_for,
    still_leased,
)
from trainer_adapter.adapters.trl.rows import RowArrays, read_rows
from trainer_adapter.adapters.trl.samples import Expected, check_size, rewards_of
from trainer_adapter.adapters.trl.stack import needed, versions

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length",
)  # fmt: skip


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


def check_for_grpo(group: shmbus.Group, rows: list[list[RowArrays]], zeroed: list[bool]) -> None:
    """Refuse samples that GRPOTrainer would train on incorrectly."""
    for t, of_sample, zero in zip(group, rows, zeroed, strict=True):
        where = f"group {t.instance_id!r}, sample {t.index}"
        if len(of_sample) != 1:
            raise ValueError(
                f"{where}: expected one row, got {len(of_sample)}: GRPOTrainer has one completion "
                "a slot; put one row, or train with AsyncGRPOTrainer, which takes forks as rows"
            )
        (row,) = of_sample
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
    """Name a prompt by its content, for equal names in the logs of two runs."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _token_ids(prompt: Any, trainer: Any) -> Any:
    """Tokenize a prompt like TRL: plain text, messages by the chat template."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return np.asarray(ids, np.int32).reshape(-1)


def lay_out(arrays: RowArrays, score: float | None, answer: dict[str, list[Any]]) -> None:
    """Split a sequence: the tokens before the first sampled token form the prompt."""
    sampled = np.flatnonzero(arrays.completion_mask)
    begin = int(sampled[0]) if len(sampled) else len(arrays.input_ids)
    answer["prompt_ids"].append(arrays.input_ids[:begin].tolist())
    answer["completion_ids"].append(arrays.input_ids[begin:].tolist())
    answer["logprobs"].append(arrays.old_log_probs[begin:].tolist())
    answer["env_mask"].append(arrays.completion_mask[begin:].tolist())
    answer["bus_score"].append(score)


#: Seconds of one look for groups; Ctrl-C and the deadline take effect between two looks.
_TAKE_S: Final = 1.0
_TAKE_GROUPS: Final = 64
#: Default for `timeout`: groups beyond this limit have no worker.
ROLLOUT_TIMEOUT_S: Final = 600.0
#: TRL's method that holds the rows of the data set and calls the rollout function.
_GENERATE: Final = "_generate_and_score_completions"
_LOG: Final = logging.getLogger("shmbus.trl")
_KEYS: Final = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "bus_score")


class ShmbusRollouts:
    """A rollout function for TRL's GRPOTrainer with samples from a bus.

    Pass it as ``rollout_func=rollouts`` and ``reward_funcs=rollouts.reward``, and call `attach`
    after making the trainer. Workers take the prompts by `shmbus.Producer.requests.next` and answer
    by `requests.answer`. A request's ``prompt`` field holds the prompt's token ids. Its meta holds
    "prompt", TRL's prompt from the data set; "sampling", the trainer's temperature, top_p, top_k,
    min_p, repetition_penalty, max_completion_length and generation_kwargs; and, once attached, the
    remaining columns of the data set, for example "answer". Its split is "eval" for an evaluation,
    else "train": the bus's ledger counts them separately, and no trainer mixes them up.

    Parameters
    ----------
    bus : str
    timeout : float
        Seconds for the groups of one call.
    tokenize : bool
        True to send the prompt's token ids with requests.
    **consumer_options
        Options of `shmbus.Consumer`, for example `sample_retries`.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, or an unknown option.

    Examples
    --------
    ::

        rollouts = ShmbusRollouts("run1", sample_retries=2)
        trainer = GRPOTrainer(..., rollout_func=rollouts, reward_funcs=rollouts.reward)
        rollouts.attach(trainer)
        trainer.train()
    """

    def __init__(
        self,
        bus: str,
        *,
        timeout: float = ROLLOUT_TIMEOUT_S,
        tokenize: bool = True,
        **consumer_options: Any,
    ) -> None:
        self._consumers: Final = SplitConsumer(bus, **{"label": "TRL", **consumer_options})
        check_seconds("timeout", timeout)
        check_flag("tokenize", tokenize)
        self.bus: Final = bus
        self._timeout_s = timeout
        self._tokenize = tokenize
        # Rounds of one process rise, and the next process starts higher: a prompt's rounds never
        # mix, even after a crash.
        self._rounds = itertools.count(time.time_ns())
        self._publish: Callable[[int], object] | None = None
        # Data set rows of the next call; None without `attach`.
        self._rows: list[dict[str, Any]] | None = None
        self._told_of_columns = False

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample the prompts of one generation step."""
        train = bool(trainer.model.training)
        size = int(trainer.num_generations if train else trainer.num_generations_eval)
        accelerator = trainer.accelerator
        slots = list(zip(prompts, self._columns(prompts, trainer), strict=True))
        if accelerator.num_processes == 1:
            return self._sample(slots, size, trainer, "train" if train else "eval")
        gather, broadcast = needed("accelerate.utils", "gather_object", "broadcast_object_list")
        everyone = gather(slots)
        shared: list[Any] = [None, None]
        if accelerator.is_main_process:
            try:
                shared[0] = self._sample(everyone, size, trainer, "train" if train else "eval")
            except Exception as error:  # raised on every rank, or the rest would wait for ever
                shared[1] = error
        broadcast(shared, from_process=0)
        answer, failure = shared
        if failure is not None:
            raise failure
        begin = accelerator.process_index * len(prompts)
        return {key: answer[key][begin : begin + len(prompts)] for key in _KEYS}

    def reward(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return the scores received with the samples: a reward function of TRL.

        Parameters
        ----------
        completions : list
        **columns
            Contains "bus_score".

        Returns
        -------
        list of float or None
            None for a sample that cannot be scored.

        Raises
        ------
        ValueError
            The samples did not come from this rollout function.
        """
        scores = columns.get("bus_score") or []
        if len(scores) != len(completions):
            raise ValueError(
                "reward: expected a bus_score for each completion, got none; pass the same object "
                "as rollout_func and its .reward as a reward function"
            )
        return list(scores)

    def attach(self, trainer: Any, publish: Callable[[int], object] | None = None) -> None:
        """Have a trainer correct for the samplers' policy, and publish its versions.

        TRL compares the samplers' logprobs with its own (truncated importance sampling) only for
        vLLM: `attach` reports a vLLM, and takes its place in the weight sync. Without `attach` each
        sample counts as made by the current policy. Also, TRL passes only the prompts to a rollout
        function: `attach` notes their data set rows, and sends the remaining columns to the
        workers.

        Parameters
        ----------
        trainer : GRPOTrainer
            Just made.
        publish : callable, optional
            Sends the weights to the workers, for example ``WeightPublisher(bus,
            ModuleSource(trainer.model)).publish``. The main process calls it before each generation
            with new weights, with their version, and then publishes this version as the policy
            version.

        Raises
        ------
        ImportError
            This version of TRL lacks expected names, listed in the message.
        """
        names = ("use_vllm", "num_generations", "num_generations_eval", "accelerator",
                 "vllm_importance_sampling_correction", "rollout_func", _GENERATE)  # fmt: skip
        missing = [name for name in names if not hasattr(trainer, name)]
        if missing:
            raise ImportError(
                f"attach: expected TRL's GRPOTrainer, got {type(trainer).__name__} without "
                f"{', '.join(missing)}: {versions()}"
            )
        self._publish = publish
        main = trainer.accelerator.is_main_process
        trainer.use_vllm = True
        trainer.vllm_generation = SimpleNamespace(
            sync_weights=self._next_version if main else lambda: None
        )
        trainer._last_loaded_step = -1
        setattr(trainer, _GENERATE, partial(self._note_rows, getattr(trainer, _GENERATE)))

    def close(self) -> None:
        """Leave the bus."""
        self._consumers.close()

    # -- messages to the workers ----------------------------------------------------------------

    def _columns(self, prompts: list[Any], trainer: Any) -> list[dict[str, Any]]:
        """Return the data set's remaining columns of each slot, as far as requests support them."""
        rows, self._rows = self._rows, None
        if rows is None or len(rows) != len(prompts):
            self._tell_of_columns(trainer)
            return [{}] * len(prompts)
        # TRL writes a rollout function's answer into its rows.
        others = [
            {name: value for name, value in row.items() if name not in ("prompt", *_KEYS)}
            for row in rows
        ]
        return [columns_for("TRL", row, ("split", "sampling")) for row in others]

    def _tell_of_columns(self, trainer: Any) -> None:
        names = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or []
        left_out = [name for name in names if name != "prompt"]
        if left_out and not self._told_of_columns:
            _LOG.warning(
                "bus %r: the columns %s of the data set do not go to workers: TRL gives a rollout "
                "function the prompts alone; call rollouts.attach(trainer)",
                self.bus,
                ", ".join(map(repr, left_out)),
            )
        self._told_of_columns = True

    def _note_rows(self, generate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
        self._rows = rows
        return generate(rows)

    # -- the main process's part ----------------------------------------------------------------

    def _next_version(self) -> None:
        consumer = self._consumers.consumer
        version = consumer.policy_version + 1
        if self._publish is not None:
            self._publish(version)
        consumer.policy_version = version

    def _sample(
        self, slots: list[tuple[Any, dict[str, Any]]], size: int, trainer: Any, split: str
    ) -> dict[str, list[Any]]:
        prompts = [prompt for prompt, _ in slots]
        if len(prompts) % size:
            raise ValueError(
                f"rollouts: expected a multiple of {size} prompts, since each is sampled so often, "
                f"got {len(prompts)}; make the generation batch a multiple of num_generations"
            )
        expected = Expected(size, int(trainer.max_completion_length), None)
        deadline = time.monotonic() + self._timeout_s
        ended = EndedGroups(self._consumers.consumer)
        tokenizing = trainer if self._tokenize else None
        wanted: dict[tuple[str, int], int] = {}
        found: dict[int, list[tuple[RowArrays, float | None]]] = {}
        own = {"split": split, "sampling": sampling_of(trainer)}
        for slot in range(0, len(prompts), size):
            if any(each != prompts[slot] for each in prompts[slot : slot + size]):
                raise ValueError(
                    f"rollouts: expected {size} equal prompts from slot {slot} on, got different "
                    "prompts; do not change num_generations after TRL's constructor"
                )
            key = key_of(prompts[slot]), next(self._rounds)
            meta = {**slots[slot][1], **own}
            # Taking groups meanwhile empties a full lane.
            while not offer(self._consumers.consumer, key, prompts[slot], size, meta, tokenizing):
                self._receive(split, wanted, found, expected, 0.1, deadline)
            wanted[key] = slot
        while wanted:
            if not self._receive(split, wanted, found, expected, _TAKE_S, deadline):
                ended.raise_for(wanted)
        answer: dict[str, list[Any]] = {key: [] for key in _KEYS}
        for slot in sorted(found):
            for arrays, score in found[slot]:
                lay_out(arrays, score, answer)
        return answer

    def _receive(
        self,
        split: str,
        wanted: dict[tuple[str, int], int],
        found: dict[int, list[tuple[RowArrays, float | None]]],
        expected: Expected,
        timeout_s: float,
        deadline: float,
    ) -> bool:
        """Take available groups; return False for no groups."""
        if time.monotonic() > deadline:
            missing = f"{several(len(wanted), 'group')}, the first {next(iter(wanted), None)!r},"
            raise self._consumers.late(missing, self._timeout_s)
        consumer, groups = self._consumers.take(split, _TAKE_GROUPS, timeout_s)
        try:
            for group in groups:
                round = group.round
                slot = None if round is None else wanted.get((group.instance_id, round))
                if slot is None or round is None:
                    # A foreign prompt, or an earlier trainer's: no call waits for the group.
                    consumer.drop(group)
                    continue
                found[slot] = _completions_of(group, expected)
                del wanted[group.instance_id, round]
                consumer.ack(group)
        except BaseException:
            # The call ends, and abandons its remaining groups.
            consumer.drop(still_leased(groups))
            raise
        return bool(groups)


def _completions_of(
    group: shmbus.Group, expected: Expected
) -> list[tuple[RowArrays, float | None]]:
    """Return the row and the score of each sample; ValueError for samples unfit for the trainer."""
    check_size(group, expected)
    rows = read_rows(group, expected)
    rewards, zeroed = rewards_of(group)
    check_for_grpo(group, rows, zeroed)
    scores = [None if score != score else score for score in rewards.tolist()]
    return list(zip((row for (row,) in rows), scores, strict=True))
