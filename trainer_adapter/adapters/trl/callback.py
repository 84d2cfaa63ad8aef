"""What tells the worker of the trainer's life: its arguments, its steps, its saves.

transformers asks a callback that exports its state for it while it writes ``trainer_state.json``,
the last file of a checkpoint, and calls `on_save` when all is written. So a kill

- before that file is whole leaves no checkpoint: the one before counts, and nothing that was
  trained since then is acknowledged;
- between the file and the acknowledgement leaves a checkpoint that says which groups its weights
  have: they come again, and are acknowledged without being trained;
- after that finds them acknowledged.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from trainer_adapter.adapters.trl.stack import needed

#: The name under which transformers files the state of the callback.
CALLBACK_NAME = "ShmbusCallback"


class TrainerArguments(NamedTuple):
    """Those of AsyncGRPOConfig that a bus has to know; None where there is no such argument."""

    num_generations: int | None
    max_completion_length: int | None
    token_budget: int | None
    max_staleness: int | None
    save_strategy: str


class Told(Protocol):
    """What is told."""

    def _train_begins(self, arguments: TrainerArguments, saved: dict[str, Any] | None) -> None: ...
    def _step_ends(self, micro_batches: int) -> None: ...
    def _save_state(self) -> dict[str, Any] | None: ...
    def _saved(self) -> None: ...


def make_callback(worker: Told) -> Any:
    """Make the TrainerCallback of a worker."""
    base, exportable = needed("transformers.trainer_callback", "TrainerCallback", "ExportableState")
    # transformers may make a callback again, by its class alone: so the class knows the worker.
    members = {"__doc__": _Told.__doc__, "worker": worker, "saved": None}
    return type(CALLBACK_NAME, (_Told, base, exportable), members)()


class _Told:
    """Tells a ShmbusRolloutWorker of the trainer's steps and saves."""

    worker: Told

    def __init__(self) -> None:
        self._micro_batches = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_batches = 0
        # A checkpoint that was saved without this callback has no place for its state.
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
