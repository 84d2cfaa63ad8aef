"""The data handler of torchtitan's fork, with batches of a bus in place of an Atropos server's.

Invariant: only the module's ``requests`` is another one; all else of the handler is its own.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

__all__ = ["TESTED", "use_bus"]

#: What the tests ran with. The package's own ``__init__`` imports vLLM; its batcher does not.
TESTED: Final = "torchtitan 0.3.0 (RL batcher), NousResearch/torchtitan 26870b6 by its interface"
#: Seconds of one wait for a batch; between two of them Ctrl-C is seen to.
_LOOK_S: Final = 1.0


def use_bus(data_handling: ModuleType, bus: str, **options: Any) -> None:
    """Have the fork's OnlineDataHandler take its batches from a bus in place of HTTP.

    Its handler asks an Atropos server by the module's ``requests``: this puts an object there that
    answers from the bus, so everything else of the handler is its own. The environments send
    through `trainer_adapter.adapters.atropos.ShmbusEnv`, or the gateway.

    Parameters
    ----------
    data_handling : module
        ``torchtitan.grpo.data_handling`` of NousResearch/torchtitan.
    bus : str
    **options : object
        Of `trainer_adapter.adapters.atropos.AtroposTrainer`.

    Raises
    ------
    ImportError
        The module has no OnlineDataHandler, or no requests.
    """
    missing = [n for n in ("OnlineDataHandler", "requests") if not hasattr(data_handling, n)]
    if missing:
        raise ImportError(
            f"use_bus: expected torchtitan.grpo.data_handling of the fork, got "
            f"{data_handling.__name__} without {', '.join(missing)}; written for {TESTED}"
        )
    vars(data_handling)["requests"] = _BusAnswers(bus, options)


class _BusAnswers:
    """What the handler asks of ``requests``: one registration, and then batches."""

    def __init__(self, bus: str, options: dict[str, Any]) -> None:
        self._bus = bus
        self._options = options
        self._trainer: Any = None

    def post(self, url: str, json: dict[str, Any]) -> None:
        from trainer_adapter.adapters.atropos import AtroposTrainer

        if not url.endswith("/register"):
            raise ValueError(f"use_bus: expected /register, got {url}; {TESTED}")
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = AtroposTrainer(self._bus, int(json["batch_size"]), **self._options)

    def get(self, url: str) -> _Answer:
        if not url.endswith("/batch"):
            raise ValueError(f"use_bus: expected /batch, got {url}; {TESTED}")
        if self._trainer is None:
            raise RuntimeError("use_bus: expected register_atropos first, and it was not called")
        return _Answer(self._trainer.get_batch(timeout=_LOOK_S))


class _Answer:
    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def json(self) -> dict[str, Any]:
        return self._content
