"""verl v1's agent-loop manager over a bus: prompts become requests for any worker.

A class for ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``, beside the sampler of this
package. Its workers are any processes that take requests from the bus.

Invariants:

- A prompt is offered once per submission by verl, under verl's own uid.
- `generate_sequences` never waits: a thread offers prompts beyond the lane's room.
- The data set's values of a prompt stay here, and join its trajectories in the sampler.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any, Final

import shmbus
from trainer_adapter.adapters.optional_imports import BUS_VARIABLE, Stack
from trainer_adapter.adapters.requested_groups import columns_for

_VERL: Final = Stack("verl", {"verl": "0.9.1"}, "verl[verl-core]==0.9.1")
needed = _VERL.needed


_LOG: Final = logging.getLogger("shmbus.verl")
#: Seconds of one attempt to offer a prompt; `close` takes effect between two attempts.
_OFFER_S: Final = 1.0
#: Data set values for the trajectories of a prompt, by uid; the sampler takes them out.
PROMPTS: Final[dict[str, dict[str, Any]]] = {}
#: Prompts already on the bus.
OFFERED: Final[set[str]] = set()
#: verl's limits of tokens, by their names in its configuration. The sampler gets no configuration.
LIMITS: Final[dict[str, int]] = {}
#: verl's names of a worker's sampling arguments.
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "do_sample", "repetition_penalty", "response_length",
)  # fmt: skip

(kv_put,) = needed("transfer_queue", "kv_put")


def bus_of(sampler_kwargs: Mapping[str, Any]) -> str:
    """Return the name of the bus in verl's configuration, or else in the environment."""
    bus = sampler_kwargs.get("bus") or os.environ.get(BUS_VARIABLE)
    if not bus:
        raise ValueError(
            "sampler_kwargs: expected bus, the name of a bus, got none; set "
            f"trainer.v1.sampler.sampler_kwargs.bus, or the variable {BUS_VARIABLE}"
        )
    return str(bus)


class ShmbusAgentLoopManager:
    """Offers verl's prompts to the workers of a bus.

    Parameters
    ----------
    config : DictConfig
        verl's. The bus is ``trainer.v1.sampler.sampler_kwargs.bus``, or the variable SHMBUS_BUS.
    """

    def __init__(self, config: Any) -> None:
        bus = bus_of(config.trainer.v1.sampler.get("sampler_kwargs", None) or {})
        self._rollout = config.actor_rollout_ref.rollout
        LIMITS.clear()
        for name in ("prompt_length", "response_length"):
            if self._rollout.get(name) is not None:
                LIMITS[name] = int(self._rollout[name])
        self._bus = shmbus.Bus.open(bus)
        self._feeder = shmbus.Feeder(bus)
        self._waiting: queue.SimpleQueue[tuple[dict[str, Any], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._offer_all, name="shmbus-verl", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, config: Any, **handles: Any) -> ShmbusAgentLoopManager:
        """Make one; workers of a bus use their own inference and reward handles."""
        return cls(config)

    def generate_sequences(self, prompts: Any) -> None:
        """Have a batch of verl's data set sampled; its trajectories come by the sampler."""
        # Like the sampler, before a worker gets a prompt: the worker may ask for the current
        # version.
        steps = int(_value(prompts, "global_steps", 0)) if "global_steps" in prompts else 0
        if steps - 1 > self._bus.policy_version:
            self._bus.policy_version = steps - 1
        validate = bool(_value(prompts, "validate", 0)) if "validate" in prompts else False
        for place in range(len(prompts)):
            prompt = {str(name): _value(prompts, name, place) for name in list(prompts.keys())}
            self._waiting.put((prompt, validate))

    def close(self) -> None:
        """End; prompts not yet offered never will be."""
        self._waiting.put(None)
        self._feeder.close()
        self._thread.join()
        self._bus.close()

    def _offer_all(self) -> None:
        while (given := self._waiting.get()) is not None:
            prompt, validate = given
            uid = str(prompt["uid"])
            partition = "val" if validate else "train"
            try:
                # First: a worker may answer before anything else is said of the prompt.
                kv_put(key=uid, partition_id=partition, tag={"status": "running"})
                self._offer(uid, prompt, validate)
                OFFERED.add(uid)
            except shmbus.BusClosedError:
                return
            except Exception:
                # As verl's own workers: the prompt failed, and the trainer goes on.
                _LOG.exception("prompt %s could not be offered", uid)
                PROMPTS.pop(uid, None)
                kv_put(key=uid, partition_id=partition, tag={"status": "failure"})

    def _offer(self, uid: str, prompt: dict[str, Any], validate: bool) -> None:
        config = self._rollout
        sampling = config.val_kwargs if validate else config
        size = int(prompt.get("__rollout_n__", sampling.n))
        PROMPTS[uid] = {
            name: value for name, value in prompt.items()
            if name not in ("uid", "validate", "global_steps") and not name.startswith("__")
        }  # fmt: skip
        meta = {
            "sampling": {
                # An evaluation overrides these, and keeps the rest of the training's.
                name: value
                for name in _SAMPLING
                if (value := sampling.get(name, config.get(name))) is not None
            },
            "global_steps": prompt.get("global_steps"),
        }
        columns = {name: value for name, value in PROMPTS[uid].items() if name != "index"}
        meta |= columns_for("verl", columns, meta)
        while True:
            try:
                self._feeder.request(
                    uid, group_size=size, split="eval" if validate else "train", meta=meta,
                    timeout=_OFFER_S,
                )  # fmt: skip
                return
            except shmbus.BusFullError:
                continue


def _value(batch: Any, name: Any, place: int) -> Any:
    """Return one prompt's value of a column, as a plain value if possible."""
    column = batch.get(name)
    kind = type(column).__name__
    if kind == "NonTensorData":
        return column.data
    value = column[place]
    return value.data if type(value).__name__ == "NonTensorData" else value
