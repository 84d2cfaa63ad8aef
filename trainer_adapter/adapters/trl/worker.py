"""The rollout worker of TRL's AsyncGRPOTrainer: it takes groups from a bus in place of making them.

Whoever puts groups into the bus makes them: any processes, any number, started and ended at any
time. TRL pulls rows one by one; this gives it the rows of whole groups, in order of completion.

Invariants:

- A group is acknowledged when the trainer has trained on all of its rows, not before: a trainer
  that dies gets the others again.
- TRL's versions begin at 1 in every run. The bus counts on: a number names one set of weights.
"""

from __future__ import annotations

import inspect
import logging
import queue
import time
from typing import Any, Final, Literal

import shmbus
from trainer_adapter.adapters.trl.buffer import RolloutBuffer
from trainer_adapter.adapters.trl.callback import TrainerArguments, make_callback
from trainer_adapter.adapters.trl.checkpoints import TrainedRows
from trainer_adapter.adapters.trl.progress import Account, OpenGroup, RowMetrics
from trainer_adapter.adapters.trl.rows import read_rows
from trainer_adapter.adapters.trl.samples import (
    Advantages,
    Expected,
    advantages_of,
    check_size,
    messages_of,
    metrics_of,
    rewards_of,
)
from trainer_adapter.adapters.trl.stack import needed, versions

__all__ = ["ShmbusRolloutWorker"]

_LOG: Final = logging.getLogger("shmbus.trl")

#: Counters of the ledger that TRL logs, as what was added since the last step.
_DROPS: Final = ("stale", "failed", "timeout", "overflow", "zero_variance")


