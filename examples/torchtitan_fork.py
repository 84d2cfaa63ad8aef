"""The data handler of torchtitan's fork for Atropos, with batches of a bus in place of HTTP.

    use_bus(torchtitan.grpo.data_handling, "run1")
    handler = torchtitan.grpo.data_handling.OnlineDataHandler()   # unchanged but for the transport

The handler asks an Atropos server by the module's ``requests``; `use_bus` puts an object there with
answers from the bus. Environments send through `trainer_adapter.adapters.atropos.ShmbusEnv`, or the
gateway. Tested against the interface of NousResearch/torchtitan 26870b6.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from trainer_adapter.adapters.atropos import AtroposTrainer

#: Seconds of a wait for a batch, between two checks for Ctrl-C.
_WAIT_S = 1.0


def use_bus(data_handling: ModuleType, bus: str, **options: Any) -> None:
    """Have the handler of ``torchtitan.grpo.data_handling`` take its batches from a bus.

    `options` go to `AtroposTrainer`.
    """
    missing = [n for n in ("OnlineDataHandler", "requests") if not hasattr(data_handling, n)]
    if missing:
        raise ImportError(f"{data_handling.__name__} has no {', '.join(missing)}: another version")
    vars(data_handling)["requests"] = _BusAnswers(bus, options)


class _BusAnswers:
    """Stand-in for ``requests`` in the handler: a registration, then batches."""

    def __init__(self, bus: str, options: dict[str, Any]) -> None:
        self.bus = bus
        self.options = options
        self.trainer: AtroposTrainer | None = None
        self._content: dict[str, Any] = {}

    def post(self, url: str, json: dict[str, Any]) -> None:
        assert url.endswith("/register"), url
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = AtroposTrainer(self.bus, int(json["batch_size"]), **self.options)

    def get(self, url: str) -> _BusAnswers:
        assert url.endswith("/batch"), url
        if self.trainer is None:
            raise RuntimeError("expected register_atropos first, and it was not called")
        self._content = self.trainer.get_batch(timeout=_WAIT_S)
        return self

    def json(self) -> dict[str, Any]:
        return self._content


if __name__ == "__main__":
    print(__doc__)
