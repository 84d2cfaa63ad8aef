"""Callback that reports the trainer's life to the worker: arguments, steps, saves.

transformers asks a callback with exportable state for the state while writing
``trainer_state.json``, the last file of a checkpoint, and calls `on_save` after the whole write. So
a kill

- during the write leaves no checkpoint: the previous checkpoint counts, and nothing trained since
  then is acknowledged;
- between the file and the acknowledgement leaves a checkpoint with a list of its weights' groups:
  they come again, and are acknowledged without training;
- after the acknowledgement finds the groups acknowledged.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from trainer_adapter.adapters.trl.stack import needed

#: Key of the callback's state in transformers.
CALLBACK_NAME = "ShmbusCallback"


class TrainerArguments(NamedTuple):
    """Arguments of AsyncGRPOConfig relevant for a bus; None for a missing argument."""

    num_generations: int | None
    max_completion_length: int | None
    token_budget: int | None
    max_staleness: int | None
    save_strategy: str


class Told(Protocol):
    """Receiver of the trainer's events."""

    def _train_begins(self, arguments: TrainerArguments, saved: dict[str, Any] | None) -> None: ...
    def _step_ends(self, micro_batches: int) -> None: ...
    def _save_state(self) -> dict[str, Any] | None: ...
    def _saved(self) -> None: ...


def make_callback(worker: Told) -> Any:
    """Make the TrainerCallback of a worker."""
    base, exportable = needed("transformers.trainer_callback", "TrainerCallback", "ExportableState")
    # transformers may recreate a callback from its class alone, so the class refers to the worker.
    members = {"__doc__": _Told.__doc__, "worker": worker, "saved": None}
    return type(CALLBACK_NAME, (_Told, base, exportable), members)()


class _Told:
    """Tells a ShmbusRolloutWorker of the trainer's steps and saves."""

    worker: Told

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