class ShmbusRolloutWorker:
    """Groups of a bus as the rollouts of TRL's AsyncGRPOTrainer.

    Pass it as ``rollout_worker=worker`` and ``callbacks=[worker.callback]``. Every rank makes one;
    the main process's attaches when training begins, the others never do.

    Samples have the fields ``tokens``, ``loss_mask`` (1 for what the model sampled) and
    ``logprobs`` (the sampler's), [n] each, the whole sequence; or several such rows, where the
    conversation forked. A meta may have ``prompt`` and
    ``completion`` (messages, for traces), ``rewards`` (by name, logged), ``unscorable`` and
    ``set_advantage_to_zero``.

    Parameters
    ----------
    bus : str
        The bus; it has to exist when training begins, or ``wait=`` says how long to wait.
    advantages : {"grpo", "dr_grpo", "rloo", "none"} or callable
        "grpo" is what TRL's own worker computes; others as for `trainer_adapter.group_advantages`.
    acknowledge : "version" | "save"
        When groups are acknowledged. "version": after the optimizer step that has trained the last
        of their rows. What a killed trainer trained on after its checkpoint is not trained again.
        "save": when a checkpoint with these weights was saved. Every group is trained once, also by
        a trainer that is killed and resumed. The bus has to hold the groups of a save interval, and
        the callback is needed.
    num_generations, max_completion_length, token_budget : int, optional
        As in AsyncGRPOConfig, from which the callback takes them; a group or a sample that does not
        fit is refused.
    refused : "raise" | "drop"
        What happens with a group that the trainer cannot take: ValueError, or it is dropped and
        counted under ``shmbus/refused_total``.
    **consumer_options
        Those of `shmbus.Consumer`. `max_policy_lag` is the trainer's max_staleness by default.

    Attributes
    ----------
    rollout_buffer : RolloutBuffer
    metrics_queue : queue.Queue
        What TRL logs of the bus.
    refused_groups : int
        Groups that were dropped under ``refused="drop"``.

    Raises
    ------
    TypeError, ValueError
        An option is unknown or out of range.

    Examples
    --------
    ::

        worker = ShmbusRolloutWorker("run1", acknowledge="save")
        trainer = AsyncGRPOTrainer(..., rollout_worker=worker, callbacks=[worker.callback])
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(args.output_dir))
    """

    def __init__(
        self,
        bus: str,
        *,
        advantages: Advantages = "grpo",
        acknowledge: Literal["version", "save"] = "version",
        num_generations: int | None = None,
        max_completion_length: int | None = None,
        token_budget: int | None = None,
        refused: Literal["raise", "drop"] = "raise",
        **consumer_options: Any,
    ) -> None:
        if acknowledge not in ("version", "save"):
            raise ValueError(f"acknowledge: expected 'version' or 'save', got {acknowledge!r}")
        if refused not in ("raise", "drop"):
            raise ValueError(f"refused: expected 'raise' or 'drop', got {refused!r}")
        for taken in ("rank", "world_size"):
            if taken in consumer_options:
                raise TypeError(
                    f"{taken}: TRL's main process takes all rows and shares them out; leave it out"
                )
        inspect.signature(shmbus.Consumer).bind(bus, **consumer_options)
        self.bus: Final = bus
        self.rollout_buffer = RolloutBuffer(self)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.refused_groups = 0
        self._advantages = advantages
        self._acknowledge = acknowledge
        self._refused = refused
        self._options = consumer_options
        self._own_expected = Expected(num_generations, max_completion_length, token_budget)
        self._expected = self._own_expected
        self._callback: Any = None
        # What the weights of this process have that was not acknowledged when it left the bus.
        self._left_with: dict[str, Any] | None = None
        self._sample_type: Any = None
        self._reset()

    def _reset(self) -> None:
        self._consumer: shmbus.Consumer | None = None
        self._account = Account()
        self._open: dict[int, OpenGroup] = {}
        self._group_numbers = 0
        self._to_acknowledge: list[OpenGroup] = []
        self._at_save: list[OpenGroup] = []
        self._rows = TrainedRows(0)
        self._offset: int | None = None
        self._max_staleness: int | None = None
        self._behind = False
        self._packed_at_sync = 0
        self._last_row_s = time.monotonic()
        self._stall: shmbus.StallReport | None = None
        self._logged: dict[str, int] = {}
        self._has_callback = False

    @property
    def callback(self) -> Any:
        """The TrainerCallback that tells this worker of the trainer's steps and saves.

        Raises
        ------
        ImportError
            transformers is not installed.
        """
        if self._callback is None:
            self._callback = make_callback(self)
        return self._callback

    # -- TRL's RolloutWorkerProtocol ------------------------------------------------------------

    def start(self) -> None:
        """Begin; TRL calls this when training begins.

        Raises
        ------
        RuntimeError
            The callback is needed and was not passed to the trainer.
        """
        if self._acknowledge == "save" and not self._has_callback:
            raise RuntimeError(
                'acknowledge="save": the trainer tells of its saves by a callback; pass '
                "callbacks=[worker.callback] to AsyncGRPOTrainer's constructor"
            )
        self._attached()
        self._last_row_s = time.monotonic()

    def stop(self) -> None:
        """Leave the bus. Groups that are not acknowledged are delivered again, to the next run."""
        self._left_with = self._save_state()
        consumer, self._consumer = self._consumer, None
        self.rollout_buffer._ready.clear()
        if consumer is not None:
            consumer.close()

    def update_model_version(self, model_version: int) -> None:
        """Publish a new policy version; TRL calls this when the weights were sent.

        Parameters
        ----------
        model_version : int
            TRL's number; the bus has its own, which goes on over restarts.
        """
        consumer = self._attached()
        if self._offset is None:
            # Weights that the bus does not know: a number above all it has had.
            self._offset = consumer.policy_version - (model_version - 1)
        consumer.policy_version = model_version + self._offset
        self._behind = False
        if not self._has_callback:
            # A step lies between two calls, and what was packed before it began is trained.
            self._end(self._account.finish(self._packed_at_sync - self._account.finished))
            self._acknowledge_ended()
            self._packed_at_sync = self._account.packed

    def check_health(self, stale_after_s: float) -> None:
        """Raise where no group has come for too long; TRL calls this while it waits.

        Parameters
        ----------
        stale_after_s : float
            Seconds.

        Raises
        ------
        RuntimeError
            The message has what is known of the bus.
        """
        waited_s = time.monotonic() - self._last_row_s
        if waited_s <= stale_after_s:
            return
        held = sum(len(group.rows) for group in self._open.values())
        why = f"\n{self._stall}" if self._stall is not None else ""
        hint = ""
        if self._acknowledge == "save" and held:
            hint = (
                f"; {held} rows wait for the next save: make the bus hold a whole save interval, "
                'or save more often, or take acknowledge="version"'
            )
        raise RuntimeError(
            f"bus {self.bus!r}: no complete group for {waited_s:.0f} s, heartbeat_stale_after_s is "
            f"{stale_after_s:.0f}; `shmbus status {self.bus}` shows its producers{hint}{why}"
        )

    # -- rows -----------------------------------------------------------------------------------

    def _attached(self) -> shmbus.Consumer:
        if self._consumer is None:
            options = {"on_stall": self._note_stall, "label": "TRL", **self._options}
            lag = self._max_staleness
            try:
                own = {} if lag is None else {"max_policy_lag": lag}
                self._consumer = shmbus.Consumer(self.bus, **{**own, **options})
            except ValueError:
                if lag is None or "max_policy_lag" in options:
                    raise
                # A daemon has a bound of its own; what is older than TRL's, TRL leaves out.
                self._consumer = shmbus.Consumer(self.bus, **options)
            with shmbus.Bus.open(self.bus) as bus:
                self._rows = TrainedRows(bus.created_unix_ns)
            (self._sample_type,) = needed(
                "trl.experimental.async_grpo.async_rollout_worker", "RolloutSample"
            )
        return self._consumer

    def _note_stall(self, report: shmbus.StallReport) -> None:
        self._stall = report

    def _next_rows(self, timeout_s: float | None) -> list[Any]:
        """Take a group, and return the rows that are to be trained; none where none came."""
        groups = self._attached().take(1, timeout_s)
        if not groups:
            return []
        (group,) = groups
        self._stall = None
        try:
            return self._rows_of(group)
        except ValueError as error:
            if self._refused == "raise":
                raise
            self.refused_groups += 1
            self._attached().drop(group)
            self.metrics_queue.put({"shmbus/refused_total": 1.0})
            _LOG.warning("dropped: %s", error)
            return []

    def _rows_of(self, group: shmbus.Group) -> list[Any]:
        check_size(group, self._expected)
        arrays = read_rows(group, self._expected)
        rewards, zeroed = rewards_of(group)
        advantages, std = advantages_of(rewards, zeroed, self._advantages)
        number = self._group_numbers
        self._group_numbers += 1
        opened = OpenGroup(group)
        offset = self._offset or 0
        clock_s = time.time() - time.monotonic_ns() / 1e9
        made = []
        known = False
        for t, rows, reward, advantage in zip(
            group, arrays, rewards.tolist(), advantages.tolist(), strict=True
        ):
            meta = t.meta
            if not isinstance(meta, dict):
                meta = {}
            for place, row in enumerate(rows):
                if len(rows) > 1 and not row.completion_mask.any():
                    continue  # as TRL's own worker: a fork without a sampled token is no row
                identity = (t.producer_id, t.sequence, place)
                if self._rows.take(identity):
                    opened.add(identity, t.index, known=True)
                    known = True
                    continue
                account = opened.add(identity, t.index, known=False)
                made.append(
                    self._sample_type(
                        prompt=messages_of(meta.get("prompt")),
                        completion=messages_of(meta.get("completion")),
                        input_ids=row.input_ids,
                        completion_mask=row.completion_mask,
                        old_log_probs=row.old_log_probs,
                        advantage=advantage,
                        model_version=t.policy_version - offset,
                        group_id=number,
                        metrics=RowMetrics(metrics_of(meta, reward, std), self._account, account),
                        enqueued_at=clock_s + t.committed_ns / 1e9,
                    )
                )
        self._rows.note_group(known=known)
        self._open[id(opened)] = opened
        if not made:
            # The checkpoint's weights have it: it was only its acknowledgement that was lost.
            # It alone: what was trained since then waits for the next save.
            self._acknowledge_groups([opened])
        return made

    def _hand_out(self, sample: Any) -> None:
        self._last_row_s = time.monotonic()
        self._end(self._account.hand_out(sample.metrics.row))

    def _end(self, groups: list[OpenGroup]) -> None:
        self._to_acknowledge += groups

    def _acknowledge_ended(self) -> None:
        ended, self._to_acknowledge = self._to_acknowledge, []
        self._acknowledge_groups(ended)

    def _acknowledge_groups(self, groups: list[OpenGroup]) -> None:
        if not groups:
            return
        consumer = self._attached()
        trained: list[Any] = [group.lease for group in groups if group.was_trained]
        dropped: list[Any] = [group.lease for group in groups if not group.was_trained]
        consumer.ack(trained)
        if dropped:
            consumer.drop(dropped)
        for group in groups:
            self._open.pop(id(group), None)

    # -- what the callback tells ----------------------------------------------------------------

    def _train_begins(self, arguments: TrainerArguments, saved: dict[str, Any] | None) -> None:
        """Attach, and take over what the checkpoint has that the trainer resumes from."""
        if self._acknowledge == "save" and arguments.save_strategy == "no":
            raise ValueError(
                'acknowledge="save": expected a trainer that saves, got save_strategy="no"; set '
                'save_steps, or take acknowledge="version"'
            )
        own = self._own_expected
        self._expected = Expected(
            own.group_size or arguments.num_generations,
            own.completion_tokens or arguments.max_completion_length,
            own.row_tokens or (arguments.token_budget or None),
        )
        if self._consumer is None:
            self._reset()
            self._max_staleness = arguments.max_staleness
        self._has_callback = True
        consumer = self._attached()
        if saved is None or self._offset is not None:
            return
        if not self._rows.load(saved):
            _LOG.warning(
                "bus %r was created after the checkpoint was saved: groups that were on the bus "
                "of that time are not here, and none is recognized",
                self.bus,
            )
            return
        before = saved["policy_version"] - (0 if saved["behind"] else 1)
        consumer.reset_policy_version(max(0, before))

    def _step_ends(self, micro_batches: int) -> None:
        finished = self._account.finished
        self._end(self._account.finish(micro_batches))
        self._behind = True
        if self._account.finished - finished < micro_batches:
            raise RuntimeError(
                f"TRL finished {micro_batches} micro-batches, and its collator has read the "
                f"metrics of {self._account.finished - finished}: this version works in another "
                f"way than the tested one: {versions()}. Nothing of this step is acknowledged; "
                "resume with the tested version"
            )
        if self._acknowledge == "version":
            self._acknowledge_ended()
        self._log_ledger()

    def _save_state(self) -> dict[str, Any] | None:
        """Return what goes into the checkpoint that is being saved."""
        if self._consumer is None:
            return self._left_with
        self._at_save = list(self._to_acknowledge)
        return self._rows.save(
            self.bus, self._consumer.policy_version, self._behind, list(self._open.values())
        )

    def _saved(self) -> None:
        ended, self._at_save = self._at_save, []
        saved = {id(group) for group in ended}
        self._to_acknowledge = [each for each in self._to_acknowledge if id(each) not in saved]
        self._acknowledge_groups(ended)

    def _log_ledger(self) -> None:
        ledger = self._attached().stats()
        found = {"acknowledged": ledger.acknowledged}
        found |= {reason: ledger.dropped.get(reason, 0) for reason in _DROPS}
        self.metrics_queue.put(
            {
                "shmbus/groups_ready": float(ledger.groups_ready),
                **{
                    f"shmbus/{name}_total": float(count - self._logged.get(name, count))
                    for name, count in found.items()
                },
            }
        )
        self._logged = found
