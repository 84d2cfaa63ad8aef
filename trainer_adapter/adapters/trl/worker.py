"""The rollout worker of TRL's AsyncGRPOTrainer: takes groups from a bus in place of making them.

Any processes put groups, started and ended at any time. TRL pulls rows one by one; this worker
supplies the rows of whole groups, in order of completion.

Invariants:

- A group is acknowledged after the training of its last row, not before: a trainer that dies gets
  the remaining groups again.
- TRL's versions begin at 1 in every run. The bus counts on: a number names one set of weights.
- transformers asks a callback with exportable state for the state while writing
  ``trainer_state.json``, the last file of a checkpoint, and calls `on_save` after the whole write.
  So a kill during the write leaves the previous checkpoint, and nothing trained since then is
  acknowledged; a kill before the acknowledgement leaves a checkpoint with a list of its weights'
  groups, which come again and are acknowledged without training.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from functools import partial
from typing import Any, Final, Literal

import shmbus
from shmbus.base.arguments import check_choice
from trainer_adapter.adapters.requested_groups import check_options
from trainer_adapter.adapters.trl.held import HeldGroups, RowMetrics, TrainedRows, open_within
from trainer_adapter.adapters.trl.samples import (
    Advantages,
    Expected,
    TrainerArguments,
    ledger_metrics,
)
from trainer_adapter.adapters.trl.stack import needed

_LOG: Final = logging.getLogger("shmbus.trl")


class RolloutBuffer:
    """TRL's queue of rows, fed by the bus."""

    def __init__(self, worker: ShmbusRolloutWorker) -> None:
        self._worker = worker
        self._ready: deque[Any] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row; takes the next group when the rows of the last are gone."""
        ready = self._ready
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready.extend(self._worker._next_rows(left_s if block else 0.0))
            if not ready and (not block or (left_s is not None and left_s == 0)):
                raise queue.Empty
        sample = ready.popleft()
        self._worker._hand_out(sample)
        return sample

    def get_nowait(self) -> Any:
        """Return the next row, as ``get(block=False)``."""
        return self.get(block=False)

    def put_nowait(self, sample: Any) -> None:
        """Return a row from `get`: it becomes the next row again."""
        if not isinstance(getattr(sample, "metrics", None), RowMetrics):
            raise TypeError(
                f"put_nowait: expected a row that get() gave, got {type(sample).__name__}; put "
                "samples into the bus by shmbus.Producer.put"
            )
        self._ready.appendleft(sample)

    def qsize(self) -> int:
        """Return the number of rows here, without complete groups on the bus."""
        return len(self._ready)

    def empty(self) -> bool:
        """Return True without rows here."""
        return not self._ready


class ShmbusRolloutWorker:
    """Groups of a bus as the rollouts of TRL's AsyncGRPOTrainer.

    Pass it as ``rollout_worker=worker`` and ``callbacks=[worker.callback]``. Every rank makes one;
    the main process's worker attaches when training begins, the remaining workers never attach.

    Samples carry the fields ``tokens``, ``loss_mask`` (1 for sampled tokens) and ``logprobs`` (the
    sampler's), [n] each, the whole sequence; or several such rows after a fork of the conversation.
    A meta may contain ``prompt`` and ``completion`` (messages, for traces), ``rewards`` (by name,
    logged), ``unscorable`` and ``set_advantage_to_zero``.

    Parameters
    ----------
    bus : str
        The bus; it must exist when training begins, or ``wait=`` limits the wait for it.
    advantages : {"grpo", "dr_grpo", "rloo", "none"} or callable
        "grpo" matches TRL's own worker; for the rest see `trainer_adapter.group_advantages`.
    acknowledge : "version" | "save"
        Time of the acknowledgement. "version": after the optimizer step on the last of a group's
        rows. A killed trainer's training after its checkpoint is not repeated. "save": after the
        save of a checkpoint with these weights. Every group is trained once, even by a killed and
        resumed trainer. The bus must hold the groups of a save interval, and the callback is
        required.
    num_generations, max_completion_length, token_budget : int, optional
        As in AsyncGRPOConfig, the callback's source; a group or a sample beyond them is refused.
    refused : "raise" | "drop"
        Treatment of a group unfit for the trainer: ValueError, or a drop counted under
        ``shmbus/refused_total``.
    **consumer_options
        Options of `shmbus.Consumer`. `max_policy_lag` is the trainer's max_staleness by default.

    Attributes
    ----------
    rollout_buffer : RolloutBuffer
    metrics_queue : queue.Queue
        TRL's log values of the bus.
    refused_groups : int
        Groups dropped under ``refused="drop"``.

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
        check_choice("acknowledge", acknowledge, ("version", "save"))
        check_choice("refused", refused, ("raise", "drop"))
        if not callable(advantages):
            check_choice("advantages", advantages, ("grpo", "dr_grpo", "rloo", "none"))
        shared = "TRL's main process takes all rows and shares them out"
        check_options(bus, consumer_options, dict.fromkeys(("rank", "world_size"), shared))
        self.bus: Final = bus
        self.rollout_buffer = RolloutBuffer(self)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.refused_groups = 0
        self._advantages = advantages
        self._acknowledge = acknowledge
        self._refused = refused
        self._options = consumer_options
        own = Expected(num_generations, max_completion_length, token_budget).checked()
        self._own_expected = self._expected = own
        self._callback: Any = None
        # Rows trained into this process's weights, but unacknowledged when it left the bus.
        self._left_with: dict[str, Any] | None = None
        self._sample_type: Any = None
        self._reset()

    def _reset(self) -> None:
        self._consumer: shmbus.Consumer | None = None
        self._held = HeldGroups()
        self._offset: int | None = None
        self._max_staleness: int | None = None
        self._behind = False
        self._last_row_s = time.monotonic()
        self._stall: shmbus.StallReport | None = None
        self._logged: dict[str, int] = {}
        self._has_callback = False

    @property
    def callback(self) -> Any:
        """The TrainerCallback that reports the trainer's steps and saves to this worker.

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
            The callback is required and was not passed to the trainer.
        """
        if self._acknowledge == "save" and not self._has_callback:
            raise RuntimeError(
                'acknowledge="save": the trainer tells of its saves by a callback; pass '
                "callbacks=[worker.callback] to AsyncGRPOTrainer's constructor"
            )
        self._attached()
        self._last_row_s = time.monotonic()

    def stop(self) -> None:
        """Leave the bus. Unacknowledged groups are delivered again, to the next run."""
        self._left_with = self._save_state()
        self.rollout_buffer._ready.clear()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def update_model_version(self, model_version: int) -> None:
        """Publish a new policy version; TRL calls this after sending the weights.

        Parameters
        ----------
        model_version : int
            TRL's number; the bus keeps its own, which continues across restarts.
        """
        consumer = self._attached()
        if self._offset is None:
            # Weights unknown to the bus: a number above every earlier version.
            self._offset = consumer.policy_version - (model_version - 1)
        consumer.policy_version = model_version + self._offset
        self._behind = False
        if not self._has_callback:
            # A step lies between two calls, so batches packed before its start are trained.
            self._held.finish_packed_before()
            self._held.acknowledge(consumer, self._held.take_ended())

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no group came for too long; TRL calls this during its wait.

        Parameters
        ----------
        stale_after_s : float
            Seconds.

        Raises
        ------
        RuntimeError
            The message describes the state of the bus.
        """
        waited_s = time.monotonic() - self._last_row_s
        if waited_s > stale_after_s:
            hint = self._held.hint(at_save=self._acknowledge == "save")
            raise RuntimeError(
                f"bus {self.bus!r}: no complete group for {waited_s:.0f} s, "
                f"heartbeat_stale_after_s is {stale_after_s:.0f}; `shmbus status {self.bus}` shows "
                f"its producers{hint}" + (f"\n{self._stall}" if self._stall is not None else "")
            )

    # -- rows -----------------------------------------------------------------------------------

    def _attached(self) -> shmbus.Consumer:
        if self._consumer is None:
            stalled = partial(setattr, self, "_stall")
            options = {"label": "TRL", "on_stall": stalled, **self._options}
            self._consumer = open_within(self.bus, self._max_staleness, options)
            with shmbus.Bus.open(self.bus) as bus:
                self._held.trained = TrainedRows(bus.created_unix_ns)
            (self._sample_type,) = needed(
                "trl.experimental.async_grpo.async_rollout_worker", "RolloutSample"
            )
        return self._consumer

    def _next_rows(self, timeout_s: float | None) -> list[Any]:
        """Take a group, and return its rows to train; empty without a group."""
        groups = self._attached().take(1, timeout_s)
        if not groups:
            return []
        (group,) = groups
        self._stall = None
        try:
            made, opened = self._held.open(
                group, self._expected, self._advantages, self._sample_type, self._offset or 0
            )
        except ValueError as error:
            if self._refused == "raise":
                raise
            self.refused_groups += 1
            self._attached().drop(group)
            self.metrics_queue.put({"shmbus/refused_total": 1.0})
            _LOG.warning("dropped: %s", error)
            return []
        if not made:
            # Already in a checkpoint's weights, with a lost acknowledgement: acknowledge only.
            self._held.acknowledge(self._attached(), [opened])
        return made

    def _hand_out(self, sample: Any) -> None:
        self._last_row_s = time.monotonic()
        self._held.hand_out(sample.metrics.row)

    # -- calls of the callback ------------------------------------------------------------------

    def _train_begins(self, arguments: TrainerArguments, saved: dict[str, Any] | None) -> None:
        """Attach, and take over the record of the resumed checkpoint."""
        if self._acknowledge == "save" and arguments.save_strategy == "no":
            raise ValueError(
                'acknowledge="save": expected a trainer that saves, got save_strategy="no"; set '
                'save_steps, or take acknowledge="version"'
            )
        self._expected = self._own_expected.or_of(arguments)
        if self._consumer is None:
            self._reset()
            self._max_staleness = arguments.max_staleness
        self._has_callback = True
        consumer = self._attached()
        if saved is None or self._offset is not None:
            return
        if not self._held.trained.load(saved):
            _LOG.warning(
                "bus %r was created after the checkpoint was saved: groups that were on the bus "
                "of that time are not here, and none is recognized",
                self.bus,
            )
            return
        before = saved["policy_version"] - (0 if saved["behind"] else 1)
        consumer.reset_policy_version(max(0, before))

    def _step_ends(self, micro_batches: int) -> None:
        self._behind = True
        self._held.finish_all(micro_batches)
        if self._acknowledge == "version":
            self._held.acknowledge(self._attached(), self._held.take_ended())
        found, self._logged = ledger_metrics(self._attached().stats(), self._logged)
        self.metrics_queue.put(found)

    def _save_state(self) -> dict[str, Any] | None:
        if self._consumer is None:
            return self._left_with
        return self._held.save(self.bus, self._consumer.policy_version, self._behind)

    def _saved(self) -> None:
        self._held.acknowledge(self._attached(), self._held.take_saved())


#: Key of the callback's state in transformers.
CALLBACK_NAME = "ShmbusCallback"


def make_callback(worker: ShmbusRolloutWorker) -> Any:
    """Make the TrainerCallback of a worker."""
    base, exportable = needed("transformers.trainer_callback", "TrainerCallback", "ExportableState")
    # transformers may recreate a callback from its class alone, so the class refers to the worker.
    members = {"__doc__": _Told.__doc__, "worker": worker, "saved": None}
    return type(CALLBACK_NAME, (_Told, base, exportable), members)()


class _Told:
    """Tells a ShmbusRolloutWorker of the trainer's steps and saves."""

    worker: ShmbusRolloutWorker

    def __init__(self) -> None:
        self._micro_batches = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_batches = 0
        # A checkpoint saved without this callback lacks a place for its state.
        filed = state.stateful_callbacks.setdefault(CALLBACK_NAME, self.state())
        if isinstance(filed, list):
            filed = filed[0]
        if not state.is_world_process_zero:
            return
        found = TrainerArguments(
            num_generations=getattr(args, "num_generations", None),
            max_completion_length=getattr(args, "max_completion_length", None),
            token_budget=getattr(args, "token_budget", None),
            max_staleness=getattr(args, "max_staleness", None),
            save_strategy=str(getattr(args.save_strategy, "value", args.save_strategy)),
        )
        self.worker._train_begins(found, filed["attributes"]["saved"])

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        finished, self._micro_batches = self._micro_batches + 1, 0
        if state.is_world_process_zero:
            self.worker._step_ends(finished)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.worker._saved()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.worker._save_state()}}
